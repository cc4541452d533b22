"""Compares a sharded model with the unsharded one, site by site: two runs, whose hooks are
read-only or edit as the user's do, and are removed afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flex_model.distributed import values
from flex_model.distributed.header import Header
from flex_model.errors import ReplicasDifferError
from flex_model.hooks.core import HookCore
from flex_model.inspection import text
from flex_model.inspection.second_core import (
    Found,
    Loss,
    Reference,
    Site,
    full_inputs,
    run_reference,
    run_sharded,
    sites_to_compare,
    sites_to_edit,
)

# The results of comparing a site.
EQUAL, DIFFERS, SHAPES, CALLS, NOT_IN_REFERENCE, NOT_REACHED, NOT_RESOLVED, REFUTED = range(8)
_WORDS = (
    "equal",
    "differs",
    "has another shape than in the reference",
    "is called a different number of times than in the reference",
    "is not in the reference",
    "has no tensor in this run",
    "its layout was not resolved: hook it to see the error",
    "ranks differ where they should hold one tensor: hook it to see the error",
)


@dataclass(frozen=True)
class SiteDifference:
    """The comparison of one site with the reference.

    Attributes:
        name, kind, unpack_idx: As in ``SiteLayout``.
        result: ``EQUAL``, ``DIFFERS`` or another constant of ``flex_model.inspection.verify``.
        max_abs: The largest absolute difference over all calls.
        max_relative: The same, divided by the reference's largest absolute value.
        call: The call with the largest difference, counted from 0.
    """

    name: str
    kind: str
    unpack_idx: int | str
    result: int
    max_abs: float = 0.0
    max_relative: float = 0.0
    call: int = 0

    @property
    def differs(self) -> bool:
        """Whether both models have the site, but with different values, shapes or call counts; or
        the ranks with different values where they should hold one tensor.
        """
        return self.result in (DIFFERS, SHAPES, CALLS, REFUTED)

    def __str__(self) -> str:
        site = f"{self.kind} of {text.site(self.name, self.unpack_idx)}"
        if self.result not in (EQUAL, DIFFERS):
            return f"{site} {_WORDS[self.result]}"
        return (
            f"{site} {_WORDS[self.result]}: largest difference {self.max_abs:.3g}, relative to the "
            f"largest value {self.max_relative:.3g}, in call {self.call}"
        )


@dataclass(frozen=True)
class VerifyReport(text.Printed):
    """The compared sites, in the reference's order of execution. The same on every rank."""

    rows: tuple[SiteDifference, ...]

    @property
    def is_equal(self) -> bool:
        """Whether no site differs."""
        return self.first_difference is None

    @property
    def first_difference(self) -> SiteDifference | None:
        """The first site, in the order of execution, that differs."""
        return next((row for row in self.rows if row.differs), None)

    def _blocks(self) -> Iterator[text.Table | str]:
        first = self.first_difference
        count = sum(row.result == EQUAL for row in self.rows)
        summary = f"{count} of {len(self.rows)} sites are equal"
        if first is not None:
            summary += f"; the first that differs: {first}"
        cells = [
            [
                text.site(row.name, row.unpack_idx),
                row.kind,
                f"{row.max_abs:.3g}" if row.result in (EQUAL, DIFFERS) else "",
                f"{row.max_relative:.3g}" if row.result in (EQUAL, DIFFERS) else "",
                _WORDS[row.result],
            ]
            for row in self.rows
        ]
        yield text.Table(["site", "kind", "max abs", "max relative", ""], cells)
        yield summary


def verify(
    core: HookCore,
    reference: Reference,
    args: Any,
    kwargs: Any,
    loss: Loss | None,
    rtol: float | None,
    atol: float,
    timeout_s: float,
    edits: bool,
) -> VerifyReport:
    """Run ``FlexModel.verify``. Collective over the mesh."""
    _check_arguments(loss, rtol=rtol, atol=atol, reference_timeout=timeout_s)
    if core.runs.is_inside:
        raise RuntimeError("verify: a run of this FlexModel is under way; call it before or after")
    communicator, mesh = core.communicator, core.mesh
    choose = sites_to_edit if edits else sites_to_compare
    sites = choose(core, with_loss=loss is not None)
    inputs = full_inputs(core, args, kwargs)

    expected: Found = {}
    flags = torch.zeros(len(sites), 2, dtype=torch.int64)
    with communicator.deadline(timeout_s):
        if mesh.group_rank == 0:
            try:
                expected, has_site = run_reference(core, reference, sites, inputs, loss, edits)
                flags = _flags(expected, has_site)
            except Exception as error:
                if communicator.is_local:
                    raise
                communicator.fail(f"verify: the reference failed: {error}", error)
        if not communicator.is_local:
            communicator.check_consistency(
                Header("inputs"), "verify, after the reference has run on rank 0"
            )
        flags = communicator.exchange(flags)[0]

    reached = [i for i in range(len(sites)) if flags[i, 0] == EQUAL]
    found, unresolved = run_sharded(core, sites, reached, (args, kwargs), loss, edits)
    table = torch.zeros(len(sites), 4, dtype=torch.float64)
    if mesh.group_rank == 0:
        for i, row in enumerate(table):
            result = _of_error(unresolved[i]) if i in unresolved else int(flags[i, 0])
            row[0] = result
            if result == EQUAL:
                row[:] = _compare(found.get(str(i), []), expected[str(i)], rtol, atol)
    table = communicator.exchange(table)[0]
    order = sorted(range(len(sites)), key=lambda i: (flags[i, 0] != EQUAL, int(flags[i, 1]), i))
    rows = [_difference(sites[i], table[i].tolist()) for i in order]
    if not core.table.registrations:  # containers are not called
        rows = [row for row in rows if row.result != NOT_REACHED]
    return VerifyReport(tuple(rows))


def _check_arguments(loss: object, **numbers: object) -> None:
    """Check the arguments on every rank, since only rank 0 uses them in the comparison."""
    if loss is not None and not callable(loss):
        raise TypeError(f"verify: loss must be a function of the output or None, got {loss!r}")
    for name, value in numbers.items():
        if name == "rtol" and value is None:
            continue
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value >= 0:
            raise ValueError(f"verify: {name} must be a number of at least 0, got {value!r}")


def _of_error(error: Exception) -> int:
    return REFUTED if isinstance(error, ReplicasDifferError) else NOT_RESOLVED


def _flags(expected: Found, has_site: Sequence[bool]) -> Tensor:
    """Return a row (result so far, position in the reference's order) for each site."""
    flags = torch.zeros(len(has_site), 2, dtype=torch.int64)
    for i, is_site in enumerate(has_site):
        flags[i, 0] = NOT_REACHED if is_site else NOT_IN_REFERENCE
    for position, key in enumerate(expected):
        flags[int(key)] = torch.tensor([EQUAL, position])
    return flags


def _difference(site: Site, row: Sequence[float]) -> SiteDifference:
    result, max_abs, relative, call = row
    return SiteDifference(
        site.name, site.kind, site.unpack_idx, int(result), max_abs, relative, int(call)
    )


def _compare(
    found: Sequence[Tensor], expected: Sequence[Tensor], rtol: float | None, atol: float
) -> Tensor:
    """Return (result, largest absolute difference, relative difference, call with the largest)."""
    row = torch.zeros(4, dtype=torch.float64)
    row[0] = EQUAL
    if len(found) != len(expected):
        row[0] = CALLS
        return row
    for call, (ours, theirs) in enumerate(zip(found, expected)):
        if ours.shape != theirs.shape:
            row[0], row[3] = SHAPES, call
            return row
        if not theirs.numel():
            continue
        largest, scale = values.difference(ours, theirs)
        allowed = atol + (values.tolerance(ours, theirs) if rtol is None else rtol) * scale
        if largest > allowed:
            row[0] = DIFFERS
        if largest >= row[1].item():
            row[1], row[3] = largest, call
            row[2] = largest / scale if scale else largest and torch.inf
    return row

"""Compares a sharded model with the unsharded one, site by site: two runs, whose hooks are
read-only or edit as the user's do, and are removed afterwards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flex_model.distributed import values
from flex_model.distributed.tensor_dicts import exchange_json
from flex_model.errors import ReplicasDifferError, text_of
from flex_model.hooks.core import HookCore
from flex_model.inspection import text
from flex_model.inspection.second_core import (
    Found,
    Loss,
    Reference,
    TwoRuns,
    check_backward,
    full_inputs,
    sites_to_compare,
    sites_to_edit,
)

# The results of comparing a site.
EQUAL = "equal"
DIFFERS = "differs"
SHAPES = "has another shape than in the reference"
CALLS = "is called a different number of times than in the reference"
NOT_IN_REFERENCE = "is not in the reference"
NOT_REACHED = "has no tensor in this run"
NOT_RESOLVED = "its layout was not resolved: hook it to see the error"
REFUTED = "ranks differ where they should hold one tensor: hook it to see the error"


@dataclass(frozen=True)
class SiteDifference(text.SiteRow):
    """The comparison of one site with the reference.

    Attributes:
        name, kind, unpack_idx: As in ``SiteLayout``.
        result: ``EQUAL``, ``DIFFERS`` or another constant of ``flex_model.inspection.verify``.
        max_abs: The largest absolute difference over all calls.
        max_relative: The same, divided by the reference's largest absolute value.
        call: The call with the largest difference, counted from 0.
    """

    result: str
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
        result = f"{self.kind} of {self.site} {self.result}"
        if self.result not in (EQUAL, DIFFERS):
            return result
        return (
            f"{result}: largest difference {self.max_abs:.3g}, relative to the "
            f"largest value {self.max_relative:.3g}, in call {self.call}"
        )


@dataclass(frozen=True)
class VerifyReport(text.Printed):
    """The compared sites, in the reference's order of execution. The same on every rank.

    Attributes:
        is_of_hooks: Whether the sites are those of hooks, rather than all modules.
    """

    rows: tuple[SiteDifference, ...]
    is_of_hooks: bool

    @property
    def is_equal(self) -> bool:
        """Whether a site was compared, none differs, and every hooked one is in the reference and
        has a known layout.
        """
        is_any_equal = any(row.result == EQUAL for row in self.rows)
        return is_any_equal and self.first_difference is None and not self._not_compared

    @property
    def first_difference(self) -> SiteDifference | None:
        """The first site, in the order of execution, that differs."""
        return next((row for row in self.rows if row.differs), None)

    @property
    def _not_compared(self) -> tuple[SiteDifference, ...]:
        """The hooked sites that should have been compared."""
        rows = self.rows if self.is_of_hooks else ()
        return tuple(row for row in rows if row.result in (NOT_IN_REFERENCE, NOT_RESOLVED))

    def _blocks(self) -> Iterator[text.Table | str]:
        first = self.first_difference
        count = sum(row.result == EQUAL for row in self.rows)
        summary = f"{count} of {len(self.rows)} sites are equal"
        if first is not None:
            summary += f"; the first that differs: {first}"
        elif not self.is_equal:
            some = ", ".join(map(str, (self._not_compared or self.rows)[:3]))
            summary += f"; not compared: {some}; hook modules that both models have and call"
        cells = [
            [
                row.site,
                row.kind,
                f"{row.max_abs:.3g}" if row.result in (EQUAL, DIFFERS) else "",
                f"{row.max_relative:.3g}" if row.result in (EQUAL, DIFFERS) else "",
                row.result,
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
    if loss is not None:
        check_backward(core, "verify")
    communicator, mesh = core.communicator, core.mesh
    choose = sites_to_edit if edits else sites_to_compare
    sites = choose(core, with_loss=loss is not None)
    is_of_hooks = edits or any(r.kind != "tensor" for r in core.table.registrations)
    runs = TwoRuns(core, sites, loss, edits)
    inputs = full_inputs(core, args, kwargs)

    expected: Found = {}
    has_site: list[bool] = []
    with communicator.deadline(timeout_s):
        if mesh.group_rank == 0:
            try:
                expected, has_site = runs.of_reference(reference, inputs)
            except Exception as error:
                if communicator.is_local:
                    raise
                communicator.fail(f"verify: the reference failed: {text_of(error)}", error)
        moment = "verify, after the reference has run on rank 0"
        ran = [list(map(int, expected)), has_site]
        of_reference, has_site = exchange_json(communicator, ran, moment)[0]

    found, unresolved = runs.of_shards([i for i, has in enumerate(has_site) if has], (args, kwargs))

    # The scores of a float32 router are as far apart as the bfloat16 activations before it.
    before = itertools.accumulate((values.tolerance(*one) for one in expected.values()), max)
    coarsest = dict(zip(expected, before))

    def result_of(i: int) -> list[Any]:
        if not has_site[i]:
            return [NOT_IN_REFERENCE]
        ours, given = found.get(str(i), []), expected.get(str(i), [])
        if not given:
            return [CALLS if ours else NOT_REACHED]
        if i in unresolved:
            is_refuted = isinstance(unresolved[i], ReplicasDifferError)
            return [REFUTED if is_refuted else NOT_RESOLVED]
        return _compare(ours, given, rtol, atol, coarsest[str(i)])

    results = [result_of(i) for i in range(len(sites))] if mesh.group_rank == 0 else []
    results = exchange_json(communicator, results, "the end of verify")[0]
    order = [*of_reference, *(i for i in range(len(sites)) if i not in of_reference)]
    rows = [
        SiteDifference(sites[i].name, sites[i].kind, sites[i].unpack_idx, *results[i])
        for i in order
    ]
    if not is_of_hooks:  # containers are not called
        rows = [row for row in rows if row.result != NOT_REACHED]
    return VerifyReport(tuple(rows), is_of_hooks)


def _check_arguments(loss: object, **numbers: object) -> None:
    """Check the arguments on every rank, since only rank 0 uses them in the comparison."""
    if loss is not None and not callable(loss):
        raise TypeError(f"verify: loss must be a function of the output or None, got {loss!r}")
    for name, value in numbers.items():
        if name == "rtol" and value is None:
            continue
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value >= 0:
            raise ValueError(f"verify: {name} must be a number of at least 0, got {value!r}")


def _compare(
    found: Sequence[Tensor],
    expected: Sequence[Tensor],
    rtol: float | None,
    atol: float,
    coarsest: float,
) -> list[Any]:
    """Return the result, the largest absolute difference, its relative one, and its call.

    Args:
        coarsest: The largest tolerance of the sites up to this one.
    """
    if len(found) != len(expected):
        return [CALLS]
    result, most, relative, at = EQUAL, 0.0, 0.0, 0
    for call, (ours, theirs) in enumerate(zip(found, expected)):
        if ours.shape != theirs.shape:
            return [SHAPES, most, relative, call]
        if not theirs.numel():
            continue
        largest, scale = values.difference(ours, theirs)
        tolerance = values.tolerance(ours, theirs)
        tolerance = tolerance and max(tolerance, coarsest)  # integers are exact
        if largest > atol + (tolerance if rtol is None else rtol) * scale:
            result = DIFFERS
        if largest >= most:
            most, relative, at = largest, largest / scale if scale else largest and math.inf, call
    return [result, most, relative, at]

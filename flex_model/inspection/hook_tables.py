"""The tables of registered hooks: their layouts, and what each cost in the last run, counted while
it ran, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flex_model.distributed.costs import Spent
from flex_model.distributed.placement import Shape, ShardLayout
from flex_model.hooks.registration import Registration
from flex_model.inspection import text

if TYPE_CHECKING:
    from flex_model.hooks.core import HookCore

NOT_RUN = "not run yet"
_ON_RANK_0 = "known from its record, on rank 0"
_ONE_PROCESS = ShardLayout(source="one process")


@dataclass(frozen=True)
class SiteLayout(text.SiteRow):
    """One registered hook and the layout of its tensor.

    Attributes:
        name: The module's or parameter's name, as the user gave it.
        kind: ``"forward"``, ``"forward_pre"``, ``"full_backward"``, ``"full_backward_pre"`` or
            ``"tensor"``.
        unpack_idx: The index of the tensor at the site.
        full_shape: The shape of the tensor that the hook sees; None before it ran.
        local_shapes: The local shapes of all ranks of the mesh, in the order (dp, tp), tp fastest.
        dtype: None before it ran.
        layout: None before it ran.
        source: The evidence for the layout, or the reason why it is not known.
        proof: The operations that prove the placements, in order, by axis; empty without
            ``why=True``, and for a layout that a DTensor or the user states.
        num_shapes: The number of different shapes (and dtypes) so far; the other attributes are
            those of the newest one.
    """

    full_shape: Shape | None = None
    local_shapes: tuple[Shape, ...] = ()
    dtype: torch.dtype | None = None
    layout: ShardLayout | None = None
    source: str = NOT_RUN
    num_shapes: int = 0
    proof: Mapping[str, Sequence[str]] = field(default_factory=dict)


class Layouts(list[SiteLayout], text.Printed):
    """A list of ``SiteLayout`` that prints as a table."""

    def _blocks(self) -> Iterator[text.Table | str]:
        if not self:
            yield "no hooks are registered"
            return
        headers = ("site", "kind", "full shape", "local shapes", "dtype", "layout", "source")
        yield text.Table(headers, [self._row(row) for row in self])
        for row in self:
            for axis, steps in row.proof.items():
                yield "\n  ".join([f"{row.site}, {row.kind}, along {axis}:", *steps])

    @staticmethod
    def _row(row: SiteLayout) -> list[str]:
        is_known = row.full_shape is not None
        more = f" (last of {row.num_shapes})" if row.num_shapes > 1 else ""
        return [
            row.site,
            row.kind,
            text.shape(row.full_shape) + more if is_known else "",
            text.shapes(row.local_shapes) if is_known else "",
            str(row.dtype).removeprefix("torch.") if is_known else "",
            str(row.layout) if row.layout is not None else "",
            row.source,
        ]


def layouts(core: HookCore, records: Mapping[str, list[Tensor]], why: bool = False) -> Layouts:
    """Return the layouts of a FlexModel's hooks, given this rank's records. Local, and the same on
    every rank, except that a rank of a pipeline has only the layouts of its own stages.

    Args:
        why: Whether to add the proofs of the last followed forward.
    """
    rows = [_layout_of(core, registration, records) for registration in core.table.registrations]
    if why:
        proofs = [core.tracking.proof(registration) for registration in core.table.registrations]
        rows = [replace(row, proof=proof) for row, proof in zip(rows, proofs)]
    return Layouts(rows)


def _layout_of(
    core: HookCore, registration: Registration, records_by_name: Mapping[str, list[Tensor]]
) -> SiteLayout:
    place = (registration.name, registration.kind, registration.hook_function.unpack_idx)
    if registration.specs:
        (_, shapes, dtype, *_), spec = list(registration.specs.items())[-1]
        distinct = {(shapes, dtype) for _, shapes, dtype, *_ in registration.specs}
        return SiteLayout(
            *place,
            spec.full_shape,
            tuple(shapes),
            dtype,
            spec.layout,
            spec.layout.source,
            len(distinct),
        )
    if not core.communicator.is_local:
        return SiteLayout(*place, source=NOT_RUN)
    # One process, on which nothing is sharded: the shapes are the records'.
    name = registration.hook_function.record_name
    records: Any = records_by_name.get(name)
    if not records and core.runs.session is not None:
        records = core.runs.session.layouts.get(name)
    if registration.hook_function.record and not records:
        is_first = core.mesh.rank == 0
        return SiteLayout(*place, source=NOT_RUN if is_first else _ON_RANK_0)
    functions = [r.hook_function for r in core.table.registrations]
    if {f.unpack_idx for f in functions if f.record and f.record_name == name} != {place[-1]}:
        source = "one process, without records of this tensor alone"
        return SiteLayout(*place, layout=_ONE_PROCESS, source=source)
    num_shapes = len({(tuple(record.shape), record.dtype) for record in records})
    shape, dtype = tuple(records[-1].shape), records[-1].dtype
    return SiteLayout(*place, shape, (shape,), dtype, _ONE_PROCESS, _ONE_PROCESS.source, num_shapes)


# ---- Costs ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HookCost(text.SiteRow):
    """The cost of one hook, or the cost shared by all hooks (named ``"(all hooks)"``).

    Attributes:
        name, kind, unpack_idx: As in ``SiteLayout``.
        transport: The transport of its tensors; empty if nothing was moved.
        headers: The number of 64-byte exchanges, each among all ranks of the model.
        collectives: The number of collectives that moved tensors of this hook alone.
        bytes_moved: The bytes that this rank sent and received.
        why: The reason for the cost.
    """

    transport: str
    headers: int
    collectives: int
    bytes_moved: int
    why: str


class Explanation(list[HookCost], text.Printed):
    """A list of ``HookCost`` that prints as a table.

    Attributes:
        transports: For each group of ranks in use, by its mesh axes: the transport and the reason
            for choosing it.
    """

    def __init__(self, rows: Iterable[HookCost], transports: dict[str, tuple[str, str]]) -> None:
        super().__init__(rows)
        self.transports = transports

    @property
    def bytes_moved(self) -> int:
        """The bytes that this rank moved for all hooks."""
        return sum(row.bytes_moved for row in self)

    def _blocks(self) -> Iterator[text.Table | str]:
        if not self:
            yield "no hooks are registered"
            return
        headers = ("site", "kind", "transport", "headers", "collectives", "bytes moved", "why")
        yield text.Table(headers, [self._row(row) for row in self])
        for axes, (name, why) in self.transports.items():
            yield f"ranks along {axes}: {name}, because {why}"

    @staticmethod
    def _row(row: HookCost) -> list[str]:
        return [
            row.site,
            row.kind,
            row.transport,
            str(row.headers),
            str(row.collectives),
            text.size(row.bytes_moved),
            row.why,
        ]


def explain(core: HookCore) -> Explanation:
    """Return the costs of all hooks. Local; bytes are this rank's."""
    communicator = core.communicator
    spent, rows = {**communicator.meter.spent}, []
    for registration in core.table.registrations:
        place = registration.name, registration.kind, registration.hook_function.unpack_idx
        own = spent.pop(registration.site, Spent())
        rows.append(_row(place, own, _why(registration, own, core)))
    if spent:
        why = (
            "one header when a forward begins, one when the run ends, with all records; more for "
            "new hooks or inputs"
        )
        total = Spent()
        for one in spent.values():
            total.add(one.headers, one.payloads, one.num_bytes, *one.transports)
        rows.append(_row(("(all hooks)", "", 0), total, why))
    return Explanation(rows, communicator.transports())


def _row(place: tuple[str, str, int | str], spent: Spent, why: str) -> HookCost:
    transports = ", ".join(sorted(spent.transports))
    return HookCost(*place, transports, spent.headers, spent.payloads, spent.num_bytes, why)


def _why(registration: Registration, spent: Spent, core: HookCore) -> str:
    has_calls = registration.kind in ("forward", "forward_pre") and registration.places
    if has_calls and core.runs.number and not registration.was_called(core.runs.number):
        return "not called in the last run"
    if core.communicator.is_local:
        return "one rank: the tensor is whole"
    if not registration.specs:
        return "not called yet"
    layout = list(registration.specs.values())[-1].layout
    where = f"{layout}, {layout.source}" if layout.source else str(layout)
    if not spent.headers and not spent.num_bytes:
        if registration.edits:
            return f"not called in the last run ({where})"
        if core.records.keeps_parts:
            return f"read-only: each rank stores its own shard ({where})"
        return f"read-only: nothing to move from this rank ({where})"
    if not registration.edits and core.records.keeps_parts:
        return f"read-only: summed, then each rank stores its own shard ({where})"
    if not registration.edits:
        return f"read-only: sent to rank 0 when the run ends ({where})"
    if not spent.payloads:
        return f"every rank has the whole tensor: only a header ({where})"
    place = "every rank" if core.executor.edits_on_all else "rank 0"
    return f"edited on {place} ({where})"

"""The table of registered hooks and their layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

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
    core: HookCore, registration: Registration, records: Mapping[str, list[Tensor]]
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
    if core.communicator.is_local:
        return _on_one_process(core, registration, records, place)
    return SiteLayout(*place, source=NOT_RUN)


def _on_one_process(
    core: HookCore,
    registration: Registration,
    records_by_name: Mapping[str, list[Tensor]],
    place: tuple[str, str, int | str],
) -> SiteLayout:
    """Return the layout on one process, where nothing is sharded: the shapes are the records'."""
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

"""What a run would do at each hook, found by running the model on shapes alone."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from flex_model.distributed.costs import Cost
from flex_model.distributed.placement import Shape, Shard, ShardLayout
from flex_model.errors import HookError, agreed
from flex_model.hooks.hook_call import HookCall
from flex_model.hooks.registration import Registration
from flex_model.inspection import text
from flex_model.inspection.call_costs import CallCosts, HookedTensor, is_of_gradient
from flex_model.inspection.edit_checks import (
    ERROR,
    NOT_CHECKED,
    WARNING,
    FakeInput,
    Finding,
    check_edits,
)
from flex_model.inspection.shapes_only import Look, Seen, layout_from_shapes, on_shapes, run_watched
from flex_model.integrations import dtensor
from flex_model.layouts.follow import Follower
from flex_model.names import find_parameter
from flex_model.runs.run import Run

if TYPE_CHECKING:
    from flex_model.hooks.core import HookCore

_MOST_RANKS = 8  # that are listed one by one


@dataclass(frozen=True)
class DryRunRow(text.SiteRow):
    """One hook and the calls of it that meet tensors of one shape.

    Attributes:
        name, kind, unpack_idx: As in ``SiteLayout``.
        edits: Whether it has an editing function.
        calls: How many calls there would be; 0 if the forward does not get there.
        full_shape, local_shapes, dtype: As in ``SiteLayout``.
        layout: None where a run would raise an error, or does not get there: see ``source``.
        source: What the layout is known from, or why it is not.
        owners: Global ranks whose parts together are rank 0's full tensor.
        forward, backward: What its calls cost, without what all hooks share.
        findings: What is wrong with its editing function; of all its rows together.
    """

    edits: bool
    calls: int = 0
    full_shape: Shape | None = None
    local_shapes: tuple[Shape, ...] = ()
    dtype: torch.dtype | None = None
    layout: ShardLayout | None = None
    source: str = "this forward does not get there"
    owners: tuple[int, ...] = ()
    forward: Cost = field(default_factory=Cost)
    backward: Cost = field(default_factory=Cost)
    findings: tuple[Finding, ...] = ()

    @property
    def full_bytes(self) -> int:
        """The bytes of the tensor in full, or of the part that is selected."""
        return _num_bytes(self.full_shape, self.dtype)

    @property
    def kept_bytes(self) -> int:
        """The most bytes of shards, or of what is selected of them, that one rank keeps for records
        until the run ends.
        """
        of_shard = max((_num_bytes(shape, self.dtype) for shape in self.local_shapes), default=0)
        return 0 if self.edits else self.calls * min(of_shard, self.full_bytes)

    def with_calls(self, other: DryRunRow) -> DryRunRow:
        """Return this row with the calls of another one, which meet tensors of the same shape."""
        return replace(
            self,
            calls=self.calls + other.calls,
            forward=self.forward + other.forward,
            backward=self.backward + other.backward,
        )


class DryRun(list[DryRunRow], text.Printed):
    """A list of ``DryRunRow`` that prints as a table.

    Attributes:
        forward, backward: Of all hooks together, with what they share: one header at the end, and
            one message with all records that wait for it.
        findings: What is wrong with the editing functions, hook by hook, or was not checked.
    """

    def __init__(
        self,
        rows: Iterable[DryRunRow],
        forward: Cost,
        backward: Cost,
        findings: list[Finding] | None = None,
    ) -> None:
        super().__init__(rows)
        self.forward, self.backward = forward, backward
        self.findings = findings or []
        self._has_checked = findings is not None  # else functions were not looked at

    @property
    def edited_bytes(self) -> int:
        """The most bytes that each rank holds while a function edits a tensor: it in full, and the
        result, unless that is made in place.
        """
        return max((2 * row.full_bytes for row in self if row.edits), default=0)

    @property
    def kept_bytes(self) -> int:
        """The bytes of shards that one rank keeps for read-only hooks until the run ends."""
        return sum(row.kept_bytes for row in self)

    def raise_if_wrong(self, *, warnings: bool = False) -> None:
        """HookError with all errors that were found in editing functions; with ``warnings``, with
        those too. Every rank raises the same error; what was not checked raises none.
        """
        levels = (ERROR, WARNING) if warnings else (ERROR,)
        wrong = [finding for finding in self.findings if finding.level in levels]
        if wrong:
            lines = "\n".join(map(str, wrong))
            raise agreed(HookError(f"dry_run: {len(wrong)} problems in editing functions\n{lines}"))

    def _blocks(self) -> Iterator[text.Table | str]:
        if not self:
            yield "no hooks are registered"
            return
        headers = ("site", "kind", "calls", "full shape", "dtype", "layout", "owners", "forward")
        yield text.Table([*headers, "backward", "source"], [self._row(row) for row in self])
        yield "costs: headers (64 bytes) + payload collectives, bytes that the busiest rank moves"
        kept = self.forward.record_bytes + self.backward.record_bytes
        yield (
            f"all hooks: forward {_text_of(self.forward)}; backward {_text_of(self.backward)}; "
            f"records of {text.size(kept)}"
        )
        yield (
            f"memory: {text.size(self.edited_bytes)} on each rank while a function edits, and "
            f"{text.size(self.kept_bytes)} of shards until the run ends"
        )
        if self._has_checked and any(row.edits for row in self):
            yield self._checks()
        yield from map(str, self.findings)

    def _checks(self) -> str:
        if not self.findings:
            return "editing functions: nothing found"
        levels = [finding.level for finding in self.findings]
        counts = [f"{levels.count(level)} {level}" for level in (ERROR, WARNING, NOT_CHECKED)]
        return f"editing functions: {', '.join(counts)}"

    @staticmethod
    def _row(row: DryRunRow) -> list[str]:
        return [
            row.site,
            row.kind + (", edits" if row.edits else ""),
            str(row.calls),
            text.shape(row.full_shape) if row.calls else "",
            str(row.dtype).removeprefix("torch.") if row.calls else "",
            str(row.layout or ""),
            _text_of_ranks(row.owners),
            *("" if cost.is_nothing else _text_of(cost) for cost in (row.forward, row.backward)),
            row.source,
        ]


def _num_bytes(shape: Shape | None, dtype: torch.dtype | None) -> int:
    return 0 if shape is None or dtype is None else math.prod(shape) * dtype.itemsize


def _text_of(cost: Cost) -> str:
    most = max(cost.bytes_by_rank, default=0)
    return f"{cost.headers} + {cost.payloads}, {text.size(most)}"


def _text_of_ranks(ranks: Sequence[int]) -> str:
    shown = ranks if len(ranks) <= _MOST_RANKS else (*ranks[:3], "...", ranks[-1])
    return ", ".join(map(str, shown))


# ---- The run -------------------------------------------------------------------------------------


def dry_run(core: HookCore, args: Any, kwargs: Any) -> DryRun:
    """See ``FlexModel.dry_run``. Collective over the grid."""
    calls = on_shapes(core, "dry_run", args, kwargs, functools.partial(_look, core))
    with core.communicator.uncounted():
        return summary(core, {r.index: r for r in core.table.registrations}, calls)


def _look(core: HookCore, follower: Follower, given: Any) -> list[Seen]:
    """Run the model, and note what every hook would see."""
    seen: list[Seen] = []
    looks: list[Look] = []
    for registration in core.table.registrations:
        module = registration.living_module
        if module is None:
            seen.append(_seen_parameter(core, registration))
        else:
            look = functools.partial(_seen, core, registration, module, follower)
            looks.append((module, registration.takes_inputs, look))
    return seen + run_watched(core.module, follower, looks, *given)


def _seen(
    core: HookCore, registration: Registration, module: nn.Module, follower: Follower, tree: Any
) -> Seen | None:
    leaf = registration.leaf(tree)
    if registration.is_backward and not leaf.requires_grad:
        return None
    value = follower.joint_value(leaf)
    call = HookCall(registration, module, Run())
    registration.check_movable(leaf)
    if registration.is_backward:
        leaf = dtensor.without_partial(leaf)
    call, shard, known = core.executor.layouts.shard_of(call, leaf)
    needs = leaf.requires_grad and not registration.is_backward
    shape, dtype, device = tuple(shard.shape), shard.dtype, shard.device
    return Seen(registration.index, shape, dtype, call.stated, needs, known, device, value)


def _seen_parameter(core: HookCore, registration: Registration) -> Seen:
    parameter: Any = find_parameter(core.module, registration.name)[2]
    pair = registration.parameter.placements
    known = None
    if dtensor.is_dtensor(parameter):
        site = registration.describe()
        by_fsdp2 = registration.moment == "accumulated"
        known = dtensor.layout(parameter, core.mesh, site, by_fsdp2=by_fsdp2)
        parameter = dtensor.to_local(parameter)
    shape, dtype, device = tuple(parameter.shape), parameter.dtype, parameter.device
    return Seen(registration.index, shape, dtype, pair, False, known, device)


# ---- Rows ----------------------------------------------------------------------------------------


def summary(
    core: HookCore, registrations: dict[int, Registration], calls: Sequence[Sequence[Seen]]
) -> DryRun:
    """Rows of the hooks, from what all ranks saw at each call, in the order of registration and of
    their shapes; and what is found in their editing functions. Collective where hooks edit.
    """
    if not registrations:
        return DryRun((), Cost(), Cost(), [])
    costs = CallCosts.of(core)
    of_calls: list[list[tuple[Registration, Sequence[Seen]]]] = []
    together: dict[int, list[tuple[Registration, Sequence[Seen]]]] = {}  # edited by one function
    for ranks in calls:
        registration = registrations[ranks[0].hook]
        of_call = together.setdefault(id(registration.given), [])
        of_call.append((registration, ranks))
        if registration.calls_function or not registration.edits:
            of_calls.append(together.pop(id(registration.given)))
    predicted = [[row_of(costs, *one) for one in of_call] for of_call in of_calls]
    has_key = any(one.kind != "tensor" for one in registrations.values())
    priced, forward, backward = with_costs(costs, predicted, has_key)
    found: dict[int, list[Finding]] = {}
    if any(registration.edits for registration in registrations.values()):
        found = check_edits(core, _edit_calls(of_calls, priced))
    merged = merged_rows(
        (one.index, row)
        for of_call, rows in zip(of_calls, priced)
        for (one, _), row in zip(of_call, rows)
    )
    by_hook = {id(registrations[index].given): tuple(of_one) for index, of_one in found.items()}
    ordered: list[DryRunRow] = []
    for index, registration in registrations.items():
        of_all = by_hook.get(id(registration.given), ())
        own = merged.get(index) or [_empty_row(registration)]
        ordered += [replace(row, findings=of_all) for row in own]
    findings = [finding for index in registrations for finding in found.get(index, ())]
    return DryRun(ordered, forward, backward, findings)


def merged_rows(rows: Iterable[tuple[Any, DryRunRow]]) -> dict[Any, list[DryRunRow]]:
    """Return the rows of each hook, by what identifies it: one for the calls that meet tensors of
    one shape.
    """
    found: dict[Any, dict[Any, DryRunRow]] = {}
    for hook, row in rows:
        of_hook = found.setdefault(hook, {})
        key = row.local_shapes, row.dtype, row.layout, row.source
        of_hook[key] = of_hook[key].with_calls(row) if key in of_hook else row
    return {hook: list(of_hook.values()) for hook, of_hook in found.items()}


def _edit_calls(
    of_calls: Sequence[Sequence[tuple[Registration, Sequence[Seen]]]],
    priced: Sequence[Sequence[DryRunRow]],
) -> dict[Registration, list[FakeInput] | str]:
    """Find the tensors of the first call of each editing hook in which they are known, in the order
    of the run; or why they are not known.
    """
    found: dict[Registration, list[FakeInput] | str] = {}
    for of_call, rows in zip(of_calls, priced):
        registration = of_call[-1][0]
        if registration.edits and isinstance(found.get(registration, ""), str):
            inputs = [_input(*one, row) for one, row in zip(of_call, rows)]
            unknown = [one for one in inputs if isinstance(one, str)]
            known = [one for one in inputs if isinstance(one, FakeInput)]
            found[registration] = "; ".join(unknown) or known
    return found


def _input(registration: Registration, ranks: Sequence[Seen], row: DryRunRow) -> FakeInput | str:
    """The tensor that is passed to a function, or why it isn't known."""
    if row.full_shape is None or row.dtype is None:
        return row.source
    select, dtype = registration.select, row.dtype
    if select is not None:
        dtype = select.dtype_of(dtype)
    needs_gradient = any(one.needs_gradient for one in ranks)
    return FakeInput(row.full_shape, dtype, ranks[0].device, needs_gradient)


def _empty_row(registration: Registration) -> DryRunRow:
    function = registration.hook_function
    return DryRunRow(registration.name, registration.kind, function.unpack_idx, registration.edits)


def with_costs(
    costs: CallCosts,
    calls: Sequence[Sequence[tuple[DryRunRow, HookedTensor | None]]],
    has_key: bool,
) -> tuple[list[list[DryRunRow]], Cost, Cost]:
    """The rows of calls with what they cost, and what all hooks cost together in the forward and in
    the backward. Local.

    Args:
        calls: The rows of each call without costs, and its tensors where their layouts are known.
        has_key: Whether some hook is not on a parameter's gradient.
    """
    each = [(of_call, [tensor for _, tensor in of_call]) for of_call in calls]
    known: dict[str, Any] = {repr(tensors): tensors for _, tensors in each if all(tensors)}
    has_backward = any(is_of_gradient(row.kind) for row, _ in itertools.chain(*calls))
    found, (forward, backward) = costs.of_run(known, has_key, has_backward)
    rows = [
        [
            replace(row, forward=of_forward, backward=of_backward)
            for (row, _), (of_forward, of_backward) in zip(
                of_call, found.get(repr(tensors), [(Cost(), Cost())] * len(of_call))
            )
        ]
        for of_call, tensors in each
    ]
    for row in itertools.chain(*rows):
        forward, backward = forward + row.forward, backward + row.backward
    return rows, forward, backward


def row_of(
    costs: CallCosts, registration: Registration, ranks: Sequence[Seen]
) -> tuple[DryRunRow, HookedTensor | None]:
    """The row of one tensor without its costs, and the tensor if its layout is known."""
    first, function = ranks[0], registration.hook_function
    shapes = tuple(one.shape for one in ranks)
    row = replace(_empty_row(registration), calls=1, local_shapes=shapes, dtype=first.dtype)
    try:
        layout = layout_from_shapes(
            registration.layout_site,
            ranks,
            costs.mesh,
            function.placements,
            registration.expected_shape,
            registration.is_backward,
            costs.rows_dim,
            costs.statements,
        )
        tensor = HookedTensor(
            registration.kind,
            registration.edits,
            function.record,
            registration.select,
            layout,
            shapes,
            first.dtype,
            any(one.needs_gradient for one in ranks),
            first.known is not None and isinstance(first.known.dp, Shard),  # FSDP2 made it
        )
        spec = tensor.spec(costs.communicators[0])
    except (HookError, IndexError, TypeError, ValueError) as error:
        text = " ".join(str(error).split())  # in one line of the table
        return replace(row, source=f"a run would raise an error: {text}"), None
    row = replace(
        row,
        full_shape=spec.full_shape,
        layout=layout,
        source=layout.source,
        owners=tuple(costs.mesh.stage_ranks[place] for place in spec.ranks_of_first),
    )
    return row, tensor

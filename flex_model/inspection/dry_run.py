"""What a run would do at each hook, found by running the model on shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from flex_model.distributed import costs, inference
from flex_model.distributed.channel import Channel
from flex_model.distributed.gather import Move
from flex_model.distributed.header import DTYPES, Header, site_hash
from flex_model.distributed.inference import AXES, UNKNOWN, ExpectedShape, Splits, Told
from flex_model.distributed.layout import Placement, Replicate, Shape, Shard, ShardLayout
from flex_model.distributed.mesh import Mesh
from flex_model.distributed.propagation import Cut
from flex_model.distributed.tensor_dicts import exchange_json
from flex_model.distributed.tracking import LayoutTracker, tensors_of
from flex_model.errors import HookError, agreed
from flex_model.hooks.call import check_movable
from flex_model.hooks.context import Call, RunContext
from flex_model.hooks.registration import Registration
from flex_model.inspection import text
from flex_model.inspection.edits.checks import EditCall, check_edits
from flex_model.inspection.edits.findings import ERROR, NOT_CHECKED, WARNING, Finding
from flex_model.inspection.edits.rehearsal import Given
from flex_model.inspection.shapes_only import check_nothing_is_kept, fakes_alive, shapes_only
from flex_model.integrations import dtensor
from flex_model.names import find_parameter

if TYPE_CHECKING:
    from flex_model.hooks.core import HookCore

T = TypeVar("T")

_VALUES_TELL = "not known from shapes; a run compares the ranks' values"


@dataclass(frozen=True)
class Cost:
    """What the calls of one hook add to a run whose layouts are known.

    Attributes:
        headers: Exchanges of 64 bytes, each with all ranks.
        payloads: Collectives that move tensors.
        bytes_by_rank: What each rank of the grid sends of its own and receives of others'; a
            transport may send more.
    """

    headers: int = 0
    payloads: int = 0
    bytes_by_rank: tuple[int, ...] = ()

    def __add__(self, other: Cost) -> Cost:
        pairs = zip(self.bytes_by_rank, other.bytes_by_rank)
        added = tuple(a + b for a, b in pairs) or self.bytes_by_rank or other.bytes_by_rank
        return Cost(self.headers + other.headers, self.payloads + other.payloads, added)

    def __str__(self) -> str:
        most = max(self.bytes_by_rank, default=0)
        return f"{self.headers} + {self.payloads}, {text.size(most)}"


@dataclass(frozen=True)
class DryRunRow:
    """One hook and the calls of it that meet tensors of one shape.

    Attributes:
        name, kind, unpack_idx: As in ``SiteLayout``.
        edits: Whether it has an editing function.
        calls: How many calls there would be; 0 if the forward does not get there.
        full_shape, local_shapes, dtype: As in ``SiteLayout``.
        layout: None where shapes do not tell, or a run would raise an error: see ``source``.
        source: Whence the layout is known, or why it is not.
        owners: Global ranks whose parts together are rank 0's full tensor.
        forward, backward: What its calls cost, without what all hooks share.
        findings: What is wrong with its editing function; of all its rows together.
    """

    name: str
    kind: str
    unpack_idx: int
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


class DryRun(list[DryRunRow]):
    """A list of ``DryRunRow`` that prints as a table.

    Attributes:
        forward, backward: Of all hooks together, with what they share: one header at the end, and
            one message with all records that wait for it.
        findings: What is wrong with the editing functions, hook by hook, or was not checked.
    """

    forward: Cost
    backward: Cost
    findings: list[Finding]

    def __init__(
        self,
        rows: Iterable[DryRunRow],
        forward: Cost,
        backward: Cost,
        findings: Iterable[Finding] = (),
    ) -> None:
        super().__init__(rows)
        self.forward = forward
        self.backward = backward
        self.findings = list(findings)

    def raise_if_wrong(self, *, warnings: bool = False) -> None:
        """HookError with all errors that were found in editing functions; with ``warnings``, with
        those too. On every rank alike; what was not checked is no error.
        """
        levels = (ERROR, WARNING) if warnings else (ERROR,)
        wrong = [finding for finding in self.findings if finding.level in levels]
        if wrong:
            lines = "\n".join(map(str, wrong))
            raise agreed(HookError(f"dry_run: {len(wrong)} problems in editing functions\n{lines}"))

    def __str__(self) -> str:
        if not self:
            return "no hooks are registered"
        headers = ("site", "kind", "calls", "full shape", "dtype", "layout", "owners", "forward")
        lines = [text.table([*headers, "backward", "source"], [self._row(row) for row in self])]
        lines.append(
            "costs: headers (64 bytes) + payload collectives, bytes that the busiest rank moves"
        )
        lines.append(f"all hooks: forward {self.forward}; backward {self.backward}")
        if self.findings or any(row.edits for row in self):
            lines.append(self._checks())
        return "\n".join([*lines, *map(str, self.findings)])

    def _checks(self) -> str:
        if not self.findings:
            return "editing functions: nothing found"
        levels = [finding.level for finding in self.findings]
        counts = [f"{levels.count(level)} {level}" for level in (ERROR, WARNING, NOT_CHECKED)]
        return f"editing functions: {', '.join(counts)}"

    @staticmethod
    def _row(row: DryRunRow) -> list[str]:
        return [
            text.site(row.name, row.unpack_idx),
            row.kind + (", edits" if row.edits else ""),
            str(row.calls),
            text.shape(row.full_shape) if row.calls else "",
            str(row.dtype).removeprefix("torch.") if row.calls else "",
            str(row.layout or ""),
            ", ".join(map(str, row.owners)),
            str(row.forward) if row.forward != Cost() else "",
            str(row.backward) if row.backward != Cost() else "",
            row.source,
        ]


# ---- The run -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """What one rank saw at one call of a hook.

    Attributes:
        hook: The registration's index.
        known: What a DTensor told, the same on every rank.
    """

    hook: int
    shape: Shape
    dtype: torch.dtype
    splits: Splits
    needs_gradient: bool = False
    known: ShardLayout | None = field(default=None, compare=False)
    device: torch.device = field(default=torch.device("cpu"), compare=False)  # this rank's


def dry_run(core: HookCore, args: Any, kwargs: Any) -> DryRun:
    """See ``FlexModel.dry_run``. Collective over the grid."""
    tracker = LayoutTracker(core.channel.mesh)
    with core.channel.uncounted():
        seen = on_shapes(
            core, tracker, "dry_run", args, kwargs, lambda given: _follow(core, tracker, given)
        )
        rows = exchange_seen(core.channel, seen)
        registrations = {r.index: r for r in core.table.registrations}
        return summary(core, tracker, registrations, rows)


def on_shapes(
    core: HookCore,
    tracker: LayoutTracker,
    name: str,
    args: Any,
    kwargs: Any,
    follow: Callable[[Any], list[T]],
) -> list[T]:
    """What ``follow(inputs)`` returns, in which it runs the model on shapes alone, without hooks,
    while ``tracker`` follows. Collective over the grid.

    Args:
        name: What is done, for messages.

    Raises:
        HookError: it failed; with several ranks, told at their next exchange.
        RuntimeError: called during a run.
    """
    if core.run is not None or core.in_backward():
        raise RuntimeError(f"{name}: a run of this FlexModel goes on; call it before or after")
    channel = core.channel
    found: list[T] = []
    with core.table.nothing_chosen():
        if not channel.is_local:
            core.tracking.seed(tracker, list(tensors_of((args, kwargs))))
        try:
            given, fakes = (args, kwargs), fakes_alive()
            with shapes_only(core.module, core.mesh, tracker, given, channel.exchange) as given:
                found = follow(given)
            del given
            check_nothing_is_kept(fakes)
        except Exception as error:
            message = (
                f"{name}: the model can't be run on shapes alone ({type(error).__name__}: "
                f"{str(error)[:600]}); run it for real, and ask flex.layouts()"
            )
            if channel.is_local:
                raise HookError(message) from error
            channel.set_error(message, error)
    return found


def _follow(core: HookCore, tracker: LayoutTracker, given: Any) -> list[Seen]:
    """Run the model, and note what every hook would see."""
    seen: list[Seen] = []
    handles: list[Any] = []
    try:
        for registration in core.table.registrations:
            module = None if registration.module is None else registration.module()
            if module is None:
                seen.append(_seen_parameter(core, registration))
                continue
            look = _looker(core, registration, tracker, seen)
            if registration.kind in ("forward_pre", "full_backward"):
                handles.append(module.register_forward_pre_hook(look, with_kwargs=True))
            else:
                handles.append(module.register_forward_hook(look))
        args, kwargs = given
        core.module(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _looker(
    core: HookCore, registration: Registration, tracker: LayoutTracker, seen: list[Seen]
) -> Callable[..., None]:
    takes_inputs = registration.kind in ("forward_pre", "full_backward")

    def look(module: nn.Module, given: Any, other: Any) -> None:
        leaf = registration.leaf((given, other) if takes_inputs else other)
        if registration.is_backward and not leaf.requires_grad:
            return
        with tracker.paused():
            seen.append(_seen(core, registration, module, leaf, tracker.splits(leaf)))

    return look


def _seen(
    core: HookCore, registration: Registration, module: nn.Module, leaf: Tensor, splits: Splits
) -> Seen:
    call = Call(registration, module, RunContext(), splits=splits)
    check_movable(call, leaf)
    if registration.is_backward and dtensor.is_dtensor(leaf):
        leaf = dtensor.without_partial(leaf)
    call, shard, known = core.caller.shard_of(call, leaf)
    needs = leaf.requires_grad and not registration.is_backward
    shape, dtype, device = tuple(shard.shape), shard.dtype, shard.device
    return Seen(registration.index, shape, dtype, call.splits, needs, known, device)


def _seen_parameter(core: HookCore, registration: Registration) -> Seen:
    parameter: Any = find_parameter(core.module, registration.name)[2]
    splits = registration.splits.get((0, parameter.dim()), UNKNOWN)
    known = None
    if dtensor.is_dtensor(parameter):
        site = registration.describe()
        known = dtensor.layout(parameter, core.mesh, site, batch_on_dp=False)
        parameter = dtensor.to_local(parameter)
    shape, dtype, device = tuple(parameter.shape), parameter.dtype, parameter.device
    return Seen(registration.index, shape, dtype, splits, False, known, device)


# ---- Telling the others --------------------------------------------------------------------------


def exchange_seen(channel: Channel, seen: list[Seen]) -> list[list[Seen]]:
    """What all ranks of the grid saw, call by call. Collective.

    Raises:
        HookError: a rank could not run the model.
        HookMismatchError: ranks came by different hooks.
    """
    if channel.is_local:
        return [[one] for one in seen]
    header = Header("end of the run", site=site_hash(*(one.hook for one in seen)))
    channel.agree(header, f"the end of a run on shapes, which came by {len(seen)} sites")
    if not seen:
        return []
    mine = [_to_json(one) for one in seen]
    told = exchange_json(channel, mine, "what a run on shapes saw")
    return [[_from_json(rank[i], one) for rank in told] for i, one in enumerate(seen)]


def _to_json(one: Seen) -> list[Any]:
    splits = inference.encode(one.splits)
    return [one.hook, one.shape, DTYPES.index(one.dtype), splits, one.needs_gradient]


def _from_json(words: list[Any], mine: Seen) -> Seen:
    hook, shape, dtype, splits, needs_gradient = words
    told = inference.decode(splits)
    return Seen(hook, tuple(shape), DTYPES[dtype], told, needs_gradient, mine.known, mine.device)


# ---- Layouts and costs ---------------------------------------------------------------------------


def summary(
    core: HookCore,
    tracker: LayoutTracker,
    registrations: dict[int, Registration],
    calls: Sequence[Sequence[Seen]],
) -> DryRun:
    """Rows of the hooks, from what all ranks saw at each call, in the order of registration and of
    their shapes; and what is found in their editing functions. Collective where hooks edit.
    """
    rows: dict[tuple[Any, ...], DryRunRow] = {}
    edits: list[tuple[Registration, Sequence[Seen], DryRunRow]] = []
    for ranks in calls:
        registration = registrations[ranks[0].hook]
        row = _row(core, registration, ranks)
        if registration.edits:
            edits.append((registration, ranks, row))
        key = (ranks[0].hook, row.local_shapes, row.dtype, row.layout, row.source)
        before = rows.get(key)
        if before is not None:
            row = replace(
                row,
                calls=before.calls + 1,
                forward=before.forward + row.forward,
                backward=before.backward + row.backward,
            )
        rows[key] = row
    found: dict[int, list[Finding]] = {}
    if any(registration.edits for registration in registrations.values()):
        found = check_edits(core, tracker, _edit_calls(edits))
    ordered = []
    by_hook = {id(registrations[index].given): tuple(of_one) for index, of_one in found.items()}
    for index, registration in registrations.items():
        own = [row for key, row in rows.items() if key[0] == index]
        of_all = by_hook.get(id(registration.given), ())
        ordered += [replace(row, findings=of_all) for row in own or [_empty_row(registration)]]
    findings = [finding for index in registrations for finding in found.get(index, ())]
    return DryRun(ordered, *_totals(core, ordered), findings)


def _edit_calls(calls: Sequence[tuple[Registration, Sequence[Seen], DryRunRow]]) -> list[EditCall]:
    """Of hooks that edit, from their tensors in the order of the run."""
    found: list[EditCall] = []
    givens: dict[int, list[Given | str]] = {}  # of several tensors, so far
    for registration, ranks, row in calls:
        several = givens.setdefault(id(registration.given), [])
        several.append(_given(registration, ranks, row))
        if registration.calls_function:
            del givens[id(registration.given)]
            unknown = [one for one in several if isinstance(one, str)]
            known = [one for one in several if isinstance(one, Given)]
            found.append(EditCall(registration, None if unknown else known, "; ".join(unknown)))
    return found


def _given(registration: Registration, ranks: Sequence[Seen], row: DryRunRow) -> Given | str:
    """What a function is given, or why that isn't known."""
    if row.full_shape is None or row.dtype is None:
        return row.source
    select, dtype = registration.select, row.dtype
    if select is not None:
        dtype = select.dtype_of(dtype)
    needs_gradient = any(one.needs_gradient for one in ranks)
    return Given(row.full_shape, dtype, ranks[0].device, needs_gradient)


def _empty_row(registration: Registration) -> DryRunRow:
    function = registration.hook_function
    return DryRunRow(registration.name, registration.kind, function.unpack_idx, registration.edits)


def _row(core: HookCore, registration: Registration, ranks: Sequence[Seen]) -> DryRunRow:
    channel, mesh = core.channel, core.mesh
    shapes = [one.shape for one in ranks]
    row = replace(
        _empty_row(registration), calls=1, local_shapes=tuple(shapes), dtype=ranks[0].dtype
    )
    try:
        layout = layout_from_shapes(
            registration.describe(),
            registration.kind,
            None if registration.module is None else registration.module(),
            ranks,
            mesh,
            registration.expected_shape,
        )
    except ValueError as error:
        return replace(row, source=f"a run would raise an error: {error}")
    if layout is None:
        return replace(row, source=_VALUES_TELL)
    try:
        move = Move.of(channel, layout, shapes, ranks[0].dtype, registration.select)
    except (IndexError, TypeError, ValueError) as error:
        return replace(row, source=f"a run would raise an error: {error}")
    costs = _Costs(core, registration, move, ranks)
    forward, backward = costs.of_calls(any(one.needs_gradient for one in ranks))
    return replace(
        row,
        full_shape=move.full_shape,
        layout=layout,
        source=layout.source,
        owners=tuple(mesh.grid[place] for place in mesh.members(move.axes, place=0)),
        forward=forward,
        backward=backward,
    )


def layout_from_shapes(
    site: str,
    kind: str,
    module: nn.Module | None,
    ranks: Sequence[Seen],
    mesh: Mesh,
    expected_shape: ExpectedShape = None,
) -> ShardLayout | None:
    """As ``inference`` will settle it, where no values are needed; else None. Local.

    Raises:
        ValueError: the sources contradict each other.
    """
    shapes = [one.shape for one in ranks]
    known = ShardLayout(source="one process") if len(mesh.grid) == 1 else ranks[0].known
    dp, tp = (_along(i, [one.splits for one in ranks]) for i in range(len(AXES)))
    if tp is None and known is None:
        beside = dtensor.layout_beside_weight(module, kind, shapes, mesh, site)
        tp = None if beside is None else beside.tp
    if tp is None and known is None and mesh.tp_size > 1 and expected_shape is None:
        return None
    told = Told(None, [(dp, tp)] * len(ranks))
    role: inference.Role = "tensor"
    if kind in ("full_backward", "full_backward_pre"):
        role = "gradient"
    return inference.resolve(
        site, shapes, mesh, expected_shape, known, told, kind != "tensor", role
    )


def _along(axis: int, splits: Sequence[Splits]) -> Placement | None:
    """What the ranks' splits along an axis come to, values unseen. Ranks that all took their own
    part of a whole tensor hold a split one; ranks that took the same part hold a whole one.
    """
    told = {one[axis] for one in splits}
    cuts = [split for split in told if isinstance(split, Cut)]
    if not cuts:
        only = told.pop() if len(told) == 1 else None
        return None if isinstance(only, Cut) else only
    if len(told) == 1:
        return cuts[0].shard
    return Replicate() if told == {Replicate(), cuts[0]} else None


class _Costs:
    """What a call of one hook costs, as ``HookCaller``, ``gather`` and ``Records`` do it."""

    def __init__(
        self,
        core: HookCore,
        registration: Registration,
        move: Move,
        ranks: Sequence[Seen],
    ) -> None:
        self._registration = registration
        self._move = move
        self._mesh = core.mesh
        self._is_local = core.channel.is_local
        self._on_all = core.caller.edits_on_all
        self._records_on_all = core.records.on_all_ranks
        self._keeps_parts = core.records.keeps_parts
        known = ranks[0].known
        self._is_mean = known is not None and isinstance(known.dp, Shard)  # FSDP2 made it
        self._shard_bytes = [self._part_bytes(place) for place in range(len(ranks))]
        self._full_bytes = move.plan.full_bytes

    def _part_bytes(self, place: int) -> int:
        """What the rank at this place of the grid moves."""
        members = self._mesh.members(self._move.axes, place=place)
        return self._move.plan.shard_bytes[members.index(place)]

    def of_calls(self, needs_gradient: bool) -> tuple[Cost, Cost]:
        """In the forward, and in the backward."""
        if self._is_local:
            return Cost(), Cost()
        if self._registration.kind == "tensor":
            return Cost(), self._mean_over_dp() + self._look_or_edit()
        if self._registration.is_backward:
            return Cost(), self._look_or_edit()
        if not self._registration.edits or not needs_gradient:
            return self._look_or_edit(), Cost()
        return self._look_or_edit(), self._backward_of_edit()

    def _look_or_edit(self) -> Cost:
        if self._keeps_parts and not self._registration.edits:
            return self._sums()
        if not self._registration.edits:
            if self._records_on_all:
                return self._sums() + self._all_gather()
            return self._sums() + replace(self._to_first(), payloads=0)
        if not self._registration.hook_function.record:
            return self._edit()
        if self._keeps_parts:  # summed once more, for the record
            return self._edit() + self._sums()
        cost = self._edit()
        return cost + self._all_gather() if self._records_on_all and not self._on_all else cost

    def _edit(self) -> Cost:
        if self._on_all:
            return Cost(headers=1) + self._sums() + self._all_gather()
        # Of tensors edited together, rank 0 tells once.
        cost = Cost(headers=1 + self._registration.calls_function)
        return cost + self._sums() + self._to_first() + self._from_first()

    def _backward_of_edit(self) -> Cost:
        """Of one whose layout is known, and of whose gradient replicas hold the whole."""
        move, cost = self._move, Cost()
        if self._on_all:
            if move.is_shared_over_dp:
                cost += Cost(headers=1) + self._all_reduce("dp")
            return cost + Cost(headers=1) + self._all_gather() if move.axes else cost
        if move.is_shared_over_dp:
            cost += self._all_reduce("dp")
        return cost + Cost(headers=2) + self._to_first() + self._from_first()

    def _mean_over_dp(self) -> Cost:
        if self._mesh.dp_size == 1 or self._is_mean:
            return Cost()
        return Cost(headers=1) + self._all_reduce("dp")

    def _places(self) -> list[int]:
        return self._mesh.members(self._move.axes, place=0) if self._move.axes else []

    def _sums(self) -> Cost:
        cost = Cost()
        for axis in self._move.layout.partial_axes:
            cost += self._all_reduce(axis)
        return cost

    def _all_reduce(self, axis: str) -> Cost:
        return Cost(payloads=1, bytes_by_rank=tuple(map(costs.of_all_reduce, self._shard_bytes)))

    def _all_gather(self) -> Cost:
        if not self._move.axes:
            return Cost()
        return self._alike(costs.of_all_gather(self._move.plan))

    def _to_first(self) -> Cost:
        if not self._move.axes:
            return Cost()
        holders, plan = self._places(), self._move.plan
        ranks = range(len(self._shard_bytes))
        moved = [costs.of_gather_to_first(plan, holders, rank) for rank in ranks]
        return Cost(payloads=1, bytes_by_rank=tuple(moved))

    def _from_first(self) -> Cost:
        if self._move.covers_grid and self._move.axes:
            return self._to_first()
        return self._alike(costs.of_broadcast(self._full_bytes))

    def _alike(self, num_bytes: int) -> Cost:
        return Cost(payloads=1, bytes_by_rank=(num_bytes,) * len(self._shard_bytes))


def _totals(core: HookCore, rows: Sequence[DryRunRow]) -> tuple[Cost, Cost]:
    """What all hooks cost together, with the end of the forward and of the backward."""
    forward, backward = Cost(), Cost()
    for row in rows:
        forward, backward = forward + row.forward, backward + row.backward
    if core.channel.is_local or not rows:
        return forward, backward
    forward += _end(core, rows, False)
    if any(row.calls and row.kind not in ("forward", "forward_pre") for row in rows):
        backward += _end(core, rows, True)
    return forward, backward


def _end(core: HookCore, rows: Sequence[DryRunRow], is_backward: bool) -> Cost:
    """One status header, and one message with the records that waited. For a store: a second
    header after a forward, and no message.
    """
    if core.records.keeps_parts:
        return Cost(headers=1 if is_backward else 2)
    waiting = [
        row
        for row in rows
        if not row.edits and is_backward == (row.kind not in ("forward", "forward_pre"))
    ]
    is_sent = any(row.layout is not None and len(row.owners) > 1 for row in waiting)
    return Cost(headers=1, payloads=int(is_sent and not core.records.on_all_ranks))

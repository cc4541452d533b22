"""One call of one hook: the full tensor is gathered, recorded, edited, and its shards go back.

Two or more ranks: the call begins with an exchange of headers, so ranks that disagree find out
before any payload. A hook without editing function keeps a copy of its shard for the end of the
run, and nobody waits.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flex_model.distributed import gather, inference, values
from flex_model.distributed.channel import Channel
from flex_model.distributed.gather import Move, Trip
from flex_model.distributed.header import Header
from flex_model.distributed.inference import Splits
from flex_model.distributed.layout import Shape, ShardLayout
from flex_model.distributed.picked import Pick
from flex_model.distributed.plain import is_renamed, plain
from flex_model.errors import HookError, agreed
from flex_model.hooks.context import Call, seed_of_state
from flex_model.hooks.save_context import SentToAll
from flex_model.hooks.tracking import Tracking
from flex_model.hooks.user_function import UserFunction
from flex_model.integrations import dtensor
from flex_model.outputs import Records

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flex_model.hooks.registration import Registration

_REMEMBERED_MOVES = 128  # per hook: generation may bring a new shape with every step
_CHANGED, _REQUIRES_GRAD = 1, 2  # what rank 0 tells of an edit, in Header.microbatch


@dataclass(eq=False)
class _Given:
    """One tensor of an edit.

    Attributes:
        original: As the model has it.
        leaf: This rank's plain tensor of it, in the graph.
        part: What the hook selected of that.
        full: What the function gets; an empty tensor on ranks that don't run it.
        trip: With several ranks: its way there and back.
    """

    call: Call
    original: Any
    leaf: Tensor
    part: Tensor
    full: Tensor
    pick: Pick | None
    trip: Trip | None = None

    @property
    def index(self) -> int:
        return int(self.call.registration.hook_function.unpack_idx)

    @property
    def is_whole(self) -> bool:
        return self.pick is None

    @property
    def way(self) -> Trip:
        assert self.trip is not None
        return self.trip

    def put_back(self, shard: Tensor) -> Tensor:
        """What the hook selected and edited, in its place among what it did not."""
        return shard if self.pick is None else self.pick.put(self.leaf, shard)

    def like_original(self, shard: Tensor) -> Tensor:
        """What the model goes on with. Where its own tensor is contiguous, so is that: views of it
        work, and a DTensor says so of its local part.
        """
        if self.original.is_contiguous() or dtensor.is_dtensor(self.original):
            shard = shard.contiguous()
        if dtensor.is_dtensor(self.original):
            return dtensor.like(shard, self.original)
        return shard.as_subclass(type(self.original)) if is_renamed(self.original) else shard


class HookCaller:
    """Runs hooks on this rank's tensors. All methods are collective over the ranks of the wrap's
    stage.
    """

    def __init__(
        self,
        channel: Channel,
        records: Records,
        save_ctx: Namespace,
        modules: nn.ModuleDict,
        edit_on: str,
        full_parameter: Callable[[str], Tensor],
        tracking: Tracking,
    ) -> None:
        self._channel = channel
        self._tracking = tracking
        self._records = records
        self._function = UserFunction(save_ctx, modules)
        self.edits_on_all = edit_on == "all"
        self.full_parameter = full_parameter
        # What this rank's gradients are divided by to be those of the mean loss.
        self.gradient_scale = channel.mesh.dp_size
        # Whether ranks tell of each edit at once whether it failed. In a pipeline they go on with
        # backward passes after it, whose graphs must be alike.
        self.tells_edits = False
        self.sent_to_all: SentToAll | None = None  # the save_ctx of functions that rank 0 runs

    # The three kinds of values.

    def activation(self, call: Call, leaf: Tensor) -> list[tuple[int, Tensor]]:
        """A forward or forward-pre hook on one tensor; what the model goes on with in the place of
        tensors of its site, by ``unpack_idx``.
        """
        call.registration.check_movable(leaf)
        if call.registration.edits:
            return self._edit(call, leaf)
        if call.records:
            self._collect(call, leaf)
        return []

    def summed(self, grad: Tensor) -> Tensor:
        """A gradient with its partial sums done. It goes on so on every rank, also on one whose
        function fails: else that one alone would sum later, and wait for the others.
        """
        return dtensor.without_partial(grad) if dtensor.is_dtensor(grad) else grad

    def gradient(self, call: Call, grad: Tensor) -> Tensor:
        """A backward hook on one ``summed`` gradient. Its values are those of the mean loss, over
        data-parallel ranks and micro-batches.
        """
        call.registration.check_movable(grad)
        scale = self.gradient_scale
        given = grad / scale if scale > 1 else grad
        if not call.registration.edits:
            self._collect(call, given)
            return grad
        edited = self._edit_one(call, given)
        if edited is None:
            return grad
        return edited * scale if scale > 1 else edited

    def parameter_gradient(self, call: Call, grad: Tensor) -> Tensor:
        """A hook on a parameter's ``summed`` gradient: averaged over dp, in full; the average goes
        on.
        """
        call.registration.check_movable(grad)
        grad = self._mean_over_dp(call, grad)
        if not call.registration.edits:
            self._collect(call, grad)
            return grad
        edited = self._edit_one(call, grad)
        return grad if edited is None else edited

    def _mean_over_dp(self, call: Call, grad: Tensor) -> Tensor:
        mesh = self._channel.mesh
        if mesh.dp_size == 1:
            return grad
        plain = grad
        if dtensor.is_dtensor(grad):
            if dtensor.reaches(grad, mesh, call.describe(), "dp"):
                return grad  # FSDP2: already averaged
            plain = dtensor.to_local(grad)
        self._agree(call, plain, "tensor")
        mean = self._channel.all_reduce_sum(("dp",), plain) / mesh.dp_size
        return dtensor.like(mean, grad) if dtensor.is_dtensor(grad) else mean

    # Looking only.

    def _collect(self, call: Call, leaf: Tensor) -> None:
        if self._channel.is_local:
            if dtensor.is_dtensor(leaf):
                leaf = dtensor.to_local(dtensor.without_partial(leaf))
            elif is_renamed(leaf):
                leaf = plain(leaf)
            pick = self._look_alone(call, leaf)
            self._records.now(call.registration, leaf if pick is None else pick.take(leaf.detach()))
            return
        call, shard, known = self.shard_of(call, leaf)
        self._records.later(call, plain(shard), known)

    def shard_of(self, call: Call, leaf: Any) -> tuple[Call, Tensor, ShardLayout | None]:
        """This rank's plain tensor, in the graph, and what a DTensor tells: the whole layout, or
        along the axes that its mesh has.
        """
        leaf, splits, known = dtensor.plain_and_told(
            leaf, self._channel.mesh, call.describe(), call.splits
        )
        if splits is not call.splits:
            call = replace(call, splits=splits)
        return call, leaf, known

    def _look_alone(self, call: Call, leaf: Tensor) -> Pick | None:
        """One rank: the tensor is full, and ``expected_shape`` must say so; what is selected."""
        registration = call.registration
        if registration.expected_shape is None and registration.select is None:
            return None
        return self.move(call, [tuple(leaf.shape)], leaf.dtype, None, leaf).pick

    # Editing.

    def _edit(self, call: Call, leaf: Any) -> list[tuple[int, Tensor]]:
        """Gather, record, edit, scatter: what the function changed, with its ``unpack_idx``.

        Of tensors that are edited together, each but the last is gathered only.
        """
        joint, batch = call.registration.joint, call.run.batch
        if joint is not None and call.registration.is_first_of_joint:
            joint.gathered[batch] = []  # what a call that failed left behind is gone, too
        given = self._gather(call, leaf)
        if joint is None:
            several = [given]
        else:
            several = joint.gathered.setdefault(batch, [])
            several.append(given)
            if not call.registration.calls_function:
                return []
            del joint.gathered[batch]
            if len(several) < joint.size:
                return []  # the hook of another of them failed, and told
        parameters = self._parameters(call, given.leaf)
        if self._channel.is_local:
            edits = self._edit_alone(several, parameters)
        elif self.edits_on_all:
            edits = self._edit_on_all(several, parameters)
        else:
            edits = self._edit_on_first(several, parameters)
        return [
            (given.index, given.like_original(shard))
            for given, shard in zip(several, edits)
            if shard is not None
        ]

    def _edit_one(self, call: Call, leaf: Any) -> Tensor | None:
        """As ``_edit``, of a hook that is about one tensor; None if that did not change."""
        return next((edited for _, edited in self._edit(call, leaf)), None)

    def _gather(self, call: Call, original: Any) -> _Given:
        """The full tensor, for the function and for the records."""
        call, leaf, known = self.shard_of(call, original)
        if not self._channel.is_local or is_renamed(leaf):
            leaf = plain(leaf)
        if self._channel.is_local:
            pick = self._look_alone(call, leaf)
            part = leaf if pick is None else pick.take(leaf)
            if call.records:
                self._records.now(call.registration, part)
            return _Given(call, original, leaf, part, _handed(part), pick)
        shapes = self._agree(call, leaf, call.registration.kind)
        move = self.move(call, shapes, leaf.dtype, known, leaf)
        if not call.registration.is_backward:
            self._tracking.note(leaf, move.layout)

        def agree_on_gradient(grad: Tensor) -> None:
            self._agree(call, grad, "gradient of an edit")

        trip = Trip(move, agree_on_gradient)
        if torch.is_grad_enabled():
            trip.watch(leaf)
        part = leaf if move.pick is None else move.pick.take(leaf)
        if self._records.keeps_parts and call.records:
            self._records.later(call, leaf, known)
        gather_in_graph = self._gather_on_all if self.edits_on_all else self._gather_on_first
        return _Given(
            call, original, leaf, part, gather_in_graph(call, part, trip), move.pick, trip
        )

    def _gather_on_all(self, call: Call, part: Tensor, trip: Trip) -> Tensor:
        records = call.records and self._records.keeps_full
        trip.num_records = int(records and part.device.type == "cpu")
        trip.is_read = call.registration.writes is False  # as before: not known of its first call
        full = _gathered(gather.gather, part, trip)
        if records:
            self._records.put(call.registration, trip.record, full)
        return full

    def _gather_on_first(self, call: Call, part: Tensor, trip: Trip) -> Tensor:
        on_first = not self._records.on_all_ranks and not self._records.keeps_parts
        trip.num_records = int(call.records and on_first)
        gathered = _gathered(gather.gather_to_first, part, trip)
        if self._records.on_all_ranks and call.records:
            full = trip.move.cast(trip.move.copies(part, 1, num_read=1)[0])
            self._records.put(call.registration, None, full)
        elif trip.num_records and self._channel.mesh.place == 0:
            self._records.put(call.registration, trip.record, gathered)
        return gathered

    def _run_function(
        self, several: Sequence[_Given], parameters: dict[str, Tensor]
    ) -> list[Tensor | None]:
        """The editing function, in which the model may not be run."""
        call, leaf = several[-1].call, several[-1].leaf
        fulls = [given.full for given in several]
        versions = [full._version for full in fulls]
        outer, self._channel.edit_of = self._channel.edit_of, call.describe()
        try:
            return self._function.run(call, fulls, leaf, parameters)
        finally:
            self._channel.edit_of = outer
            for given, full, version in zip(several, fulls, versions):
                registration = given.call.registration
                registration.writes = registration.writes or full._version != version

    def _edit_alone(
        self, several: Sequence[_Given], parameters: dict[str, Tensor]
    ) -> list[Tensor | None]:
        run = several[-1].call.run
        if run.seed is None:
            run.seed = seed_of_state()
        edits = self._run_function(several, parameters)
        return [
            # A copy, as shards are: the model may change it in place, and the user may keep it.
            None if edited is None else given.put_back(edited.clone() if given.is_whole else edited)
            for given, edited in zip(several, edits)
        ]

    def _edit_on_all(
        self, several: Sequence[_Given], parameters: dict[str, Tensor]
    ) -> list[Tensor | None]:
        call = several[-1].call
        edits: list[Tensor | None]
        try:
            edits = self._run_function(several, parameters)
        except Exception as error:
            if not self.tells_edits:
                raise
            edits = [None] * len(several)
            self._channel.set_error(call.registration.failure(error), error)
        is_edited = any(edited is not None for edited in edits)
        self._channel.edited = call.describe() if is_edited else ""
        if self.tells_edits:
            header = Header("result of an edit", site=call.registration.site)
            self._channel.agree(header, f"the result of the edit of {call.describe()}")
        return [
            None
            if edited is None
            else self._put_back(given, gather.scatter(edited.to(given.part.dtype), given.way))
            for given, edited in zip(several, edits)
        ]

    def _edit_on_first(
        self, several: Sequence[_Given], parameters: dict[str, Tensor]
    ) -> list[Tensor | None]:
        channel, call = self._channel, several[-1].call
        edits: list[Tensor | None] = [None] * len(several)
        if channel.mesh.place == 0:
            if self.sent_to_all is not None and not call.is_replay:
                self.sent_to_all.note(self._function.context_of(call))
            try:
                # Checkpointing would compute once more what is saved here, and only here.
                with torch.autograd.graph.saved_tensors_hooks(_saved, _unsaved):
                    edits = self._run_function(several, parameters)
            except Exception as error:
                if call.is_replay:
                    raise
                channel.set_error(call.registration.failure(error), error)
        headers = channel.agree(
            Header(
                "result of an edit on rank 0",
                site=call.registration.site,
                microbatch=_told_of(edits),
            ),
            f"the result of the edit of {call.describe()}",
        )
        return [
            self._scatter_from_first(several, given, edited, headers[0].microbatch >> 2 * i)
            for i, (given, edited) in enumerate(zip(several, edits))
        ]

    def _scatter_from_first(
        self, several: Sequence[_Given], given: _Given, edited: Tensor | None, told: int
    ) -> Tensor | None:
        """``told``: of rank 0's edit, as ``_told_of`` says it of the first tensor."""
        if not told & _CHANGED:
            return None
        in_graph = bool(told & _REQUIRES_GRAD) and torch.is_grad_enabled()
        if edited is not None:
            edited = edited.to(given.part.dtype)
        gathered = [other.full for other in several]
        shard = gather.scatter_from_first(edited, gathered, given.way, given.part, in_graph)
        return self._put_back(given, shard)

    def _put_back(self, given: _Given, shard: Tensor) -> Tensor:
        """The edited shard, split as it was: what the model makes of it is followed on."""
        edited = given.put_back(shard)
        if not given.call.registration.is_backward:
            self._tracking.note(edited, given.way.move.layout)
        return edited

    def _agree(self, call: Call, tensor: Tensor, kind: str) -> list[Shape]:
        """Exchange headers; the local shapes of all ranks."""
        run, is_first = call.run, self._channel.mesh.place == 0
        header = Header(
            kind,
            site=call.registration.site,
            seed=run.seed or (seed_of_state() if is_first else 0),  # rank 0's counts
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
        )
        what = "the gradient of the edit of " if kind == "gradient of an edit" else ""
        headers = self._channel.agree(header, what + call.describe())
        run.seed = headers[0].seed
        return [header.shape for header in headers]

    def _parameters(self, call: Call, leaf: Tensor) -> dict[str, Tensor]:
        """The full parameters that the function named, as they are now."""
        names = call.registration.hook_function.parameter_names
        return {name: self.full_parameter(name).to(leaf.device) for name in names}

    # Layouts.

    def move(
        self,
        call: Call,
        shapes: Sequence[Shape],
        dtype: torch.dtype,
        known: ShardLayout | None,
        shard: Tensor,
    ) -> Move:
        """The plan for what all ranks hold, cached; collective where the layout is new."""
        registration = call.registration
        key = (call.number, tuple(shapes), dtype, known, registration.split_dim)
        move = registration.moves.get(key)
        if move is None and call.number is None:
            move = self._move_of_forward(call, key[1:])
        if move is not None:
            return move
        number, ndim = call.number or 0, len(shapes[0])
        before = registration.splits.get((number, ndim)) or registration.splits.get((0, ndim))
        splits, is_memory = self._splits(call, shapes, before)
        try:
            settled = inference.settle(
                self._channel,
                registration.describe(),
                shard,
                shapes,
                registration.expected_shape,
                known,
                registration.batch_on_dp,
                splits,
                _role_of(registration),
                activation=call.activation,
                is_memory=is_memory,
                # Records of several forwards are settled together, at the run's end: the first
                # one's tells what later ones, whose cache was not followed, don't.
                before=None if is_memory else before,
            )
        except ValueError:
            if is_memory:  # another forward may tell what this one did not
                registration.splits.clear()
                self._tracking.hooks_changed()
            raise
        try:
            move = Move.of(
                self._channel,
                settled.layout,
                list(shapes),
                dtype,
                registration.select,
                registration.split_dim,
            )
        except (IndexError, TypeError, ValueError) as error:
            raise agreed(error.__class__(f"{registration.describe()}: {error}")) from None
        if not self._tracking.tells and registration.kind != "tensor":
            call.run.moves.setdefault(registration.index, {})[key] = move
            return move
        if len(registration.splits) < _REMEMBERED_MOVES and registration.kind != "tensor":
            registration.splits[number, ndim] = settled.activation.dp, settled.activation.tp
        if settled.is_proven:
            while len(registration.moves) >= _REMEMBERED_MOVES:
                oldest = next(iter(registration.moves))  # the same one on every rank
                del registration.moves[oldest]
            registration.moves[key] = move
        return move

    def fingerprint(self, registrations: Sequence[Registration], leaf: Any) -> Tensor | None:
        """Of an activation, for the hooks on its gradient that have not seen its shape. Local."""
        if self._channel.is_local or dtensor.is_dtensor(leaf):
            return None
        key = (tuple(leaf.shape), leaf.dtype)
        if all(key in registration.shapes for registration in registrations):
            return None
        for registration in registrations:
            if len(registration.shapes) < _REMEMBERED_MOVES:
                registration.shapes.add(key)
        return values.fingerprint(dtensor.wait(leaf))

    def _splits(
        self, call: Call, shapes: Sequence[Shape], before: Splits | None
    ) -> tuple[Splits, bool]:
        """What this rank knows before asking: from this forward, else from the weight beside the
        tensor, else from earlier forwards; and whether it is from those.
        """
        registration = call.registration
        dp, tp = call.splits
        if tp is None and not self._channel.is_local:
            module = None if registration.module is None else registration.module()
            beside = dtensor.layout_beside_weight(
                module, registration.kind, shapes, self._channel.mesh, registration.describe()
            )
            tp = None if beside is None else beside.tp
        if call.is_followed or before is None:
            return (dp, tp), False
        return (before[0] if dp is None else dp, before[1] if tp is None else tp), True

    def _move_of_forward(self, call: Call, key: tuple[object, ...]) -> Move | None:
        """What the forward that is computed once more used, whichever call of it this is."""
        registration = call.registration
        moves = call.run.moves.get(registration.index, registration.moves)
        found = [move for other, move in moves.items() if other[1:] == key]
        if any(move.layout != found[0].layout for move in found):
            raise agreed(
                HookError(
                    f"{call.describe()}: the module was called with tensors that are split in "
                    "different ways, and which of its calls is computed once more in backward is "
                    "not known; do without checkpointing there, or hook another module"
                )
            )
        return found[0] if found else None


def _told_of(edits: Sequence[Tensor | None]) -> int:
    """What rank 0 tells of its edits: two bits for each tensor."""
    told = 0
    for i, edited in enumerate(edits):
        if edited is not None:
            in_graph = edited.requires_grad and torch.is_grad_enabled()
            told |= (_CHANGED | (_REQUIRES_GRAD if in_graph else 0)) << 2 * i
    return told


def _saved(tensor: Tensor) -> tuple[Tensor, int]:
    """As autograd saves a tensor where no hooks of its are set."""
    return tensor, tensor._version


def _unsaved(saved: tuple[Tensor, int]) -> Tensor:
    tensor, version = saved
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation in an editing function: a {tuple(tensor.shape)} tensor is at version "
            f"{tensor._version}, expected {version}"
        )
    return tensor


def _role_of(registration: Registration) -> inference.Role:
    if registration.kind == "tensor":
        return "parameter gradient"
    return "gradient" if registration.is_backward else "tensor"


def _handed(leaf: Tensor) -> Tensor:
    """A copy, in the graph, for the function to edit in place; never an inference tensor, so that
    its version counts.
    """
    if leaf.is_inference() or torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            return leaf.clone()
    return leaf.clone()


def _gathered(
    gather_in_graph: Callable[..., Tensor],
    part: Tensor,
    trip: Trip,
) -> Tensor:
    """The full tensor by ``gather_in_graph``, and its record, in the dtype that the hook wants;
    never an inference tensor, as in ``_handed``.
    """
    move = trip.move
    if move.is_whole and gather_in_graph is gather.gather and not part.requires_grad:
        return _handed(part)
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            full = move.cast(gather_in_graph(part, trip))
    else:
        full = move.cast(gather_in_graph(part, trip))
    if trip.record is not None:
        trip.record = move.cast(trip.record)
    return full

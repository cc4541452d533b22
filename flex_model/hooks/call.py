"""One call of one hook: the full tensor is gathered, recorded, edited, and its shards go back.

Two or more ranks: the call begins with an exchange of headers, so ranks that disagree find out
before any payload. A hook without editing function keeps a copy of its shard for the end of the
run, and nobody waits.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flex_model.distributed import gather, values
from flex_model.distributed.channel import Channel
from flex_model.distributed.gather import Move, Trip
from flex_model.distributed.header import Header, site_hash
from flex_model.distributed.layout import (
    Partial,
    Placement,
    Replicate,
    Shape,
    Shard,
    ShardLayout,
)
from flex_model.distributed.picked import Pick
from flex_model.distributed.plain import is_renamed, plain
from flex_model.errors import HookError, agreed, is_agreed
from flex_model.hooks.context import Call, seed_of_state
from flex_model.hooks.save_context import SentToAll
from flex_model.hooks.tracking import Tracking
from flex_model.hooks.user_function import UserFunction
from flex_model.integrations import dtensor
from flex_model.layouts import replicas, resolve
from flex_model.layouts.follow import Pair
from flex_model.layouts.placement_encoding import encode
from flex_model.layouts.sources import AXES
from flex_model.outputs import Records

if TYPE_CHECKING:
    from collections.abc import Sequence


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
        self._differing: list[str] = []  # axes along which ranks of the last exchange differ
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
        leaf, stated, known = dtensor.plain_and_stated(leaf, self._channel.mesh, call.describe())
        if stated != call.stated:
            call = replace(call, stated=stated)
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
            (given.index, self._handed_on(given, shard))
            for given, shard in zip(several, edits)
            if shard is not None
        ]

    def _handed_on(self, given: _Given, shard: Tensor) -> Tensor:
        """What the model goes on with, placed as the tensor before: so it is followed on."""
        edited = given.like_original(shard)
        if given.trip is not None and given.call.registration.kind in ("forward", "forward_pre"):
            layout = given.trip.move.layout
            placed: Pair = (layout.dp, layout.tp)
            if not dtensor.is_dtensor(given.original):  # whose layout is its own
                placed = resolve.placements_as_proven(layout, self._channel.mesh)
            self._tracking.note(given.call.evidence, edited, given.original, placed)
        return edited

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
        axes = self._replicated_axes(call, leaf, known)
        shapes = self._agree(call, leaf, call.registration.kind, axes)
        if self._differing:
            leaf = replicas.reconciled(
                self._channel, call.registration.layout_site, leaf, self._differing
            )
        move = self.move(call, shapes, leaf.dtype, known, leaf)

        def agree_on_gradient(grad: Tensor) -> None:
            self._agree(call, grad, "gradient of an edit")

        def of_replicas(grad: Tensor | None) -> tuple[Placement, bool]:
            placement = self._gradient_of_edit(call, grad, move.layout)
            return placement, not call.evidence.is_passing

        trip = Trip(move, agree_on_gradient, of_replicas)
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
            else given.put_back(gather.scatter(edited.to(given.part.dtype), given.way))
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
        return given.put_back(shard)

    def _agree(
        self, call: Call, tensor: Tensor, kind: str, axes: Sequence[str] = ()
    ) -> list[Shape]:
        """Exchange headers; the local shapes of all ranks.

        Args:
            axes: Along which all ranks should hold the same values; ``_differing`` are those along
                which they don't.
        """
        run, is_first = call.run, self._channel.mesh.place == 0
        header = Header(
            kind,
            site=call.registration.site,
            seed=run.seed or (seed_of_state() if is_first else 0),  # rank 0's counts
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            hash=replicas.hash_of(tensor) if axes else None,
        )
        what = "the gradient of the edit of " if kind == "gradient of an edit" else ""
        headers = self._channel.agree(header, what + call.describe())
        run.seed = headers[0].seed
        self._differing = [
            axis for axis in axes if replicas.differ(self._channel.mesh, headers, axis)
        ]
        return [header.shape for header in headers]

    def _replicated_axes(self, call: Call, tensor: Tensor, known: ShardLayout | None) -> list[str]:
        """Along which axes all ranks should hold this tensor's values, as far as that is known
        before they talk: in a followed forward its layout is compared when it is settled.

        Args:
            known: What a DTensor says, whose word is not taken for it.
        """
        if call.registration.is_backward or call.is_replay or not replicas.are_compared(tensor):
            return []
        mesh = self._channel.mesh
        sizes = (("dp", mesh.dp_size), ("tp", mesh.tp_size))
        placements = call.evidence.placements if known is None else (known.dp, known.tp)
        return [
            axis
            for (axis, size), placement in zip(sizes, placements)
            if size > 1 and placement == Replicate()
        ]

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
        registration, forward = call.registration, call.evidence.key
        if known is not None and (registration.is_backward or registration.kind == "tensor"):
            self._check_mixed(call)
        key = (call.number, tuple(shapes), dtype, known, registration.split_dim, forward)
        move = registration.moves.get(key)
        if move is None and call.number is None:
            move = self._move_of_forward(call, key[1:-1])
        call.run.keys.add(forward)
        if move is not None:
            return move
        try:
            layout = self._layout(call, shapes, known, shard)
            move = Move.of(
                self._channel,
                layout,
                list(shapes),
                dtype,
                registration.select,
                registration.split_dim,
            )
        except (HookError, IndexError, TypeError, ValueError) as error:
            if is_agreed(error):
                raise
            text = str(error)
            if registration.describe() not in text:
                text = f"{registration.describe()}: {text}"
            raise agreed(error.__class__(text)) from None
        if call.evidence.is_passing:
            return move
        while len(registration.moves) >= _REMEMBERED_MOVES:
            oldest = next(iter(registration.moves))  # the same one on every rank
            del registration.moves[oldest]
        registration.moves[key] = move
        return move

    def _check_mixed(self, call: Call) -> None:
        """ValueError where a DTensor's gradient is that of a loss that is not the unsharded
        model's. The same on every rank.
        """
        of_parameter = call.registration.kind == "tensor"
        key = None if of_parameter else call.evidence.key
        where = "" if self._channel.is_local else self._tracking.mixed(key, of_parameter)
        if where:
            raise agreed(
                ValueError(
                    f"{call.registration.layout_site.name}: the gradient is not known to be the "
                    f"unsharded model's: at {where}, ranks made something of their parts alone "
                    "where the unsharded program needs all of them, and a DTensor was made of it; "
                    "give that operation the whole tensor, or state the layout of what is made "
                    "there with annotate_layout"
                )
            )

    def _layout(
        self, call: Call, shapes: Sequence[Shape], known: ShardLayout | None, shard: Tensor
    ) -> ShardLayout:
        """How the tensor is placed, by what is proven or stated on all ranks. Collective."""
        registration, mesh = call.registration, self._channel.mesh
        site = registration.layout_site
        proven = call.evidence.placements
        prints = None
        if not self._channel.is_local and known is None:
            proven = self._tracking.prove(call.evidence)
            if registration.kind == "tensor":
                proven = registration.parameter.placements
            proven = _first_known(call.stated, proven)
            row = torch.tensor([site_hash(encode(placement)) for placement in proven])
            table = self._channel.exchange(torch.cat([values.fingerprint(shard), row])).tolist()
            prints = values.Fingerprints.of(mesh, [rank[:2] for rank in table])
            proven = _agreed(proven, [rank[2:] for rank in table])
        stated = registration.hook_function.placements
        of_gradient: Mapping[str, Placement] = {}
        is_gradient = registration.is_backward or registration.kind == "tensor"
        if is_gradient:
            of_gradient, stated = stated, _of_activation(stated, proven)
        layout = resolve.resolve(
            site,
            shapes,
            mesh,
            proven,
            stated,
            registration.expected_shape,
            known,
            call.evidence.obstacles,
        )
        if known is not None or prints is None:
            if registration.kind == "tensor" and not self._channel.is_local:
                self._check_mean(call, self._proven_gradient(call)[0])
            return layout
        if is_gradient:
            own = {axis: p for axis, p in zip(AXES, call.stated) if p is not None}
            return self._of_gradient(call, layout, {**of_gradient, **own}, shard, prints)
        for axis in resolve.differing_axes(layout, prints):
            replicas.reconciled(self._channel, site, shard, [axis])
        return layout

    def _of_gradient(
        self,
        call: Call,
        layout: ShardLayout,
        own: Mapping[str, Placement],
        grad: Tensor,
        prints: values.Fingerprints,
    ) -> ShardLayout:
        """How the gradient of a tensor of this layout is placed. Collective.

        Args:
            own: By axis, what a DTensor or the user says of the gradient itself.
        """
        is_parameter = call.registration.kind == "tensor"
        proven = dict(zip(AXES, self._proven_gradient(call)))
        placed: dict[str, Placement] = {}
        for axis, placement in (("dp", layout.dp), ("tp", layout.tp)):
            placed[axis] = placement
            if self._size(axis) == 1:
                continue
            if axis == "dp" and is_parameter:
                self._check_mean(call, proven[axis])
            elif axis in own:
                placed[axis] = own[axis]
            elif isinstance(placement, Replicate):
                if is_parameter:
                    self._check_replicas(call, axis)
                placed[axis] = self._of_replicas(
                    call, axis, proven[axis], grad, prints.equal_along(axis)
                )
            else:
                placed[axis] = self._known(call, axis, proven[axis])
        found = ShardLayout(placed["dp"], placed["tp"], source=f"its tensor's: {layout.source}")
        site = call.registration.layout_site
        return resolve.order_axes(
            site, found, self._channel.mesh, are_both_stated=len(own) == len(AXES)
        )

    def _check_replicas(self, call: Call, axis: str) -> None:
        """Ranks that share a parameter hold the same values. Collective.

        Raises:
            ValueError: they don't. On every rank.
        """
        for parameter in call.registration.living_targets[:1]:
            if dtensor.is_dtensor(parameter):
                parameter = dtensor.to_local(parameter)
            _, is_close = replicas.compared(self._channel, plain(parameter.detach()), [axis])
            if not is_close:
                raise agreed(
                    ValueError(
                        f"{call.describe()}: the ranks along {axis} hold different values of the "
                        f"parameter, of shape {tuple(parameter.shape)}, which no layer states to "
                        "be split; state the layout of shards with "
                        "annotate_layout(..., kind='parameter')"
                    )
                )

    def _proven_gradient(self, call: Call) -> Pair:
        if call.registration.kind == "tensor":
            return self._tracking.prove_parameter_gradient(call.registration)
        return self._tracking.prove_gradient(call.evidence)

    def _of_replicas(
        self, call: Call, axis: str, proven: Placement | None, grad: Tensor | None, is_equal: bool
    ) -> Placement:
        """How the ranks along ``axis`` that hold one tensor hold its gradient: each the whole, or
        parts of a sum. Collective.

        Raises:
            ValueError: it is not known; a whole one is not the same on all ranks. On every rank.
        """
        placement = self._known(call, axis, proven)
        if placement == Replicate() and grad is not None and not is_equal:
            replicas.reconciled(self._channel, call.registration.layout_site, grad, [axis])
        return placement

    def _known(self, call: Call, axis: str, proven: Placement | None) -> Placement:
        """A gradient's placement, which all ranks have proven alike, or none has.

        Raises:
            ValueError: none has. On every rank.
        """
        if proven is not None:
            return proven
        why = self._obstacle(call, axis)
        raise agreed(
            ValueError(
                f"{call.registration.layout_site.name}: how the ranks along {axis} hold the "
                "gradient, each the whole, a shard or a part of a sum, is not known"
                f"{f' ({why})' if why else ''}; state the layout of what is made there with "
                "annotate_layout, or that of the gradient, for a hook on it, with "
                f'HookFunction(placements={{"{axis}": Replicate()}}), Partial() or Shard(dim)'
            )
        )

    def _obstacle(self, call: Call, axis: str) -> str:
        if call.registration.kind == "tensor":
            return self._tracking.obstacle_of_parameter(call.registration, axis)
        return self._tracking.gradient_obstacle(call.evidence, axis)

    def _check_mean(self, call: Call, proven: Placement | None) -> None:
        """The ranks' mean along dp is a parameter's gradient if each has its part of the sum.

        Raises:
            ValueError: that is not known, or not so. The same on every rank.
        """
        is_stated = "dp" in call.registration.hook_function.placements
        if self._size("dp") == 1 or is_stated or isinstance(proven, Partial):
            return
        why = self._obstacle(call, "dp")
        raise agreed(
            ValueError(
                f"{call.describe()}: whether the data-parallel ranks' mean is the gradient is not "
                f"known{f' ({why})' if why else ''}; state the layout of what is made there with "
                "annotate_layout, or that the mean is right with "
                'HookFunction(placements={"dp": Replicate()})'
            )
        )

    def _gradient_of_edit(self, call: Call, grad: Tensor | None, layout: ShardLayout) -> Placement:
        """How the ranks along tp hold the gradient of what an edit is given and hands on, of which
        the tensor is placed as ``layout`` says. That of a DTensor's local part comes placed as the
        DTensor is. Collective.

        Raises:
            ValueError: it is not known along an axis. On every rank.
        """
        asked = [axis for axis, own in zip(AXES, call.stated) if own is None]
        proven = dict(zip(AXES, self._tracking.prove_gradient(call.evidence) if asked else ()))
        for axis in asked:
            if self._size(axis) > 1 and (axis == "dp" or not isinstance(layout.tp, Replicate)):
                self._known(call, axis, proven[axis])
        if "tp" not in asked or self._size("tp") == 1 or not isinstance(layout.tp, Replicate):
            return Replicate()
        is_equal = True
        if grad is not None:
            self._agree(call, grad, "gradient of an edit")
            table = self._channel.exchange(values.fingerprint(grad)).tolist()
            is_equal = values.Fingerprints.of(self._channel.mesh, table).equal_along("tp")
        return self._of_replicas(call, "tp", proven["tp"], grad, is_equal)

    def _size(self, axis: str) -> int:
        mesh = self._channel.mesh
        return mesh.dp_size if axis == "dp" else mesh.tp_size

    def _move_of_forward(self, call: Call, key: tuple[object, ...]) -> Move | None:
        """What the forward that is computed once more used, whichever call of it this is."""
        registration = call.registration
        found = [
            move
            for other, move in registration.moves.items()
            if other[1:-1] == key and other[-1] in call.run.keys
        ]
        if any(move.layout != found[0].layout for move in found):
            raise agreed(
                HookError(
                    f"{call.describe()}: the module was called with tensors that are split in "
                    "different ways, and which of its calls is computed once more in backward is "
                    "not known; do without checkpointing there, or hook another module"
                )
            )
        return found[0] if found else None


def _first_known(first: Pair, second: Pair) -> Pair:
    dp, tp = (one if one is not None else other for one, other in zip(first, second))
    return dp, tp


def _agreed(pair: Pair, table: Sequence[Sequence[int]]) -> Pair:
    """What all ranks have proven alike; ``table``: hashes of their placements, by rank."""
    dp, tp = (
        placement if all(row[i] == table[0][i] for row in table) else None
        for i, placement in enumerate(pair)
    )
    return dp, tp


def _of_activation(stated: Mapping[str, Placement], proven: Pair) -> dict[str, Placement]:
    """What a statement of a gradient says of its tensor: how that is split, and that it is not."""
    known = dict(zip(AXES, proven))
    return {
        axis: placement if isinstance(placement, Shard) else Replicate()
        for axis, placement in stated.items()
        if isinstance(placement, Shard) or known[axis] is None or isinstance(known[axis], Shard)
    }


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

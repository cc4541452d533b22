"""One followed forward: its log on this rank, and what the logs of all ranks prove."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from flex_model import _C
from flex_model.distributed.layout import Placement, Replicate, Shape, Shard
from flex_model.distributed.mesh import Mesh
from flex_model.integrations import layers
from flex_model.layouts import recorder
from flex_model.layouts.backward_nodes import hands_on
from flex_model.layouts.encoding import encode
from flex_model.layouts.log import Chunk, Log, Value
from flex_model.layouts.proofs import AxisProofs
from flex_model.layouts.recorder import Recorder
from flex_model.layouts.sources import AXES, Weights, stated_by_dtensor
from flex_model.layouts.statements import Statement, Statements, in_words
from flex_model.names import clean

#: Placements along dp and tp; None where nothing is proven or stated.
Pair = tuple[Placement | None, Placement | None]
UNKNOWN: Pair = (None, None)


class Proofs:
    """What is proven along both axes. Pure: from the logs of all ranks of the grid."""

    def __init__(self, mesh: Mesh, trusts_answers: bool = True) -> None:
        self._mesh = mesh
        sizes = (mesh.dp_size, mesh.tp_size)
        self.along = {
            axis: AxisProofs(axis, size, other, trusts_answers)
            for axis, size, other in zip(AXES, sizes, reversed(sizes))
            if size > 1
        }

    def follow(self, chunks: Sequence[Chunk]) -> None:
        """The next chunks of the logs of all ranks of the grid."""
        for axis, proofs in self.along.items():
            proofs.follow([chunks[place] for place in self._mesh.members((axis,))])

    def placements(self, value: Any) -> Pair:
        """Of a value; an axis of one rank is always replicated."""
        dp, tp = (
            Replicate() if proofs is None else proofs.placement(proofs.meant(value))
            for proofs in map(self.along.get, AXES)
        )
        return dp, tp

    def gradient_placements(self, value: Any, partly: bool = False) -> Pair:
        """Of the gradient of a value, likewise; ``partly``: see `Gradients.placement`."""
        dp, tp = (
            Replicate()
            if proofs is None
            else proofs.gradients.placement(proofs.meant(value), partly)
            for proofs in map(self.along.get, AXES)
        )
        return dp, tp

    def obstacle(self, value: Any, axis: str) -> str:
        """The first operation on the way to a value at which its placement was lost; empty where
        it is known, or nothing is known of it.
        """
        proofs = self.along.get(axis)
        if proofs is None:
            return ""
        return proofs.lost_at(proofs.meant(value))

    def refuted_statement(self) -> str:
        """What is wrong with a statement of the user's; empty if nothing is. The same on all ranks
        of the grid, but for the sizes.
        """
        for axis, proofs in self.along.items():
            for value, text, stated, proven in proofs.conflicts:
                steps = "; ".join(self.why(value, axis)[-4:])
                return (
                    f"{text}: by the operations that made it the tensor is {in_words(proven)} "
                    f"along {axis}, not {in_words(stated)} ({steps}); leave the statement out, or "
                    "state the layout of the weight that it was made with"
                )
            for value, text, sizes in proofs.stated_sizes:
                if self._has_parts_of_both(value):
                    return (
                        f"{text}: both axes split the dim of the parts, so that they are not told "
                        "by their full sizes; state the tensor before its dims are joined"
                    )
                full = self._full_shape(value)
                if full is not None and any(
                    size not in (None, own) for size, own in zip(sizes, full)
                ):
                    return f"{text}: the sizes {sizes} are stated, the full tensor has shape {full}"
        return ""

    def _has_parts_of_both(self, value: Value) -> bool:
        """Whether both axes split a dim, one of them in parts."""
        found = [proofs.placements.get(value) for proofs in self.along.values()]
        shards = [placement for placement in found if isinstance(placement, Shard)]
        is_one_dim = len({shard.dim for shard in shards}) == 1 and len(shards) > 1
        return is_one_dim and any(shard.is_interleaved for shard in shards)

    def _full_shape(self, value: Value) -> Shape | None:
        """The full shape of a value that is placed along all axes."""
        full: list[int] = []
        for proofs in self.along.values():
            if value not in proofs.placements:
                return None
            local = proofs.shapes[value][0]
            full = full or list(local)
            for dim, size in enumerate(local):
                along = proofs.size(value, dim) or 0
                full[dim] = full[dim] * along // size if size else along
        return tuple(full)

    def why(self, value: Any, axis: str) -> list[str]:
        """The proof of a value's placement along an axis, operation by operation, from the first
        one on.
        """
        proofs = self.along.get(axis)
        if proofs is not None:
            value = proofs.meant(value)
        if proofs is None or not isinstance(value, int):
            return []
        lines: list[str] = []
        seen: set[Value] = set()
        pending: list[tuple[Value, bool]] = [(value, False)]
        while pending:
            one, is_done = pending.pop()
            step = proofs.steps.get(one)
            if step is None:
                continue
            if is_done:
                lines.append(f"{proofs.placements.get(one) or 'not known'}: {step.text}")
            elif one not in seen:
                seen.add(one)
                pending.append((one, True))
                pending += [(source, False) for source in reversed(step.inputs)]
        return lines


def recording() -> list[Follower]:
    """Those that record now, of all FlexModels."""
    found = (one.owner() for one in recorder.entered)
    return [follower for follower in found if follower is not None]


def paused(*others: Follower) -> AbstractContextManager[None]:
    """What runs inside is no part of the model, for no FlexModel."""
    return _paused(others) if others or recorder.entered else nullcontext()


@contextmanager
def _paused(others: tuple[Follower, ...]) -> Iterator[None]:
    with ExitStack() as stack:
        for follower in dict.fromkeys([*others, *recording()]):
            stack.enter_context(follower.recorder.paused())
        yield


class Follower:
    """Follows one forward. Local, but for ``sync``.

    Args:
        kept: See `Recorder`.
    """

    def __init__(
        self,
        root: nn.Module,
        mesh: Mesh,
        statements: Statements,
        weights: Weights,
        kept: Callable[[Tensor], tuple[str, Any] | None] = lambda tensor: None,
        trusts_answers: bool = True,
    ) -> None:
        self._root, self._mesh, self._statements = root, mesh, statements
        self._weights = weights
        self.log = Log()
        self.proofs = Proofs(mesh, trusts_answers)
        self._axes_of_groups: dict[Any, tuple[str, ...] | None] = {}
        self.recorder = Recorder(
            self,
            self.log,
            weights.source,
            kept,
            self._axes_of,
            lambda tensor: stated_by_dtensor(tensor, mesh),
            any(map(_has_backward_hooks, root.modules())),
        )
        self._modules: dict[int, str] = {}
        # Modules that run, with their paths in the log and the sizes stated outside of them.
        self._open: list[tuple[int, str, frozenset[int]]] = []
        self._handles: list[Any] = []
        # Statements that have named a tensor, and those that a module was met without theirs.
        self._applied: set[Statement] = set()
        self._short: dict[Statement, str] = {}

    def __enter__(self) -> Follower:
        """Begin to record."""
        self._modules = {
            id(module): clean(self._root, name) for name, module in self._root.named_modules()
        }
        # The model itself has begun before: no hook tells.
        self.recorder.run_module(layers.stated_last_sizes(self._root))
        self._handles = list(self._statement_hooks())
        # Nor are hooks put on it: they would be taken off while torch goes through those that it
        # calls after an error.
        for module in self._root.modules():
            if module is self._root:
                continue
            self._handles += [
                module.register_forward_pre_hook(self._entered, prepend=True),
                module.register_forward_hook(self._left, prepend=True, always_call=True),
            ]
        self.recorder.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.recorder.__exit__(*exc_info)
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def refuted_statement(self, is_over: bool) -> str:
        """What is wrong with a statement of the user's; empty if nothing is.

        Args:
            is_over: Whether the forward is: then a statement must have named a tensor of a module.
        """
        for statement, text in self._short.items() if is_over else ():
            if statement not in self._applied:
                return (
                    f"{statement.describe()}: index={statement.index}, but {text}; count them "
                    "from 0, as HookFunction(unpack_idx=...) does"
                )
        return self.proofs.refuted_statement()

    def is_of(self, root: nn.Module) -> bool:
        """Whether it follows this model."""
        return root is self._root

    # Modules.

    def _entered(self, module: nn.Module, args: Any) -> None:
        name = self._modules.get(id(module))
        if name is not None and not self.recorder.is_paused:
            outside = self.recorder.stated_sizes
            self._open.append((id(module), self.log.enter(name), outside))
            self.recorder.run_module(layers.stated_last_sizes(module) or outside)
            self._weights.enter(module, name)

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self.recorder.is_paused and any(key == id(module) for key, _, _ in self._open):
            while True:  # those inside that an exception left
                key, path, outside = self._open.pop()
                self.recorder.run_module(outside)
                self.log.exit(path)
                if key == id(module):
                    return

    def _statement_hooks(self) -> Iterator[Any]:
        for module in self._root.modules():
            if layers.gives_the_same_to_all(module):
                yield module.register_forward_hook(self._state_shared, prepend=True)
        for _, module, statement in self._statements.of_modules():
            if statement.kind == "forward_pre":
                yield module.register_forward_pre_hook(
                    self._stating(statement), prepend=True, with_kwargs=True
                )
            else:
                yield module.register_forward_hook(self._stating(statement), prepend=True)

    def _state_shared(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self.recorder.is_paused:
            for tensor in _tensors(output):
                text = f"results of a {type(module).__name__}"
                self.recorder.state(tensor, (None, encode(Replicate())), text, None)

    def _stating(self, statement: Statement) -> Callable[..., None]:
        takes_inputs = statement.kind == "forward_pre"

        def state(module: nn.Module, given: Any, other: Any) -> None:
            tensors = _tensors((given, other) if takes_inputs else other)
            if self.recorder.is_paused:
                return
            if statement.index >= len(tensors):
                name = self._modules.get(id(module), "")
                self._short.setdefault(statement, f"{name!r} has {len(tensors)} tensors there")
            else:
                self._applied.add(statement)
                placements = (encode(statement.dp), encode(statement.tp))
                tensor, text = tensors[statement.index], statement.describe()
                self.recorder.state(tensor, placements, text, statement.sizes)

        return state

    # What is known of tensors.

    def note_input(self, tensor: Tensor, name: str, placements: Pair) -> None:
        """An input of the forward. Under the same name on all ranks."""
        dp, tp = placements
        self.recorder.add_source(tensor, name, (encode(dp), encode(tp)))

    def stands_for(self, tensor: Tensor, other: Tensor) -> None:
        """``tensor`` is used in the place of an input."""
        value = self.recorder.value(other)
        if isinstance(value, int):
            self.recorder.values.note(tensor, value)

    def place_edited(self, tensor: Tensor, original: Tensor, placements: Pair) -> Any:
        """What a hook put into the model in the place of ``original``, and its value. Of other
        FlexModels, those with the same ranks know of it too; to the others it is not known.
        """
        for follower in dict.fromkeys([self, *recording()]):
            if follower._mesh == self._mesh:
                dp, tp = placements
                follower.recorder.place(tensor, (encode(dp), encode(tp)), original)
            else:
                follower.recorder.lose(tensor)
        return self.recorder.value(tensor)

    def value(self, tensor: Tensor) -> Any:
        """What stands for the tensor as it is now on this rank, for ``placements`` after the next
        ``sync``.
        """
        return self.recorder.value(tensor)

    def meet(self, tensor: Tensor) -> Any:
        """Likewise, of a tensor that ranks meet alike: ``placements`` are those that it has on all
        ranks, none where it is not the same one on all.
        """
        before, value = self.recorder.value(tensor), self.log.new_value()
        self.log.add("met", value, before)
        return value

    def weight(self, tensor: Tensor, name: str) -> Value | None:
        """What stands for a weight that the forward has used."""
        return self.recorder.values.weight(tensor, name)

    def has_written(self, buffer: Tensor) -> bool:
        """Whether a write to the buffer was seen."""
        before = self.recorder.values.weight(buffer, "")
        return before is not None and self.recorder.value(buffer) != before

    def meet_written(self, buffer: Tensor, is_same: bool) -> Any:
        """Likewise, of a buffer of the model that was written to: nothing is known of it where the
        write was not seen.

        Args:
            is_same: Whether it is the tensor that it was when the forward began.
        """
        if is_same and not self.has_written(buffer):
            value = self.log.new_value()
            self.log.add("met", value, None)
            return value
        return self.meet(buffer)

    def placements(self, value: Any) -> Pair:
        """Where the tensor of this value is, as far as ``sync`` has compared the logs."""
        return self.proofs.placements(value)

    def note_outputs(self, output: Any) -> None:
        """The forward returns these, where gradients begin."""
        for tensor in _tensors(output):
            value = self.recorder.value(tensor)
            if isinstance(value, int):
                self.log.add("output", value)
                if _has_backward_hooks(self._root):  # they come behind
                    self.recorder.nodes.note_module_hook(value)

    def gradient_placements(self, value: Any, partly: bool = False) -> Pair:
        """Of the gradient of the tensor of this value, likewise."""
        return self.proofs.gradient_placements(value, partly)

    @property
    def mixed_in_dtensor(self) -> str:
        """Where ranks mixed parts of what a DTensor was then made of; empty if nowhere."""
        found = (proofs.mixed_in_dtensor for proofs in self.proofs.along.values())
        return next(filter(None, found), "")

    def obstacles(self, value: Any) -> dict[str, str]:
        """By axis that is not known: where that began."""
        pair = self.placements(value)
        return {
            axis: self.proofs.obstacle(value, axis)
            for axis, placement in zip(AXES, pair)
            if placement is None
        }

    # Among ranks.

    def sync(self, exchange: Callable[[Chunk, int], Sequence[Chunk]]) -> None:
        """Compare what the ranks have run since the last time, and conclude what that proves.

        Args:
            exchange: Gives the chunks of all ranks of the grid for this rank's chunk and the digest
                of its whole log. Collective.
        """
        self.recorder.settle()
        digest = self.log.digest
        self.proofs.follow(exchange(self.log.take(), digest))

    def _axes_of(self, args: Any, kwargs: Any) -> tuple[str, ...] | None:
        """The axes that a collective's group runs along; None if it is no group of ours."""
        for leaf in tree_iter((args, kwargs)):
            if isinstance(leaf, (str, torch.ScriptObject)):
                group = group_of(leaf)
                if group is not None:
                    return self._axes_of_ranks(tuple(dist.get_process_group_ranks(group)))
        return None

    def _axes_of_ranks(self, ranks: tuple[int, ...]) -> tuple[str, ...] | None:
        if ranks not in self._axes_of_groups:
            mesh, found = self._mesh, None
            for axes in (("tp",), ("dp",), ("dp", "tp")):
                if tuple(mesh.grid[place] for place in mesh.members(axes)) == ranks:
                    found = axes
                    break
            self._axes_of_groups[ranks] = found
        return self._axes_of_groups[ranks]


def _has_backward_hooks(module: nn.Module) -> bool:
    """Whether hooks on its gradients are there that are no framework's."""
    hooks = (*module._backward_pre_hooks.values(), *module._backward_hooks.values())
    return not all(map(hands_on, hooks))


def _tensors(tree: Any) -> list[Tensor]:
    return list(_C.flatten(tree)[0])


def group_of(value: Any) -> Any:
    """The process group of an operation's argument, a name or an object; None of all else."""
    if isinstance(value, str):
        try:
            return dist.distributed_c10d._resolve_process_group(value)  # type: ignore[arg-type]
        except (LookupError, RuntimeError, ValueError):
            return None
    try:
        return dist.ProcessGroup.unbox(value)
    except (RuntimeError, TypeError, ValueError):
        return None

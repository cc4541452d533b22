"""Follows one forward: logs it on this rank, and infers placements from the logs of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from flex_model import _C
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.header import Header
from flex_model.distributed.mesh import Mesh
from flex_model.distributed.placement import Replicate
from flex_model.integrations import layers, transformers_private
from flex_model.integrations.torch_private import find_group, uncounted
from flex_model.layouts import active, logged
from flex_model.layouts.contracts import experts
from flex_model.layouts.graph_nodes import has_backward_hooks
from flex_model.layouts.logged import Value
from flex_model.layouts.mesh_proofs import MeshProofs
from flex_model.layouts.obstacle import Obstacle
from flex_model.layouts.operation_log import Chunk, Log
from flex_model.layouts.placement_encoding import UNKNOWN as UNKNOWN
from flex_model.layouts.placement_encoding import Pair, encode
from flex_model.layouts.recorder import Recorder
from flex_model.layouts.sources import AXES, Weights, stated_by_dtensor
from flex_model.layouts.statements import Statement, Statements
from flex_model.names import clean


def recording() -> list[Follower]:
    """Return the followers of all FlexModels that record now."""
    return [one.owner for one in active.active_recorders()]


def paused(*others: Follower) -> AbstractContextManager[None]:
    """Exclude what runs inside from the logs of all FlexModels, and from what checkpointing saves
    of single operations: it is not part of the model.
    """
    if not others and not active.active_recorders():
        return uncounted()
    return _all_paused(*others)


@contextmanager
def _all_paused(*others: Follower) -> Iterator[None]:
    with uncounted(), active.all_paused(*(follower.recorder for follower in others)):
        yield


def place_edited(mesh: Mesh, tensor: Tensor, original: Tensor, placements: Pair) -> None:
    """Log a tensor that a hook put in place of ``original`` in all followed forwards: with
    its placements where the ranks are the same, else as unknown.
    """
    for follower in recording():
        if follower._mesh == mesh:
            dp, tp = placements
            follower.recorder.place(tensor, (encode(dp), encode(tp)), original)
        else:
            follower.recorder.invalidate(tensor)


class Follower:
    """Follows one forward: records it, and infers placements. Local, except for ``sync``.

    Attributes:
        weights: Finds the placements of weights and buffers.
        kept: Returns the name and placements of a tensor that was kept from an earlier forward;
            else None.
        stated_sizes: Of last dims, which the running module states.
        passed: The values of inputs.
    """

    def __init__(
        self,
        root: nn.Module,
        mesh: Mesh,
        statements: Statements,
        weights: Weights,
        kept: Callable[[Tensor], tuple[str, Any] | None] = lambda tensor: None,
    ) -> None:
        self.root, self._mesh, self._statements = root, mesh, statements
        self.weights, self.kept = weights, kept
        self.stated_sizes: frozenset[int] = frozenset()
        self.log = Log()
        self.proofs = MeshProofs(mesh)
        self._axes_of_groups = {
            tuple(mesh.stage_ranks[place] for place in mesh.ranks_along(axes)): axes
            for axes in (("dp", "tp"), ("dp",), ("tp",))  # the last, where an axis has one rank
        }
        self.recorder = Recorder(self)
        self.passed: set[Value] = set()
        self._modules: dict[int, str] = {}
        self._words: dict[int, tuple[str, ...]] = {}  # by module: those of its last call
        # Running modules, with their paths in the log and the sizes stated by the modules around
        # them.
        self._open: list[tuple[int, str, frozenset[int]]] = []
        self._handles: list[Any] = []
        # Statements that were applied to a tensor, and those whose index exceeded a module's
        # tensors.
        self._applied: set[Statement] = set()
        self._missing: dict[Statement, str] = {}

    def __enter__(self) -> Follower:
        """Begin to record."""
        transformers_private.clear_tables(self.root)
        self._modules = {
            id(module): clean(self.root, name) for name, module in self.root.named_modules()
        }
        # The forward of the root has begun already, so no hook reports it.
        self.stated_sizes = layers.stated_last_sizes(self.root)
        self._handles = list(self._statement_hooks())
        # The root gets no hooks: removing them would change the hooks that torch iterates over
        # after an error.
        for module in self.root.modules():
            if module is self.root:
                continue
            self._handles += [
                module.register_forward_pre_hook(
                    self._enter_module, prepend=True, with_kwargs=True
                ),
                module.register_forward_hook(self._exit_module, prepend=True, always_call=True),
            ]
        self.recorder.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.recorder.__exit__(*exc_info)
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def refuted_statement(self, is_over: bool) -> str:
        """Return why a statement of the user is wrong; empty if none is.

        Args:
            is_over: Whether the forward has ended: each statement must then have been applied to a
                tensor.
        """
        for statement, text in self._missing.items() if is_over else ():
            if statement not in self._applied:
                return (
                    f"{statement.describe()}: index={statement.index}, but {text}; count them "
                    "from 0, as HookFunction(unpack_idx=...) does"
                )
        return self.proofs.refuted_statement()

    # Modules.

    def words(self, module: nn.Module) -> tuple[str, ...]:
        """Return the identifiers among the arguments of the module's last call and of the calls
        around it, such as a kind of layer: ranks whose calls differ in them are at different calls.
        """
        return self._words.get(id(module), ())

    def _enter_module(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        name = self._modules.get(id(module))
        if name is not None and not self.recorder.is_paused:
            given = (one for one in (*args, *kwargs.values()) if isinstance(one, str))
            around = self._words[self._open[-1][0]] if self._open else ()
            self._words[id(module)] = (*around, *filter(str.isidentifier, given))
            self._open.append((id(module), self.log.enter(name), self.stated_sizes))
            self.stated_sizes = layers.stated_last_sizes(module) or self.stated_sizes
            self.weights.enter(module, name)

    def _exit_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self.recorder.is_paused and any(key == id(module) for key, _, _ in self._open):
            while True:  # also modules inside that an exception ended
                key, path, self.stated_sizes = self._open.pop()
                self.log.exit(path)
                if key == id(module):
                    return

    def _statement_hooks(self) -> Iterator[Any]:
        for module in self.root.modules():
            if layers.gives_the_same_to_all(module):
                yield module.register_forward_hook(self._state_shared, prepend=True)
            if experts.is_opaque(module):
                yield module.register_forward_pre_hook(lambda *_: self.recorder.begin_opaque())
            if experts.num_inputs(module):
                yield module.register_forward_hook(
                    self._note_experts, prepend=True, with_kwargs=True, always_call=True
                )
        for module, statement in self._statements.of_modules():
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

    def _note_experts(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        is_opaque = experts.is_opaque(module)
        if is_opaque:
            self.recorder.end_opaque()
        made = _tensors(output)  # none after an exception
        if made and not self.recorder.is_paused:
            inputs = _tensors((args, kwargs))[: experts.num_inputs(module)]
            own = experts.returns_own_rows(module)
            self.recorder.note_experts(inputs, made[0], experts.refusal(module), is_opaque, own)

    def _stating(self, statement: Statement) -> Callable[..., None]:
        takes_inputs = statement.kind == "forward_pre"

        def state(module: nn.Module, given: Any, other: Any) -> None:
            tensors = _tensors((given, other) if takes_inputs else other)
            if self.recorder.is_paused:
                return
            if statement.index >= len(tensors):
                name = self._modules.get(id(module), "")
                self._missing.setdefault(statement, f"{name!r} has {len(tensors)} tensors there")
            else:
                self._applied.add(statement)
                placements = (encode(statement.dp), encode(statement.tp))
                tensor, text = tensors[statement.index], statement.describe()
                self.recorder.state(tensor, placements, text, statement.sizes)

        return state

    # What is known of tensors.

    def note_input(
        self, tensor: Tensor, name: str, placements: Pair, open_dims: tuple[int, ...] = ()
    ) -> None:
        """Log an input of the forward, under the same name on all ranks."""
        dp, tp = map(encode, placements)
        self.passed.add(self.recorder.add_source(tensor, name, (dp, tp), open_dims=open_dims))

    def note_substitute(self, tensor: Tensor, other: Tensor) -> None:
        """Note that ``tensor`` is used in place of the input ``other``."""
        value = self.recorder.value(other)
        if isinstance(value, int):
            self.recorder.values.note(tensor, value)

    def joint_value(self, tensor: Tensor | None) -> Any:
        """Return a value for a tensor that every rank has here. It has the tensor's placements if
        all ranks have the same tensor of the program, or each its piece of one; else none, as for
        None.
        """
        before = None if tensor is None else self.recorder.value(tensor)
        value = self.log.new_value()
        self.log.add(logged.Joint(value, before))
        return value

    def weight_of(self, parameters: Sequence[Tensor], name: str) -> Value | None:
        """Return the value of the parameters' first one that the forward has used."""
        found = (self.recorder.values.weight(parameter, name) for parameter in parameters)
        return next((value for value in found if value is not None), None)

    def has_written(self, buffer: Tensor) -> bool:
        """Whether a write to the buffer was recorded."""
        before = self.recorder.values.weight(buffer, "")
        return before is not None and self.recorder.value(buffer) != before

    def joint_buffer_value(self, buffer: Tensor, is_same: bool) -> Any:
        """Return ``joint_value`` of a buffer that was written to; nothing is known of it where the
        write was not recorded.

        Args:
            is_same: Whether it is the same tensor object as when the forward began.
        """
        is_lost = is_same and not self.has_written(buffer)
        return self.joint_value(None if is_lost else buffer)

    def placements(self, value: Any) -> Pair:
        """Return the placements of a value, as far as ``sync`` has compared the logs."""
        return self.proofs.placements(value)

    def note_outputs(self, output: Any, part: str = "") -> None:
        """Log the tensors that the forward returns, where gradients begin; ``part``: the name of
        the module that was called, if it is not the model.
        """
        for tensor in _tensors(output):
            value = self.recorder.value(tensor)
            # Where gradients are recorded, no loss depends on what has none, such as a norm's mean.
            if isinstance(value, int) and (tensor.requires_grad or not torch.is_grad_enabled()):
                self.log.add(logged.Output(value, part))
                if has_backward_hooks(self.root):  # torch adds the root's hooks later
                    self.recorder.nodes.note_module_hook(value)

    def obstacles(self, value: Any) -> dict[str, Obstacle]:
        """Return, for each axis whose placement is not known, where it was lost, if it was."""
        placed = dict(zip(AXES, self.placements(value)))
        found = {
            axis: self.proofs.along[axis].obstacle(value)
            for axis, placement in placed.items()
            if placement is None
        }
        return {axis: obstacle for axis, obstacle in found.items() if obstacle is not None}

    # Among ranks.

    def sync(self, communicator: Communicator) -> None:
        """Compare tensor-parallel ranks' logs since the last comparison, and infer placements.
        Collective where there are tensor-parallel ranks.

        Those with the same log, such as with even shards, exchange a hash; others exchange the
        entries. Data-parallel ranks exchange nothing: each infers alone.
        """
        digest, chunk = self.log.digest, self.log.take()
        chunks = [chunk] * len(communicator.mesh.stage_ranks)
        if communicator.mesh.tp_size > 1:
            with communicator.uncounted():
                chunks = self._exchanged(communicator, chunk, digest)
        self.proofs.follow(chunks)

    def _exchanged(self, communicator: Communicator, chunk: Chunk, digest: int) -> list[Chunk]:
        communicator.check_consistency(
            Header("inputs", site=self.log.num_syncs), "what a forward has run so far"
        )
        digests = communicator.exchange(torch.tensor([digest], device="cpu")).flatten().tolist()
        if communicator.mesh.equal_along("tp", digests):
            return [chunk] * len(digests)
        packed = chunk.pack(self.recorder.values.live())
        lengths = (
            communicator.exchange(torch.tensor([len(packed)], device="cpu")).flatten().tolist()
        )
        texts = communicator.exchange_padded(packed, max(lengths))
        chunks = {text: Chunk.unpack(text) for text in set(texts)}  # some ranks' are equal
        return [chunks[text] for text in texts]

    def infer_from(self, proofs: MeshProofs, chunks: Sequence[Chunk]) -> None:
        """Infer placements by these proofs, from the whole logs of all ranks of the grid. Local."""
        self.proofs = proofs
        proofs.follow(chunks)

    def stated(self, tensor: Tensor | None) -> Any:
        """Return the encoded placements that a DTensor states; None for all else."""
        return stated_by_dtensor(tensor, self._mesh)

    def axes_of(self, args: Any, kwargs: Any) -> tuple[str, ...] | None:
        """Return the axes along which a collective's group runs; None for a group that is
        no axis.
        """
        for leaf in tree_iter((args, kwargs)):
            if isinstance(leaf, (str, torch.ScriptObject)):
                group = group_of(leaf)
                if group is not None:
                    ranks = tuple(dist.get_process_group_ranks(group))
                    return self._axes_of_groups.get(ranks)
        return None


def _tensors(tree: Any) -> list[Tensor]:
    return list(_C.flatten(tree)[0])


def group_of(value: Any) -> Any:
    """Return the process group of an operation's argument, a name or an object; None for
    all else.
    """
    if isinstance(value, str):
        try:
            return find_group(value)
        except (LookupError, RuntimeError, ValueError):
            return None
    try:
        return dist.ProcessGroup.unbox(value)
    except (RuntimeError, TypeError, ValueError):
        return None

"""One call of one hook: the full tensor is gathered, recorded, edited, and its shards go back.

Two or more ranks: the call begins with an exchange of headers, so ranks that disagree find out
    before any payload.
A hook without editing function keeps a copy of its shard for the end of the run, and nobody waits.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flex_model.distributed import gather, inference
from flex_model.distributed.channel import Channel
from flex_model.distributed.gather import Move
from flex_model.distributed.header import Header
from flex_model.distributed.layout import Shape, ShardLayout
from flex_model.hooks.context import (
    RandomState,
    RunContext,
    seed_of_call,
    seed_of_state,
    throw_away,
)
from flex_model.hooks.registration import Registration
from flex_model.integrations import dtensor
from flex_model.outputs import Records

if TYPE_CHECKING:
    from collections.abc import Sequence

_REMEMBERED_MOVES = 128  # per hook: generation may bring a new shape with every step
_CHANGED, _REQUIRES_GRAD = 1, 2  # what rank 0 tells of its edit, in Header.microbatch


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
    ) -> None:
        self._channel = channel
        self._records = records
        self._save_ctx = save_ctx
        self._modules = modules
        self._edit_on_all = edit_on == "all"
        self._full_parameter = full_parameter

    # The three kinds of values.

    def activation(
        self,
        registration: Registration,
        module: nn.Module,
        leaf: Tensor,
        context: RunContext,
        replay: bool,
    ) -> Tensor:
        """A forward or forward-pre hook on one tensor; the tensor that the model goes on with."""
        check_movable(registration, leaf)
        if not registration.edits:
            if not replay:
                self._collect(registration, leaf, context)
            return leaf
        edited = self._edit(registration, module, leaf, context, replay=replay)
        return leaf if edited is None else edited

    def gradient(
        self, registration: Registration, module: nn.Module, grad: Tensor, context: RunContext
    ) -> Tensor:
        """A backward hook on one gradient. Along dp its values are those of the mean loss over
        ranks.
        """
        check_movable(registration, grad)
        grad = dtensor.without_partial(grad) if dtensor.is_dtensor(grad) else grad
        scale = self._channel.mesh.dp_size
        if not registration.edits:
            self._collect(registration, grad / scale if scale > 1 else grad, context)
            return grad
        given = grad / scale if scale > 1 else grad
        edited = self._edit(registration, module, given, context)
        if edited is None:
            return grad
        return edited * scale if scale > 1 else edited

    def parameter_gradient(
        self, registration: Registration, grad: Tensor, context: RunContext
    ) -> Tensor:
        """A hook on a parameter's gradient: averaged over dp, in full; the average goes on."""
        check_movable(registration, grad)
        if dtensor.is_dtensor(grad):
            grad = dtensor.without_partial(grad)
        grad = self._mean_over_dp(registration, grad)
        if not registration.edits:
            self._collect(registration, grad, context)
            return grad
        edited = self._edit(registration, None, grad, context)
        return grad if edited is None else edited

    def _mean_over_dp(self, registration: Registration, grad: Tensor) -> Tensor:
        mesh = self._channel.mesh
        if mesh.dp_size == 1:
            return grad
        plain = grad
        if dtensor.is_dtensor(grad):
            if dtensor.reaches_dp(grad, mesh, registration.describe()):
                return grad  # FSDP2: already averaged
            plain = dtensor.to_local(grad)
        self._agree(registration, plain, "tensor")
        mean = self._channel.all_reduce_sum(("dp",), plain) / mesh.dp_size
        return dtensor.like(mean, grad) if dtensor.is_dtensor(grad) else mean

    # Looking only.

    def _collect(self, registration: Registration, leaf: Tensor, context: RunContext) -> None:
        known = None
        if dtensor.is_dtensor(leaf):
            leaf = dtensor.without_partial(leaf)
            known = self._known_layout(registration, leaf)
            leaf = dtensor.to_local(leaf)
        if self._channel.is_local:
            self._check_alone(registration, leaf)
            self._records.now(registration, leaf)
        else:
            self._records.later(context, registration, dtensor.wait(leaf), known)

    def _check_alone(self, registration: Registration, leaf: Tensor) -> None:
        """One rank: the tensor is full, and ``expected_shape`` must say so."""
        expected = registration.hook_function.expected_shape
        if expected is not None:
            shapes = [tuple(leaf.shape)]
            inference.settle(
                self._channel, registration.describe(), leaf, shapes, expected, None, True
            )

    # Editing.

    def _edit(
        self,
        registration: Registration,
        module: nn.Module | None,
        leaf: Tensor,
        context: RunContext,
        replay: bool = False,
    ) -> Tensor | None:
        """Gather, record, edit, scatter; None if the function changed nothing."""
        original, known = leaf, None
        if dtensor.is_dtensor(leaf):
            known = self._known_layout(registration, leaf)
            leaf = dtensor.to_local(leaf)
        leaf = dtensor.wait(leaf)
        if self._channel.is_local:
            shard = self._edit_alone(registration, module, leaf, context, replay)
        else:
            shard = self._edit_together(registration, module, leaf, known, context, replay)
        if shard is not None and dtensor.is_dtensor(original):
            return dtensor.like(shard, original)
        return shard

    def _edit_alone(
        self,
        registration: Registration,
        module: nn.Module | None,
        leaf: Tensor,
        context: RunContext,
        replay: bool,
    ) -> Tensor | None:
        self._check_alone(registration, leaf)
        if not replay:
            self._records.now(registration, leaf)
        if context.seed is None:
            context.seed = seed_of_state()
        edited = self._call(registration, module, _handed(leaf), leaf, context, replay)
        # a copy, as shards are: the model may change it in place, and the user may keep what was
        # returned
        return None if edited is None else edited.clone()

    def _edit_together(
        self,
        registration: Registration,
        module: nn.Module | None,
        leaf: Tensor,
        known: ShardLayout | None,
        context: RunContext,
        replay: bool,
    ) -> Tensor | None:
        shapes = self._agree(registration, leaf, registration.kind, context)
        move = self.move(registration, shapes, leaf.dtype, known, leaf)

        def agree_on_gradient(grad: Tensor) -> None:
            self._agree(registration, grad, "gradient of an edit")

        if self._edit_on_all:
            full = gather.gather(leaf, move, agree_on_gradient) if move.axes else _handed(leaf)
            if not replay:
                self._records.now(registration, full)
            edited = self._call(registration, module, full, leaf, context, replay)
            return None if edited is None else gather.scatter(edited, move, agree_on_gradient)
        return self._edit_on_first(
            registration, module, leaf, move, agree_on_gradient, context, replay
        )

    def _edit_on_first(
        self,
        registration: Registration,
        module: nn.Module | None,
        leaf: Tensor,
        move: Move,
        agree_on_gradient: Callable[[Tensor], None],
        context: RunContext,
        replay: bool,
    ) -> Tensor | None:
        channel = self._channel
        gathered = gather.gather_to_first(leaf, move, agree_on_gradient)
        edited = None
        if self._records.on_all_ranks and not replay:
            everywhere = move.all_gather(leaf)
            self._records.now(registration, everywhere)
        if channel.mesh.place == 0:
            if not self._records.on_all_ranks and not replay:
                self._records.now(registration, gathered)
            try:
                edited = self._call(registration, module, gathered, leaf, context, replay)
            except Exception as error:
                if replay:
                    raise
                channel.set_error(f"{type(error).__name__}: {error}", error)
        told = 0
        if edited is not None:
            told = _CHANGED | (
                _REQUIRES_GRAD if edited.requires_grad and torch.is_grad_enabled() else 0
            )
        headers = channel.agree(
            Header("result of an edit on rank 0", site=registration.site, microbatch=told),
            f"the result of the edit of {registration.describe()}",
        )
        told = headers[0].microbatch
        if not told & _CHANGED:
            return None
        requires_grad = bool(told & _REQUIRES_GRAD) and torch.is_grad_enabled()
        return gather.scatter_from_first(
            edited, gathered, move, agree_on_gradient, leaf, requires_grad
        )

    def _agree(
        self,
        registration: Registration,
        tensor: Tensor,
        kind: str,
        context: RunContext | None = None,
    ) -> list[Shape]:
        """Exchange headers; the local shapes of all ranks."""
        seed = 0
        if context is not None:
            seed = seed_of_state() if context.seed is None else context.seed
        header = Header(
            kind, site=registration.site, seed=seed, dtype=tensor.dtype, shape=tuple(tensor.shape)
        )
        where = (
            f"the gradient of the edit of {registration.describe()}"
            if kind == "gradient of an edit"
            else registration.describe()
        )
        headers = self._channel.agree(header, where)
        if context is not None and context.seed is None:
            context.seed = headers[0].seed
        return [header.shape for header in headers]

    # Layout.

    def _known_layout(self, registration: Registration, leaf: Any) -> ShardLayout:
        mesh, site = self._channel.mesh, registration.describe()
        return dtensor.layout(leaf, mesh, site, batch_on_dp=registration.batch_on_dp)

    def move(
        self,
        registration: Registration,
        shapes: Sequence[Shape],
        dtype: torch.dtype,
        known: ShardLayout | None,
        shard: Tensor,
    ) -> Move:
        """The plan for what all ranks hold, cached; probes the values where the layout is new.
        Collective then.
        """
        key = (tuple(shapes), dtype, known)
        move = registration.moves.get(key)
        if move is None:
            layout = inference.settle(
                self._channel,
                registration.describe(),
                shard,
                shapes,
                registration.hook_function.expected_shape,
                known,
                registration.batch_on_dp,
            )
            move = Move.of(self._channel, layout, list(shapes), dtype)
            while len(registration.moves) >= _REMEMBERED_MOVES:
                del registration.moves[
                    next(iter(registration.moves))
                ]  # the oldest: the same one on every rank
            registration.moves[key] = move
        return move

    # The user's function.

    def _call(
        self,
        registration: Registration,
        module: nn.Module | None,
        full: Tensor,
        leaf: Tensor,
        context: RunContext,
        replay: bool,
    ) -> Tensor | None:
        """Run the editing function on the full tensor; what it made of it, or None if nothing
        changed.
        """
        function = registration.hook_function
        assert function.editing_function is not None
        call = self._call_number(registration, leaf, context, replay)
        save_ctx = throw_away(self._save_ctx) if replay else self._save_ctx
        version = full._version
        shape, dtype, device = full.shape, full.dtype, full.device
        function.parameters = self._parameters(function, context, full.device)
        try:
            with RandomState(
                seed_of_call(context.seed or 0, registration.site, call), full.device
            ) as random:
                result = function.editing_function(module, full, save_ctx, self._modules)
        finally:
            function.parameters = {}
        if random.consumed and not replay:
            context.consumed = (
                True  # a reentrant checkpoint runs its forward without grad, so that says nothing
            )
            context.random_calls.setdefault(registration.index, {})[_fingerprint(leaf)] = call
        if result is None or result is full:
            result = full
            if (full.shape, full.dtype, full.device) == (shape, dtype, device):
                return full if full._version != version else None
        check_result(registration, result, shape, dtype, device)
        return result

    @staticmethod
    def _call_number(
        registration: Registration, leaf: Tensor, context: RunContext, replay: bool
    ) -> int:
        if not replay:
            number = context.calls.get(registration.index, 0)
            context.calls[registration.index] = number + 1
            return number
        # A recomputed call gets the number that it had: told apart by what it was given, where
        # there were several.
        return context.random_calls.get(registration.index, {}).get(_fingerprint(leaf), 0)

    def _parameters(
        self, function: Any, context: RunContext, device: torch.device
    ) -> dict[str, Tensor]:
        parameters = {}
        for name in function.parameter_names:
            if name not in context.parameters:
                context.parameters[name] = self._full_parameter(name)
            parameters[name] = context.parameters[name].to(device)
        return parameters


def _handed(leaf: Tensor) -> Tensor:
    """A copy, in the graph, for the function to edit in place; never an inference tensor, so that
    its version counts.
    """
    if leaf.is_inference():
        with torch.inference_mode(False):
            return leaf.clone()
    return leaf.clone()


def _fingerprint(tensor: Tensor) -> int:
    return int(inference.fingerprint(tensor)[0])


def check_movable(registration: Registration, leaf: Tensor) -> None:
    """TypeError for tensors that are not plain strided ones."""
    if leaf.layout != torch.strided or leaf.is_quantized or leaf.is_nested:
        kind = (
            "quantized" if leaf.is_quantized else "nested" if leaf.is_nested else str(leaf.layout)
        )
        raise TypeError(
            f"{registration.describe()}: the tensor is {kind}, and only dense strided tensors can "
            "be gathered; hook a "
            "module whose tensor is dense"
        )


def check_result(
    registration: Registration,
    result: object,
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """TypeError or ValueError if what an editing function returned can't go on in the model."""
    name = registration.describe()
    function = registration.hook_function.editing_function
    what = f"{name}: the editing function {getattr(function, '__qualname__', function)!r}"
    if not isinstance(result, Tensor):
        raise TypeError(
            f"{what} returned a {type(result).__name__}; expected a torch.Tensor of shape "
            f"{tuple(shape)}, or None"
        )
    if dtensor.is_dtensor(result):
        raise TypeError(
            f"{what} returned a DTensor; expected a plain full torch.Tensor of shape {tuple(shape)}"
        )
    for attribute, expected, got in (
        ("shape", tuple(shape), tuple(result.shape)),
        ("dtype", dtype, result.dtype),
        ("device", device, result.device),
    ):
        if expected != got:
            raise ValueError(
                f"{what} returned a tensor of {attribute} {got}; expected {attribute} {expected}"
            )

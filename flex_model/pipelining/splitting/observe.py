"""Runs of a model that show what it does, and change nothing of it."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from flex_model import pytree
from flex_model.pipelining.splitting.clones import tensors_of
from flex_model.pipelining.splitting.dependence import Dependence, read_tensor
from flex_model.pipelining.splitting.templates import Observed

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Recording:
    """What a model did in one run.

    Attributes:
        calls: Names of the modules called, in order of the calls' beginnings.
        outputs: By name, what each call returned.
        arguments: By name of a block, what it was given.
        dependent: By name of a block, which leaves of its arguments depend on blocks before it.
    """

    def __init__(self, model: nn.Module, blocks: Iterable[str] = ()) -> None:
        self.calls: list[str] = []
        self.outputs: dict[str, list[Observed]] = defaultdict(list)
        self.arguments: dict[str, Observed] = {}
        self.dependent: dict[str, list[int]] = {}
        self._model, self._blocks = model, set(blocks)
        self._dependence = Dependence()

    @contextmanager
    def on(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, module in self._model.named_modules():
                before, after = self._hooks(name)
                stack.enter_context(
                    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
                )
                stack.enter_context(module.register_forward_hook(after))
            stack.enter_context(self._dependence)
            yield

    def _hooks(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.calls.append(name)
            if name in self._blocks:
                leaves = _pytree.tree_leaves((args, kwargs))
                self.arguments[name] = Observed.of(leaves)
                found = [i for i, leaf in enumerate(leaves) if self._dependence.labels_of(leaf)]
                self.dependent[name] = found

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self.outputs[name].append(Observed.of(output))
            if name in self._blocks:
                self._dependence.mark(output, {name})

        return before, after


class ComparableRun(TorchFunctionMode):
    """Dropout does nothing, and nothing is drawn: a stage may then be compared with the model. What
    Python reads of whole tensors is reported to the ``Dependence``.
    """

    _READS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
    _DROPOUTS = (
        F.dropout,
        F.alpha_dropout,
        F.dropout1d,
        F.dropout2d,
        F.dropout3d,
        F.feature_alpha_dropout,
        torch.dropout,
        torch.dropout_,
    )

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in self._READS:
            return func(read_tensor(args[0]), *args[1:], **kwargs)
        if func in self._DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)


@contextmanager
def unchanged(model: nn.Module, *others: nn.Module) -> Iterator[None]:
    """No gradients; afterwards buffers and random states are what they were before."""
    buffers = [(b, b.clone()) for module in (model, *others) for b in module.buffers()]
    devices = {tensor.device.index for tensor in tensors_of(model) if tensor.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices)), torch.no_grad():
        try:
            yield
        finally:
            for tensor, before in buffers:  # what has not changed is not written to
                if not tensor.is_meta and not torch.equal(tensor, before):
                    tensor.copy_(before)


@contextmanager
def quietly(model: nn.Module) -> Iterator[None]:
    """Nothing of the model changes, no gradients, no dropout."""
    with unchanged(model), warnings.catch_warnings(), ComparableRun():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")  # checkpoint
        yield


def tensors_in(output: Any) -> list[Tensor]:
    """The tensors of an output, in order."""
    return pytree.flatten(output)[0]


def find_difference(got: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
    """How two outputs differ; None if they do not: bit for bit where kernels are deterministic, and
    some of those on a GPU are not.
    """
    if len(got) != len(expected):
        return f"{len(got)} tensors, not {len(expected)}"
    for ours, theirs in zip(got, expected):
        if theirs.is_meta and (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype):
            continue  # no values to compare
        try:
            torch.testing.assert_close(ours, theirs, equal_nan=True)
        except AssertionError as error:
            lines = str(error).splitlines()
            return next((line for line in lines if "Greatest absolute" in line), lines[0])
    return None


def other_examples(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Arguments]:
    """The example with one row more, and with one step less along dim 1; each only where the
    tensors have such a dim. Steps are those of the tokens, if there are any: sound or images beside
    them have sizes of their own.
    """
    example = (args, dict(kwargs))
    tensors = [x for x in _pytree.tree_leaves(example) if _has_dims(x, 1)]
    if not tensors:
        return []
    tokens = [x for x in tensors if x.dim() == 2 and not x.dtype.is_floating_point]
    main = [*tokens, *tensors][0]
    rows, steps = main.shape[0], main.shape[1] if main.dim() > 1 else 0

    def longer(leaf: Any) -> Any:
        if _has_dims(leaf, 1) and leaf.shape[0] == rows:
            return torch.cat([leaf, leaf[:1]])
        return leaf

    def shorter(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            for dim in range(1, 2 if leaf is main else leaf.dim()):
                if leaf.dim() > dim and leaf.shape[dim] == steps:
                    leaf = leaf.narrow(dim, 0, steps - 1)
            return leaf.contiguous()
        return leaf

    changes = [longer] * (rows > 0) + [shorter] * (steps > 1)
    return [_pytree.tree_map(change, example) for change in changes]


def _has_dims(leaf: Any, count: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() >= count

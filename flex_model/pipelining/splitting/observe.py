"""Runs of a model that show what it does: which modules run when, and what depends on what."""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from flex_model.pipelining.splitting.clones import tensors_of
from flex_model.pipelining.splitting.templates import Observed

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Recording:
    """What a model did in one run.

    Attributes:
        calls: Names of the modules called, in order of the calls' beginnings.
        begins, ends: By name, when its calls began and ended: beginnings and ends are counted.
        outputs: By name, what each call returned.
        parameter_uses: By id of a parameter, when it was used.
        outer_uses: The same, only where no module that has it was running.
        kept: Of modules in ``keep``, the leaves of the arguments and of the output.
    """

    def __init__(self, model: nn.Module, keep: Iterable[str] = ()) -> None:
        self.calls: list[str] = []
        self.begins: dict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, list[int]] = defaultdict(list)
        self.outputs: dict[str, list[Observed]] = defaultdict(list)
        self.parameter_uses: dict[int, list[int]] = defaultdict(list)
        self.outer_uses: dict[int, list[int]] = defaultdict(list)
        self.kept: dict[str, tuple[list[Any], list[Any]]] = {}
        self._keep = set(keep)
        self._model = model
        self._stack: list[nn.Module] = []
        self._now = 0

    @contextmanager
    def on(self) -> Iterator[Recording]:
        handles = []
        for name, module in self._model.named_modules():
            handles.append(
                module.register_forward_pre_hook(self._enter(name), prepend=True, with_kwargs=True)
            )
            handles.append(module.register_forward_hook(self._leave(name), with_kwargs=True))
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def saw_parameter(self, parameter: nn.Parameter) -> None:
        """It was used."""
        self.parameter_uses[id(parameter)].append(self._now)
        holders = (own for module in self._stack for own in module._parameters.values())
        if not any(own is parameter for own in holders):
            self.outer_uses[id(parameter)].append(self._now)

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._now += 1
            self.begins[name].append(self._now)
            self.calls.append(name)
            self._stack.append(module)

        return hook

    def _leave(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._stack.pop()
            self._now += 1
            self.ends[name].append(self._now)
            self.outputs[name].append(Observed.of(output))
            if name in self._keep:
                self.kept[name] = (_pytree.tree_leaves((args, kwargs)), _pytree.tree_leaves(output))

        return hook


class ParameterUses(TorchDispatchMode):
    """Tells a recording of parameters that operations are given."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for leaf in _pytree.arg_tree_leaves(*args, **(kwargs or {})):
            if isinstance(leaf, nn.Parameter):
                self._recording.saw_parameter(leaf)
        return func(*args, **(kwargs or {}))


class Dependence(TorchDispatchMode):
    """Follows which values depend on marked ones, by their memory.

    Operations that only take sizes and dtypes from a tensor (``zeros_like``, ``new_ones``) do not
    make their result depend on it. What Python does with a value that it reads can't be followed.

    Args:
        lie: Python reads other values than there are, where they depend on marked ones.

    Attributes:
        read: Labels of what Python has read (``.item()``, ``if tensor:``).
    """

    _SIZES_ONLY = re.compile(r"(^new_.*)|(.*_like$)|(^sym_.*)|(^resize_$)")

    def __init__(self, *, lie: bool = False) -> None:
        super().__init__()
        self.read: set[str] = set()
        self._lie = lie
        self._labels: dict[int, set[str]] = {}
        self._alive: list[Tensor] = []  # no memory is given out again

    def mark(self, tensor: Tensor, label: str) -> None:
        self._add(tensor, {label})

    def labels_of(self, tensor: Tensor) -> set[str]:
        key = _memory(tensor)
        return set() if key is None else self._labels.get(key, set())

    def _add(self, tensor: Tensor, labels: set[str]) -> None:
        key = _memory(tensor)
        if key is not None:
            self._alive.append(tensor)
            self._labels[key] = self._labels.get(key, set()) | labels

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        labels: set[str] = set()
        for leaf in _pytree.arg_tree_leaves(*args, **kwargs):
            if isinstance(leaf, Tensor):
                labels |= self.labels_of(leaf)
        result = func(*args, **kwargs)
        if labels and not isinstance(result, Tensor) and isinstance(result, (bool, int, float)):
            self.read |= labels
            return _another(result) if self._lie else result
        if labels and not self._SIZES_ONLY.match(func.overloadpacket.__name__):
            written = [result]
            if func._schema.is_mutable:
                named = zip(func._schema.arguments, args)
                written += [value for argument, value in named if _is_written(argument)]
                written += [
                    kwargs[argument.name]
                    for argument in func._schema.arguments
                    if argument.name in kwargs and _is_written(argument)
                ]
            for leaf in _pytree.tree_leaves(written):
                if isinstance(leaf, Tensor):
                    self._add(leaf, labels)
        return result


def _another(value: bool | int | float) -> bool | int | float:
    if isinstance(value, bool):
        return not value
    return value + 1 if value == value else 0.0


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _memory(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a wrapper around other tensors
        return id(tensor)


class NoDropout(TorchFunctionMode):
    """Dropout does nothing, and nothing is drawn: a stage may then be compared with the model."""

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
        if func in self._DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)


def restore(saved: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Give tensors that changed the values that they had; the others are not written to."""
    for tensor, before in saved:
        if not tensor.is_meta and not torch.equal(tensor, before):
            tensor.copy_(before)


@contextmanager
def quietly(model: nn.Module) -> Iterator[None]:
    """No gradients, no dropout; afterwards buffers and random states are what they were before."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = {tensor.device for tensor in tensors_of(model) if tensor.device.type == "cuda"}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[d.index for d in devices]))
        stack.enter_context(torch.no_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")  # checkpoint
        stack.enter_context(NoDropout())
        try:
            yield
        finally:
            restore(buffers)


def other_examples(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Arguments]:
    """The example with one row more, and with one step less along dim 1; each only where the
    tensors have such a dim.
    """
    main = next((x for x in _pytree.tree_leaves((args, kwargs)) if _has_dims(x, 1)), None)
    if main is None:
        return []
    rows, found = main.shape[0], []

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

    if rows:
        found.append(_pytree.tree_map(longer, (args, dict(kwargs))))
    steps = main.shape[1] if main.dim() > 1 else 0
    if steps > 1:
        found.append(_pytree.tree_map(shorter, (args, dict(kwargs))))
    return found


def _has_dims(leaf: Any, count: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() >= count

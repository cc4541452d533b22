"""Torch's modes around one call of an editing function on fake tensors: they put fake tensors in
the place of real ones, and refuse what a run would refuse or what needs values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from flex_model.inspection.edits.findings import (
    ERROR,
    NOT_CHECKED,
    WARNING,
    Finding,
    Place,
    Source,
)
from flex_model.integrations import dtensor
from flex_model.integrations.compiled import DispatchMode
from flex_model.integrations.torch_private import (
    FakeTensor,
    FakeTensorMode,
    fake_tensor,
    is_functorch_tensor,
)

_TO_NUMPY: set[Any] = {Tensor.numpy, Tensor.__array__}
_READS_MEMORY = {*_TO_NUMPY, Tensor.__dlpack__, Tensor.data_ptr}  # of fake tensors at address 0
_READS_VALUES = {torch.equal, torch.allclose, Tensor.equal, Tensor.allclose, Tensor.item}
_READS_VALUES |= {Tensor.tolist, Tensor.__bool__, Tensor.__int__, Tensor.__float__}
_READS_VALUES |= {Tensor.__index__, Tensor.__complex__, *_READS_MEMORY}

#: By the id of a tensor, which is kept alive, as another could have its id then.
Sharded = Mapping[int, tuple[Tensor, str, bool]]


class RefusedError(Exception):
    """The editing function can't go on; a finding says why."""


def needs_values(what: str) -> tuple[str, str, str]:
    """The level, problem and message of a finding."""
    message = f"{what} needs values, and a dry run has shapes only: not checked from here on"
    return NOT_CHECKED, "depends on values", message


class FakeArguments(TorchFunctionMode):
    """Puts fake tensors in the place of real ones before autograd sees those: whatever is written
    to them, and whatever gradients arrive, the real ones stay as they were.

    Args:
        sharded: Parameters of which this rank has a shard: itself, its name, and whether FSDP
            alone shards them. They are not replaced, so that ``Watch`` knows them.
    """

    def __init__(self, fake_mode: FakeTensorMode, sharded: Sharded) -> None:
        super().__init__()
        self._watch: Watch | None = None
        self._fake_mode, self._sharded = fake_mode, sharded
        self._fakes: dict[int, tuple[Tensor, Tensor]] = {}  # by the id of the real one, kept alive

    def refuse_by(self, watch: Watch) -> None:
        """From now on, ``watch`` reports what can't be read."""
        self._watch = watch

    def leaves(self) -> list[Tensor]:
        """The fake tensors in the place of those that gradients are for."""
        fakes = [fake for _, fake in self._fakes.values()]
        return [fake for fake in fakes if fake.requires_grad and fake.is_leaf]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert self._watch is not None
        kwargs = kwargs or {}
        if func is Tensor.__format__ and isinstance(args[0], FakeTensor):
            return repr(args[0])  # for print, as of a tensor with values
        if func in _READS_VALUES:
            if not any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))):
                with fake_tensor.unset_fake_temporarily():
                    return func(*args, **kwargs)
            with contextlib.suppress(fake_tensor.DataDependentOutputException):
                if func not in _READS_MEMORY:
                    return func(*args, **kwargs)  # of one number, which torch knows
            self._watch.refuse_to_read(func, args[0])
        args, kwargs = tree_map_only(Tensor, self._faked, (args, kwargs))
        return func(*args, **kwargs)

    def _faked(self, tensor: Tensor) -> Tensor:
        is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and id(tensor) not in self._sharded
        if not is_plain or is_functorch_tensor(tensor):
            return tensor
        if id(tensor) not in self._fakes:
            self._fakes[id(tensor)] = (tensor, self._fake_mode.from_tensor(tensor))
        return self._fakes[id(tensor)][1]


class Watch(DispatchMode):
    """Refuses collectives and shards of weights in one call, and notes the lines of operations.

    Attributes:
        findings: What was refused, even where the function caught the exception.
        last_line: The last line with an operation.
        last_write: The last line that wrote to a tensor in place.
    """

    def __init__(self, source: Source, sharded: Sharded) -> None:
        super().__init__()
        self.findings: list[Finding] = []
        self.last_line: Place | None = None
        self.last_write: Place | None = None
        self._source, self._sharded = source, sharded

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            if id(leaf) in self._sharded:
                self._refuse_shard(*self._sharded[id(leaf)][1:])
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            self._refuse(
                ERROR,
                "collective",
                f"{func.overloadpacket} is a collective: an editing function may run on one rank "
                "only, so the ranks would deadlock; its tensor is the full one already, and "
                "weights are named in HookFunction(parameters=...)",
            )
        if any(issubclass(kind, dtensor.dtensor_class()) for kind in types):
            return NotImplemented  # its own operations are dispatched again, on plain tensors
        place = self._source.current_line()
        if place is not None:
            self.last_line = place
            self.last_write = place if func._schema.is_mutable else self.last_write
        return func(*args, **kwargs)

    def refuse_to_read(self, func: Any, tensor: Tensor) -> NoReturn:
        """Report that values are read; raise what a run would raise."""
        if func in _TO_NUMPY and tensor.requires_grad:
            with fake_tensor.unset_fake_temporarily():
                torch.empty(0, requires_grad=True).numpy()
        self._refuse(*needs_values(f"{func.__name__.strip('_')}()"))

    def _refuse_shard(self, name: str, is_fsdp: bool) -> NoReturn:
        what = "is a shard of FSDP's whenever its module does not run" if is_fsdp else "is a shard"
        self._refuse(
            WARNING if is_fsdp else ERROR,
            "sharded weight",
            f"parameter {name!r} {what}, not the full weight; name it in "
            f"HookFunction(parameters=[{name!r}]), and take it from hook_function.parameters"
            + ("; not checked from here on" if is_fsdp else ""),
        )

    def _refuse(self, level: str, problem: str, message: str) -> NoReturn:
        place = self._source.current_line()
        self.findings.append(self._source.finding(level, problem, message, place))
        raise RefusedError(message)

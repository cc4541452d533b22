"""Findings of a dry run in editing functions: the lines of the user's code, and torch's modes
around a call, which refuse what a run would refuse or what needs values.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import sysconfig
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from flex_model.hooks.function import name_of
from flex_model.hooks.registration import Registration, describe_hook
from flex_model.integrations import dtensor
from flex_model.integrations.compiled import DispatchMode
from flex_model.integrations.torch_private import (
    FakeTensor,
    FakeTensorMode,
    fake_tensor,
    is_functorch_tensor,
)

#: The levels of a finding: a run would raise an error or compute something else than was meant; it
#: may have been meant; a dry run can't decide it, as it has shapes only.
ERROR, WARNING, NOT_CHECKED = "error", "warning", "not checked"

Place = tuple[str, int]  # a file, and a line in it

_CALLS_FILE = str(Path(__file__).with_name("calls.py"))


@dataclass(frozen=True)
class Finding:
    """One problem that a dry run found in an editing function, or a part that it did not check.

    Attributes:
        level: ``"error"``, ``"warning"`` or ``"not checked"``.
        problem: The kind of problem, in a word or two; docs/checks.md lists them.
        message: What was expected, what was found, and what to do.
        name, kind, unpack_idx: The hook's, as in ``DryRunRow``.
        function: The editing function's name.
        file, line: A line of the user's code. Of what a function raised, the innermost one in the
            traceback; of what it returned, that of its last operation.
        ranks: Global ranks on which it was found.
    """

    level: str
    problem: str
    message: str
    name: str
    kind: str
    unpack_idx: int | str | tuple[int | str, ...]
    function: str
    file: str
    line: int
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        hook = describe_hook(self.name, self.kind, self.unpack_idx)
        return (
            f"{self.file}:{self.line}: {self.level}: {self.message} "
            f"[{self.problem}; {self.function} in the {hook}]"
        )


class Source:
    """The user's code of one editing function: its own file, and all files outside of libraries.

    Attributes:
        start: Where the editing function begins.
    """

    def __init__(self, registration: Registration) -> None:
        self._registration = registration
        function: Any = registration.given.editing_function
        code = _code_of(function)
        self._name = name_of(function)
        self.start: Place = (code.co_filename, code.co_firstlineno) if code else ("", 0)
        self._own_file = "" if self.start[0].startswith(_own_folder()) else self.start[0]

    def finding(
        self, level: str, problem: str, message: str, place: Place | None = None
    ) -> Finding:
        """A finding at a line; by default, where the editing function begins."""
        place, unpack_idx = place or self.start, self._registration.given.unpack_idx
        hook = (self._registration.name, self._registration.kind, unpack_idx)
        return Finding(level, problem, message, *hook, self._name, *place)

    def current_line(self) -> Place | None:
        """The line of the user's code that runs now, in the editing function or in its callees."""
        steps = ((f.f_code.co_filename, line) for f, line in traceback.walk_stack(None))
        return self._first(itertools.takewhile(lambda step: step[0] != _CALLS_FILE, steps))

    def line_of(self, error: BaseException) -> Place:
        """The line of the user's code that raised an error; of a ready edit's, the line inside."""
        steps = [(f.f_code.co_filename, n) for f, n in traceback.walk_tb(error.__traceback__)]
        inside = steps[-1] if steps[-1][0] != _CALLS_FILE else self.start
        return self._first(steps[::-1]) or inside

    def _first(self, steps: Iterable[Place]) -> Place | None:
        return next((s for s in steps if s[0] == self._own_file or not is_of_library(s[0])), None)


def _code_of(function: Any) -> CodeType | None:
    """The code of a function, a method, a partial or a callable object."""
    function = inspect.unwrap(function)
    if isinstance(function, functools.partial):
        return _code_of(function.func)
    if isinstance(function, nn.Module):
        function = function.forward
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None


def is_of_library(file: str) -> bool:
    """Whether the code in a file is a library's, not the user's."""
    return file.startswith((*_libraries(), "<frozen", "<string>", "<eval_with_key"))


@functools.cache
def _own_folder() -> str:
    return str(Path(__file__).parents[2]) + "/"


@functools.cache
def _libraries() -> tuple[str, ...]:
    """Folders whose code is not the user's."""
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [str(Path(torch.__file__).parent)]
    return (_own_folder(), *(f"{folder}/" for folder in folders))


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

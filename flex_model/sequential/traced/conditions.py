"""What a trace depends on besides its inputs: attributes of modules, global variables and settings
of torch that the traced code reads, and that its graph has as constants. All are compared whenever
a subgraph runs.
"""

from __future__ import annotations

import contextlib
import dis
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flex_model.sequential.traced.trace_check import trace_error

_READS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_SUPER_ATTR")
_SETTINGS = (
    *("is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled"),
    *("get_autocast_gpu_dtype", "get_default_dtype"),
)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_OPAQUE = (nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType)
_MAX_DEPTH = 4


class Conditions:
    """The values of what traced functions read, when they were traced.

    Args:
        ancestors: The modules that are traced, by name in the model.
        functions: Those whose code is traced, and those that it called without inputs.
    """

    def __init__(
        self, model: nn.Module, ancestors: list[str], functions: Iterable[types.FunctionType]
    ) -> None:
        self._ancestors = ancestors
        self._functions = list(dict.fromkeys(functions))
        self._names = set().union(*(_names_read(one.__code__) for one in self._functions))
        kinds = {kind for name in ancestors for kind in type(model.get_submodule(name)).__mro__}
        for kind in kinds:
            for name in self._names & vars(kind).keys():
                getter = getattr(vars(kind)[name], "fget", None)  # of a property
                if isinstance(getter, types.FunctionType) and not _is_of_torch(kind):
                    self._names = self._names | _names_read(getter.__code__)
        self._names -= {"_modules", "_parameters", "_buffers", "__dict__"}
        self._values = self._read(model)

    def check(self, model: nn.Module) -> None:
        """Check that all are what they were.

        Raises:
            TraceError: one is not, by name.
        """
        for name, now, before in self._changed(model):
            is_plain = isinstance(now, _PLAIN) and isinstance(before, _PLAIN)
            what = f"{now!r}, and it was {before!r}" if is_plain else "not what it was"
            raise trace_error(
                f"{name} is {what} where the subgraphs were traced, and the code around the "
                "targets reads it; call trace_subgraphs again"
            )

    def check_trace(self, model: nn.Module) -> None:
        """Check that what was traced has changed none of them: the graph would not.

        Raises:
            TraceError: it has changed one, by name.
        """
        for name, _, _ in self._changed(model):
            raise trace_error(f"the code around the targets changes {name}, which it reads, too")

    def _changed(self, model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
        found = self._read(model)
        for name in {**self._values, **found}:
            before, now = self._values.get(name, _MISSING), found.get(name, _MISSING)
            if not _is_same(before, now):
                yield name, now, before

    def _read(self, model: nn.Module) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for prefix in self._ancestors:
            module = model.get_submodule(prefix)
            self._add(found, _joined("model", prefix), module, 0)
        for function in self._functions:
            space = function.__globals__
            for name in self._names & space.keys():
                if isinstance(space[name], (*_PLAIN, Tensor)):
                    self._add_value(found, f"{function.__module__}.{name}", space[name], 0)
        for name in _SETTINGS:
            if name in self._names:
                found[f"torch.{name}()"] = getattr(torch, name)()
        return found

    def _add(self, found: dict[str, Any], place: str, owner: Any, depth: int) -> None:
        """Add the attributes of an object that traced code may read, its class's, too."""
        tables = [vars(kind) for kind in type(owner).__mro__ if not _is_of_torch(kind)]
        attributes = dict(getattr(owner, "__dict__", {}))
        for table in tables:
            attributes = {**table, **attributes}
        for name in sorted(self._names & attributes.keys()):
            self._add_value(found, f"{place}.{name}", attributes[name], depth)

    def _add_value(self, found: dict[str, Any], place: str, value: Any, depth: int) -> None:
        if isinstance(value, _PLAIN):
            found[place] = value
        elif isinstance(value, Tensor):
            found[place] = value, 0 if value.is_inference() else value._version
        elif depth < _MAX_DEPTH and isinstance(value, (tuple, list)):
            found[f"the length of {place}"] = len(value)
            for index, item in enumerate(value):
                self._add_value(found, f"{place}[{index}]", item, depth + 1)
        elif depth < _MAX_DEPTH and isinstance(value, dict):
            found[f"the length of {place}"] = len(value)
            for key, item in value.items():
                self._add_value(found, f"{place}[{key!r}]", item, depth + 1)
        elif depth < _MAX_DEPTH and hasattr(value, "__dict__") and not isinstance(value, _OPAQUE):
            self._add(found, place, value, depth + 1)
        elif isinstance(value, torch.fx.Proxy):
            found[place] = value


_MISSING = object()


@contextlib.contextmanager
def unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """A context after which the model has its buffers, with the values that they had."""
    before = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    values = [(b, b.clone()) for _, table in before for b in table.values() if b is not None]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in values:
                if not buffer.is_meta and not torch.equal(buffer, value):
                    buffer.copy_(value)
        for table, entries in before:
            table.clear()
            table.update(entries)


def _names_read(code: types.CodeType) -> set[str]:
    """Return the names of attributes and global variables that code reads, and texts in it, which
    may be names.
    """
    found = {i.argval for i in dis.get_instructions(code) if i.opname in _READS}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names_read(constant)
        elif isinstance(constant, str):
            found.add(constant)
    return found


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return one[0] is other[0] and one[1] == other[1]
    is_plain = isinstance(one, _PLAIN) and type(one) is type(other)
    return one is other or (is_plain and one == other)


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))


def _is_of_torch(kind: type) -> bool:
    return kind.__module__.split(".")[0] in ("torch", "builtins")

"""Restores the state that editing functions change while ``verify`` runs them: ``save_ctx``, their
closures, the globals that they name, the attributes of their objects, and random generators.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import random
import sys
import types
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flex_model.hooks.user_function import copy_for_replay
from flex_model.inspection.edits.findings import is_of_library
from flex_model.inspection.shapes_only import same_torch_random_state

_EDITING = "flex_model.editing."
_MAX_OBJECTS = 20_000
_MAX_ARRAY_BYTES = 1 << 24
_SCALARS = (type(None), bool, int, float, complex, str, bytes, type, types.ModuleType, Tensor)


@contextlib.contextmanager
def restored_objects(functions: Iterable[Any], save_ctx: Namespace) -> Iterator[None]:
    """Restore the containers and attributes reachable from functions and ``save_ctx`` afterwards;
    tensors are not restored.
    """
    kept = dict(vars(save_ctx))
    copies = vars(copy_for_replay(save_ctx))
    undo = _Undo()
    for found in (*functions, *kept.values()):
        undo.visit(found)
    vars(save_ctx).update(copies)
    try:
        yield
    finally:
        vars(save_ctx).clear()
        vars(save_ctx).update(kept)
        undo.run()


@contextlib.contextmanager
def same_random_state() -> Iterator[None]:
    """Restore the states of the global random generators of Python, numpy and torch afterwards."""
    numpy_random = sys.modules.get("numpy.random")
    python_state = random.getstate()
    numpy_state = numpy_random.get_state() if numpy_random else None
    with same_torch_random_state():
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy_random:
                numpy_random.set_state(numpy_state)


class _Undo:
    """Snapshots of the visited objects, and the steps that restore them."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}
        self._steps: list[Callable[[], Any]] = []

    def visit(self, start: Any) -> None:
        queue = collections.deque([start])
        while queue and len(self._seen) < _MAX_OBJECTS:
            found = queue.popleft()
            if isinstance(found, _SCALARS) or id(found) in self._seen:
                continue
            self._seen[id(found)] = found
            queue.extend(self._note(found))

    def run(self) -> None:
        for step in reversed(self._steps):
            step()

    def _note(self, found: Any) -> list[Any]:
        """Take a snapshot of an object; return the objects to visit next."""
        if isinstance(found, types.FunctionType):
            return self._note_function(found)
        if isinstance(found, types.MethodType):
            return [found.__func__, found.__self__]
        if isinstance(found, functools.partial):
            return [found.func, *found.args, *found.keywords.values()]
        if isinstance(found, dict):
            return self._note_dict(found)
        if isinstance(found, (list, collections.deque, set, bytearray)):
            before = list(found)

            def refill() -> None:
                if len(found) != len(before) or any(a is not b for a, b in zip(found, before)):
                    found.clear()
                    (found.update if isinstance(found, set) else found.extend)(before)

            self._steps.append(refill)
            return before
        if isinstance(found, (tuple, frozenset)):
            return list(found)
        return self._note_object(found)

    def _note_dict(self, found: dict[Any, Any]) -> list[Any]:
        before = dict(found)

        def refill() -> None:
            if list(found) != list(before) or any(found[k] is not v for k, v in before.items()):
                found.clear()
                found.update(before)

        self._steps.append(refill)
        return list(before.values())

    def _note_function(self, function: types.FunctionType) -> list[Any]:
        found: list[Any] = [function.__defaults__, function.__kwdefaults__, function.__dict__]
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # the cell is empty
                continue
            found.append(value)
            self._steps.append(functools.partial(setattr, cell, "cell_contents", value))
        if is_of_library(function.__code__.co_filename):
            return found
        space = function.__globals__
        for name in _names_of(function.__code__):
            if name not in space:
                self._steps.append(functools.partial(space.pop, name, None))
            elif not isinstance(space[name], (types.ModuleType, type)):
                found.append(space[name])
                self._steps.append(functools.partial(space.__setitem__, name, space[name]))
        return found

    def _note_object(self, found: Any) -> list[Any]:
        if isinstance(found, random.Random):
            self._steps.append(functools.partial(found.setstate, found.getstate()))
            return []
        if isinstance(found, torch.Generator):
            self._steps.append(functools.partial(found.set_state, found.get_state()))
            return []
        kind = type(found)
        if kind.__module__.startswith("numpy"):
            self._note_numpy(found)
            return []
        if isinstance(found, nn.Module) or not _is_users_class(kind):
            return []
        attributes = getattr(found, "__dict__", None)
        return self._note_dict(attributes) if isinstance(attributes, dict) else []

    def _note_numpy(self, found: Any) -> None:
        numpy: Any = sys.modules["numpy"]
        if isinstance(found, numpy.ndarray):
            if found.flags.writeable and found.nbytes <= _MAX_ARRAY_BYTES:
                before = found.copy()
                self._steps.append(lambda: numpy.copyto(found, before))
            return
        generator = getattr(found, "bit_generator", None) or getattr(found, "_bit_generator", None)
        if generator is not None:
            self._steps.append(functools.partial(setattr, generator, "state", generator.state))


def _is_users_class(kind: type) -> bool:
    """Whether a class is the user's, an edit's, or a namespace. Other objects (a log, a connection,
    the model) are left alone.
    """
    module = kind.__module__
    if kind in (Namespace, types.SimpleNamespace) or module.startswith((_EDITING, "__main__")):
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and not is_of_library(file)


def _names_of(code: types.CodeType) -> set[str]:
    """Return the global names that a function, or one defined inside it, uses."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names_of(constant)
    return found

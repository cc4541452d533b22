"""Restores the state that editing functions change while ``verify`` runs them: ``save_ctx``, their
closures, the globals that they name, the attributes of their objects, and random generators.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import types
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flex_model.hooks.user_function import copy_for_replay
from flex_model.inspection.edits.findings import is_of_library
from flex_model.inspection.shapes_only import same_torch_random_state

_MAX_OBJECTS = 20_000
_MAX_ARRAY_BYTES = 1 << 24
_SCALARS = (type(None), bool, int, float, complex, str, bytes, type, types.ModuleType, Tensor)
_CONTAINERS = (dict, list, deque, set, bytearray)


@contextlib.contextmanager
def restored_objects(functions: Iterable[Any], save_ctx: Namespace) -> Iterator[None]:
    """Restore the containers and attributes reachable from functions and ``save_ctx`` afterwards;
    tensors are not restored.
    """
    kept = dict(vars(save_ctx))
    copies = vars(copy_for_replay(save_ctx))
    restore = _snapshots([*functions, *kept.values()])
    vars(save_ctx).update(copies)
    try:
        yield
    finally:
        vars(save_ctx).clear()
        vars(save_ctx).update(kept)
        for step in reversed(restore):
            step()


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


def _snapshots(starts: Iterable[Any]) -> list[Callable[[], Any]]:
    """Return functions that restore what is reachable from these objects as it is now."""
    seen: dict[int, Any] = {}
    steps: list[Callable[[], Any]] = []
    pending = deque(starts)
    while pending and len(seen) < _MAX_OBJECTS:
        found = pending.popleft()
        if isinstance(found, _SCALARS) or id(found) in seen:
            continue
        seen[id(found)] = found
        if isinstance(found, types.FunctionType):
            pending += [found.__defaults__, found.__kwdefaults__, found.__dict__]
            cells = [cell for cell in found.__closure__ or () if _has_content(cell)]
            pending += [cell.cell_contents for cell in cells]
            steps += [
                functools.partial(setattr, cell, "cell_contents", cell.cell_contents)
                for cell in cells
            ]
            if not is_of_library(found.__code__.co_filename):
                space, names = found.__globals__, _names_of(found.__code__)
                used = {name: space[name] for name in names if name in space}
                pending += used.values()
                steps.append(functools.partial(_restore_globals, space, names, used))
        elif isinstance(found, types.MethodType):
            pending += [found.__func__, found.__self__]
        elif isinstance(found, functools.partial):
            pending += [found.func, *found.args, *found.keywords.values()]
        elif isinstance(found, _CONTAINERS):
            pending += found.values() if isinstance(found, dict) else found
            before = dict(found) if isinstance(found, dict) else list(found)
            steps.append(functools.partial(_refill, found, before))
        elif isinstance(found, (tuple, frozenset)):
            pending += found
        elif isinstance(found, random.Random):
            steps.append(functools.partial(found.setstate, found.getstate()))
        elif isinstance(found, torch.Generator):
            steps.append(functools.partial(found.set_state, found.get_state()))
        elif type(found).__module__ == "numpy" and hasattr(found, "nbytes"):
            if found.flags.writeable and found.nbytes <= _MAX_ARRAY_BYTES:
                steps.append(functools.partial(found.__setitem__, ..., found.copy()))
        elif type(found).__module__.startswith("numpy.random"):
            bits = getattr(found, "bit_generator", None) or getattr(found, "_bit_generator", found)
            steps.append(functools.partial(setattr, bits, "state", bits.state))
        elif not isinstance(found, nn.Module) and _is_users_class(type(found)):
            pending.append(getattr(found, "__dict__", None))
    return steps


def _refill(container: Any, before: Any) -> None:
    now, then = (
        [*each, *(each.values() if isinstance(before, dict) else ())]
        for each in (container, before)
    )
    if len(now) != len(then) or any(a is not b for a, b in zip(now, then)):
        container.clear()
        (container.extend if hasattr(container, "extend") else container.update)(before)


def _restore_globals(space: dict[str, Any], names: set[str], before: dict[str, Any]) -> None:
    for name in names - before.keys():
        space.pop(name, None)
    space.update(before)


def _has_content(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # not assigned yet
        return False
    return True


def _is_users_class(kind: type) -> bool:
    """Whether a class is the user's, an edit's, or a namespace. Other objects (a log, a connection,
    the model) are left alone.
    """
    module = kind.__module__
    if kind in (Namespace, types.SimpleNamespace):
        return True
    if module.startswith(("flex_model.editing.", "__main__")):
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and not is_of_library(file)


def _names_of(code: types.CodeType) -> set[str]:
    """Return the global names that a function, or one defined inside it, uses."""
    inner = (_names_of(each) for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*inner)

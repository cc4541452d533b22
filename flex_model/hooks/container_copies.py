"""The containers that were copied to replace a tensor in what a module is passed.

A module may write into a list, dict or object that it is passed, for its caller to read there.
"""

from __future__ import annotations

import operator
from collections import deque
from typing import Any

from torch import Tensor

_Contents = dict[tuple[bool, Any], Any]  # by (whether it is an attribute, its name or key)


def are_copied(own: Any, passed: Any) -> bool:
    """Whether a container among the arguments ``own`` is another one in ``passed``."""
    return any(
        before is not after and not isinstance(after, Tensor) for before, after in zip(own, passed)
    )


class ContainerCopies:
    """The copies in the arguments that a module is passed.

    Args:
        own: The caller's arguments.
        passed: The same with other tensors, in copies of the containers around them.
    """

    def __init__(self, own: Any, passed: Any) -> None:
        self._copies: list[tuple[Any, Any, _Contents]] = []
        self._own: dict[int, Any] = {}
        self._find(own, passed)

    def _find(self, own: Any, passed: Any) -> None:
        if own is passed or isinstance(passed, Tensor):
            return
        contents, of_own = _contents(passed), _contents(own)
        self._copies.append((own, passed, contents))
        self._own[id(passed)] = own
        for place in contents.keys() & of_own.keys():
            self._find(of_own[place], contents[place])

    def write_back(self) -> None:
        """Write what the module has written into the copies into the caller's own."""
        for own, passed, before in self._copies:
            after = _contents(passed)
            changed = {
                place: self._own.get(id(value), value)
                for place, value in after.items()
                if place not in before or value is not before[place]
            }
            removed = before.keys() - after.keys()
            if isinstance(own, (list, deque)) and (changed or removed):
                items = {**_contents(own), **changed}
                own.clear()
                own.extend(items[place] for place in after if not place[0])
            for is_attribute, name in removed:
                if is_attribute or isinstance(own, dict):
                    (object.__delattr__ if is_attribute else operator.delitem)(own, name)
            for (is_attribute, name), value in changed.items():
                if is_attribute or isinstance(own, dict):
                    (object.__setattr__ if is_attribute else operator.setitem)(own, name, value)


def _contents(container: Any) -> _Contents:
    items: Any = ()
    if isinstance(container, dict):
        items = container.items()
    elif isinstance(container, (list, tuple, deque)):
        items = enumerate(container)
    slots = (name for kind in type(container).__mro__ for name in vars(kind).get("__slots__", ()))
    names = {*getattr(container, "__dict__", ()), *slots}
    return {
        **{(False, key): value for key, value in items},
        **{(True, name): getattr(container, name) for name in names if hasattr(container, name)},
    }

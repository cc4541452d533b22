"""Tracks plain numbers that may differ from the unsharded program's: sizes of split dims, numbers
made of them, and numbers read from tensors that are not the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


class LocalNumbers:
    """Tracks the plain numbers of one followed forward that may be local to a rank, along one axis.

    Attributes:
        split_sizes: Local sizes of all split dims so far: a plain number equal to one of them may
            be the local size of a dim that is larger in the unsharded program.
        has_read: Whether elements were read from tensors that are not the same on all ranks.
        has_condition: Whether a condition was evaluated on such a tensor.
        has_converted: Whether any local size was converted to a plain number.
        tainted_module: The outermost running module that converted a local size.
    """

    def __init__(self) -> None:
        self.split_sizes: set[int] = set()
        self.has_read = False
        self.has_condition = False
        self.has_converted = False
        self.tainted_module: str | None = None
        self._read: set[Any] = set()
        self._converted: set[Any] = set()

    def note_read(self, numbers: Collection[Any]) -> None:
        """Note elements that were read from a tensor that is not the same on all ranks."""
        self.has_read |= bool(numbers)
        self._read.update(numbers)

    def note_converted(self, numbers: Collection[Any], module: str) -> None:
        """Note local sizes that became plain numbers: any number that the module computes may
        depend on them.
        """
        self.has_converted = True
        if self.tainted_module is None:
            self.tainted_module = module
        self._converted.update(numbers)

    def note_condition(self) -> None:
        """Note a condition on a tensor that is not the same on all ranks."""
        self.has_condition = True

    def leave(self, module: str) -> None:
        """Note that the module has ended."""
        if module == self.tainted_module:
            self.tainted_module = None

    @property
    def possible_shard_sizes(self) -> set[int]:
        """Numbers that may be the local size of a split dim. (Without 1, which is mostly a literal:
        a dim's size is recognized there by its expression.)
        """
        return self.split_sizes - {0, 1}

    def may_count_rows(self, number: int) -> bool:
        """Whether the number may be the local size of a split dim, or a multiple of one that became
        a plain number.
        """
        sizes = self.split_sizes - {0}
        is_product = (self.has_read or self.has_converted) and any(
            number % size == 0 for size in sizes
        )
        return number in sizes or is_product or self.tainted_module is not None

    def may_be_counted(self, length: int) -> bool:
        """Whether a list may have this length because of a rank's own number."""
        counts = {n for n in self._converted if isinstance(n, int) and n > 0}
        return self.tainted_module is not None and any(length % n == 0 for n in counts)

    def is_local(self, number: Any) -> bool:
        """Whether the number may have been read from a tensor that is not the same on all ranks.
        (That a 0 or 1 was read says nothing about other 0s and 1s.)
        """
        return number not in (-1, 0, 1) and number in self._read

    def may_be_made_of_size(self, number: Any) -> bool:
        """Whether a plain number may be a size of this rank, or computed from one by functions that
        keep no expression.
        """
        if isinstance(number, bool):
            return self.has_condition
        return self.tainted_module is not None or number in self._converted

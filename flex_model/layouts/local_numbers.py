"""Plain numbers that may be a rank's own: sizes of split dims, numbers made of them, and numbers
read from tensors that are not the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


class LocalNumbers:
    """Records which numbers of one followed forward may be a rank's own, along one axis.

    Attributes:
        split_sizes: Local sizes of all dims that were seen split: a plain number equal to one of
            these may be the local size of a dim that is larger in the unsharded program.
        has_read: Whether elements were read of tensors that are not the same on all ranks.
        has_asked: Whether a condition was evaluated on such a tensor.
        has_converted: Whether a rank's own size was made a plain number, whatever its value.
        suspect: The outermost running module that has made such a number.
    """

    def __init__(self) -> None:
        self.split_sizes: set[int] = set()
        self.has_read = False
        self.has_asked = False
        self.has_converted = False
        self.suspect: str | None = None
        self._read: set[Any] = set()
        self._converted: set[Any] = set()

    def note_read(self, numbers: Collection[Any]) -> None:
        """Elements were read of a tensor that is not the same on all ranks."""
        self.has_read |= bool(numbers)
        self._read.update(numbers)

    def note_converted(self, numbers: Collection[Any], module: str) -> None:
        """Numbers became plain that are a rank's own, and so may be all that the module makes."""
        self.has_converted = True
        if self.suspect is None:
            self.suspect = module
        self._converted.update(numbers)

    def note_asked(self) -> None:
        """A condition was evaluated on a tensor that is not the same on all ranks."""
        self.has_asked = True

    def leave(self, module: str) -> None:
        """The module has ended."""
        if module == self.suspect:
            self.suspect = None

    @property
    def suspicious_sizes(self) -> set[int]:
        """Numbers that may be the local size of a split dim. (1 is too often just 1: what of a
        dim's size is left where one is meant is found by its expression.)
        """
        return self.split_sizes - {0, 1}

    def may_count_rows(self, number: int) -> bool:
        """Whether the number may be the local size of a split dim, or a product with one that was
        made a plain number.
        """
        sizes = self.split_sizes - {0}
        is_product = (self.has_read or self.has_converted) and any(
            number % size == 0 for size in sizes
        )
        return number in sizes or is_product or self.suspect is not None

    def may_be_counted(self, length: int) -> bool:
        """Whether a list may have this length by a number that is a rank's own."""
        counts = {n for n in self._converted if isinstance(n, int) and n > 0}
        return self.suspect is not None and any(length % n == 0 for n in counts)

    def is_local(self, number: Any) -> bool:
        """Whether the number may have been read from a tensor that is not the same on all ranks.
        (That 0 or 1 was read somewhere says nothing of the next 0 or 1.)
        """
        return number not in (-1, 0, 1) and number in self._read

    def may_be_made_of_size(self, number: Any) -> bool:
        """Whether a plain number may be one of this rank's sizes, or made of one by functions that
        don't say so.
        """
        if isinstance(number, bool):
            return self.has_asked
        return self.suspect is not None or number in self._converted

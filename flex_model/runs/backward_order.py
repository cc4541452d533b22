"""Puts the records of one backward through several batches of a sequential run in batch order:
autograd visits batches in any order, since each was computed in a thread of its own.
"""

from __future__ import annotations

from typing import Any


class BackwardOrder:
    """The order of a FlexModel's backward records. A backward calls ``begin`` and ``end`` once for
    each run that it reaches.
    """

    def __init__(self, output_ptr: dict[str, list[Any]]) -> None:
        self._output_ptr = output_ptr
        self._task = -1
        self._num_open = 0
        self._positions: dict[str, list[tuple[int, int]]] = {}  # by name: batch, position

    def begin(self, task: int) -> None:
        """Count a run that this backward reaches."""
        if task != self._task:  # the previous backward may have failed
            self._task, self._num_open, self._positions = task, 0, {}
        self._num_open += 1

    def position(self, name: str) -> int:
        """Return the index of the next record of this name."""
        return len(self._output_ptr.get(name, ()))

    def add(self, name: str, position: int, batch: int | None) -> None:
        """Assign the records from ``position`` on, which a hook has just made, to a batch."""
        if batch is not None:
            new = range(position, self.position(name))
            self._positions.setdefault(name, []).extend((batch, place) for place in new)

    def end(self) -> None:
        """The records of a run are delivered. After the last run, sort them by batch."""
        self._num_open -= 1
        if self._num_open:
            return
        for name, positions in self._positions.items():
            records = self._output_ptr.get(name, [])
            places = sorted(place for _, place in positions)
            if places and places[-1] < len(records):
                values = [records[place] for _, place in sorted(positions)]
                for place, value in zip(places, values):
                    records[place] = value
        self._positions = {}

"""Records of one backward through several batches of a sequential run, in the order of the batches:
autograd takes batches in any order, since each was computed in a thread of its own.
"""

from __future__ import annotations

from typing import Any


class BackwardOrder:
    """Of one wrap. In a backward, each run that it meets ``begins`` and ``ends`` once."""

    def __init__(self, output_ptr: dict[str, list[Any]]) -> None:
        self._output_ptr = output_ptr
        self._task = -1
        self._num_open = 0
        self._noted: dict[str, list[tuple[int, int]]] = {}  # by name: batch, position

    def begins(self, task: int) -> None:
        """A run has a part in this backward."""
        if task != self._task:  # the one before may have failed
            self._task, self._num_open, self._noted = task, 0, {}
        self._num_open += 1

    def position(self, name: str) -> int:
        """Where the next record of this name goes."""
        return len(self._output_ptr.get(name, ()))

    def note(self, name: str, position: int, batch: int | None) -> None:
        """A hook was called for a batch; what it recorded is from ``position`` on."""
        if batch is not None:
            new = range(position, self.position(name))
            self._noted.setdefault(name, []).extend((batch, place) for place in new)

    def ends(self) -> None:
        """The records of a run are delivered. After the last run, they are put in order."""
        self._num_open -= 1
        if self._num_open:
            return
        for name, noted in self._noted.items():
            records = self._output_ptr.get(name, [])
            places = sorted(place for _, place in noted)
            if places and places[-1] < len(records):
                values = [records[place] for _, place in sorted(noted)]
                for place, value in zip(places, values):
                    records[place] = value
        self._noted = {}

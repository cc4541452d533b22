"""The flight recorder of a rank: its last exchanges, shown in errors about several ranks."""

from __future__ import annotations

from collections import deque

_CAPACITY = 12


class FlightRecorder:
    """The last exchanges that a rank took part in, in order, with counts of repetitions.

    Example::

        recorder.add("forward hook on 'layers.0'")
        str(recorder)   # "... forward hook on 'layers.0' (x2); end of the run, with 2 records"
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[str, int]] = deque(maxlen=_CAPACITY)

    def add(self, where: str) -> None:
        steps = self._steps
        if steps and steps[-1][0] == where:
            steps[-1] = (where, steps[-1][1] + 1)
        else:
            steps.append((where, 1))

    def __str__(self) -> str:
        listed = [where + (f" (x{count})" if count > 1 else "") for where, count in self._steps]
        more = "... " if len(self._steps) == _CAPACITY else ""
        return more + ("; ".join(listed) or "nothing")

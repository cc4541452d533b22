"""The last steps of a rank, told with every error that is about several ranks."""

from __future__ import annotations

from collections import deque

_REMEMBERED = 12


class Steps:
    """The last exchanges that a rank took part in, in order; what is repeated is counted.

    Example::

        steps.add("forward hook on 'layers.0'")
        str(steps)   # "... forward hook on 'layers.0' (x2); end of the run, with 2 records"
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[str, int]] = deque(maxlen=_REMEMBERED)

    def add(self, where: str) -> None:
        steps = self._steps
        if steps and steps[-1][0] == where:
            steps[-1] = (where, steps[-1][1] + 1)
        else:
            steps.append((where, 1))

    def __str__(self) -> str:
        listed = [where + (f" (x{count})" if count > 1 else "") for where, count in self._steps]
        more = "... " if len(self._steps) == _REMEMBERED else ""
        return more + ("; ".join(listed) or "nothing")

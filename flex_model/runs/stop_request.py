"""The request to stop runs on all ranks together: a notebook's Ctrl-C."""

from collections.abc import Callable

from flex_model.errors import HookError

_TEXT = "stopped by Ctrl-C"


class StopRequest:
    """A request to stop, which the next forward with hooks or step of a pipeline follows: all ranks
    raise an error at the same exchange.

    An exception of a signal handler ends each rank somewhere else, and the others wait in a
    collective, of the model's own perhaps, for one that has left. This ends all in one exchange, so
    the FlexModel and its groups can be used again.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget the request, and what looked for one."""
        self._was_looked_for = self._is_made = False

    def make(self) -> None:
        self._is_made = True

    @property
    def is_ignored(self) -> bool:
        """Whether there is a request, and nothing that follows one has begun since ``clear``."""
        return self._is_made and not self._was_looked_for

    def follow(self, fail: Callable[[str, BaseException], None]) -> None:
        """Call ``fail``, which has the next exchange report an error, if a request was made. It is
        followed once.
        """
        is_made, self._is_made, self._was_looked_for = self._is_made, False, True
        if is_made:
            fail(_TEXT, HookError(_TEXT))


#: That of this process, as signals are of a process.
STOP_REQUEST = StopRequest()

"""Messages between ranks by gloo, whose waits can be polled and ended.

Torch's sends and receives by gloo can be waited for, but neither polled nor interrupted. So a
thread waits for them, and the caller polls what it has done.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from flex_model.distributed.rounds import Part, Round

_TAG, _NEVER_SENT = 0, 1  # tags of messages
_AT_ONCE = timedelta(milliseconds=1)


class LostError(RuntimeError):
    """A connection was lost.

    Attributes:
        rank: The global rank at its other end.
    """

    def __init__(self, text: str, rank: int) -> None:
        super().__init__(text)
        self.rank = rank


class Exchange:
    """Messages under way: a work, as torch.distributed has them. LostError from ``wait`` if a
    connection was lost.
    """

    def __init__(self) -> None:
        self._done = threading.Event()
        self._peer = 0  # of the message that is begun, or waited for
        self._error: BaseException | None = None

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        """Wait, without a deadline, until it is complete."""
        self._done.wait()
        if self._error is not None:
            raise self._error

    def run(
        self, backend: Any, ranks: Sequence[int], buffer: Tensor, rounds: Sequence[Round]
    ) -> None:
        """Send and receive, and wait. In a thread that may wait."""
        try:
            self._run(backend, buffer, rounds)
        except RuntimeError as error:
            self._error = LostError(str(error), ranks[self._peer])
        except BaseException as error:
            self._error = error
        self._done.set()

    def _run(self, backend: Any, buffer: Tensor, rounds: Sequence[Round]) -> None:
        # A receive that is there before its message saves a message back to the sender.
        received = [self._begin(backend.recv, buffer, receives) for _, receives in rounds]
        sent = []
        for (sends, _), works in zip(rounds, received):
            sent += self._begin(backend.send, buffer, sends)
            self._finish(works)
        self._finish(sent)

    def _begin(
        self, begin: Callable[..., Any], buffer: Tensor, parts: Sequence[Part]
    ) -> list[tuple[int, Any]]:
        works = []
        for self._peer, start, stop in parts:
            works.append((self._peer, begin([buffer[start:stop]], self._peer, _TAG)))
        return works

    def _finish(self, works: Sequence[tuple[int, Any]]) -> None:
        for self._peer, work in works:
            work.wait()


class Messages:
    """The messages of a rank in a gloo group.

    Args:
        backend: A ProcessGroupGloo, whose methods torch's stubs leave out.
        ranks: Its global ranks, at least two.
        rank: This process's index among them.
    """

    def __init__(self, backend: Any, ranks: Sequence[int], rank: int) -> None:
        self._backend, self._ranks, self._rank = backend, ranks, rank
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def exchange(self, buffer: Tensor, rounds: Sequence[Round]) -> Exchange:
        """Begin to send and receive parts of a buffer, contiguous bytes. Local."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_serve, args=(self._jobs,), name="flex_model waits for gloo", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None)
        exchange = Exchange()
        self._jobs.put(functools.partial(exchange.run, self._backend, self._ranks, buffer, rounds))
        return exchange

    def abort(self) -> None:
        """Close the connections, which ends the waits of this rank, and for it. Local."""
        never = torch.empty(1, dtype=torch.uint8, device="cpu")
        with contextlib.suppress(RuntimeError):  # the late receive makes gloo close them all
            self._backend.recv([never], 1 if self._rank == 0 else 0, _NEVER_SENT).wait(_AT_ONCE)


def _serve(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # which has a buffer, and the connections

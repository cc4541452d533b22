"""Waits for a cell, or a call, on the ranks, shows its output, and ends it on all ranks."""

from __future__ import annotations

import concurrent.futures
import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from signal import SIGINT, SIGKILL, SIGUSR2
from typing import Any

import psutil
from IPython.display import publish_display_data

from flex_model.diagnostics.local_ranks import RankError
from flex_model.runs.interrupts import deferrable

_POLL_S = 0.05
_INTERRUPT_AFTER_S = 1.0  # until a rank that does not run a FlexModel is interrupted
#: Signals to a rank that still runs after Ctrl-C: twice a request to stop together with the
#: others, which `rank_process.stop` handles. After an error of another rank it gets the last two.
_SIGNALS = [SIGUSR2, SIGUSR2, SIGINT, SIGKILL]
_AGAIN = "ranks.restart() starts all ranks afresh; their models and variables are lost"


@dataclass
class Engine:
    """The process of a rank.

    Attributes:
        process: None where it is on another host, whose engine ipyparallel signals.
    """

    rank: int
    id: int
    host: str
    pid: int
    client: Any = field(repr=False)
    process: psutil.Process | None = field(repr=False)

    @property
    def is_alive(self) -> bool:
        if self.process is not None:
            with suppress(psutil.Error):
                return self.process.is_running() and self.process.status() != "zombie"
            return False
        return self.id in self.client.ids

    def signal(self, number: int) -> None:
        """Send a signal to this process, if it is there; psutil checks that its pid is still its
        own.
        """
        if self.process is None:
            with suppress(IndexError):  # it has ended
                self.client.send_signal(number, targets=self.id, block=False)
            return
        with suppress(psutil.Error):
            self.process.send_signal(number)


@dataclass
class Failure:
    """An error of one rank, or the same one of several."""

    name: str
    message: str
    traceback: str
    ranks: list[int]


class CellError(RankError):
    """A cell, or a call, failed on some rank. It shows the first traceback; the same error of
    several ranks is shown once.

    Attributes:
        ranks: The ranks that raised that error.
        name, message: Its class's name, and its text.
        failures: All errors, the first one first.
        ended: The ranks whose process was ended, or had died.
    """

    def __init__(self, failures: list[Failure], ended: Sequence[int] = ()) -> None:
        first = failures[0]
        self.failures, self.ended, self.ranks = failures, tuple(ended), first.ranks
        self.name, self.message = first.name, first.message
        self._notes = [
            f"{_named(other.ranks)}: {other.name}: {other.message.strip().splitlines()[0][:200]}"
            for other in failures[1:]
            if other.message.strip()
        ]
        if ended:
            self._notes.append(f"{_named(ended)} ended: {_AGAIN}")
        super().__init__("\n".join(self._render_traceback_()))

    def __str__(self) -> str:
        return re.sub(r"\x1b\[[\d;]*m", "", super().__str__())

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows instead of a traceback of the driver."""
        first = self.failures[0]
        shown = first.traceback or f"{first.name}: {first.message}"
        return [f"{_named(first.ranks)}:", *shown.splitlines(), *self._notes]


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


class CellRun:
    """One cell, or call, on some engines.

    Args:
        parts: ipyparallel's results, one for each engine.
        grace_s: Seconds between an error on one rank (or Ctrl-C, at which runs stop together) and
            an interrupt of those that are not done, and from there until they are ended.
    """

    def __init__(self, parts: Sequence[Any], engines: Sequence[Engine], grace_s: float) -> None:
        self._parts, self._engines, self._grace_s = parts, engines, grace_s
        self._order: list[int] = []  # which are done
        self._killed: list[int] = []
        self._printed: dict[tuple[int, str], str] = {}
        self._displayed: dict[int, int] = {}
        self._at_line_start = True
        self._speaker: tuple[int, str] | None = None

    def wait(self) -> list[Any]:
        """Return what the ranks answered. Called with Ctrl-C deferred, which is handled here.

        Raises:
            CellError: on some rank it failed.
            KeyboardInterrupt: the ranks were interrupted, by Ctrl-C.
        """
        deadline, signals, interrupted = float("inf"), [*_SIGNALS], False
        while True:
            try:
                with deferrable() as ctrl_c, ctrl_c.released():
                    self._wait_for_one()
                self._show()
                has_failed = self._has_failed()
                if len(self._order) == len(self._parts):
                    break
                if deadline == float("inf") and has_failed:
                    deadline = time.monotonic() + self._grace_s
                    del signals[:-2]  # those that wait for the one that failed can't stop with it
                if time.monotonic() >= deadline:
                    self._signal(signals.pop(0))
                    deadline = time.monotonic() + self._grace_s if signals else float("inf")
            except KeyboardInterrupt:  # another one does not wait
                self._signal(signals.pop(0) if len(signals) > 1 else SIGKILL)
                is_first = len(signals) == len(_SIGNALS) - 1
                deadline = time.monotonic() + (_INTERRUPT_AFTER_S if is_first else self._grace_s)
                interrupted = True
        for part in self._parts:
            part.wait_for_output(1)
        self._show()
        self._show_results()
        return self._answers(interrupted)

    def _wait_for_one(self) -> None:
        pending = [part for i, part in enumerate(self._parts) if i not in self._order]
        concurrent.futures.wait(pending, _POLL_S, concurrent.futures.FIRST_COMPLETED)

    def _has_failed(self) -> bool:
        for i, part in enumerate(self._parts):
            if i not in self._order and part.ready():
                self._order.append(i)
        return any(not self._parts[i].successful() for i in self._order)

    def _signal(self, number: int) -> None:
        for engine, part in zip(self._engines, self._parts):
            if not part.ready():
                engine.signal(number)
                if number == SIGKILL:
                    self._killed.append(engine.rank)

    def _answers(self, interrupted: bool) -> list[Any]:
        failures: dict[tuple[str, str], Failure] = {}
        for i in self._order:
            error = self._parts[i].exception()
            if error is not None:
                name, message = error.ename, str(error.evalue)
                if name == "EngineError":
                    name, message = "EndedError", self._why_ended(self._engines[i].rank)
                one = Failure(name, message, "" if name == "EndedError" else error.traceback, [])
                failures.setdefault((name, message), one).ranks.append(self._engines[i].rank)
        ended = [engine.rank for engine in self._engines if not engine.is_alive]
        if interrupted:
            if ended:
                print(f"{_named(ended)} could not be interrupted and ended: {_AGAIN}")
            raise KeyboardInterrupt
        if failures:
            # An interrupt follows another error, and so does the death of a rank that was ended.
            last = {"KeyboardInterrupt": 1, "EndedError": 2 if len(failures) > 1 else 0}
            in_order = sorted(failures.values(), key=lambda one: last.get(one.name, 0))
            for failure in in_order:
                failure.ranks.sort()
            raise CellError(in_order, ended)
        return [part.get() for part in self._parts]

    def _why_ended(self, rank: int) -> str:
        if rank in self._killed:
            return "it was waiting, an interrupt did not reach it, and its process was ended"
        return "its process died"

    # ---- Output ----------------------------------------------------------------------------------

    def _show(self) -> None:
        """Print what the ranks printed since the last time, and their figures."""
        for engine, part in zip(self._engines, self._parts):
            found = part.metadata
            for name in ("stdout", "stderr"):
                before, text = self._printed.get((engine.rank, name), ""), found[name]
                if text != before:
                    self._printed[engine.rank, name] = text
                    self._print(engine.rank, name, _new_part(before, text))
            done = self._displayed.get(engine.rank, 0)
            for output in found["outputs"][done:]:
                self._displayed[engine.rank] = done = done + 1
                publish_display_data(output["data"], output.get("metadata", {}))

    def _print(self, rank: int, name: str, text: str) -> None:
        """Write to this process's stdout or stderr, each line with its rank."""
        stream = getattr(sys, name)
        if self._speaker not in (None, (rank, name)) and not self._at_line_start:
            stream.write("\n")
            self._at_line_start = True
        self._speaker = (rank, name)
        label = f"[{rank}] "
        for line in re.findall(r"[^\r\n]*[\r\n]|[^\r\n]+", text):
            bare = not line.strip("\r\n")
            stream.write(label * (self._at_line_start and not bare) + line)
            self._at_line_start = line[-1] in "\r\n"
        stream.flush()

    def _show_results(self) -> None:
        """Display the values of the cell's last line; the same of several ranks once."""
        shown: dict[str, tuple[dict[str, Any], list[int]]] = {}
        for engine, part in zip(self._engines, self._parts):
            data = (part.metadata["execute_result"] or {}).get("data")
            if data:
                shown.setdefault(data.get("text/plain", ""), (data, []))[1].append(engine.rank)
        for data, ranks in shown.values():
            label = f"[{', '.join(map(str, ranks))}] "
            plain = label + data.get("text/plain", "")
            publish_display_data({**data, "text/plain": plain})


def _new_part(before: str, text: str) -> str:
    """Return what to print after ``before``, whose last line may have been written over."""
    if text.startswith(before):
        return text[len(before) :]
    same = next((i for i, (a, b) in enumerate(zip(before, text)) if a != b), len(text))
    start = text.rfind("\n", 0, same) + 1
    return "\r" + text[start:]

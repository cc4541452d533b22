"""What a dry run finds wrong with editing functions, and at which line of theirs."""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, NoReturn

import torch
from torch import nn

from flex_model.hooks.function import name_of
from flex_model.hooks.registration import Registration, describe_hook

#: How bad a finding is: a run would raise it or compute something else than was meant; it may have
#: been meant; shapes alone don't tell.
ERROR, WARNING, NOT_CHECKED = "error", "warning", "not checked"


@dataclass(frozen=True)
class Finding:
    """One thing that a dry run found in an editing function, or could not look at.

    Attributes:
        level: ``"error"``, ``"warning"`` or ``"not checked"``.
        problem: Which kind of thing, in a word or two; docs/checks.md lists them.
        message: What was expected, what was found, and what to do.
        name, kind, unpack_idx: The hook's, as in ``DryRunRow``.
        function: The editing function's name.
        file, line: Of the user's code; where there is none of it, of what it called.
        ranks: Global ranks on which it was found.
    """

    level: str
    problem: str
    message: str
    name: str
    kind: str
    unpack_idx: int | tuple[int, ...]
    function: str
    file: str
    line: int
    ranks: tuple[int, ...] = ()

    @staticmethod
    def of(
        registration: Registration,
        source: Source,
        level: str,
        problem: str,
        message: str,
        place: Place | None = None,
    ) -> Finding:
        """At a line; by default, where the editing function begins."""
        place = place or source.place
        unpack_idx = registration.given.unpack_idx
        which = (registration.name, registration.kind, unpack_idx, source.name)
        return Finding(level, problem, message, *which, place.file, place.line)

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)

    @staticmethod
    def from_json(words: dict[str, Any]) -> Finding:
        """From what ``to_json`` gave."""
        index = words["unpack_idx"]
        words = {**words, "unpack_idx": tuple(index) if isinstance(index, list) else index}
        return Finding(**{**words, "ranks": tuple(words["ranks"])})

    def __str__(self) -> str:
        hook = describe_hook(self.name, self.kind, self.unpack_idx)
        return (
            f"{self.file}:{self.line}: {self.level}: {self.message} "
            f"[{self.problem}; {self.function} in the {hook}]"
        )


@dataclass(frozen=True)
class Place:
    """A line of code."""

    file: str
    line: int


class Source:
    """Which code is the user's: the editing function's file, and all that no library has.

    Attributes:
        place: Where the editing function begins.
    """

    def __init__(self, function: Any) -> None:
        self.name = name_of(function)
        code = _code_of(function)
        self.place = Place(code.co_filename, code.co_firstlineno) if code else Place("", 0)
        is_ready = code is not None and code.co_filename.startswith(_own_folder())
        self._own = "" if is_ready else self.place.file

    def is_users(self, file: str) -> bool:
        return file == self._own or not is_of_library(file)

    def here(self) -> Place:
        """The line of the user's code that is being run."""
        return self._innermost(_outwards(sys._getframe(1))) or self.place

    def of_error(self, error: BaseException) -> Place:
        """The line of the user's code that raised; else the line that did."""
        steps = list(_steps(error.__traceback__))
        if not steps:
            return self.place
        return self._innermost(reversed(steps)) or Place(*steps[-1])

    def _innermost(self, steps: Iterator[tuple[str, int]]) -> Place | None:
        return next((Place(*step) for step in steps if self.is_users(step[0])), None)


class Stopped(BaseException):
    """The rehearsal can't go on; it was reported why. Not an Exception: functions catch those."""


class Reports:
    """Where what is found in one call of an editing function goes."""

    def __init__(self, source: Source, report: Callable[[str, str, str, Place], None]) -> None:
        self.source, self._report = source, report

    def add(self, level: str, problem: str, message: str, place: Place | None = None) -> None:
        """At a line; by default, at the one that is being run."""
        self._report(level, problem, message, place or self.source.here())

    def stop(self, level: str, problem: str, message: str) -> NoReturn:
        self.add(level, problem, message)
        raise Stopped


def _outwards(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    """The calls under way; not those around the editing function."""
    while frame is not None and frame.f_code.co_filename != _rehearsal_file():
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def _steps(traceback: TracebackType | None) -> Iterator[tuple[str, int]]:
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if file != _rehearsal_file():
            yield file, traceback.tb_lineno
        traceback = traceback.tb_next


def _code_of(function: Any) -> CodeType | None:
    """Of a function, a method, a partial or an object that is called."""
    for _ in range(8):
        if isinstance(function, nn.Module):
            function = function.forward
        found = getattr(function, "__code__", None)
        if isinstance(found, CodeType):
            return found
        function = (
            getattr(function, "__wrapped__", None)
            or getattr(function, "__func__", None)
            or (function.func if isinstance(function, functools.partial) else None)
            or type(function).__call__
        )
    return None


def is_of_library(file: str) -> bool:
    """Whether the code in it is not the user's."""
    return file.startswith((*_libraries(), "<frozen", "<string>", "<eval_with_key"))


@functools.cache
def _rehearsal_file() -> str:
    return str(Path(__file__).with_name("rehearsal.py"))


@functools.cache
def _own_folder() -> str:
    return str(Path(__file__).parents[2]) + "/"


@functools.cache
def _libraries() -> tuple[str, ...]:
    """Folders whose code is not the user's."""
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [str(Path(torch.__file__).parent)]
    return (_own_folder(), *(f"{folder}/" for folder in folders))

"""A finding of a dry run in an editing function, and the line of the user's code that it is at."""

from __future__ import annotations

import functools
import inspect
import itertools
import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import nn

from flex_model.hooks.function import name_of
from flex_model.hooks.registration import Registration, describe_hook

#: The levels of a finding: a run would raise an error or compute something else than was meant; it
#: may have been meant; a dry run can't decide it, as it has shapes only.
ERROR, WARNING, NOT_CHECKED = "error", "warning", "not checked"

Place = tuple[str, int]  # a file, and a line in it

_CALLS_FILE = str(Path(__file__).with_name("calls.py"))


@dataclass(frozen=True)
class Finding:
    """One problem that a dry run found in an editing function, or a part that it did not check.

    Attributes:
        level: ``"error"``, ``"warning"`` or ``"not checked"``.
        problem: The kind of problem, in a word or two; docs/checks.md lists them.
        message: What was expected, what was found, and what to do.
        name, kind, unpack_idx: The hook's, as in ``DryRunRow``.
        function: The editing function's name.
        file, line: A line of the user's code. Of what a function raised, the innermost one in the
            traceback; of what it returned, that of its last operation.
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

    def __str__(self) -> str:
        hook = describe_hook(self.name, self.kind, self.unpack_idx)
        return (
            f"{self.file}:{self.line}: {self.level}: {self.message} "
            f"[{self.problem}; {self.function} in the {hook}]"
        )


class Source:
    """The user's code of one editing function: its own file, and all files outside of libraries.

    Attributes:
        start: Where the editing function begins.
    """

    def __init__(self, registration: Registration) -> None:
        self._registration = registration
        function: Any = registration.given.editing_function
        code = _code_of(function)
        self._name = name_of(function)
        self.start: Place = (code.co_filename, code.co_firstlineno) if code else ("", 0)
        self._own_file = "" if self.start[0].startswith(_own_folder()) else self.start[0]

    def finding(
        self, level: str, problem: str, message: str, place: Place | None = None
    ) -> Finding:
        """A finding at a line; by default, where the editing function begins."""
        place, unpack_idx = place or self.start, self._registration.given.unpack_idx
        hook = (self._registration.name, self._registration.kind, unpack_idx)
        return Finding(level, problem, message, *hook, self._name, *place)

    def current_line(self) -> Place | None:
        """The line of the user's code that runs now, in the editing function or in its callees."""
        steps = ((f.f_code.co_filename, line) for f, line in traceback.walk_stack(None))
        return self._first(itertools.takewhile(lambda step: step[0] != _CALLS_FILE, steps))

    def line_of(self, error: BaseException) -> Place:
        """The line of the user's code that raised an error; of a ready edit's, the line inside."""
        steps = [(f.f_code.co_filename, n) for f, n in traceback.walk_tb(error.__traceback__)]
        inside = steps[-1] if steps[-1][0] != _CALLS_FILE else self.start
        return self._first(steps[::-1]) or inside

    def _first(self, steps: Iterable[Place]) -> Place | None:
        return next((s for s in steps if s[0] == self._own_file or not is_of_library(s[0])), None)


def _code_of(function: Any) -> CodeType | None:
    """The code of a function, a method, a partial or a callable object."""
    function = inspect.unwrap(function)
    if isinstance(function, functools.partial):
        return _code_of(function.func)
    if isinstance(function, nn.Module):
        function = function.forward
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None


def is_of_library(file: str) -> bool:
    """Whether the code in a file is a library's, not the user's."""
    return file.startswith((*_libraries(), "<frozen", "<string>", "<eval_with_key"))


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

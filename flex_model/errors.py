"""The error classes of flex_model, and texts that several errors share.

``HookError`` and its subclasses are raised for failures while a model runs; wrong arguments are
``ValueError``, ``TypeError`` and ``IndexError``, raised by the call that got the argument.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class Control(BaseException):
    """Ends code of the model for a purpose of the library's own; no rank has failed. Not an
    Exception: code that catches those is not meant.
    """


class HookError(RuntimeError):
    """An editing function raised or returned something invalid, or a rank failed, while hooks were
    active.

    Raised on every rank; on the rank where the failure began, ``__cause__`` is the original
    exception.
    """


class UnpackIndexError(HookError, IndexError):
    """The site of a hook has too few tensors for its ``unpack_idx``: a wrong argument, found while
    the model ran.
    """


class HookMismatchError(HookError):
    """Ranks disagree on the hooks, their order, shapes or dtypes. The message names ranks, site and
    values.
    """


class LayoutMismatchError(HookMismatchError, ValueError):
    """The local shapes of the ranks are not those of one tensor's shards under its layout."""


class ReplicasDifferError(ValueError):
    """Ranks hold different values of a tensor that is one on all of them, by its layout."""


class HookNotCalledWarning(UserWarning):
    """The module of a forward or forward-pre hook was not called in a run, nor in one before. Once
    per hook, on every rank.
    """


class TraceError(RuntimeError):
    """A model could not be traced, or the traced graph does not compute what the model computes."""


def agreed(error):
    """Mark an error that every rank raises at the same place, so that it is not reported again."""
    error.is_agreed = True
    return error


def is_agreed(error: BaseException | None) -> bool:
    """Whether all ranks raise this error, or one that caused it."""
    while error is not None:
        if getattr(error, "is_agreed", False):
            return True
        error = error.__cause__
    return False


def text_of(error: BaseException) -> str:
    """Return an exception's class and message, which a user's class may fail to make."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:
        text = ""
    # Half a surrogate pair, as a cut JSON string has, can't be sent to other ranks.
    return (f"{name}: {text}" if text else name).encode(errors="backslashreplace").decode()


def check_type(expected: str, value: object, kind: Any, advice: str = "") -> None:
    """TypeError for a value of another class; ``expected`` begins the message."""
    if not isinstance(value, kind):
        raise TypeError(f"{expected}, got {type(value).__name__}{advice}")


def see(section: str) -> str:
    """Return a reference to the section of docs/errors.md that explains a message."""
    return f"see docs/errors.md#{section}"


def nearest(name: str, names: Iterable[str], what: str = "name") -> str:
    """Return a clause with the ``names`` most similar to ``name``, or all of a short list."""
    names = list(dict.fromkeys(names))
    if not names:
        return f"there is no {what} to choose from"
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if not close:
        last = name.rsplit(".", 1)[-1]
        close = [other for other in names if last and last in other][:3]
    if not close and len(names) > 8:
        return f"none of the {len(names)} {what}s is similar; the first are {_listed(names[:3])}"
    return f"nearest {what}s: {_listed(close or names)}"


def _listed(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names)

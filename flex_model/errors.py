"""The errors of flex_model, and the wording that they share.

``HookError`` and its kind are about what happened while a model ran; wrong arguments stay
``ValueError``, ``TypeError`` and ``IndexError``, raised where the argument was given.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HookError(RuntimeError):
    """An editing function raised or returned something invalid, or a rank failed, while hooks were
    active.

    Raised on every rank alike; on the rank where it began, ``__cause__`` is the original exception.
    """


class UnpackIndexError(HookError, IndexError):
    """Where a hook is there are fewer tensors than its ``unpack_idx`` counts to: a wrong argument,
    found while the model ran.
    """


class HookMismatchError(HookError):
    """Ranks disagree: other hooks, another order, other shapes or dtypes. The message names ranks,
    site and values.
    """


class LayoutMismatchError(HookMismatchError, ValueError):
    """The shapes that ranks hold are not those of one tensor's shards, as its layout says."""


class HookNotCalledWarning(UserWarning):
    """A run ended, and the module of a forward or forward-pre hook was never run in it, nor in one
    before. Once per hook, on every rank.
    """


class TraceError(RuntimeError):
    """A model could not be traced, or the traced graph does not compute what the model computes."""


def agreed(error):
    """Mark an error that every rank raises at the same place: nobody needs to be told of it
    again.
    """
    error.is_agreed = True
    return error


def is_agreed(error: BaseException | None) -> bool:
    """Whether all ranks know of this error, or of one that it was raised from."""
    while error is not None:
        if getattr(error, "is_agreed", False):
            return True
        error = error.__cause__
    return False


def see(section: str) -> str:
    """Where a message is explained: a section of docs/errors.md."""
    return f"see docs/errors.md#{section}"


def nearest(name: str, names: Iterable[str], what: str = "name") -> str:
    """A sentence that names the entries of ``names`` most like ``name``, or all of a short list."""
    names = list(dict.fromkeys(names))
    if not names:
        return f"there is no {what} to choose from"
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if not close:
        last = name.rsplit(".", 1)[-1]
        close = [other for other in names if last and last in other][:3]
    if not close and len(names) > 8:
        return f"none of the {len(names)} {what}s is like it; they begin with {_listed(names[:3])}"
    return f"nearest {what}s: {_listed(close or names)}"


def _listed(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names)

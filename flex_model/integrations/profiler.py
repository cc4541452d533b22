"""Ranges of torch's profiler (and of NVTX: ``emit_nvtx``) around what hooks do. While no profiler
runs, each costs one truth test.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch.profiler import record_function

from flex_model.integrations.torch_private import is_profiling

_NAMES = {"hook": "hook", "edit": "function"}  # the kinds of observed spans
Observer = TypeVar("Observer", bound=Callable[..., Any])


def with_ranges(observers: Sequence[Observer], begin: Observer) -> Sequence[Observer]:
    """Return the observers, with the one that makes ranges while a profiler runs."""
    return [*observers, begin] if is_profiling() else observers


def begin_span(kind: str, call: Any) -> Callable[[], None]:
    """Begin the range of a hook or of its function: an observer of the hook executor."""
    return _begin(f"{_NAMES[kind]} {call.describe()}")


def begin_transfer(name: str, *_: Any) -> Callable[[], None]:
    """Begin the range of a transfer: an observer of a communicator."""
    return _begin(f"transfer {name}")


def _begin(name: str) -> Callable[[], None]:
    span = record_function(f"flex_model {name}")
    span.__enter__()
    return functools.partial(span.__exit__, None, None, None)


def ranged(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a function of ``(tensor, context)`` a range with the name of the context's hook."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def in_range(tensor: Any, context: Any) -> Any:
            if not is_profiling():
                return function(tensor, context)
            with record_function(f"flex_model {what} {context.hook}"):
                return function(tensor, context)

        return in_range

    return decorate

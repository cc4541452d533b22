"""Ranges of torch's profiler (and of NVTX: ``emit_nvtx``) around what hooks do. While no profiler
runs, each costs one truth test.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch.profiler import record_function

from flex_model.integrations.torch_private import is_profiling

_NAMES = {"hook": "hook", "edit": "function"}  # the kinds of observed spans
Ending = Callable[[], None]
Observer = Callable[..., Ending]


def begun(observers: Sequence[Observer], begin: Observer, *what: Any) -> Sequence[Ending]:
    """Call the observers, and while a profiler runs the one that makes its ranges; return what ends
    the observation.
    """
    every = [*observers, begin] if is_profiling() else observers
    return [one(*what) for one in every] if every else ()


def begin_span(kind: str, call: Any) -> Ending:
    """Begin the range of a hook or of its function: an observer of the hook executor."""
    return _begin(f"{_NAMES[kind]} {call.describe()}")


def begin_transfer(name: str, *_: Any) -> Ending:
    """Begin the range of a transfer: an observer of a communicator."""
    return _begin(f"transfer {name}")


def _begin(name: str) -> Ending:
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

"""Refuses hooks in continuous batching (``generate_batch``): transformers packs the rows of all
requests into one, and runs the model in a thread that catches every exception, so that an error of
a hook would only be logged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flex_model.errors import HookError
from flex_model.integrations import transformers_private


def check_method(name: str, has_hooks: bool) -> None:
    """HookError for a method of a model that runs it in a thread while hooks are active."""
    if has_hooks and transformers_private.runs_in_a_thread(name):
        raise _refusal(f"{name}()")


def check_arguments(kwargs: Mapping[str, Any]) -> None:
    """HookError for a forward in continuous batching, where hooks are active."""
    if transformers_private.is_paged(kwargs):
        raise _refusal("a forward with a paged cache")


def _refusal(what: str) -> HookError:
    return HookError(
        f"{what}: expected no active hook in continuous batching, which packs the rows of all "
        "requests into one and runs the model in a thread that catches the errors of hooks; call "
        "generate() on padded rows, or remove the hooks"
    )

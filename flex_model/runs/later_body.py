"""Refuses a run of a generator or a coroutine, whose body would run when the run is over: without
the choice of hooks that was made for it.
"""

from __future__ import annotations

import types
from typing import Any

from flex_model.errors import agreed

_LATER = (types.GeneratorType, types.AsyncGeneratorType, types.CoroutineType)


def check_result(result: Any, method: str) -> None:
    """TypeError, on every rank alike, if this is what the run of a method has returned."""
    if not isinstance(result, _LATER):
        return
    call = "flex(...)" if method == "forward" else f"flex.{method}(...)"
    if isinstance(result, types.CoroutineType):
        result.close()  # else Python warns that it was never awaited
        loop = f"result = await {call}"
    else:
        is_async = "async " * isinstance(result, types.AsyncGeneratorType)
        loop = f"{is_async}for part in {call}: ..."
    raise agreed(
        TypeError(
            f"{method}: expected a function that computes when it is called, got a "
            f"{type(result).__name__}, whose body would run after the run has ended, with other "
            f"hooks than those chosen; write\n    with flex.active(groups=...):\n        {loop}"
        )
    )

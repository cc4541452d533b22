"""Python's own trace of an editing function: its lines, and calls that may not be made in it."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from flex_model.hooks.core import HookCore
from flex_model.inspection.edits.findings import ERROR, Place, Reports

_MAX_LINES = 1000  # after which random states are compared once, at the end

_COLLECTIVES = {
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object",
    "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier",
    "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv",
    "isend", "monitored_barrier", "new_group", "new_subgroups", "recv", "recv_object_list",
    "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
    "send_object_list", "split_group",
    # functional ones
    "all_gather_into_tensor_coalesced", "all_gather_tensor", "all_gather_tensor_autograd",
    "all_to_all_single_autograd", "permute_tensor", "reduce_scatter_tensor_autograd",
    "reduce_scatter_tensor_coalesced",
}  # fmt: skip
_COLLECTIVE_FILES = {
    str(Path(torch.__file__).parent / "distributed" / name)
    for name in ("distributed_c10d.py", "_functional_collectives.py")
}
_BEGINS_RUN = HookCore.begin.__code__


class Lines:
    """Inside, collectives and runs of the model are refused before they begin, whichever way they
    were imported, and random numbers that torch does not draw are noticed. In this thread only; a
    debugger or a coverage tool that traces it too is put back afterwards.

    Args:
        random_is: How bad random numbers are that torch does not draw.

    Attributes:
        returned: The last line of the outermost of the user's functions.
    """

    def __init__(self, reports: Reports, random_is: str) -> None:
        self.returned: Place | None = None
        self._reports, self._random_is = reports, random_is
        self._depth = self._num_lines = 0
        self._last: Place | None = None

    def __enter__(self) -> Lines:
        self._state = _random_state()
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.settrace(self._before)
        self._look(self._last or self._reports.source.place)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if event != "call":
            return None
        if code.co_name in _COLLECTIVES and code.co_filename in _COLLECTIVE_FILES:
            refuse_collective(self._reports, code.co_name)
        if code is _BEGINS_RUN:
            self._reports.stop(
                ERROR,
                "model inside",
                "the hooked model is run inside an editing function; compute there with plain "
                "tensors, with HookFunction(parameters=...) or with modules of "
                "register_trainable_module",
            )
        if not self._reports.source.is_users(code.co_filename):
            return None
        is_outermost = not self._depth
        self._depth += 1

        def in_frame(frame: FrameType, event: str, arg: Any) -> Any:
            here = Place(frame.f_code.co_filename, frame.f_lineno)
            if event == "line":
                self._num_lines += 1
                if self._num_lines < _MAX_LINES:
                    self._look(self._last or here)
                self._last = here
            elif event == "return":
                self._last = here
                self._depth -= 1
                if is_outermost:
                    self.returned = here
            return in_frame

        return in_frame

    def _look(self, place: Place) -> None:
        """Whether the line before drew numbers."""
        state = _random_state()
        for name, now, before in zip(("random", "numpy.random"), state, self._state):
            if now != before:
                self._reports.add(
                    self._random_is,
                    "random",
                    f"numbers of {name} differ from rank to rank and are drawn anew when a "
                    "checkpointed module is computed once more; draw with torch, whose generator "
                    "flex_model sets alike for every call",
                    place,
                )
        self._state = state


def refuse_collective(reports: Reports, name: str) -> None:
    reports.stop(
        ERROR,
        "collective",
        f"{name} is a transfer among ranks: an editing function may run on one rank only, and "
        "at its own time, so ranks would wait for each other for ever; its tensor is the full "
        "one already, and weights are named in HookFunction(parameters=...)",
    )


def _random_state() -> tuple[Any, Any]:
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is None:
        return random.getstate(), None
    _, keys, *rest = numpy_random.get_state()
    return random.getstate(), (keys.tobytes(), *rest)

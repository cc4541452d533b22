"""What an editing function's result, or its error, would come to in a run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flex_model.errors import HookError, nearest
from flex_model.hooks.registration import Registration
from flex_model.hooks.user_function import Kind, check_result, kind_of, results_of
from flex_model.inspection.edits.findings import ERROR, NOT_CHECKED, WARNING, Place, Reports
from flex_model.inspection.edits.watch import Watch
from flex_model.integrations import dtensor


class UnknownParameterError(KeyError):
    """A full parameter was asked for that the HookFunction does not name."""


def valid_results(
    registration: Registration,
    result: Any,
    fulls: Sequence[Tensor],
    expected: Sequence[Kind],
    reports: Reports,
    place: Place,
) -> list[Tensor] | None:
    """What the model would go on with in the place of each tensor; None, and reported why, where it
    can't.

    Args:
        fulls: What the function was given.
        expected: Their kinds before that.
    """
    try:
        returned = results_of(registration, result)
    except TypeError as error:
        reports.add(ERROR, "not a tensor", str(error).partition(": ")[2], place)
        return None
    results: list[Any] = []
    for one, full, kind in zip(returned, fulls, expected):
        results.append(full if one is None else one)
        try:
            check_result(registration, results[-1], kind)
        except (TypeError, ValueError) as error:
            problem = _problem_of(results[-1], kind)
            reports.add(ERROR, problem, str(error).partition(": ")[2], place)
            return None
    return results


def _problem_of(result: Any, expected: Kind) -> str:
    if not isinstance(result, Tensor):
        return "numpy array" if type(result).__module__ == "numpy" else "not a tensor"
    if dtensor.is_dtensor(result):
        return "DTensor"
    names = ("shape", "dtype", "device")
    return next(n for n, want, got in zip(names, expected, kind_of(result)) if want != got)


def judge_graph(
    watch: Watch,
    starts: Sequence[Tensor],
    results: Sequence[Tensor],
    others: Sequence[Tensor],
    reports: Reports,
    place: Place,
) -> None:
    """Whether gradients flow back through an edit.

    Args:
        starts: The leaves that the given tensors were made of.
        results: Those that are not what was given.
        others: Further leaves that want gradients.
    """
    starts = [start for start in starts if start.requires_grad]
    is_made_of_them = any(map(watch.depends, results))
    if starts and (watch.unseen_write or not any(r.requires_grad for r in results)):
        if is_made_of_them:
            _report_cut(reports, watch.unseen_write or place)
        return
    outputs = [result for result in results if result.requires_grad]
    leaves = [*starts, *others]
    if not outputs or not leaves:
        return
    try:
        ones = [torch.empty_like(output) for output in outputs]
        grads = torch.autograd.grad(outputs, leaves, ones, allow_unused=True)
    except RuntimeError as error:
        text = str(error)
        if "inplace" not in text:
            reports.add(ERROR, "backward", f"its backward raises RuntimeError: {text[:400]}", place)
            return
        text = text.partition(": [")[0]
        where = watch.last_write or place
        reports.add(ERROR, "in place", f"backward would raise: {text}; write to a clone()", where)
        return
    if starts and is_made_of_them and all(grad is None for grad in grads[: len(starts)]):
        _report_cut(reports, place)


def _report_cut(reports: Reports, place: Place) -> None:
    reports.add(
        WARNING,
        "graph cut",
        "the result is made of the tensor's values outside of the graph (detach(), .data, no_grad, "
        "or an operation without gradient): no gradient flows back through the edit; leave that "
        "out, unless it is meant",
        place,
    )


def judge_error(
    error: BaseException, modules: Collection[str], unfinished: str, reports: Reports
) -> None:
    """What an editing function raised.

    Args:
        modules: Names of the trainable modules.
        unfinished: An editing function before it that was not followed to its end, if one wasn't.
    """
    text = f"{type(error).__name__}: {error}".replace("FakeTensor", "Tensor")
    level, problem, hint = ERROR, "raises", ""
    if isinstance(error, UnknownParameterError):
        problem, text = "unknown parameter", str(error.args[0])
    elif _is_unknown_module(error):
        problem = "unknown module"
        hint = "; " + nearest(_asked(error), modules, "trainable module")
    elif isinstance(error, HookError) and "inside an editing function" in text:
        problem = "collective" if "a transfer among ranks" in text else "model inside"
    elif isinstance(error, RuntimeError) and any(
        words in text for words in ("inplace", "in-place", "a leaf Variable")
    ):
        problem = "in place"
    elif isinstance(error, RuntimeError) and "different devices" in text:
        problem = "device"
    elif isinstance(error, RuntimeError) and ("data pointer" in text or "data_ptr" in text):
        level, problem = NOT_CHECKED, "depends on values"
        hint = "; there are shapes only, and from here on it is not checked"
    elif unfinished:
        level = NOT_CHECKED
        hint = f"; which may come of {unfinished}, which was not followed to its end"
    place = reports.source.of_error(error)
    reports.add(level, problem, f"raises {text[:600]}{hint}", place)


def _is_unknown_module(error: BaseException) -> bool:
    """Whether ``modules[...]`` or ``modules.name`` raised it."""
    if isinstance(error, AttributeError):
        return "'ModuleDict' object has no attribute" in str(error)
    traceback = error.__traceback__
    if not isinstance(error, KeyError) or traceback is None:
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return isinstance(traceback.tb_frame.f_locals.get("self"), nn.ModuleDict)


def _asked(error: BaseException) -> str:
    if isinstance(error, KeyError):
        return str(error.args[0]) if error.args else ""
    return str(error).rsplit(" ", 1)[-1].strip("'")

"""Checks that subgraphs compute what their model does, before they are returned."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from flex_model import _C
from flex_model.errors import TraceError

if TYPE_CHECKING:
    from flex_model.sequential.traced.subgraph import Subgraph

_MORE_ROWS, _MORE_TOKENS = 1, 3


def trace_error(problem: str) -> TraceError:
    return TraceError(
        f"trace_subgraphs: {problem}. Use flex_model.sequential.run, which traces nothing and is "
        "exact for any model"
    )


@contextlib.contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """A context in which no hook of the model runs, and there are no gradients."""
    tables = [
        table
        for module in model.modules()
        for table in (module._forward_hooks, module._forward_pre_hooks)
    ]
    before = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        with torch.no_grad():
            yield
    finally:
        for table, hooks in zip(tables, before):
            table.update(hooks)


def check_targets(model: nn.Module, graph: GraphModule, targets: set[nn.Module]) -> None:
    """Check that each target is one node.

    Raises:
        TraceError: one is missing, or there twice.
    """
    calls = Counter(
        graph.get_submodule(str(node.target))
        for node in graph.graph.nodes
        if node.op == "call_module"
    )
    for name, module in model.named_modules():
        if module in targets and calls[module] != 1:
            what = "never called" if not calls[module] else "called more than once"
            raise trace_error(
                f"the target {name!r} is {what} by the code that was traced; it may be called in a "
                "part that is not traced, inside another target, or in a loop"
            )


def check_equal(
    model: nn.Module,
    subgraphs: list[Subgraph],
    num_targets: int,
    sample_input: dict[str, Any],
    concrete_args: dict[str, Any],
) -> None:
    """Check that the subgraphs compute what the model does: on the sample, and on another shape and
    mask.

    Raises:
        TraceError: they don't.
    """
    if len(subgraphs) != num_targets + 1:
        raise trace_error(
            f"expected {num_targets + 1} subgraphs for {num_targets} targets, got {len(subgraphs)}"
        )
    settings = {"use_cache": False} if "use_cache" in concrete_args else {}
    expected = model(**sample_input, **settings)
    _compare(model, subgraphs, sample_input, expected, "on the sample itself")
    for what, other in _others(sample_input):
        try:
            expected = model(**other, **settings)
        except Exception:  # the model does not take such inputs
            continue
        _compare(model, subgraphs, other, expected, f"with {what}")
        return


def _compare(
    model: nn.Module, subgraphs: list[Subgraph], inputs: dict[str, Any], expected: Any, what: str
) -> None:
    try:
        output = _run(model, subgraphs, inputs)
    except Exception as error:
        raise trace_error(
            f"{what}, the subgraphs of {type(model).__name__} fail ({type(error).__name__}: "
            f"{error}), and the model does not"
        ) from error
    if type(output) is not type(expected):
        raise trace_error(
            f"the last subgraph returns a {type(output).__name__}, the model a "
            f"{type(expected).__name__}"
        )
    found, wanted = _C.flatten(output)[0], _C.flatten(expected)[0]
    if len(found) != len(wanted) or not wanted:
        raise trace_error(
            f"{what}, the last subgraph returns {len(found)} tensors, the model {len(wanted)}"
        )
    for index, (one, other) in enumerate(zip(found, wanted)):
        if one.shape != other.shape or not _same(one, other):
            raise trace_error(
                f"{what}, tensor {index} of the output differs from the model's: what was traced "
                "holds for the sample only"
            )


def _same(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _run(model: nn.Module, subgraphs: list[Subgraph], inputs: dict[str, Any]) -> Any:
    """Return the output of the last of them, run in order."""
    values, output = dict(inputs), None
    for subgraph in subgraphs:
        output = subgraph.forward(model, **{name: values[name] for name in subgraph.input_names})
        for name in subgraph.consumed_names:
            del values[name]
        if subgraph is not subgraphs[-1]:
            values.update(output)
    return output


def _others(sample: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield inputs of other shapes, those that differ most first."""
    for what, tokens, has_features in (
        ("more rows, longer sequences and another mask", _MORE_TOKENS, True),
        ("more rows, longer sequences and another mask", _MORE_TOKENS, False),
        ("more rows and another mask", 0, False),
    ):
        yield what, {name: _other(name, v, tokens, has_features) for name, v in sample.items()}


def _other(name: str, value: Any, tokens: int, has_features: bool) -> Any:
    if not isinstance(value, Tensor) or not value.dim():
        return value
    is_tokens = value.dim() == 2 and not value.dtype.is_floating_point
    is_features = value.dim() == 3 and value.dtype.is_floating_point and has_features
    value = _longer(value, 0, _MORE_ROWS)
    if is_tokens or is_features:
        value = _longer(value, 1, tokens)
    if "mask" in name and is_tokens:
        value = value.clone()
        value[0, : max(1, value.shape[1] // 3)] = 0
    return value


def _longer(value: Tensor, dim: int, by: int) -> Tensor:
    """Return it with ``by`` more along ``dim``: the first ones repeated."""
    size = value.shape[dim]
    return value.index_select(dim, torch.arange(size + by, device=value.device) % max(1, size))

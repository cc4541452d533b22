"""Runs the nodes of a traced graph, and checks that their values have the structure that they had
for the sample: classes, dtypes, and which are None.

Traced code that asks for these in Python (``mask is None``, a branch on a size) got the sample's
answer, and its graph holds for inputs with the same answers only.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from flex_model.errors import TraceError
from flex_model.sequential.traced.trace_check import trace_error

IS_FIXED = "flex_model_is_fixed"  # in a node's meta: traced code got the sample's value
_PLAIN = (bool, str, type(None), torch.dtype, torch.layout, torch.memory_format)


def is_plain(value: Any) -> bool:
    """Whether traced code gets a value itself, not a proxy of it: a graph checks that it stays."""
    return isinstance(value, _PLAIN)


def structure(value: Any, is_fixed: bool = False) -> Any:
    """Return what must be the sample's. What a container holds (a length, an item) is the value of
    other nodes.

    Args:
        is_fixed: Whether of a number the value is meant.
    """
    if is_plain(value) or (is_fixed and isinstance(value, (int, float))):
        return type(value), value
    return (type(value), value.dtype) if isinstance(value, Tensor) else type(value)


class NoneForSampleError(TraceError):
    """A value that is None for the sample is none for another input.

    Attributes:
        node_name: The name of its node.
    """

    def __init__(self, node_name: str, text: str) -> None:
        super().__init__(text)
        self.node_name = node_name


class Structures:
    """The structures of the values of one graph, by node, on the inputs that it was verified with.
    They are noted until ``complete()``; from then on, another one is an error. Values that traced
    code got must be the sample's at once.
    """

    def __init__(self) -> None:
        self._is_complete = False
        self._seen: dict[str, dict[Any, str]] = {}  # with what errors call them

    def complete(self) -> None:
        """The graph was verified: another structure is an error."""
        self._is_complete = True

    def check(self, node: Node, value: Any) -> None:
        """Check the value of a node, or note its structure.

        Raises:
            TraceError: its structure is another one.
        """
        is_fixed = bool(node.meta.get(IS_FIXED))
        found, seen = structure(value, is_fixed), self._seen.setdefault(node.name, {})
        if found in seen:
            return
        now = _described(value)
        if not seen or not (self._is_complete or is_fixed):
            seen[found] = now
            return
        before = " or ".join(seen.values())
        name = node.target if node.op == "placeholder" else node.name
        error = trace_error(
            f"with this input, {name!r} is {now}, and it was {before} where the subgraphs were "
            "traced: the code around the targets may depend on it"
        )
        raise NoneForSampleError(node.name, str(error)) if before == "None" else error


def _described(value: Any) -> str:
    if is_plain(value) or isinstance(value, (int, float)):
        return repr(value)
    kind = type(value).__name__
    return f"a {kind} of {value.dtype}" if isinstance(value, Tensor) else f"a {kind}"


# ---- Running a graph -----------------------------------------------------------------------------


def run(graph: Graph, model: nn.Module, inputs: Mapping[str, Any], structures: Structures) -> Any:
    """Run a graph, node by node; a value is dropped after its last use.

    Args:
        inputs: By the targets of placeholders.
    """
    last_use = {used: node for node in graph.nodes for used in node.all_input_nodes}
    values: dict[Node, Any] = {}
    for node in graph.nodes:
        if node.op == "output":
            return filled(node.args[0], values)
        value = inputs[node.target] if node.op == "placeholder" else value_of(node, values, model)
        if node.op != "get_attr":
            structures.check(node, value)
        if node in last_use:
            values[node] = value
        for used in node.all_input_nodes:
            if last_use[used] is node:
                values.pop(used, None)
    raise AssertionError("a graph ends with an output")


def value_of(node: Node, values: Mapping[Node, Any], model: nn.Module) -> Any:
    """Return the value of a node from those of its inputs."""
    args, kwargs = filled(tuple(node.args), values), filled(dict(node.kwargs), values)
    target: Any = node.target
    if node.op == "get_attr":
        return operator.attrgetter(target)(model)
    if node.op == "call_module":
        return model.get_submodule(target)(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs)


def filled(argument: Any, values: Mapping[Node, Any]) -> Any:
    """Return an argument of a node with values in place of nodes. Its containers are plain ones, as
    in the code that was traced, and not the immutable ones of ``torch.fx``.
    """
    if isinstance(argument, Node):
        return values[argument]
    if isinstance(argument, dict):
        return {key: filled(value, values) for key, value in argument.items()}
    if isinstance(argument, list):
        return [filled(value, values) for value in argument]
    if isinstance(argument, tuple):
        items = [filled(value, values) for value in argument]
        return type(argument)(*items) if hasattr(argument, "_fields") else tuple(items)
    if isinstance(argument, slice):
        parts = (argument.start, argument.stop, argument.step)
        return slice(*(filled(part, values) for part in parts))
    return argument

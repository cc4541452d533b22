"""Checks that subgraphs compute what their model does, before they are returned."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node

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
    """A context without gradients in which no hook of the model runs, but for those by which
    transformers collects hidden states: they are part of its code.
    """
    before = [
        (table, dict(table))
        for module in model.modules()
        for table in (module._forward_hooks, module._forward_pre_hooks)
    ]
    for table, hooks in before:
        for key, hook in hooks.items():
            if not getattr(hook, "__module__", "").startswith("transformers."):
                del table[key]
    try:
        with torch.no_grad():
            yield
    finally:
        for table, hooks in before:
            found = hooks | table  # transformers' may have been added
            table.clear()
            table.update(found)


def check_unchanged(model: nn.Module, before: dict[str, dict[str, Any]]) -> None:
    """Check that what was traced has set no attribute that it names: the graph would not.

    Args:
        before: Those attributes of the modules that were traced, by their names in the model.

    Raises:
        TraceError: it has set one.
    """
    for prefix, attributes in before.items():
        now = vars(model.get_submodule(prefix))
        for name, value in attributes.items():
            if now.get(name) is not value:
                raise trace_error(
                    f"the code around the targets changes {_place(prefix, name)}, which it reads, "
                    "too"
                )


def check_attributes(prefix: str, now: dict[str, Any], before: dict[str, Any]) -> None:
    """TraceError where a flag, a number or a text of a module is not what was traced."""
    for name, value in before.items():
        is_plain = isinstance(value, (int, float, str, type(None)))
        if is_plain and now.get(name) != value:
            raise trace_error(
                f"{_place(prefix, name)} is {now.get(name)!r}, and it was {value!r} where the "
                "subgraphs were traced, and the code around the targets reads it; call "
                "trace_subgraphs again"
            )


def _place(prefix: str, name: str) -> str:
    return ".".join(filter(None, ("model", prefix, name)))


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


def check_arguments(values: dict[str, Any], constants: dict[str, Any]) -> None:
    """Check that a subgraph is not run with arguments of the model that the sample did not have.

    Raises:
        TraceError: one of ``constants`` has another value.
    """
    for name, value in values.items():
        if name in constants and not _is_the_same(value, constants[name]):
            raise trace_error(
                f"a subgraph is run with a value of {name!r}, and sample_input has none, so that "
                f"{name}={constants[name]!r} was traced; give a sample_input that has one, too"
            )


def _is_the_same(value: Any, constant: Any) -> bool:
    is_plain = type(value) is type(constant) and isinstance(value, (int, float, str))
    return value is constant or (is_plain and value == constant)


def check_equal(
    model: nn.Module,
    subgraphs: list[Subgraph],
    sample_input: dict[str, Any],
    settings: dict[str, Any],
    expected: Any,
) -> None:
    """Check that the subgraphs compute what the model does: on the sample, whose output is given,
    on another shape and mask, and on the same without padding.

    Raises:
        TraceError: they don't.
    """
    _compare(model, subgraphs, sample_input, expected, "on the sample itself")
    for what, other in _others(sample_input):
        try:
            expected = model(**other, **settings)
        except Exception:  # the model does not take such inputs
            continue
        _compare(model, subgraphs, other, expected, f"with {what}")
        whole = {name: _without_padding(name, value) for name, value in other.items()}
        if any(whole[name] is not other[name] for name in other):
            try:
                expected = model(**whole, **settings)
            except Exception:
                return
            _compare(model, subgraphs, whole, expected, "without padding")
        return
    raise trace_error(
        f"{type(model).__name__} runs on no other input that was made from the sample (more rows, "
        "longer sequences, another mask, other numbers), so that what was traced can't be checked"
    )


def _compare(
    model: nn.Module, subgraphs: list[Subgraph], inputs: dict[str, Any], expected: Any, what: str
) -> None:
    try:
        output = _run(model, subgraphs, inputs)
    except TraceError:
        raise
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
        output = subgraph.forward(model, **values)
        for name in subgraph.consumed_names:
            del values[name]
        if subgraph is not subgraphs[-1]:
            values.update(output)
    return output


def _others(sample: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield inputs of other shapes and numbers, those that differ most first. Where tokens stand
    for images, a model takes only as many as there are: then all rows are there twice.
    """
    longest = max((value.shape[1] for value in sample.values() if _is_of_tokens(value)), default=0)
    longer = "more rows, longer sequences and another mask"
    for what, is_twice, num_tokens, has_features, is_masked in (
        (longer, False, _MORE_TOKENS, True, True),
        (longer, False, _MORE_TOKENS, False, True),
        (longer, True, _MORE_TOKENS, False, True),
        ("more rows and longer sequences", True, _MORE_TOKENS, False, False),
        ("more rows and another mask", False, 0, False, True),
        ("more rows", True, 0, False, False),
    ):
        other = {}
        for name, value in sample.items():
            other[name] = value
            if not isinstance(value, Tensor) or not value.dim():
                continue
            is_tokens = _is_of_tokens(value) and (not is_twice or value.shape[1] == longest)
            is_features = value.dim() == 3 and value.dtype.is_floating_point and has_features
            if value.dtype.is_floating_point:
                value = value.flip(-1)
            value = _longer(value, 0, len(value) if is_twice else _MORE_ROWS)
            if is_tokens or is_features:
                value = _longer(value, 1, num_tokens)
            if "mask" in name and is_tokens and is_masked:
                value = value.clone()
                value[0, : max(1, value.shape[1] // 3)] = 0
            other[name] = value
        yield what, other


def _without_padding(name: str, value: Any) -> Any:
    return torch.ones_like(value) if "mask" in name and _is_of_tokens(value) else value


def _is_of_tokens(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and not value.dtype.is_floating_point


def _longer(value: Tensor, dim: int, by: int) -> Tensor:
    """Return it with ``by`` more along ``dim``: the first ones repeated."""
    size = value.shape[dim]
    return value.index_select(dim, torch.arange(size + by, device=value.device) % max(1, size))


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


class Runner(Interpreter):
    """Runs a graph node by node; a value is dropped after its last use.

    Args:
        structures: Those to check, or to note.
    """

    def __init__(self, model: nn.Module, graph: Graph, structures: Structures) -> None:
        super().__init__(model, graph=graph)
        self.extra_traceback = False  # errors of the model's own code stay as they are
        self._structures = structures

    def map_nodes_to_values(self, args: Any, n: Node) -> Any:
        return filled(args, self.env)

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.op not in ("get_attr", "output"):
            self._structures.check(n, value)
        return value


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

"""Splits a traced model into subgraphs, each with one target, to be run by hand."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from flex_model.errors import TraceError, check_type
from flex_model.integrations.keyword_arguments import takes_keyword
from flex_model.integrations.torch_private import restored, unchanged
from flex_model.sequential.targets import get_sequential_ancestors, match_modules
from flex_model.sequential.traced import trace_check
from flex_model.sequential.traced.trace_check import NoneForSampleError, Runner, Structures
from flex_model.sequential.traced.tracer import (
    CodePath,
    SequentialTracer,
    follow,
    keyword_arguments,
    names_in,
)


@dataclass
class Subgraph:
    """A part of a model that runs on its own.

    Example::

        values = dict(batch)
        for subgraph in trace_subgraphs(model, batch, ["LlamaDecoderLayer"]):
            output = subgraph.forward(model, **values)
            for name in subgraph.consumed_names:
                del values[name]
            if subgraph is not last:
                values.update(output)

    Attributes:
        graph: Its operations.
        input_names: Names of the values that ``forward`` takes: arguments of the model, and outputs
            of earlier subgraphs.
        consumed_names: Those of them that no later subgraph takes.
        constants: Arguments of the model that the sample did not have, with the values that were
            traced instead.
        unused_names: Values of the model that other subgraphs or none take.
        structures: What the values of its nodes must be like.
        attributes: Flags and numbers of the modules around targets, by their names: the graph has
            those that the traced code reads as constants.
    """

    graph: Graph
    input_names: set[str]
    consumed_names: set[str]
    constants: dict[str, Any] = field(default_factory=dict)
    unused_names: set[str] = field(default_factory=set)
    structures: Structures = field(default_factory=Structures)
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)

    def forward(self, model: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Run it: ``forward(model, **values)``, where ``values`` may hold more than its inputs:
        arguments of the model, and inputs of other subgraphs. Returns a dict by node name; the last
        one of a model returns what the model returns.

        Raises:
            TraceError: an argument that the sample did not have is given; a value has another
                structure (None, a dtype, a class) than with the sample; an attribute has changed.
        """
        for name, attributes in self.attributes.items():
            trace_check.check_attributes(name, vars(model.get_submodule(name)), attributes)
        names = [str(node.target) for node in self.graph.find_nodes(op="placeholder")]
        values = dict(zip(names, args)) | kwargs
        trace_check.check_arguments(values, self.constants)
        for name in names:
            if name not in values:
                raise TypeError(f"Subgraph.forward: {name!r} is missing; it takes {names}")
        for name in values:
            if name not in names and name not in self.unused_names:
                raise TypeError(f"Subgraph.forward: unexpected keyword argument {name!r}")
        runner = Runner(model, self.graph, self.structures)
        return runner.run(*(values[name] for name in names))


def trace_subgraphs(
    model: nn.Module,
    sample_input: dict[str, Any],
    sequential_targets: list[str],
    ignore: Sequence[str] = (),
    targets_per_subgraph: int = 1,
) -> list[Subgraph]:
    """Split a model into subgraphs that end with a target, and a last one; run in order, they equal
    the model, also on other batch sizes, lengths and masks.

    The code that leads to the targets is traced. Functions and methods that don't lead to
    one are single nodes. Configurations, global variables, and attributes that are objects are
    constants of the graphs: call it again after changing one.

    Args:
        sample_input: Arguments by name. What ``len``, ``bool`` and ``in`` say of them is taken to
            be the same for all inputs, and checked. Subgraphs take the arguments that it has, and
            no others; None is none.
        sequential_targets: As in ``match_modules``.
        ignore: Names of functions and methods, around targets, that are single nodes anyway.
        targets_per_subgraph: How many targets a subgraph has; the last one that has any may have
            fewer.

    Raises:
        TraceError: the model does not trace, a target is missing or called twice, or the subgraphs
            do not equal the model, on the sample or on other shapes. ``run`` traces nothing, and is
            exact for these too.
        ValueError: no target, a model on meta, or an argument that the model needs is missing.
    """
    check_type("trace_subgraphs: expected an nn.Module", model, nn.Module)
    expected_sample = "trace_subgraphs: expected a dict of the forward's arguments"
    check_type(expected_sample, sample_input, Mapping)
    targets = match_modules(model, sequential_targets)
    if not targets:
        raise ValueError(
            f"trace_subgraphs: {sequential_targets!r} match no module of {type(model).__name__}"
        )
    meta = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if meta is not None:
        raise ValueError(
            f"trace_subgraphs compares what it traced with the model itself, and {meta!r} is on "
            "meta; load the model, or use sequential.run(model, batches, weights=...)"
        )
    concrete_args = populate_concrete_args(model, sample_input)
    settings = _without_cache(model, concrete_args)
    given = {name: value for name, value in sample_input.items() if value is not None}
    concrete_args |= dict.fromkeys(sample_input.keys() - given)
    ancestors = get_sequential_ancestors(model, targets)
    tracer = SequentialTracer(ancestors, set())
    buffers = [module._buffers for module in model.modules()]
    with trace_check.without_hooks(model), unchanged(model), restored(buffers):
        path, expected = follow(ancestors, targets, lambda: model(**sample_input, **settings))
        tracer.sample_input = given
        read = set().union(*(names_in(function.__code__) for function in path.traced))
        attributes = {
            name: {key: value for key, value in vars(module).items() if key in read}
            for name, module in model.named_modules()
            if module in ancestors
        }
        while True:
            with restored(t for one in ancestors for t in (vars(one), one._buffers)):
                graph = _trace(model, attributes, tracer, path, concrete_args, ignore)
                trace_check.check_targets(model, graph, targets)
                partitions = topological_partition(graph, targets, targets_per_subgraph)
                subgraphs = partition_graph(model, partitions)
                trace_consumed_names(subgraphs)
                _note_arguments(model, subgraphs, set(given), concrete_args, attributes)
                try:
                    trace_check.check_equal(model, subgraphs, sample_input, settings, expected)
                except NoneForSampleError as error:
                    if error.node_name in tracer.optional:
                        raise
                    tracer.optional.add(error.node_name)
                    continue
            for subgraph in subgraphs:
                subgraph.structures.complete()
            return subgraphs


def _trace(
    model: nn.Module,
    attributes: dict[str, dict[str, Any]],
    tracer: SequentialTracer,
    path: CodePath,
    concrete_args: dict[str, Any],
    ignore: Sequence[str],
) -> GraphModule:
    """Return the graph of a model.

    Args:
        attributes: Those of the modules around targets that the traced code names.
    """
    try:
        with (
            restored(t for one in tracer.ancestors for t in (vars(one), one._buffers)),
            tracer.leaf_functions(path, set(ignore)),
        ):
            graph = GraphModule(model, tracer.trace(model, concrete_args))
            trace_check.check_unchanged(model, attributes)
        return graph
    except Exception as error:
        if isinstance(error, TraceError) and "trace_subgraphs:" in str(error):
            raise
        raise trace_check.trace_error(
            f"{type(model).__name__} does not trace: {type(error).__name__}: {error}"
        ) from error


def populate_concrete_args(model: nn.Module, sample_input: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``model.forward`` that the sample does not have, by name: their
    defaults, an empty list or dict for variadic ones, and no cache: ``use_cache=False``, also where
    only a module inside names it and the model passes its keyword arguments on.

    Raises:
        ValueError: one that has no default.
    """
    concrete: dict[str, Any] = {}
    names = inspect.signature(model.forward).parameters
    for name, parameter in names.items():
        if name in sample_input:
            continue
        if parameter.kind == inspect.Parameter.VAR_POSITIONAL:
            concrete[name] = []
        elif parameter.kind == inspect.Parameter.VAR_KEYWORD:
            concrete[name] = {}
            if "use_cache" not in (*sample_input, *names) and takes_keyword(model, "use_cache"):
                concrete[name]["use_cache"] = False
        elif name == "use_cache":
            concrete[name] = False
        elif parameter.default is inspect.Parameter.empty:
            raise ValueError(
                f"{type(model).__name__}.forward needs {name!r}, and sample_input has only "
                f"{sorted(sample_input)}; add it"
            )
        else:
            concrete[name] = parameter.default
    return concrete


def _without_cache(model: nn.Module, concrete_args: dict[str, Any]) -> dict[str, Any]:
    """Return what to call the model with, besides the sample."""
    values = [concrete_args, *(one for one in concrete_args.values() if isinstance(one, dict))]
    return {"use_cache": False} if any("use_cache" in one for one in values) else {}


def find_target_nodes(graph: GraphModule, targets: set[nn.Module]) -> set[Node]:
    """Return the nodes that call a target."""
    return {
        node
        for node in graph.graph.nodes
        if node.op == "call_module" and graph.get_submodule(node.target) in targets
    }


def topological_partition(
    graph: GraphModule, targets: set[nn.Module], targets_per_subgraph: int = 1
) -> list[list[Node]]:
    """Return the nodes in the order of the graph, split after each target, or after so many and
    after the last one; weights are fetched where they are first used.
    """
    if targets_per_subgraph < 1:
        raise ValueError(
            "topological_partition: targets_per_subgraph must be at least 1, got "
            f"{targets_per_subgraph}"
        )
    if not graph_is_well_formed(graph.graph):
        raise ValueError("topological_partition: users and inputs of the graph's nodes differ")
    called = find_target_nodes(graph, targets)
    in_order = [node for node in graph.graph.nodes if node in called]
    ends = {*in_order[targets_per_subgraph - 1 :: targets_per_subgraph], *in_order[-1:]}
    partitions: list[list[Node]] = [[]]
    place: dict[Node, int] = {}
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            continue
        place[node] = len(partitions) - 1
        partitions[-1].append(node)
        if node in ends:
            partitions.append([])
    for node in reversed(graph.graph.find_nodes(op="get_attr")):
        if node.users:
            partitions[min(place[user] for user in node.users)].insert(0, node)
    return partitions


def partition_graph(model: nn.Module, partitions: list[list[Node]]) -> list[Subgraph]:
    """Return a Subgraph for each partition; ``trace_consumed_names`` fills ``consumed_names``."""
    return [_subgraph_of(model, nodes) for nodes in partitions]


def _subgraph_of(model: nn.Module, nodes: list[Node]) -> Subgraph:
    inside = set(nodes)
    inputs = {n: None for node in nodes for n in node.all_input_nodes if n not in inside}
    inputs |= {node: None for node in nodes if node.op == "placeholder"}
    graph = Graph()
    copies = {node: graph.placeholder(_passed_as(node)) for node in inputs}
    for node in nodes:
        if node.op != "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    if not any(node.op == "output" for node in nodes):
        outputs = [node for node in nodes if not inside.issuperset(node.users)]
        graph.output({_passed_as(node): copies[node] for node in outputs})
    graph.lint()
    return Subgraph(graph, {_passed_as(node) for node in inputs}, set())


def _passed_as(node: Node) -> str:
    """Return the name by which a value is passed to subgraphs and returned."""
    return str(node.target) if node.op == "placeholder" else node.name


def trace_consumed_names(subgraphs: list[Subgraph]) -> None:
    """Fill ``consumed_names``: each input belongs to the last subgraph that takes it."""
    later: set[str] = set()
    for subgraph in reversed(subgraphs):
        subgraph.consumed_names.clear()
        subgraph.consumed_names.update(subgraph.input_names - later)
        later |= subgraph.input_names


def _note_arguments(
    model: nn.Module,
    subgraphs: list[Subgraph],
    given: set[str],
    concrete_args: dict[str, Any],
    attributes: dict[str, dict[str, Any]],
) -> None:
    """Note with what arguments and attributes of the model subgraphs were traced."""
    constants = keyword_arguments(model, concrete_args)
    between = set().union(*(subgraph.input_names for subgraph in subgraphs)) - given
    for index, subgraph in enumerate(subgraphs):
        # Nodes may have an argument's name. Before the first subgraph there are none.
        hidden = between if index else set()
        own = {name: constants[name] for name in constants if name not in hidden}
        others = (given | constants.keys() | between) - subgraph.input_names
        subgraph.constants.update(own)
        subgraph.unused_names.update(others)
        subgraph.attributes.update(attributes)


def graph_is_well_formed(graph: Graph) -> bool:
    """Whether each node is among the users of its inputs, and among the inputs of its users."""
    return all(
        all(node in user.all_input_nodes for user in node.users)
        and all(node in given.users for given in node.all_input_nodes)
        for node in graph.nodes
    )


_Model = TypeVar("_Model", bound=nn.Module)


def dispatch_for_sequential(model: _Model) -> _Model:
    """Keep a model's weights on the CPU, and move each module's to the GPU while it runs; hooks of
    an earlier dispatch are removed. Without a GPU it stays on the CPU, with a warning. Returns the
    same object.

    Example::

        model = dispatch_for_sequential(model)
        subgraphs = trace_subgraphs(model, batch, ["LlamaDecoderLayer"])

    Raises:
        ImportError: there is a GPU and no accelerate, which moves the weights.
    """
    loaded: Any = sys.modules.get("accelerate")
    if any(hasattr(module, "_hf_hook") for module in model.modules()) and loaded is not None:
        loaded.hooks.remove_hook_from_module(model, recurse=True)
    if not torch.cuda.is_available():
        warnings.warn("dispatch_for_sequential: no GPU; the model stays on the CPU", stacklevel=2)
        return model
    try:
        import accelerate
    except ImportError as error:
        raise ImportError(
            "dispatch_for_sequential needs accelerate to move weights to the GPU; pip install "
            "accelerate, or use flex_model.sequential.run(model, batches, device='cuda')"
        ) from error
    accelerate.cpu_offload(model.cpu(), torch.device("cuda", torch.cuda.current_device()))
    return model

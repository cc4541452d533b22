"""Sequential runs: a model over a data set, target by target, with hooks and edits."""

from flex_model.records.store import ActivationStore
from flex_model.sequential.runner import RunResult, run
from flex_model.sequential.targets import (
    get_sequential_ancestors,
    get_sequential_targets,
    match_modules,
)
from flex_model.sequential.traced.subgraph import (
    Subgraph,
    dispatch_for_sequential,
    find_target_nodes,
    graph_is_well_formed,
    partition_graph,
    populate_concrete_args,
    topological_partition,
    trace_consumed_names,
    trace_subgraphs,
)
from flex_model.sequential.traced.tracer import SequentialTracer
from flex_model.sequential.weights.source import CheckpointWeights, DictWeights, WeightSource

__all__ = [
    "ActivationStore",
    "CheckpointWeights",
    "DictWeights",
    "RunResult",
    "SequentialTracer",
    "Subgraph",
    "WeightSource",
    "dispatch_for_sequential",
    "find_target_nodes",
    "get_sequential_ancestors",
    "get_sequential_targets",
    "graph_is_well_formed",
    "match_modules",
    "partition_graph",
    "populate_concrete_args",
    "run",
    "topological_partition",
    "trace_consumed_names",
    "trace_subgraphs",
]

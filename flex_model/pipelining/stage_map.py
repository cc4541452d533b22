"""The modules of all stages of a pipeline, for ``flex.show``."""

from __future__ import annotations

from flex_model.hooks.core import HookCore
from flex_model.hooks.registration import Registration
from flex_model.inspection.tree import Node
from flex_model.pipelining.stage_index import StageIndex
from flex_model.visualize.model_map import Modules


def modules_of(core: HookCore, index: StageIndex, schedule: str) -> Modules:
    """Return the modules of the unsplit model. Local, and the same on every rank.

    Args:
        schedule: The name of its class, which stands for the model.
    """
    called, classes = set(index.called_names), index.class_names
    nodes = {"": Node("", schedule, has_forward=False, was_run=False)}
    stages: dict[str, str] = {}
    for name in index.module_names:
        for above in _above(name):  # a stage may hold the module without those above it
            nodes.setdefault(above, Node(above, "(of several stages)", False, was_run=False))
        nodes[name] = Node(name, classes[name], name in called, was_run=False)
        numbers = index.stages_of(name)
        stages[name] = f"stage{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
    num_ranks = len(core.mesh.stage_ranks)

    def where_of(registration: Registration) -> str:
        if registration.kind == "tensor":
            stage = index.holders_of_parameter(registration.name)[0]
        else:
            stage = index.stage_of(registration.name, registration.kind)
        pp_rank = index.pp_ranks[stage]
        if pp_rank == core.mesh.coordinates["pp"]:
            return ""
        return f"rank {core.mesh.ranks[pp_rank * num_ranks]} has its cost"

    def owner_of(registration: Registration) -> str:
        is_parameter = registration.kind == "tensor"
        return registration.name.rpartition(".")[0] if is_parameter else registration.name

    return Modules(nodes, owner_of, stages, where_of)


def _above(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]

"""The modules of all stages of a pipeline, for ``flex.show``."""

from __future__ import annotations

from flex_model.hooks.core import HookCore
from flex_model.hooks.registration import Registration
from flex_model.inspection.tree import Node
from flex_model.pipelining.stages import Directory
from flex_model.visualize.model_map import Modules


def modules_of(core: HookCore, directory: Directory, schedule: str) -> Modules:
    """As the unsplit model has them. Local, and the same on every rank.

    Args:
        schedule: Its class, which stands for the model.
    """
    called, classes = set(directory.called_names), directory.class_names
    nodes = {"": Node("", schedule, has_forward=False, was_run=False)}
    stages: dict[str, str] = {}
    for name in directory.module_names:
        for above in _above(name):  # a stage may hold the module without those above it
            nodes.setdefault(above, Node(above, "(of several stages)", False, was_run=False))
        nodes[name] = Node(name, classes[name], name in called, was_run=False)
        on = directory.stages_of(name)
        stages[name] = f"stage{'s' * (len(on) > 1)} {', '.join(map(str, on))}"
    num_ranks = len(core.mesh.stage_ranks)

    def stage_of(registration: Registration) -> int:
        if registration.kind == "tensor":
            return directory.holders_of_parameter(registration.name)[0]
        return directory.stage_of(registration.name)

    def where_of(registration: Registration) -> str:
        stage = stage_of(registration)
        place = directory.places[stage]
        if place == core.mesh.coordinates["pp"]:
            return ""
        return f"rank {core.mesh.ranks[place * num_ranks]} knows what it cost"

    def owner_of(registration: Registration) -> str:
        is_parameter = registration.kind == "tensor"
        return registration.name.rpartition(".")[0] if is_parameter else registration.name

    return Modules(nodes, owner_of, stages, where_of)


def _above(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]

"""Which weights belong to which step of a sequential run, and which stay for all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor, nn

from flex_model.sequential.targets import Target


@dataclass(eq=False)
class Weight:
    """One parameter or buffer, with all modules and names that share it.

    Attributes:
        names: Its names in the model, the first one first.
        places: ``(module, name in it)``.
        steps: The step of the innermost target around each place; None outside of targets.
    """

    tensor: Tensor
    is_parameter: bool
    names: list[str] = field(default_factory=list)
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    steps: set[int | None] = field(default_factory=set)

    def put(self, tensor: Tensor) -> None:
        """Replace it by this tensor in the modules."""
        for module, name in self.places:
            table = module._parameters if self.is_parameter else module._buffers
            table[name] = tensor  # type: ignore[assignment]


@dataclass
class Inventory:
    """The weights of a model by step.

    Attributes:
        sources: The name of each weight in the source; those of the model's own are not there.
        resident: Weights of no target or of several, and those that hooks need.
        steps: The targets' own; those of a target inside a target are the inner one's.
        rebuilt: Buffers on meta that the source does not have.
    """

    sources: dict[Weight, str] = field(default_factory=dict)
    resident: list[Weight] = field(default_factory=list)
    steps: dict[int, list[Weight]] = field(default_factory=dict)
    rebuilt: list[Weight] = field(default_factory=list)

    @property
    def loaded(self) -> list[Weight]:
        """All but the rebuilt ones."""
        return [*self.resident, *(weight for step in self.steps.values() for weight in step)]


def take_inventory(
    model: nn.Module,
    targets: list[Target],
    find: Callable[[list[str]], str | None],
    needed: Iterable[str],
) -> Inventory:
    """Return the model's inventory.

    Args:
        find: From a weight's names to its name in the source; None: the source does not have it.
        needed: Names of parameters that must stay.
    """
    weights: dict[int, Weight] = {}
    step_of = {target.module: target.step for target in targets}
    _collect(weights, model, "", None, step_of)
    inventory, stay = Inventory(), set(needed)
    for weight in weights.values():
        source = find(weight.names)
        step = next(iter(weight.steps)) if len(weight.steps) == 1 else None
        if source is not None:
            inventory.sources[weight] = source
        if source is None and weight.tensor.is_meta and not weight.is_parameter:
            inventory.rebuilt.append(weight)
        elif step is None or not stay.isdisjoint(weight.names):
            inventory.resident.append(weight)
        else:
            inventory.steps.setdefault(step, []).append(weight)
    return inventory


def _collect(
    weights: dict[int, Weight],
    module: nn.Module,
    prefix: str,
    step: int | None,
    step_of: dict[nn.Module, int],
) -> None:
    """Collect every parameter and buffer by identity, under every name that it has."""
    step = step_of.get(module, step)
    for table, is_parameter in ((module._parameters, True), (module._buffers, False)):
        for leaf, tensor in table.items():
            if isinstance(tensor, Tensor):
                weight = weights.setdefault(id(tensor), Weight(tensor, is_parameter))
                weight.names.append(prefix + leaf)
                weight.places.append((module, leaf))
                weight.steps.add(step)
    for name, child in module._modules.items():
        if child is not None:
            _collect(weights, child, f"{prefix}{name}.", step, step_of)

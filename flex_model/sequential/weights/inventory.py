"""Which weights belong to which step of a sequential run, and which stay for all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from flex_model.sequential.targets import Target


@dataclass(eq=False)
class Weight:
    """One parameter or buffer, with all modules and names that share it.

    Attributes:
        names: Its names in the model, the first one first.
        places: ``(module, name in it)``.
        given_as: The name that the source has it by; None if the model's own tensor is used.
    """

    tensor: Tensor
    is_parameter: bool
    names: list[str] = field(default_factory=list)
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    given_as: str | None = None

    def put(self, tensor: Tensor) -> None:
        """Have the modules use this tensor."""
        for module, name in self.places:
            table = module._parameters if self.is_parameter else module._buffers
            table[name] = tensor  # type: ignore[assignment]


@dataclass
class Inventory:
    """The weights of a model by step.

    Attributes:
        resident: Those of no target or of several, and those that hooks ask for.
        steps: The targets' own; those of a target inside a target are the inner one's.
        rebuilt: Buffers that nothing gives, of a model on meta.
    """

    resident: list[Weight]
    steps: dict[int, list[Weight]]
    rebuilt: list[Weight]


def take(
    model: nn.Module,
    targets: list[Target],
    find: Callable[[list[str]], str | None],
    wanted: Iterable[str],
) -> Inventory:
    """Look through the model.

    Args:
        find: From a weight's names to the one that the source has it by; None: it has not.
        wanted: Names of parameters that must always be there.
    """
    step_of = {target.module: target.step for target in targets}
    owners: dict[int, set[int | None]] = {}
    weights: dict[int, Weight] = {}
    for step, name, module, leaf, tensor, is_parameter in _tensors(model, "", None, step_of):
        weight = weights.setdefault(id(tensor), Weight(tensor, is_parameter))
        weight.names.append(name)
        weight.places.append((module, leaf))
        owners.setdefault(id(tensor), set()).add(step)
    always = set(wanted)
    inventory = Inventory([], {}, [])
    for key, weight in weights.items():
        weight.given_as = find(weight.names)
        step = owners[key].pop() if len(owners[key]) == 1 else None
        if weight.given_as is None and weight.tensor.is_meta and not weight.is_parameter:
            inventory.rebuilt.append(weight)
        elif step is None or not always.isdisjoint(weight.names):
            inventory.resident.append(weight)
        else:
            inventory.steps.setdefault(step, []).append(weight)
    return inventory


def _tensors(
    module: nn.Module, prefix: str, step: int | None, step_of: dict[nn.Module, int]
) -> Iterator[tuple[int | None, str, nn.Module, str, Tensor, bool]]:
    """Every parameter and buffer with the step of the innermost target that it is in, under every
    name that it has.
    """
    step = step_of.get(module, step)
    for table, is_parameter in ((module._parameters, True), (module._buffers, False)):
        for leaf, tensor in table.items():
            if isinstance(tensor, torch.Tensor):
                yield step, prefix + leaf, module, leaf, tensor, is_parameter
    for name, child in module._modules.items():
        if child is not None:
            yield from _tensors(child, f"{prefix}{name}.", step, step_of)

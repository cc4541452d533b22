"""A model whose weights come from elsewhere for the time of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flex_model.hooks.core import HookCore
from flex_model.sequential.targets import Target
from flex_model.sequential.weights import heap, inventory, rebuild
from flex_model.sequential.weights.loader import WeightLoader
from flex_model.sequential.weights.source import WeightSource, as_source


@contextlib.contextmanager
def loaded(
    module: nn.Module,
    found: list[Target],
    weights: str | Path | WeightSource | None,
    place: torch.device,
    prefetch: int,
    wanted: Iterable[str],
) -> Iterator[WeightLoader]:
    """Inside, weights come and go; the model is as it was afterwards."""
    source = None if weights is None else as_source(weights, module)
    stock = inventory.take(module, found, _finder(module, source), wanted)
    _check_given(module, stock)
    loader = WeightLoader(source, stock, found, place, prefetch)
    try:
        with heap.small(), rebuild.rebuilt(module, stock.rebuilt, place):
            yield loader
    finally:
        loader.close()


def _finder(module: nn.Module, source: WeightSource | None) -> Callable[[list[str]], str | None]:
    """By which of its names the source has a weight."""
    if source is None:
        return lambda names: None
    tied = _tied_names(module)
    has = getattr(source, "has", None) or set(source.names()).__contains__

    def find(names: list[str]) -> str | None:
        others = [other for name in names for other in tied.get(name, ())]
        return next((name for name in [*names, *others] if has(name)), None)

    return find


def _tied_names(module: nn.Module) -> dict[str, set[str]]:
    """What Hugging Face models state to be tied: also where it is several tensors, on meta."""
    groups: dict[str, set[str]] = {}
    for prefix, part in module.named_modules():
        stated = getattr(part, "all_tied_weights_keys", None)
        for target, source in (stated if isinstance(stated, Mapping) else {}).items():
            dot = prefix and f"{prefix}."
            group = groups.get(dot + source) or groups.get(dot + target) or set()
            group |= {dot + source, dot + target}
            groups.update(dict.fromkeys(group, group))
    return groups


def weights_of_hooks(core: HookCore) -> list[str]:
    """Parameters that editing functions are handed: they may be those of another target."""
    return [
        name
        for registration in core.table.registrations
        if registration.index in core.table.active
        for name in registration.hook_function.parameter_names
    ]


def device_of(module: nn.Module, device: str | torch.device | None) -> torch.device:
    if device is None:
        devices = dict.fromkeys(tensor.device for tensor in _tensors_of(module))
        own = next((one for one in devices if one.type != "meta"), None)
        if own is not None and own.type == "cpu" and torch.device("meta") in devices:
            own = None
        device = own or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Shared ones several times."""
    for part in module.modules():
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None:
                yield tensor


def needs_loading(
    module: nn.Module, device: str | torch.device | None, place: torch.device
) -> bool:
    """Whether the model's own weights must come to ``place``, or are nowhere. A model of several
    devices, or one whose own hooks bring its weights (accelerate), is run as it is.
    """
    if device is not None:
        return any(tensor.device != place for tensor in _tensors_of(module))
    return any(tensor.is_meta for tensor in _tensors_of(module)) and not any(
        hasattr(part, "_hf_hook") for part in module.modules()
    )


def moved(batch: Any, place: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(place)
    if isinstance(batch, Mapping):
        return {name: moved(value, place) for name, value in batch.items()}
    if type(batch) in (tuple, list):
        return type(batch)(moved(value, place) for value in batch)
    return batch


def _check_given(module: nn.Module, stock: inventory.Inventory) -> None:
    every = [*stock.resident, *(weight for part in stock.steps.values() for weight in part)]
    missing = [w.names[0] for w in every if w.given_as is None and w.tensor.is_meta]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(
            f"sequential.run: nothing gives {missing[0]!r}{more}: it is on meta, and the weights "
            "do not have it. If they have it by another name: CheckpointWeights(path, rename=...); "
            "if the model is to be run as it is, build it on a real device"
        )

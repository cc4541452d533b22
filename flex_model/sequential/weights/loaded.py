"""A model whose weights come from elsewhere during a run, with buffers that no checkpoint has."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flex_model.hooks.core import HookCore
from flex_model.integrations import offload
from flex_model.sequential.targets import Target
from flex_model.sequential.weights.loader import Inventory, Weight, WeightLoader, take_inventory
from flex_model.sequential.weights.source import WeightSource, as_source


@contextlib.contextmanager
def loaded(
    module: nn.Module,
    targets: list[Target],
    weights: str | Path | WeightSource | None,
    place: torch.device,
    prefetch: int,
    needed: Iterable[str],
) -> Iterator[WeightLoader]:
    """A context in which weights are loaded and dropped; the model is as it was afterwards."""
    source = None if weights is None else as_source(weights, module)
    inventory = take_inventory(module, targets, _finder(module, source), needed)
    _check_complete(inventory, is_given=source is not None)
    loader = WeightLoader(source, inventory, targets, place, prefetch)
    try:
        with small(), rebuilt(module, inventory.rebuilt, place):
            yield loader
    finally:
        loader.close()


def _finder(module: nn.Module, source: WeightSource | None) -> Callable[[list[str]], str | None]:
    """Return the function from a weight's names to the one that the source has."""
    if source is None:
        return lambda names: None
    tied = offload.tied_groups(module)
    has = getattr(source, "has", None) or set(source.names()).__contains__

    def find(names: list[str]) -> str | None:
        others = [other for name in names for other in sorted(tied.get(name, ()))]
        return next((name for name in [*names, *others] if has(name)), None)

    return find


def weights_of_hooks(core: HookCore) -> list[str]:
    """Return the parameters that editing functions use: they may be those of another target."""
    return [
        name
        for registration in core.table.registrations
        if registration.index in core.table.active
        for name in registration.hook_function.parameter_names
    ]


def device_of(module: nn.Module, device: str | torch.device | None) -> torch.device:
    """Return the device that a run with this argument ``device`` takes place on."""
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
    """Yield every parameter and buffer; shared ones several times."""
    for part in module.modules():
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None:
                yield tensor


def needs_loading(
    module: nn.Module, device: str | torch.device | None, place: torch.device
) -> bool:
    """Whether the model's own weights must be copied to ``place``, or are on meta. A model on
    several devices, or one whose own hooks load its weights (accelerate), is run as it is.
    """
    if device is not None:
        return any(tensor.device != place for tensor in _tensors_of(module))
    return any(tensor.is_meta for tensor in _tensors_of(module)) and not any(
        hasattr(part, "_hf_hook") for part in module.modules()
    )


def moved(batch: Any, place: torch.device) -> Any:
    """Return a batch with its tensors on ``place``."""
    if isinstance(batch, Tensor):
        return batch.to(place)
    if isinstance(batch, Mapping):
        return {name: moved(value, place) for name, value in batch.items()}
    if type(batch) in (tuple, list):
        return type(batch)(moved(value, place) for value in batch)
    return batch


def _check_complete(inventory: Inventory, *, is_given: bool) -> None:
    """Check that all weights have a source, if one is given; buffers in memory may have none: those
    that are not persistent are never stored.
    """
    unknown = [weight for weight in inventory.loaded if weight not in inventory.sources]
    on_meta = [weight.names[0] for weight in unknown if weight.tensor.is_meta]
    own = [weight.names[0] for weight in unknown if weight.is_parameter and is_given]
    missing = on_meta or own
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    if on_meta:
        raise ValueError(
            f"sequential.run: no source for {missing[0]!r}{more}: it is on meta, and the weights "
            "do not have it. If they have it by another name: CheckpointWeights(path, rename=...); "
            "if the model is to be run as it is, build it on a real device"
        )
    if own:
        raise ValueError(
            f"sequential.run: no source for {own[0]!r}{more}: the weights do not have it, and the "
            "model's own value may be that of another checkpoint; add it to weights, or leave "
            "weights= out. If they have it by another name: CheckpointWeights(path, rename=...)"
        )


_M_MMAP_THRESHOLD = -3
_BLOCK_BYTES = 128 * 2**10  # glibc's own default; it grows with the blocks that are freed
_LARGEST_BYTES = 32 * 2**20  # up to here


@contextlib.contextmanager
def small() -> Iterator[None]:
    """A context in which blocks of 128 KiB and more return to the system when they are freed. Else
    the memory of activations is kept for reuse: 210 MiB instead of 162 for 8 batches of a 724 MiB
    model.

    Afterwards blocks up to 32 MiB are kept for reuse, as glibc does in a process that has freed one
    of that size. Does nothing with other allocators, or if the environment tunes glibc.
    """
    is_tuned = "GLIBC_TUNABLES" in os.environ or any(n.startswith("MALLOC_") for n in os.environ)
    libc = ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" and not is_tuned else None
    mallopt = getattr(libc, "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, _BLOCK_BYTES)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES)


@contextlib.contextmanager
def rebuilt(model: nn.Module, buffers: list[Weight], device: torch.device) -> Iterator[None]:
    """A context in which the modules have these buffers, computed; afterwards those on meta again.

    Raises:
        ValueError: the name of a buffer that can't be computed.
    """
    try:
        for weight in buffers:
            initialize = _initializer(model, weight.names[0])
            made = None if initialize is None else _made(weight, initialize)
            if made is None:
                raise ValueError(
                    f"sequential.run: no source for the buffer {weight.names[0]!r}: the weights do "
                    f"not have it, and {type(model).__name__} can't compute it; make it "
                    "persistent, add it to the weights, or build that module on the CPU"
                )
            weight.put(made.to(device))
        yield
    finally:
        for weight in buffers:
            weight.put(weight.tensor)


def _initializer(model: nn.Module, name: str) -> Callable[[nn.Module], Any] | None:
    """Return ``_init_weights`` of the innermost Hugging Face model that holds the buffer."""
    prefixes = list(itertools.accumulate(name.split(".")[:-1], "{}.{}".format))
    for prefix in ["", *prefixes][::-1]:
        module = model.get_submodule(prefix)
        if hasattr(module, "config") and callable(getattr(module, "_init_weights", None)):
            return module._init_weights  # type: ignore[return-value]
    return None


def _made(weight: Weight, initialize: Callable[[nn.Module], Any]) -> Tensor | None:
    """Return the buffer as the model's own initialization writes it; None if that does not."""
    module, name = weight.places[0]
    tables: tuple[dict[str, Any], ...] = module._parameters, module._buffers
    before, generator = [dict(table) for table in tables], torch.get_rng_state()
    made = torch.empty_like(weight.tensor, device="cpu")
    version = made._version
    try:
        for key, buffer in module._buffers.items():  # they are written together
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.empty_like(buffer, device="cpu")
        module._buffers[name] = made
        for key, parameter in module._parameters.items():
            if parameter is not None:  # it is drawn, too: on meta, into nothing
                module._parameters[key] = nn.Parameter(parameter.detach().to("meta"), False)
        with torch.no_grad(), contextlib.suppress(NotImplementedError):
            initialize(module)
    finally:
        torch.set_rng_state(generator)
        for table, entries in zip(tables, before):
            table.clear()
            table.update(entries)
    return made if made._version != version else None

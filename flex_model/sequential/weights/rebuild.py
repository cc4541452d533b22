"""Computes buffers that no checkpoint has from a Hugging Face model's configuration."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flex_model.sequential.weights.inventory import Weight


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

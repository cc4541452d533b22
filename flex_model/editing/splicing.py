"""Splice a module into the model: a sparse autoencoder, a transcoder, an adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flex_model.editing.edit import Edit, Scope, format_call, input_of
from flex_model.editing.region import Region
from flex_model.selection.selectors import SelectionArguments

if TYPE_CHECKING:
    from typing_extensions import Unpack


def splice(
    name: str,
    *,
    add: bool = False,
    error: bool = False,
    latents: Edit | None = None,
    **where: Unpack[SelectionArguments],
) -> Edit:
    """Replace the activation by a trainable module's output for it.

    Example::

        flex.register_trainable_module("sae", sae)
        flex.register_forward_hook(splice("sae", error=True).at("model.layers.3"))
        splice("adapter", add=True)                                 # x + adapter(x)
        splice("sae", latents=clamp(8.0, 8.0, units=41), error=True)  # a feature is set

    Gradients reach the module's parameters, the same on every rank, and the model before it. The
    module computes on the device of its own parameters: where the layer is on another one, the
    activation moves there and the output back.

    Args:
        name: The name passed to ``register_trainable_module``.
        add: Add the output to the activation, as a low-rank adapter does.
        error: Add the reconstruction error ``x - module(x)``, computed before ``latents`` and
            detached. Without ``latents`` the values stay the same, up to rounding.
        latents: An edit between ``module.encode`` and ``module.decode``; ``units=`` are latents.
        where: Rows and positions; the module gets only these, with all dims kept.

    Raises:
        KeyError, TypeError, ValueError: in the call: no such module; it does not return a tensor
            of the activation's shape, or has no ``encode`` and ``decode``.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"splice: name must be the str passed to register_trainable_module, got {name!r}"
        )
    if latents is not None and not isinstance(latents, Edit):
        raise TypeError(f"splice: latents must be an Edit of flex_model.editing, got {latents!r}")
    if add and (error or latents is not None):
        raise ValueError("splice: add= is for adapters, error= and latents= for autoencoders")
    if where.get("units") is not None or where.get("heads") is not None:
        raise ValueError("splice: a module gets all units; leave out units= and heads=")
    region = Region(**where)

    def apply(full: Tensor, scope: Scope) -> Tensor:
        module = scope.trainable(name, "splice")

        def change(part: Tensor) -> Tensor:
            # A quantised adapter's first parameter may hold integers.
            floats = (one for one in module.parameters() if one.is_floating_point())
            inputs = input_of(module, part).to(next(floats, part).dtype)
            output = _reconstruct(module, inputs, latents, error, scope)
            if not isinstance(output, Tensor) or output.shape != part.shape:
                got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
                raise ValueError(
                    f"splice: {name!r} must return a tensor of shape {tuple(part.shape)}, got {got}"
                )
            output = output.to(part.device, part.dtype)
            return part + output if add else output

        return region.replace(full, change)

    options = {"add": add or None, "error": error or None, "latents": latents}
    return Edit(format_call("splice", name, where=region, **options), apply)


def _reconstruct(
    module: Any, inputs: Tensor, latents: Edit | None, error: bool, scope: Scope
) -> Tensor:
    if latents is None:
        output = module(inputs)
        return output + (inputs - output).detach() if error else output
    if not (hasattr(module, "encode") and hasattr(module, "decode")):
        raise TypeError(
            f"splice: latents= needs a module with encode and decode, got {type(module).__name__}"
        )
    features = module.encode(inputs)
    with torch.no_grad():
        residual = inputs - module.decode(features) if error else None
    # A copy: the edit may write in place, and the graph may have saved the features.
    output = module.decode(latents.apply(features.clone(), scope))
    return output if residual is None else output + residual

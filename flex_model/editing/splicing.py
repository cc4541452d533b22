"""Put a module of one's own into the model: a sparse autoencoder, a transcoder, an adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flex_model.editing.edit import Edit, Scope, told
from flex_model.editing.region import Region
from flex_model.selection.selection import SelectionArguments

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
    """Put what a trainable module makes of the activation in its place.

    Example::

        flex.register_trainable_module("sae", sae)
        flex.register_forward_hook(splice("sae", error=True).at("model.layers.3"))
        splice("adapter", add=True)                                 # x + adapter(x)
        splice("sae", latents=clamp(8.0, 8.0, units=41), error=True)  # a feature is set

    Gradients reach the module's parameters, the same on every rank, and the model before it.

    Args:
        name: As given to ``register_trainable_module``.
        add: Add what it makes, as a low-rank adapter does.
        error: Add what a reconstruction leaves out, ``x - module(x)`` from before ``latents``; a
            constant to gradients. Without ``latents`` the values stay as they are, up to rounding.
        latents: An edit between ``module.encode`` and ``module.decode``; ``units=`` are latents.
        where: Rows and positions; the module is given these alone, with all dims.

    Raises:
        KeyError, TypeError, ValueError: in the call: no such module; it does not return a tensor
            of the activation's shape, or has no ``encode`` and ``decode``.
    """
    if not isinstance(name, str):
        raise TypeError("splice: give the name of a module that register_trainable_module knows")
    if latents is not None and not isinstance(latents, Edit):
        raise TypeError(f"splice: latents must be an Edit of flex_model.editing, got {latents!r}")
    if add and (error or latents is not None):
        raise ValueError("splice: add= is for adapters, error= and latents= for autoencoders")
    if where.get("units") is not None or where.get("heads") is not None:
        raise ValueError("splice: a module takes all units; leave out units= and heads=")
    region = Region(**where)

    def apply(full: Tensor, scope: Scope) -> Tensor:
        module = scope.trainable(name, "splice")

        def change(part: Tensor) -> Tensor:
            parameter = next(module.parameters(), part)
            given = part.to(parameter.dtype)
            made = _reconstructed(module, given, latents, error, scope)
            if not isinstance(made, Tensor) or made.shape != part.shape:
                got = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
                raise ValueError(
                    f"splice: {name!r} must make a tensor of shape {tuple(part.shape)}, got {got}"
                )
            made = made.to(part.dtype)
            return part + made if add else made

        return region.replace(full, change)

    options = {"add": add or None, "error": error or None, "latents": latents}
    return Edit(told("splice", name, where=region, **options), apply)


def _reconstructed(
    module: Any, given: Tensor, latents: Edit | None, error: bool, scope: Scope
) -> Tensor:
    if latents is None:
        made = module(given)
        return made + (given - made).detach() if error else made
    if not (hasattr(module, "encode") and hasattr(module, "decode")):
        raise TypeError(
            f"splice: latents= needs a module with encode and decode, and {type(module).__name__} "
            "has not both"
        )
    features = module.encode(given)
    with torch.no_grad():
        missing = given - module.decode(features) if error else None
    # A copy: the edit may write over what the graph keeps.
    made = module.decode(latents.apply(features.clone(), scope))
    return made if missing is None else made + missing

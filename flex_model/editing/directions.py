"""Edits along directions in activation space: add a direction, remove it, or keep nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flex_model.editing.edit import Edit, Scope, check_number, format_call
from flex_model.editing.region import Region
from flex_model.selection.selectors import SelectionArguments

if TYPE_CHECKING:
    from typing_extensions import Unpack


def steer(vector: Tensor | str, strength: float = 1.0, **where: Unpack[SelectionArguments]) -> Edit:
    """Add ``strength * vector`` (a steering vector).

    Example::

        steer(direction, 1.5, positions="last")
        steer("refusal", positions=slice(4, None))   # a trainable module's only parameter

    Args:
        vector: Broadcasts to ``(rows, positions, units)``: of shape ``(units,)``, ``(positions,
            units)`` or more, the same on every rank; with ``dims=`` for a dim of its own, it has
            all dims of the activation in their order. Or the name of a registered trainable module
            that has one parameter, which is then trained.
    """
    region = Region(**where)
    if not isinstance(vector, (Tensor, str)):
        raise TypeError(
            f"steer: vector must be a Tensor or a trainable module's name, got {vector!r}"
        )
    check_number(strength, "steer: strength")

    def apply(full: Tensor, scope: Scope) -> Tensor:
        added = _parameter_of(scope, vector) if isinstance(vector, str) else vector
        added = region.of_microbatch(added, full)
        return region.replace(full, lambda part, vector: part + strength * vector, added)

    return Edit(format_call("steer", vector, strength, where=region), apply)


def _parameter_of(scope: Scope, name: str) -> Tensor:
    parameters = list(scope.trainable(name, "steer").parameters())
    if len(parameters) != 1:
        raise ValueError(
            f"steer: the module {name!r} must have one parameter, got {len(parameters)}"
        )
    return parameters[0]


def project_out(directions: Tensor, **where: Unpack[SelectionArguments]) -> Edit:
    """Remove the component along some directions: ``x - Q Q^T x``.

    Example::

        project_out(refusal_direction, positions=slice(1, None))

    Args:
        directions: ``(units,)`` or ``(directions, units)``, of any length; they are made
            orthonormal (``Q``), and are constants.

    Raises:
        ValueError: a direction is zero, or depends on the others.
    """
    return _project("project_out", directions, where, lambda part, along: part - along)


def project_onto(directions: Tensor, **where: Unpack[SelectionArguments]) -> Edit:
    """Keep only the component along some directions: ``Q Q^T x``. Arguments as `project_out`."""
    return _project("project_onto", directions, where, lambda part, along: along)


def _project(name, directions, where, keep) -> Edit:
    if not isinstance(directions, Tensor) or directions.dim() not in (1, 2):
        raise TypeError(f"{name}: expected directions (units,) or (directions, units)")
    if where.get("units") is not None or where.get("heads") is not None:
        raise ValueError(
            f"{name}: a direction has a number for every unit; set it to zero in the units to "
            "leave out, instead of units= or heads="
        )
    region = Region(**where)
    rows = torch.atleast_2d(directions.detach()).double()
    basis, triangle = torch.linalg.qr((rows / rows.norm(dim=1, keepdim=True)).T)
    if not (triangle.diagonal().abs() > 1e-6).all():
        raise ValueError(f"{name}: a direction is zero, or depends on the others")

    def apply(full: Tensor, scope: Scope) -> Tensor:
        dim = region.dim("units", full.shape)
        if full.shape[dim] != basis.shape[0]:
            raise ValueError(
                f"{name}: the directions have {basis.shape[0]} units, and dim {dim} of the "
                f"activation {tuple(full.shape)} has {full.shape[dim]}; give the dim of the units "
                "with dims="
            )
        columns = basis.to(full.device, full.dtype)

        def change(part: Tensor) -> Tensor:
            units_last = part.movedim(dim, -1)
            along = (units_last @ columns) @ columns.T
            return keep(units_last, along).movedim(-1, dim)

        return region.replace(full, change)

    return Edit(format_call(name, directions, where=region), apply)

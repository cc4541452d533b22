"""Edits that take information away, or change how much there is of it: zero, mean and resample
ablation, noise, clamp, scale. On a gradient (backward hooks) they work alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flex_model.editing.edit import Edit, Scope, check_number, check_seed, told
from flex_model.editing.patching import Capture
from flex_model.editing.region import Region
from flex_model.hooks.step import current_microbatch
from flex_model.selection.selection import SelectionArguments

if TYPE_CHECKING:
    from typing_extensions import Unpack


def zero(**where: Unpack[SelectionArguments]) -> Edit:
    """Set to zero. In a backward hook: cut a gradient off.

    Example::

        zero(heads=[0, 3], num_heads=32)
    """
    region = Region(**where)
    return Edit(told("zero", where=region), lambda full, _: region.replace(full, torch.zeros_like))


def scale(factor: float, **where: Unpack[SelectionArguments]) -> Edit:
    """Multiply by a number.

    Example::

        scale(2.0, units=[7])
    """
    check_number(factor, "scale: factor")
    region = Region(**where)
    return Edit(
        told("scale", factor, where=region),
        lambda full, _: region.replace(full, lambda part: part * factor),
    )


def clamp(
    min: float | None = None,
    max: float | None = None,
    **where: Unpack[SelectionArguments],
) -> Edit:
    """Keep between two numbers; ``clamp(5.0, 5.0, units=7)`` sets a unit to a value.

    Raises:
        ValueError: neither is given, or ``min`` is above ``max``.
    """
    if min is None and max is None:
        raise ValueError("clamp: give min=, max= or both")
    for name, bound in (("min", min), ("max", max)):
        if bound is not None:
            check_number(bound, f"clamp: {name}")
    if min is not None and max is not None and min > max:
        raise ValueError(f"clamp: min is {min}, above max, which is {max}")
    region = Region(**where)
    return Edit(
        told("clamp", where=region, min=min, max=max),
        lambda full, _: region.replace(full, lambda part: part.clamp(min, max)),
    )


def mean(
    mean: Tensor | float | None = None,
    over: tuple[str, ...] | str = ("rows", "positions"),
    **where: Unpack[SelectionArguments],
) -> Edit:
    """Mean ablation: put a mean in the place of each value.

    Example::

        mean(means["model.layers.3.mlp"], units=[7])   # of a data set, from records
        mean(heads=3, num_heads=32)                    # of this batch, over rows and positions
        mean(over="positions")                         # of each row

    Args:
        mean: Spreads over ``(rows, positions, units)``: of shape ``(units,)``, ``(positions,
            units)``, ... Without it, the call's own mean is taken, of all rows and positions.
        over: Which dims that mean is taken over: "rows", "positions" or both.

    Raises:
        ValueError: in the call: the mean over rows of a batch that comes in micro-batches, which
            none of them knows; give ``mean=`` or use ``batch_mode="full"``.
    """
    region = Region(**where)
    names = (over,) if isinstance(over, str) else tuple(over)
    if not names or not set(names) <= {"rows", "positions"}:
        raise ValueError(f"mean: over must be 'rows', 'positions' or both, got {over!r}")
    given = None if mean is None else _as_tensor(mean)

    def apply(full: Tensor, scope: Scope) -> Tensor:
        if given is not None:
            value = region.of_microbatch(given, full)
        else:
            if "rows" in names and region.rows_of_microbatch(full) is not None:
                raise ValueError(
                    "mean: the mean over rows is that of the whole batch, and this is a "
                    "micro-batch of a pipeline; give mean=, over='positions', or use "
                    "batch_mode='full'"
                )
            dims = [region.dim(name, full.shape) for name in names]
            value = full.mean(dims, keepdim=True)
        return region.replace(full, lambda part, mean: mean.clone(), value)

    shown = {"over": over} if given is None else {"mean": given}
    return Edit(told("mean", where=region, **shown), apply)


def resample(
    source: Tensor | Capture | None = None,
    *,
    seed: int | None = None,
    **where: Unpack[SelectionArguments],
) -> Edit:
    """Resample ablation: put what another row has in the place of each row's values.

    Example::

        resample(positions="last")             # of other rows of this batch, never the row's own
        resample(other_activations, seed=0)    # of a tensor (rows, positions, units)

    Args:
        source: Rows to draw from, with the activation's positions and units, on every rank that
            runs edits; or the `Capture` of a run. Without it, the batch's own rows.
        seed: Which rows, the same at every call. Without it, torch's generator decides, as in all
            random edits, anew at each call.

    Raises:
        ValueError: in the call, in a pipeline with micro-batches: without ``source`` (other rows
            are in other micro-batches) or ``seed`` (each micro-batch would draw by itself).
    """
    region = Region(**where)
    check_seed(seed, "resample")
    if source is not None and not isinstance(source, (Tensor, Capture)):
        raise TypeError(f"resample: source must be a Tensor, a Capture or None, got {source!r}")

    def apply(full: Tensor, scope: Scope) -> Tensor:
        microbatch, dim = region.rows_of_microbatch(full), region.dim("rows", full.shape)
        if microbatch is not None and not isinstance(source, Tensor):
            raise ValueError(
                "resample: the other rows of the batch are not in this micro-batch of a pipeline; "
                "give source= as a tensor, or use batch_mode='full'"
            )
        others = source.of(current_microbatch(), full) if isinstance(source, Capture) else source
        if others is not None and others.dim() != full.dim():
            raise _wrong_source(others, full)
        num_rows = full.shape[dim] if microbatch is None else microbatch[1]
        generator = _generator(seed, microbatch is not None, "resample")
        if others is None:
            others = full
            order = torch.randperm(num_rows, generator=generator)
            chosen = torch.empty_like(order)
            chosen[order] = order.roll(-1)  # one cycle through all rows: none is its own
        else:
            chosen = torch.randint(others.shape[dim], (num_rows,), generator=generator)
        if microbatch is not None:
            chosen = chosen[microbatch[0]]
        drawn = others.to(full.device, full.dtype).index_select(dim, chosen.to(full.device))
        if drawn.shape != full.shape:
            raise _wrong_source(others, full)
        return region.replace(full, lambda part, other: other, drawn)  # drawn is nobody else's

    return Edit(told("resample", where=region, source=source, seed=seed), apply)


def noise(std: float, *, seed: int | None = None, **where: Unpack[SelectionArguments]) -> Edit:
    """Add Gaussian noise.

    Example::

        noise(0.1, positions=[2, 3])

    Args:
        std: Standard deviation; a gradient passes unchanged.
        seed: Noise of this seed, the same at every call with its shape. Without it, torch's
            generator draws, as in all random edits: the same numbers on every rank and on every
            sharding, others at each call.

    Raises:
        ValueError: in the call, without ``seed`` in a pipeline with micro-batches, of which each
            would draw by itself.
    """
    region = Region(**where)
    check_seed(seed, "noise")
    check_number(std, "noise: std")
    if not std >= 0:
        raise ValueError(f"noise: std must be at least 0, got {std}")

    def apply(full: Tensor, scope: Scope) -> Tensor:
        microbatch = region.rows_of_microbatch(full)
        generator = _generator(seed, microbatch is not None, "noise")
        shape = list(full.shape)
        if microbatch is not None:
            shape[region.dim("rows", full.shape)] = microbatch[1]
        # With a seed on the CPU, so that a GPU adds the same; else where the tensor is.
        device = torch.device("cpu") if generator is not None else full.device
        drawn = torch.randn(shape, generator=generator, dtype=torch.float32, device=device) * std
        return region.replace(full, torch.add, region.of_microbatch(drawn, full))

    return Edit(told("noise", std, where=region, seed=seed), apply)


def _as_tensor(mean: Any) -> Tensor:
    try:
        return torch.as_tensor(mean)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"mean: mean must be a Tensor, a number or None, got {mean!r}") from None


def _wrong_source(source: Tensor, full: Tensor) -> ValueError:
    return ValueError(
        f"resample: the source's shape is {tuple(source.shape)}, the activation's "
        f"{tuple(full.shape)}; they may differ in the number of rows only"
    )


def _generator(seed: int | None, is_microbatch: bool, what: str) -> torch.Generator | None:
    if seed is not None:
        return torch.Generator().manual_seed(seed)
    if is_microbatch:
        raise ValueError(
            f"{what}: each micro-batch of a pipeline would draw by itself, other numbers than the "
            "unsplit run; give seed=, or use batch_mode='full'"
        )
    return None

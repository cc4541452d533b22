"""Edits that remove or scale information: zero, mean and resample ablation, noise, clamp, scale.
They edit gradients (backward hooks) in the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flex_model.editing.edit import Edit, Scope, check_number, check_seed, format_call
from flex_model.editing.patching import Capture
from flex_model.editing.region import Region
from flex_model.runs.step import current_microbatch
from flex_model.selection.selectors import SelectionArguments

if TYPE_CHECKING:
    from typing_extensions import Unpack


def zero(**where: Unpack[SelectionArguments]) -> Edit:
    """Set values to zero; in a backward hook, stop the gradient.

    Example::

        zero(heads=[0, 3], num_heads=32)
    """
    region = Region(**where)
    return Edit(
        format_call("zero", where=region), lambda full, _: region.replace(full, torch.zeros_like)
    )


def scale(factor: float, **where: Unpack[SelectionArguments]) -> Edit:
    """Multiply values by a number.

    Example::

        scale(2.0, units=[7])
    """
    check_number(factor, "scale: factor")
    region = Region(**where)
    return Edit(
        format_call("scale", factor, where=region),
        lambda full, _: region.replace(full, lambda part: part * factor),
    )


def clamp(
    min: float | None = None, max: float | None = None, **where: Unpack[SelectionArguments]
) -> Edit:
    """Limit values to a range; ``clamp(5.0, 5.0, units=7)`` sets a unit to a value.

    Raises:
        ValueError: neither is given, or ``min`` is above ``max``.
    """
    if min is None and max is None:
        raise ValueError("clamp: give min=, max= or both")
    for name, bound in (("min", min), ("max", max)):
        if bound is not None:
            check_number(bound, f"clamp: {name}")
    if min is not None and max is not None and min > max:
        raise ValueError(f"clamp: min must not be above max, got min={min} and max={max}")
    region = Region(**where)
    return Edit(
        format_call("clamp", where=region, min=min, max=max),
        lambda full, _: region.replace(full, lambda part: part.clamp(min, max)),
    )


def mean(
    mean: Tensor | float | None = None,
    over: tuple[str, ...] | str = ("rows", "positions"),
    **where: Unpack[SelectionArguments],
) -> Edit:
    """Mean ablation: replace each value by a mean.

    Example::

        mean(means["model.layers.3.mlp"], units=[7])   # of a data set, from records
        mean(heads=3, num_heads=32)                    # of this batch, over rows and positions
        mean(over="positions")                         # of each row

    Args:
        mean: Broadcasts to ``(rows, positions, units)``: of shape ``(units,)``, ``(positions,
            units)``, ... By default the mean of this call's rows and positions.
        over: The dims of that default mean: "rows", "positions" or both.

    Raises:
        ValueError: in the call: a mean over rows in a pipeline with micro-batches, where no
            micro-batch has all rows; give ``mean=`` or use ``batch_mode="full"``.
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
                    "mean: a mean over rows needs the whole batch, and this is a micro-batch of a "
                    "pipeline; give mean= or over='positions', or use batch_mode='full'"
                )
            dims = [region.dim(name, full.shape) for name in names]
            value = full.mean(dims, keepdim=True)
        return region.replace(full, lambda part, mean: mean.clone(), value)

    shown = {"over": over} if given is None else {"mean": given}
    return Edit(format_call("mean", where=region, **shown), apply)


def resample(
    source: Tensor | Capture | None = None,
    *,
    seed: int | None = None,
    **where: Unpack[SelectionArguments],
) -> Edit:
    """Resample ablation: replace each row's values by those of another row.

    Example::

        resample(positions="last")             # from other rows of this batch, never its own
        resample(other_activations, seed=0)    # from a tensor (rows, positions, units)

    Args:
        source: The rows to draw from, with the activation's positions and units, on every rank that
            runs edits; or the `Capture` of a run. By default the rows of the batch.
        seed: Fixes the choice of rows, the same at every call. By default torch's generator
            chooses at each call, as in all random edits.

    Raises:
        ValueError: in the call: without ``source`` the batch has one row; in a pipeline with
            micro-batches: without ``source`` (the other rows are in other micro-batches) or
            ``seed`` (micro-batches would draw separately).
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
            if num_rows == 1:
                raise ValueError("resample: the batch has one row only; give source=")
            others = full
            order = torch.randperm(num_rows, generator=generator, device="cpu")
            chosen = torch.empty_like(order)
            chosen[order] = order.roll(-1)  # one cycle, so no row gets its own
        else:
            chosen = torch.randint(
                others.shape[dim], (num_rows,), generator=generator, device="cpu"
            )
        if microbatch is not None:
            chosen = chosen[microbatch[0]]
        drawn = others.to(full.device, full.dtype).index_select(dim, chosen.to(full.device))
        if drawn.shape != full.shape:
            raise _wrong_source(others, full)
        return region.replace(full, lambda part, other: other, drawn)  # no copy: nothing shares it

    return Edit(format_call("resample", where=region, source=source, seed=seed), apply)


def noise(std: float, *, seed: int | None = None, **where: Unpack[SelectionArguments]) -> Edit:
    """Add Gaussian noise.

    Example::

        noise(0.1, positions=[2, 3])

    Args:
        std: The standard deviation; gradients pass through unchanged.
        seed: Fixes the noise, the same at every call of the same shape. By default torch's
            generator draws at each call, as in all random edits, with the same numbers on every
            rank and every sharding.

    Raises:
        ValueError: in the call, without ``seed`` in a pipeline with micro-batches, which would
            draw separately.
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
        # A seed draws on the CPU, so that CPU and GPU add the same noise.
        device = torch.device("cpu") if generator is not None else full.device
        drawn = torch.randn(shape, generator=generator, dtype=torch.float32, device=device) * std
        return region.replace(full, torch.add, region.of_microbatch(drawn, full))

    return Edit(format_call("noise", std, where=region, seed=seed), apply)


def _as_tensor(mean: Any) -> Tensor:
    try:
        return mean if isinstance(mean, Tensor) else torch.as_tensor(mean, device="cpu")
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
            f"{what}: each micro-batch of a pipeline would draw separately, and the numbers would "
            "differ from the unsplit run's; give seed=, or use batch_mode='full'"
        )
    return None

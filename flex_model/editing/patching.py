"""Activation patching: capture an activation in one run and patch it into another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from flex_model.editing.edit import Edit, Scope, format_call
from flex_model.editing.region import Region
from flex_model.integrations.torch_private import FakeTensor
from flex_model.runs.step import current_microbatch
from flex_model.selection.selectors import SelectionArguments

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Capture(Edit):
    """An edit that keeps the activation for `patch` and `resample`, and changes nothing.

    Example::

        kept = Capture()
        handle = flex.register_forward_hook(kept.at("model.layers.3"))
        flex(clean_tokens)
        handle.remove()
        flex.register_forward_hook(patch(kept, positions=5).at("model.layers.3"))
        flex(corrupted_tokens)

    The activation is kept where edits run: on every rank (of the stage that has the module), on its
    device, detached, one for each micro-batch. A later call replaces it. Each module needs its own
    Capture. (Records are on rank 0 only, so other ranks can't patch from them.)
    """

    def __init__(self) -> None:
        super().__init__("capture()", self._keep)
        self._kept: dict[tuple[int | None, bool], Tensor] = {}  # by micro-batch and is-fake
        self._place: str | int | None = None

    def _keep(self, full: Tensor, scope: Scope) -> None:
        # The name, if it is known: `verify` runs the hook at the same site of another model.
        place = id(scope.module) if scope.site is None else scope.site
        if self._place not in (None, place):
            raise ValueError(
                "capture: this Capture has an activation of another module; make one per module"
            )
        if not isinstance(full, FakeTensor):
            self._place = place
        self._kept[current_microbatch(), isinstance(full, FakeTensor)] = full.detach().clone()

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of the activation, in a pipeline of a micro-batch; None on ranks without it."""
        return next((tuple(kept.shape) for kept in self._kept.values()), None)

    def of(self, microbatch: int | None, full: Tensor | None = None) -> Tensor:
        """Return the captured activation of this micro-batch (None outside of a pipeline), for
        ``full``. What was captured in a dry run, without values, is for dry runs only.

        Raises:
            RuntimeError: nothing was captured.
        """
        found = self._kept.get((microbatch, False))
        if isinstance(full, FakeTensor):
            found = self._kept.get((microbatch, True), found)
        if found is None:
            which = "" if microbatch is None else f" of micro-batch {microbatch}"
            raise RuntimeError(
                f"patch: nothing{which} was captured; register the capture and run the model "
                "first, with the same number of micro-batches"
            )
        return found


def capture() -> Capture:
    """Make a `Capture`."""
    return Capture()


def patch(source: Tensor | Capture, **where: Unpack[SelectionArguments]) -> Edit:
    """Replace values by those of another run.

    Example::

        patch(kept, positions=5)
        patch(tensor, heads=[2], num_heads=32)

    Args:
        source: A `Capture`; or a tensor of the whole batch's shape, the same on every rank.

    Raises:
        ValueError: in the call: the shapes differ.
    """
    region = Region(**where)
    if not isinstance(source, (Tensor, Capture)):
        raise TypeError(f"patch: source must be a Tensor or a Capture, got {source!r}")

    def apply(full: Tensor, scope: Scope) -> Tensor:
        if isinstance(source, Capture):
            other = source.of(current_microbatch(), full).to(full.device, full.dtype)
        elif source.dim() == full.dim():
            other = region.of_microbatch(source, full)
        else:
            other = source
        if other.shape != full.shape:
            raise ValueError(
                f"patch: the source's shape is {tuple(other.shape)}, the activation's "
                f"{tuple(full.shape)}; both runs must have the same batch size"
            )
        return region.replace(full, lambda part, other: other.clone(), other)

    return Edit(format_call("patch", source, where=region), apply)

"""What the experts of Hugging Face compute, as modules that hooks can be on.

Experts run by a function of ``transformers`` that is looked up by name at each call, inside of what
sends tokens to the ranks that hold them. While hooks are active, the experts' own forward runs
twice more, with a function of ours: on a row for each token and slot, up to the units, then on
these units, down to the output. So tensor and expert parallelism bring rows, units and gradients to
and from the ranks as they do for the model. Its result is made of that only if a hook changed it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flex_model.errors import HookError
from flex_model.hooks.function import HookFunction
from flex_model.integrations import compiled, dtensor, transformers_private
from flex_model.integrations.made_sites import MadeSites, beyond_rounding, is_hooked
from flex_model.integrations.torch_private import FakeTensor
from flex_model.layouts import follow
from flex_model.selection.selectors import Selector, numbers, parse

CHILD = "slots"
_NAME = "flex_model_expert_units"  # of our function, among those of transformers
_IMPLEMENTATIONS = (None, "eager", "grouped_mm")


class Experts:
    """What the experts of one block compute: the names of its sites.

    Example::

        experts = flex.experts("model.layers.3.mlp.experts")
        flex.register_forward_hook(HookFunction(experts.units, select=Select(experts=[3, 17])))
        flex.register_forward_hook(HookFunction(experts.indices))

    Attributes:
        units, outputs, indices, weights: Names of modules; see ``FlexModel.experts``.
    """

    def __init__(self, name: str, num_experts: int) -> None:
        self.units, self.outputs = f"{name}.{CHILD}.units", f"{name}.{CHILD}.outputs"
        self.indices, self.weights = f"{name}.{CHILD}.indices", f"{name}.{CHILD}.weights"
        self._name, self._num_experts = name, num_experts

    def tokens_of(self, experts: Selector, indices: Tensor) -> Tensor:
        """Return the token of each row of a record with ``Select(experts=experts)``.

        Example::

            rows = flex.output_ptr[experts.units][0]
            tokens = experts.tokens_of([3, 17], flex.output_ptr[experts.indices][0])

        Args:
            indices: (tokens, k), the record of ``indices``, whole.
        """
        chosen = _numbers(experts, self._num_experts, self._name)
        return _slots_of(chosen, indices).div(indices.shape[1], rounding_mode="floor")


class RowByRow(nn.Module):
    """A module whose result's row t depends on row t of each tensor that it gets; a selection of
    rows counts as these. Known by this name to ``layouts.contracts.experts``.
    """

    def forward(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        return function(*tensors)


class RowsOfExperts(RowByRow):
    """Returns the rows of some experts; hooks with ``Select(experts=)`` are on it."""

    def __init__(self, experts: Sequence[int]) -> None:
        super().__init__()
        self.experts = experts


class Slots(nn.Module):
    """Passes on a tensor (tokens, k, ...); hooks are on it.

    Args:
        num_experts: Their number on all ranks.
        name: Its own, for messages.
    """

    def __init__(self, num_experts: int, name: str) -> None:
        super().__init__()
        self._num_experts, self._name = num_experts, name
        self._put = RowByRow()

    def rows_of(self, experts: Selector) -> nn.Module:
        """Return the module that returns only the rows of these experts."""
        chosen = _numbers(experts, self._num_experts, self._name)
        child = "_".join(["of", *map(str, chosen)])
        if child not in self._modules:
            self.add_module(child, RowsOfExperts(chosen))
        return self._modules[child]  # type: ignore[return-value]

    @property
    def has_hooks(self) -> bool:
        return any(map(is_hooked, self.modules()))

    def forward(self, tensor: Tensor) -> Tensor:
        return tensor

    def through(self, tensor: Tensor, indices: Tensor) -> Tensor:
        """Return the tensor as hooks leave it: those without ``Select(experts=)`` come first."""
        tensor = self(tensor)
        for site in self.children():
            if not isinstance(site, RowsOfExperts) or not is_hooked(site):
                continue
            if isinstance(indices, FakeTensor) or indices.is_meta:
                raise HookError(
                    f"{self._name!r}: which rows Select(experts=) selects depends on values, which "
                    "a run on shapes has not; leave the hook out of it with groups="
                )
            with follow.paused():
                slots = _slots_of(site.experts, indices)
                found: list[Tensor] = []
            rows = site(functools.partial(_take, slots, found), tensor, indices)
            if rows is not found[0]:
                tensor = self._put(functools.partial(_put, slots), tensor, rows)
        return tensor


def _take(slots: Tensor, found: list[Tensor], tensor: Tensor, _: Tensor) -> Tensor:
    """Return the rows of these slots; also in ``found``, to see whether hooks replace them."""
    found.append(tensor.flatten(0, 1).index_select(0, slots))
    return found[0]


def _put(slots: Tensor, tensor: Tensor, rows: Tensor) -> Tensor:
    return tensor.flatten(0, 1).index_copy(0, slots, rows).view_as(tensor)


def _slots_of(experts: Sequence[int], indices: Tensor) -> Tensor:
    chosen = torch.tensor(experts, device=indices.device, dtype=indices.dtype)
    return torch.isin(indices.flatten(), chosen).nonzero()[:, 0]


def _numbers(experts: Selector, num_experts: int, where: str) -> list[int]:
    chosen = [*numbers("experts", parse("experts", experts), num_experts, where)]
    if not chosen or len(set(chosen)) < len(chosen):
        raise ValueError(f"experts of {where!r}: expected different numbers, got {experts!r}")
    return chosen


class ExpertSlots(MadeSites):
    """What passes units and outputs of experts to hooks; the child of experts, put there by
    ``install``.

    Args:
        experts: The module of transformers.
        num_experts: Their number on all ranks.
        name: The experts' name, for messages.
    """

    def __init__(self, experts: nn.Module, num_experts: int, name: str) -> None:
        super().__init__()
        sites = ("units", "outputs", "indices", "weights")
        self.units, self.outputs, self.indices, self.weights = (
            Slots(num_experts, f"{name}.{CHILD}.{site}") for site in sites
        )
        self._operation = RowByRow()
        self._name = name
        self._config = transformers_private.with_experts_implementation(experts.config, _NAME)
        self._part: Callable[..., Tensor] | None = None
        self._handle = experts.register_forward_hook(
            self.after_experts, prepend=True, with_kwargs=True
        )

    @compiled.outside_graphs
    def after_experts(
        self, experts: nn.Module, args: Any, kwargs: dict[str, Any], output: Tensor
    ) -> Tensor | None:
        """Return the experts' output as hooks on what is inside leave it; None: unchanged."""
        if not any(map(is_hooked, self.modules())):
            return None
        hidden, indices, own_weights = _tensors(args, kwargs)[:3]
        implementation = transformers_private.experts_implementation(experts.config)
        if implementation not in _IMPLEMENTATIONS:
            raise self.error(_expected_implementation(implementation))
        if self.indices.through(indices, indices) is not indices:
            raise self.error(
                "nothing is computed from a copy of its indices; edit those of flex.routing"
            )
        weights = self.weights.through(own_weights, indices)
        if weights is own_weights and not self.units.has_hooks and not self.outputs.has_hooks:
            return None
        run = functools.partial(self._run, experts)
        own_units = self._operation(functools.partial(run, _to_units), hidden, indices)
        units = self.units.through(own_units, indices)
        made = self._operation(functools.partial(run, _from_units), units, indices)
        with torch.no_grad(), follow.paused():
            own = made if units is own_units else run(_from_units, own_units, indices)
            dtype = _cast_to(experts.config, output) or output.dtype
            self._verify(_summed(own, own_weights).to(dtype), output.to(dtype))
        outputs = self.outputs.through(made, indices)
        if units is own_units and outputs is made and weights is own_weights:
            return None
        return _summed(outputs, weights).to(output.dtype)

    def _run(
        self, experts: Any, part: Callable[..., Tensor], slots: Tensor, indices: Tensor
    ) -> Tensor:
        """Return what a part of the experts makes of (tokens, k, ...) or (tokens, ...), slot by
        slot, on the ranks that hold them.
        """
        if slots.dim() == 2:
            slots = slots[:, None].expand(-1, indices.shape[1], -1)
        place = self._place_of_units(experts)
        ours, before = self._config, experts.config
        self._part, experts.config = functools.partial(part, place), ours
        try:
            rows = slots.flatten(0, 1)
            ones = rows.new_ones(len(rows), 1)
            with torch.autocast(slots.device.type, enabled=_cast_to(before, slots) is not None):
                made = experts.forward(rows, indices.reshape(-1, 1), ones)
        finally:
            self._part, experts.config = None, before
        return made.unflatten(0, indices.shape)

    def part_of(self, experts: Any, rows: Tensor, indices: Tensor) -> Tensor:
        """Compute the part that ``_run`` runs, on rows that this rank's experts get."""
        assert self._part is not None
        experts_of_rows = indices.flatten().clamp(max=experts.num_experts)  # that: on another rank
        order = experts_of_rows.argsort(stable=True)
        counts = [len(order)] + [0] * experts.num_experts
        if not isinstance(rows, FakeTensor):
            counts = experts_of_rows.bincount(minlength=experts.num_experts + 1).tolist()
        *pieces, others = rows[order].split(counts)
        made = self._part(experts, pieces)
        made = torch.cat([made, made.new_zeros(len(others), made.shape[1])])
        return made[order.argsort()]

    def _place_of_units(self, experts: Any) -> tuple[int, int, int]:
        """Return the units' number on all ranks, and the first and the number of this rank's."""
        down, dim = experts.down_proj, 1 if experts.is_transposed else 2
        place = dtensor.range_in_dim(down, dim)
        if place is None:
            raise self.error(
                f"its units are not in consecutive parts on the ranks ({down.placements}); split "
                "them by the plan of transformers"
            )
        return down.shape[dim], *place

    def _verify(self, made: Tensor, output: Tensor) -> None:
        found = beyond_rounding(made, output)
        if found:
            raise self.error(
                "the sum of its slots' outputs, made of their units, is not the output of its "
                f"forward ({found}): {self._name!r} computes something else; hook its inputs and "
                "output"
            )

    def error(self, text: str) -> HookError:
        return HookError(f"experts {self._name!r}: {text}")

    def install_in(self, layer: nn.Module, name: str) -> Callable[[], None]:
        return install(layer, name)[1]

    def take_off(self, experts: nn.Module) -> None:
        self._handle.remove()
        experts._modules.pop(CHILD, None)


Place = tuple[int, int, int]


def _to_units(place: Place, experts: Any, pieces: Sequence[Tensor]) -> Tensor:
    """Return the units of rows by expert: 0 where other ranks hold them, which are added then."""
    width, first, number = place
    if experts.has_gate:
        units = experts._apply_gate(_linear(experts, "gate_up_proj", pieces))
    else:
        units = experts.act_fn(_linear(experts, "up_proj", pieces))
    return F.pad(units, (first, width - first - number))


def _from_units(place: Place, experts: Any, pieces: Sequence[Tensor]) -> Tensor:
    _, first, number = place
    made = _linear(experts, "down_proj", [one.narrow(1, first, number) for one in pieces])
    return experts.post_expert_norm(made) if experts.has_post_expert_norm else made


def _linear(experts: Any, name: str, pieces: Sequence[Tensor]) -> Tensor:
    weight = getattr(experts, name)
    matrices = (weight.transpose(1, 2) if experts.is_transposed else weight).unbind()
    biases = getattr(experts, f"{name}_bias").unbind() if experts.has_bias else [None] * len(weight)
    return torch.cat([F.linear(*one) for one in zip(pieces, matrices, biases, strict=True)])


def _cast_to(config: Any, tensor: Tensor) -> torch.dtype | None:
    """Return the dtype in which autocast has the experts compute; None: in the weights' own. It
    leaves the kernel of grouped_mm as it is.
    """
    device = tensor.device.type
    is_kernel = transformers_private.experts_implementation(config) == "grouped_mm"
    is_off = is_kernel or not torch.is_autocast_enabled(device)
    return None if is_off else torch.get_autocast_dtype(device)


def _summed(outputs: Tensor, weights: Tensor) -> Tensor:
    return (outputs * weights.unsqueeze(-1)).sum(1)


def _tensors(args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    return [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]


def _expected_implementation(implementation: str | None) -> str:
    return (
        f"expected the experts' implementation 'grouped_mm' or 'eager', got {implementation!r}, "
        "which may hold or compute units in its own way; "
        "model.set_experts_implementation('grouped_mm') sets one"
    )


def _forward(experts: nn.Module, rows: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """The function that ``transformers`` looks up in place of the experts' own one."""
    slots: Any = experts._modules[CHILD]
    return slots.part_of(experts, rows, indices)


def install(experts: Any, name: str) -> tuple[Experts, Callable[[], None]]:
    """Pass what experts compute through modules; return its names, and what undoes it.

    Raises:
        ValueError: the experts are not of ``transformers``, of another implementation, or packed.
    """
    if not transformers_private.is_experts(experts):
        raise ValueError(
            f"experts({name!r}): expected a module of experts of transformers, got "
            f"{type(experts).__name__}; name one such as 'model.layers.3.mlp.experts', of weights "
            "that are not packed (of gpt-oss: Mxfp4Config(dequantize=True))"
        )
    down: Any = getattr(experts, "down_proj", None)  # none, or a part without dims, under FSDP1
    if isinstance(down, Tensor) and (not down.is_floating_point() or down.itemsize < 2):
        raise ValueError(
            f"experts({name!r}): its weights are quantized ({down.dtype}), and its units are made "
            "by kernels of their own; load the model with dequantized weights"
        )
    implementation = transformers_private.experts_implementation(experts.config)
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(f"experts({name!r}): {_expected_implementation(implementation)}")
    sites = experts._modules.get(CHILD)
    num_experts = down.shape[0] if dtensor.is_dtensor(down) else experts.num_experts
    if not isinstance(sites, ExpertSlots):
        transformers_private.register_experts_implementation(_NAME, _forward)
        sites = ExpertSlots(experts, num_experts, name)
        experts.add_module(CHILD, sites)
    return Experts(name, num_experts), sites.use(functools.partial(sites.take_off, experts))


def rows_of_experts(function: HookFunction, kind: str, targets: Sequence[Any]) -> Sequence[Any]:
    """Return the targets of a hook: with ``Select(experts=)``, the module that returns only these
    experts' rows.

    Raises:
        ValueError: the hook's target has no rows of experts.
    """
    selects = [one.select for one in function.members or (function,)]
    if all(one is None or one.experts is None for one in selects):
        return targets
    site = targets[0] if targets else None
    is_result = kind in ("forward", "full_backward_pre")
    if not isinstance(site, Slots) or function.members or not is_result:
        raise ValueError(
            f"{function!r}: Select(experts=) is for forward and full-backward-pre hooks on a "
            "module of flex.experts(...), such as its units"
        )
    return [site.rows_of(selects[0].experts)]

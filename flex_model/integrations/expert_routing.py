"""Routing of the mixtures of experts of Hugging Face, as modules that hooks can be on.

The gates of ``transformers`` call ``topk`` of their scores inside their forward, where no hook
comes. A gate whose routing is wanted runs, while hooks are active, under a mode that passes what
this call gets and returns through the children of a module. Whatever the gate does before and after
it (groups, normalisation, scaling, gradients) stays its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flex_model.distributed import values as tensor_values
from flex_model.errors import HookError
from flex_model.hooks.function import HookFunction
from flex_model.integrations import compiled
from flex_model.integrations.made_sites import MadeSiteHook, MadeSites, is_hooked
from flex_model.integrations.torch_private import FakeTensor
from flex_model.integrations.transformers_private import gate_of
from flex_model.layouts import follow
from flex_model.selection.selectors import numbers, parse

CHILD = "routing"
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Routing:
    """The routing of one block of experts: the names of its sites, and ready edits.

    Example::

        routing = flex.routing("model.layers.3.mlp")
        flex.register_forward_hook(HookFunction(routing.indices))
        flex.register_forward_hook(routing.forbid([3, 17]))

    The edits are HookFunctions for ``register_forward_hook`` that record nothing. They change which
    experts are chosen; the chosen ones are weighted by the gate's own scores.

    Attributes:
        scores, choice, indices, weights, load: Names of modules; see ``FlexModel.routing``.
    """

    def __init__(self, block_name: str, num_experts: int) -> None:
        prefix = f"{block_name}.{CHILD}" if block_name else CHILD
        self.scores, self.choice = f"{prefix}.scores", f"{prefix}.choice"
        self.indices, self.weights = f"{prefix}.indices", f"{prefix}.weights"
        self.load = f"{prefix}.load"
        self._name, self._num_experts = block_name, num_experts

    def forbid(self, experts: int | Sequence[int]) -> HookFunction:
        """Return an edit by which no token goes to these experts."""
        return self._fill("forbid", experts, -torch.inf)

    def force(self, experts: int | Sequence[int]) -> HookFunction:
        """Return an edit by which each token goes to these experts, and else to its best ones."""
        return self._fill("force", experts, torch.inf)

    def bias(self, values: Tensor | Sequence[float]) -> HookFunction:
        """Return an edit that adds a value for each expert to the scores by which they are chosen.

        Raises:
            ValueError: there are not as many as experts, or one is not finite.
        """
        given = values if isinstance(values, Tensor) else torch.as_tensor(values, device="cpu")
        added = given.detach().clone()
        if tuple(added.shape) != (self._num_experts,) or not added.isfinite().all():
            raise ValueError(
                f"bias of {self._name!r}: expected {self._num_experts} finite values, one for each "
                f"expert, got {values!r}"
            )
        return _ready_edit(
            self.choice, f"bias({_digest(added)})", lambda choice: choice + added.to(choice)
        )

    def replay(self, indices: Tensor | Sequence[Tensor]) -> HookFunction:
        """Return an edit by which each token goes to given experts, those of another run, say.

        Example::

            replay = routing.replay(records[routing.indices])
            flex.register_forward_hook(replay)

        The weights are those that the gate gives to these experts, with its gradients.

        Args:
            indices: (tokens, k) of the whole batch, the same on every rank (records are on every
                rank with ``FlexModel(output_ranks="all")`` or from a store); or a list of one.

        Raises:
            TypeError, ValueError: they are not such a tensor, or a number has no expert.
        """
        given = indices if isinstance(indices, Tensor) or len(indices) != 1 else indices[0]
        if not isinstance(given, Tensor) or given.dim() != 2 or given.dtype not in _INTEGERS:
            kind = f"{given.dtype} of {tuple(given.shape)}" if isinstance(given, Tensor) else "list"
            raise TypeError(
                f"replay of {self._name!r}: expected integers (tokens, k), got {kind}; of a record "
                "of several calls give each call an edit of its own"
            )
        if not _are_experts(given, self._num_experts):
            raise ValueError(
                f"replay of {self._name!r}: expected numbers of experts, 0 to "
                f"{self._num_experts - 1}, got {int(given.min())} to {int(given.max())}"
            )
        kept = given.detach().clone()

        def replayed(own: Tensor) -> Tensor:
            if kept.shape != own.shape:
                raise ValueError(
                    f"replay of {self._name!r}: the given indices are {tuple(kept.shape)}, and "
                    f"those of this call {tuple(own.shape)} (tokens of the whole batch, k)"
                )
            return kept.to(own)

        return _ready_edit(self.indices, f"replay({_digest(kept)})", replayed)

    def _fill(self, what: str, experts: int | Sequence[int], value: float) -> HookFunction:
        where = f"{what} of {self._name!r}"
        chosen = list(numbers("experts", parse("experts", experts), self._num_experts, where))

        def filled(choice: Tensor) -> Tensor:
            return choice.index_fill(-1, torch.tensor(chosen, device=choice.device), value)

        return _ready_edit(self.choice, f"{what}({chosen})", filled)


def _ready_edit(site: str, text: str, change: Callable[[Tensor], Tensor]) -> HookFunction:
    """Return a hook whose editing function is of the tensor alone; ``text``: what it does, with its
    arguments.
    """
    return MadeSiteHook(site, text, None, lambda module, full, *_: change(full), record=False)


def _digest(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)}, {tensor_values.fingerprint(tensor):x}"


def _are_experts(indices: Tensor, num_experts: int) -> bool:
    return bool(((indices >= 0) & (indices < num_experts)).all())


class RoutingSites(MadeSites):
    """What the tensors of a gate's choice are passed through; the child of a block, put there by
    ``install``.

    Args:
        gate: The block's gate.
        num_experts: Those that it chooses among.
        name: The block's name, for messages.
    """

    def __init__(self, gate: nn.Module, num_experts: int, name: str) -> None:
        super().__init__()
        self.scores, self.choice = nn.Identity(), nn.Identity()
        self.indices, self.weights, self.load = nn.Identity(), nn.Identity(), nn.Identity()
        self.num_experts = num_experts
        self._name = name
        self._own_forward = gate.forward

    @compiled.outside_graphs
    def forward_of_gate(self, *args: Any, **kwargs: Any) -> Any:
        """Run the gate's own forward; with hooks on its routing, if there are any."""
        if not any(map(is_hooked, self.children())):
            return self._own_forward(*args, **kwargs)
        with _TopK(self) as topk:
            logits, weights, indices, *others = self._own_forward(*args, **kwargs)
        if topk.indices is None or topk.indices is not indices:
            raise self.error(
                f"its gate does not choose by one topk of scores (tokens, {self.num_experts}), so "
                "its choice can't be read or edited; hook the inputs of its experts"
            )
        if is_hooked(self.load):
            experts = torch.arange(self.num_experts, device=indices.device)
            chosen = (indices[..., None] == experts).any(1).float()  # (tokens, experts)
            load = chosen.T @ chosen  # exact below 2**24 tokens
            if self.load(load) is not load:
                raise self.error("nothing is computed from load; edit choice or indices instead")
        return (logits, self.weights(weights), indices, *others)

    def choose(self, topk: Callable[[Tensor], Any], scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of the chosen experts, and their numbers."""
        scores = self.scores(scores)
        own = scores.detach()
        choice = self.choice(own)
        chosen = topk(choice).indices
        indices = self.indices(chosen)
        if not isinstance(indices, FakeTensor) and not indices.is_meta:
            with follow.paused():
                if choice is not own:
                    self._check_choice(choice, chosen)
                if indices is not chosen and not _are_experts(indices, self.num_experts):
                    raise self.error(
                        f"a hook on indices returned {int(indices.min())} to {int(indices.max())}; "
                        f"expected numbers of experts, 0 to {self.num_experts - 1}"
                    )
        return scores.gather(-1, indices), indices

    def _check_choice(self, choice: Tensor, chosen: Tensor) -> None:
        k = chosen.shape[-1]
        if not (choice.gather(-1, chosen) > -torch.inf).all():  # or it is NaN
            raise self.error(
                f"with the hooks on choice a token has fewer than {k} experts left, of the groups "
                "that its gate has chosen; forbid fewer"
            )
        if ((choice == torch.inf).sum(-1) > k).any():
            raise self.error(f"more than {k} experts are forced; force at most {k}")

    def error(self, text: str) -> HookError:
        return HookError(f"routing of {self._name!r}: {text}")

    def install_in(self, layer: nn.Module, name: str) -> Callable[[], None]:
        return install(layer, name)[1]

    def take_off(self, gate: nn.Module, block: nn.Module) -> None:
        """Give the gate its own forward again, if nobody has replaced it since."""
        block._modules.pop(CHILD, None)
        if gate.forward == self.forward_of_gate:
            del gate.forward
            if gate.forward != self._own_forward:  # which was not its class's
                gate.forward = self._own_forward


class _TopK(TorchFunctionMode):
    """Passes the one ``topk`` over experts in a gate's forward through the sites.

    Attributes:
        indices: What it returned; None before.
    """

    def __init__(self, sites: RoutingSites) -> None:
        super().__init__()
        self._sites = sites
        self.indices: Tensor | None = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in (torch.topk, Tensor.topk) or not self._is_over_experts(*args, **kwargs):
            return func(*args, **kwargs)
        if self.indices is not None:
            raise self._sites.error(
                "its gate has two topk over its experts, and which one chooses is not known; hook "
                "the inputs of its experts"
            )
        scores, *others = (kwargs.pop("input"), *args) if "input" in kwargs else args
        values, self.indices = self._sites.choose(
            lambda choice: func(choice, *others, **kwargs), scores
        )
        return torch.return_types.topk((values, self.indices))

    def _is_over_experts(self, input: Tensor, k: int, dim: int = -1, *_: Any, **__: Any) -> bool:
        """Whether the topk is over all experts, not over groups or inside of each group."""
        is_last = dim in (-1, input.dim() - 1)
        return input.dim() == 2 and is_last and input.shape[-1] == self._sites.num_experts


def install(block: nn.Module, name: str) -> tuple[Routing, Callable[[], None]]:
    """Pass the choice of a block's gate through modules; return its routing, and what undoes it.

    Raises:
        ValueError: the module has no experts and gate of ``transformers``.
    """
    found = gate_of(block)
    if found is None:
        raise ValueError(
            f"routing({name!r}): expected a block with one `experts` module of transformers and a "
            f"gate, got {type(block).__name__}; name the module that has both, such as "
            "'model.layers.3.mlp'"
        )
    gate, num_experts = found
    sites = block._modules.get(CHILD)
    if not isinstance(sites, RoutingSites):
        sites = RoutingSites(gate, num_experts, name)
        block.add_module(CHILD, sites)
        gate.forward = sites.forward_of_gate
    return Routing(name, num_experts), sites.use(functools.partial(sites.take_off, gate, block))

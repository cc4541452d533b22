"""Attention patterns of Hugging Face models, rebuilt from queries, keys and mask beside any kernel.

Layers of ``transformers`` compute attention by a function that is looked up by name at each call.
A layer whose pattern is wanted gets our function, which calls the layer's own one and, while hooks
are active, computes the pattern of the chosen queries in a child module, whose output they see. The
layer's result is computed from that output only if a hook changed it or needs its gradient.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flex_model.errors import HookError
from flex_model.hooks.function import HookFunction
from flex_model.integrations import compiled
from flex_model.integrations.made_sites import MadeSites, beyond_rounding, is_hooked
from flex_model.integrations.torch_private import FakeTensor
from flex_model.integrations.transformers_private import (
    attention_implementation,
    is_paged,
    runs_flash_attention,
    set_attention_implementation,
)
from flex_model.layouts import follow
from flex_model.selection.selectors import (
    Parsed,
    as_slice,
    is_everything,
    numbers,
    parse,
    show_exactly,
)

CHILD = "attention_pattern"
_NAME = "flex_model_attention_pattern"  # of our function, among those of transformers
_KERNELS = ("eager", "sdpa", "flex_attention")


def settings(queries: Any) -> str:
    """Return ``MadeSiteHook.settings_of_module`` of hooks on the pattern of these queries."""
    return f"queries={show_exactly(queries)}"


class AttentionPattern(MadeSites):
    """Computes the pattern of the chosen queries; the child of an attention layer, put there by
    ``install``.

    Args:
        layer: The attention layer.
        name: Its name, for messages.
        queries: See `FlexModel.attention`.
    """

    def __init__(self, layer: nn.Module, name: str, queries: Any) -> None:
        super().__init__()
        self.choose(queries)
        self._name = name
        self._config: Any = layer.config  # of the whole model: its choice may be changed
        self._verified: set[Any] = set()
        self._computed: tuple[Tensor, ...] = ()

    def choose(self, queries: Any) -> None:
        """Compute the pattern of these queries from now on."""
        is_last = isinstance(queries, str) and queries == "last"
        every = slice(None) if is_everything(queries) else queries
        self._chosen: Parsed = parse("queries", [-1] if is_last else every)
        self.queries, self.settings = queries, settings(queries)

    def admit(self, hook: HookFunction) -> None:
        """As of ``MadeSites``. ValueError for a hook on the pattern of other queries."""
        for wanted in hook.settings_of_module:
            self.check_queries(wanted)
        super().admit(hook)

    def check_queries(self, wanted: str) -> None:
        """ValueError unless the pattern is computed for the queries of ``settings_of_module``."""
        if wanted != self.settings:
            raise ValueError(
                f"attention({self._name!r}): {wanted}, but this layer's pattern is computed "
                f"for {self.settings}; use the same for all hooks on a layer, the union of what "
                "they need"
            )

    def kernel(self, layer: nn.Module) -> Callable[..., Any]:
        """Return the function by which the layer computes attention. ValueError for one whose masks
        are not known.
        """
        names = _forward_of(layer).__globals__
        implementation = attention_implementation(self._config)
        if implementation not in _KERNELS and not runs_flash_attention(implementation):
            raise ValueError(
                f"attention({self._name!r}): expected one of the attention implementations "
                f"{[*_KERNELS, 'flash_attention_2']}, got {implementation!r}, whose masks are not "
                "known; model.set_attn_implementation('sdpa') sets one"
            )
        functions = names["ALL_ATTENTION_FUNCTIONS"]
        return functions.get_interface(implementation, names.get("eager_attention_forward"))

    def chosen(self, size: int) -> slice | Sequence[int]:
        """Return the indices of the chosen queries of ``size``."""
        chosen = numbers("queries", self._chosen, size, self._name)
        if len(set(chosen)) < len(chosen):
            raise ValueError(f"attention of {self._name!r}: {self.settings} repeat an index")
        return as_slice(chosen)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        allowed: Tensor | None,
        bias: Sequence[Tensor],
        scaling: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Return ``softmax(scaling * query @ key.T)`` of (rows, heads, queries, keys).

        Args:
            query, key: (rows, heads, queries or keys, units); each key head serves equally many
                query heads.
            allowed: The keys that a query sees; where there is none, its pattern is 0.
            bias: Added to the scores after the soft cap: ``softcap * tanh(scores / softcap)``.
            sinks: A score for each head, to which a part of its attention is lost.
        """
        scores = torch.matmul(query, _repeated(key, query.shape[1]).transpose(2, 3)) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        for added in bias:
            scores = scores + added
        scores = scores if scores.dtype == torch.float64 else scores.float()
        if allowed is not None:
            scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        if sinks is not None:
            lost = sinks.to(scores.dtype).reshape(1, -1, 1, 1)
            lost = lost.expand(scores.shape[0], -1, scores.shape[2], 1)
            scores = torch.cat([scores, lost], dim=-1)
        pattern = torch.softmax(scores, dim=-1)
        if sinks is not None:
            pattern = pattern[..., :-1]
        if allowed is not None:
            pattern = pattern.masked_fill(~allowed, 0)
        pattern = pattern.to(query.dtype)
        self._computed = (query, key, pattern)
        return pattern

    def is_unchanged(self, *now: Tensor) -> bool:
        """Return whether no hook replaced query, key or pattern of the last call."""
        computed, self._computed = self._computed, ()
        return len(now) == len(computed) and all(a is b for a, b in zip(now, computed))

    def refuse(self, arguments: dict[str, Any]) -> None:
        """Raise HookError for what a pattern does not tell."""
        if arguments.get("dropout"):
            raise HookError(
                f"attention of {self._name!r}: dropout of attention is active, and which keys a "
                "kernel drops is not known; call model.eval(), or set attention_dropout to 0"
            )
        if is_paged(arguments):
            raise HookError(
                f"attention of {self._name!r}: keys and values are in a paged cache; generate "
                "without continuous batching"
            )

    def masks(
        self,
        layer: nn.Module,
        query: Tensor,
        key: Tensor,
        mask: Any,
        chosen: slice | Sequence[int],
        arguments: dict[str, Any],
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Return the keys that the chosen queries see, and what is added to their scores, as the
        layer's kernel takes its mask.
        """
        size, num_keys = query.shape[2], key.shape[2]
        if runs_flash_attention(attention_implementation(self._config)):
            return self._flash_mask(layer, size, key, mask, chosen, arguments), []
        position_bias = arguments.get("position_bias")
        bias = [] if position_bias is None else [_of_queries(position_bias, chosen, num_keys)]
        if isinstance(mask, Tensor):
            part = _of_queries(mask, chosen, num_keys)
            return (part, bias) if mask.dtype == torch.bool else (None, [part, *bias])
        queries = _take(torch.arange(size, device=query.device), 0, chosen)
        keys = torch.arange(num_keys, device=key.device)
        if mask is None:
            is_causal = arguments.get("is_causal")
            is_causal = getattr(layer, "is_causal", True) if is_causal is None else is_causal
            if attention_implementation(self._config) != "sdpa" or not is_causal or size == 1:
                return None, bias
            return queries[:, None] >= keys, bias
        rows, heads = (torch.arange(n, device=key.device) for n in mask.shape[:2])
        grid = rows[:, None, None, None], heads[:, None, None], queries[:, None], keys
        return mask.mask_mod(*grid), bias

    @staticmethod
    def _flash_mask(
        layer: nn.Module,
        size: int,
        key: Tensor,
        mask: Tensor | None,
        chosen: slice | Sequence[int],
        arguments: dict[str, Any],
    ) -> Tensor | None:
        """Return the keys that the chosen ones of ``size`` queries see. The last query is at the
        last key; ``mask`` marks tokens, (rows, keys), that are not padding. Padding sees nothing.
        """
        num_keys, parts = key.shape[2], []
        keys = torch.arange(num_keys, device=key.device)
        places = _take(keys[num_keys - size :], 0, chosen)[:, None]
        is_causal, window = arguments.get("is_causal"), arguments.get("sliding_window")
        if getattr(layer, "is_causal", True) if is_causal is None else is_causal:
            parts.append(places >= keys)
        if window is not None and num_keys > window:
            parts.append((places - keys).abs() < window)
        if mask is not None:
            mask = mask[:, None, None].bool()
            own = _take(mask[..., num_keys - size :], 3, chosen)
            parts.append(mask & own.transpose(2, 3))
        return functools.reduce(torch.logical_and, parts) if parts else None

    def run_kernel(self, layer: nn.Module, *args: Any, **arguments: Any) -> Any:
        """Call the layer's own function, while the layer has its own configuration: some read their
        name there.
        """
        kernel, ours = self.kernel(layer), layer.config
        layer.config = self._config
        try:
            return kernel(layer, *args, **arguments)
        finally:
            layer.config = ours

    @torch.no_grad()
    def verify(
        self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, scores: dict[str, Any]
    ) -> None:
        """Check that the pattern gives the kernel's own result, once for calls of a kind: a model
        may scale, mask or weight differently.

        Raises:
            HookError: it does not.
        """
        allowed, bias = scores["allowed"], scores["bias"]
        given = [name for name in ("softcap", "sinks") if scores[name] is not None]
        kernel = attention_implementation(self._config)
        kind = (kernel, query.dtype, allowed is None, len(bias), *given)
        if kind in self._verified or isinstance(output, FakeTensor) or output.is_meta:
            return
        with follow.paused():
            result = _weighted(self.forward(query, key, **scores), value).transpose(1, 2)
            found = beyond_rounding(result, output)
            if found:
                raise HookError(
                    f"attention of {self._name!r}: the pattern rebuilt from queries, keys and mask "
                    f"gives another result than the layer's own {kernel} attention ({found}): it "
                    "is not this layer's pattern; hook the layer's own tensors instead"
                )
            if not output.numel():
                return
        self._verified.add(kind)

    def install_in(self, layer: nn.Module, name: str) -> Callable[[], None]:
        return install(layer, name, self.queries)

    def take_off(self, layer: nn.Module) -> None:
        """Give the layer its own function again."""
        layer.config = self._config
        layer._modules.pop(CHILD, None)


def install(layer: nn.Module, name: str, queries: Any) -> Callable[[], None]:
    """Make the layer compute patterns for hooks; return what undoes it.

    Raises:
        TypeError, ValueError: the layer computes no attention by a function of ``transformers``, by
            one that is not known, is compiled, or has hooks on the pattern of other queries.
    """
    forward = _forward_of(layer)
    looked_up = forward.__code__.co_names if inspect.isfunction(forward) else ()
    if "ALL_ATTENTION_FUNCTIONS" not in looked_up or not hasattr(layer, "config"):
        raise ValueError(
            f"attention({name!r}): {type(layer).__name__} does not compute attention by one of the "
            "attention functions of transformers (ALL_ATTENTION_FUNCTIONS); name the module that "
            "does, such as 'model.layers.3.self_attn'"
        )
    if compiled.is_compiled(layer):
        raise ValueError(
            f"attention({name!r}): the layer is compiled; compile the model after this call"
        )
    pattern: Any = layer._modules.get(CHILD)
    if not isinstance(pattern, AttentionPattern):
        pattern = AttentionPattern(layer, name, queries)
        pattern.kernel(layer)
        # It is imported already: the layer is of it.
        sys.modules["transformers"].AttentionInterface.register(_NAME, _attend)
        layer.add_module(CHILD, pattern)
        config: Any = copy.deepcopy(layer.config)
        set_attention_implementation(config, _NAME)
        layer.config = config
    elif pattern.has_hooks:
        pattern.check_queries(settings(queries))
    else:
        pattern.choose(queries)
    return pattern.use(functools.partial(pattern.take_off, layer))


def _attend(
    layer: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    **arguments: Any,
) -> Any:
    """Compute attention as the layer's own function does, with hooks on the pattern."""
    pattern: Any = layer._modules[CHILD]
    given = query, key, value, attention_mask
    output, weights, *rest = pattern.run_kernel(layer, *given, **arguments)
    if not is_hooked(pattern):
        return (output, weights, *rest)
    pattern.refuse(arguments)
    chosen = pattern.chosen(query.shape[2])
    allowed, bias = pattern.masks(layer, query, key, attention_mask, chosen, arguments)
    part = _take(query, 2, chosen)
    scaling = arguments.get("scaling")
    scores = {
        "allowed": allowed,
        "bias": bias,
        "scaling": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "softcap": arguments.get("softcap"),
        "sinks": arguments.get("s_aux"),
    }
    pattern.verify(part, key, value, _take(output, 1, chosen), scores)
    hooked = pattern(part, key, **scores)
    if pattern.is_unchanged(part, key, hooked):
        return (output, weights, *rest)
    output = _replace(output, 1, chosen, _weighted(hooked, value).transpose(1, 2))
    weights = None if weights is None else _replace(weights, 2, chosen, hooked.to(weights.dtype))
    return (output, weights, *rest)


# The indices are slices of numbers that every rank has: a tensor of indices proves nothing.


def _take(tensor: Tensor, dim: int, chosen: slice | Sequence[int]) -> Tensor:
    """Return the chosen indices of ``dim``, which is kept."""
    if isinstance(chosen, slice):
        return tensor.narrow(dim, chosen.start, chosen.stop - chosen.start)
    return torch.cat([tensor.narrow(dim, index, 1) for index in chosen], dim)


def _of_queries(tensor: Tensor, chosen: slice | Sequence[int], num_keys: int) -> Tensor:
    """Return the part of a mask or bias, (rows, heads, queries, keys), of chosen queries."""
    part = tensor if tensor.shape[2] == 1 else _take(tensor, 2, chosen)
    return part[..., :num_keys]


def _replace(whole: Tensor, dim: int, chosen: slice | Sequence[int], part: Tensor) -> Tensor:
    """Return a copy of ``whole`` with other values at the chosen indices of ``dim``."""
    if isinstance(chosen, slice):
        return torch.slice_scatter(whole, part, dim, chosen.start, chosen.stop)
    for i, index in enumerate(chosen):
        one, start = part.narrow(dim, i, 1), index
        whole = torch.slice_scatter(whole, one, dim, start, index + 1)
    return whole


def _repeated(heads: Tensor, num_heads: int) -> Tensor:
    """Return key or value heads, each as often as query heads share it."""
    rows, own, size, units = heads.shape
    if own == num_heads:
        return heads
    heads = heads[:, :, None].expand(rows, own, num_heads // own, size, units)
    return heads.reshape(rows, num_heads, size, units)


def _weighted(pattern: Tensor, value: Tensor) -> Tensor:
    """Return the sum of values that each query attends to."""
    return torch.matmul(pattern.to(value.dtype), _repeated(value, pattern.shape[1]))


def _forward_of(layer: nn.Module) -> Any:
    """Return the function that is the layer's forward, without decorators."""
    return inspect.unwrap(type(layer).forward)

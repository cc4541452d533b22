"""How many positions of its sequence a model had seen when the running forward began, which are in
the cache of transformers that it was passed, and how many the forward has. Hooks that count
positions in the sequence look it up.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flex_model.errors import HookError
from flex_model.integrations.torch_private import current_graph_task
from flex_model.integrations.transformers_private import cache_of, is_cache
from flex_model.names import wrapped_chain

_INPUTS = ("input_ids", "inputs_embeds")  # (rows, positions, ...)
_WRAP = (
    "; wrap the part that generates, as FlexModel(model.language_model) with `with flex.active():` "
    "around the call"
)


class Positions(NamedTuple):
    """The positions of a forward in its sequence: the number before them, and their number; None:
    any, since no cache has others.
    """

    past: int = 0
    length: int | None = None


class _Forward(NamedTuple):
    module: nn.Module  # that is called
    model: nn.Module  # whose sequence it is: the module, or the one that it is a part of
    cache: Any
    past: Any  # a number; a tensor, which a static cache has; None: the cache has no positions
    length: int | None
    outer: _Forward | None


_forward: ContextVar[_Forward | None] = ContextVar("the running forward", default=None)
_had_gradients = False  # whether a forward with positions before it may have a backward
_are_counted = False  # whether any selection counts positions in the sequence


def count() -> None:
    """Note that a selection counts positions in the sequence: ranks compare them from now on."""
    global _are_counted
    _are_counted = True


def begin(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Note a forward that begins. A part of the running one has its positions, unless it is passed
    another sequence: a model may be run in another one's editing function.
    """
    global _had_gradients
    if not _are_counted:
        return
    outer = _forward.get()
    cache = cache_of(kwargs)
    cache = next(filter(is_cache, args), None) if cache is None else cache
    inputs = [kwargs.get(name) for name in _INPUTS] + list(args[:1])
    sizes = [one.shape[1] for one in inputs if isinstance(one, Tensor) and one.dim() > 1]
    length = sizes[0] if sizes else None
    is_same = outer is not None and cache is outer.cache and length in (None, outer.length)
    if outer is not None and is_same and any(module is one for one in outer.model.modules()):
        _forward.set(outer._replace(module=module, outer=outer))
        return
    past = 0 if cache is None else _length_of(cache)
    if isinstance(past, Tensor):  # the host waits for it only where a hook needs it
        past = past.clone()
    if torch.is_grad_enabled() and (isinstance(past, Tensor) or past != 0):
        _had_gradients = True
    _forward.set(_Forward(module, module, cache, past, length, outer))


def _length_of(cache: Any) -> Any:
    """Return how many positions a cache holds; None: it has states alone, as that of a Mamba, or
    layers of several lengths behind an empty one.
    """
    try:
        length = getattr(cache, "get_seq_length", lambda: None)()
    except ValueError:  # what transformers raises there
        return None
    if isinstance(length, Tensor) or length != 0:
        return length
    # That of layer 0, which is empty also where it has states elsewhere, as in a MiniMax.
    layers = [one for one in getattr(cache, "layers", ()) if hasattr(one, "get_seq_length")]
    held = {int(one.get_seq_length()) for one in layers} - {0}
    return None if len(held) > 1 else sum(held)


def end(module: nn.Module) -> None:
    """Forget the forward that this module began, if it began one."""
    forward = _forward.get()
    if forward is not None and forward.module is module:
        _forward.set(forward.outer)


def compared() -> int:
    """Return what ranks compare when a forward begins: 0 where nobody counts. Not the length, in
    which data-parallel ranks may differ: where it matters, shapes at a hook do.
    """
    forward = _forward.get()
    return 0 if forward is None or forward.past is None else int(forward.past)


def positions_of_forward(what: str) -> Positions:
    """Return the positions of the running forward.

    Args:
        what: Whose positions are counted, for messages.

    Raises:
        HookError: they are not known.
    """
    forward, problem = _forward.get(), ""
    if current_graph_task() != -1:  # a recomputation, or a gradient
        if not _had_gradients:
            return Positions()
        problem = "a forward had a cache and gradients"
    elif forward is None:
        problem = f"a part of the model is called on its own, or a stage of a pipeline{_WRAP}"
    else:
        problem = _problem(forward)
    if forward is None or problem:
        raise HookError(
            f"{what}: with of='sequence', where its positions are in the sequence is not known: "
            f"{problem}; or give positions of the call, such as 'last', without of="
        )
    return Positions(int(forward.past), forward.length)


def _problem(forward: _Forward) -> str:
    kind: Any = getattr(sys.modules.get("transformers"), "PreTrainedModel", ())
    model = wrapped_chain(forward.model)[-1]
    # A module around one may keep the cache, and call it several times.
    if not isinstance(model, kind):
        return f"{type(model).__name__} is not a model of transformers{_WRAP}"
    if model.config.is_encoder_decoder:
        return "an encoder-decoder has two sequences"
    if forward.past is None:
        return (
            f"its {type(forward.cache).__name__} holds states, not positions (get_seq_length() has "
            "no number for all its layers); pass use_cache=False"
        )
    if forward.length is None:
        return "it was given neither input_ids nor inputs_embeds"
    if forward.past and torch.is_grad_enabled():
        return "the forward has a cache and gradients; run it under torch.no_grad()"
    return ""

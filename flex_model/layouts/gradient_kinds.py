"""The kind of a gradient along one axis: its placement, or why that is not known. And the kind of a
sum of gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

from flex_model.distributed.placement import Partial, Placement, Replicate

Kind = Placement | str | None  # of a gradient; a string: why it is not known; None: there is none

WHOLE, PART = Replicate(), Partial()


class Wrong(str):
    """Why a gradient is not a part of the unsharded model's, or not yet known to be one, whatever
    the placement of its tensor. Other strings are about replicated tensors, whose gradients the
    ranks may hold in several ways.
    """


class Mixed(Wrong):
    """Why a gradient is not a part of the unsharded model's: ranks computed something of parts
    alone where the unsharded program needs all of them. Not even a placement that a DTensor states
    makes it right.
    """


def worst(texts: Sequence[str]) -> str:
    """Return the gravest of several reasons, the same one on every rank; empty for none."""
    for kind in (Mixed, Wrong):
        found = [text for text in texts if isinstance(text, kind)]
        if found:
            return min(found)
    return min(texts, default="")


def expected_of(own: Placement) -> Placement | None:
    """Return the placement of the gradient of a tensor with this placement; None for a replicated
    one, which has no single answer.
    """
    if isinstance(own, Replicate):
        return None
    return WHOLE if isinstance(own, Partial) else own


def summed(kinds: set[Kind], expected: Placement | None, is_free: bool = False) -> Kind:
    """Return the kind of a sum of gradients of these kinds; ``is_free``: whether the tensor's own
    placement is not known.
    """
    texts = [kind for kind in kinds if isinstance(kind, str)]
    if isinstance(worst(texts), Wrong) or (texts and expected is None):
        return worst(texts)
    kinds = kinds - set(texts)
    if len(kinds) > 1:
        return "it is read both whole and in parts"
    kind = next(iter(kinds), None)
    if kind is None or kind == expected:
        return kind
    if expected is not None:
        return "a gradient that is not placed like its tensor"
    if is_free or isinstance(kind, (Replicate, Partial)):
        return kind
    return "a gradient that is split"

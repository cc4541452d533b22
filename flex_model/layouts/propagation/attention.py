"""The rule for all forms of scaled dot product attention.

Rows, heads and queries are parallel (queries not under a causal mask, which counts them from the
first one); the softmax sums over keys and values. With fewer key-value heads than query heads, both
are split in the same ratio.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flex_model.layouts.propagation.operation import REPLICATED, Operand, Operation
from flex_model.layouts.propagation.text_forms import Placements, form, words


def as_heads_of(query: Operand, other: Operand, dim: int = -3) -> Operand:
    """Return keys or values as if each head, at ``dim``, were repeated for its queries: a split
    stays one.
    """
    if query.ndim < 3 or other.ndim != query.ndim:
        return other
    of_query = [shape[dim] for shape in query.shapes]
    own = [shape[dim] for shape in other.shapes]
    if of_query == own or (other.placement == REPLICATED and set(own) == {1}):
        return other
    (ratio,) = {a // b for a, b in zip(of_query, own) if a == a // b * b}
    if any(a != ratio * b for a, b in zip(of_query, own)):
        raise ValueError("query heads are no multiple of the key-value heads")
    shapes = tuple((*s[:dim], s[dim] * ratio, *s[dim + 1 :]) for s in other.shapes)
    return replace(other, shapes=shapes)


def attention(operation: Operation) -> Placements:
    """Weight the values: the first output; the second has the weights, or the logarithm of their
    sum, for each query; others are state of the kernel.
    """
    query, masks = operation["query"], ("attn_mask", "attn_bias")
    given: dict[str, Any] = {name: as_heads_of(query, operation[name]) for name in ("key", "value")}
    for name in masks:
        mask = operation.get(name)
        if mask is not None and mask.shapes[0] == (0,):
            given[name] = None
    operation = operation.with_arguments(**given)
    row = "*" if operation["is_causal"] else "l"
    scores = f"query:~...{row}* key:~...** attn_mask?:~...{row}* attn_bias?:~...{row}*"
    linear = "" if operation.get("dropout_p") else "= value*!query*!key*!attn_mask*!attn_bias"
    has_weights = operation.name.startswith("_scaled_dot_product_attention_math")
    second = f"...{row}*" if has_weights else f"...{row}"
    return form(f"{scores} value:~...*v -> ...{row}v {linear} ; {second}")(operation)


RULES = dict.fromkeys(
    words(
        """
scaled_dot_product_attention _scaled_dot_product_attention_math
_scaled_dot_product_attention_math_for_mps _scaled_dot_product_flash_attention
_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention
_scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable
"""
    ),
    attention,
)

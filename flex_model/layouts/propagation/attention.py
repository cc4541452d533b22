"""Rules for all forms of scaled dot product attention, and for the fast path of ``nn.Transformer``.

Rows, heads and queries are parallel (queries not under a causal mask, which counts them from the
first one); the softmax sums over keys and values. With fewer key-value heads than query heads, both
are split in the same ratio.
"""

from __future__ import annotations

from dataclasses import replace

from flex_model.layouts.propagation.labels import (
    Input,
    Label,
    Labels,
    Output,
    Placements,
    Term,
    resolve,
    words,
)
from flex_model.layouts.propagation.operation import REPLICATED, Operand, Operation

_HEADS = -3


def _labels(ndim: int, query: Label, last: Label) -> Labels:
    batch = tuple(("b", ndim - i) for i in range(ndim - 3))
    heads = ("h",) if ndim > 2 else ()
    return (*batch, *heads, query, last)


def _as_heads_of(query: Operand, other: Operand) -> Operand:
    """Return keys or values as if each head were repeated for its queries: a split stays one."""
    if query.ndim < 3 or other.ndim != query.ndim:
        return other
    of_query = [shape[_HEADS] for shape in query.shapes]
    own = [shape[_HEADS] for shape in other.shapes]
    if of_query == own or (other.placement == REPLICATED and set(own) == {1}):
        return other
    (ratio,) = {a // b for a, b in zip(of_query, own) if a == a // b * b}
    if any(a != ratio * b for a, b in zip(of_query, own)):
        raise ValueError("query heads are no multiple of the key-value heads")
    return replace(
        other,
        shapes=tuple(
            (*shape[:_HEADS], shape[_HEADS] * ratio, *shape[_HEADS + 1 :]) for shape in other.shapes
        ),
    )


def _mask(operation: Operation) -> Operand | None:
    return operation.get("attn_mask", operation.get("attn_bias"))


class _Parts:
    """The operands with their labels."""

    def __init__(self, operation: Operation):
        query = operation["query"]
        if operation.get("dropout_mask") is not None:
            raise ValueError("a dropout mask that is given")
        self.row: Label = None if operation["is_causal"] else "l"
        key, value = (_as_heads_of(query, operation[name]) for name in ("key", "value"))
        self.query = Input(query, _labels(query.ndim, self.row, None), broadcasts=True)
        self.key = Input(key, _labels(key.ndim, None, None), broadcasts=True)
        self.value = Input(value, _labels(value.ndim, None, "v"), broadcasts=True)
        mask = _mask(operation)
        self.mask: tuple[Input, ...] = ()
        if mask is not None and mask.shapes[0] != (0,):
            labels = _labels(max(query.ndim, 3), self.row, None)
            self.mask = (Input(mask, labels[len(labels) - mask.ndim :], broadcasts=True),)

    @property
    def scores(self) -> tuple[Input, ...]:
        return (self.query, self.key, *self.mask)

    def result(self, made: Operand) -> Labels:
        return _labels(made.ndim, self.row, "v")


def attention(operation: Operation) -> Placements:
    """Weight the values: the first output; the second has one entry for each query."""
    parts = _Parts(operation)
    given = Term((parts.value,), parts.scores)
    inputs = (*parts.scores, parts.value)
    made = operation.outputs[0]
    terms = () if operation.get("dropout_p") else (given,)
    outputs: list[Output | None] = [Output(parts.result(made), inputs, terms)]
    for index, other in enumerate(operation.outputs[1:]):
        if index == 0 and operation.name.startswith("_scaled_dot_product_attention_math"):
            labels = _labels(other.ndim, parts.row, None)  # the weights
        elif index == 0 and other.ndim == made.ndim - 1:
            labels = _labels(made.ndim, parts.row, None)[:-1]  # the logsumexp of the scores
        else:
            outputs.append(None)  # state of the kernel
            continue
        outputs.append(Output(labels, inputs))
    return resolve(operation, outputs)


def encoder_layer(operation: Operation) -> Placements:
    """Run the fused layer of ``nn.TransformerEncoder``: rows are parallel."""
    outputs = []
    inputs = []
    for name, value in operation.arguments[0].items():
        if not isinstance(value, Operand):
            continue
        labels: Labels = (None,) * value.ndim
        if name in ("src", "query", "key", "value"):
            labels = ("b", None, None)
        elif name == "mask" and operation["mask_type"] in (1, 2):
            labels = ("b", *(None,) * (value.ndim - 1))
        inputs.append(Input(value, labels))
    for made in operation.outputs:
        outputs.append(Output(("b", *(None,) * (made.ndim - 1)), tuple(inputs)))
    return resolve(operation, outputs)


_FORWARDS = words(
    """
scaled_dot_product_attention _scaled_dot_product_attention_math
_scaled_dot_product_attention_math_for_mps _scaled_dot_product_flash_attention
_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention
_scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable
"""
)

RULES = {
    **dict.fromkeys(_FORWARDS, attention),
    "_transformer_encoder_layer_fwd": encoder_layer,
    "_native_multi_head_attention": encoder_layer,
}

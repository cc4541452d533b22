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
    by_mask,
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

    def __init__(self, operation: Operation, value_label: Label = "v"):
        query = operation["query"]
        if operation.get("dropout_mask") is not None:
            raise ValueError("a dropout mask that is given")
        self.row: Label = None if operation["is_causal"] else "l"
        self.value_label = value_label
        key, value = (_as_heads_of(query, operation[name]) for name in ("key", "value"))
        self.query = Input(query, _labels(query.ndim, self.row, None), broadcasts=True)
        self.key = Input(key, _labels(key.ndim, None, None), broadcasts=True)
        self.value = Input(value, _labels(value.ndim, None, value_label), broadcasts=True)
        mask = _mask(operation)
        self.mask: tuple[Input, ...] = ()
        if mask is not None and mask.shapes[0] != (0,):
            labels = _labels(max(query.ndim, 3), self.row, None)
            self.mask = (Input(mask, labels[len(labels) - mask.ndim :], broadcasts=True),)

    @property
    def scores(self) -> tuple[Input, ...]:
        return (self.query, self.key, *self.mask)

    def result(self, made: Operand) -> Labels:
        return _labels(made.ndim, self.row, self.value_label)


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


def attention_backward(operation: Operation) -> Placements:
    """Compute gradients, linear in the output's. The kernel's saved state is ignored."""
    parts = _Parts(operation, None)
    name = "grad_out" if "grad_out" in operation.arguments[0] else "grad_out_"
    grad, out, sums = operation[name], operation["out"], operation["logsumexp"]
    labels = _labels(grad.ndim, parts.row, None)
    given = (
        *parts.scores,
        parts.value,
        Input(out, labels),
        Input(sums, labels[:-1]),
    )
    terms = (Term((Input(grad, labels),), given),)
    key, value = operation["key"], operation["value"]
    outputs = [
        Output(parts.query.labels, terms=terms),
        Output(_but_broadcast(parts.key.labels, key), terms=terms),
        Output(_but_broadcast(parts.value.labels, value), terms=terms),
    ]
    for i in parts.mask:
        outputs.append(Output(_but_broadcast(i.labels, i.operand), terms=terms))
    if "grad_input_mask" in operation.arguments[0]:
        return resolve(_with_all_heads(operation), by_mask(operation, outputs))
    return resolve(_with_all_heads(operation), outputs[:3])


def _but_broadcast(labels: Labels, operand: Operand) -> Labels:
    """Return the labels of the gradient: for a broadcast operand it is a sum along the broadcast
    dim.
    """
    if operand.placement != REPLICATED:
        return labels
    return tuple(None if size == 1 else x for x, size in zip(labels, operand.shapes[0]))


def _with_all_heads(operation: Operation) -> Operation:
    """Return the operation as if the gradients of keys and values had the heads of the queries, as
    labels require.
    """
    query = operation["query"]
    return replace(
        operation,
        outputs=tuple(
            _as_heads_of(query, made) if made.ndim == query.ndim else made
            for made in operation.outputs
        ),
    )


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

_BACKWARDS = words(
    """
_scaled_dot_product_flash_attention_backward _scaled_dot_product_flash_attention_for_cpu_backward
_scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention_backward
_scaled_dot_product_fused_attention_overrideable_backward
"""
)

RULES = {
    **dict.fromkeys(_FORWARDS, attention),
    **dict.fromkeys(_BACKWARDS, attention_backward),
    "_transformer_encoder_layer_fwd": encoder_layer,
    "_native_multi_head_attention": encoder_layer,
}

"""Rules for recurrent layers and cells: rows are parallel, all else must be whole."""

from __future__ import annotations

from collections.abc import Sequence

from flex_model.layouts.propagation.labels import (
    Input,
    Label,
    Labels,
    Output,
    Placements,
    form,
    resolve,
    words,
)
from flex_model.layouts.propagation.operation import Operand, Operation


def _at(ndim: int, dim: int) -> Labels:
    labels: list[Label] = [None] * ndim
    labels[dim] = "b"
    return tuple(labels)


def _tensors(value: object) -> list[Operand]:
    values: Sequence = value if isinstance(value, (list, tuple)) else [value]
    return [item for item in values if isinstance(item, Operand)]


def layer(operation: Operation) -> Placements:
    """Run ``lstm``, ``gru`` or ``rnn`` on padded rows; states are (layers, rows, features)."""
    x = operation["input"]  # packed sequences have no such argument
    dim = 0 if operation["batch_first"] else 1
    inputs = [Input(x, _at(x.ndim, dim))]
    inputs += [Input(state, _at(state.ndim, 1)) for state in _tensors(operation["hx"])]
    inputs += [Input(p, (None,) * p.ndim) for p in _tensors(operation["params"])]
    of_all = tuple(inputs)
    outputs = [
        Output(_at(made.ndim, 1 if i else dim), of_all) for i, made in enumerate(operation.outputs)
    ]
    return resolve(operation, outputs)


LAYERS = words("lstm gru rnn_tanh rnn_relu")

RULES = {
    **dict.fromkeys(LAYERS, layer),
    # One step on a GPU. The gates are (rows, features).
    "_thnn_fused_lstm_cell": form(
        "input_gates:b* hidden_gates:b* cx:b* input_bias?:* hidden_bias?:* -> b* ; b* ; b*"
    ),
    "_thnn_fused_gru_cell": form(
        "input_gates:b* hidden_gates:b* hx:b* input_bias?:* hidden_bias?:* -> b* ; b*"
    ),
}

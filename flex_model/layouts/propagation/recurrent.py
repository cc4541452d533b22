"""Rules for recurrent layers and cells: rows are parallel, all else must be whole."""

from __future__ import annotations

from collections.abc import Sequence

from flex_model.layouts.propagation.labels import (
    Input,
    Label,
    Labels,
    Output,
    Placements,
    Term,
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


def cell(operation: Operation) -> Placements:
    """Run one step: inputs and states are (rows, features)."""
    inputs = []
    for name in operation.arguments[0]:
        for operand in _tensors(operation[name]):
            is_row = name in _BY_ROW and operand.ndim == 2
            labels = _at(2, 0) if is_row else (None,) * operand.ndim
            inputs.append(Input(operand, labels))
    outputs = [Output(_at(made.ndim, 0), tuple(inputs)) for made in operation.outputs]
    return resolve(operation, outputs)


_BY_ROW = {"input", "hx", "cx", "input_gates", "hidden_gates"}


def mkldnn_layer(operation: Operation) -> Placements:
    """Run one direction of one layer on the CPU: positions first, then rows. Its workspace is no
    shard of a full tensor.
    """
    x = operation["input"]
    names = ("weight0", "weight1", "weight2", "weight3")
    inputs = [Input(x, _at(x.ndim, 1))]
    inputs += [Input(operation[n], _at(operation[n].ndim, -2)) for n in ("hx_", "cx_")]
    inputs += [Input(operation[n], (None,) * operation[n].ndim) for n in names]
    outputs: list[Output | None] = []
    for i, made in enumerate(operation.outputs):
        outputs.append(Output(_at(made.ndim, -2), tuple(inputs)) if i < 3 else None)
    return resolve(operation, outputs)


def mkldnn_layer_backward(operation: Operation) -> Placements:
    """Compute gradients: those of weights are sums over rows. The workspace is the forward's
    own.
    """

    def rows(name: str) -> tuple[Input, ...]:
        return tuple(Input(o, _at(o.ndim, -2)) for o in _tensors(operation[name]))

    weights = [operation[f"weight{i}"] for i in (1, 2, 3, 4)]
    grads = tuple(i for n in ("grad_output", "grad_hy", "grad_cy") for i in rows(n))
    names = ("input", "hx_", "cx_tmp", "output", "hy_", "cy_")
    given = tuple(i for n in names for i in rows(n))
    given += tuple(Input(w, (None,) * w.ndim) for w in weights)
    terms = tuple(Term((grad,), given) for grad in grads)
    outputs = []
    for i, made in enumerate(operation.outputs):
        is_weight = 0 < i < 5
        labels = (None,) * made.ndim if is_weight else _at(made.ndim, -2)
        outputs.append(Output(labels, terms=terms))
    return resolve(operation, outputs)


def cudnn_layer(operation: Operation) -> Placements:
    """Run all layers on a GPU. The reserve is no shard of a full tensor."""
    x, hx, cx = operation["input"], operation["hx"], operation["cx"]
    if operation["batch_sizes"]:
        return [None] * len(operation.outputs)
    dim = 0 if operation["batch_first"] else 1
    weights = [Input(w, (None,) * w.ndim) for w in _tensors(operation["weight"])]
    states = [Input(s, _at(s.ndim, 1)) for s in (hx, cx) if s is not None]
    inputs = (Input(x, _at(x.ndim, dim)), *states, *weights)
    outputs: list[Output | None] = [
        Output(_at(3, dim), inputs),
        Output(_at(3, 1), inputs),
        Output(_at(3, 1), inputs) if cx is not None else None,
        None,
        Output((None,) * operation.outputs[-1].ndim, tuple(weights)),
    ]
    return resolve(operation, outputs)


def cudnn_layer_backward(operation: Operation) -> Placements:
    if operation["batch_sizes"]:
        return [None] * len(operation.outputs)
    dim = 0 if operation["batch_first"] else 1

    def rows(name: str) -> tuple[Input, ...]:
        at = dim if name in ("input", "output", "grad_output") else 1
        return tuple(Input(o, _at(o.ndim, at)) for o in _tensors(operation[name]))

    grads = tuple(i for n in ("grad_output", "grad_hy", "grad_cy") for i in rows(n))
    weights = _tensors(operation["weight"])
    given = tuple(i for n in ("input", "hx", "cx", "output") for i in rows(n))
    given += tuple(Input(w, (None,) * w.ndim) for w in weights)
    terms = tuple(Term((grad,), given) for grad in grads)
    outputs = [Output(_at(3, at), terms=terms) for at in (dim, 1, 1)]
    mask = operation["output_mask"]
    made = [output for output, is_made in zip(outputs, mask) if is_made]
    if mask[3]:
        made += [Output((None,) * w.ndim, terms=terms) for w in weights]
    return resolve(operation, made)


LAYERS = words("lstm gru rnn_tanh rnn_relu")

RULES = {
    **dict.fromkeys(LAYERS, layer),
    **dict.fromkeys(
        words(
            "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell "
            "_thnn_fused_lstm_cell _thnn_fused_gru_cell"
        ),
        cell,
    ),
    "mkldnn_rnn_layer": mkldnn_layer,
    "mkldnn_rnn_layer_backward": mkldnn_layer_backward,
    "_cudnn_rnn": cudnn_layer,
    "_cudnn_rnn_backward": cudnn_layer_backward,
    "_thnn_fused_lstm_cell_backward_impl": form(
        "grad_hy?:b* grad_cy?:b* cx:b* cy:b* workspace:b* -> "
        "b* = grad_hy*!cx*!cy*!workspace + grad_cy*!cx*!cy*!workspace ; "
        "b* = grad_hy*!cx*!cy*!workspace + grad_cy*!cx*!cy*!workspace ; "
        "* = grad_hy*!cx*!cy*!workspace + grad_cy*!cx*!cy*!workspace"
    ),
    "_thnn_fused_gru_cell_backward": form(
        "grad_hy:b* workspace:b* -> b* = grad_hy*!workspace ; b* = grad_hy*!workspace ; "
        "b* = grad_hy*!workspace ; * = grad_hy*!workspace ; * = grad_hy*!workspace"
    ),
}

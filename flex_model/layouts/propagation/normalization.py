"""Rules for normalization over dims, with weights by channel or by element.

These layers are in most models. Torch would decompose them, too, but the first operation that it
decomposes imports sympy or dynamo, 500 or 900 modules, where nothing else has.
"""

from __future__ import annotations

from flex_model.layouts.propagation.labels import (
    Input,
    Labels,
    Output,
    Placements,
    leading,
    resolve,
    words,
)
from flex_model.layouts.propagation.operation import Operand, Operation


def _whole(operand: Operand | None) -> tuple[Input, ...]:
    return () if operand is None else (Input(operand, (None,) * operand.ndim),)


def _by_channel(operand: Operand | None) -> tuple[Input, ...]:
    return () if operand is None else (Input(operand, ("c",)),)


def layer_norm(operation: Operation) -> Placements:
    """Normalize over the last dims; statistics for each index of the others."""
    x = operation["input"]
    outer = x.ndim - len(operation["normalized_shape"])
    inputs = (
        Input(x, leading(x.ndim, outer)),
        *_whole(operation["weight"]),
        *_whole(operation.get("bias")),
    )
    return resolve(
        operation, [Output(leading(made.ndim, outer), inputs) for made in operation.outputs]
    )


def group_norm(operation: Operation) -> Placements:
    """Normalize over groups of channels and all positions, which must be whole."""
    x = operation["input"]
    inputs = (
        Input(x, leading(x.ndim, 1)),
        *_whole(operation["weight"]),
        *_whole(operation["bias"]),
    )
    return resolve(operation, [Output(leading(made.ndim, 1), inputs) for made in operation.outputs])


def _trains(operation: Operation) -> bool:
    """Whether the batch's own statistics are used."""
    if operation.name == "_batch_norm_with_update":
        return True
    for name in ("training", "train", "use_input_stats", "update"):
        if name in operation.arguments[0]:
            return operation[name]
    return False


def _channels(ndim: int, per_row: bool, per_position: bool) -> Labels:
    positions = tuple(range(2, ndim)) if per_position else (None,) * (ndim - 2)
    return (0 if per_row else None, "c", *positions)


def batch_norm(operation: Operation) -> Placements:
    """Normalize each channel, by the statistics of the batch in training, else by the
    running ones.
    """
    x = operation["input"]
    trains = _trains(operation)
    labels = _channels(x.ndim, not trains, not trains)
    names = ["weight", "bias"]
    if not trains or operation.name.endswith("_functional"):  # returns the new statistics
        names += ["running_mean", "running_var"]
    inputs = (Input(x, labels), *(i for name in names for i in _by_channel(operation[name])))
    outputs: list[Output | None] = [Output(labels, inputs)]
    for made in operation.outputs[1:]:
        is_statistic = made.ndim == 1 and made.dtype.is_floating_point
        outputs.append(Output(("c",), inputs) if is_statistic else None)
    return resolve(operation, outputs)


BATCH_NORMS = words(
    "batch_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional "
    "_native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_no_update "
    "cudnn_batch_norm miopen_batch_norm"
)

RULES = {
    **dict.fromkeys(words("layer_norm native_layer_norm rms_norm _fused_rms_norm"), layer_norm),
    "group_norm": group_norm,
    **dict.fromkeys(BATCH_NORMS, batch_norm),
}

# It is passed the number of rows, which is the rank's own.
RULES_OF_ROWS = {"native_group_norm": group_norm}

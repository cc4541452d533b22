"""Rules for normalization over dims, with weights by channel or by element."""

from __future__ import annotations

from flex_model.layouts.propagation.labels import (
    Input,
    Labels,
    Output,
    Placements,
    Term,
    by_mask,
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


def layer_norm_backward(operation: Operation) -> Placements:
    """Compute gradients: those of weight and bias are sums over the outer dims."""
    grad, x = operation["grad_out"], operation["input"]
    outer = x.ndim - len(operation["normalized_shape"])

    def along(operand: Operand) -> Input:
        return Input(operand, leading(operand.ndim, outer))

    saved = [operation[name] for name in ("mean", "rstd") if name in operation.arguments[0]]
    of_grad, given = along(grad), tuple(along(operand) for operand in (x, *saved))
    inner: Labels = (None,) * (x.ndim - outer)
    outputs = [
        Output(
            leading(x.ndim, outer),
            terms=(Term((of_grad,), (*given, *_whole(operation["weight"]))),),
        ),
        Output(inner, terms=(Term((of_grad,), given),)),
        Output(inner, terms=(Term((of_grad,)),)),
    ]
    return resolve(operation, by_mask(operation, outputs[: len(operation["output_mask"])]))


def group_norm(operation: Operation) -> Placements:
    """Normalize over groups of channels and all positions, which must be whole."""
    x = operation["input"]
    inputs = (
        Input(x, leading(x.ndim, 1)),
        *_whole(operation["weight"]),
        *_whole(operation["bias"]),
    )
    return resolve(operation, [Output(leading(made.ndim, 1), inputs) for made in operation.outputs])


def group_norm_backward(operation: Operation) -> Placements:
    def rows(name: str) -> Input:
        return Input(operation[name], leading(operation[name].ndim, 1))

    grad, given = rows("grad_out"), tuple(map(rows, ("input", "mean", "rstd")))
    outputs = [
        Output(
            leading(grad.operand.ndim, 1),
            terms=(Term((grad,), (*given, *_whole(operation["weight"]))),),
        ),
        Output((None,), terms=(Term((grad,), given),)),
        Output((None,), terms=(Term((grad,)),)),
    ]
    return resolve(operation, by_mask(operation, outputs))


_UPDATES = {"_batch_norm_with_update", "cudnn_batch_norm_backward"}


def _trains(operation: Operation) -> bool:
    """Whether the batch's own statistics are used."""
    if operation.name in _UPDATES:
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


def instance_norm(operation: Operation) -> Placements:
    """Normalize each row and channel, over all positions."""
    x = operation["input"]
    own = operation["use_input_stats"]
    running = [operation[name] for name in ("running_mean", "running_var")]
    # Running statistics are means over the rows.
    labels = _channels(x.ndim, not own or running == [None, None], not own)
    used = [operation["weight"], operation["bias"], *([] if own else running)]
    inputs = (Input(x, labels), *(i for operand in used for i in _by_channel(operand)))
    return resolve(operation, [Output(labels, inputs)])


def batch_norm_backward(operation: Operation) -> Placements:
    trains = _trains(operation)
    grad = operation.get("grad_out", operation.get("grad_output"))
    labels = _channels(grad.ndim, not trains, not trains)
    of_grad, x = Input(grad, labels), Input(operation["input"], labels)
    names = ["running_mean", "running_var"]
    if trains:
        second = "save_invstd" if "save_invstd" in operation.arguments[0] else "save_var"
        names = ["save_mean", second]
    stats = [i for name in names for i in _by_channel(operation[name])]
    weight = _by_channel(operation["weight"])
    outputs = [
        Output(labels, terms=(Term((of_grad,), (x, *stats, *weight)),)),
        Output(("c",), terms=(Term((of_grad,), (x, *stats)),)),
        Output(("c",), terms=(Term((of_grad,)),)),
    ]
    if "output_mask" in operation.arguments[0]:
        return resolve(operation, by_mask(operation, outputs))
    return resolve(operation, outputs)


BATCH_NORMS = words(
    "batch_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional "
    "_native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_no_update "
    "cudnn_batch_norm miopen_batch_norm"
)

RULES = {
    **dict.fromkeys(words("layer_norm native_layer_norm rms_norm _fused_rms_norm"), layer_norm),
    "native_layer_norm_backward": layer_norm_backward,
    "_fused_rms_norm_backward": layer_norm_backward,
    "group_norm": group_norm,
    **dict.fromkeys(BATCH_NORMS, batch_norm),
    **dict.fromkeys(
        words("native_batch_norm_backward batch_norm_backward cudnn_batch_norm_backward"),
        batch_norm_backward,
    ),
    "instance_norm": instance_norm,
}

# These are passed the number of rows, which is the rank's own.
RULES_OF_ROWS = {
    "native_group_norm": group_norm,
    "native_group_norm_backward": group_norm_backward,
}

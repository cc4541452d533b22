"""Rules for backward operations, except those that are next to their forward: they are linear in
the gradient that they receive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flex_model.distributed.placement import Placement, Shard
from flex_model.layouts.propagation.labels import (
    Input,
    Label,
    Labels,
    Output,
    Placements,
    Term,
    all_but,
    operand_of,
    resolve,
    sizes_along,
    unary,
    words,
)
from flex_model.layouts.propagation.operation import PARTIAL, Operand, Operation
from flex_model.layouts.propagation.slicing import Range, follow_to_end, slice_ranges

# ---- Along a dim that all have -------------------------------------------------------------------


def along_dim(operation: Operation) -> Placements:
    """Compute along a dim of operands that all have the output's dims; linear in the first."""
    (made,) = operation.outputs
    labels = all_but(made.ndim, operation["dim"])
    first, *others = (Input(operand, labels) for operand in operation.operands)
    return resolve(operation, [Output(labels, terms=(Term((first,), tuple(others)),))])


def value_selecting(operation: Operation) -> Placements:
    """Return the gradient to the selected elements, for ``max``, ``min``, ``median`` and the like
    along a dim.
    """
    grad, indices = operation["grad"], operation["indices"]
    (made,) = operation.outputs
    labels = all_but(made.ndim, operation["dim"])
    before = labels if operation["keepdim"] else tuple(x for x in labels if x is not None)
    terms = (Term((Input(grad, before),), (Input(indices, before),)),)
    return resolve(operation, [Output(labels, terms=terms)])


# ---- Of slices: zeros around the gradient --------------------------------------------------------


def _has_known_sizes(operation: Operation, labels: Labels) -> bool:
    """Whether the sizes that the gradient does not have are those of the full tensor."""
    stated = operation.full_sizes.get("input_sizes")
    made = operation.outputs[0].shapes[0]
    return stated is None or all(
        label is not None or size == own for size, own, label in zip(stated, made, labels)
    )


def slice_backward(operation: Operation) -> Placements:
    """Put the gradient into zeros: if all ranks' slices make up the whole, the results are summands
    of its gradient.
    """
    operand = operand_of(operation)
    (made,) = operation.outputs
    dim = operation["dim"] % made.ndim
    sizes = sizes_along(made, dim)
    ranges = slice_ranges(operation.by_rank("start"), operation.by_rank("end"), sizes)
    labels = all_but(made.ndim, dim)
    shard = operand.shard
    if shard is not None and shard.dim == dim:
        return [_of_own_slices(shard, ranges, sizes) if operation["step"] == 1 else None]
    if len(set(ranges)) > 1 or not _has_known_sizes(operation, labels):
        return [None]
    return unary(operation, labels, labels, linear=True)


def _of_own_slices(shard: Shard, ranges: list[Range], sizes: Sequence[int]) -> Placement | None:
    """Return the placement if the gradient is split along the sliced dim: the slice was all of the
    rank's tensor, some of its parts, or the rank's own part of a replicated tensor.
    """
    if all(r == (0, size) for r, size in zip(ranges, sizes)):
        return shard
    if getattr(shard, "part_sizes", None) is not None:
        return None
    if len(set(ranges)) == len(ranges):
        is_own = follow_to_end(ranges, sizes[0]) and len(set(sizes)) == 1
        return PARTIAL if is_own and shard == Shard(shard.dim) else None
    places = set()
    for (start, end), size in zip(ranges, sizes):
        width = (end - start) // shard.parts
        if width == 0 or start % width or size % width:
            return None
        places.add((start // width, size // width))
    return replace(shard, parts=places.pop()[1]) if len(places) == 1 else None


def select_backward(operation: Operation) -> Placements:
    operand = operand_of(operation)
    (made,) = operation.outputs
    labels = all_but(made.ndim, operation["dim"])
    before = tuple(label for label in labels if label is not None)
    if len(before) != operand.ndim or not _has_known_sizes(operation, labels):
        return [None]
    return unary(operation, before, labels, linear=True)


def unfold_backward(operation: Operation) -> Placements:
    (made,) = operation.outputs
    labels = all_but(made.ndim, operation["dim"])
    if not _has_known_sizes(operation, labels):
        return [None]
    return unary(operation, (*labels, None), labels, linear=True)


def diagonal_backward(operation: Operation) -> Placements:
    (made,) = operation.outputs
    labels = all_but(made.ndim, (operation["dim1"], operation["dim2"]))
    if not _has_known_sizes(operation, labels):
        return [None]
    before = (*(label for label in labels if label is not None), None)
    return unary(operation, before, labels, linear=True)


# ---- Of indices ----------------------------------------------------------------------------------


def embedding_backward(operation: Operation) -> Placements:
    """Sum the gradient's rows that have the same index."""
    grad = operation.get("grad_output", operation.get("grad"))
    indices = operation["indices"]
    labels: Labels = tuple(range(indices.ndim))
    if operation["scale_grad_by_freq"]:
        labels = (None,) * indices.ndim  # all indices are counted
    terms = (Term((Input(grad, (*labels, "features")),), (Input(indices, labels),)),)
    return resolve(operation, [Output((None, "features"), terms=terms)])


# ---- Losses --------------------------------------------------------------------------------------

_NONE, _MEAN, _SUM = range(3)


def elementwise_loss(operation: Operation) -> Placements:
    """Compute a loss by element; its mean needs all elements."""
    ndim = max(operand.ndim for operand in operation.operands)
    reduction = operation["reduction"]
    labels: Labels = (None,) * ndim if reduction == _MEAN else tuple(range(ndim))
    inputs = tuple(
        Input(operand, labels[ndim - operand.ndim :], broadcasts=True)
        for operand in operation.operands
    )
    if reduction == _NONE:
        return resolve(operation, [Output(labels, inputs)])
    return resolve(operation, [Output((), terms=(Term((), inputs),))])


def elementwise_loss_backward(operation: Operation) -> Placements:
    """Compute gradients by element: that of a mean is divided by the number of all elements."""
    (made,) = operation.outputs
    is_mean = operation["reduction"] == _MEAN
    labels: Labels = (None,) * made.ndim if is_mean else tuple(range(made.ndim))
    inputs = [
        Input(operand, labels[made.ndim - operand.ndim :], broadcasts=True)
        for operand in operation.operands
    ]
    return resolve(operation, [Output(labels, terms=(Term((inputs[0],), tuple(inputs[1:])),))])


def _of_classes(scores: Operand) -> tuple[Labels, Labels]:
    """Return the labels of scores and of targets: classes are dim 1, or the only dim."""
    if scores.ndim == 1:
        return (None,), ()
    labels = all_but(scores.ndim, 1)
    return labels, tuple(label for label in labels if label is not None)


def nll_loss(operation: Operation) -> Placements:
    """Return the loss, and the total weight of all targets."""
    scores, target, weight = (operation[name] for name in ("self", "target", "weight"))
    reduction = operation["reduction"]
    of_scores, of_target = _of_classes(scores)
    whole = () if weight is None else (Input(weight, (None,)),)
    given = (Input(target, of_target), *whole)
    summed = Term((Input(scores, of_scores),), given)
    if reduction == _MEAN:
        inputs = (Input(scores, (None,) * scores.ndim), Input(target, (None,) * target.ndim))
        loss = Output((), (*inputs, *whole))
    else:
        loss = Output(of_target if reduction == _NONE else (), terms=(summed,))
    total = Output((), terms=(Term((), (*given, summed.linear[0])),))
    return resolve(operation, [loss, total][: len(operation.outputs)])


def nll_loss_backward(operation: Operation) -> Placements:
    """Compute the gradient: that of a mean is divided by the weight of all targets."""
    grad, scores, target = (operation[name] for name in ("grad_output", "self", "target"))
    weight, reduction = operation["weight"], operation["reduction"]
    of_scores, of_target = _of_classes(scores)
    given = [Input(scores, of_scores), Input(target, of_target)]
    if weight is not None:
        given.append(Input(weight, (None,)))
    if reduction == _MEAN:
        given.append(Input(operation["total_weight"], ()))
    of_grad = Input(grad, of_target if reduction == _NONE else ())
    return resolve(operation, [Output(of_scores, terms=(Term((of_grad,), tuple(given)),))])


def cross_entropy_loss(operation: Operation) -> Placements:
    """Compute the loss for classes, or for probabilities, which have the shape of the scores."""
    scores, target, weight = (operation[name] for name in ("self", "target", "weight"))
    reduction = operation["reduction"]
    of_scores, of_classes = _of_classes(scores)
    is_probability = target.ndim == scores.ndim and target.dtype.is_floating_point
    of_target = of_scores if is_probability else of_classes
    if reduction == _MEAN:
        of_scores, of_target = (None,) * scores.ndim, (None,) * target.ndim
    inputs = [Input(scores, of_scores), Input(target, of_target)]
    if weight is not None:
        inputs.append(Input(weight, (None,)))
    if reduction == _SUM:
        return resolve(operation, [Output((), terms=(Term((), tuple(inputs)),))])
    after = of_classes if reduction == _NONE else ()
    return resolve(operation, [Output(after, tuple(inputs))])


def prelu_backward(operation: Operation) -> Placements:
    """Compute both gradients for each element of the input."""
    grad, x, weight = (operation[name] for name in ("grad_output", "self", "weight"))
    labels: tuple[Label, ...] = tuple(range(x.ndim))
    given = (Input(x, labels), Input(weight, labels[x.ndim - weight.ndim :], broadcasts=True))
    terms = (Term((Input(grad, labels),), given),)
    return resolve(operation, [Output(labels, terms=terms)] * 2)


RULES = {
    **dict.fromkeys(
        words("_softmax_backward_data _log_softmax_backward_data glu_backward cumprod_backward"),
        along_dim,
    ),
    **dict.fromkeys(
        words(
            "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy "
            "binary_cross_entropy_with_logits kl_div soft_margin_loss"
        ),
        elementwise_loss,
    ),
    **dict.fromkeys(
        words(
            "mse_loss_backward smooth_l1_loss_backward huber_loss_backward "
            "binary_cross_entropy_backward soft_margin_loss_backward"
        ),
        elementwise_loss_backward,
    ),
    "value_selecting_reduction_backward": value_selecting,
    "embedding_dense_backward": embedding_backward,
    "embedding_backward": embedding_backward,
    "_prelu_kernel_backward": prelu_backward,
    **dict.fromkeys(
        words("nll_loss nll_loss_nd nll_loss_forward nll_loss2d nll_loss2d_forward"),
        nll_loss,
    ),
    "nll_loss_backward": nll_loss_backward,
    "nll_loss2d_backward": nll_loss_backward,
    "cross_entropy_loss": cross_entropy_loss,
}

# Their ``input_sizes`` and bounds are those of the rank's own part of a tensor.
RULES_OF_SIZES = {
    "slice_backward": slice_backward,
    "select_backward": select_backward,
    "unfold_backward": unfold_backward,
    "diagonal_backward": diagonal_backward,
}

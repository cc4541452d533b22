"""Rules for losses, which models compute in their forward."""

from __future__ import annotations

from flex_model.layouts.propagation.labels import (
    Input,
    Labels,
    Output,
    Placements,
    Term,
    all_but,
    resolve,
    words,
)
from flex_model.layouts.propagation.operation import Operand, Operation

_NONE, _MEAN = range(2)


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


def elementwise(operation: Operation) -> Placements:
    """Return the losses of all elements, or their mean, or sum: ``((x - y) ** 2).sum()``."""
    operands = operation.operands
    labels = tuple(range(max(operand.ndim for operand in operands)))
    inputs = tuple(Input(o, labels[len(labels) - o.ndim :], broadcasts=True) for o in operands)
    whole = tuple(Input(o, (None,) * o.ndim) for o in operands)
    outputs = (Output(labels, inputs), Output((), whole), Output((), terms=(Term((), inputs),)))
    return resolve(operation, [outputs[operation["reduction"]]])


_ELEMENTWISE = words(
    "mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits"
)

RULES = {
    **dict.fromkeys(words("nll_loss_forward nll_loss2d_forward"), nll_loss),
    **dict.fromkeys(_ELEMENTWISE, elementwise),
}

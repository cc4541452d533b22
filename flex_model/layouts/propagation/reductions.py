"""Rules for sums, means, extremes, scans and sorts along dims.

Along a split dim only sums are known, as partial sums. Along other dims an output is split as the
operand, with its dim moved if dims before it are removed.
"""

from __future__ import annotations

from functools import partial

from flex_model.layouts.propagation.labels import (
    Input,
    Label,
    Output,
    Placements,
    Term,
    all_but,
    as_dims,
    form,
    operand_of,
    resolve,
    unary,
    words,
)
from flex_model.layouts.propagation.operation import Operation
from flex_model.layouts.propagation.pointwise import pointwise


def _dims(operation: Operation) -> tuple[int, ...]:
    dims = operation.get("dim", operation.get("dims"))
    return as_dims(dims, operand_of(operation).ndim)


def _without(ndim: int, dims: tuple[int, ...], keepdim: bool) -> tuple[Label, ...]:
    """Return the labels of the output of a reduction over ``dims``."""
    return tuple(None if dim in dims else dim for dim in range(ndim) if keepdim or dim not in dims)


def reduction(operation: Operation, sums: bool = False, linear: bool = False) -> Placements:
    """Reduce over ``dim``, or over all dims. ``sums``: partial over a split dim. ``linear``: of
    partial sums.
    """
    operand = operand_of(operation)
    dims = _dims(operation)
    labels = tuple(range(operand.ndim)) if sums else all_but(operand.ndim, dims)
    x = Input(operand, labels)
    after = _without(operand.ndim, dims, bool(operation.get("keepdim", False)))
    terms = (Term((x,)) if linear else Term((), (x,)),) if sums or linear else ()
    return resolve(operation, [Output(after, (x,), terms) for _ in operation.outputs])


def extreme(operation: Operation) -> Placements:
    """Take ``max`` or ``min``: of two tensors, or along a dim."""
    if len(operation.operands) > 1:
        return pointwise(operation)
    return reduction(operation)


def scan(operation: Operation, linear: bool = False) -> Placements:
    """Scan along ``dim``, which every output keeps."""
    operand = operand_of(operation)
    dim = operation.get("dim")
    labels = all_but(operand.ndim, range(operand.ndim) if dim is None else dim)
    return unary(operation, labels, *[labels] * len(operation.outputs), linear=linear)


def topk(operation: Operation) -> Placements:
    """Select along ``dim``, where the indices are positions."""
    operand = operand_of(operation)
    labels = all_but(operand.ndim, operation["dim"])
    return unary(operation, labels, labels, labels)


def renorm(operation: Operation) -> Placements:
    """Divide each slice along ``dim`` by its own norm."""
    operand = operand_of(operation)
    kept = operation["dim"] % operand.ndim
    labels = tuple(dim if dim == kept else None for dim in range(operand.ndim))
    return unary(operation, labels, labels)


def searchsorted(operation: Operation) -> Placements:
    """Find positions in a sorted row: the same row for all values, or a row for each of
    their rows.
    """
    rows = operation["sorted_sequence"]
    values = operation["self"]
    sorter = operation["sorter"]
    made = operation.outputs[0]
    if rows.ndim == 1:
        row_labels: tuple[Label, ...] = (None,)
    else:
        row_labels = all_but(rows.ndim, -1)
    inputs = [Input(rows, row_labels), Input(values, tuple(range(values.ndim)))]
    if sorter is not None:
        inputs.append(Input(sorter, row_labels))
    return resolve(operation, [Output(tuple(range(made.ndim)), tuple(inputs))])


def histc(operation: Operation) -> Placements:
    """Count elements in bins, whose ends are those of the data if both are 0."""
    operand = operand_of(operation)
    is_fixed = operation["min"] != operation["max"]
    x = Input(operand, tuple(range(operand.ndim)) if is_fixed else (None,) * operand.ndim)
    return resolve(operation, [Output((None,), terms=(Term((), (x,)),))])


def isin(operation: Operation) -> Placements:
    """Test whether each element is among others, which must be whole."""
    elements = operation["elements"]
    inputs = [Input(elements, tuple(range(elements.ndim)))]
    among = operation.get("test_elements")
    if among is not None:
        inputs.append(Input(among, (None,) * among.ndim))
    return resolve(operation, [Output(inputs[0].labels, tuple(inputs))])


def rot90(operation: Operation) -> Placements:
    """Rotate two dims, so both must be whole."""
    operand = operand_of(operation)
    labels = all_but(operand.ndim, operation["dims"])
    return unary(operation, labels, labels, linear=True)


def cross(operation: Operation) -> Placements:
    """Multiply two tensors that are broadcast, with three elements along a dim."""
    (made,) = operation.outputs
    labels = all_but(made.ndim, operation["dim"])
    a, b = (
        Input(operation[name], labels[made.ndim - operation[name].ndim :], broadcasts=True)
        for name in ("self", "other")
    )
    return resolve(operation, [Output(labels, terms=(Term((a, b)),))])


def _fft(operation: Operation) -> Placements:
    operand = operand_of(operation)
    labels = all_but(operand.ndim, as_dims(operation["dim"], operand.ndim))
    return unary(operation, labels, labels, linear=True)


_PLAIN = words(
    """
mean amax amin argmax argmin all any prod var std var_mean std_mean linalg_vector_norm logsumexp
median nanmedian kthvalue mode aminmax nanmean special_logsumexp norm
"""
)

_SCANS = words(
    """
cumprod cummax cummin logcumsumexp sort argsort log_softmax softmax special_softmax
special_log_softmax _softmax _log_softmax _safe_softmax glu
"""
)

RULES = {
    **dict.fromkeys(_PLAIN, reduction),
    **dict.fromkeys(_SCANS, scan),
    "mean": partial(reduction, linear=True),
    "sum": partial(reduction, sums=True, linear=True),
    "nansum": partial(reduction, sums=True),
    "count_nonzero": partial(reduction, sums=True),
    "max": extreme,
    "min": extreme,
    "cumsum": partial(scan, linear=True),
    "topk": topk,
    "msort": form("self:*... -> *..."),
    "searchsorted": searchsorted,
    "bucketize": form("self:... boundaries:* -> ..."),
    "histc": histc,
    "isin": isin,
    "rot90": rot90,
    "linalg_cross": cross,
    "trace": form("self:** -> = self"),
    "renorm": renorm,
    "multinomial": form("self:...* -> ...*"),
    **dict.fromkeys(words("_fft_c2c _fft_r2c _fft_c2r"), _fft),
}

"""Rules for products of tensors that are summed over dims."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from flex_model.layouts.propagation.labels import (
    Input,
    Label,
    Output,
    Placements,
    Term,
    form,
    resolve,
)
from flex_model.layouts.propagation.operation import Operation


def matmul(operation: Operation) -> Placements:
    """Multiply vectors and matrices; the dims in front of them are broadcast."""
    a, b = operation["self"], operation["other"]
    made = operation.outputs[0]
    rows: tuple[Label, ...] = ("i",) if a.ndim > 1 else ()
    columns: tuple[Label, ...] = ("k",) if b.ndim > 1 else ()
    batch = made.ndim - len(rows) - len(columns)

    def in_front(ndim: int) -> tuple[Label, ...]:
        return tuple(("...", batch - max(ndim - 2, 0) + i) for i in range(max(ndim - 2, 0)))

    # Only the dims in front are broadcast: "j" of both must have one size, and does.
    x = Input(a, (*in_front(a.ndim), *rows, "j"), broadcasts=True)
    y = Input(b, (*in_front(b.ndim), "j", *columns), broadcasts=True)
    if _sums_over_one(x, y, "j"):
        return [None]
    labels = (*(("...", i) for i in range(batch)), *rows, *columns)
    return resolve(operation, [Output(labels, terms=(Term((x, y)),))])


def _sums_over_one(x: Input, y: Input, label: Label) -> bool:
    """Whether one is split at the label and the other has size 1 there: no such product exists."""
    is_split = [
        i.operand.shard is not None and i.labels[i.operand.shard.dim] == label for i in (x, y)
    ]
    return is_split[0] != is_split[1]


def einsum(operation: Operation) -> Placements:
    """Contract by an equation. Dims of size 1 are broadcast; a label that an operand has twice is
    its diagonal, which must be whole.
    """
    equation = operation["equation"].replace(" ", "")
    before, arrow, after = equation.partition("->")
    terms = before.split(",")
    operands = operation["tensors"]
    if len(terms) != len(operands):
        return [None]
    inputs, ellipsis = [], 0
    for term, operand in zip(terms, operands):
        names, count = _einsum_labels(term, operand.ndim)
        ellipsis = max(ellipsis, count)
        inputs.append((operand, names))
    if not arrow:
        letters = before.replace(",", "").replace(".", "")
        after = "..." if "..." in before else ""
        after += "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    labelled = []
    for operand, names in inputs:
        diagonal = {name for name in names if names.count(name) > 1}
        labels = tuple(None if name in diagonal else name for name in names)
        labelled.append(Input(operand, labels, broadcasts=True))
    head, dots, tail = after.partition("...")
    out = (*head, *((("...", ellipsis - i) for i in range(ellipsis)) if dots else ()), *tail)
    return resolve(operation, [Output(out, terms=(Term(tuple(labelled)),))])


def _einsum_labels(term: str, ndim: int) -> tuple[tuple[Label, ...], int]:
    head, dots, tail = term.partition("...")
    count = ndim - len(head) - len(tail) if dots else 0
    return (*head, *(("...", count - i) for i in range(count)), *tail), count


def grouped_mm(operation: Operation) -> Placements:
    """Multiply groups of rows or columns, which end at ``offs`` and must be whole."""
    a, b = operation["self"], operation["mat2"]
    offsets, bias = operation.get("offs"), operation.get("bias")
    if bias is not None:
        return [None]
    forms: dict[tuple[int, int], tuple[tuple[Label, ...], tuple[Label, ...], tuple[Label, ...]]]
    forms = {
        (2, 3): ((None, "j"), (None, "j", "k"), (None, "k")),
        (3, 2): ((None, "i", "j"), ("j", None), ("i", None)),
        (3, 3): (("g", "i", "j"), ("g", "j", "k"), ("g", "i", "k")),
        (2, 2): (("i", None), (None, "k"), (None, "i", "k")),
    }
    of_a, of_b, of_out = forms[a.ndim, b.ndim]
    given = () if offsets is None else (Input(offsets, (None,)),)
    return resolve(
        operation, [Output(of_out, terms=(Term((Input(a, of_a), Input(b, of_b)), given),))]
    )


def solve_triangular(operation: Operation) -> Placements:
    """Solve ``A X = B``, or ``X A = B``: for each column, or row, of ``B``. The dims in front are
    broadcast.
    """
    a, b, made = operation["self"], operation["B"], operation.outputs[0]
    is_by_column = operation["left"]

    def labels(ndim: int, *last: Label) -> tuple[Label, ...]:
        return (*(("...", made.ndim - ndim + i) for i in range(ndim - 2)), *last)

    of_vectors: tuple[Label, Label] = (None, "vector") if is_by_column else ("vector", None)
    matrices = Input(a, labels(a.ndim, None, None), broadcasts=True)
    vectors = Input(b, labels(b.ndim, *of_vectors), broadcasts=True)
    terms = (Term((vectors,), (matrices,)),)
    return resolve(operation, [Output(labels(made.ndim, *of_vectors), terms=terms)])


def _added(labels: str, product: str) -> Callable[[Operation], Placements]:
    """Return the rule of a product that is added to ``self`` with these labels, which is not read
    if ``beta`` is 0.
    """
    text = f"self:{labels} {product}".replace("= ", "= self + ")
    rule, alone = form(text), form(product)

    def either(operation: Operation) -> Placements:
        if any(beta != 0 for beta in operation.by_rank("beta")):
            return rule(operation)
        arguments = tuple(
            {name: value for name, value in of_rank.items() if name != "self"}
            for of_rank in operation.arguments
        )
        return alone(replace(operation, arguments=arguments))

    either.__doc__ = text
    return either


RULES = {
    "mm": form("self:ij mat2:jk -> ik = self*mat2"),
    "bmm": form("self:bij mat2:bjk -> bik = self*mat2"),
    "mv": form("self:ij vec:j -> i = self*vec"),
    "dot": form("self:i tensor:i -> = self*tensor"),
    "vdot": form("self:i other:i -> = self*other"),
    "ger": form("self:i vec2:j -> ij = self*vec2"),
    "outer": form("self:i vec2:j -> ij = self*vec2"),
    "addmm": _added("~ik", "mat1:ij mat2:jk -> ik = mat1*mat2"),
    "_addmm_activation": form("self:~i* mat1:i* mat2:** -> i*"),
    "addmv": _added("~i", "mat:ij vec:j -> i = mat*vec"),
    "addr": _added("~ij", "vec1:i vec2:j -> ij = vec1*vec2"),
    "baddbmm": _added("~bik", "batch1:bij batch2:bjk -> bik = batch1*batch2"),
    "addbmm": _added("~ik", "batch1:bij batch2:bjk -> ik = batch1*batch2"),
    "linear": form("input:...i weight:oi bias?:o -> ...o = input*weight + bias"),
    "matmul": matmul,
    "einsum": einsum,
    "_grouped_mm": grouped_mm,
    "linalg_solve_triangular": solve_triangular,
    # Of 4-bit weights, which must be whole: the blocks that share a scale don't follow their rows.
    "bitsandbytes::dequantize_blockwise": form("A:* absmax:* code:* -> *"),
    "bitsandbytes::dequantize_4bit": form("A:** absmax:* -> **"),
    "bitsandbytes::gemm_4bit": form(
        "A:...* B:** absmax:* bias?:* absmax_8bit?:* absmax_code?:* absmax_offset?:... -> ...*"
    ),
}

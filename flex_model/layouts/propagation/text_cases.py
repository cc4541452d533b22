"""Rules that are one of several texts, by an argument."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from string import ascii_lowercase

from flex_model.layouts.propagation.operation import Operation
from flex_model.layouts.propagation.pointwise import pointwise
from flex_model.layouts.propagation.text_forms import Placements, form, words

# ---- Reductions and products ---------------------------------------------------------------------


def extreme(operation: Operation) -> Placements:
    """Take ``max`` or ``min``: of two tensors, or along a dim."""
    if len(operation.operands) > 1:
        return pointwise(operation)
    return form("self:...[dim] -> ...[-dim]+")(operation)


def histc(operation: Operation) -> Placements:
    """Count elements in bins, whose ends are those of the data if both are 0."""
    is_fixed = operation["min"] != operation["max"]
    return form("self:... -> * = !self" if is_fixed else "self:_ -> *")(operation)


_MATMUL = form(
    "self:j other:j -> = self*other | "
    "self:...ij other:j -> ...i = self*other | "
    "self:j other:...jk -> ...k = self*other | "
    "self:~...ij other:~...jk -> ...ik = self*other"
)


def matmul(operation: Operation) -> Placements:
    """Multiply vectors and matrices; the dims in front of them are broadcast, but "j" is not."""
    a, b = operation["self"], operation["other"]
    dims = (a, a.ndim - 1), (b, max(b.ndim - 2, 0))
    is_split = {one.shard is not None and one.shard.dim == dim for one, dim in dims}
    return [None] if len(is_split) > 1 else _MATMUL(operation)


def einsum(operation: Operation) -> Placements:
    """Contract by an equation. Dims of size 1 are broadcast; a label that an operand has twice is
    its diagonal, which must be whole.
    """
    before, arrow, after = operation["equation"].replace(" ", "").partition("->")
    if not arrow:
        letters = before.replace(",", "").replace(".", "")
        after = "..." if "..." in before else ""
        after += "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    named = {f"t{i}": one for i, one in enumerate(operation["tensors"])}
    reads, dots = [], ""
    for (name, one), term in zip(named.items(), before.split(","), strict=True):
        own = "9876543210"[10 - one.ndim + len(term.replace("...", "")) :]
        labels, dots = term.replace("...", own), max(dots, own, key=len)
        labels = "".join("*" if labels.count(label) > 1 else label for label in labels)
        reads.append(f"{name}:~{labels}")
    text = f"{' '.join(reads)} -> {after.replace('...', dots)} = {'*'.join(named)}"
    return form(text)(replace(operation, arguments=(named,) * operation.num_ranks))


def solve_triangular(operation: Operation) -> Placements:
    """Solve ``A X = B``, or ``X A = B``: for each column, or row, of ``B``."""
    of_vectors = "*v" if operation["left"] else "v*"
    return form(f"self:~...** B:~...{of_vectors} -> ...{of_vectors} = B*!self")(operation)


def of_matrices(operation: Operation) -> Placements:
    """Solve or factor matrices, each of a batch alone."""
    batch = ascii_lowercase[: operation.operands[0].ndim - 2]
    return form(f":{batch}_ -> {batch}_+")(operation)


def _added(labels: str, product: str) -> Callable[[Operation], Placements]:
    """Return the rule of a product that is added to ``self`` with these labels, which is not read
    if ``beta`` is 0.
    """
    rule, alone = form(f"self:{labels} {product}".replace("= ", "= self + ")), form(product)

    def either(operation: Operation) -> Placements:
        if any(beta != 0 for beta in operation.by_rank("beta")):
            return rule(operation)
        return alone(operation.without("self"))

    return either


# ---- Indices -------------------------------------------------------------------------------------


def scatter(operation: Operation) -> Placements:
    """Write elements at the same place along the other dims."""
    is_linear = operation.get("reduce") in (None, "add", "sum")
    terms = " = self*!index + src*!index + value" if is_linear else ""
    return form(f"self:...[dim] index:...[dim] src?:...[dim] -> ...[dim]{terms}")(operation)


def one_hot(operation: Operation) -> Placements:
    """Encode indices: without a number of classes, the largest of all determines it."""
    return form("self:... -> ...*" if operation["num_classes"] >= 0 else "self:_ -> _*")(operation)


# ---- Layers --------------------------------------------------------------------------------------


def batch_norm(operation: Operation) -> Placements:
    """Normalize each channel, by the statistics of the batch in training, else by the
    running ones.
    """
    names = ("training", "train", "use_input_stats", "update")
    trains = operation.name == "_batch_norm_with_update"
    trains = next((operation[n] for n in names if n in operation.arguments[0]), trains)
    returns_running = operation.name.endswith("_functional")
    x, running = "*c_" if trains else "nc...", " ; c ; c" if returns_running else ""
    if trains and not returns_running:
        operation = operation.without("running_mean", "running_var")
    by_channel = "weight?:c bias?:c running_mean?:c running_var?:c"
    return form(f"input:{x} {by_channel} -> {x} ; c ; c{running}")(operation)


def nll_loss(operation: Operation) -> Placements:
    """Return the loss of classes, and the total weight of all targets, by which a mean is
    divided.
    """
    none, mean, _ = range(3)
    reduction = operation["reduction"]
    if reduction == mean:
        return [None] * len(operation.outputs)
    loss = "n..." if reduction == none else ""
    return form(
        f"self:n*... target:n... weight?:* -> {loss} = self*!target*!weight "
        "; = !self*!target*!weight"
    )(operation)


def elementwise_loss(operation: Operation) -> Placements:
    """Return the losses of all elements, or their mean, or sum: ``((x - y) ** 2).sum()``."""
    names = ["self", "target", "weight", "pos_weight"]
    reads = "self:~... target:~... weight?:~... pos_weight?:~..."
    total = "*".join(f"!{name}" for name in names)
    texts = f"{reads} -> ...", ":_ -> ", f"{reads} -> = {total}"
    return form(texts[operation["reduction"]])(operation)


def recurrent(operation: Operation) -> Placements:
    """Run a layer on padded rows: these are parallel. States are (layers, rows, features)."""
    x = "b**" if operation["batch_first"] else "*b*"
    return form(f"input:{x} hx:*b* params:_ -> {x} ; *b*+")(operation)


def encoder_layer(operation: Operation) -> Placements:
    """Run the fused layer of ``nn.TransformerEncoder``: rows are parallel."""
    mask = "b_" if operation["mask_type"] in (1, 2) else "_"
    return form(f"src?:b_ query?:b_ key?:b_ value?:b_ mask?:{mask} :_ -> b_+")(operation)


BATCH_NORMS = words(
    "batch_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional "
    "_native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_no_update "
    "cudnn_batch_norm miopen_batch_norm"
)
RECURRENT = words("lstm gru rnn_tanh rnn_relu")
_ELEMENTWISE_LOSSES = words(
    "mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits"
)

RULES = {
    "max": extreme,
    "min": extreme,
    "histc": histc,
    "matmul": matmul,
    "einsum": einsum,
    "linalg_solve_triangular": solve_triangular,
    **dict.fromkeys(
        words(
            "_linalg_solve_ex linalg_inv_ex linalg_cholesky_ex _linalg_det _linalg_slogdet "
            "_linalg_eigh _linalg_svd linalg_qr linalg_lu_factor_ex cholesky_solve"
        ),
        of_matrices,
    ),
    "addmm": _added("~ik", "mat1:ij mat2:jk -> ik = mat1*mat2"),
    "baddbmm": _added("~bik", "batch1:bij batch2:bjk -> bik = batch1*batch2"),
    "addbmm": _added("~ik", "batch1:bij batch2:bjk -> ik = batch1*batch2"),
    **dict.fromkeys(words("scatter scatter_add scatter_reduce"), scatter),
    "one_hot": one_hot,
    **dict.fromkeys(BATCH_NORMS, batch_norm),
    **dict.fromkeys(words("nll_loss_forward nll_loss2d_forward"), nll_loss),
    **dict.fromkeys(_ELEMENTWISE_LOSSES, elementwise_loss),
    **dict.fromkeys(RECURRENT, recurrent),
    **dict.fromkeys(
        words("_transformer_encoder_layer_fwd _native_multi_head_attention"), encoder_layer
    ),
}

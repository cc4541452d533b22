"""Rules that are one of several texts, by an argument."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from string import ascii_lowercase, ascii_uppercase
from typing import Any

import torch

from flex_model.layouts.propagation.operation import REPLICATED, Operand, Operation, Shape, rule
from flex_model.layouts.propagation.text_forms import Placements, form, words

# ---- Reductions and products ---------------------------------------------------------------------


@rule("histc")
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


@rule("matmul")
def matmul(operation: Operation) -> Placements:
    """Multiply vectors and matrices; the dims in front of them are broadcast, but "j" is not."""
    a, b = operation["self"], operation["other"]
    dims = (a, a.ndim - 1), (b, max(b.ndim - 2, 0))
    is_split = {one.shard is not None and one.shard.dim == dim for one, dim in dims}
    return [None] if len(is_split) > 1 else _MATMUL(operation)


@rule("einsum")
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
        # Of ``...``, dims are the same if they have the same distance from the last one.
        own = "9876543210"[10 - one.ndim + len(term.replace("...", "")) :]
        labels, dots = term.replace("...", own), max(dots, own, key=len)
        labels = "".join("*" if labels.count(label) > 1 else label for label in labels)
        reads.append(f"{name}:~{labels}")
    text = f"{' '.join(reads)} -> {after.replace('...', dots)} = {'*'.join(named)}"
    return form(text)(replace(operation, arguments=(named,) * operation.num_ranks))


@rule("inner tensordot")
def tensordot(operation: Operation) -> Placements:
    """Contract some dims of two tensors, or their last ones."""
    one, other = operation["self"], operation["other"]
    if not one.ndim or not other.ndim:
        return [None] * len(operation.outputs)
    labels, of_other = ascii_lowercase[: one.ndim], list(ascii_uppercase[: other.ndim])
    dims, of_dims = (operation.get(name, [-1]) for name in ("dims_self", "dims_other"))
    for dim, to in zip(dims, of_dims):
        of_other[to] = labels[dim]
    kept = [label for label in (*labels, *of_other) if (label in labels) != (label in of_other)]
    equation = f"{labels},{''.join(of_other)}->{''.join(kept)}"
    given = {"equation": equation, "tensors": [one, other]}
    return einsum(replace(operation, arguments=(given,) * operation.num_ranks))


@rule("linalg_solve_triangular")
def solve_triangular(operation: Operation) -> Placements:
    """Solve ``A X = B``, or ``X A = B``: for each column, or row, of ``B``."""
    of_vectors = "*v" if operation["left"] else "v*"
    return form(f"self:~...** B:~...{of_vectors} -> ...{of_vectors} = B*!self")(operation)


@rule(
    "_linalg_solve_ex linalg_inv_ex linalg_cholesky_ex _linalg_det _linalg_slogdet _linalg_eigh "
    "_linalg_svd linalg_qr linalg_lu_factor_ex cholesky_solve linalg_matrix_exp linalg_pinv "
    "linalg_lstsq"
)
def of_matrices(operation: Operation) -> Placements:
    """Solve or factor matrices, each of a batch alone."""
    batch = ascii_lowercase[: operation.operands[0].ndim - 2]
    return form(f":{batch}_ -> {batch}_+")(operation)


def _added(labels: str, product: str) -> Callable[[Operation], Placements]:
    """Return the rule of a product that is added to ``self`` with these labels, which is not read
    if ``beta`` is 0.
    """
    added, alone = form(f"self:{labels} {product}".replace("= ", "= self + ")), form(product)

    def either(operation: Operation) -> Placements:
        if any(beta != 0 for beta in operation.by_rank("beta")):
            return added(operation)
        return alone(operation.without("self"))

    return either


rule("addmm")(_added("~ik", "mat1:ij mat2:jk -> ik = mat1*mat2"))
rule("baddbmm")(_added("~bik", "batch1:bij batch2:bjk -> bik = batch1*batch2"))
rule("addbmm")(_added("~ik", "batch1:bij batch2:bjk -> ik = batch1*batch2"))


# ---- Indices -------------------------------------------------------------------------------------


@rule("scatter scatter_add scatter_reduce")
def scatter(operation: Operation) -> Placements:
    """Write elements at the same place along the other dims."""
    is_linear = operation.get("reduce") in (None, "add", "sum")
    terms = " = self*!index + src*!index + value" if is_linear else ""
    return form(f"self:...[dim] index:...[dim] src?:...[dim] -> ...[dim]{terms}")(operation)


@rule("one_hot")
def one_hot(operation: Operation) -> Placements:
    """Encode indices: without a number of classes, the largest of all determines it."""
    return form("self:... -> ...*" if operation["num_classes"] >= 0 else "self:_ -> _*")(operation)


def _indexed(self: Operand, indices: list[Operand | None]) -> tuple[str, str, str]:
    """Return the labels of ``self``, of the indices, and of ``self[indices]``.

    The indexed dims are replaced by those of the indices, broadcast: at the first indexed dim if
    all are adjacent, else in front. A mask indexes as many dims as it has, and is replaced by one.
    """
    given = [one for one in indices if one is not None]
    has_mask = any(map(_is_mask, given))
    width = max(1 if _is_mask(one) else one.ndim for one in given)
    # The length of a mask's one dim is its count of ones, which only all of them determine.
    of_index = "*" * width if has_mask else ascii_uppercase[:width]
    dim, of_self = 0, ""
    for one in indices:
        count = one.ndim if one is not None and _is_mask(one) else 1
        of_self += ascii_lowercase[dim : dim + count] if one is None else "*" * count
        dim += count
    of_self += ascii_lowercase[dim : self.ndim]
    whole, rest = "*" * of_self.count("*"), of_self.replace("*", "")
    at = of_self.index(whole) if whole in of_self else 0
    return of_self, "_" if has_mask else f"~{of_index}", rest[:at] + of_index + rest[at:]


def _is_mask(index: Operand) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


@rule("index _unsafe_index")
def index(operation: Operation) -> Placements:
    """Read ``self[i, j, :, ...]``."""
    of_self, of_index, after = _indexed(operation["self"], list(operation["indices"]))
    return form(f"self:{of_self} indices:{of_index} -> {after} = self*!indices")(operation)


@rule("index_put _unsafe_index_put _index_put_impl")
def index_put(operation: Operation) -> Placements:
    """Write ``self[i, j, :, ...] = values``, or add to it."""
    found = _where_mask(operation)
    if found is not None and found[0] is not None:
        return found
    of_self, _, after = _indexed(operation["self"], list(operation["indices"]))
    # Two indices may write to the same place: all must be on every rank.
    of_values = "".join("*" if label.isupper() else label for label in after)
    return form(
        f"self:{of_self} indices:_ values:~{of_values} -> {of_self} = self + values*!indices"
    )(operation)


def _where_mask(operation: Operation) -> Placements | None:
    """Resolve ``self[mask] = value`` with the same value for all that the mask selects, and no
    other index: by element of the mask.
    """
    masks = [(i, m) for i, m in enumerate(operation["indices"]) if m is not None]
    if len(masks) != 1 or masks[0][1].dtype is not torch.bool:
        return None
    ((first, mask),), value = masks, operation["values"]
    labels = ascii_lowercase[: operation["self"].ndim]
    of_mask, rest = labels[first : first + mask.ndim], labels[first + mask.ndim :]
    selected = value.ndim - len(rest) - 1  # the dim of what the mask selects
    if selected >= 0 and any(shape[selected] != 1 for shape in value.shapes):
        return None
    return form(f"self:{labels} indices:{of_mask} values:~{labels[:first]}*{rest} -> {labels}")(
        operation
    )


# ---- Layers --------------------------------------------------------------------------------------

BATCH_NORMS = words(
    "batch_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional "
    "_native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_no_update "
    "cudnn_batch_norm miopen_batch_norm"
)
RECURRENT = words("lstm gru rnn_tanh rnn_relu")


@rule(BATCH_NORMS)
def batch_norm(operation: Operation) -> Placements:
    """Normalize each channel, by the statistics of the batch in training, else by the
    running ones.
    """
    trains = operation.get("training", operation.name == "_batch_norm_with_update")
    returns_running = operation.name.endswith("_functional")
    x, running = "*c_" if trains else "nc...", " ; c ; c" if returns_running else ""
    if trains and not returns_running:
        operation = operation.without("running_mean", "running_var")
    by_channel = "weight?:c bias?:c running_mean?:c running_var?:c"
    return form(f"input:{x} {by_channel} -> {x} ; c ; c{running}")(operation)


@rule("nll_loss_forward nll_loss2d_forward nll_loss_nd cross_entropy_loss")
def nll_loss(operation: Operation) -> Placements:
    """Return the loss of classes, or of their probabilities, and the total weight of all targets,
    by which a mean is divided.
    """
    reduction = operation["reduction"]  # none, mean, sum
    if reduction == 1:
        return [None] * len(operation.outputs)
    loss = "" if reduction else "n..."
    of_target = "n*..." if operation["target"].ndim == operation["self"].ndim else "n..."
    scores = "!self" if operation.name == "cross_entropy_loss" else "self"
    return form(
        f"self:n*... target:{of_target} weight?:* -> {loss} = {scores}*!target*!weight "
        "; = !self*!target*!weight"
    )(operation)


@rule("mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits")
def elementwise_loss(operation: Operation) -> Placements:
    """Return the losses of all elements, or their mean, or sum: ``((x - y) ** 2).sum()``."""
    reads = "self:~... target:~... weight?:~... pos_weight?:~..."
    total = "!self*!target*!weight*!pos_weight"
    texts = f"{reads} -> ...", ":_ -> ", f"{reads} -> = {total}"
    return form(texts[operation["reduction"]])(operation)


@rule(RECURRENT)
def recurrent(operation: Operation) -> Placements:
    """Run a layer on padded rows: these are parallel. States are (layers, rows, features)."""
    x = "b**" if operation["batch_first"] else "*b*"
    return form(f"input:{x} hx:*b* params:_ -> {x} ; *b*+")(operation)


# Windows extend over the edges of shards, so positions must be whole.
@rule("convolution _convolution", "groups")
def convolution(operation: Operation) -> Placements:
    """Compute channels "o" of channels "c"; or by group, if both are split into groups."""
    x, weight = operation["input"], operation["weight"]
    rows = "n" if x.ndim == weight.ndim else ""
    is_transposed = operation.get("transposed", False)
    of_x, of_weight, out = "c", "co" if is_transposed else "oc", "o"
    shards = x.shard, weight.shard
    if None not in shards and [s.dim for s in shards if s is not None] == [len(rows), 0]:
        if is_transposed:
            raise ValueError("groups or a sum: the weight's shape fits both")
        operation = _by_group(operation, len(rows))
        of_x, of_weight, out = "g", "g*", "g"
    elif any(count != 1 for count in operation.by_rank("groups")):
        of_x, of_weight, out = "*", "**", "*"
    return form(
        f"input:{rows}{of_x}_ weight:{of_weight}_ bias?:{out} -> {rows}{out}_ = input*weight + bias"
    )(operation)


def _by_group(operation: Operation, channel: int) -> Operation:
    """Return the operation on groups in place of channels. The weight's dim 1 is the number of
    input channels of a group, so no other reading is possible.
    """
    x, weight, bias = (operation[n] for n in ("input", "weight", "bias"))
    width = weight.shapes[0][1]
    counts = [shape[channel] // width for shape in x.shapes]
    (width_out,) = {shape[0] // count for shape, count in zip(weight.shapes, counts)}
    given = {"input": _grouped(x, channel, width), "weight": _grouped(weight, 0, width_out)}
    if bias is not None:
        given["bias"] = _grouped(bias, 0, width_out)
    (made,) = operation.outputs
    outputs = (_grouped(made, channel, width_out),)
    return replace(operation.with_arguments(**given), outputs=outputs)


def _grouped(operand: Operand, dim: int, width: int) -> Operand:
    """Return the operand with one index for each group. ValueError if a group is divided."""

    def shape_of(shape: Shape) -> Shape:
        return (*shape[:dim], shape[dim] // width, *shape[dim + 1 :])

    shard, shapes = operand.shard, tuple(map(shape_of, operand.shapes))
    is_divided = any(shape[dim] % width for shape in operand.shapes)
    if shard is not None and not is_divided:
        is_divided = bool(shard.part_sizes) or any(s[shard.dim] % shard.parts for s in shapes)
    if is_divided:
        raise ValueError("a group is divided, or parts have unequal sizes")
    return replace(operand, shapes=shapes)


# ---- Attention -----------------------------------------------------------------------------------


def as_heads_of(query: Operand, other: Operand, dim: int = -3) -> Operand:
    """Return keys or values as if each head, at ``dim``, were repeated for its queries: a split
    stays one.
    """
    if query.ndim < 3 or other.ndim != query.ndim:
        return other
    of_query = [shape[dim] for shape in query.shapes]
    own = [shape[dim] for shape in other.shapes]
    if of_query == own or (other.placement == REPLICATED and set(own) == {1}):
        return other
    (ratio,) = {a // b for a, b in zip(of_query, own) if a == a // b * b}
    if any(a != ratio * b for a, b in zip(of_query, own)):
        raise ValueError("query heads are no multiple of the key-value heads")
    shapes = tuple((*s[:dim], s[dim] * ratio, *s[dim + 1 :]) for s in other.shapes)
    return replace(other, shapes=shapes)


# Queries are parallel, but not under a causal mask, which counts them from the first one; the
# softmax sums over keys and values.
@rule(
    "scaled_dot_product_attention _scaled_dot_product_attention_math "
    "_scaled_dot_product_attention_math_for_mps _scaled_dot_product_flash_attention "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable"
)
def attention(operation: Operation) -> Placements:
    """Weight the values: the first output; the second has the weights, or the logarithm of their
    sum, for each query; others are state of the kernel.
    """
    query, masks = operation["query"], ("attn_mask", "attn_bias")
    given: dict[str, Any] = {name: as_heads_of(query, operation[name]) for name in ("key", "value")}
    for name in masks:
        mask = operation.get(name)
        if mask is not None and mask.shapes[0] == (0,):
            given[name] = None
    operation = operation.with_arguments(**given)
    row = "*" if operation["is_causal"] else "l"
    scores = f"query:~...{row}* key:~...** attn_mask?:~...{row}* attn_bias?:~...{row}*"
    linear = "" if operation.get("dropout_p") else "= value*!query*!key*!attn_mask*!attn_bias"
    has_weights = operation.name.startswith("_scaled_dot_product_attention_math")
    second = f"...{row}*" if has_weights else f"...{row}"
    return form(f"{scores} value:~...*v -> ...{row}v {linear} ; {second}")(operation)

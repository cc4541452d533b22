"""Rules for convolutions, pools and interpolation: rows and channels first, then positions.

Windows extend over the edges of shards, so positions must be whole.
"""

from __future__ import annotations

from dataclasses import replace

from flex_model.layouts.propagation.labels import (
    Input,
    Label,
    Labels,
    Output,
    Placements,
    Term,
    all_but,
    by_mask,
    form,
    leading,
    resolve,
    words,
)
from flex_model.layouts.propagation.operation import Operand, Operation, Shape

# ---- Convolutions --------------------------------------------------------------------------------


class _Convolution:
    """The labels of a convolution: "n" rows, "c" and "o" channels in and out, or "g" groups of both
    if the groups are split: shards of both channels then hold the same groups.
    """

    def __init__(self, operation: Operation):
        self.x: Operand = operation.get("input", operation.get("self"))
        self.weight: Operand = operation["weight"]
        self.is_transposed = operation.name.startswith("conv_transpose")
        if "transposed" in operation.arguments[0]:
            self.is_transposed = operation["transposed"]
        self.rows: Labels = ("n",) if self.x.ndim == self.weight.ndim else ()
        self.channel = len(self.rows)
        self.positions: Labels = (None,) * (self.weight.ndim - 2)
        self.inputs_per_group = self.outputs_per_group = 1
        self.by_group = self._has_split_groups(operation)
        if self.by_group:
            self.of_x: Label = "g"
            self.of_weight: Labels = ("g", None)
            self.of_out: Label = "g"
        elif any(count != 1 for count in operation.by_rank("groups")):
            self.of_x, self.of_weight, self.of_out = None, (None, None), None
        else:
            self.of_x, self.of_out = "c", "o"
            self.of_weight = ("c", "o") if self.is_transposed else ("o", "c")

    def _has_split_groups(self, operation: Operation) -> bool:
        """Whether input channels and weight are split by groups. Without transposition, the
        weight's dim 1 is the number of channels of a group, so no other reading is possible.
        """
        x, weight = self.x.shard, self.weight.shard
        if x is None or weight is None or (x.dim, weight.dim) != (self.channel, 0):
            return False
        if self.is_transposed:
            raise ValueError("groups or a sum: the weight's shape fits both")
        self.inputs_per_group = self.weight.shapes[0][1]
        groups = [shape[x.dim] // self.inputs_per_group for shape in self.x.shapes]
        (self.outputs_per_group,) = {
            shape[0] // count for shape, count in zip(self.weight.shapes, groups)
        }
        return True

    def input(self) -> Input:
        labels = (*self.rows, self.of_x, *self.positions)
        return Input(self.grouped(self.x, self.channel, self.inputs_per_group), labels)

    def weights(self) -> Input:
        labels = (*self.of_weight, *self.positions)
        return Input(self.grouped(self.weight, 0, self.outputs_per_group), labels)

    def bias(self, operand: Operand) -> Input:
        return Input(self.grouped(operand, 0, self.outputs_per_group), (self.of_out,))

    def out(self, operand: Operand) -> Input:
        labels = (*self.rows, self.of_out, *self.positions)
        return Input(self.grouped(operand, self.channel, self.outputs_per_group), labels)

    def grouped(self, operand: Operand, dim: int, count: int) -> Operand:
        """Return the operand with groups in place of channels."""
        if not self.by_group:
            return operand

        def shape_of(shape: Shape) -> Shape:
            if shape[dim] % count:
                raise ValueError("a group is divided")
            return (*shape[:dim], shape[dim] // count, *shape[dim + 1 :])

        shapes = tuple(map(shape_of, operand.shapes))
        shard = operand.shard
        if shard is not None and any(shape[shard.dim] % shard.parts for shape in shapes):
            raise ValueError("a group is divided")
        if getattr(shard, "part_sizes", None) is not None:
            raise ValueError("parts of unequal sizes")
        return replace(operand, shapes=shapes)


def convolution(operation: Operation) -> Placements:
    (made,) = operation.outputs
    c = _Convolution(operation)
    out = c.out(made)
    terms = [Term((c.input(), c.weights()))]
    bias = operation["bias"]
    if bias is not None:
        terms.append(Term((c.bias(bias),)))
    operation = replace(operation, outputs=(out.operand,))
    return resolve(operation, [Output(out.labels, terms=tuple(terms))])


def convolution_backward(operation: Operation) -> Placements:
    """Compute gradients: the input's is a sum over output channels, those of weight and bias over
    rows.
    """
    grad = operation["grad_output"]
    c = _Convolution(operation)
    of_grad, x, weight = c.out(grad), c.input(), c.weights()
    outputs = by_mask(
        operation,
        [
            Output(x.labels, terms=(Term((of_grad, weight), (x,)),)),
            Output(weight.labels, terms=(Term((of_grad, x), (weight,)),)),
            Output((c.of_out,), terms=(Term((of_grad,)),)),
        ],
    )
    dims = [(c.channel, c.inputs_per_group), (0, c.outputs_per_group), (0, c.outputs_per_group)]
    requested = [at for at, is_made in zip(dims, operation["output_mask"]) if is_made]
    made = tuple(c.grouped(operand, *at) for operand, at in zip(operation.outputs, requested))
    return resolve(replace(operation, outputs=made), outputs)


# ---- Windows of each channel ---------------------------------------------------------------------


def over_positions(operation: Operation, linear: bool = False) -> Placements:
    """Compute along the last one, two or three dims, as in the name, of every operand; linear in
    the first.
    """
    count = next(n for n in (1, 2, 3) if f"{n}d" in operation.name)
    inputs = [Input(o, leading(o.ndim, o.ndim - count)) for o in operation.operands]
    terms = (Term((inputs[0],), tuple(inputs[1:])),) if linear else ()
    outputs = [
        Output(leading(made.ndim, made.ndim - count), tuple(inputs), terms)
        for made in operation.outputs
    ]
    return resolve(operation, outputs)


def linear_over_positions(operation: Operation) -> Placements:
    """Compute along positions; ``input_size`` has rows and channels, too, which are the
    gradient's.
    """
    stated = operation.full_sizes.get("input_size", ())
    local = operation.by_rank("input_size")[0] if stated else ()
    if list(stated)[2:] != list(local)[2:]:
        return [None] * len(operation.outputs)
    return over_positions(operation, linear=True)


def columns(operation: Operation) -> Placements:
    """Read windows of each row: ``im2col`` and ``col2im``."""
    (x,) = operation.operands
    (made,) = operation.outputs
    batched = 4 if operation.name == "im2col" else 3
    rows = 1 if x.ndim == batched else 0
    i = Input(x, leading(x.ndim, rows))
    return resolve(operation, [Output(leading(made.ndim, rows), terms=(Term((i,)),))])


def shuffle_channels(operation: Operation) -> Placements:
    (x,) = operation.operands
    i = Input(x, all_but(x.ndim, 1))
    return resolve(operation, [Output(i.labels, terms=(Term((i,)),))])


def grid_sampler(operation: Operation) -> Placements:
    """Sample an output position for each of the grid's."""
    x, grid = operation["input"], operation["grid"]
    positions = tuple(range(x.ndim - 2))
    of_x = Input(x, ("n", "c", *(None,) * len(positions)))
    of_grid = Input(grid, ("n", *positions, None))
    return resolve(operation, [Output(("n", "c", *positions), terms=(Term((of_x,), (of_grid,)),))])


def grid_sampler_backward(operation: Operation) -> Placements:
    """Compute gradients: the input's is a sum over the grid's positions, the grid's one over
    channels.
    """
    grad, x, grid = (operation[name] for name in ("grad_output", "input", "grid"))
    positions = tuple(range(x.ndim - 2))
    of_grad = Input(grad, ("n", "c", *positions))
    of_x = Input(x, ("n", "c", *(None,) * len(positions)))
    of_grid = Input(grid, ("n", *positions, None))
    terms = (Term((of_grad,), (of_x, of_grid)),)
    outputs = [Output(of_x.labels, terms=terms), Output(of_grid.labels, terms=terms)]
    return resolve(operation, by_mask(operation, outputs))


def affine_grid(operation: Operation) -> Placements:
    """Make a grid for each row's matrix."""
    (theta,) = operation.operands
    (made,) = operation.outputs
    stated = operation.full_sizes.get("size", ())
    if stated and list(stated)[1:] != list(operation.by_rank("size")[0])[1:]:
        return [None]
    i = Input(theta, leading(theta.ndim, 1))
    return resolve(operation, [Output(leading(made.ndim, 1), terms=(Term((i,)),))])


# ---- Distances -----------------------------------------------------------------------------------


def similarity(operation: Operation) -> Placements:
    """Compare two tensors that are broadcast, along a dim."""
    a, b = operation["x1"], operation["x2"]
    ndim = max(a.ndim, b.ndim)
    dim = operation.get("dim", -1) % ndim
    labels = all_but(ndim, dim)
    inputs = tuple(Input(o, labels[ndim - o.ndim :], broadcasts=True) for o in (a, b))
    keeps = operation.get("keepdim", False)
    after = labels if keeps else tuple(label for label in labels if label is not None)
    return resolve(operation, [Output(after, inputs)])


def weight_norm(operation: Operation) -> Placements:
    """Normalize over all dims but one, which weights and norms have."""
    first = operation.operands[0]
    dim = operation["dim"] % first.ndim
    labels = tuple("w" if d == dim else None for d in range(first.ndim))
    inputs = tuple(Input(operand, labels) for operand in operation.operands)
    return resolve(operation, [Output(labels, inputs) for _ in operation.outputs])


_POOLS = words(
    """
max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices
max_pool3d_with_indices adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
"""
)

_LINEAR_WINDOWS = words(
    """
avg_pool1d avg_pool2d avg_pool3d avg_pool2d_backward avg_pool3d_backward
adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
_adaptive_avg_pool2d _adaptive_avg_pool3d
_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward
adaptive_max_pool2d_backward adaptive_max_pool3d_backward
max_pool2d_with_indices_backward max_pool3d_with_indices_backward
reflection_pad1d reflection_pad2d reflection_pad3d
replication_pad1d replication_pad2d replication_pad3d
reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward
replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward
upsample_nearest1d upsample_nearest2d upsample_nearest3d
_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d
_upsample_bilinear2d_aa _upsample_bicubic2d_aa
"""
)

_UPSAMPLE_BACKWARDS = words(
    """
upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward
_upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward
_upsample_nearest_exact3d_backward upsample_linear1d_backward upsample_bilinear2d_backward
upsample_bicubic2d_backward upsample_trilinear3d_backward
_upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward
"""
)

RULES = {
    **dict.fromkeys(_POOLS, over_positions),
    **dict.fromkeys(_LINEAR_WINDOWS, linear_over_positions),
    "im2col": columns,
    "col2im": columns,
    "pixel_shuffle": form("self:...*** -> ...*** = self"),
    "pixel_unshuffle": form("self:...*** -> ...*** = self"),
    "channel_shuffle": shuffle_channels,
    "native_channel_shuffle": shuffle_channels,
    **dict.fromkeys(words("grid_sampler grid_sampler_2d grid_sampler_3d"), grid_sampler),
    "grid_sampler_2d_backward": grid_sampler_backward,
    "grid_sampler_3d_backward": grid_sampler_backward,
    "cdist": form("x1:~...p* x2:~...r* -> ...pr"),
    "_cdist_forward": form("x1:~...p* x2:~...r* -> ...pr"),
    "cosine_similarity": similarity,
    "pairwise_distance": similarity,
    **dict.fromkeys(
        words("_weight_norm _weight_norm_interface _weight_norm_interface_backward"),
        weight_norm,
    ),
}

# The number of groups follows from the weight's shape, the sizes of gradients from others.
RULES_OF_GROUPS = {
    **dict.fromkeys(
        words(
            "convolution _convolution mkldnn_convolution conv1d conv2d conv3d conv_transpose1d "
            "conv_transpose2d conv_transpose3d"
        ),
        convolution,
    ),
    "convolution_backward": convolution_backward,
}

RULES_OF_INPUT_SIZES = {
    **dict.fromkeys(_UPSAMPLE_BACKWARDS, linear_over_positions),
    "affine_grid_generator": affine_grid,
}

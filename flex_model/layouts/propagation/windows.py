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


# ---- Windows of each channel ---------------------------------------------------------------------


def over_positions(operation: Operation, linear: bool = False) -> Placements:
    """Compute along the last one, two or three dims, as in the name."""
    (x,) = operation.operands
    count = next(n for n in (1, 2, 3) if f"{n}d" in operation.name)
    i = Input(x, leading(x.ndim, x.ndim - count))
    labels, terms = i.labels, (Term((i,)),) if linear else ()
    return resolve(operation, [Output(labels, (i,), terms) for _ in operation.outputs])


def linear_over_positions(operation: Operation) -> Placements:
    return over_positions(operation, linear=True)


def columns(operation: Operation) -> Placements:
    """Take the windows of each row (``im2col``), or add them up (``col2im``)."""
    (x,), (made,) = operation.operands, operation.outputs
    rows = min(x.ndim, made.ndim) - 2
    i = Input(x, leading(x.ndim, rows))
    return resolve(operation, [Output(leading(made.ndim, rows), terms=(Term((i,)),))])


def grid_sampler(operation: Operation) -> Placements:
    """Sample an output position for each of the grid's."""
    x, grid = operation["input"], operation["grid"]
    positions = tuple(range(x.ndim - 2))
    of_x = Input(x, ("n", "c", *(None,) * len(positions)))
    of_grid = Input(grid, ("n", *positions, None))
    return resolve(operation, [Output(("n", "c", *positions), terms=(Term((of_x,), (of_grid,)),))])


_POOLS = words(
    """
max_pool2d_with_indices max_pool3d_with_indices
adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
"""
)

_LINEAR = words(
    """
avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
upsample_nearest1d upsample_nearest2d upsample_nearest3d
_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d
_upsample_bilinear2d_aa _upsample_bicubic2d_aa
reflection_pad1d reflection_pad2d reflection_pad3d
replication_pad1d replication_pad2d replication_pad3d
"""
)

RULES = {
    **dict.fromkeys(_POOLS, over_positions),
    **dict.fromkeys(_LINEAR, linear_over_positions),
    **dict.fromkeys(words("im2col col2im"), columns),
    **dict.fromkeys(words("pixel_shuffle pixel_unshuffle"), form("self:...*** -> ...*** = self")),
    "channel_shuffle": form("self:n*... -> n*... = self"),
    **dict.fromkeys(words("grid_sampler_2d grid_sampler_3d"), grid_sampler),
    "_cdist_forward": form("x1:~...p* x2:~...r* -> ...pr"),
}

# The number of groups follows from the weight's shape.
RULES_OF_GROUPS = dict.fromkeys(
    words(
        "convolution _convolution mkldnn_convolution conv1d conv2d conv3d conv_transpose1d "
        "conv_transpose2d conv_transpose3d"
    ),
    convolution,
)

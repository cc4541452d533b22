"""The rule for convolutions: rows and channels first, then positions.

Windows extend over the edges of shards, so positions must be whole.
"""

from __future__ import annotations

from dataclasses import replace

from flex_model.layouts.propagation.operation import Operand, Operation, Shape
from flex_model.layouts.propagation.text_forms import Placements, form, words


def convolution(operation: Operation) -> Placements:
    """Compute channels "o" of channels "c"; or by group, if both are split into groups."""
    name = "input" if "input" in operation.arguments[0] else "self"
    x, weight = operation[name], operation["weight"]
    rows = "n" if x.ndim == weight.ndim else ""
    is_transposed = operation.get("transposed", False)
    of_x, of_weight, out = "c", "co" if is_transposed else "oc", "o"
    shards = x.shard, weight.shard
    if None not in shards and [s.dim for s in shards if s is not None] == [len(rows), 0]:
        if is_transposed:
            raise ValueError("groups or a sum: the weight's shape fits both")
        operation = _by_group(operation, name, len(rows))
        of_x, of_weight, out = "g", "g*", "g"
    elif any(count != 1 for count in operation.by_rank("groups")):
        of_x, of_weight, out = "*", "**", "*"
    return form(
        f"{name}:{rows}{of_x}_ weight:{of_weight}_ bias?:{out} -> {rows}{out}_ "
        f"= {name}*weight + bias"
    )(operation)


def _by_group(operation: Operation, name: str, channel: int) -> Operation:
    """Return the operation on groups in place of channels. The weight's dim 1 is the number of
    input channels of a group, so no other reading is possible.
    """
    x, weight, bias = (operation[n] for n in (name, "weight", "bias"))
    width = weight.shapes[0][1]
    counts = [shape[channel] // width for shape in x.shapes]
    (width_out,) = {shape[0] // count for shape, count in zip(weight.shapes, counts)}
    given = {name: _grouped(x, channel, width), "weight": _grouped(weight, 0, width_out)}
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
    if any(shape[dim] % width for shape in operand.shapes):
        raise ValueError("a group is divided")
    if shard is not None and any(shape[shard.dim] % shard.parts for shape in shapes):
        raise ValueError("a group is divided")
    if shard is not None and shard.part_sizes is not None:
        raise ValueError("parts of unequal sizes")
    return replace(operand, shapes=shapes)


RULES = dict.fromkeys(
    words("convolution _convolution mkldnn_convolution conv1d conv2d conv3d"), convolution
)

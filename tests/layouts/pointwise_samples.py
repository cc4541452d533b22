"""Ways to call the pointwise operations: most are made from their schemas."""

import torch
from torch import Tensor

from flex_model.layouts.propagation import pointwise, rules
from virtual_ranks import Sample, bools, floats, ints, sample

SHAPES = [(4, 6), (6,), (4, 1), (1, 6)]
SCALARS = {
    "dtype": torch.float32,
    "rounding_mode": "trunc",
    "approximate": "none",
    "p": 2,
    "n": 1,
    "training": True,
    "train": True,
    "scale": 0.5,
    "lower": 0.1,
    "upper": 0.3,
    "min": 0.3,
    "max": 0.7,
    "is_result": False,
    "quant_min": 0,
    "quant_max": 127,
    "zero_point": 3,
}
NOT_MADE = {
    "rrelu_with_noise",  # writes into its noise
    "rrelu_with_noise_functional",
    "rrelu_with_noise_backward",
    "log_sigmoid_backward",
    "native_dropout_backward",
    "_masked_scale",
    "to",
    "_add_relu",
    "copysign",
}
# Tagged, but without one result for each element.
NOT_POINTWISE = {"equal", "max", "min"}
RANDOM = {"bernoulli", "normal", "rand_like", "randn_like", "randint_like", "empty_like"}
OTHERS = {"rand_like", "randn_like", "randint_like", "empty_like", "zeros_like", "ones_like"}


def tensor_like(shape: tuple[int, ...], kind: str) -> Tensor:
    if kind == "float":
        return torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1
    if kind == "complex":
        return torch.complex(floats(*shape), floats(*shape))
    return bools(*shape) if kind == "bool" else ints(5, *shape) + 1


def from_schema(op, kind: str) -> Sample | None:
    """A call with tensors of several shapes, or None where torch refuses them."""
    tensors, order = [], []
    given = {}
    for argument in op._schema.arguments:
        described = str(argument.type)
        if described == "Tensor" or (described == "Optional[Tensor]" and argument.name != "noise"):
            is_condition = argument.name in ("condition", "mask")
            # Most operations without broadcasting have one operand that is a tensor.
            shape = SHAPES[len(tensors) % len(SHAPES)] if "backward" not in op.name() else (4, 6)
            if op.name().startswith("aten::fill") and tensors:
                shape = ()
            tensors.append(tensor_like(shape, "bool" if is_condition else kind))
            order.append(argument.name)
        elif argument.name in SCALARS and not argument.has_default_value():
            given[argument.name] = SCALARS[argument.name]
        elif not argument.has_default_value():
            given[argument.name] = 2 if kind == "int" else 0.5
            if "int" in described:
                given[argument.name] = 2
    if not tensors:
        return None

    def program(call, *own):
        return call(**dict(zip(order, own)), **given)

    name = op._schema.name.removeprefix("aten::")
    made = Sample(op, tensors, program, is_random=name.rstrip("_") in RANDOM)
    try:
        made.run(tensors, None)
    except (RuntimeError, TypeError, NotImplementedError, ValueError):
        return None
    return made


def names() -> set[str]:
    """The names of ATen's pointwise operations."""
    every = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    keys = {rules._key(name) for name in every if name.startswith("aten::")}
    tagged = {key for key in keys if pointwise.is_pointwise(key)} - NOT_POINTWISE
    return tagged | set(pointwise.LINEAR) | set(pointwise._UNTAGGED)


def made_from_schemas() -> list[Sample]:
    """A sample of every overload of every pointwise operation that torch runs on the CPU."""
    found = []
    for name in sorted(names() | OTHERS):
        packet = getattr(torch.ops.aten, name, None)
        if packet is None or name in NOT_MADE:
            continue
        for overload in packet.overloads():
            op = getattr(packet, overload)
            is_functional = not any(
                a.alias_info and a.alias_info.is_write for a in op._schema.arguments
            )
            if overload.endswith("out") or not is_functional or not op._schema.returns:
                continue
            for kind in ("float", "int", "bool", "complex"):
                made = from_schema(op, kind)
                if made is not None:
                    found.append(made)
                    break
    return found


X, Y = floats(4, 6), floats(4, 6)

SAMPLES = [
    *made_from_schemas(),
    sample("native_dropout_backward", X, bools(4, 6), program=lambda op, x, m: op(x, m, 2.0)),
    sample("div.Tensor", X, Y + 5),
    sample("div.Tensor_mode", X, Y, program=lambda op, a, b: op(a, b, rounding_mode="floor")),
    sample("add.Tensor", floats(4, 1, 6), floats(3, 6)),
    sample("add.Tensor", ints(9, 4, 6), X),
    sample("add.Scalar", X, program=lambda op, x: op(x, 0)),
    sample("mul.Tensor", X, X.clone(), program=lambda op, a, b: op(a, a)),
    sample("sub.Tensor", X, Y, program=lambda op, a, b: op(a, b, alpha=2)),
    sample("rsub.Tensor", X, Y),
    sample("copysign.Tensor", X, Y),
    sample("where.self", bools(4, 1), floats(4, 6), floats(6)),
    sample("where.ScalarOther", bools(4, 6), X, program=lambda op, m, x: op(m, x, 0.0)),
    sample("where.ScalarOther", bools(4, 6), X, program=lambda op, m, x: op(m, x, 1.0)),
    sample("where.ScalarSelf", bools(4, 6), X, program=lambda op, m, x: op(m, 0.0, x)),
    sample("masked_fill.Scalar", X, bools(4, 6), program=lambda op, x, m: op(x, m, 0.0)),
    sample("masked_fill.Scalar", X, bools(6), program=lambda op, x, m: op(x, m, -1.0)),
    sample("masked_fill.Tensor", X, bools(4, 1), floats()),
    sample("maximum", X, Y),
    sample("max.other", X, floats(6)),
    sample("min.other", X, floats(6)),
    sample("_to_copy", X, program=lambda op, x: op(x, dtype=torch.float32)),
    sample("_to_copy", X * 9, program=lambda op, x: op(x, dtype=torch.int64)),
    sample("_to_copy", X, program=lambda op, x: op(x, dtype=torch.bool)),
    sample("_to_copy", ints(9, 4, 6), program=lambda op, x: op(x, dtype=torch.float64)),
    sample("to.dtype", X, program=lambda op, x: op(x, torch.int32)),
    sample("to.other", X, floats(3, dtype=torch.float32)),
    sample("type_as", X, floats(3, dtype=torch.float32)),
    sample("contiguous", X),
    sample("copy_", floats(4, 6), floats(4, 6)),
    sample("copy_", floats(4, 6), floats(6)),
    sample("copy_", floats(4, 6), floats(4, 1)),
    sample("copy", floats(4, 6), floats()),
    sample("fill_.Scalar", floats(4, 6), program=lambda op, x: op(x, 3.0)),
    sample("fill.Tensor", floats(4, 6), floats()),
    sample("zero_", floats(4, 6)),
    sample("full_like", floats(4, 6), program=lambda op, x: op(x, 7.0)),
    *[
        sample(f"{name}_", floats(4, 6), is_random=True)
        for name in ("normal", "uniform", "random", "exponential", "cauchy", "log_normal")
    ],
    sample("geometric_", floats(4, 6), program=lambda op, x: op(x, 0.5), is_random=True),
    sample("randint_like", floats(4, 6), program=lambda op, x: op(x, 9), is_random=True),
    sample("bernoulli", torch.rand(4, 6), is_random=True),
    sample("add_.Tensor", floats(4, 6), floats(6)),
    sample("mul_.Tensor", floats(4, 6), floats(4, 1)),
    sample("relu_", floats(4, 6)),
    sample("masked_fill_.Scalar", X, bools(4, 6), program=lambda op, x, m: op(x, m, 0.0)),
    sample("native_dropout", X, program=lambda op, x: op(x, 0.5, True), is_random=True),
    sample("dropout", X, program=lambda op, x: op(x, 0.5, True), is_random=True),
    sample("dropout", X, program=lambda op, x: op(x, 0.5, False)),
    sample(
        "feature_dropout", floats(4, 6, 3), program=lambda op, x: op(x, 0.5, True), is_random=True
    ),
    sample(
        "feature_alpha_dropout",
        floats(4, 6, 3),
        program=lambda op, x: op(x, 0.5, True),
        is_random=True,
    ),
    sample("prelu", floats(4, 6), floats(6)),
    sample("prelu", floats(4, 6, 2), floats(1)),
    sample("_prelu_kernel", floats(4, 6), floats(1, 6)),
    sample("view_as_real", tensor_like((4, 6), "complex")),
    sample("view_as_complex", floats(4, 6, 2)),
    sample("complex", X, Y),
    sample("polar", X, Y),
    sample("rrelu_with_noise", floats(4, 6), floats(4, 6), is_random=True),
    sample("rrelu_with_noise_functional", floats(4, 6), floats(4, 6), is_random=True),
    sample("__ilshift__.Tensor", ints(4, 4, 6), ints(4, 4, 6)),
    sample("__ixor__.Tensor", ints(4, 4, 6), ints(4, 6)),
    sample("__and__.Tensor", ints(4, 4, 6), ints(4, 6)),
    sample("_add_relu.Tensor", floats(4, 6), floats(4, 6)),
]

"""Ways to call what keeps the elements: views, slices, joining, padding."""

import torch

from product_samples import on
from virtual_ranks import floats, ints, sample

X, Z = floats(4, 6), floats(2, 4, 6)
V = floats(2, 4, 12)


def to_sizes(name, x, make, **more):
    """To sizes that the program makes of the tensor's own."""
    argument = "shape" if name == "reshape" else "size"
    return sample(
        name,
        x,
        program=lambda op, own: op(own, make(*own.shape)),
        sizes=(argument,),
        unstated="data",
        **more,
    )


VIEWS = [
    to_sizes("view", x, make)
    for x, make in [
        (V, lambda b, s, h: (b * s, h)),
        (V, lambda b, s, h: (-1,)),
        (V, lambda b, s, h: (b, -1)),
        (V, lambda b, s, h: (b, s, h // 2, 2)),
        (V, lambda b, s, h: (b, s, 2, h // 2)),
        (V, lambda b, s, h: (b, s, -1, 2)),
        (V, lambda b, s, h: (b, 1, s, h)),
        (V, lambda b, s, h: (b, s // 2, 2, h)),
        (V, lambda b, s, h: (b, 2, s // 2, h)),
        (floats(4, 2, 3), lambda b, s, h: (2, b // 2, s, h)),
        (floats(4, 2, 3), lambda b, s, h: (b // 2, 2, s, h)),
        (floats(1, 4, 6), lambda b, s, h: (s, h)),
        (floats(1, 1, 6), lambda b, s, h: (b, s, -1)),
        (floats(4, 1, 6), lambda b, s, h: (b, h)),
        (floats(2, 3, 4, 2), lambda b, n, s, d: (b, n, s * d)),
        (floats(2, 3, 4, 2), lambda b, n, s, d: (b * n, s, d)),
        (floats(8, 3, 3), lambda bn, s, t: (2, bn // 2, s, t)),
        (floats(8, 3, 3), lambda bn, s, t: (bn // 4, 4, s, t)),
        (floats(4), lambda b: (1, b)),
        (floats(4), lambda b: (b // 2, 2)),
    ]
]

# The same rule.
VIEWS += [
    to_sizes(name, V, make)
    for name in ("reshape", "_unsafe_view")
    for make in (lambda b, s, h: (b * s, h), lambda b, s, h: (b, s, -1, 2))
]

# Sizes that are the same in both programs, whatever the ranks hold.
LITERAL = [
    sample(
        "view",
        x,
        program=lambda op, own, sizes=sizes: op(own, sizes),
        sizes=("size",),
        unstated="data",
    )
    for x, sizes in [
        (floats(4, 6), (-1, 3)),
        (floats(4, 6), (4, -1)),
        (floats(4, 6), (2, -1)),
        (floats(4, 6), (-1, 1)),
        (floats(4, 6), (4, -1, 3)),
        (floats(4, 6), (4, 3, -1)),
        (floats(2, 4, 6), (2, -1, 6)),
        (floats(2, 4, 6), (-1, 4, 3)),
        (floats(2, 4, 6), (2, -1)),
    ]
]

RESHAPING = [
    *VIEWS,
    *LITERAL,
    *[
        on("flatten.using_ints", floats(2, 4, 3, 2), args=dims)
        for dims in [(0, -1), (1, 2), (0, 1), (2, 3), (1, 1)]
    ],
    on("flatten.using_ints", floats(4), args=(0, -1)),
    sample("ravel", floats(4, 6)),
    *[
        sample(
            "unflatten.int",
            V,
            program=lambda op, x, dim=dim, sizes=sizes: op(x, dim, sizes(x.shape[2])),
            sizes=("sizes",),
            unstated="data",
        )
        for dim, sizes in [
            (2, lambda h: [-1, 2]),
            (2, lambda h: [h // 2, 2]),
            (2, lambda h: [2, h // 2]),
            (2, lambda h: [-1, 6]),
            (1, lambda h: [2, 2]),
        ]
    ],
    sample("view_as", floats(2, 4, 6), floats(8, 6)),
    sample("view_as", floats(2, 4, 6), floats(2, 4, 3, 2)),
    sample("reshape_as", floats(2, 4, 6), floats(2, 24)),
    on("view.dtype", X, args=(torch.int64,)),
    on("view.dtype", X, args=(torch.float32,)),
    sample(
        "_reshape_alias",
        V,
        sizes=("size",),
        program=lambda op, x: op(
            x.contiguous(), [x.shape[0], x.shape[1] * x.shape[2]], [x.shape[1] * x.shape[2], 1]
        ),
    ),
]

MOVING = [
    *[on("permute", Z, args=(d,)) for d in ([2, 0, 1], [0, -1, 1])],
    *[on("transpose.int", Z, args=d) for d in ((0, 1), (1, -1))],
    on("swapaxes", Z, args=(0, 2)),
    on("swapdims", Z, args=(0, 2)),
    sample("t", X),
    sample("t", floats(6)),
    sample("numpy_T", X),
    sample("mT", Z),
    sample("mH", Z),
    sample("adjoint", Z),
    on("movedim.int", Z, args=(0, 2)),
    on("movedim.intlist", Z, args=([0, 1], [2, 0])),
    on("moveaxis.int", Z, args=(-1, 0)),
    *[on("unsqueeze", Z, args=(d,)) for d in (0, 1, -1)],
    sample("squeeze", floats(4, 1, 6)),
    *[on("squeeze.dim", floats(4, 1, 6), args=(d,)) for d in (0, 1)],
    on("squeeze.dims", floats(4, 1, 6, 1), args=([1, 3],)),
    on("squeeze.dims", floats(4, 1, 6, 1), args=([0, 1],)),
    *[on("diagonal", Z, args=a) for a in ((0, 0, 1), (1, 1, 2), (0, 0, 2))],
    *[on("diag_embed", X, args=a) for a in ((), (1, 0, 1))],
    *[on("unfold", Z, args=(d, 2, 1)) for d in (0, 2)],
    *[on("flip", Z, args=(d,)) for d in ([0], [1, 2], [])],
    *[on("roll", Z, args=a) for a in (([1], [0]), ([1], [2]), ([1],), ([1, 2], [0, 1]))],
    *[on("tril", z) for z in (X, Z)],
    on("triu", Z, args=(1,)),
    on("constant_pad_nd", Z, args=([1, 1],)),
    on("constant_pad_nd", Z, args=([0, 0, 1, 0], 2.0)),
    on("constant_pad_nd", Z, args=([0, -1, 0, 0, 1, 0],)),
    on("pad", Z, args=([1, 1], "constant", 0.0)),
    on("pad", Z, args=([1, 1], "reflect")),
    on("pad", Z, args=([1, 1], "circular")),
    *[on("repeat", X, args=(r,)) for r in ([2, 1], [1, 3], [2, 1, 1], [1, 1])],
    *[
        sample(name, x, floats(4, 3), program=program, sizes=("repeats",), unstated=None)
        for name, program in (
            ("repeat", lambda op, x, rows: op(x, (rows.shape[0], 1, 1))),
            ("repeat_interleave.self_int", lambda op, x, rows: op(x, rows.shape[0], 0)),
        )
        for x in (floats(1, 3), floats(2, 3), floats(1, 2, 3))
    ],
    *[on("tile", X, args=(r,)) for r in ([2], [3, 1], [2, 1, 1])],
    *[on("repeat_interleave.self_int", X, args=(2, d)) for d in (0, 1, None)],
    *[
        sample(
            "repeat_interleave.self_Tensor",
            X,
            ints(3, size) + 1,
            program=lambda op, x, n, d=d: op(x, n, d),
        )
        for d, size in ((0, 4), (1, 6))
    ],
]


def expanding(x, make):
    return sample("expand", x, program=lambda op, own: op(own, make(*own.shape)), sizes=("size",))


EXPANDING = [
    expanding(floats(1, 4, 6), lambda a, b, c: (3, b, c)),
    expanding(floats(1, 4, 6), lambda a, b, c: (3, -1, -1)),
    expanding(floats(4, 6), lambda a, b: (2, a, b)),
    expanding(floats(4, 1, 6), lambda a, b, c: (a, 5, c)),
    expanding(floats(4, 6), lambda a, b: (4, 6)),
    sample("expand_as", floats(1, 6), floats(4, 6)),
    sample("expand_as", floats(6), floats(2, 4, 6)),
]


def own_part(dim, ranks=None):
    """Each rank takes its own part of a tensor that all have; the unsharded program takes all."""

    def program(op, rank, x):
        size, at = x.shape[dim], rank.index
        if at is None:
            return op(x, dim, 0, size)
        pieces = ranks or rank.count
        at = at * pieces // rank.count
        return op(x, dim, at * size // pieces, (at + 1) * size // pieces)

    return program


def own_narrow(op, rank, x):
    at = rank.index
    if at is None:
        return op(x, 1, 0, x.shape[1])
    start, end = (i * x.shape[1] // rank.count for i in (at, at + 1))
    return op(x, 1, start, end - start)


W = floats(4, 12)

SLICING = [
    *[on("select.int", Z, args=a) for a in ((0, 1), (1, -1), (2, 0))],
    *[on("unbind.int", Z, args=(d,)) for d in (0, 1)],
    *[
        on("slice.Tensor", Z, args=a, sizes=("start", "end"), unstated=None)
        for a in ((0, 0, 1), (1, 1, 3), (2, 2), (2, -3, -1))
    ],
    *[on("slice.Tensor", Z, args=a) for a in ((0,), (1, 0, 9223372036854775807), (2, 0, 100))],
    on("slice.Tensor", Z, args=(2, 0, 6)),
    # As much as each of two ranks holds, and as a part of three.
    on("slice.Tensor", Z, args=(2, 0, 3), sizes=("start", "end"), unstated=None),
    on("slice.Tensor", Z, args=(2, 0, 2), sizes=("start", "end"), unstated=None),
    on("slice.Tensor", Z, args=(2, 0, 6, 2)),
    sample("slice.Tensor", Z, program=lambda op, x: op(x, 2, 0, x.shape[2]), sizes=("end",)),
    sample(
        "slice.Tensor",
        W,
        program=lambda op, x: op(x, 1, 0, x.shape[1] // 2),
        sizes=("end",),
        unstated=None,
    ),
    sample(
        "slice.Tensor",
        W,
        program=lambda op, x: op(x, 1, x.shape[1] // 3, x.shape[1]),
        sizes=("start", "end"),
    ),
    *[
        sample("slice.Tensor", W, program=own_part(d), of_rank=True, unstated="whole")
        for d in (0, 1)
    ],
    sample("slice.Tensor", W, program=own_part(1, 2), of_rank=True, unstated="whole"),
    sample(
        "narrow", Z, program=lambda op, x: op(x, 1, 1, 2), sizes=("start", "length"), unstated=None
    ),
    sample("narrow", Z, program=lambda op, x: op(x, 2, 0, x.shape[2]), sizes=("length",)),
    sample(
        "narrow",
        W,
        program=lambda op, x: op(x, 1, 0, x.shape[1] // 2),
        sizes=("length",),
        unstated=None,
    ),
    sample("narrow", W, program=own_narrow, of_rank=True, unstated="whole"),
    *[on(n, W, args=(2, d)) for n in ("chunk", "unsafe_chunk") for d in (0, 1)],
    on("chunk", W, args=(3, 1)),
    on("chunk", floats(4, 9), args=(2, 1)),
    on("tensor_split.sections", W, args=(2, 1)),
    on("tensor_split.sections", W, args=(3, 1)),
    on("tensor_split.indices", W, args=([2, 3], 1)),
    *[
        sample(
            n, W, program=lambda op, x, k=k, d=d: op(x, x.shape[d] // k, d), sizes=("split_size",)
        )
        for n in ("split.Tensor", "unsafe_split.Tensor")
        for k, d in ((2, 0), (2, 1), (3, 1))
    ],
    on("split.Tensor", W, args=(4, 1)),
    on("split.Tensor", W, args=(2, 0)),
    *[
        sample(
            n,
            W,
            program=lambda op, x, d=d: op(x, [x.shape[d] // 2, x.shape[d] // 2], d),
            sizes=("split_sizes",),
        )
        for n in ("split_with_sizes", "unsafe_split_with_sizes")
        for d in (0, 1)
    ],
    sample(
        "split_with_sizes",
        W,
        program=lambda op, x: op(x, [x.shape[1] // 3, x.shape[1] - x.shape[1] // 3], 1),
        sizes=("split_sizes",),
    ),
]


def joining(name, *tensors, dim):
    return sample(name, *tensors, program=lambda op, *own: op(list(own), dim))


JOINING = [
    *[joining("cat", floats(4, 6), floats(4, 6), dim=d) for d in (0, 1, -1)],
    joining("cat", floats(4, 6), floats(4, 12), dim=1),
    joining("cat", floats(4, 6), floats(4, 6), floats(4, 6), dim=1),
    joining("cat", floats(4, 8), floats(4, 12), dim=1),  # two parts beside three, as wide
    joining("cat", floats(0), floats(4, 6), dim=1),
    joining("cat", floats(4), floats(4), dim=0),
    joining("concat", floats(4, 6), floats(4, 6), dim=1),
    joining("concatenate", floats(4, 6), floats(4, 6), dim=1),
    *[joining("stack", floats(4, 6), floats(4, 6), dim=d) for d in (0, 1, -1)],
    *[
        joining("pad_sequence", floats(4, 6), floats(3, 6), dim=batch_first)
        for batch_first in (0, 1)
    ],
]

SAMPLES = [*RESHAPING, *MOVING, *EXPANDING, *SLICING, *JOINING]

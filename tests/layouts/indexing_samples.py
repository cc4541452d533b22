"""Ways to read and write at indices that are tensors."""

import torch

from product_samples import on
from virtual_ranks import bools, floats, ints, sample

X, Z = floats(4, 6), floats(2, 4, 6)


def indexed(x, *indices, name="index.Tensor"):
    """``x[indices]``, None for a whole dim."""

    def program(op, own, *given):
        given = iter(given)
        return op(own, [None if i is None else next(given) for i in indices])

    return sample(name, x, *(i for i in indices if i is not None), program=program)


def put(x, values, *indices, accumulate=False, name="index_put"):
    def program(op, own, values, *given):
        given = iter(given)
        return op(own, [None if i is None else next(given) for i in indices], values, accumulate)

    return sample(name, x, values, *(i for i in indices if i is not None), program=program)


def at(name, x, dim, *tensors, args=(), **kwargs):
    """Operations called with ``dim`` behind the first tensor."""
    return sample(
        name, x, *tensors, program=lambda op, own, *rest: op(own, dim, *rest, *args, **kwargs)
    )


ORDER = torch.tensor([2, 0, 3, 1])

READING = [
    sample("embedding", floats(8, 6), ints(8, 4, 6)),
    sample("embedding", floats(8, 6), ints(8, 4)),
    indexed(Z, ints(2, 4)),
    indexed(Z, None, ints(4, 6)),
    indexed(Z, None, None, ints(6, 2, 2)),
    indexed(Z, ints(2, 4), ints(4, 4)),
    indexed(Z, ints(2, 4, 1), ints(4, 6)),
    indexed(Z, ints(2, 4), None, ints(6, 4)),
    indexed(Z, bools(2)),
    indexed(Z, bools(2, 4)),
    indexed(Z, None, bools(4)),
    indexed(X, ints(4, 4), name="_unsafe_index.Tensor"),
    *[at("index_select", Z, d, ints(n, 4)) for d, n in ((0, 2), (1, 4), (-1, 6))],
    *[at("gather", Z, d, ints(n, 2, 4, 6)) for d, n in ((0, 2), (1, 4), (-1, 6))],
    at("gather", Z, 1, ints(4, 2, 3, 6)),
    at("gather", Z, 1, ints(4, 1, 3, 6)),
    sample("take_along_dim", X, ints(4, 4, 6), program=lambda op, x, i: op(x, i, 0)),
    sample("take_along_dim", X, ints(4, 2, 1), program=lambda op, x, i: op(x, i, 0)),
    sample("take_along_dim", X, ints(24, 3)),
    sample("take", X, ints(24, 4, 3)),
    on("one_hot", ints(6, 4, 6), args=(6,)),
    on("one_hot", ints(6, 4, 6), args=(-1,)),
]

WRITING = [
    put(Z, floats(4, 4, 6), ints(2, 4)),
    put(Z, floats(4, 6), torch.tensor([1, 0]), accumulate=True),
    put(Z, floats(6), None, ORDER),
    put(Z, floats(), None, torch.tensor([1])),
    put(X, floats(4, 6), ORDER, name="_unsafe_index_put"),
    put(X.clone(), floats(4, 6), ORDER, name="_index_put_impl_"),
    put(X, floats(), bools(4, 6)),
    put(Z, floats(1), None, bools(4), accumulate=True),
    put(X, floats(), bools(4)),
    put(Z, floats(6), bools(2, 4)),
    put(Z, floats(1, 6), bools(2, 4)),
    put(Z, floats(4, 6), bools(2)),
    put(Z, floats(2, 1, 6), None, bools(4)),
    put(Z, floats(1, 1), None, bools(4, 6)),
    *[
        at(name, X, d, ints(n, 4, 6), floats(4, 6))
        for name in ("scatter_add",)
        for d, n in ((0, 4), (1, 6))
    ],
    at("scatter.src", X, 0, X.argsort(0), floats(4, 6)),
    at("scatter.src", X, 1, X.argsort(1), floats(4, 6)),
    at("scatter.value", X, 1, ints(6, 4, 6), args=(0.0,)),
    at("scatter.value", X, 1, ints(6, 4, 6), args=(2.0,)),
    at("scatter.reduce", X, 1, ints(6, 4, 6), floats(4, 6), reduce="add"),
    at("scatter.reduce", X, 1, X.argsort(1), floats(4, 6), reduce="multiply"),
    at("scatter_reduce.two", X, 1, ints(6, 4, 6), floats(4, 6), args=("sum",)),
    at("scatter_reduce.two", X, 1, ints(6, 4, 6), floats(4, 6), args=("amax",)),
    at("scatter_reduce.two", X, 1, ints(6, 4, 6), floats(4, 6), args=("mean",)),
    at("index_add", X, 0, ints(4, 4), floats(4, 6)),
    at("index_add", X, 1, ints(6, 3), floats(4, 3), alpha=2),
    at("index_copy", X, 0, ORDER, floats(4, 6)),
    at("index_copy", X, 1, torch.tensor([5, 2]), floats(4, 2)),
    at("index_fill.int_Scalar", X, 0, ints(4, 2), args=(0.0,)),
    at("index_fill.int_Scalar", X, 1, ints(4, 2), args=(3.0,)),
    at("index_fill.int_Tensor", X, 1, ints(4, 2), floats()),
    at("index_reduce", X, 1, ints(6, 3), floats(4, 3), args=("amax",)),
    sample("slice_scatter", X, floats(2, 6), program=lambda op, x, s: op(x, s, 0, 1, 3)),
    sample("slice_scatter", X, floats(4, 2), program=lambda op, x, s: op(x, s, 1, 0, 2)),
    sample(
        "slice_backward", floats(2, 6), program=lambda op, g: op(g, (4, g.shape[1]), 0, 1, 3, 1)
    ),
    sample("slice_backward", floats(4, 2), program=lambda op, g: op(g, (len(g), 6), 1, 0, 2, 1)),
    sample("select_backward", floats(6), program=lambda op, g: op(g, (4, len(g)), 0, 1)),
    sample("select_backward", floats(4), program=lambda op, g: op(g, (len(g), 6), 1, 1)),
    sample("select_scatter", X, floats(6), program=lambda op, x, s: op(x, s, 0, 1)),
    sample("select_scatter", X, floats(4), program=lambda op, x, s: op(x, s, 1, 1)),
]

SAMPLES = [*READING, *WRITING]

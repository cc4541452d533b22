"""Ways to call convolutions, pools, interpolation, distances and recurrent layers."""

import torch
import torch.nn.functional as F

from product_samples import on
from virtual_ranks import floats, sample


def convolving(name, x, weight, *bias, transposed=False, groups=None, positions=1):
    """``groups`` says how many there are, from the local shapes."""

    def program(op, x, w, *b):
        given = {"groups": groups(x, w)} if groups else {}
        if name in ("convolution", "_convolution"):
            count = given.get("groups", 1)
            one, none = [1] * positions, [0] * positions
            bias = b[0] if b else None
            more = (False, False, False, False) if name == "_convolution" else ()
            return op(x, w, bias, one, none, one, transposed, none, count, *more)
        return op(x, w, *b, **given)

    return sample(name, x, weight, *bias, program=program, takes_empty=False)


def by_weight(x, w):
    return x.shape[1] // w.shape[1]


X1, X2 = floats(4, 6, 5), floats(2, 4, 5, 5)

CONVOLUTIONS = [
    convolving("convolution", X1, floats(8, 6, 3)),
    convolving("convolution", X1, floats(8, 6, 3), floats(8)),
    convolving("convolution", X1, floats(6, 1, 3), floats(6), groups=by_weight),
    convolving("convolution", floats(2, 8, 5), floats(4, 2, 3), groups=by_weight),
    convolving("convolution", floats(2, 8, 5), floats(8, 2, 3), floats(8), groups=by_weight),
    convolving("convolution", X1, floats(4, 3, 3), groups=lambda x, w: 2),
    convolving("convolution", X1, floats(6, 8, 3), floats(8), transposed=True),
    convolving("convolution", X1, floats(6, 4, 3), transposed=True, groups=lambda x, w: 2),
    convolving("convolution", X2, floats(6, 4, 2, 2), floats(6), positions=2),
    convolving("_convolution", X1, floats(8, 6, 3), floats(8)),
    convolving("conv1d", X1, floats(8, 6, 3), floats(8)),
    convolving("conv1d", floats(6, 5), floats(8, 6, 3), floats(8)),
    convolving("conv1d", X1, floats(6, 1, 3), groups=by_weight),
    convolving("conv2d", X2, floats(6, 4, 2, 2), floats(6)),
    convolving("conv3d", floats(2, 4, 3, 3, 3), floats(6, 4, 2, 2, 2)),
    convolving("conv_transpose1d", X1, floats(6, 8, 3), floats(8)),
    convolving("conv_transpose2d.input", X2, floats(4, 6, 2, 2)),
    convolving("conv_transpose3d.input", floats(2, 4, 3, 3, 3), floats(4, 6, 2, 2, 2)),
]


P1, P2, P3 = floats(2, 4, 6), floats(2, 4, 6, 6), floats(2, 4, 4, 4, 4)
OF = {1: P1, 2: P2, 3: P3}


def windows():
    for n in (1, 2, 3):
        x = OF[n]
        two = [2] * n
        yield on(f"avg_pool{n}d", x, args=(two,), takes_empty=False)
        yield on(f"max_pool{n}d", x, args=(two,), takes_empty=False)
        yield on(f"max_pool{n}d_with_indices", x, args=(two,), takes_empty=False)
        yield on(f"adaptive_avg_pool{n}d", x, args=(two,), takes_empty=False)
        yield on(f"adaptive_max_pool{n}d", x, args=(two,), takes_empty=False)
        yield on(f"reflection_pad{n}d", x, args=([1] * 2 * n,), takes_empty=False)
        yield on(f"replication_pad{n}d", x, args=([1] * 2 * n,), takes_empty=False)
        nearest = [f"upsample_nearest{n}d", f"_upsample_nearest_exact{n}d"]
        for name in nearest:
            yield on(name, x, args=([5] * n,), takes_empty=False)
    for name, n in (("linear", 1), ("bilinear", 2), ("bicubic", 2), ("trilinear", 3)):
        name = f"upsample_{name}{n}d"
        yield on(name, OF[n], args=([5] * n, False), takes_empty=False)
    for name in ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"):
        yield on(name, P2, args=([5, 5], False), takes_empty=False)
    yield on("upsample_bilinear2d.vec", P2, args=(None, False, [2.0, 2.0]), takes_empty=False)
    yield on("_adaptive_avg_pool2d", P2, args=([2, 2],), takes_empty=False)
    yield on("_adaptive_avg_pool3d", P3, args=([2, 2, 2],), takes_empty=False)
    yield on("avg_pool2d", P2[0], args=([2, 2],), takes_empty=False)
    for n in (2, 3):
        pool = getattr(F, f"max_pool{n}d")
        sizes = ([4] * n, *([[2] * n, [0] * n] if n == 3 else ()))
        at = pool(floats(2, 4, *[4] * n), 2, return_indices=True)
        yield on(f"max_unpool{n}d", *at, args=sizes, takes_empty=False)
        yield sample(
            f"fractional_max_pool{n}d",
            OF[n],
            torch.rand(2, 4, n).double(),
            program=lambda op, x, at, n=n: op(x, [2] * n, [2] * n, at),
            takes_empty=False,
            together=((0, 0), (1, 1)),
        )


def grid(n):
    x, at = OF[n], floats(2, *[3] * n, n)
    return on(f"grid_sampler_{n}d", x, at, args=(0, 0, False), takes_empty=False)


def weight_norm(name, *tensors, dim, together=()):
    def program(op, *own):
        sizes = {t.shape[dim] for t in own}
        if len(sizes) > 1 or any(t.numel() != t.shape[dim] for t in own[-1:]):
            raise ValueError("shapes that don't fit")
        if len({t.shape for t in own if t.numel() != t.shape[dim]}) > 1:
            raise ValueError("shapes that don't fit")
        return op(*own, dim)

    return sample(name, *tensors, program=program, takes_empty=False, together=together)


A, B = floats(2, 4, 6), floats(2, 5, 6)

OTHERS = [
    grid(2),
    grid(3),
    on("grid_sampler", P2, floats(2, 3, 3, 2), args=(0, 0, False), takes_empty=False),
    on("im2col", P2, args=([2, 2], [1, 1], [0, 0], [2, 2]), takes_empty=False),
    on("im2col", P2[0], args=([2, 2], [1, 1], [0, 0], [2, 2]), takes_empty=False),
    on("col2im", floats(2, 8, 9), args=([6, 6], [2, 2], [1, 1], [0, 0], [2, 2]), takes_empty=False),
    on("pixel_shuffle", floats(2, 8, 3, 3), args=(2,), takes_empty=False),
    on("pixel_unshuffle", P2, args=(2,), takes_empty=False),
    on("channel_shuffle", P2, args=(2,), takes_empty=False),
    on("native_channel_shuffle", P2, args=(2,), takes_empty=False),
    sample(
        "affine_grid_generator",
        floats(2, 2, 3),
        sizes=("size",),
        program=lambda op, t: op(t, [t.shape[0], 1, 4, 4], False),
    ),
    sample("cdist", A, B),
    sample("_cdist_forward", A, B, program=lambda op, a, b: op(a, b, 2.0, None)),
    sample("cosine_similarity", A, floats(1, 4, 6)),
    on("cosine_similarity", A, floats(4, 6), args=(-1,)),
    sample("pairwise_distance", A, floats(4, 6)),
    on("pairwise_distance", A, A + 1, kwargs={"keepdim": True}),
    weight_norm("_weight_norm", floats(4, 6), floats(4, 1), dim=0),
    weight_norm("_weight_norm_interface", floats(4, 6), floats(4, 1), dim=0),
    weight_norm("_weight_norm_interface", floats(4, 6), floats(1, 6), dim=1),
]

L, H = 1, 3
SEQUENCE = floats(5, 4, 2)
STATE = floats(L, 4, H)


def look(weights, params):
    if any(w.shape != p.shape for w, p in zip(weights, params)):
        raise ValueError("shapes that don't fit")


def recurrent(name, states, batch_first, gates):
    weights = [floats(gates * H, 2), floats(gates * H, H), floats(gates * H), floats(gates * H)]
    x = SEQUENCE.transpose(0, 1).contiguous() if batch_first else SEQUENCE

    def program(op, x, *rest):
        hx, params = rest[:states], rest[states:]
        look(weights, params)
        rows = x.shape[0 if batch_first else 1]
        if x.shape[-1] != 2 or any(h.shape != (L, rows, H) for h in hx):
            raise ValueError("shapes that don't fit")
        given = list(hx) if name == "lstm" else hx[0]
        return op(x, given, list(params), True, 1, 0.0, False, False, batch_first)

    return sample(
        f"{name}.input",
        x,
        *[STATE] * states,
        *weights,
        program=program,
        takes_empty=False,
        together=((0 if batch_first else 1, *[1] * states, *[None] * 4),),
    )


RECURRENT = [
    *[recurrent("lstm", 2, first, 4) for first in (True, False)],
    recurrent("gru", 1, False, 3),
    recurrent("rnn_tanh", 1, True, 1),
    recurrent("rnn_relu", 1, False, 1),
]

SAMPLES = [*CONVOLUTIONS, *windows(), *OTHERS, *RECURRENT]

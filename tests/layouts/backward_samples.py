"""Ways to call the operations of a backward.

Their kernels trust the shapes of what the forward left, so programs look at them first.
"""

import torch

from product_samples import on
from virtual_ranks import floats, ints, sample


def like(name, *tensors, args=(), same=None, **more):
    """All tensors, or the first so many, must have one shape."""

    def program(op, *own):
        if len({t.shape for t in own[:same]}) > 1:
            raise ValueError("shapes that don't fit")
        return op(*own, *args)

    return sample(name, *tensors, program=program, takes_empty=False, **more)


X, Y, Z = floats(4, 6), floats(4, 6), floats(2, 4, 6)

ALONG = [
    *[
        like(name, Z, Z.softmax(d), args=(d, torch.float64))
        for name in ("_softmax_backward_data", "_log_softmax_backward_data")
        for d in (0, -1)
    ],
    sample(
        "glu_backward",
        floats(4, 3),
        X,
        takes_empty=False,
        program=lambda op, g, x: op(fit(g, (x.shape[0], x.shape[1] // 2)), x, 1),
    ),
    sample(
        "glu_backward",
        floats(2, 6),
        X,
        takes_empty=False,
        program=lambda op, g, x: op(fit(g, (x.shape[0] // 2, x.shape[1])), x, 0),
    ),
    sample(
        "cumprod_backward",
        X,
        Y,
        Y.cumprod(1),
        program=lambda op, g, x, out: op(g, x, 1, fit(out, x.shape)),
    ),
    sample(
        "value_selecting_reduction_backward",
        floats(4),
        ints(6, 4),
        program=lambda op, g, i: op(fit(g, i.shape), 1, i, [i.shape[0], 6], False),
    ),
    sample(
        "value_selecting_reduction_backward",
        floats(1, 6),
        ints(4, 1, 6),
        program=lambda op, g, i: op(fit(g, i.shape), 0, i, [4, i.shape[1]], True),
    ),
]


def fit(tensor, shape):
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError("shapes that don't fit")
    return tensor


SLICES = [
    *[
        sample(
            "slice_backward",
            floats(4, 2),
            sizes=("input_sizes",),
            program=lambda op, g: op(g, [g.shape[0], 6], 1, 1, 3, 1),
        ),
        sample(
            "slice_backward",
            floats(2, 6),
            sizes=("input_sizes",),
            program=lambda op, g: op(g, [4, g.shape[1]], 0, 0, 4, 2),
        ),
        sample(
            "slice_backward",
            floats(4, 12),
            sizes=("input_sizes",),
            program=lambda op, g: op(g, list(g.shape), 1, 0, g.shape[1], 1),
        ),
        sample(
            "slice_backward",
            floats(4, 12),
            sizes=("input_sizes",),
            program=lambda op, g: op(g, [4, 2 * g.shape[1]], 1, 0, g.shape[1], 1),
        ),
    ],
    sample(
        "select_backward",
        floats(4, 6),
        sizes=("input_sizes",),
        program=lambda op, g: op(g, [g.shape[0], 3, g.shape[1]], 1, 2),
    ),
    sample(
        "select_backward",
        floats(6),
        sizes=("input_sizes",),
        program=lambda op, g: op(g, [3, g.shape[0]], 0, -1),
    ),
    sample(
        "unfold_backward",
        floats(4, 5, 2),
        sizes=("input_sizes",),
        program=lambda op, g: op(g, [g.shape[0], 6], 1, 2, 1),
    ),
]


PRELU = [like("_prelu_kernel_backward", X, Y, floats(1, 6), same=2)]


def norm_backward(name, x, shape, mask, affine=True):
    rms = name.startswith("_fused_rms")
    if rms:
        saved = torch.ops.aten._fused_rms_norm(x, shape, None, 1e-5)[1:]
    else:
        saved = torch.ops.aten.native_layer_norm(x, shape, None, None, 1e-5)[1:]
    weights = ([floats(*shape)] if rms else [floats(*shape), floats(*shape)]) if affine else []
    outer = x.ndim - len(shape)

    def program(op, grad, own, *rest):
        left, weights = rest[: len(saved)], rest[len(saved) :]
        fit(grad, own.shape)
        for t in left:
            fit(t, (*own.shape[:outer], *[1] * len(shape)))
        for w in weights:
            fit(w, shape)
        fit(own[(0,) * outer], shape)
        weights = weights or ((None,) if rms else (None, None))
        return op(grad, own, shape, *left, *weights, mask)

    return sample(
        name,
        floats(*x.shape),
        x,
        *saved,
        *weights,
        program=program,
        takes_empty=False,
        together=tuple((d, d, *[d] * len(saved), *[None] * len(weights)) for d in range(outer)),
    )


def group_norm_backward(mask):
    x, groups = floats(4, 6, 3), 2
    _, mean, rstd = torch.ops.aten.native_group_norm(x, None, None, 4, 6, 3, groups, 1e-5)

    def program(op, grad, own, mean, rstd, weight):
        fit(grad, own.shape)
        fit(own[0], (6, 3))
        fit(weight, (6,))
        for t in (mean, rstd):
            fit(t, (own.shape[0], groups))
        return op(grad, own, mean, rstd, weight, own.shape[0], 6, 3, groups, mask)

    return sample(
        "native_group_norm_backward",
        floats(4, 6, 3),
        x,
        mean,
        rstd,
        floats(6),
        program=program,
        takes_empty=False,
        together=((0, 0, 0, 0, None),),
    )


def batch_norm_backward(name, trains, mask=(True, True, True)):
    x = floats(4, 6, 3)
    stats = [
        floats(6),
        torch.rand(6).double() + 0.5,
        x.mean((0, 2)),
        1 / (x.var((0, 2), correction=0) + 1e-5).sqrt(),
    ]

    def program(op, grad, own, weight, *stats):
        fit(grad, own.shape)
        for t in (weight, *stats):
            fit(t, (own.shape[1],))
        return op(grad, own, weight, *stats, trains, 1e-5, list(mask))

    extra = []
    if name == "batch_norm_backward":

        def program(op, grad, own, weight, *rest):
            fit(grad, own.shape)
            for t in (weight, *rest[:-1]):
                fit(t, (own.shape[1],))
            return op(grad, own, weight, *rest[:-1], trains, 1e-5, list(mask), rest[-1])

        extra = [torch.zeros(0, dtype=torch.uint8)]
    return sample(
        name,
        floats(4, 6, 3),
        x,
        floats(6),
        *stats,
        *extra,
        program=program,
        takes_empty=name == "batch_norm_backward",
        together=(
            (1, 1, *[0] * 5, *[None] * len(extra)),
            (0, 0, *[None] * 5, *[None] * len(extra)),
        ),
    )


ALL = [True, True, True]

NORMS = [
    norm_backward("native_layer_norm_backward", Z, [6], ALL),
    norm_backward("native_layer_norm_backward", Z, [4, 6], ALL),
    norm_backward("native_layer_norm_backward", Z, [6], [True, False, True]),
    norm_backward("native_layer_norm_backward", Z, [6], [True, False, False], affine=False),
    group_norm_backward(ALL),
    group_norm_backward([False, True, True]),
    batch_norm_backward("native_batch_norm_backward", True),
    batch_norm_backward("native_batch_norm_backward", False),
    batch_norm_backward("native_batch_norm_backward", True, (True, False, True)),
    batch_norm_backward("batch_norm_backward", True),
    batch_norm_backward("batch_norm_backward", False),
]


REDUCTIONS = (0, 1, 2)
CLASSES, WEIGHT = ints(6, 4), torch.rand(6).double()


def on_classes(name, scores, target, *weight, args):
    def program(op, x, t, *w):
        classes = x.shape[1]
        fit(t, (x.shape[0], *x.shape[2:]))
        for own in w:
            fit(own, (classes,))
        if int(t.max()) >= classes or int(t.min()) < 0:
            raise ValueError("indices out of range")
        return op(x, t, w[0] if w else None, *args)

    return sample(
        name,
        scores,
        target,
        *weight,
        program=program,
        takes_empty=False,
        together=((0, 0, *[None] * len(weight)),),
    )


def nll_backward(name, scores, target, reduction, *weight):
    grad = floats(*target.shape) if reduction == 0 else floats()
    total = torch.rand(()).double() + 1

    def program(op, g, x, t, total, *w):
        fit(t, (x.shape[0], *x.shape[2:]))
        fit(g, t.shape if reduction == 0 else ())
        for own in w:
            fit(own, (x.shape[1],))
        if int(t.max()) >= x.shape[1] or int(t.min()) < 0:
            raise ValueError("indices out of range")
        return op(g, x, t, w[0] if w else None, reduction, -100, total)

    first = 0 if reduction == 0 else None
    return sample(
        name,
        grad,
        scores,
        target,
        total,
        *weight,
        program=program,
        takes_empty=False,
        together=((first, 0, 0, None, *[None] * len(weight)),),
    )


PROBABLE = torch.rand(4, 6).double() * 0.8 + 0.1
IMAGE, PIXELS = floats(4, 6, 2, 3), ints(6, 4, 2, 3)

LOSSES = [
    *[
        on(name, X, Y, args=(r,))
        for name in (
            "mse_loss",
            "l1_loss",
            "smooth_l1_loss",
            "huber_loss",
            "soft_margin_loss",
            "kl_div",
        )
        for r in REDUCTIONS
    ],
    on("mse_loss", X, floats(6), args=(2,)),
    *[on("binary_cross_entropy", PROBABLE, PROBABLE.flip(0), args=(None, r)) for r in REDUCTIONS],
    *[
        on("binary_cross_entropy_with_logits", X, PROBABLE, args=(None, None, r))
        for r in REDUCTIONS
    ],
    *[
        like(name, grad, X, Y, args=args, same=3 if r == 0 else None)
        if r == 0
        else sample(
            name,
            grad,
            X,
            Y,
            program=lambda op, g, x, y, args=args: op(fit(g, ()), x, fit(y, x.shape), *args),
        )
        for r in REDUCTIONS
        for grad in [floats(4, 6) if r == 0 else floats()]
        for name, args in [
            ("mse_loss_backward", (r,)),
            ("smooth_l1_loss_backward", (r, 1.0)),
            ("huber_loss_backward", (r, 1.0)),
            ("soft_margin_loss_backward", (r,)),
        ]
    ],
    *[
        like(
            "binary_cross_entropy_backward",
            floats(4, 6),
            PROBABLE,
            PROBABLE.flip(0),
            args=(None, 0),
        ),
        sample(
            "binary_cross_entropy_backward",
            floats(),
            PROBABLE,
            PROBABLE.flip(0),
            program=lambda op, g, x, y: op(fit(g, ()), x, fit(y, x.shape), None, 1),
        ),
    ],
    *[
        on_classes(name, X, CLASSES, args=(r, -100))
        for name in ("nll_loss", "nll_loss_forward", "nll_loss_nd")
        for r in REDUCTIONS
    ],
    *[on_classes("nll_loss_forward", X, CLASSES, WEIGHT, args=(r, 2)) for r in REDUCTIONS],
    *[
        on_classes(name, IMAGE, PIXELS, args=(r, -100))
        for name in ("nll_loss2d", "nll_loss2d_forward")
        for r in REDUCTIONS
    ],
    *[nll_backward("nll_loss_backward", X, CLASSES, r) for r in REDUCTIONS],
    nll_backward("nll_loss_backward", X, CLASSES, 1, WEIGHT),
    *[nll_backward("nll_loss2d_backward", IMAGE, PIXELS, r) for r in REDUCTIONS],
    *[
        on_classes("cross_entropy_loss", X, CLASSES, args=(r, -100, s))
        for r in REDUCTIONS
        for s in (0.0, 0.1)
    ],
    on_classes("cross_entropy_loss", IMAGE, PIXELS, args=(0, -100)),
    sample("cross_entropy_loss", X, PROBABLE, program=lambda op, x, t: op(x, t, None, 2)),
    sample("cross_entropy_loss", X, PROBABLE, program=lambda op, x, t: op(x, t, None, 0)),
]

SAMPLES = [*ALONG, *SLICES, *PRELU, *NORMS, *LOSSES]

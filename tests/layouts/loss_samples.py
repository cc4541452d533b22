"""Ways to call losses."""

import torch

from product_samples import on
from virtual_ranks import floats, ints, sample


def fit(tensor, shape):
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError("shapes that don't fit")
    return tensor


X, Y = floats(4, 6), floats(4, 6)
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


PROBABLE = torch.rand(4, 6).double() * 0.8 + 0.1
IMAGE, PIXELS = floats(4, 6, 2, 3), ints(6, 4, 2, 3)

SAMPLES = [
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
    *[
        on_classes("cross_entropy_loss", X, CLASSES, args=(r, -100, s))
        for r in REDUCTIONS
        for s in (0.0, 0.1)
    ],
    *[
        on_classes(name, IMAGE[..., None], PIXELS[..., None], WEIGHT, args=(r, 2))
        for name in ("cross_entropy_loss", "nll_loss_nd")
        for r in REDUCTIONS
    ],
    *[
        on("cross_entropy_loss", x, p, args=(None, r, -100, 0.1))
        for r in REDUCTIONS
        for x, p in ((X, PROBABLE), (IMAGE, IMAGE.softmax(1)))
    ],
]

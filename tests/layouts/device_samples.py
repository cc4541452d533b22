"""Ways to call what only GPUs have kernels of. What such an operation computes is written out here,
so that the labels of its rule are checked, if not the kernel.
"""

import torch

from loss_samples import fit
from model_samples import Q, look
from virtual_ranks import Sample, floats


class Written:
    """An operation of ATen with its schema, and another function in place of its kernel."""

    def __init__(self, name, function):
        op = getattr(torch.ops.aten, name).default
        self._schema, self._overloadname, self.tags = op._schema, "", op.tags
        self.function = function

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)


def written(name, function, *tensors, program=None, **more):
    return Sample(Written(name, function), list(tensors), program, takes_empty=False, **more)


def scores_of(q, k, bias):
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return scores if bias is None or bias.numel() == 0 else scores + bias


def attention(q, k, v, bias=None):
    """The result and the logarithms of the sums."""
    for own in (k, v):
        fit(own[:, 0, 0, :1], (q.shape[0], 1))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = scores_of(q, k, bias)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


STATE = [torch.zeros(2), torch.zeros(1), torch.zeros(3), torch.zeros(0)]


def efficient(q, k, v, bias, keeps_sums, *_):
    return (*attention(q, k, v, bias), *STATE[:2])


def flash(q, k, v, *_):
    return (*attention(q, k, v), *STATE)


def cudnn(q, k, v, bias, keeps_sums, *_):
    return (*attention(q, k, v, bias), *STATE)


def overrideable(q, k, v, bias=None, *_):
    return (*attention(q, k, v, bias), *STATE)


K, V = floats(2, 4, 5, 8), floats(2, 4, 5, 8)
FEW = (floats(2, 2, 5, 8), floats(2, 2, 5, 8))
BIAS = floats(1, 4, 6, 5)
NONE = torch.zeros(0, dtype=torch.float64)


def forward(name, function, q, k, v, *bias, tail=()):
    def program(op, q, k, v, *bias):
        look(name, q, k, v)
        takes_bias = name != "_scaled_dot_product_flash_attention"
        given = (bias[0] if bias else None,) if takes_bias else ()
        return op(q, k, v, *given, *tail)

    return written(name, function, q, k, v, *bias, program=program, skips_outputs=(2, 3, 4, 5))


ATTENTION = [
    forward("_scaled_dot_product_efficient_attention", efficient, Q, K, V, tail=(True,)),
    forward("_scaled_dot_product_efficient_attention", efficient, Q, K, V, BIAS, tail=(True,)),
    forward("_scaled_dot_product_flash_attention", flash, Q, K, V),
    forward("_scaled_dot_product_flash_attention", flash, Q, *FEW),
    forward("_scaled_dot_product_cudnn_attention", cudnn, Q, K, V, BIAS, tail=(True,)),
    forward("_scaled_dot_product_fused_attention_overrideable", overrideable, Q, K, V, BIAS),
]


H = 3


def lstm_cell(gates, more, cx, a=None, b=None):
    if gates.shape != more.shape or gates.shape != (len(cx), 4 * cx.shape[1]):
        raise ValueError("shapes that don't fit")
    i, f, g, o = (gates + more + (0 if a is None else a + b)).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def gru_cell(gates, more, hx, a=None, b=None):
    if gates.shape != more.shape or gates.shape != (len(hx), 3 * hx.shape[1]):
        raise ValueError("shapes that don't fit")
    r, z, n = (gates + more).chunk(3, 1)
    hy = z.sigmoid() * hx + (1 - z.sigmoid()) * (n * r.sigmoid()).tanh()
    return hy, torch.cat([gates, more[:, : 2 * hx.shape[1]]], 1)


SAMPLES = [
    *ATTENTION,
    written("_thnn_fused_lstm_cell", lstm_cell, floats(4, 4 * H), floats(4, 4 * H), floats(4, H)),
    written("_thnn_fused_gru_cell", gru_cell, floats(4, 3 * H), floats(4, 3 * H), floats(4, H)),
]

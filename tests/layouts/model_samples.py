"""Ways to call normalization and attention."""

import torch

from virtual_ranks import bools, floats, sample

Z = floats(2, 4, 6)
AFFINE = (floats(6), floats(6))


def layer_norm(name, x, *affine, shape):
    return sample(
        name, x, *affine, program=lambda op, own, *rest: op(own, shape, *rest, *args_of(name, rest))
    )


def args_of(name, rest):
    eps = (1e-5,) if name in ("native_layer_norm", "_fused_rms_norm") else ()
    count = {"native_layer_norm": 2, "_fused_rms_norm": 1}.get(name, 0)
    return (*(None,) * max(0, count - len(rest)), *eps)


def batch_norm(name, x, trains, tail=(), stats=True):
    """Weight, bias and running statistics by channel."""
    c = x.shape[1]
    tensors = (torch.rand(c).double(), floats(c), floats(c), torch.rand(c).double() + 0.5)

    def program(op, own, weight, bias, mean, var):
        # The kernels don't look, and read past the end.
        if any(t.shape != (own.shape[1],) for t in (weight, bias, mean, var)):
            raise ValueError("not as many channels")
        if not stats:
            return op(own, weight, bias, None, None, trains, 0.1, 1e-5, *tail)
        return op(own, weight, bias, mean, var, *trains, 0.1, 1e-5, *tail)

    return sample(
        name, x, *tensors, program=program, takes_empty=False, together=((1, 0, 0, 0, 0),)
    )


N = floats(4, 6, 3)

NORMS = [
    *[layer_norm(n, Z, *AFFINE, shape=[6]) for n in ("layer_norm", "native_layer_norm")],
    *[layer_norm(n, Z, shape=[6]) for n in ("layer_norm", "native_layer_norm")],
    layer_norm("layer_norm", Z, floats(4, 6), floats(4, 6), shape=[4, 6]),
    layer_norm("native_layer_norm", Z, floats(4, 6), floats(4, 6), shape=[4, 6]),
    *[layer_norm(n, Z, floats(6), shape=[6]) for n in ("rms_norm", "_fused_rms_norm")],
    layer_norm("rms_norm", Z, shape=[4, 6]),
    sample("group_norm", N, floats(6), floats(6), program=lambda op, x, w, b: op(x, 2, w, b)),
    sample(
        "native_group_norm",
        N,
        floats(6),
        floats(6),
        program=lambda op, x, w, b: op(x, w, b, x.shape[0], x.shape[1], 3, 2, 1e-5),
    ),
    *[batch_norm("batch_norm", N, (t,), (True,)) for t in (True, False)],
    *[batch_norm("native_batch_norm", N, (t,)) for t in (True, False)],
    *[batch_norm("_native_batch_norm_legit", N, (t,)) for t in (True, False)],
    *[batch_norm("_native_batch_norm_legit_functional", N, (t,)) for t in (True, False)],
    batch_norm("_native_batch_norm_legit_no_training", N, ()),
    batch_norm("_batch_norm_with_update", N, ()),
    batch_norm("_batch_norm_no_update", N, ()),
    batch_norm("instance_norm", N, True, (True,), stats=False),
    batch_norm("instance_norm", N, (True,), (True,)),
    batch_norm("instance_norm", N, (False,), (True,)),
]


def look(name, q, k, v, *mask):
    """The kernels don't, and read past the end or divide by zero."""
    if k.shape[:-1] != v.shape[:-1] or q.shape[-1] != k.shape[-1]:
        raise ValueError("not as many values as keys")
    if name == FLASH:
        if q.shape[:-3] != k.shape[:-3] or q.shape[-3] % k.shape[-3]:
            raise ValueError("not as many rows or heads")
        for given in mask:
            given.expand(*q.shape[:-1], k.shape[-2])


def attention(name, query, key, value, *mask, named_mask=None, **kwargs):
    def program(op, q, k, v, *given):
        look(name, q, k, v, *given)
        if named_mask and given:
            return op(q, k, v, **{named_mask: given[0]}, **kwargs)
        return op(q, k, v, *given, **kwargs)

    return sample(name, query, key, value, *mask, program=program, takes_empty=False)


Q, K, V = floats(2, 4, 6, 8), floats(2, 4, 5, 8), floats(2, 4, 5, 8)
FEW = (floats(2, 2, 5, 8), floats(2, 2, 5, 8))
ONE = (floats(2, 1, 5, 8), floats(2, 1, 5, 8))
SDPA = "scaled_dot_product_attention"
MATH = "_scaled_dot_product_attention_math"
FLASH = "_scaled_dot_product_flash_attention_for_cpu"

ATTENTION = [
    attention(SDPA, Q, K, V),
    attention(SDPA, Q, K, V, floats(6, 5)),
    attention(SDPA, Q, K, V, floats(2, 1, 6, 5)),
    attention(SDPA, Q, K, V, floats(1, 4, 1, 5)),
    attention(SDPA, Q, K, V, bools(2, 1, 1, 5) | True),
    attention(SDPA, Q, floats(2, 4, 6, 8), floats(2, 4, 6, 8), is_causal=True),
    attention(SDPA, Q, *FEW, enable_gqa=True),
    attention(SDPA, floats(2, 8, 6, 8), floats(2, 4, 5, 8), floats(2, 4, 5, 8), enable_gqa=True),
    attention(SDPA, Q, *ONE, enable_gqa=True),
    attention(SDPA, Q, floats(1, 1, 5, 8), floats(1, 1, 5, 8)),
    attention(SDPA, floats(4, 6, 8), floats(4, 5, 8), floats(4, 5, 8)),
    attention(SDPA, floats(6, 8), floats(5, 8), floats(5, 8)),
    attention(MATH, Q, K, V),
    attention(MATH, Q, K, V, floats(6, 5)),
    attention(MATH, Q, *FEW, enable_gqa=True),
    attention(FLASH, Q, K, V),
    attention(FLASH, Q, K, V, floats(2, 1, 6, 5), named_mask="attn_mask"),
    attention(FLASH, Q, floats(2, 4, 6, 8), floats(2, 4, 6, 8), is_causal=True),
]

SAMPLES = [*NORMS, *ATTENTION]

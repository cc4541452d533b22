"""Ways to call kernels that are no operations of torch, by stand-ins that compute the same."""

import inspect
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

import stand_in_kernels
from flex_model.layouts.contracts.opaque_calls import PREFIX
from virtual_ranks import Sample, floats, ints


class Kernel:
    """A function that is called as an operation of this name."""

    tags, _overloadname = (), ""

    def __init__(self, name, function):
        empty = inspect.Parameter.empty
        arguments = [
            SimpleNamespace(
                name=one.name, default_value=None if one.default is empty else one.default
            )
            for one in inspect.signature(function).parameters.values()
        ]
        self._schema = SimpleNamespace(name=PREFIX + name, arguments=arguments)
        self._function = function

    def __call__(self, *args):
        return self._function(*args)


def kernel(name, function, *tensors, program=None, **more):
    return Sample(Kernel(name, function), list(tensors), program, takes_empty=False, **more)


ENCODER = nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), 1).eval()


def encoder(src, src_key_padding_mask):
    with torch.no_grad():
        return ENCODER.to(src.dtype)(src, None, src_key_padding_mask)


# ---- Attention -----------------------------------------------------------------------------------

Q, K, V = floats(2, 5, 4, 6), floats(2, 5, 4, 6), floats(2, 5, 4, 6)
FEW = floats(2, 5, 2, 6), floats(2, 5, 2, 6)  # key and value heads
PACKED = floats(5, 4, 6), floats(5, 4, 6), floats(5, 4, 6)
ENDS = torch.tensor([0, 2, 5])
TOGETHER = ((0, 0, 0), (2, 2, 2), (1, 1, 1))


def forward(op, q, k, v):
    return op(q, k, v, 0.0, 0.4, True, -1, -1, 0.0, None, False)


def forward_3(op, q, k, v):
    return op(q, k, v, None, None, None, 0.4, True)


def varlen(op, q, k, v, ends):
    if int(ends[-1]) != len(q):
        raise ValueError("not the ends of these tokens")
    return op(q, k, v, ends, ends, 3, 3, 0.0, 0.4, True)


def unpadded(query_states, key_states, value_states, attention_mask=None, position_ids=None):
    """Weight only tokens that are no padding."""
    scores = torch.einsum("bqhd,bkhd->bhqk", query_states, key_states) * 0.4
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask[:, None, None], -50.0)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), value_states)


def attention(op, tensors, program, **more):
    return Sample(op, list(tensors), program, skips_outputs=(2, 3), takes_empty=False, **more)


FORWARD = torch.ops.flash_attn._flash_attn_forward.default
FORWARD_3 = torch.ops.flash_attn_3._flash_attn_forward.default
VARLEN = torch.ops.flash_attn._flash_attn_varlen_forward.default
ATTENTION = [
    attention(FORWARD, (Q, K, V), forward, together=TOGETHER),
    attention(FORWARD, (Q, *FEW), forward, together=TOGETHER),
    attention(FORWARD_3, (Q, K, V), forward_3, together=TOGETHER),
    attention(VARLEN, (*PACKED, ENDS), varlen, together=((1, 1, 1, None),)),
    *[
        kernel(f"{package}.FlashAttnFunc", stand_in_kernels.of_rows, Q, K, V, together=TOGETHER)
        for package in ("flash_attn", "flash_attn_interface")
    ],
    *[
        kernel(
            f"{package}.FlashAttnVarlenFunc",
            stand_in_kernels.of_packed,
            *PACKED,
            ENDS,
            program=lambda op, q, k, v, ends: op(q, k, v, ends, ends),
            together=((1, 1, 1, None),),
        )
        for package in ("flash_attn", "flash_attn_interface")
    ],
    kernel("transformers.flash_attention", unpadded, Q, K, V, together=TOGETHER),
    kernel(
        "transformers.flash_attention",
        unpadded,
        Q,
        K,
        V,
        torch.arange(10).reshape(2, 5) % 4 > 0,
        torch.arange(5)[None],
        together=((0, 0, 0, 0, None), (2, 2, 2, None, None)),
    ),
]

# ---- Linear layers of fp8 ------------------------------------------------------------------------

BLOCK = [2, 3]
WEIGHT = (floats(8, 12) * 9).to(torch.float8_e4m3fn)
SCALES, BIAS = floats(4, 4).abs().float(), floats(8)


def linear(input, weight, weight_scale_inv, block_size=None, bias=None, activation_scale=None):
    made = stand_in_kernels.fp8_matmul(input, weight, weight_scale_inv, block_size, torch.float64)
    return made if bias is None else made + bias


def fp8(name, *tensors, block=BLOCK, **more):
    def program(op, input, weight, scale, bias=None):
        return op(input, weight, scale, block, bias)

    return kernel(f"transformers.{name}", linear, *tensors, program=program, atol=1e-3, **more)


# ---- Liger ---------------------------------------------------------------------------------------

X, R, W = floats(2, 5, 6), floats(2, 5, 6), floats(6)
HEADS, COS, SIN = (floats(2, 4, 5, 6), floats(2, 2, 5, 6)), floats(2, 5, 6), floats(2, 5, 6)


def liger(name, *tensors, program=None, **more):
    function = stand_in_kernels.LIGER[name]
    return kernel(f"liger_kernel.Liger{name}Function", function, *tensors, program=program, **more)


SAMPLES = [
    *ATTENTION,
    *[
        fp8(name, X12, WEIGHT, SCALES, *bias, together=together)
        for name in ("fp8_linear", "FP8LinearFunction")
        for X12 in (floats(3, 4, 12),)
        for bias, together in (
            ((), ((2, 1, 1), (None, 0, 0))),
            ((BIAS,), ((2, 1, 1, None), (None, 0, 0, 0))),
        )
    ],
    fp8("fp8_linear", floats(3, 12), WEIGHT, floats().abs().float(), block=None),
    liger("RMSNorm", X, W, program=lambda op, x, w: op(x, w, 1e-6)),
    liger("LayerNorm", X, W, floats(6), program=lambda op, x, w, b: op(x, w, b, 1e-6)),
    liger("FusedAddRMSNorm", X, R, W, program=lambda op, x, r, w: op(x, r, w, 1e-6)),
    liger("Rope", *HEADS, COS, SIN, together=((0, 0, 0, 0), (1, 1, None, None))),
    liger("Rope", *HEADS, COS[:1], SIN[:1], together=((0, 0, None, None),)),
    liger(
        "Qwen2VLMRope",
        *HEADS,
        floats(3, 2, 5, 6),
        floats(3, 2, 5, 6),
        program=lambda op, q, k, cos, sin: op(q, k, cos, sin, [1, 1, 1]),
        together=((0, 0, 1, 1), (1, 1, None, None)),
    ),
    kernel(
        "torch.transformer_encoder",
        encoder,
        floats(4, 5, 6),
        torch.arange(5) >= torch.tensor([[5], [3], [5], [2]]),
        together=((0, 0),),
    ),
    kernel("torch.embedding_bag", F.embedding_bag, ints(8, 4, 3), floats(8, 6)),
    kernel("torch.embedding_bag", F.embedding_bag, ints(8, 4), floats(8, 6), torch.tensor([0, 3])),
    liger("SiLUMul", X, R),
    liger("GELUMul", X, R),
    *[
        sample
        for how in ("mean", "sum")
        for sample in (
            liger(
                "CrossEntropy",
                floats(7, 6),
                ints(6, 7),
                floats(6).abs(),
                program=lambda op, *given, how=how: op(*given, how),
                together=((0, 0, None),),
            ),
            liger(
                "FusedLinearCrossEntropy",
                floats(7, 6),
                floats(9, 6),
                ints(9, 7),
                floats(9),
                program=lambda op, *given, how=how: op(*given, how),
                together=((0, None, 0, None),),
            ),
        )
    ],
]

"""Stand-ins, on the CPU, for kernels that are no operations of torch: flash-attn, Liger, fp8.

They have the names and signatures of the real ones and compute the same, but what they write is
not seen: as of a Triton kernel, their results are new memory of which no operation tells.
"""
# ruff: noqa: N803  names of arguments are those of the kernels

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, rms_norm, silu
from torch.utils._pytree import tree_map_only

# ---- What is not seen ----------------------------------------------------------------------------


def hidden(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor that no operation made."""
    data = tensor.detach().contiguous().clone()
    data = data.reshape(-1).view(torch.uint8).numpy().copy()
    return torch.from_numpy(data).view(tensor.dtype).view(tensor.shape)


def unseen(function, *args):
    """Run a function on copies, and return copies, so that nothing is known of its results."""
    return tree_map_only(Tensor, hidden, function(*tree_map_only(Tensor, hidden, args)))


def make_function(module: str, name: str, function, is_seen: bool = False):
    """Make an ``autograd.Function`` of this name that computes what a function does."""

    def forward(ctx, *args):
        ctx.args = args
        return function(*args) if is_seen else unseen(function, *args)

    def backward(ctx, *grads):
        with torch.enable_grad():
            leaves = [
                arg.detach().requires_grad_() if is_differentiable(arg) else arg for arg in ctx.args
            ]
            made = twin(*leaves)
            made = made if isinstance(made, tuple) else (made,)
            used = [(one, g) for one, g in zip(made, grads) if is_differentiable(one)]
            asked = [leaf for leaf in leaves if is_differentiable(leaf)]
            found = iter(
                torch.autograd.grad(
                    [one for one, _ in used], asked, [g for _, g in used], allow_unused=True
                )
            )
        return tuple(next(found) if is_differentiable(leaf) else None for leaf in leaves)

    twin = getattr(function, "twin", function)
    parameters = inspect.signature(function).parameters.values()
    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    forward.__signature__ = inspect.Signature([context, *parameters])
    body = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), body | {"__module__": module})


def is_differentiable(value) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float64)


# ---- flash-attn ----------------------------------------------------------------------------------


def weighted(q, k, v, scale, causal, window=(-1, -1), softcap=0.0):
    """Attention of (rows, tokens, heads, units), and the logarithm of the weights' sum."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if q.shape[2] % k.shape[2]:
        raise ValueError("query heads are no multiple of key heads")
    k, v = (one.repeat_interleave(q.shape[2] // one.shape[2], 2) for one in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    places = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    ahead = torch.arange(k.shape[1]) - places
    left, right = (k.shape[1] if size < 0 else size for size in window)
    allowed = (-left <= ahead) & (ahead <= (0 if causal else right))
    scores = scores.masked_fill(~allowed, -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)


def packed(q, k, v, ends_q, ends_k, scale, causal, window=(-1, -1), softcap=0.0):
    """The same of (tokens, heads, units), which hold one sequence after the other."""
    found = [
        weighted(q[None, a:b], k[None, c:d], v[None, c:d], scale, causal, window, softcap)
        for a, b, c, d in zip(ends_q, ends_q[1:], ends_k, ends_k[1:])
    ]
    return torch.cat([one[0] for one, _ in found]), torch.cat([one[0] for _, one in found], -1)


def with_state(out: Tensor, sums: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return out.contiguous(), sums.contiguous(), out.new_empty(0), torch.zeros(2, dtype=torch.int64)


@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=())
def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    window = window_size_left, window_size_right
    return with_state(*weighted(q, k, v, softmax_scale, causal, window, softcap))


@torch.library.custom_op("flash_attn_3::_flash_attn_forward", mutates_args=())
def _flash_attn_3_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return with_state(*weighted(q, k, v, softmax_scale, causal))


@torch.library.custom_op("flash_attn::_flash_attn_varlen_forward", mutates_args=())
def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ends, window = (cu_seqlens_q, cu_seqlens_k), (window_size_left, window_size_right)
    return with_state(*packed(q, k, v, *ends, softmax_scale, causal, window, softcap))


def of_rows(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0
):
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    run = torch.ops.flash_attn._flash_attn_forward
    return run(q, k, v, dropout_p, scale, causal, *window_size, softcap, None, False)[0]


def of_packed(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q=0,
    max_seqlen_k=0,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
):
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    ends = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    run = torch.ops.flash_attn._flash_attn_varlen_forward
    return run(q, k, v, *ends, dropout_p, scale, causal, *window_size, softcap)[0]


# The operations have no gradients; those of the Functions are these functions'.
of_rows.twin = lambda q, k, v, p, *more: weighted(q, k, v, *more)[0]
of_packed.twin = lambda q, k, v, a, b, m, n, p, *more: packed(q, k, v, a, b, *more)[0]

FLASH = "flash_attn.flash_attn_interface"
FlashAttnFunc = make_function(FLASH, "FlashAttnFunc", of_rows, is_seen=True)
FlashAttnVarlenFunc = make_function(FLASH, "FlashAttnVarlenFunc", of_packed, is_seen=True)


def called(function, signature):
    """Return a function with these arguments that applies an ``autograd.Function``."""

    @functools.wraps(signature)
    def call(*args, **kwargs):
        bound = inspect.signature(signature).bind(*args, **kwargs)
        bound.apply_defaults()
        return function.apply(*bound.args)

    return call


flash_attn_func = called(FlashAttnFunc, of_rows)
flash_attn_varlen_func = called(FlashAttnVarlenFunc, of_packed)


@contextlib.contextmanager
def flash_attn() -> Iterator[None]:
    """Let transformers find flash-attn."""
    import transformers.modeling_flash_attention_utils as flash

    found = (flash_attn_func, flash_attn_varlen_func, None, flash._pad_input, flash._unpad_input)
    with (
        mock.patch.object(flash, "_lazy_imports", return_value=found),
        mock.patch.object(flash, "_loaded_implementation", None),
    ):
        yield


# ---- Liger ---------------------------------------------------------------------------------------


def liger_rms_norm(X, W, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
    return rms_norm(X, X.shape[-1:], None if W is None else W + offset, eps)


def liger_layer_norm(X, W, B, eps):
    return layer_norm(X, X.shape[-1:], W, B, eps)


def liger_added_norm(X, R, W, eps, offset=0.0, casting_mode="llama", in_place=False):
    return liger_rms_norm(X + R, W, eps, offset), X + R


def rotated(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def liger_rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    cos, sin = (one[None] if one.ndim == 2 else one for one in (cos, sin))
    if cos.shape[0] not in (1, q.shape[0]) or cos.shape[1] != q.shape[2]:
        raise ValueError("the kernel does not look, and reads past the end")
    cos, sin = cos[:, None], sin[:, None]
    return rotated(q, cos, sin), rotated(k, cos, sin)


def liger_mrope(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
    if cos.shape[1:3] != (q.shape[0], q.shape[2]):
        raise ValueError("the kernel does not look, and reads past the end")
    cos, sin = (one[0][:, None] + one[1][:, None] - one[2][:, None] for one in (cos, sin))
    return rotated(q, cos, sin), rotated(k, cos, sin)


def liger_silu_mul(a, b, gate_multiplier=1.0, down_multiplier=1.0):
    if a.shape != b.shape:
        raise ValueError("the kernel does not look, and reads past the end")
    return silu(a * gate_multiplier) * b * down_multiplier


def liger_gelu_mul(a, b):
    if a.shape != b.shape:
        raise ValueError("the kernel does not look, and reads past the end")
    return gelu(a, approximate="tanh") * b


def liger_cross_entropy(_input, target, weight=None, reduction="mean"):
    return torch.nn.functional.cross_entropy(_input, target, weight, reduction=reduction)


def liger_linear_cross_entropy(_input, weight, target, bias=None, reduction="mean"):
    logits = torch.nn.functional.linear(_input, weight, bias)
    return liger_cross_entropy(logits, target, reduction=reduction)


LIGER = {
    "RMSNorm": liger_rms_norm,
    "LayerNorm": liger_layer_norm,
    "FusedAddRMSNorm": liger_added_norm,
    "Rope": liger_rope,
    "Qwen2VLMRope": liger_mrope,
    "SiLUMul": liger_silu_mul,
    "GELUMul": liger_gelu_mul,
    "CrossEntropy": liger_cross_entropy,
    "FusedLinearCrossEntropy": liger_linear_cross_entropy,
}
FUNCTIONS = {
    name: make_function("liger_kernel.ops.any", f"Liger{name}Function", function)
    for name, function in LIGER.items()
}


@contextlib.contextmanager
def liger() -> Iterator[Callable]:
    """What puts kernels into a Llama as Liger does: rotary everywhere, norms and MLPs of one."""
    from transformers.models.llama import modeling_llama

    def rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
        return FUNCTIONS["Rope"].apply(q, k, cos, sin, position_ids, unsqueeze_dim)

    def normed(self, x):
        return FUNCTIONS["RMSNorm"].apply(x, self.weight, self.variance_epsilon)

    def mlp(self, x):
        made = FUNCTIONS["SiLUMul"].apply(self.gate_proj(x), self.up_proj(x))
        return self.down_proj(made)

    def put_in(model):
        for module in model.modules():
            if isinstance(module, modeling_llama.LlamaRMSNorm):
                module.forward = types.MethodType(normed, module)
            elif isinstance(module, modeling_llama.LlamaMLP):
                module.forward = types.MethodType(mlp, module)
        return model

    with mock.patch.object(modeling_llama, "apply_rotary_pos_emb", rope):
        yield put_in


# ---- fp8 -----------------------------------------------------------------------------------------


def rounded(x: Tensor, block: int) -> Tensor:
    """Round to fp8, with a scale for each block of the last dim."""
    blocks = x.unflatten(-1, (-1, block))
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return ((blocks / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale).flatten(-2)


def fp8_matmul(input, weight, scale, block_size, dtype, activation_scale=None):
    """What ``matmul_2d`` of the hub's kernel computes."""
    whole = weight.to(input.dtype)
    if scale.ndim == 2:
        for dim, size in enumerate(block_size):
            scale = scale.repeat_interleave(size, dim)
        scale = scale[: whole.shape[0], : whole.shape[1]]
        input = rounded(input, block_size[1])
    return (input @ (whole * scale).T).to(dtype)

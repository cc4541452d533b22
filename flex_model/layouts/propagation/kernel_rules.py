"""The rules of kernels that are no operations of torch, by name.

- ``namespace::name``: operations of other libraries;
- ``kernel::package.Class``, ``kernel::package.function``: see `contracts.opaque_calls`.
"""

from __future__ import annotations

from dataclasses import replace

from flex_model.layouts.propagation.operation import Operation, rule
from flex_model.layouts.propagation.text_cases import as_heads_of
from flex_model.layouts.propagation.text_forms import Placements, form

# ---- Attention -----------------------------------------------------------------------------------

# Queries, keys and values are (rows, tokens, heads, units). With the ends of sequences beside them
# they are packed, (tokens, heads, units): which tokens see each other then depends on all ends, so
# tokens must be whole. The second result is the logarithm of the weights' sum.
_MORE = "alibi_slopes?:...h learnable_sink?:h s_aux?:h"
_ENDS = "cu_seqlens_q?:* cu_seqlens_k?:* seqused_q?:* seqused_k?:*"
_flash = form(
    f"q:b*h* k:b*h* v:b*h* {_MORE} attention_mask?:b* position_ids?:~b* -> b*h* ; bh* | "
    f"q:*h* k:*h* v:*h* {_MORE} {_ENDS} -> *h* ; h* | "
    f"q:**h* k:**h* v:**h* {_MORE} {_ENDS} position_ids?:_ -> **h*"
)
_STATES = {"query_states": "q", "key_states": "k", "value_states": "v"}
_ENDS_OF = {"cu_seq_lens_q": "cu_seqlens_q", "cu_seq_lens_k": "cu_seqlens_k"}


@rule(
    "flash_attn::_flash_attn_forward flash_attn::_flash_attn_varlen_forward "
    "flash_attn_3::_flash_attn_forward kernel::flash_attn.FlashAttnFunc "
    "kernel::flash_attn.FlashAttnVarlenFunc kernel::flash_attn_interface.FlashAttnFunc "
    "kernel::flash_attn_interface.FlashAttnVarlenFunc kernel::transformers.flash_attention"
)
def flash_attention(operation: Operation) -> Placements:
    """Weight values as ``scaled_dot_product_attention`` does; functions that change or mask scores
    are passed the number of a head, which is the rank's own.
    """
    if operation.get("score_mod") or operation.get("mask_mod"):
        return [None] * len(operation.outputs)
    names = _STATES | _ENDS_OF
    given = {names.get(name, name): value for name, value in operation.arguments[0].items()}
    heads = {name: as_heads_of(given["q"], given[name], -2) for name in "kv"}
    return _flash(replace(operation, arguments=({**given, **heads},)))


# ---- Other kernels -------------------------------------------------------------------------------

_linear = form(
    "input:...i weight:oi weight_scale_inv:oi bias?:o activation_scale?:_ "
    "-> ...o = !input*!weight*!weight_scale_inv + bias | "
    "input:...* weight:o* weight_scale_inv:_ bias?:o activation_scale?:_ -> ...o"
)


@rule("kernel::transformers.FP8LinearFunction kernel::transformers.fp8_linear")
def fp8_linear(operation: Operation) -> Placements:
    """Multiply by a weight whose blocks have a scale each, and round the input by blocks of the
    same width: a split weight is one of whole blocks.
    """
    weight, scale, block = (operation[n] for n in ("weight", "weight_scale_inv", "block_size"))
    if weight.shard is None or scale.ndim < 2:
        return _linear(operation)
    dim = weight.shard.dim
    if any(w[dim] != s[dim] * block[dim] for w, s in zip(weight.shapes, scale.shapes)):
        return [None]
    # As if each row and column had its own scale: these are split as the weight's are.
    scale = replace(scale, shapes=weight.shapes)
    return _linear(operation.with_arguments(weight_scale_inv=scale))


_loss = form(":_ -> +")
_summed_loss = form(
    "_input:t* weight?:_ target:t bias?:_ ce_weight?:_ "
    "-> = !_input*!weight*!target*!bias*!ce_weight"
)


@rule(
    "kernel::liger_kernel.LigerCrossEntropyFunction "
    "kernel::liger_kernel.LigerFusedLinearCrossEntropyFunction"
)
def cross_entropy(operation: Operation) -> Placements:
    """Return the mean or the sum of the tokens' losses."""
    return (_summed_loss if operation.get("reduction") == "sum" else _loss)(operation)


_ROTATED = "position_ids?:_ -> bhs* = q*!cos*!sin ; bgs* = k*!cos*!sin"
_LIGER = {
    "RMSNorm": "X:...* W?:* -> ...*",
    "LayerNorm": "X:...* W:* B:* -> ...*",
    "FusedAddRMSNorm": "X:...* R:...* W?:* -> ...*+",
    "Rope": f"q:bhs* k:bgs* cos:~bs* sin:~bs* {_ROTATED}",
    "Qwen2VLMRope": f"q:bhs* k:bgs* cos:*bs* sin:*bs* {_ROTATED}",
    "SiLUMul GELUMul": "a:... b:... -> ...",
}

for names, text in _LIGER.items():
    for name in names.split():
        rule(f"kernel::liger_kernel.Liger{name}Function")(form(text))
# Without ``offsets``, which are places in the input, a row is a bag.
rule("kernel::torch.embedding_bag")(
    form(
        "input:b* weight:*f per_sample_weights?:b* -> bf | "
        "input:* weight:*f offsets:* per_sample_weights?:* -> *f"
    )
)
rule("kernel::torch.transformer_encoder")(form("src:b** mask?:_ src_key_padding_mask:b* -> b**"))

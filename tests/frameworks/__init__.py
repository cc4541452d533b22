"""Tiny models sharded by real frameworks, each beside the unsharded model with the same weights.

But for what splits models into stages, nothing here uses flex_model: the parity table compares it
with what is made here. Every framework runs on CPU and gloo; a package that is not installed is
asked for with ``pytest.importorskip``.
"""

from frameworks.cases import CASES, HF, HF_EP, HF_PP, changed
from frameworks.decoder_model import (
    DECODER_INPUTS,
    DECODER_PARAMETERS,
    DECODER_SITES,
    Core,
    Decoder,
    decoder,
    parallelized,
)
from frameworks.hugging_face import huggingface, huggingface_batches, huggingface_model
from frameworks.megatron_gpt import megatron_on_cpu
from frameworks.pair import (
    ROUNDED,
    Case,
    Pair,
    apply,
    call,
    full_tensor,
    gathered,
    gradients,
    num_ranks,
    own_groups,
    quiet,
    randomise,
    rank,
    tensor_of,
    tokens,
)

__all__ = [
    "CASES",
    "DECODER_INPUTS",
    "DECODER_PARAMETERS",
    "DECODER_SITES",
    "HF",
    "HF_EP",
    "HF_PP",
    "ROUNDED",
    "Case",
    "Core",
    "Decoder",
    "Pair",
    "apply",
    "call",
    "changed",
    "decoder",
    "full_tensor",
    "gathered",
    "gradients",
    "huggingface",
    "huggingface_batches",
    "huggingface_model",
    "megatron_on_cpu",
    "num_ranks",
    "own_groups",
    "parallelized",
    "quiet",
    "randomise",
    "rank",
    "tensor_of",
    "tokens",
]

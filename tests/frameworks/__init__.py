"""Tiny models sharded by real frameworks, each beside the unsharded model with the same weights.

But for what splits models into stages, nothing here uses flex_model: the parity table compares it
with what is made here. Every framework runs on CPU and gloo; a package that is not installed is
asked for with ``pytest.importorskip``.
"""

from frameworks.cases import CASES, HF
from frameworks.decoder_model import Decoder, decoder, parallelized
from frameworks.hugging_face import huggingface, huggingface_model
from frameworks.pair import (
    ROUNDED,
    Case,
    Pair,
    apply,
    call,
    full_tensor,
    gradients,
    num_ranks,
    quiet,
    randomise,
    rank,
    tensor_of,
    tokens,
)

__all__ = [
    "CASES",
    "HF",
    "ROUNDED",
    "Case",
    "Decoder",
    "Pair",
    "apply",
    "call",
    "decoder",
    "full_tensor",
    "gradients",
    "huggingface",
    "huggingface_model",
    "num_ranks",
    "parallelized",
    "quiet",
    "randomise",
    "rank",
    "tensor_of",
    "tokens",
]

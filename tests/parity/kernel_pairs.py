"""Rows of models whose kernels are no operations of torch."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

import stand_in_kernels
import user_scripts
from flex_model.integrations.transformers_private import set_attention_implementation
from frameworks import Pair

SITES = {
    "norm": "model.layers.0.input_layernorm",
    "before attention": "model.layers.0.self_attn.k_proj",
    "behind attention": "model.layers.0.self_attn.o_proj",
    "layer": "model.layers.1",
}


@contextlib.contextmanager
def fused(tmp_path: Path, kind: str) -> Iterator[Pair]:
    """A Llama with flash-attn, which gets padded rows, and Liger's norms, rotary and MLPs."""
    with (
        stand_in_kernels.flash_attn(),
        stand_in_kernels.liger() as put_in,
        user_scripts.llama(tmp_path, kind) as pair,
    ):

        def with_kernels(model):
            for module in put_in(model).modules():
                if hasattr(module, "config"):
                    set_attention_implementation(module.config, "flash_attention_2")
            return model

        mask = torch.ones(pair.inputs[0].shape, dtype=torch.long)
        mask[1::2, 4:] = 0
        yield replace(
            pair,
            oracle=with_kernels(pair.oracle),
            shard=lambda: with_kernels(pair.shard()),
            sites=SITES,
            keywords={"use_cache": False, "attention_mask": mask},
        )

"""Tiny mixtures of experts of transformers, and their shards."""

import re

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import models
from flex_model import FlexModel

BLOCK = "model.layers.1.mlp"
NUM_EXPERTS, TOP_K = 8, 2
TOKENS = torch.randint(48, (4, 6), generator=torch.Generator().manual_seed(0))
SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 64,
}
GROUPS = {
    "n_routed_experts": NUM_EXPERTS,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
FAMILIES = {
    "Mixtral": {"num_local_experts": NUM_EXPERTS},
    "Qwen3Moe": {"num_experts": NUM_EXPERTS},
    "DeepseekV3": GROUPS
    | {"kv_lora_rank": 16, "q_lora_rank": 16, "num_key_value_heads": 4}
    | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    "GptOss": {
        "num_local_experts": NUM_EXPERTS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "Glm4Moe": GROUPS | {"n_group": 1},
}


def make(family, **sizes):
    import transformers

    config = getattr(transformers, f"{family}Config")(**SIZES | FAMILIES[family] | sizes)
    model = models.seeded(getattr(transformers, f"{family}ForCausalLM"), config).eval()
    generator = torch.Generator().manual_seed(3)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if re.search(r"mlp\.|sinks", name):  # gates begin with zeros
            torch.nn.init.normal_(tensor, std=0.3, generator=generator)
    return model


def gate_of(model):
    block = model.get_submodule(BLOCK)
    return block.gate if hasattr(block, "gate") else block.router


def sharded(kind, model, folder, records=None, **settings):
    """``kind``: "tp", "ep", "ep" and an implementation of it, "ep of fsdp", "dp" or "fsdp"."""
    records, num_ranks = {} if records is None else records, dist.get_world_size()
    if kind[:2] in ("tp", "ep"):
        sizes = {"fsdp_size" if kind == "ep of fsdp" else "tp_size": num_ranks}
        if kind != "tp":
            sizes["ep_size"] = num_ranks
        if kind == "ep all_reduce":
            sizes["ep_implementation"] = kind[3:]
        return FlexModel(
            models.loaded_by_transformers(model, folder, sizes=sizes), records, **settings
        )
    if kind == "fsdp":
        for layer in model.model.layers:
            fully_shard(layer)
        model = fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    return FlexModel(model, records, data_parallel_size=num_ranks, **settings)

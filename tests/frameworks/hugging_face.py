"""Models of transformers, sharded by their own tensor-parallel plans."""

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from frameworks.pair import ROUNDED, Pair, gradients, randomise, tokens

HF_MODELS = {
    "llama": ("Llama", {}),
    "llama 4 layers": ("Llama", {"num_hidden_layers": 4}),
    "llama uneven": ("Llama", {"intermediate_size": 97}),
    "qwen2": ("Qwen2", {}),
    "qwen3-moe": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "deepseek-v3": (
        "DeepseekV3",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "num_key_value_heads": 8,
            "first_k_dense_replace": 1,
        },
    ),
    "glm4-moe": (
        "Glm4Moe",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_group": 2,
            "topk_group": 1,
            "head_dim": 8,
            "first_k_dense_replace": 0,
        },
    ),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "head_dim": 8}),
    "llama two heads": ("Llama", {"num_attention_heads": 2, "num_key_value_heads": 2}),
}
HF_SITES = {
    "outside": "model.embed_tokens",
    "column output": "model.layers.0.self_attn.k_proj",
    "act_fn": "model.layers.0.mlp.act_fn",
    "row output": "model.layers.0.self_attn.o_proj",  # its input is inside attention
    "norm": "model.layers.1.post_attention_layernorm",
    "layer": "model.layers.0",
    "root": "",
}
MIXTURES = {
    "mixtral": "Mixtral",
    "qwen3-moe": "Qwen3-MoE",
    "deepseek-v3": "DeepSeek-V3",
    "gpt-oss": "GPT-OSS",
    "glm4-moe": "GLM-4-MoE",
}
HF_PARAMETERS = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.1.post_attention_layernorm.weight",
)


def huggingface_model(name: str) -> nn.Module:
    import transformers

    family, settings = HF_MODELS[name]
    config = getattr(transformers, f"{family}Config")(
        **{
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "intermediate_size": 96,
            "vocab_size": 48,
            "max_position_embeddings": 64,
            "tie_word_embeddings": False,
        }
        | settings
    )
    return randomise(transformers.AutoModelForCausalLM.from_config(config)).eval()


@contextlib.contextmanager
def huggingface(
    tmp_path: Path,
    name: str,
    tp: int = 1,
    fsdp: int = 1,
    pp: int = 1,
    ep: int = 1,
    replicas: int = 1,
    dtype: torch.dtype | None = None,
    **settings,
) -> Iterator[Pair]:
    """``from_pretrained`` with a plan, as a user loads a model; ``settings``: of the plan."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    if dtype is None:
        dtype = torch.float32 if name in MIXTURES else torch.float64
    folder = tmp_path / "model"
    if dist.get_rank() == 0:
        huggingface_model(name).save_pretrained(folder)
    dist.barrier()
    sizes = {"tp_size": tp, "fsdp_size": fsdp, "pp_size": pp, "ep_size": ep}
    sizes |= {"dp_replicate_size": replicas}
    sizes = {name: size for name, size in sizes.items() if size > 1}

    def load(**how):
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", **how
        )
        return model.eval()

    sites, parameters = sites_of(name, is_inside=ep == fsdp == 1)
    yield Pair(
        load(),
        lambda: load(distributed_config=DistributedConfig(**sizes, **settings)),
        (tokens(2 * fsdp * replicas),),
        sites,
        parameters,
        gradients,
        outputs={f"model.layers.{i}.self_attn": (1,) for i in (0, 1)},
        dp=fsdp * replicas,
        dp_rank=dist.get_rank() // tp,
        keywords={"use_cache": False},
        tolerance=ROUNDED,
        backward=pp == 1,
    )


def sites_of(name: str, is_inside: bool) -> tuple[dict[str, str], tuple[str, ...]]:
    """Where a model is edited, and the parameters whose gradients are; ``is_inside``: whether the
    places of rows inside of experts are known.
    """
    sites, parameters = dict(HF_SITES), HF_PARAMETERS
    if name in MIXTURES:
        block = f"model.layers.{int(name == 'deepseek-v3')}.mlp"  # its first one has none
        sites |= {"experts": f"{block}.experts", "block of experts": block}
        del sites["act_fn"]
        if is_inside and name != "gpt-oss":
            sites["act_fn"] = f"{block}.experts.act_fn"
        parameters += (f"{block}.experts.gate_up_proj",)
    if name == "deepseek-v3":  # keys and values are made of one latent tensor
        sites["column output"] = "model.layers.0.self_attn.kv_b_proj"
        parameters = tuple(one.replace("k_proj", "kv_b_proj") for one in parameters)
    if name == "qwen3-moe":
        sites["inside attention"] = "model.layers.0.self_attn.k_norm"
    return sites, parameters


@contextlib.contextmanager
def huggingface_batches(tmp_path: Path, name: str, kind: str) -> Iterator[Pair]:
    """Such a model on parts of a batch, under torch's own wrappers."""
    model, size = huggingface_model(name).float(), dist.get_world_size()

    def shard():
        sharded = copy.deepcopy(model)
        if kind == "ddp":
            return DistributedDataParallel(sharded)
        for layer in sharded.model.layers:
            fully_shard(layer)
        return fully_shard(sharded)

    sites, parameters = sites_of(name, is_inside=False)
    yield Pair(
        model,
        shard,
        (tokens(2 * size),),
        sites,
        parameters,
        gradients,
        outputs={f"model.layers.{i}.self_attn": (1,) for i in (0, 1)},
        dp=size,
        dp_rank=dist.get_rank(),
        keywords={"use_cache": False},
        tolerance=ROUNDED,
    )

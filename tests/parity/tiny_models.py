"""Tiny seeded models of every class that transformers lists for a task, made from its config."""

import importlib.util
import re
from pathlib import Path

import torch
from torch import nn

import models

ROWS, LENGTH, LABELS, WORDS, CHOICES, PAD = 4, 5, 7, 64, 3, 1
TASKS = {
    "CAUSAL_LM": "words",
    "MASKED_LM": "words",
    "TOKEN_CLASSIFICATION": "tags",
    "SEQUENCE_CLASSIFICATION": "classes",
    "QUESTION_ANSWERING": "answers",
    "MULTIPLE_CHOICE": "choices",
}
KEY_VALUE_HEADS = r".*(key_value|kv)_heads.*|num_key_value_groups|attention_heads_kv"
#: By pattern of an attribute's name: the number that makes a model tiny. The first one counts.
SIZES = {
    r".*vocab_size|n_words|vocab_size_per_layer_input": WORDS,
    r"(first|n)_?dense.*|first_k_dense_replace|decoder_sparse_step": 1,
    r"num_experts_per_tok|moe_topk|moe_k|top_?k|num_selects|num_experts_per_token|top_k_experts": 2,
    r".*(num|n)_.*experts.*|num_local_experts|moe_num_experts": 4,
    r"n_group|topk_group|n_groups": 1,
    KEY_VALUE_HEADS: 3,
    r".*(num|n)_.*heads|n_heads?|.*attention_heads|n_head": 6,
    r".*head_dim|d_kv|.*head_size|attention_head_dim": 8,
    r"(num_|n_)?(hidden_|encoder_|decoder_|text_)*layers?|n_layer|num_layers|n_layers|depth": 2,
    r"num_hidden_groups|num_blocks|num_nextn_predict_layers|inner_group_num": 1,
    r"hidden_size|d_model|n_embd|dim|emb_dim|embed_dim|word_embed_proj_dim|n_embed": 48,
    r".*intermediate.*size.*|.*ffn_dim.*|d_ff|n_inner|hidden_dim|ffn_hidden_size|d_inner": 20,
    r"(q_lora|kv_lora|o_lora)_rank|qk_(nope|rope)_head_dim|v_head_dim|rank|.*lora_r.*": 8,
    r"embedding_size|.*per_layer_input|emb_size": 16,
    r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length": 32,
    r"state_size|ssm_state_size|mamba_d_state|d_state": 4,
    r"sliding_window|attention_window|local_window_size|attention_window_size|window_size": 4,
    r"num_labels": LABELS,
}

IMAGES = {"image_size": 8, "patch_size": 4}
#: Arguments that sizes alone don't settle, by the beginning of a class' name.
FURTHER = {
    "DiffLlama": {"num_key_value_heads": 2},
    "Esmc": {"num_key_value_heads": 6},
    "EsmFor": {"mask_token_id": 2, "token_dropout": False},
    "T5For": {"decoder_start_token_id": 0},
    "SqueezeBert": {"embedding_size": 48, "intermediate_size": 48},
    "FalconH1": {"mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_d_head": 8, "mamba_n_groups": 1},
    "GPTNeoFor": {"attention_types": [[["global", "local"], 1]]},
    "Lfm2Moe": {"layer_types": ["conv", "full_attention"]},
    "Mamba2": {"num_heads": 12, "head_dim": 8, "n_groups": 1},
    "NemotronFor": {"num_key_value_heads": 3},
    "ViTFor": IMAGES,
    "CLIPModel": {
        "projection_dim": 16,
        "vision_config": IMAGES
        | {"hidden_size": 48, "intermediate_size": 20}
        | {"num_hidden_layers": 2, "num_attention_heads": 6},
    },
}


def class_names(task: str) -> list[str]:
    """The classes of a task, without importing transformers."""
    spec = importlib.util.find_spec("transformers")
    if spec is None:
        return []
    source = (Path(spec.origin).parent / "models/auto/modeling_auto.py").read_text()
    table = re.search(rf"MODEL_FOR_{task}_MAPPING_NAMES = OrderedDict\((.*?)\n\)", source, re.S)
    return sorted(set(re.findall(r'\("[^"]+", "(\w+)"\)', table[1])))


def tiny_config(name: str, config_class: type):
    """Its config with small sizes, those of configs inside it, too."""
    arguments = tiny_arguments(config_class())
    if "QuestionAnswering" in name:
        arguments["num_labels"] = 2  # a start and an end
    for start, further in FURTHER.items():
        if name.startswith(start):
            arguments |= further
    return config_class(**arguments)


def tiny_arguments(config) -> dict:
    found: dict = {"num_labels": LABELS, "pad_token_id": PAD}
    num_layers = config.to_dict().get("num_hidden_layers")
    for name, value in config.to_dict().items():
        inner = vars(config).get(name)
        if hasattr(inner, "to_diff_dict"):
            found[name] = tiny_arguments(inner)
        elif name == "rotary_dim":
            found[name] = 4
        elif isinstance(value, int) and not isinstance(value, bool):
            size = next((s for p, s in SIZES.items() if re.fullmatch(p, name)), None)
            if size is not None and value > size:
                found[name] = size
        elif isinstance(value, float) and "drop" in name:
            found[name] = 0.0
        elif isinstance(value, list) and len(value) == num_layers:
            kinds = list(dict.fromkeys(value))  # a layer of each of two kinds
            found[name] = [kinds[0], kinds[-1]]
        elif name.endswith("_token_id") and value is not None:
            found.setdefault(name, 2)
    if "kv_lora_rank" in config.to_dict():  # latent attention has as many heads of keys
        found["num_key_value_heads"] = found.get("num_attention_heads")
    return found


def tiny_model(name: str) -> nn.Module:
    """The model in training mode, which draws nothing."""
    import transformers

    model_class = getattr(transformers, name)
    config = tiny_config(name, model_class.config_class)
    config._attn_implementation = config._experts_implementation = "eager"
    model = models.seeded(model_class, config).double().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # of some heads, whatever the config says
    return model


def batch_of(task: str) -> dict:
    """Rows of equal length, with as many labels in each: a rank's loss is the mean of its own."""
    kind = TASKS[task]
    shape = (ROWS, CHOICES, LENGTH) if kind == "choices" else (ROWS, LENGTH)
    ids = integers(4, WORDS, *shape, seed=6)
    ids[..., -1] = 2  # the end, by which BART reads a row
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if kind == "words":
        return batch | {"labels": integers(4, WORDS, *shape, seed=7)}
    if kind == "answers":
        starts, ends = (integers(0, LENGTH, ROWS, seed=seed) for seed in (7, 8))
        return batch | {"start_positions": starts, "end_positions": ends}
    high = CHOICES if kind == "choices" else LABELS
    shape = (ROWS, LENGTH) if kind == "tags" else (ROWS,)
    return batch | {"labels": integers(0, high, *shape, seed=7)}


def integers(low: int, high: int, *shape: int, seed: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))

"""Small random Hugging Face models of eight families, with batches of different shapes."""

import torch

import models


def _decoder(config_class, model_class, **settings):
    config = config_class(**(models.SIZES | {"num_hidden_layers": 3} | settings))
    return models.seeded(model_class, config).eval()


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return _decoder(LlamaConfig, LlamaForCausalLM)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=64)
    return models.seeded(GPT2LMHeadModel, config).eval()


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    return _decoder(MixtralConfig, MixtralForCausalLM, num_local_experts=4)


def qwen3_moe():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    settings = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return _decoder(Qwen3MoeConfig, Qwen3MoeForCausalLM, head_dim=8, **settings)


def gemma3():
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return _decoder(
        Gemma3TextConfig, Gemma3ForCausalLM, head_dim=8, sliding_window=4, sliding_window_pattern=2
    )


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, pad_token_id=0
    )
    return models.seeded(T5ForConditionalGeneration, config).eval()


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
        num_labels=5,
    )
    return models.seeded(ViTForImageClassification, config).eval()


def clip():
    from transformers import CLIPConfig, CLIPModel

    tower = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    text = tower | {"vocab_size": 64, "max_position_embeddings": 32, "eos_token_id": 63}
    vision = tower | {"image_size": 16, "patch_size": 4}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    return models.seeded(CLIPModel, config).eval()


def tokens(batch, length, seed=0):
    """Random tokens, of which the last row's first ones are padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 62, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[-1, : length // 3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def images(batch, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {"pixel_values": torch.randn(batch, 3, 16, 16, generator=generator)}


TEXTS = [tokens(2, 7, 0), tokens(3, 5, 1), tokens(1, 9, 2), tokens(2, 12, 3)]

#: name -> (make the model, its batches, modules whose outputs are looked at)
FAMILIES = {
    "llama": (llama, TEXTS, ["model.layers.0.mlp", "model.layers.2.self_attn", "model.norm"]),
    "gpt2": (gpt2, TEXTS, ["transformer.h.1.mlp", "transformer.h.2"]),
    "mixtral": (mixtral, TEXTS, ["model.layers.1.mlp", "model.layers.2"]),
    "qwen3_moe": (qwen3_moe, TEXTS, ["model.layers.1.mlp", "model.layers.2.self_attn"]),
    "gemma3": (gemma3, TEXTS, ["model.layers.0.mlp", "model.layers.2"]),
    "t5": (
        t5,
        [one | {"decoder_input_ids": one["input_ids"][:, :4]} for one in TEXTS],
        ["encoder.block.1", "decoder.block.0.layer.1"],
    ),
    "vit": (vit, [images(2), images(3, 1), images(1, 2), images(2, 3)], ["vit.layers.1"]),
    "clip": (
        clip,
        [tokens(2, 7, i) | images(3, i) for i in range(3)] + [tokens(1, 9, 4) | images(2, 4)],
        ["vision_model.encoder.layers.1.mlp", "text_model.encoder.layers.0"],
    ),
}


def tensors_of(output):
    """The floating-point tensors in a model's output, in order."""
    from flex_model import pytree

    return pytree.flatten(output)[0]

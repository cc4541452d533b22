"""Small random Hugging Face models of eight families, with batches of different shapes."""

import torch

import models


def maker(config, model, **settings):
    """A function that makes a random model of these classes of transformers."""

    def make():
        import transformers

        made = getattr(transformers, config)(**settings)
        return models.seeded(getattr(transformers, model), made).eval()

    return make


def decoder(name, config=None, **settings):
    settings = models.SIZES | {"num_hidden_layers": 3} | settings
    return maker(config or f"{name}Config", f"{name}ForCausalLM", **settings)


llama = decoder("Llama")
gpt2 = maker(
    "GPT2Config", "GPT2LMHeadModel", vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=64
)
mixtral = decoder("Mixtral", num_local_experts=4)
qwen3_moe = decoder(
    "Qwen3Moe", head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
)
gemma3 = decoder(
    "Gemma3", "Gemma3TextConfig", head_dim=8, sliding_window=4, sliding_window_pattern=2
)
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
t5 = maker("T5Config", "T5ForConditionalGeneration", **T5, pad_token_id=0)
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
VIT = TOWER | {"num_hidden_layers": 3, "image_size": 16, "patch_size": 4, "num_labels": 5}
vit = maker("ViTConfig", "ViTForImageClassification", **VIT)
OF_CLIP = TOWER | {"num_hidden_layers": 2}
clip = maker(
    "CLIPConfig",
    "CLIPModel",
    text_config=OF_CLIP | {"vocab_size": 64, "max_position_embeddings": 32, "eos_token_id": 63},
    vision_config=OF_CLIP | {"image_size": 16, "patch_size": 4},
    projection_dim=16,
)


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

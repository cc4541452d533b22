"""Tiny seeded models of transformers, as people train them, with a batch and a place for an edit.

All sizes that a number of rows may be mistaken for differ: 2 layers, 3 heads of keys, half a head
is 4 wide, 5 positions, 6 heads, 7 labels, a head is 8 wide, and 64 words.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

import models

LENGTH, LABELS, WORDS, PAD = 5, 7, 64, 1
TRANSLATED = 3  # words of a translation
TEXT = {
    "vocab_size": WORDS,
    "hidden_size": 48,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 32,
    "pad_token_id": PAD,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
IMAGE = {
    "hidden_size": 48,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "image_size": 8,
    "patch_size": 4,
}


# ---- Batches -------------------------------------------------------------------------------------


def integers(low: int, high: int, *shape: int, seed: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def words(rows: int, length: int = LENGTH, seed: int = 6) -> torch.Tensor:
    return integers(4, WORDS, rows, length, seed=seed)


def padded(rows: int) -> dict:
    """Rows of several lengths, padded at their ends."""
    mask = torch.arange(LENGTH) < (LENGTH - torch.arange(rows) % 3)[:, None]
    return {"input_ids": words(rows).where(mask, PAD), "attention_mask": mask.long()}


def causal(rows: int) -> dict:
    return {"input_ids": words(rows), "labels": words(rows)}


def classified(rows: int) -> dict:
    return padded(rows) | {"labels": integers(0, LABELS, rows, seed=7)}


def translated(rows: int) -> dict:
    return padded(rows) | {"labels": words(rows, TRANSLATED, seed=7)}


def pictures(rows: int, size: int = 8) -> torch.Tensor:
    return models.random(rows, 3, size, size, seed=9)


def captioned(rows: int) -> dict:
    """The last word of each is the one that CLIP reads a text by."""
    ids = words(rows)
    ids[:, -1] = 3
    return {"input_ids": ids, "pixel_values": pictures(rows), "return_loss": True}


def labelled_pictures(rows: int) -> dict:
    return {"pixel_values": pictures(rows), "labels": integers(0, LABELS, rows, seed=7)}


def sounds(rows: int) -> dict:
    return {
        "input_values": models.random(rows, 400, seed=9),
        "labels": integers(0, LABELS, rows, seed=7),
    }


# ---- Families ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """A class of transformers, what its config is made of, a batch, and where an edit is.

    Attributes:
        config: The config's class.
        settings: Its arguments.
        own_loss: The model's loss is of the rank's rows among themselves, so the twin of a rank is
            the model on its rows alone.
    """

    model: str
    config: str
    settings: dict
    batch: Callable[[int], dict]
    site: str
    own_loss: bool = False

    def make(self) -> nn.Module:
        import transformers

        config = getattr(transformers, self.config)(**copy.deepcopy(self.settings))
        without_dropout(config)
        config._attn_implementation = config._experts_implementation = "eager"
        return models.seeded(getattr(transformers, self.model), config).double().train()


def without_dropout(config) -> None:
    """A model in training mode draws nothing, so that the twin draws nothing else."""
    for name, value in list(vars(config).items()):
        if ("drop" in name or name.startswith("mask_")) and isinstance(value, float):
            setattr(config, name, 0.0)
        elif hasattr(value, "to_diff_dict"):
            without_dropout(value)


def family(
    model: str, config: str, batch: Callable, site: str, own_loss=False, **settings
) -> Family:
    text = TEXT | {"num_labels": LABELS}
    return Family(model, config, text | settings, batch, site, own_loss)


def of_images(model: str, config: str, site: str, **settings) -> Family:
    return Family(model, config, IMAGE | {"num_labels": LABELS} | settings, labelled_pictures, site)


LLAMA = {"num_key_value_heads": 3, "head_dim": 8}
T5 = {
    "d_model": 48,
    "d_kv": 8,
    "d_ff": 20,
    "num_layers": 2,
    "num_heads": 6,
    "decoder_start_token_id": 0,
}
CLIP = {
    "text_config": TEXT | {"projection_dim": 16},
    "vision_config": IMAGE | {"projection_dim": 16},
    "projection_dim": 16,
}
WAV2VEC2 = {
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16,
    "apply_spec_augment": False,
}
#: One of each task that `make sweep` has not, and two that it has.
FAMILIES = {
    "Llama": family(
        "LlamaForCausalLM", "LlamaConfig", causal, "model.layers.1.mlp.act_fn", **LLAMA
    ),
    "Llama classified": family(
        "LlamaForSequenceClassification",
        "LlamaConfig",
        classified,
        "model.layers.1.self_attn",
        **LLAMA,
    ),
    "T5": family("T5ForConditionalGeneration", "T5Config", translated, "encoder.block.1", **T5),
    "CLIP": Family(
        "CLIPModel", "CLIPConfig", CLIP, captioned, "text_model.encoder.layers.1.mlp", own_loss=True
    ),
    "ViT": of_images("ViTForImageClassification", "ViTConfig", "vit.layers.1.mlp"),
    "ConvNeXt": Family(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "num_stages": 2,
            "num_labels": LABELS,
            "drop_path_rate": 0.0,
        },
        labelled_pictures,
        "convnext.encoder.stages.1.layers.0.pwconv1",
    ),
    "wav2vec 2.0": family(
        "Wav2Vec2ForSequenceClassification",
        "Wav2Vec2Config",
        sounds,
        "wav2vec2.encoder.layers.1.feed_forward",
        **WAV2VEC2,
    ),
}

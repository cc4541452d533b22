"""Tiny seeded models of transformers, as people train them, with a batch and a place for an edit.

All sizes that a number of rows may be mistaken for differ: 2 layers, 3 heads of keys, half a head
is 4 wide, 5 positions, 6 heads, 7 labels, a head is 8 wide, and 64 words.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

import models
import tiny_models
from tiny_models import LABELS, LENGTH, PAD, WORDS

TRANSLATED = 3  # words of a translation


# ---- Batches -------------------------------------------------------------------------------------


def words(rows: int, length: int = LENGTH, seed: int = 6) -> torch.Tensor:
    return tiny_models.integers(4, WORDS, rows, length, seed=seed)


def padded(rows: int) -> dict:
    """Rows of several lengths, padded at their ends."""
    mask = torch.arange(LENGTH) < (LENGTH - torch.arange(rows) % 3)[:, None]
    return {"input_ids": words(rows).where(mask, PAD), "attention_mask": mask.long()}


def causal(rows: int) -> dict:
    return {"input_ids": words(rows), "labels": words(rows)}


def classified(rows: int) -> dict:
    return padded(rows) | {"labels": tiny_models.integers(0, LABELS, rows, seed=7)}


def translated(rows: int) -> dict:
    return padded(rows) | {"labels": words(rows, TRANSLATED, seed=7)}


def pictures(rows: int, size: int = 8) -> torch.Tensor:
    return models.random(rows, 3, size, size, seed=9)


def captioned(rows: int) -> dict:
    """CLIP reads a text at its largest word."""
    return {"input_ids": words(rows), "pixel_values": pictures(rows), "return_loss": True}


def labelled_pictures(rows: int) -> dict:
    return {"pixel_values": pictures(rows), "labels": tiny_models.integers(0, LABELS, rows, seed=7)}


# ---- Families ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """A class of transformers, a batch, and where an edit is.

    Attributes:
        own_loss: The model's loss is of the rank's rows among themselves, so the twin of a rank is
            the model on its rows alone.
    """

    model: str
    batch: Callable[[int], dict]
    site: str
    own_loss: bool = False

    def make(self) -> nn.Module:
        return tiny_models.tiny_model(self.model)


#: One of each task that `make sweep` has not, and two that it has.
FAMILIES = {
    "Llama": Family("LlamaForCausalLM", causal, "model.layers.1.mlp.act_fn"),
    "Llama classified": Family(
        "LlamaForSequenceClassification", classified, "model.layers.1.self_attn"
    ),
    "T5": Family("T5ForConditionalGeneration", translated, "encoder.block.1"),
    "CLIP": Family("CLIPModel", captioned, "text_model.encoder.layers.1.mlp", own_loss=True),
    "ViT": Family("ViTForImageClassification", labelled_pictures, "vit.layers.1.mlp"),
}

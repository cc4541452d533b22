"""Tiny random models of many modalities (images or sound, and text), with batches that differ in
rows, lengths, images and padding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import models

IMAGE, IMAGE_TOKENS = 60, 4  # the token that stands for a part of an image, and how many a row has
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
QWEN_VISION = {
    "depth": 2,
    "hidden_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
}


def _seeded(model_class: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    return models.seeded(model_class, config).to(dtype).eval()


def llava(dtype: torch.dtype = torch.float32) -> nn.Module:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig
    from transformers import LlavaForConditionalGeneration as Llava

    vision = CLIPVisionConfig(**(_VISION | {"num_hidden_layers": 3}))  # the last but one is used
    text = LlamaConfig(**TEXT)
    return _seeded(
        Llava, LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE), dtype
    )


def qwen2_vl(dtype: torch.dtype = torch.float32) -> nn.Module:
    from transformers import Qwen2VLConfig
    from transformers import Qwen2VLForConditionalGeneration as Qwen2VL

    vision = QWEN_VISION | {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
    text = TEXT | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
    text |= _TOKENS
    config = Qwen2VLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE)
    return _seeded(Qwen2VL, config, dtype)


def qwen2_5_vl(dtype: torch.dtype = torch.float32) -> nn.Module:
    from transformers import Qwen2_5_VLConfig
    from transformers import Qwen2_5_VLForConditionalGeneration as Qwen25VL

    vision = QWEN_VISION | {"intermediate_size": 24, "out_hidden_size": 32, "window_size": 16}
    vision |= {"fullatt_block_indexes": [1]}
    text = TEXT | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
    text |= _TOKENS
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE)
    return _seeded(Qwen25VL, config, dtype)


def idefics3(dtype: torch.dtype = torch.float32) -> nn.Module:
    from transformers import Idefics3Config, LlamaConfig
    from transformers import Idefics3ForConditionalGeneration as Idefics3

    text, vision = LlamaConfig(**TEXT, pad_token_id=0), _VISION | {"image_size": 16}
    config = Idefics3Config(
        text_config=text, vision_config=vision, image_token_id=IMAGE, pad_token_id=0
    )
    return _seeded(Idefics3, config, dtype)


def gemma3(dtype: torch.dtype = torch.float32) -> nn.Module:
    from transformers import Gemma3Config, SiglipVisionConfig
    from transformers import Gemma3ForConditionalGeneration as Gemma3

    text = TEXT | {
        "head_dim": 8,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    vision = SiglipVisionConfig(**(_VISION | {"image_size": 16}), vision_use_head=False)
    config = Gemma3Config(
        text_config=text,
        vision_config=vision,
        image_token_index=IMAGE,
        mm_tokens_per_image=IMAGE_TOKENS,
    )
    return _seeded(Gemma3, config, dtype)


def mistral3(dtype: torch.dtype = torch.float32) -> nn.Module:
    from transformers import Mistral3Config, MistralConfig, PixtralVisionConfig
    from transformers import Mistral3ForConditionalGeneration as Mistral3

    text = MistralConfig(**TEXT, head_dim=8, sliding_window=None)
    vision = PixtralVisionConfig(**(_VISION | {"image_size": 16}))
    config = Mistral3Config(
        text_config=text, vision_config=vision, image_token_index=IMAGE, spatial_merge_size=2
    )
    return _seeded(Mistral3, config, dtype)


def pixtral(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Pixtral 12B is a LLaVA whose images are read by a Pixtral tower."""
    from transformers import LlavaConfig, MistralConfig, PixtralVisionConfig
    from transformers import LlavaForConditionalGeneration as Llava

    config = LlavaConfig(
        vision_config=PixtralVisionConfig(**(_VISION | {"image_size": 16})),
        text_config=MistralConfig(**TEXT, head_dim=8, sliding_window=None),
        image_token_index=IMAGE,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return _seeded(Llava, config, dtype)


def whisper(dtype: torch.dtype = torch.float32) -> nn.Module:
    from transformers import WhisperConfig
    from transformers import WhisperForConditionalGeneration as Whisper

    config = WhisperConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return _seeded(Whisper, config, dtype)


def _random(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return models.random(*shape, seed=seed, dtype=dtype)


def _texts(rows: int, length: int, seed: int) -> dict[str, torch.Tensor]:
    """Tokens: each row has an image at another place; the first row begins with padding."""
    ids = models.seeded(torch.randint, 3, 59, (rows, length), seed=seed)
    mask = torch.ones_like(ids)
    mask[0, : (length - IMAGE_TOKENS) // 3] = 0
    for row in range(rows):
        begin = (length - IMAGE_TOKENS) // 3 + row % 3
        ids[row, begin : begin + IMAGE_TOKENS] = IMAGE
    return {"input_ids": ids, "attention_mask": mask}


def _with_images(side: int) -> Callable[..., dict[str, Any]]:
    def batch(
        rows: int, length: int, seed: int, dtype: torch.dtype = torch.float32
    ) -> dict[str, Any]:
        pixels = _random(rows, 3, side, side, seed=seed, dtype=dtype)
        return _texts(rows, length, seed) | {"pixel_values": pixels}

    return batch


def _of_idefics(
    rows: int, length: int, seed: int, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Up to two images a row, of which those of zeros are padding."""
    batch = _texts(rows, length, seed)
    pixels = _random(rows, 2, 3, 16, 16, seed=seed, dtype=dtype)
    for row in range(rows):
        pixels[row, 1 - row % 2] = 0  # one image each
    return batch | {"pixel_values": pixels}


def _of_gemma(
    rows: int, length: int, seed: int, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    batch = _with_images(16)(rows, length, seed, dtype)
    return batch | {"token_type_ids": (batch["input_ids"] == IMAGE).long()}


def _with_sizes(side: int) -> Callable[..., dict[str, Any]]:
    def batch(
        rows: int, length: int, seed: int, dtype: torch.dtype = torch.float32
    ) -> dict[str, Any]:
        sizes = torch.tensor([[side, side]] * rows)
        return _with_images(side)(rows, length, seed, dtype) | {"image_sizes": sizes}

    return batch


def _of_qwen(
    rows: int, length: int, seed: int, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Images of 2 by 2 merged squares of patches, in rows of patches of two frames."""
    batch, side = _texts(rows, length, seed), 2 * QWEN_VISION["spatial_merge_size"]
    patches = _random(rows * side**2, 3 * 2 * 4 * 4, seed=seed, dtype=dtype)
    batch |= {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, side, side]] * rows)}
    return batch | {"mm_token_type_ids": (batch["input_ids"] == IMAGE).int()}


def _of_whisper(
    rows: int, length: int, seed: int, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    features = _random(rows, 8, 20, seed=seed, dtype=dtype)
    ids = models.seeded(torch.randint, 3, 60, (rows, length), seed=seed)
    return {"input_features": features, "decoder_input_ids": ids}


@dataclass(frozen=True)
class Family:
    """A model and its batches.

    Attributes:
        make: Makes the model: ``make(dtype)``.
        batch: ``batch(rows, length, seed, dtype)``.
        layers: The list of the text's layers, and of the images' or the sound's.
        layer_class, tower_class: The classes of their members.
    """

    make: Callable[..., nn.Module]
    batch: Callable[..., dict[str, Any]]
    layers: str
    layer_class: str
    tower: str
    tower_class: str

    def batches(self, dtype: torch.dtype = torch.float32) -> list[dict[str, Any]]:
        shapes = ((2, 10), (3, 12), (1, 9), (2, 14))
        return [self.batch(rows, n, seed, dtype) for seed, (rows, n) in enumerate(shapes)]


_LLAMA = ("model.language_model.layers", "LlamaDecoderLayer")
_MISTRAL = ("model.language_model.layers", "MistralDecoderLayer")
_CLIP = ("model.vision_tower.encoder.layers", "CLIPEncoderLayer")
_SIGLIP = ("model.vision_tower.encoder.layers", "SiglipEncoderLayer")
_PIXTRAL = ("model.vision_tower.transformer.layers", "PixtralAttentionLayer")

FAMILIES = {
    "llava": Family(llava, _with_images(8), *_LLAMA, *_CLIP),
    "qwen2_vl": Family(
        qwen2_vl,
        _of_qwen,
        *("model.language_model.layers", "Qwen2VLDecoderLayer"),
        *("model.visual.blocks", "Qwen2VLVisionBlock"),
    ),
    "qwen2_5_vl": Family(
        qwen2_5_vl,
        _of_qwen,
        *("model.language_model.layers", "Qwen2_5_VLDecoderLayer"),
        *("model.visual.blocks", "Qwen2_5_VLVisionBlock"),
    ),
    "idefics3": Family(
        idefics3,
        _of_idefics,
        *("model.text_model.layers", "LlamaDecoderLayer"),
        *("model.vision_model.encoder.layers", "Idefics3EncoderLayer"),
    ),
    "gemma3": Family(
        gemma3, _of_gemma, "model.language_model.layers", "Gemma3DecoderLayer", *_SIGLIP
    ),
    "mistral3": Family(mistral3, _with_sizes(16), *_MISTRAL, *_PIXTRAL),
    "pixtral": Family(pixtral, _with_sizes(8), *_MISTRAL, *_PIXTRAL),
    "whisper": Family(
        whisper,
        _of_whisper,
        *("model.decoder.layers", "WhisperDecoderLayer"),
        *("model.encoder.layers", "WhisperEncoderLayer"),
    ),
}


def without_cache(batch: dict[str, Any]) -> dict[str, Any]:
    return batch | {"use_cache": False}


def mix(module: Any, output: torch.Tensor, save_ctx: Any, modules: Any) -> torch.Tensor:
    """An edit of all rows, positions and features, one with another."""
    return (output + output.flip(0, -1)) / 2

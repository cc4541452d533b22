"""Folders of quantised checkpoints, as transformers reads them: written by hand, or by the packages
that are installed.
"""

import copy
import functools
import json

import pytest
import torch

import models

FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return models.seeded(LlamaForCausalLM, config).eval()


def read(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def write(folder, state, **quantization):
    """Write a folder's weights; its configuration states how they are quantised, if it is given."""
    from safetensors.torch import save_file

    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    if quantization:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = quantization
        (folder / "config.json").write_text(json.dumps(config))


def to_float8(weight, block=16):
    """float8 and the scales of its blocks; those at an edge may be smaller."""
    rows, columns = (-(-size // block) for size in weight.shape)
    padded = torch.zeros(rows * block, columns * block)
    padded[: weight.shape[0], : weight.shape[1]] = weight.float()
    blocks = padded.view(rows, block, columns, block)
    scales = blocks.abs().amax((1, 3), keepdim=True) / 448
    whole = (blocks / scales).view(padded.shape)[: weight.shape[0], : weight.shape[1]]
    return whole.contiguous().to(torch.float8_e4m3fn), scales.view(rows, columns)


def _bfloat16(folder, model):
    model.to(torch.bfloat16).save_pretrained(folder)
    return read(folder)


def fp8(folder, model=None, block=16, **settings):
    """Of a Llama, or another model: the layers' projections, not the head."""
    state = {}
    for name, tensor in _bfloat16(folder, model or llama()).items():
        state[name] = tensor
        if name.endswith("proj.weight"):
            state[name], state[f"{name}_scale_inv"] = to_float8(tensor, block)
    write(folder, state, **(FP8 | {"weight_block_size": [block, block]} | settings))


def fp8_by_other_names(folder):
    """Scales as older checkpoints call them, and one for a whole weight."""
    fp8(folder)
    state = {name.replace("weight_scale_inv", "scale"): one for name, one in read(folder).items()}
    name = "model.layers.1.mlp.up_proj"
    state[f"{name}.scale"] = state[f"{name}.scale"].amax().view(())
    write(folder, state)


def fp8_of_experts(folder):
    """A tensor per expert in the files, one of all in the model."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, head_dim=16,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, num_experts=4,
        num_experts_per_tok=2,
    )  # fmt: skip
    fp8(folder, models.seeded(Qwen3MoeForCausalLM, config).eval())
    assert any(".experts.3.down_proj.weight_scale_inv" in name for name in read(folder))


def mxfp4(folder):
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        vocab_size=64, hidden_size=64, intermediate_size=32, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        sliding_window=4, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    generator, state = torch.Generator().manual_seed(0), {}
    model = models.seeded(GptOssForCausalLM, config).eval()
    for name, tensor in _bfloat16(folder, model).items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            num_experts, inputs, outputs = tensor.shape
            shape = num_experts, outputs, inputs // 32
            bytes_of = functools.partial(torch.randint, dtype=torch.uint8, generator=generator)
            state[f"{name}_blocks"] = bytes_of(256, (*shape, 16))
            state[f"{name}_scales"] = bytes_of(118, 124, shape)
        else:
            state[name] = tensor
    write(folder, state, quant_method="mxfp4")


def compressed(folder, activations=None, **weights):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
        apply_quantization_config,
    )

    model = llama().to(torch.bfloat16)
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**weights),
        input_activations=activations and QuantizationArgs(**activations),
    )
    config = QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for layer in model.modules():
        if hasattr(layer, "weight_scale"):
            scales, rows = layer.weight_scale, layer.weight.shape[0]
            groups = layer.weight.detach().abs().view(rows, scales.numel() // rows, -1)
            most = 448 if weights["type"] == "float" else 2 ** (weights["num_bits"] - 1) - 1
            scales.data.copy_((groups.amax(-1) / most).view_as(scales))
            layer.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


def loaded_packed(folder, config):
    """Of a package that quantises while a plain checkpoint is loaded."""
    from transformers import LlamaForCausalLM

    _bfloat16(folder / "plain", llama())
    LlamaForCausalLM.from_pretrained(folder / "plain", quantization_config=config).save_pretrained(
        folder
    )


def torchao(folder):
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    loaded_packed(folder, TorchAoConfig(quant_type=Int8WeightOnlyConfig()))


def bitsandbytes(folder, **settings):
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    loaded_packed(folder, BitsAndBytesConfig(**settings))


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": True}
CHANNELS = {"num_bits": 8, "strategy": "channel", "symmetric": True}
DEQUANTISED = {
    "fp8": fp8,
    "fp8 by other names": fp8_by_other_names,
    "fp8 of experts": fp8_of_experts,
    "mxfp4": mxfp4,
    "compressed-tensors int4": lambda folder: compressed(folder, **INT4),
    "compressed-tensors int8": lambda folder: compressed(folder, **CHANNELS, type="int"),
    "compressed-tensors float8": lambda folder: compressed(folder, **CHANNELS, type="float"),
}
PER_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
#: What computes otherwise than its dequantised weights, and what the error says of it.
REFUSED = {
    "torchao": (torchao, r"\(torchao\)"),
    "bitsandbytes 4 bits": (
        lambda folder: bitsandbytes(folder, load_in_4bit=True),
        r"\(bitsandbytes\)",
    ),
    "bitsandbytes 8 bits": (
        lambda folder: bitsandbytes(folder, load_in_8bit=True),
        r"\(bitsandbytes\)",
    ),
    "compressed-tensors, activations": (
        lambda folder: compressed(folder, PER_TOKEN, **CHANNELS, type="int"),
        "quantises activations",
    ),
}


def from_pretrained(folder):
    """The model in memory, with weights at the places where torch puts them, not the file."""
    from transformers import AutoModelForCausalLM

    return copy.deepcopy(AutoModelForCausalLM.from_pretrained(folder).eval())


def plain(folder, device="meta"):
    """The model of plain layers, without the checkpoint's weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()

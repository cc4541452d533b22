"""No operation of an ordinary model's forward is without a rule or a decomposition."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from flex_model.integrations.torch_private import decomposition_table, is_composite
from flex_model.layouts.propagation import has_rule

transformers = pytest.importorskip("transformers")

# Made of numbers only, or read as a number: no rule of a placement. ``isin`` and the like have one.
NUMBERS = {
    "_local_scalar_dense",
    "arange",
    "empty",
    "full",
    "is_nonzero",
    "new_empty",
    "new_empty_strided",
    "new_full",
    "new_ones",
    "new_zeros",
    "ones",
    "scalar_tensor",
    "zeros",
}


# They run inside ``torch.lstm``, which is followed as one operation.
IN_LAYERS = {"mkldnn_rnn_layer"}


def without_rule(names):
    return {name for name in names if not is_followed(name)}


def is_followed(name):
    packet = getattr(torch.ops.aten, name)
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    return has_rule(name) or any(op in decomposition_table or is_composite(op) for op in overloads)


def test_what_is_not_followed():
    names = ["mm", "mse_loss", "gelu", "view", "convolution", "linalg_inv_ex", "histogram"]
    assert without_rule(names) == {"linalg_inv_ex", "histogram"}


class Names(TorchDispatchMode):
    """The names of the ATen operations that run."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "aten":
            self.found.add(name if name.startswith("__") else name.rstrip("_"))
        return func(*args, **(kwargs or {}))


SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
GPT2 = {"vocab_size": 32, "n_embd": 16, "n_layer": 1, "n_head": 4}
T5 = {"vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 4}
MAMBA = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
VIT = {**SMALL, "image_size": 8, "patch_size": 4}
TEXT = {"input_ids": torch.arange(12).view(2, 6), "labels": torch.arange(12).view(2, 6)}
MASK = {"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])}

LANGUAGE = {
    "Llama": ({**SMALL, "num_key_value_heads": 2}, {**TEXT, **MASK}),
    "Mixtral": ({**SMALL, "num_key_value_heads": 2, "num_local_experts": 4}, TEXT),
    "GPT2": (GPT2, {**TEXT, **MASK}),
    "T5": ({**T5, "decoder_start_token_id": 0, "pad_token_id": 0}, {**TEXT, **MASK}),
    "Bert": (SMALL, {**TEXT, **MASK}),
    "Mamba": (MAMBA, TEXT),
    "ViT": (VIT, {"pixel_values": torch.rand(2, 3, 8, 8), "labels": torch.tensor([0, 1])}),
}
CLASS_OF = {
    "GPT2": "GPT2LMHeadModel",
    "T5": "T5ForConditionalGeneration",
    "Bert": "BertForMaskedLM",
    "ViT": "ViTForImageClassification",
}


def run_all_modes(model, loss_of):
    """Forwards in training, in evaluation and in inference mode."""
    names = Names()
    with names:
        for trains in (True, False):
            model.train(trains)
            loss_of(model)
        with torch.inference_mode():
            loss_of(model)
    return names.found - IN_LAYERS


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", LANGUAGE)
def test_transformers(family, attention):
    options, inputs = LANGUAGE[family]
    if family == "Mamba" and attention == "sdpa":
        return  # it has no attention
    make = getattr(transformers, CLASS_OF.get(family, f"{family}ForCausalLM"))
    config = getattr(transformers, f"{family}Config")(**options)
    if family != "Mamba":
        config._attn_implementation = attention
    model = make(config)
    found = run_all_modes(model, lambda model: model(**inputs).loss)
    assert without_rule(found) <= NUMBERS


def convolutional():
    return nn.Sequential(
        *[nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)],
        *[nn.Conv2d(8, 8, 3, groups=8), nn.GroupNorm(2, 8), nn.SiLU(), nn.Dropout2d(0.1)],
        *[nn.AvgPool2d(2, 1), nn.InstanceNorm2d(8), nn.ConvTranspose2d(8, 8, 2), nn.LeakyReLU()],
        *[nn.Upsample(scale_factor=2, mode="bilinear"), nn.AdaptiveAvgPool2d(2), nn.Flatten()],
        *[nn.Linear(32, 4), nn.PReLU(), nn.LogSoftmax(-1)],
    )


SEQUENCE = torch.rand(2, 5, 8)
PLAIN = {
    "convolutional": (convolutional, torch.rand(2, 3, 16, 16)),
    "LSTM": (lambda: nn.LSTM(8, 4, 2, bidirectional=True, batch_first=True), SEQUENCE),
    "GRU": (lambda: nn.GRU(8, 4, 2), SEQUENCE),
    "RNN": (lambda: nn.RNN(8, 4), SEQUENCE),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), SEQUENCE),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PLAIN)
def test_modules_of_torch(name):
    make, inputs = PLAIN[name]

    def loss_of(model):
        result = model(inputs)
        return (result[0] if isinstance(result, tuple) else result).square().mean()

    found = run_all_modes(make(), loss_of)
    assert without_rule(found) <= NUMBERS

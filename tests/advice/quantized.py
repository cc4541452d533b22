"""Advice about quantised weights."""

import torch
from torch import nn

import quantized_layers
from flex_model import FlexModel

PACKED = "blocks.0.up.weight"


def set_quantized(kind, replace=False):
    """Write zeros to a quantised weight, or to that of a plain layer with its values."""
    model = quantized_layers.build(kind)
    if replace:
        values = FlexModel(model).get_module_parameter(PACKED)
        model.blocks[0].up = nn.Linear(16, 32)
        FlexModel(model).set_module_parameter(PACKED, values)
    FlexModel(model).set_module_parameter(PACKED, torch.zeros(32, 16))


def read_quantized(raw=False):
    flex = FlexModel(quantized_layers.build("two in a byte"))
    assert flex.get_module_parameter(PACKED, raw=raw).dtype == torch.uint8


ROWS = {
    "replace its layer by one that is not": (
        lambda: set_quantized("a tensor that unpacks itself"),
        lambda: set_quantized("a tensor that unpacks itself", replace=True),
    ),
    "read the packed tensor with": (read_quantized, lambda: read_quantized(raw=True)),
}

"""Tiny models of quantised layers: made by hand, and by the packages that are installed.

Those made by hand stand for the ways in which packages keep a weight: a tensor subclass that
unpacks itself, integers beside their scales, and two values in a byte.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.utils._pytree import tree_map

import models


class Packed(torch.Tensor):
    """int8 and a scale for each row, as one tensor. Operations other than slices unpack it."""

    @staticmethod
    def __new__(cls, data, scales):
        shape, dtype = data.shape, scales.dtype
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=data.device)

    def __init__(self, data, scales):
        self.data_of_int8, self.scales = data, scales

    @classmethod
    def of(cls, weight):
        return cls(*to_int8(weight))

    def dequantize(self):
        return self.data_of_int8.to(self.scales.dtype) * self.scales

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("detach", "clone", "alias", "_to_copy", "view") and type(args[0]) is cls:
            assert name != "view" or list(args[1]) == list(args[0].shape)
            return cls(args[0].data_of_int8.clone(), args[0].scales.clone())
        unpack = lambda one: one.dequantize() if isinstance(one, Packed) else one  # noqa: E731
        return func(*tree_map(unpack, args), **tree_map(unpack, kwargs or {}))

    def part(self, dim, rank, of):
        scales = self.scales.chunk(of)[rank] if dim == 0 else self.scales
        return Packed(self.data_of_int8.chunk(of, dim)[rank].contiguous(), scales.contiguous())


def to_int8(weight, most=127):
    scales = weight.detach().abs().amax(1, keepdim=True) / most
    return (weight.detach() / scales).round().to(torch.int8), scales


class Int8Linear(nn.Module):
    """A weight of int8 beside a buffer with a scale for each row."""

    def __init__(self, linear):
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        data, scales = to_int8(linear.weight)
        self.weight = nn.Parameter(data, requires_grad=False)
        self.register_buffer("weight_scale", scales)
        self.bias = linear.bias

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) * self.weight_scale, self.bias)


class Int4Linear(nn.Module):
    """A weight with two values in a byte, side by side, or (``dim=0``) one above the other."""

    def __init__(self, linear, dim=1):
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        data, scales = to_int8(linear.weight, most=7)
        low, high = (data + 8).to(torch.uint8).chunk(2, dim)
        self.weight = nn.Parameter(low | (high << 4), requires_grad=False)
        self.register_buffer("weight_scale", scales)
        self.bias, self.dim = linear.bias, dim

    def forward(self, x):
        data = torch.cat([self.weight & 15, self.weight >> 4], self.dim)
        return F.linear(x, (data.to(x.dtype) - 8) * self.weight_scale, self.bias)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.act = nn.LayerNorm(16), nn.GELU()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(8, 16), nn.Linear(16, 8)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class SplitBlock(nn.Module):
    """A block whose ``up`` is split by rows and whose ``down`` is split by columns, by hand, of
    int8 beside scales; nothing is stated but by `state_layouts`. Unsharded with one part.
    """

    def __init__(self, block, part, num_parts):
        super().__init__()
        self.norm, self.act, self.up, self.down = block.norm, block.act, block.up, block.down
        self.bias = nn.Parameter(block.down.bias.detach().clone())
        block.down.bias, self.is_split = None, num_parts > 1
        up, down = block.up, block.down
        up.bias = nn.Parameter(up.bias.detach().chunk(num_parts)[part].clone())
        for layer, dim in ((up, 0), (down, 1)):
            own = layer.weight.detach().chunk(num_parts, dim)[part].contiguous()
            layer.weight = nn.Parameter(own, requires_grad=False)
        up.weight_scale = up.weight_scale.chunk(num_parts)[part].clone()

    def forward(self, x):
        normed = self.norm(x)
        if not self.is_split:
            return x + self.down(self.act(self.up(normed))) + self.bias
        hidden = self.act(self.up(models.CopyToRanks.apply(normed, None)))
        return x + models.SumOverRanks.apply(self.down(hidden), None) + self.bias


def split_by_hand(model, part, num_parts):
    model.blocks = nn.ModuleList([SplitBlock(block, part, num_parts) for block in model.blocks])
    return model


def state_layouts(flex):
    """State how `split_by_hand` has split the weights."""
    for name, of_weight, of_scales in (("up", Shard(0), Shard(0)), ("down", Shard(1), Replicate())):
        for block in ("blocks.0", "blocks.1"):
            place = f"{block}.{name}.weight"
            flex.annotate_layout(place, kind="parameter", tp=of_weight)
            flex.annotate_layout(f"{place}_scale", kind="parameter", tp=of_scales)


def build(kind):
    """A model in which the layers of the blocks are quantised; the same one each time."""
    model = models.seeded(Model)
    _BY_KIND[kind](model)
    return model


def _replace(model, make):
    for block in model.blocks:
        for name in ("up", "down"):
            setattr(block, name, make(getattr(block, name)))


def _packed(model):
    def make(linear):
        linear.weight = nn.Parameter(Packed.of(linear.weight), requires_grad=False)
        return linear

    _replace(model, make)


def _torchao(model):
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model.blocks, Int8WeightOnlyConfig())


def _bitsandbytes(model, bits):
    bnb = pytest.importorskip("bitsandbytes")

    def make(linear):
        out_features, in_features = linear.weight.shape
        weight = linear.weight.detach().clone()
        if bits == 4:
            made = bnb.nn.Linear4bit(in_features, out_features, compute_dtype=torch.float32)
            made.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
        else:
            made = bnb.nn.Linear8bitLt(in_features, out_features, has_fp16_weights=False)
            made.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
        made.bias = linear.bias
        return made.to("cpu")  # quantises

    _replace(model, make)


def _compressed(model, **weights):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor, compress_module
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    config = QuantizationConfig(config_groups={"all": scheme}, ignore=["embed", "head"])
    apply_quantization_config(model, config)
    for block in model.blocks:
        for layer in (block.up, block.down):
            scales, rows = layer.weight_scale, layer.weight.shape[0]
            groups = layer.weight.detach().abs().view(rows, scales.numel() // rows or 1, -1)
            largest = groups.amax(-1) if scales.numel() >= rows else groups.max()
            most = 448 if weights["type"] == "float" else 2 ** (weights["num_bits"] - 1) - 1
            scales.data.copy_((largest / most).view_as(scales))
    compressor = ModelCompressor.from_pretrained_model(model)
    for block in model.blocks:  # compress_model() sends them between ranks, which float8 can't be
        compress_module(block.up)
        compress_module(block.down)
    compressor.add_decompress_hook(model)


_BY_KIND = {
    "a tensor that unpacks itself": _packed,
    "int8 beside scales": lambda model: _replace(model, Int8Linear),
    "two in a byte": lambda model: _replace(model, Int4Linear),
    "two in a byte, by rows": lambda model: _replace(model, lambda one: Int4Linear(one, dim=0)),
    "torchao int8": _torchao,
    "bitsandbytes 4 bits": lambda model: _bitsandbytes(model, 4),
    "bitsandbytes 8 bits": lambda model: _bitsandbytes(model, 8),
    "compressed-tensors int4": lambda model: _compressed(
        model, num_bits=4, type="int", strategy="group", group_size=8, symmetric=True
    ),
    "compressed-tensors float8": lambda model: _compressed(
        model, num_bits=8, type="float", strategy="tensor", symmetric=True
    ),
}
KINDS = tuple(_BY_KIND)
#: Without a way to read their values.
UNKNOWN = ("int8 beside scales", "two in a byte", "two in a byte, by rows")
READABLE = tuple(kind for kind in KINDS if kind not in UNKNOWN)

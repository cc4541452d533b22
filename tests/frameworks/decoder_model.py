"""A small decoder that any framework can shard, and ``parallelize_module``."""

import contextlib
import copy
import functools
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import models
from frameworks.pair import Pair, gradients, randomise, tokens


class Core(nn.Module):
    """What attention does between its projections; (batch, heads, length, head_size)."""

    def forward(self, q, k, v):
        times = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        return (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1) @ v


class DecoderAttention(nn.Module):
    def __init__(self, width, heads, kv_heads):
        super().__init__()
        self.head_size = width // heads
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, kv_heads * self.head_size, bias=False)
        self.wv = nn.Linear(width, kv_heads * self.head_size, bias=False)
        self.core = Core()
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x):
        batch, length, _ = x.shape
        split = (batch, length, -1, self.head_size)
        q, k, v = (layer(x).view(split).transpose(1, 2) for layer in (self.wq, self.wk, self.wv))
        return self.wo(self.core(q, k, v).transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.act = nn.SiLU()
        self.w2 = nn.Linear(hidden, width)

    def forward(self, x):
        return self.w2(self.act(self.w1(x)) * self.w3(x))


class DecoderLayer(nn.Module):
    def __init__(self, width, heads, kv_heads, hidden):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = DecoderAttention(width, heads, kv_heads)
        self.feed_forward = FeedForward(width, hidden)

    def forward(self, x):
        x = x + self.attention(self.n1(x))
        return x + self.feed_forward(self.n2(x))


class Decoder(nn.Module):
    """torchtitan's Llama in small: 8 heads over 4 key-value heads, a gated MLP."""

    def __init__(self, width=32, heads=8, kv_heads=4, hidden=64, vocabulary=48, num_layers=2):
        super().__init__()
        self.tok = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            DecoderLayer(width, heads, kv_heads, hidden) for _ in range(num_layers)
        )
        self.norm = nn.RMSNorm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        x = self.tok(ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


DECODER_SITES = {
    "outside": "tok",
    "column output": "layers.0.attention.wk",
    "act_fn": "layers.0.feed_forward.act",
    "inside attention": "layers.0.attention.core",
    "row output": "layers.0.attention.wo",
    "norm": "layers.1.n2",
    "layer": "layers.0",
    "root": "",
}
DECODER_INPUTS = {f"layers.{i}.attention.core": (1, 2) for i in (0, 1)}  # keys and values
DECODER_PARAMETERS = (
    "tok.weight",
    "layers.0.attention.wk.weight",
    "layers.0.feed_forward.w1.bias",
    "layers.1.feed_forward.w2.weight",
    "layers.1.n2.weight",
)


def decoder(dtype: torch.dtype = torch.float64) -> Decoder:
    return randomise(Decoder().double()).to(dtype)


def decoder_plan(kind: str) -> tuple[dict, dict]:
    """For the model and for each layer. "tp": activations between layers are whole; "sp":
    torchtitan's, they are split along the sequence; "dtensor": as "tp", the MLP's inside as
    DTensors.
    """
    columns = ["attention.wq", "attention.wk", "attention.wv"]
    mlp_columns = ["feed_forward.w1", "feed_forward.w3"]
    rows = ["attention.wo", "feed_forward.w2"]
    if kind == "sp":
        model = {
            "tok": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1)),
        }
        whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        layer = {"n1": SequenceParallel(), "n2": SequenceParallel()}
        layer |= {"attention": whole, "feed_forward": copy.deepcopy(whole)}
        layer |= {name: ColwiseParallel() for name in columns + mlp_columns}
        layer |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in rows}
        return model, layer
    model = {
        "tok": RowwiseParallel(input_layouts=Replicate()),
        "output": ColwiseParallel(output_layouts=Replicate()),
    }
    layer = {name: ColwiseParallel() for name in columns}
    layer |= {name: ColwiseParallel(use_local_output=kind != "dtensor") for name in mlp_columns}
    layer |= {name: RowwiseParallel() for name in rows}
    return model, layer


def parallelized(model: Decoder, kind: str, mesh) -> Decoder:
    model = copy.deepcopy(model)
    of_model, of_layer = decoder_plan(kind)
    parallelize_module(model, mesh, of_model)
    for layer in model.layers:
        parallelize_module(layer, mesh, of_layer)
    return model


@contextlib.contextmanager
def native(tmp_path: Path, kind: str, dtype: torch.dtype = torch.float64) -> Iterator[Pair]:
    model, size = decoder(dtype), dist.get_world_size()
    mesh = models.mesh(1, size)["tp"]
    ids = tokens(2, length=8)
    pair = Pair(
        model,
        functools.partial(parallelized, model, kind, mesh),
        (ids,),
        DECODER_SITES,
        DECODER_PARAMETERS,
        gradients,
        inputs_of=DECODER_INPUTS,
    )
    if kind == "sp":
        pair.columns = lambda full: full.chunk(size, -1)[dist.get_rank()]
    yield pair

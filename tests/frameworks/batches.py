"""Data-parallel models whose activations have batches of other shapes."""

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import models
from frameworks.pair import ROUNDED, Pair, gradients, randomise, tokens


class Masked(nn.Module):
    """Attention with positions (length,) and a mask (length, length) that all rows share."""

    def __init__(self, width=16, vocabulary=48, length=8):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.scores, self.act = nn.Softmax(-1), nn.GELU()
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids, positions, mask):
        x = self.tok(ids) + self.pos(positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = self.scores(q @ k.transpose(-1, -2) + mask)
        return self.head(self.act(x + self.out(weights @ v)))


@contextlib.contextmanager
def masked(tmp_path: Path) -> Iterator[Pair]:
    """The mask and the positions are as long as a rank's part of the batch: that they are shared
    is stated.
    """
    model, size, length = randomise(Masked().double()), dist.get_world_size(), 4
    yield Pair(
        model,
        lambda: DistributedDataParallel(copy.deepcopy(model)),
        (
            tokens(length * size, length=length),
            torch.arange(length),
            torch.full((length, length), -1e9, dtype=torch.float64).triu(1),
        ),
        {"shared": "pos", "fused": "qkv", "inside attention": "scores", "root": ""},
        ("pos.weight", "qkv.weight", "out.bias"),
        gradients,
        dp=size,
        dp_rank=dist.get_rank(),
        batch_dims=(0, None, None),
        sizes={"batch_dim": {"positions": None, "mask": None}},
    )


@contextlib.contextmanager
def positions_first(tmp_path: Path) -> Iterator[Pair]:
    """torch's own encoder, whose activations are (length, batch, width)."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model, size = randomise(encoder.double()), dist.get_world_size()
    yield Pair(
        model,
        lambda: DistributedDataParallel(copy.deepcopy(model)),
        (models.random(6, 2 * size, 32),),
        {"MLP": "layers.0.linear1", "norm": "layers.1.norm1", "layer": "layers.0", "root": ""},
        ("layers.0.self_attn.in_proj_weight", "layers.1.linear2.bias", "layers.1.norm2.weight"),
        gradients,
        outputs={f"layers.{i}.self_attn": () for i in (0, 1)},
        dp=size,
        dp_rank=dist.get_rank(),
        batch_dims=(1,),
        output_batch_dim=1,
        sizes={"batch_dim": 1},
    )


@contextlib.contextmanager
def bert(tmp_path: Path, kind: str) -> Iterator[Pair]:
    """Its token types and positions are buffers of one row; a mask pads each row's end."""
    import transformers

    config = transformers.BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        vocab_size=48,
        max_position_embeddings=16,
        attn_implementation="eager",
    )
    model = randomise(transformers.BertForMaskedLM(config).double()).eval()
    size = dist.get_world_size()

    def shard():
        sharded = copy.deepcopy(model)
        if kind == "ddp":
            return DistributedDataParallel(sharded)
        mesh = models.mesh(size, 1)["dp"]
        for layer in sharded.bert.encoder.layer:
            fully_shard(layer, mesh=mesh)
        return fully_shard(sharded, mesh=mesh)

    ids = tokens(2 * size)
    lengths = torch.arange(len(ids)) % 3 + 3
    yield Pair(
        model,
        shard,
        (ids,),
        {
            "outside": "bert.embeddings.word_embeddings",
            "shared by all rows": "bert.embeddings.token_type_embeddings",
            "column output": "bert.encoder.layer.0.attention.self.query",
            "row output": "bert.encoder.layer.0.attention.output.dense",
            "norm": "bert.encoder.layer.1.output.LayerNorm",
            "root": "",
        },
        (
            "bert.embeddings.token_type_embeddings.weight",
            "bert.encoder.layer.0.attention.self.query.weight",
            "bert.encoder.layer.1.output.LayerNorm.bias",
        ),
        gradients,
        dp=size,
        dp_rank=dist.get_rank(),
        keywords={"attention_mask": (torch.arange(6) < lengths[:, None]).long()},
        tolerance=ROUNDED,
    )

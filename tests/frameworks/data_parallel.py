"""DDP, FSDP1, FSDP2 and HSDP, also over tensor-parallel ranks."""

import contextlib
import copy
import functools
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import models
from frameworks.decoder_model import (
    DECODER_INPUTS,
    DECODER_PARAMETERS,
    DECODER_SITES,
    DecoderLayer,
    decoder,
    parallelized,
)
from frameworks.pair import ROUNDED, Pair, clean, gradients, randomise, tokens


@contextlib.contextmanager
def data_parallel(tmp_path: Path, kind: str, dtype: torch.dtype = torch.float64) -> Iterator[Pair]:
    """The decoder on parts of a batch, under torch's own wrappers."""
    model, size = decoder(dtype), dist.get_world_size()

    def shard():
        sharded = copy.deepcopy(model)
        if kind == "ddp":
            return DistributedDataParallel(sharded)
        if kind.startswith("fsdp1"):
            return FullyShardedDataParallel(
                sharded,
                auto_wrap_policy=wrap_layers,
                use_orig_params=kind == "fsdp1 orig",
                device_id=torch.device("cpu"),
            )
        mesh = models.mesh(size, 1)["dp"] if kind == "fsdp2" else replicas_and_shards()
        for layer in sharded.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(sharded, mesh=mesh)

    yield Pair(
        model,
        shard,
        (tokens(2 * size, length=8),),
        DECODER_SITES,
        DECODER_PARAMETERS,
        fsdp1_gradients if kind.startswith("fsdp1") else gradients,
        inputs_of=DECODER_INPUTS,
        dp=size,
        dp_rank=dist.get_rank(),
    )


def wrap_layers(module, recurse, nonwrapped_numel):
    return recurse or isinstance(module, DecoderLayer)


@functools.cache
def replicas_and_shards():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))


def fsdp1_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """What ``summon_full_params`` shows while the gradients stand in for the parameters."""
    kept = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
    with torch.no_grad():
        for parameter, _ in kept:
            if parameter.grad is not None:  # None: another rank has all of it
                parameter.copy_(parameter.grad)
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        full = {clean(name): value.detach().clone() for name, value in model.named_parameters()}
    with torch.no_grad():
        for parameter, value in kept:
            parameter.copy_(value)
    return full


@contextlib.contextmanager
def tensor_and_data_parallel(tmp_path: Path, kind: str) -> Iterator[Pair]:
    """The decoder, tensor parallel on pairs of ranks, FSDP2 over the pairs."""
    model, mesh = decoder(), models.mesh(2, 2)

    def shard():
        sharded = parallelized(model, kind, mesh["tp"])
        for layer in sharded.layers:
            fully_shard(layer, mesh=mesh["dp"])
        return fully_shard(sharded, mesh=mesh["dp"])

    pair = Pair(
        model,
        shard,
        (tokens(4, length=8),),
        DECODER_SITES,
        DECODER_PARAMETERS,
        gradients,
        inputs_of=DECODER_INPUTS,
        dp=2,
        dp_rank=dist.get_rank() // 2,
    )
    if kind == "sp":
        pair.columns = lambda full: full.chunk(2, -1)[dist.get_rank() % 2]
    yield pair


@contextlib.contextmanager
def gpt2_ddp(tmp_path: Path) -> Iterator[Pair]:
    """Its positional embedding has no batch dim: all data-parallel ranks share it."""
    model, size = randomise(models.gpt2()), dist.get_world_size()
    yield Pair(
        model,
        lambda: DistributedDataParallel(copy.deepcopy(model)),
        (tokens(2 * size),),
        {
            "outside": "transformer.wte",
            "shared by all rows": "transformer.wpe",
            "column output": "transformer.h.0.attn.c_attn",
            "act_fn": "transformer.h.0.mlp.act",
            "row output": "transformer.h.0.attn.c_proj",
            "norm": "transformer.h.1.ln_2",
            "layer": "transformer.h.0",
            "root": "",
        },
        (
            "transformer.wpe.weight",
            "transformer.h.0.attn.c_attn.weight",
            "transformer.h.1.ln_2.bias",
        ),
        gradients,
        outputs={"transformer.h.0.attn": (1,)},
        dp=size,
        dp_rank=dist.get_rank(),
        keywords={"use_cache": False},
        tolerance=ROUNDED,
    )

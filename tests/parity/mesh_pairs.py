"""The decoder over meshes as frameworks make and name them, as rows of the table."""

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import frameworks
import user_scripts
from frameworks import Pair, gradients, num_ranks, rank, tokens


def accelerate_mesh(**sizes):
    """The mesh of a ParallelismConfig, and the dims that FSDP2 shards over."""
    config = pytest.importorskip("accelerate").ParallelismConfig(**sizes)
    mesh = config.build_device_mesh("cpu")
    return mesh, tuple(config.fsdp_dim_names)


def torchtitan_mesh(dp_replicate=1, fsdp=1, tp=1):
    """The dense view of its ``ParallelDims``, and the dims that FSDP2 shards over."""
    world = init_device_mesh("cpu", (num_ranks(),), mesh_dim_names=("world",))
    sizes = (1, dp_replicate, fsdp, tp)
    dense = world._unflatten(0, sizes, ("pp", "dp_replicate", "fsdp", "tp"))
    return dense, ("dp_replicate", "fsdp") if dp_replicate > 1 else ("fsdp",)


@contextlib.contextmanager
def named_mesh(tmp_path: Path, make: Callable, dp: int, tp: int) -> Iterator[Pair]:
    """The decoder over a mesh that a framework makes and names. On one process, of a group of its
    own, all dims have size 1.
    """
    model, is_alone = frameworks.decoder(), not dist.is_initialized()
    if is_alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with warnings.catch_warnings():  # torch's, of slicing a flattened dim
        warnings.simplefilter("ignore")
        mesh, names = make()
        shards = mesh[names] if dp > 1 or is_alone else None

    def shard():
        sharded = copy.deepcopy(model)
        if tp > 1 or is_alone:
            sharded = frameworks.parallelized(model, "tp", mesh["tp"])
        if shards is not None:
            for layer in sharded.layers:
                fully_shard(layer, mesh=shards)
            fully_shard(sharded, mesh=shards)
        return sharded

    pair = Pair(
        model,
        shard,
        (tokens(2 * dp, length=8),),
        user_scripts.fewer(frameworks.DECODER_SITES),
        frameworks.DECODER_PARAMETERS[:3],
        gradients,
        inputs_of=frameworks.DECODER_INPUTS,
        dp=dp,
        dp_rank=rank() // tp,
    )
    try:
        yield pair
    finally:
        if is_alone:
            dist.destroy_process_group()

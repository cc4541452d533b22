"""An MLP of fairscale's tensor-parallel layers."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from frameworks.pair import Pair, clean, gathered, own_groups, randomise, tokens


class FairscaleOracle(nn.Module):
    """Two embeddings, an MLP and a head: each of fairscale's layers once."""

    def __init__(self, width=32, hidden=64, vocabulary=48):
        super().__init__()
        self.emb, self.vemb = nn.Embedding(vocabulary, width), nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.act = nn.GELU()
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        x = self.emb(ids) + self.vemb(ids)
        x = x + self.down(self.act(self.up(self.norm(x))))
        return self.head(x)


@contextlib.contextmanager
def fairscale(tmp_path: Path, tp: int) -> Iterator[Pair]:
    """Layers that shard by hand, plain tensors; more ranks than ``tp`` are replicas under DDP."""
    parallel = pytest.importorskip("fairscale.nn.model_parallel")
    layers = pytest.importorskip("fairscale.nn.model_parallel.layers")
    dp = dist.get_world_size() // tp
    oracle = randomise(FairscaleOracle().double())
    groups = contextlib.ExitStack()
    groups.enter_context(own_groups())
    with contextlib.redirect_stdout(None):
        parallel.initialize_model_parallel(tp)
    group = parallel.get_model_parallel_group()

    def split_dim(name, parameter):
        full = oracle.get_parameter(name).shape
        return next((d for d, n in enumerate(parameter.shape) if n != full[d]), None)

    def shard():
        model = FairscaleOracle()
        model.emb = layers.ParallelEmbedding(48, 32)
        model.vemb = layers.VocabParallelEmbedding(48, 32)
        model.up = layers.ColumnParallelLinear(32, 64, gather_output=False)
        model.down = layers.RowParallelLinear(64, 32, input_is_parallel=True)
        model.head = layers.ColumnParallelLinear(32, 48, gather_output=True)
        model.double()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                dim, full = split_dim(name, parameter), oracle.get_parameter(name)
                parameter.copy_(full if dim is None else full.chunk(tp, dim)[group.rank()])
        if dp == 1:
            return model
        return DistributedDataParallel(model, process_group=parallel.get_data_parallel_group())

    def full_gradients(model):
        full = {}
        for name, parameter in model.named_parameters():
            name, dim = clean(name), split_dim(clean(name), parameter)
            grad = parameter.grad
            full[name] = grad if dim is None else torch.cat(gathered(grad, group), dim)
        return full

    try:
        yield Pair(
            oracle,
            shard,
            (tokens(2 * dp),),
            {
                "outside": "emb",
                "column output": "up",
                "act_fn": "act",
                "row output": "down",
                "norm": "norm",
                "gathered output": "head",
                "root": "",
            },
            ("emb.weight", "up.weight", "up.bias", "down.weight", "norm.weight"),
            full_gradients,
            dp=dp,
            dp_rank=dist.get_rank() // tp,
            sizes={"tensor_parallel_size": tp, "data_parallel_size": dp},
        )
    finally:
        parallel.destroy_model_parallel()
        groups.close()

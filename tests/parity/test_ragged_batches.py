"""Ragged batches: data-parallel ranks whose batches differ in length and in rows, or have no rows.

The oracle is the unsharded model on all rows, padded at the end. It is causal, so no row sees its
padding; its hooks set the padding to zero, as FlexModel does.
"""

import contextlib
import copy
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

import models
from cells import KINDS
from flex_model import FlexModel, HookFunction
from tiers import grid_but

SITES = {
    "forward": ("block.mlp.fc1", "block.mlp"),
    "forward_pre": ("block.mlp.act", "block.mlp"),
    "full_backward": ("block.mlp.act", "block.mlp.fc2"),
    "full_backward_pre": ("block.attn.v", "block.mlp"),
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.block = models.Block()
        self.head = nn.Linear(8, 5)

    columns = tuple(f"block.{name}" for name in models.Block.columns)
    rows = tuple(f"block.{name}" for name in models.Block.rows)

    def forward(self, x):
        return self.head(self.block(self.embed(x)))


def mix(module, full, save_ctx, modules):
    """Mixes rows, and features of the last dim."""
    rows, width = full.shape[0], full.shape[-1]
    over = models.random(rows, rows, seed=4).to(full.dtype)
    mixed = (over @ full.reshape(rows, -1)).reshape(full.shape)
    return full + 0.3 * mixed @ models.random(width, width, seed=3).to(full.dtype)


@dataclass(frozen=True)
class Batch:
    """The rows and the length of each data-parallel rank's batch."""

    rows: tuple
    lengths: tuple

    def of(self, dp):
        return models.random(self.rows[dp], self.lengths[dp], 6, seed=10 + dp)

    @property
    def real(self):
        """Which elements of the padded batch are not padding: (rows, length)."""
        lengths = [n for rows, n in zip(self.rows, self.lengths) for _ in range(rows)]
        return torch.arange(self.longest) < torch.tensor(lengths)[:, None]

    def stand_in(self, dp):
        """What a rank runs: its rows, or the row of a stand-in."""
        return self.of(dp) if self.rows[dp] else models.random(1, self.lengths[dp], 6, seed=30)

    @property
    def longest(self):
        return max(n for rows, n in zip(self.rows, self.lengths) if rows)

    def padded(self):
        parts = [
            nn.functional.pad(x, (0, 0, 0, self.longest - x.shape[1]))
            for dp, x in enumerate(map(self.of, range(len(self.rows))))
            if self.rows[dp]
        ]
        return torch.cat(parts)

    def loss(self, output, dp=None):
        """The mean over all real tokens; of a rank, its sum weighs dp / all tokens."""
        if dp is None:
            return output.sin().mean(-1)[self.real].mean()
        return output.sin().mean(-1).sum() * len(self.rows) / int(self.real.sum())

    def start(self, dp):
        return sum(self.rows[:dp])


BATCHES = {
    "rows": Batch((3, 1), (5, 5)),
    "lengths": Batch((2, 2), (10, 12)),
    "both": Batch((1, 3), (4, 3)),
    "none": Batch((3, 0), (4, 4)),
    "none first": Batch((0, 2), (3, 4)),
}


def by_rank(batch, edit, full):
    """What the edit makes of each rank's own rows, without padding; and these rows."""
    edited, parts = full.clone(), []
    for dp, (rows, length) in enumerate(zip(batch.rows, batch.lengths)):
        own = slice(batch.start(dp), batch.start(dp) + rows), slice(0, length)
        parts.append(full[own].detach().clone() if rows else None)
        if rows and edit is not None:
            edited = edited.index_put(
                (torch.arange(own[0].start, own[0].stop)[:, None], torch.arange(length)),
                edit(None, full[own].clone(), None, None),
            )
    return edited, parts


def oracle(model, batch, kind, site, edit, local=False):
    """Record, output and gradients of the unsharded model on the padded batch."""
    records, real = [], batch.real
    module = model.get_submodule(site)

    def run(tensor):
        if local:
            mask = real.reshape(*real.shape, *[1] * (tensor.dim() - 2)).to(tensor.dtype)
            edited, parts = by_rank(batch, edit, tensor * mask)
            records.append(parts)
            return edited * mask
        mask = real.reshape(*real.shape, *[1] * (tensor.dim() - 2)).to(tensor.dtype)
        full = tensor * mask
        records.append(full.detach().clone())
        if edit is None:
            return tensor
        edited = edit(None, full, None, None)
        return edited * mask  # what is written to padding is dropped

    if kind == "forward":
        module.register_forward_hook(lambda module, args, output: run(output))
    elif kind == "forward_pre":
        module.register_forward_pre_hook(lambda module, args: (run(args[0]), *args[1:]))
    else:
        register = getattr(module, f"register_{kind}_hook")
        register(lambda module, grads, *_: (run(grads[0]),))
    output = model(batch.padded())
    batch.loss(output).backward()
    return records, output, {name: p.grad for name, p in model.named_parameters()}


def sharded(name, model, tp):
    dp, my_dp = dist.get_world_size() // tp, dist.get_rank() // tp
    parallelism = models.Parallelism(name, tp=tp, dp=dp)
    return parallelism, parallelism.shard(model), my_dp


def run(flex, batch, my_dp):
    has_rows = batch.rows[my_dp] > 0
    with contextlib.nullcontext() if has_rows else flex.no_rows():
        output = flex(batch.stand_in(my_dp))
    (batch.loss(output, my_dp) * has_rows).backward()
    return output[: batch.rows[my_dp]]


def compare(batch, parallelism, my_dp, whole, expected, model, output, records, kind, edit):
    want, all_output, gradients = expected
    start, rows, length = batch.start(my_dp), batch.rows[my_dp], batch.lengths[my_dp]
    assert_close(output, all_output[start : start + rows, :length])
    if dist.get_rank() == 0:
        assert_close(records, want)
    found = parallelism.full_gradients(whole, model)
    for name, grad in gradients.items():
        assert_close(found[name], grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("name", grid_but(["dp", "ddp", "fsdp2"], "dp"))
@pytest.mark.parametrize("kind", KINDS[:-1])
def test_global_batches_equal_the_padded_batch(kind, name):
    check(kind, name, tp=1)


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("name", grid_but(["dp", "ddp", "fsdp2"], "dp"))
@pytest.mark.parametrize("kind", KINDS[:-1])
def test_local_batches_equal_the_rows_of_the_padded_batch(kind, name):
    check(kind, name, tp=1, dp_batch="local")


@pytest.mark.ranks(4, timeout=120)
@pytest.mark.parametrize("kind", KINDS[:-1])
def test_local_batches_over_tensor_parallel_ranks(kind):
    check(kind, "dp_tp", tp=2, dp_batch="local")


@pytest.mark.ranks(4, timeout=120)
@pytest.mark.parametrize("kind", KINDS[:-1])
def test_global_batches_over_tensor_parallel_ranks(kind):
    check(kind, "dp_tp", tp=2)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dp_batch", ["global", "local"])
def test_batches_over_tensor_parallel_ranks_whose_weights_fsdp2_shards(dp_batch):
    """Before, local hooks did not know the data-parallel dim of the weights' mesh."""
    whole, batch = models.seeded(Model).double(), BATCHES["both"]
    for kind, site in (("forward", "block.mlp.fc1"), ("full_backward", "block.mlp.fc2")):
        expected = oracle(copy.deepcopy(whole), batch, kind, site, mix, dp_batch == "local")
        parallelism, model, my_dp = sharded("dtensor x fsdp2", whole, tp=2)
        with FlexModel(model, records := {}, dp_batch=dp_batch, timeout=20) as flex:
            getattr(flex, f"register_{kind}_hook")(HookFunction(site, editing_function=mix))
            output = run(flex, batch, my_dp)
        found = records.get(site, [])
        compare(batch, parallelism, my_dp, whole, expected, model, output, found, kind, mix)


def check(kind, name, tp, dp_batch="global"):
    for which, batch in BATCHES.items():
        for site in SITES[kind]:
            for edit in (None, mix) if site == SITES[kind][0] else (mix,):
                whole = models.seeded(Model).double()
                local = dp_batch == "local"
                expected = oracle(copy.deepcopy(whole), batch, kind, site, edit, local)
                parallelism, model, my_dp = sharded(name, whole, tp)
                records = {}
                with FlexModel(
                    model, records, **parallelism.sizes, dp_batch=dp_batch, timeout=20
                ) as flex:
                    hook = HookFunction(site, editing_function=edit)
                    getattr(flex, f"register_{kind}_hook")(hook)
                    try:
                        output = run(flex, batch, my_dp)
                    except Exception as error:
                        raise AssertionError(f"{which}, {site}, {edit}") from error
                found = records.get(site, [])
                compare(
                    batch, parallelism, my_dp, whole, expected, model, output, found, kind, edit
                )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dp_batch", [None, "global", "local"])
def test_gradients_of_parameters_need_no_choice(dp_batch):
    """Before, with hooks on parameters alone, that ranks have other lengths was not noticed."""

    def halve(module, full, save_ctx, modules):
        return full / 2

    site = "block.mlp.fc1.weight"
    for batch in BATCHES.values():
        whole = models.seeded(Model).double()
        batch.loss(whole(batch.padded())).backward()
        expected = {name: p.grad for name, p in whole.named_parameters()}
        records = {}
        parallelism, model, my_dp = sharded("ddp", whole, tp=1)
        with FlexModel(model, records, dp_batch=dp_batch, output_ranks="all", timeout=20) as flex:
            flex.register_hook(HookFunction(site, editing_function=halve))
            run(flex, batch, my_dp)
        assert_close(records[site], [expected[site]])
        expected[site] = expected[site] / 2
        assert_close(parallelism.full_gradients(whole, model), expected)

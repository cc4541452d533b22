"""Ragged batches: data-parallel ranks whose batches differ in length and in rows, or have no rows.

The oracle of ``dp_batch="global"`` is the unsharded model on all rows, padded at the end. It is
causal, so no row sees its padding; its hooks set the padding to zero, as FlexModel does. That of
``"local"`` is the unsharded model on each rank's own rows and loss, alone.
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
from flex_model import FlexModel, HookFunction
from oracle import KINDS
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
        self.tail = nn.Identity()  # called ``times`` times
        self.head = nn.Linear(8, 5)

    columns = tuple(f"block.{name}" for name in models.Block.columns)
    rows = tuple(f"block.{name}" for name in models.Block.rows)

    def forward(self, x, times=1):
        x = self.block(self.embed(x))
        for _ in range(times):
            x = self.tail(x) * 0.9
        return self.head(x)


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


def hook(module, kind, run):
    """Hook the tensor of this kind at a module of the unsharded model."""
    if kind == "forward":
        module.register_forward_hook(lambda module, args, output: run(output))
    elif kind == "forward_pre":
        module.register_forward_pre_hook(lambda module, args: (run(args[0]), *args[1:]))
    else:
        register = getattr(module, f"register_{kind}_hook")
        register(lambda module, grads, *_: (run(grads[0]),))


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


def oracle(model, batch, kind, site, edit):
    """Record, output and gradients of the unsharded model on the padded batch."""
    records, real = [], batch.real

    def run(tensor):
        mask = real.reshape(*real.shape, *[1] * (tensor.dim() - 2)).to(tensor.dtype)
        full = tensor * mask
        records.append(full.detach().clone())
        if edit is None:
            return tensor
        edited = edit(None, full, None, None)
        return edited * mask  # what is written to padding is dropped

    hook(model.get_submodule(site), kind, run)
    output = model(batch.padded())
    batch.loss(output).backward()
    return records, output, gradients(model)


def own_oracle(model, batch, dp, kind, site, edit, times=1):
    """Record, output and gradients of the unsharded model on one rank's own rows, with its loss.
    One without rows has no record and no gradient.
    """
    records = []

    def run(tensor):
        records.append(tensor.detach().clone())
        return tensor if edit is None else edit(None, tensor, None, None)

    has_rows = batch.rows[dp] > 0
    if has_rows:
        hook(model.get_submodule(site), kind, run)
    output = model(batch.stand_in(dp), times)
    (batch.loss(output, dp) * has_rows).backward()
    return records, output[: batch.rows[dp]], gradients(model)


def sharded(name, model, tp):
    dp, my_dp = dist.get_world_size() // tp, dist.get_rank() // tp
    parallelism = models.Parallelism(name, tp=tp, dp=dp)
    return parallelism, parallelism.shard(model), my_dp


def run(flex, batch, my_dp, times=1):
    has_rows = batch.rows[my_dp] > 0
    with contextlib.nullcontext() if has_rows else flex.no_rows():
        output = flex(batch.stand_in(my_dp), times)
    (batch.loss(output, my_dp) * has_rows).backward()
    return output[: batch.rows[my_dp]]


def compare(parallelism, whole, model, expected):
    found = parallelism.full_gradients(whole, model)
    for name, grad in expected.items():
        assert_close(found[name], grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("name", grid_but(["dp", "ddp", "fsdp2"], "dp"))
@pytest.mark.parametrize("kind", KINDS[:-1])
def test_global_batches_equal_the_padded_batch(kind, name):
    check_global(kind, name, tp=1)


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("name", grid_but(["dp", "ddp", "fsdp2"], "dp"))
@pytest.mark.parametrize("kind", KINDS[:-1])
def test_local_batches_equal_the_model_on_a_ranks_own_rows(kind, name):
    check_local(kind, name, tp=1)


@pytest.mark.ranks(4, timeout=120)
@pytest.mark.parametrize("name", grid_but(["dp_tp", "dtensor x fsdp2"], "dp_tp"))
@pytest.mark.parametrize("kind", grid_but(KINDS[:-1], "forward", "full_backward"))
def test_local_batches_over_tensor_parallel_ranks(kind, name):
    check_local(kind, name, tp=2, batches=["both", "none first"])


@pytest.mark.ranks(4, timeout=120)
@pytest.mark.parametrize("name", grid_but(["dp_tp", "dtensor x fsdp2"], "dp_tp"))
@pytest.mark.parametrize("kind", grid_but(KINDS[:-1], "full_backward"))
def test_global_batches_over_tensor_parallel_ranks(kind, name):
    check_global(kind, name, tp=2)


def cases(kind, batches):
    for which in batches:
        for site in SITES[kind]:
            for edit in (None, mix) if site == SITES[kind][0] else (mix,):
                yield which, site, edit


def check_global(kind, name, tp, batches=tuple(BATCHES)):
    for which, site, edit in cases(kind, batches):
        whole, batch = models.seeded(Model).double(), BATCHES[which]
        want, all_output, of_whole = oracle(copy.deepcopy(whole), batch, kind, site, edit)
        parallelism, model, my_dp = sharded(name, whole, tp)
        sizes, records = parallelism.sizes, {}
        with FlexModel(model, records, **sizes, dp_batch="global", timeout=20) as flex:
            getattr(flex, f"register_{kind}_hook")(HookFunction(site, editing_function=edit))
            try:
                output = run(flex, batch, my_dp)
            except Exception as error:
                raise AssertionError(f"{which}, {site}, {edit}") from error
        start, rows, length = batch.start(my_dp), batch.rows[my_dp], batch.lengths[my_dp]
        assert_close(output, all_output[start : start + rows, :length])
        if dist.get_rank() == 0:
            assert_close(records.get(site, []), want)
        compare(parallelism, whole, model, of_whole)


def check_local(kind, name, tp, batches=tuple(BATCHES), sites=(), times=lambda dp: 1):
    """The gradients of parameters are the mean of those that the ranks have alone; each rank calls
    the module at the end ``times(dp)`` times.
    """
    num_dp = dist.get_world_size() // tp
    for which, site, edit in sites or cases(kind, batches):
        whole, batch = models.seeded(Model).double(), BATCHES[which]
        of_ranks = [
            own_oracle(copy.deepcopy(whole), batch, dp, kind, site, edit, times(dp))
            for dp in range(num_dp)
        ]
        parallelism, model, my_dp = sharded(name, whole, tp)
        sizes, records = parallelism.sizes, {}
        with FlexModel(model, records, **sizes, dp_batch="local", timeout=20) as flex:
            getattr(flex, f"register_{kind}_hook")(HookFunction(site, editing_function=edit))
            try:
                output = run(flex, batch, my_dp, times(my_dp))
            except Exception as error:
                raise AssertionError(f"{which}, {site}, {edit}") from error
            weight = "block.mlp.fc2.weight"
            if "fsdp2" in name or "ddp" in name:
                grad = flex.get_module_gradient(weight)
            full = flex.get_module_parameter(weight) if "_" not in name else None
        want, expected, _ = of_ranks[my_dp]
        assert_close(output, expected)
        assert_close(records.get(site, []), want if dist.get_rank() % tp == 0 else [])
        mean = {
            one: sum(of_rank[2][one] for of_rank in of_ranks) / num_dp for one in of_ranks[0][2]
        }
        compare(parallelism, whole, model, mean)
        if "fsdp2" in name or "ddp" in name:
            assert_close(grad, mean[weight])
        if full is not None:
            assert_close(full, whole.get_parameter(weight).detach(), rtol=0, atol=0)


def numbers_of_calls(kind):
    return [("both", "tail", edit) for edit in (None, mix)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["dp", "ddp", "fsdp2"])
@pytest.mark.parametrize("kind", ["forward", "full_backward"])
def test_local_ranks_may_call_a_module_different_numbers_of_times(kind, name):
    check_local(kind, name, 1, sites=numbers_of_calls(kind), times=lambda dp: 1 + 2 * dp)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", grid_but(["dp_tp", "dtensor x fsdp2"], "dp_tp"))
@pytest.mark.parametrize("kind", ["forward", "full_backward"])
def test_local_groups_may_call_a_module_different_numbers_of_times(kind, name):
    check_local(kind, name, 2, sites=numbers_of_calls(kind), times=lambda dp: 1 + 2 * dp)


@pytest.mark.ranks(4)
def test_local_groups_may_run_different_numbers_of_times():
    """As ``generate`` does; each group has its own ``save_ctx``, and its records on its first."""
    parallelism, model, dp = sharded("dp_tp", whole := models.seeded(Model).double(), tp=2)
    batch, records, seen = BATCHES["both"], {}, []

    def count(module, full, save_ctx, modules):
        save_ctx.calls = getattr(save_ctx, "calls", 0) + 1
        return full + save_ctx.calls

    def see(module, args, output):
        seen.append(output.detach())
        return output + len(seen)

    whole.block.mlp.fc1.register_forward_hook(see)
    sizes = parallelism.sizes
    with FlexModel(model, records, **sizes, dp_batch="local", timeout=20) as flex:
        assert (flex.dp_size, flex.tp_size) == (2, 2)
        flex.register_forward_hook(HookFunction("block.mlp.fc1", editing_function=count))
        with flex.active():
            for _ in range(1 + 2 * dp):
                assert_close(flex(batch.of(dp)), whole(batch.of(dp)))
        assert flex.save_ctx.calls == 1 + 2 * dp
    assert_close(records.get("block.mlp.fc1", []), seen if dist.get_rank() % 2 == 0 else [])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dp_batch", [None, "global"])
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

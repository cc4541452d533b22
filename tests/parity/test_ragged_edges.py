"""Ragged batches at the edges: what is refused, packed rows, ends of epochs, failures."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import models
from flex_model import FlexModel, HookError, HookFunction, Select
from test_ragged_batches import Batch, Model, mix

LENGTHS = Batch((2, 2), (10, 12))


def own(batch=LENGTHS):
    return batch.of(dist.get_rank())


def wrapped(model=None, records=None, **settings):
    model = models.seeded(Model).double() if model is None else model
    return FlexModel(
        model, {} if records is None else records, data_parallel_size=2, timeout=20, **settings
    )


@pytest.mark.ranks(2)
def test_without_the_option_different_lengths_are_an_error_that_names_it():
    flex = wrapped()
    flex.register_forward_hook(HookFunction("block.mlp"))
    with pytest.raises(ValueError, match='dp_batch="global"'):
        flex(own())
    flex.restore()


class Flat(nn.Module):
    """Joins rows with positions, and shares a table of positions."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions, self.inner = nn.Identity(), nn.Identity(), nn.Linear(6, 6)

    def forward(self, x):
        shared = self.positions(torch.arange(x.shape[1], dtype=x.dtype)[:, None])
        flat = self.tokens(self.inner(x).reshape(-1, 6))
        return flat.view(x.shape) + shared


@pytest.mark.ranks(2)
@pytest.mark.parametrize("site", ["tokens", "positions"])
def test_tensors_that_no_padding_joins_are_refused_and_seen_by_rank(site):
    records, model = {}, models.seeded(Flat).double()
    with wrapped(model, dp_batch="global") as flex:
        flex.register_forward_hook(HookFunction(site))
        with pytest.raises(ValueError, match='dp_batch="local"'):
            flex(own())
    with wrapped(model, records, dp_batch="local") as flex:
        flex.register_forward_hook(HookFunction(site))
        flex(own())
    (record,) = records[site]
    assert len(record) == ((20, 24) if site == "tokens" else (10, 12))[dist.get_rank()]


@pytest.mark.ranks(2)
def test_lengths_are_known_before_the_edit_and_select_counts_the_padded_batch():
    seen, records = [], {}

    def edit(module, full, save_ctx, modules):
        seen.append((tuple(full.shape), flex.lengths["block.mlp"][-1]))
        return torch.full_like(full, 7.0)

    flex = wrapped(records=records, dp_batch="global", pad_value=-1)
    flex.register_forward_hook(
        HookFunction("block.mlp", None, edit, select=Select(positions=[3, 11]))
    )
    flex.register_forward_hook(HookFunction("block.mlp.fc1", output_name="fc1"))
    with torch.no_grad():
        flex(own())
    assert seen == [((4, 2, 8), {1: (10, 10, 12, 12)})]
    assert flex.lengths["fc1"] == [{1: (10, 10, 12, 12)}]
    if dist.get_rank() == 0:
        (record,) = records["fc1"]
        assert record.shape == (4, 12, 12) and bool((record[:2, 10:] == -1).all())
    flex.restore()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("edit_on", ["all", "rank0"])
@pytest.mark.parametrize("output_ranks", ["all", "rank0"])
@pytest.mark.parametrize("dp_batch", ["global", "local"])
def test_trainable_modules_get_their_gradient(dp_batch, output_ranks, edit_on):
    """That of all real tokens, or of a rank's own loss."""
    whole, batch, rank = models.seeded(Model).double(), LENGTHS, dist.get_rank()
    probe = models.seeded(nn.Linear, 8, 8, seed=5).double()

    def edit(module, full, save_ctx, modules):
        return full + modules["probe"](mix(module, full, save_ctx, modules))

    oracle, oracle_probe = copy.deepcopy(whole), copy.deepcopy(probe)
    is_global = dp_batch == "global"
    mask = batch.real[..., None] if is_global else 1
    oracle.block.mlp.register_forward_hook(
        lambda module, args, out: edit(module, out * mask, None, {"probe": oracle_probe})
    )
    if is_global:
        batch.loss(oracle(batch.padded())).backward()
    else:
        batch.loss(oracle(own()), rank).backward()
    records, settings = {}, {"edit_on": edit_on, "output_ranks": output_ranks}
    with wrapped(whole, records, dp_batch=dp_batch, **settings) as flex:
        ours = models.seeded(nn.Linear, 8, 8, seed=5 + rank).double()
        flex.register_trainable_module("probe", ours)
        assert_close(ours.state_dict(), probe.state_dict())  # rank 0's, on every rank
        flex.register_forward_hook(HookFunction("block.mlp", editing_function=edit))
        batch.loss(flex(own()), rank).backward()
    if edit_on == "all" or rank == 0 or not is_global:
        assert_close(ours.weight.grad, oracle_probe.weight.grad)
    is_recorded = output_ranks == "all" or rank == 0 or not is_global
    assert bool(records.get("block.mlp")) == is_recorded
    if not is_global:
        for one, other in zip(whole.parameters(), oracle.parameters()):
            assert_close(one.grad, other.grad)


@pytest.mark.ranks(2)
def test_an_error_on_one_ranks_own_rows():
    """The other has a run of its own, and can read parameters with it afterwards."""
    fails = [True]

    def edit(module, full, save_ctx, modules):
        if dist.get_rank() == 1 and fails[0]:
            raise RuntimeError("of rank 1")
        return full * 2

    flex = wrapped(dp_batch="local")
    flex.register_forward_hook(HookFunction("block.mlp", None, edit))
    if dist.get_rank() == 1:
        with pytest.raises(HookError, match="of rank 1"):
            flex(own())
    else:
        flex(own())
    fails[0] = False
    expected = models.seeded(Model).double()
    assert_close(flex.get_module_parameter("head.bias"), expected.head.bias.detach())
    expected.block.mlp.register_forward_hook(lambda module, args, out: out * 2)
    assert_close(flex(own()), expected(own()))
    flex.restore()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("first", ["local", "global"])
def test_hooks_on_own_rows_and_on_the_batch_of_two_flex_models(first):
    """The second sees what the first has made, or is refused."""
    second = "global" if first == "local" else "local"
    whole, batch = models.seeded(Model).double(), LENGTHS
    model = copy.deepcopy(whole)
    one, two = wrapped(model, dp_batch=first), wrapped(model, dp_batch=second)
    one.register_forward_hook(HookFunction("block.mlp.fc1", None, lambda m, full, *_: full * 2))
    two.register_forward_hook(HookFunction("block.mlp.act", None, mix))
    oracle, mask = copy.deepcopy(whole), batch.real[..., None]
    oracle.block.mlp.fc1.register_forward_hook(lambda module, args, out: out * 2)

    def edit(module, args, out):
        if second == "global":
            return mix(None, out * mask, None, None)
        parts = [mix(None, part, None, None) for part in (out[:2, :10], out[2:])]
        return torch.cat([nn.functional.pad(parts[0], (0, 0, 0, 2)), parts[1]])

    oracle.block.mlp.act.register_forward_hook(edit)
    rank = dist.get_rank()
    expected = oracle(batch.padded())[2 * rank : 2 * rank + 2, : batch.lengths[rank]]
    for _ in range(2):
        if first == "local":  # nothing is known of what each rank made of its own rows
            with pytest.raises(ValueError, match="over the data-parallel ranks is not known"):
                two(own())
        else:
            assert_close(one(own()), expected)
    two.restore()
    one.restore()


@pytest.mark.ranks(2)
def test_a_stand_in_is_refused_by_hooks_that_would_count_its_rows():
    batch = Batch((2, 2), (4, 4))
    flex = wrapped()
    flex.register_forward_hook(HookFunction("block.mlp"))
    none = flex.no_rows() if dist.get_rank() == 1 else contextlib.nullcontext()
    with pytest.raises(ValueError, match=r"no_rows\(\)"), none:
        flex(own(batch))
    flex.register_hook(HookFunction("block.mlp.fc1.weight"))  # which would leave them out
    none = flex.no_rows() if dist.get_rank() == 1 else contextlib.nullcontext()
    with pytest.raises(ValueError, match=r"block.mlp'.*no_rows\(\)"), none:
        flex(own(batch))
    flex.restore()


@pytest.mark.ranks(2)
def test_batches_without_rows_that_the_model_can_run():
    records, model, whole = {}, models.mlp(), models.mlp()
    flex = wrapped(model, records, dp_batch="global")
    flex.register_forward_hook(HookFunction("fc1", editing_function=lambda m, full, *_: full * 2))
    for rows in ((2, 0), (0, 3), (2, 1)):
        x = models.random(sum(rows), 6)
        output = flex(x.split(rows)[dist.get_rank()])
        model.zero_grad()
        output.sum().backward()
        assert output.shape == (rows[dist.get_rank()], 5)
        if dist.get_rank() == 0:
            assert_close(records["fc1"], [whole.fc1(whole.inp(x)).detach()])
    flex.restore()


@pytest.mark.ranks(2)
def test_join_of_ddp():
    """With DDP's join a rank without rows does not run the model: hooks on a rank's own rows need
    no other rank.
    """
    rank, calls, records = dist.get_rank(), [], {}
    model = DistributedDataParallel(models.seeded(Model).double())
    flex = FlexModel(model, records, data_parallel_size=2, dp_batch="local", timeout=20)
    flex.register_forward_hook(
        HookFunction("block.mlp", None, lambda m, full, *_: calls.append(1) or full * 2)
    )
    with model.join():
        for _ in range(1 + 2 * rank):
            flex(own()).sum().backward()
    assert len(calls) == 1 + 2 * rank and len(records["block.mlp"]) == 1
    flex.restore()

"""Data parallelism: one batch over the ranks is one global batch to the edit."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import models
import pipelines
from cells import check_cells, mean_loss
from flex_model import FlexModel, HookFunction
from oracle import KINDS
from shared_edits import mixing_rows
from tiers import grid_but

ROWS = (3, 1)


@dataclass(frozen=True)
class ThreeAndOne(models.Parallelism):
    def my_rows(self, batch):
        return batch.split(ROWS)[dist.get_rank()]


def weighted_loss(output):
    """Each rank's mean loss weighs dp x rows / N, so that the mean over ranks is the batch's."""
    return mean_loss(output) * (len(ROWS) * len(output) / sum(ROWS))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS[:-1])
@pytest.mark.parametrize("name", grid_but(["dp", "ddp", "fsdp2"], "ddp"))
def test_batches_of_three_and_one_equal_a_batch_of_four(name, kind):
    check_cells(ThreeAndOne(name, dp=2), kind, num_sites=2, loss=weighted_loss)


class Masked(nn.Module):
    """Given a mask first, whose rows are not the batch's."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, mask, x):
        return self.model(x @ mask)


MASK = models.random(6, 6, seed=9)


def of_a_run(register, rows_of, batches, takes_a_mask, **sizes):
    """Records, and my rows of the outputs and of the inputs' gradients, over several forwards."""
    records, seen = {}, []
    model = Masked(models.mlp()) if takes_a_mask else models.mlp()
    flex = FlexModel(model, records, **sizes)
    name = "model.fc1" if takes_a_mask else "fc1"
    getattr(flex, register)(HookFunction(name, editing_function=mixing_rows))
    for batch in batches:
        mine = rows_of(batch).clone().requires_grad_()
        output = flex(MASK, mine) if takes_a_mask else flex(mine)
        mean_loss(output).backward()
        share = len(mine) / len(batch)  # a rank's loss is the mean of its own rows
        seen += [output.detach(), mine.grad * share]
    return records.get(name, []), seen


@pytest.mark.ranks(2)
@pytest.mark.parametrize("takes_a_mask", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("register", ["register_forward_hook", "register_full_backward_hook"])
def test_rows_that_happen_to_be_equal_on_all_ranks_are_rows_of_one_batch(
    register, rows, takes_a_mask
):
    """The next ones may differ, in the same shapes. A mask that may hold rows or not is stated to
    be shared by all rows.
    """
    twice = torch.cat([models.random(rows, 6)] * 2)
    batches = [twice, models.random(2 * rows, 6, seed=1), twice, models.random(2 * rows, 6, seed=2)]
    alone = pipelines.alone_group()
    expected, whole = of_a_run(
        register, lambda batch: batch, batches, takes_a_mask, process_group=alone
    )
    records, mine = of_a_run(
        register,
        lambda batch: batch.chunk(2)[dist.get_rank()],
        batches,
        takes_a_mask,
        data_parallel_size=2,
        batch_dim={"mask": None} if takes_a_mask else 0,
    )
    assert_close(mine, [tensor.chunk(2)[dist.get_rank()] for tensor in whole])
    if dist.get_rank() == 0:
        assert_close(records, expected)


@pytest.mark.ranks(4)
def test_a_forward_of_rows_that_happen_to_be_equal_is_computed_once_more():
    """Its layouts are remembered for that, and not for other forwards."""

    class Recomputing(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    def run(parallelism, **sizes):
        found = []
        model = Recomputing(parallelism.shard(models.mlp()))
        flex = FlexModel(model, **(sizes or parallelism.sizes))
        flex.register_forward_hook(HookFunction("inner.fc1", editing_function=mixing_rows))
        for batch in (twice, models.random(4, 6, seed=1), twice):
            mine = parallelism.my_rows(batch).clone().requires_grad_()
            mean_loss(flex(mine)).backward()
            found.append(mine.grad * len(mine) / len(batch))
        return found

    twice = torch.cat([models.random(2, 6)] * 2)
    sharded = models.FOUR_RANKS["tp x dp"]
    whole = run(models.ONE_RANK, process_group=pipelines.alone_group())
    assert_close(run(sharded), [sharded.my_rows(tensor) for tensor in whole])


class Cached(nn.Module):
    """Keeps its last tokens in a buffer that it makes itself."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", None)
        self.before, self.after = nn.Identity(), nn.Identity()

    def forward(self, x, step: int):
        if self.cache is None:
            self.cache = torch.zeros(x.shape[0], 3, x.shape[2], dtype=x.dtype)
        seen = self.before(self.cache * 1)
        self.cache[:, step] = x[:, -1]
        return self.after(seen.sum(1) + self.cache.sum(1))


@pytest.mark.ranks(2)
def test_a_buffer_that_a_forward_makes_holds_what_it_put_there():
    """A new length is followed anew: the rows in the buffer were taken for one that all ranks have,
    without a word where they are equal, as zeros are.
    """

    expected, records = {"before": [], "after": []}, {}
    whole = Cached()
    for name, into in expected.items():
        whole.get_submodule(name).register_forward_hook(
            lambda module, args, output, into=into: into.append(output.clone())
        )
    with FlexModel(Cached(), records, data_parallel_size=2, output_ranks="all") as flex:
        for name in expected:
            flex.register_forward_hook(HookFunction(name, None))
        for step, (length, factor) in enumerate([(2, 0), (3, 1), (2, 1)]):
            x = factor * models.random(4, length, 5, seed=step)
            whole(x, step)
            flex(x.chunk(2)[dist.get_rank()], step)
            for name, values in expected.items():
                assert_close(records[name], values[-1:])


class Positions(nn.Module):
    """Adds one table to all rows."""

    def __init__(self):
        super().__init__()
        self.table, self.shared = nn.Parameter(models.random(3, 6)), nn.Identity()

    def forward(self, x):
        return x + self.shared(self.table * 2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("edit_on", ["all", "rank0"])
def test_an_edit_of_what_all_rows_share_has_the_mean_of_the_ranks_gradients(edit_on):
    batch, whole, model = models.random(4, 3, 6), Positions(), Positions()
    whole.shared.register_forward_hook(lambda module, args, out: mixing_rows(module, out, {}, {}))
    mean_loss(whole(batch)).backward()
    with FlexModel(model, data_parallel_size=2, edit_on=edit_on) as flex:
        flex.register_forward_hook(HookFunction("shared", editing_function=mixing_rows))
        mean_loss(flex(batch.chunk(2)[dist.get_rank()])).backward()
    assert_close(model.table.grad, whole.table.grad)

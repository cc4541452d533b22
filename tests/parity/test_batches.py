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


class Recurrent(nn.Module):
    """Its state is (layers, rows, features)."""

    def __init__(self):
        super().__init__()
        self.proj, self.gru = nn.Linear(6, 6), nn.GRU(6, 6, 2, batch_first=True)

    def forward(self, x, state=None):
        state = x[:, :2].transpose(0, 1) if state is None else state
        return self.gru(x, self.proj(state))


class Operator(nn.Module):
    """Points that all rows share come first."""

    def __init__(self):
        super().__init__()
        self.proj, self.branch = nn.Linear(2, 6), nn.Linear(6, 6)

    def forward(self, points, x):
        return self.branch(x) @ self.proj(points).t(), None


def three_calls(flex, *args):
    """Of a batch and of the state that the call before has returned."""
    state = None
    for _ in range(3):
        output, state = flex(*args, *([] if state is None else [state.detach()]))
        mean_loss(output).backward()
        yield output.detach()


def check_calls(make, args, x, **settings):
    """Each rank's calls with its rows are the twin's with all of them."""
    found = []
    of_ranks = {"data_parallel_size": 2, **settings}
    for rows, how in (x, {"process_group": pipelines.alone_group()}), (my_half(x), of_ranks):
        model, records, outputs, seen = models.seeded(make).double(), {}, [], []
        with FlexModel(model, records, **how) as flex:
            flex.register_forward_hook(HookFunction("proj", editing_function=mixing_rows))
            flex.register_full_backward_pre_hook(HookFunction("proj", output_name="gradient"))
            for output in three_calls(flex, *args, rows):
                outputs.append(output)
                seen += [tensor for tensors in records.values() for tensor in tensors]
        found.append((outputs, model.proj.weight.grad, seen))
    (whole, of_whole, expected), (mine, own, records) = found
    dist.all_reduce(own)
    assert_close(own / 2, of_whole)
    assert_close(mine, [my_half(output) for output in whole])
    if dist.get_rank() == 0:
        assert_close(records, expected)


def my_half(tensor):
    return tensor.chunk(2)[dist.get_rank()]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rows", [2, 4])
def test_state_that_the_model_returned_has_its_rows_where_they_were(rows):
    """Also where a rank has as many rows as there are layers, or one."""
    check_calls(Recurrent, (), models.random(rows, 3, 6))


@pytest.mark.ranks(2)
def test_an_equal_argument_before_one_with_other_rows_is_not_taken_for_rows():
    points, x = models.random(5, 2), models.random(4, 6)
    flex = FlexModel(models.seeded(Operator).double(), data_parallel_size=2)
    flex.register_forward_hook(HookFunction("proj"))
    with pytest.raises(ValueError, match=r"'points' has the same values.*'points': None"):
        flex(points, my_half(x))
    flex.restore()
    check_calls(Operator, (points,), x, batch_dim={"points": None})


@pytest.mark.ranks(2)
def test_zeros_for_the_only_row_of_a_rank_are_rows_or_not():
    """As a first state, (layers, rows, features)."""
    flex = FlexModel(models.seeded(Recurrent).double(), data_parallel_size=2)
    flex.register_forward_hook(HookFunction("proj"))
    x, state = models.random(2, 3, 6), models.random(2, 1, 6) * 0
    with pytest.raises(ValueError, match=r"\{'state': 1\} or \{'state': None\}"):
        flex(my_half(x), state)
    flex.restore()


class OfIds(nn.Module):
    """Given no tensor."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(20, 4)

    def forward(self, ids):
        return self.emb(torch.tensor(ids))


@pytest.mark.ranks(2)
def test_rows_in_a_list_of_numbers_are_refused():
    records, mine = {}, [[1, 2], [3, 4 + dist.get_rank()]]
    for settings in ({}, {"dp_batch": "local"}, {"batch_dim": {"ids": None}}):
        flex = FlexModel(models.seeded(OfIds), records, data_parallel_size=2, **settings)
        flex.register_forward_hook(HookFunction("emb"))
        if not settings:
            with pytest.raises(ValueError, match="input 'ids' is a list, whose rows can't be"):
                flex(mine)
        else:
            output = flex([[1, 2]] if "batch_dim" in settings else mine)
            if "dp_batch" in settings or dist.get_rank() == 0:
                assert_close(records["emb"], [output.detach()])
        flex.restore()


@dataclass
class Texts:
    ids: list


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_dataclass", [False, True])
def test_rows_in_a_list_beside_a_tensor_without_rows_or_in_a_dataclass_are_refused(is_dataclass):
    class Scaled(OfIds):
        def forward(self, ids, scale):
            return super().forward(getattr(ids, "ids", ids)) * scale

    ids = [[1, 2], [3, 4]]
    with FlexModel(models.seeded(Scaled), {}, data_parallel_size=2) as flex:
        flex.register_forward_hook(HookFunction("emb"))
        with pytest.raises(ValueError, match=r"input 'ids' is a .*, whose rows can't be followed"):
            flex(Texts(ids) if is_dataclass else ids, torch.tensor(2.0))


class Centred(nn.Module):
    """By the sum over all rows of the call before, as DINO's centre."""

    def __init__(self):
        super().__init__()
        self.centre = nn.Identity()
        self.register_buffer("total", torch.zeros(6, dtype=torch.float64))

    def forward(self, x, total=None):
        x = x - self.centre(self.total * 1 if total is None else total * 1)
        self.total = x.detach().sum(0)
        return x, x.detach().sum(0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_returned", [False, True])
def test_a_sum_that_the_user_completes_between_calls(is_returned):
    """c10d writes without a new version: it was summed again, twice as large."""
    rows, (model, twin), records = models.random(4, 6), (Centred(), Centred()), {}
    with torch.no_grad(), FlexModel(model, records, data_parallel_size=2) as flex:
        flex.register_forward_hook(HookFunction("centre", None, mixing_rows))
        _, total = flex(my_half(rows))
        dist.all_reduce(total if is_returned else model.total)
        if not is_returned:
            with pytest.raises(ValueError, match="lost at total, as it was written"):
                flex(my_half(rows))
            return
        flex(my_half(rows), total)
        _, total = twin(rows)
    if dist.get_rank() == 0:
        assert_close(records["centre"], [total])

"""Buffers that forwards write to: later forwards that read them are right, or refused. Each was
taken for the same on all ranks before.
"""

import copy
import gc
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import models
from flex_model import FlexModel, HookFunction

FIRST, SECOND = models.random(4, 5, 8, seed=1), models.random(4, 5, 8, seed=2)


class Writes(nn.Module):
    """A model with buffers, one of which its forward reads before it writes to it."""

    def __init__(self, how="count"):
        super().__init__()
        self.site, self.norm = nn.Identity(), nn.BatchNorm1d(8).double()
        self.table = nn.Parameter(models.random(3, 8, seed=3))
        self.how = how
        buffers = {"count": torch.zeros(()), "ema": torch.ones(8), "cache": torch.zeros(8, 5, 8)}
        for name, value in {**buffers, "last": torch.ones(1, 5, 8)}.items():
            self.register_buffer(name, value.double())

    def forward(self, x):
        return self.site(getattr(self, self.how)(x))

    def counts_calls(self, x):
        h = x * (1 + self.count)
        self.count += 1
        return h

    def averages(self, x):
        h = x * self.ema
        self.ema.mul_(0.9).add_(x.mean((0, 1)))
        return h

    def averages_anew(self, x):
        h = x * self.ema
        self.ema = 0.9 * self.ema + x.mean((0, 1))
        return h

    def caches(self, x):
        h = x + self.cache.sum(0)
        self.cache[: x.shape[0]] = x
        return h

    def keeps_last(self, x):
        h = x + self.last
        self.last = x
        return h

    def norms_what_all_share(self, x):
        self.norm.train()
        self.norm(self.table)
        return x * self.norm.running_mean * self.norm.num_batches_tracked

    def norms(self, x):
        return self.norm(x[:, 0])


def mine(batch):
    return batch.chunk(2)[dist.get_rank()]


def run(how, *batches, follow="new"):
    """The first rank's records and those of the unsharded model, of a batch after another."""
    whole, model, records, expected = Writes(how), Writes(how), {}, []
    whole.site.register_forward_hook(lambda module, args, out: expected.append(out.clone()))
    with FlexModel(model, records, data_parallel_size=2, follow=follow) as flex:
        flex.register_forward_hook(HookFunction("site"))
        for batch in batches:
            with torch.no_grad():
                whole(batch)
                flex(mine(batch))
            if dist.get_rank() == 0:
                assert_close(records["site"][0], expected[-1])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("follow", ["new", "always"])
@pytest.mark.parametrize(
    "how", ["averages", "averages_anew", "caches"]
)  # fmt: skip
def test_what_a_forward_wrote_of_its_rows_is_not_known_to_the_next(how, follow):
    run(how, FIRST)
    with pytest.raises(ValueError, match="not known"):
        run(how, FIRST, SECOND, follow=follow)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("follow", ["new", "always"])
@pytest.mark.parametrize("how", ["counts_calls", "keeps_last", "norms_what_all_share"])
def test_what_a_forward_is_proven_to_write_is_known_to_the_next(how, follow):
    run(how, FIRST, SECOND, FIRST, SECOND, follow=follow)


def trained(model):
    """The model after a step that no hook saw, and a wrapper of it, for evaluation."""
    flex = FlexModel(model, {}, data_parallel_size=2)
    flex(mine(FIRST))
    model.eval()
    flex.register_forward_hook(HookFunction("site"))
    return flex


@pytest.mark.ranks(2)
@pytest.mark.parametrize("ddp", [False, True])
def test_a_norm_by_each_ranks_own_statistics_keeps_the_rows_in_their_place(ddp):
    model = Writes("norms")
    flex = trained(DistributedDataParallel(model, find_unused_parameters=True) if ddp else model)
    with flex, torch.no_grad():
        flex(mine(SECOND))
        dist.all_gather_object(of_ranks := [None, None], model(mine(SECOND)))
        if dist.get_rank() == 0:
            assert_close(flex.output_ptr["site"][0], torch.cat(of_ranks))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("ddp", [False, True])
def test_what_is_loaded_is_known(ddp):
    model, whole = Writes("norms"), Writes("norms")
    whole(FIRST)
    whole.eval()
    flex = trained(DistributedDataParallel(model, find_unused_parameters=True) if ddp else model)
    model.load_state_dict(whole.state_dict())
    with flex, torch.no_grad():
        flex(mine(SECOND))
        expected = whole(SECOND)
        if dist.get_rank() == 0:
            assert_close(flex.output_ptr["site"][0], expected)


@pytest.mark.ranks(2)
def test_buffers_that_ddp_hands_out_unchanged_stay_known():
    model = Writes("norms").eval()
    with trained(DistributedDataParallel(model, find_unused_parameters=True)) as flex:
        flex(mine(SECOND))
        expected = Writes("norms").eval()(SECOND)
        if dist.get_rank() == 0:
            assert_close(flex.output_ptr["site"][0], expected)


@pytest.mark.ranks(2)
def test_a_wrapped_model_is_copied_and_its_hooks_on_loading_are_gone_after():
    model = Writes("norms")
    flex = FlexModel(model, {}, data_parallel_size=2)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.load_state_dict(model.state_dict())
    flex.restore()
    del flex
    gc.collect()
    assert not model._load_state_dict_post_hooks

"""Training steps as people write them, with an edit in the middle, under DDP and FSDP2: each
against the unsharded twin in the same run.
"""

import contextlib
import copy

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import models
from flex_model import FlexModel, HookError, HookFunction, HookMismatchError
from shared_edits import mixing
from tiers import grid_but
from tiny_models import LABELS, LENGTH, WORDS
from training_models import FAMILIES
from training_steps import (
    LOSSES,
    SHARDINGS,
    assert_same,
    by_the_model,
    compare,
    flex_of,
    mixing_with_probe,
    my_rows,
    probe_of,
    shard,
    step_of,
    twin_step,
)

pytest.importorskip("transformers")
WIDTH = 48
BATCH = models.random(4, 6)
#: Numbers of rows that equal other sizes of the models.
ROWS = {
    "one": 1,
    "layers": 2,
    "heads of keys": 3,
    "half a head": 4,
    "positions": LENGTH,
    "heads": 6,
    "labels": LABELS,
    "a head": 8,
    "words": WORDS,
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("how", SHARDINGS)
@pytest.mark.parametrize("name", grid_but(FAMILIES, "Llama", "T5"))
def test_a_step(name, how, loss):
    compare(FAMILIES[name], how, 2, LOSSES[loss])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rows", [name for name in ROWS if name != "layers"])
def test_rows_as_many_as_something_else(rows):
    """Refused before: a number that equals the rank's rows may be made of them."""
    compare(FAMILIES["Llama"], "ddp", ROWS[rows], by_the_model)


@pytest.mark.grid
@pytest.mark.ranks(2, timeout=240)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("how", SHARDINGS)
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_every_family(name, how, rows):
    for loss in LOSSES.values():
        compare(FAMILIES[name], how, ROWS[rows], loss)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", SHARDINGS)
def test_an_edit_with_a_trainable_module(how):
    compare(FAMILIES["Llama classified"], how, 2, by_the_model, mixing_with_probe, WIDTH)


def without_sync(sharded):
    """As accelerate does it: gradients are summed over the ranks in the last step alone."""
    if not isinstance(sharded, FSDPModule):
        return sharded.no_sync()

    @contextlib.contextmanager
    def unsynced():
        sharded.set_requires_gradient_sync(False)
        yield
        sharded.set_requires_gradient_sync(True)

    return unsynced()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", SHARDINGS)
@pytest.mark.parametrize("name", ["Llama", "Llama classified"])
def test_gradients_of_two_batches_accumulate(name, how):
    family = FAMILIES[name]
    model, site = family.make(), family.site
    names = [name for name, _ in model.named_parameters()]
    batches = [family.batch(4), family.batch(6)]
    twin = copy.deepcopy(model)
    for batch in batches:
        expected = twin_step(twin, site, [batch], mixing, by_the_model)
    records, sharded = {}, shard(model, how)
    with flex_of(sharded, records, site, mixing) as flex:
        for number, batch in enumerate(batches):
            is_last = number == len(batches) - 1
            with contextlib.nullcontext() if is_last else without_sync(sharded):
                loss = by_the_model(flex, my_rows(batch))
                loss.backward()
        found = step_of(flex, records, site, loss, names)
    assert_same(found, expected)


class Scaled(nn.Module):
    """Rows, and a tensor that they share."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(models.random(8))
        self.rows, self.shared, self.out = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.out((self.rows(x) * self.shared(self.table)).tanh())


def flipped_by_probe(module, full, save_ctx, modules):
    return full + modules["probe"](full.flip(0))


def probe_at(site, loss, divisor=None):
    """Gradients after an edit of a site by a trainable module; with a divisor, of FSDP2."""
    model, probe = models.seeded(Scaled).double(), probe_of(8)
    if divisor is None:
        hook = lambda m, args, out: flipped_by_probe(m, out, None, {"probe": probe})  # noqa: E731
        getattr(model, site).register_forward_hook(hook)
        seen = {}
        for name in ("rows", "shared"):
            see = lambda m, grads, name=name: seen.update({name: grads[0].clone()})  # noqa: E731
            getattr(model, name).register_full_backward_pre_hook(see)
        loss(model(BATCH), 1).backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        return seen | gradients | {"probe": probe.weight.grad}
    way = models.TWO_RANKS["fsdp2"]
    fully_shard(model.rows, mesh=way.mesh["dp"])
    fully_shard(model, mesh=way.mesh["dp"])
    with FlexModel(model, records := {}, output_ranks="all") as flex:
        flex(way.my_rows(BATCH)).mean().backward()
        flex.zero_grad()
        flex.register_trainable_module("probe", probe)
        flex.register_forward_hook(HookFunction(site, None, flipped_by_probe, output_name="edit"))
        for name in ("rows", "shared"):
            flex.register_full_backward_pre_hook(HookFunction(name))
        for one in (model, model.rows):
            one.set_gradient_divide_factor(divisor)
        loss(flex(way.my_rows(BATCH)), divisor).backward()
        found = {name: records[name][0] for name in ("rows", "shared")}
        found |= {name: flex.get_module_gradient(name) for name, _ in Scaled().named_parameters()}
    return found | {"probe": probe.weight.grad}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("divisor", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("site", ["rows", "shared"])
def test_gradients_that_fsdp2_divides_by_another_number(site, divisor):
    """torchtitan's tokens: the sum of a rank's by the number of all, undivided; hooks and trainable
    modules got the mean over ranks.
    """

    def loss(output, of_one):
        return output.sin().sum() * of_one / (4 * len(BATCH))

    assert_close(probe_at(site, loss, divisor), probe_at(site, loss))


@pytest.mark.ranks(2)
def test_numbers_that_differ_are_refused():
    way = models.TWO_RANKS["fsdp2"]
    with FlexModel(way.shard(models.mlp()), {}, timeout=5) as flex:
        flex.register_full_backward_hook(HookFunction("fc2"))
        flex.module.set_gradient_divide_factor(1.0)
        with pytest.raises(HookError, match=r"divided: .* by 1, .* by 2 .*; hooks need one"):
            flex(way.my_rows(BATCH))
        for module in flex.module.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0 + dist.get_rank())
        with pytest.raises(HookMismatchError, match=r"gradient divide factor"):
            flex(way.my_rows(BATCH)).sum().backward()


def summed(state, bucket):
    """Sums gradients, of losses that are parts of one mean."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


@pytest.mark.ranks(2)
def test_a_comm_hook_that_may_sum_is_refused():
    """Wrong before, silently: gradients were taken for averages."""
    twin, records, found = models.mlp(), {}, []
    twin.fc2.register_full_backward_hook(lambda module, grads, _: found.append(grads[0]))
    twin(BATCH).mean().backward()
    rows = models.TWO_RANKS["ddp"].my_rows(BATCH)
    for comm_hook in (summed, allreduce_hook):
        ddp = DistributedDataParallel(models.mlp())
        ddp.register_comm_hook(None, comm_hook)
        with FlexModel(ddp, records, output_ranks="all", timeout=5) as flex:
            flex.register_forward_hook(HookFunction("fc1"))
            flex(rows).mean().backward()
            assert_close(records["fc1"], [twin.fc1(twin.inp(BATCH))])
            flex.register_full_backward_hook(HookFunction("fc2"))
            is_refused = comm_hook is summed
            with (
                pytest.raises(HookError, match="by summed, a")
                if is_refused
                else contextlib.nullcontext()
            ):
                flex(rows).mean().backward()
    assert_close(records["fc2"], found)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("how", SHARDINGS)
@pytest.mark.parametrize("name", ["Llama", "Llama classified"])
def test_an_edit_is_recomputed(name, how, use_reentrant):
    if how == "ddp" and use_reentrant:
        pytest.skip("torch's DDP marks parameters twice there")
    family = FAMILIES[name]
    model, site, batch = family.make(), family.site, family.batch(4)
    expected = twin_step(copy.deepcopy(model), site, [batch], mixing, by_the_model)
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    records, sharded = {}, shard(model, how)
    with flex_of(sharded, records, site, mixing) as flex:
        loss = flex(**my_rows(batch), use_cache=False).loss
        loss.backward()
        found = step_of(flex, records, site, loss, [name for name, _ in model.named_parameters()])
    assert_same(found, expected)

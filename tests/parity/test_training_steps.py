"""Training steps as people write them, with an edit in the middle, under DDP and FSDP2: each
against the unsharded twin in the same run.
"""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from shared_edits import mixing
from tiers import grid_but
from training_models import FAMILIES, LABELS, LENGTH, WORDS
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
    with_probe,
)

pytest.importorskip("transformers")
WIDTH = 48
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
        compare((FAMILIES)[name], how, ROWS[rows], loss)


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
        found = step_of(flex, records, site, loss, expected.gradients)
    assert_same(found, expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", SHARDINGS)
@pytest.mark.parametrize("loss", grid_but(LOSSES, "labels given"))
def test_steps_of_an_optimizer(how, loss):
    """The model and a trainable module learn together: the losses and the weights stay equal."""
    family, loss_of, steps = FAMILIES["Llama classified"], LOSSES[loss], 3
    model = family.make()
    batches = [family.batch(4 + 2 * step) for step in range(steps)]

    def train(call, learner, probe, batch):
        value = loss_of(call, batch)
        value.backward()
        learner.step()
        learner.zero_grad()
        return value.detach()

    twin, probe = copy.deepcopy(model), probe_of(WIDTH)
    learner = torch.optim.SGD([*twin.parameters(), *probe.parameters()], lr=0.1)
    hook = twin.get_submodule(family.site).register_forward_hook(
        lambda module, args, output: (
            with_probe(None, mixing(None, output[0], None, None), None, {"probe": probe}),
            *output[1:],
        )
    )
    expected = [train(twin, learner, probe, batch) for batch in batches]
    hook.remove()

    sharded, mine = shard(model, how), probe_of(WIDTH)
    with flex_of(sharded, {}, family.site, mixing_with_probe, mine) as flex:
        parameters = [*sharded.parameters(), *flex.trainable_modules.parameters()]
        learner = torch.optim.SGD(parameters, lr=0.1)
        for batch, value in zip(batches, expected):
            found = train(flex, learner, mine, my_rows(batch))
            dist.all_reduce(found)
            torch.testing.assert_close(found / 2, value, rtol=1e-5, atol=1e-7)
        for name, parameter in twin.named_parameters():
            full = flex.get_module_parameter(name)
            torch.testing.assert_close(full, parameter.detach(), rtol=1e-5, atol=1e-6)

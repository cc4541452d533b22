"""Training steps as people write them, with an edit in the middle, under DDP and FSDP2: each
against the unsharded twin in the same run.
"""

import contextlib
import copy

import pytest
from torch.distributed.fsdp import FSDPModule

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
    shard,
    step_of,
    twin_step,
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

"""Data parallelism: one batch over the ranks is one global batch to the edit."""

from dataclasses import dataclass

import pytest
import torch.distributed as dist

import models
from cells import EDITS, KINDS, SITES, differences, mean_loss, table_cell
from flex_model import FlexModel, HookFunction

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
@pytest.mark.parametrize("name", ["dp", "ddp", "fsdp2"])
def test_batches_of_three_and_one_equal_a_batch_of_four(name, kind):
    parallelism = ThreeAndOne(name, dp=2)
    wrong = []
    for site in SITES[kind][:2]:
        for edit in EDITS:
            model, batch = models.mlp(), models.random(sum(ROWS), 6)
            cell = table_cell(model, batch, kind, site, edit)
            wrong += differences(parallelism, model, batch, cell, weighted_loss)
    assert not wrong, "\n".join(wrong)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shape", [(None, 8), (4, 8), (4, None)])
def test_expected_shape_counts_the_global_batch(shape):
    records = {}
    flex = FlexModel(models.mlp(), records, data_parallel_size=2)
    flex.register_forward_hook(HookFunction("fc1", shape))
    flex(models.random(4, 6).split(ROWS)[dist.get_rank()])
    if dist.get_rank() == 0:
        assert [tuple(record.shape) for record in records["fc1"]] == [(4, 8)]


@pytest.mark.ranks(2)
def test_a_batch_that_changes_its_size_is_gathered_anew():
    records = {}
    flex = FlexModel(models.mlp(), records, data_parallel_size=2)
    flex.register_forward_hook(HookFunction("fc1"))
    for rows in [(2, 2), (3, 1), (1, 4), (2, 2)]:
        flex(models.random(sum(rows), 6).split(rows)[dist.get_rank()])
        if dist.get_rank() == 0:
            assert [tuple(record.shape) for record in records["fc1"]] == [(sum(rows), 8)]

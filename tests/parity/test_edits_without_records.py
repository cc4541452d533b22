"""HookFunction(record=False): the edit alone, the same as with a record."""

import tempfile

import pytest
import torch
from torch.testing import assert_close

import models
from cells import mean_loss
from flex_model import ActivationStore, FlexModel, HookFunction
from shared_edits import mixing_features
from tiers import grid_but

BATCH = models.random(5, 6)


def run(parallelism, output_ptr=None, record=True, **settings):
    records = {} if output_ptr is None else output_ptr
    sharded = parallelism.shard(models.mlp())
    with FlexModel(sharded, records, **parallelism.sizes, **settings) as flex:
        for register, site in [
            (flex.register_forward_hook, "fc1"),
            (flex.register_full_backward_pre_hook, "act"),
        ]:
            register(HookFunction(site, None, mixing_features, record=record))
        flex.register_forward_hook(HookFunction("fc2"))
        dry = flex.dry_run(parallelism.my_rows(BATCH))
        output = flex(parallelism.my_rows(BATCH))
        spent = flex.explain()
        mean_loss(output).backward()
        layouts = [str(row.layout) for row in flex.layouts() if row.layout is not None]
    return records, output, parallelism.full_gradients(models.mlp(), sharded), dry, spent, layouts


def check(parallelism, **settings):
    with_records = run(parallelism, **settings)
    without = run(parallelism, record=False, **settings)
    assert set(without[0]) == set(with_records[0]) - {"fc1", "act"}
    assert_close(without[0].get("fc2"), with_records[0].get("fc2"))
    assert_close(without[1:3], with_records[1:3], rtol=0, atol=0)
    return without


def test_one_process():
    *_, layouts = check(models.ONE_RANK)
    assert len(layouts) == 3


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", grid_but(["tp", "dp"], "tp"))
@pytest.mark.parametrize("edit_on", ["all", "rank0"])
@pytest.mark.parametrize("output_ranks", ["rank0", "all"])
def test_two_ranks(name, edit_on, output_ranks):
    *_, dry, spent, _ = check(models.TWO_RANKS[name], edit_on=edit_on, output_ranks=output_ranks)
    mine = torch.distributed.get_rank()
    edited = [row for row in dry if row.name == "fc1"], [row for row in spent if row.name == "fc1"]
    assert edited[0][0].forward.bytes_by_rank[mine] == edited[1][0].bytes_moved


@pytest.mark.ranks(2)
def test_a_store_has_the_rest():
    folder = [tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(folder)
    run(models.TWO_RANKS["tp"], ActivationStore(folder[0]), record=False)
    torch.distributed.barrier()
    assert list(ActivationStore(folder[0]).batch(0)) == ["fc2"]

"""Select: only the part that a hook needs is moved, and an edit of it equals one of the whole."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing import assert_close

import models
import pipelines
from flex_model import FlexModel, HookError, HookFunction, HookMismatchError, Select
from flex_model.records.snapshots import Snapshots
from oracle import register, watch
from tiers import ways

BATCH = models.random(5, 6)
PARALLELISMS = models.TWO_RANKS
CASES = {  # of fc1's (5, 8): the hidden dim is sharded over tp, the rows over dp
    "a unit": (Select(units=5), (slice(None), [5])),
    "units of all ranks, in no order": (Select(units=[6, 1, 3]), (slice(None), [6, 1, 3])),
    "units of one rank": (Select(units=slice(4, 8)), (slice(None), slice(4, 8))),
    "every third": (Select(units=slice(0, None, 3)), (slice(None), [0, 3, 6])),
    "a mask": (Select(units=torch.arange(8) > 2), (slice(None), slice(3, 8))),
    "a head": (Select(heads=-1, num_heads=4), (slice(None), [6, 7])),
    "a row": (Select(rows=-1), ([4],)),
    "rows of all ranks": (Select(rows=[4, 0, 2]), ([4, 0, 2],)),
    "rows and units": (Select(rows=[1, 3], units=[7, 2]), ([[1], [3]], [7, 2])),
    "rows, and units in a row": (Select(rows=[1, 3], units=slice(3, 6)), ([1, 3], slice(3, 6))),
    "nothing": (Select(units=[]), (slice(None), [])),
}


def mix(part, probe):
    """Rows and units both, so that every part that one rank holds changes with the others'."""
    return part * 2 + part.flip(-1) + part.flip(0).sum(-1, keepdim=True) + probe.weight.sum()


def reference(where, kind="forward"):
    """Torch's hook on the unsharded model, which edits the part: what it saw, and the gradients."""
    model, probe = models.mlp(), models.seeded(nn.Linear, 2, 2).double()

    def edit(module, whole, save_ctx, modules):
        whole[where] = mix(whole[where], probe)

    seen = watch(model, "fc1", edit, kind)
    output = model(BATCH)
    output.mean().backward()
    return seen[0][where], output, dict(model.named_parameters()), probe


def ours(parallelism, select, kind="forward", **settings):
    def edit(module, part, save_ctx, modules):
        return mix(part, modules["probe"])

    records = {}
    sharded = parallelism.shard(models.mlp())
    with FlexModel(sharded, records, **parallelism.sizes, output_ranks="all", **settings) as flex:
        flex.register_trainable_module("probe", models.seeded(nn.Linear, 2, 2).double())
        register(flex, kind, HookFunction("fc1", editing_function=edit, select=select))
        output = flex(parallelism.my_rows(BATCH))
        mean_of_rows(output, parallelism).backward()
        flex.sync_trainable_modules()
        trained = {name: p.grad for name, p in flex.trainable_modules["probe"].named_parameters()}
    return records["fc1"], output, parallelism.full_gradients(models.mlp(), sharded), trained


def mean_of_rows(output, parallelism):
    """The mean over the batch where ranks have unequal rows: each weighs dp x rows / all."""
    return output.sum() * parallelism.dp / (BATCH.shape[0] * output.shape[-1])


def check(parallelism, select, where, kind="forward", **settings):
    seen, output, expected, probe = reference(where, kind)
    records, got, gradients, trained = ours(parallelism, select, kind, **settings)
    assert_close(records[0], seen, rtol=1e-12, atol=1e-14)
    assert_close(got, parallelism.my_rows(output))
    for name, parameter in expected.items():
        assert_close(gradients[name], parameter.grad, msg=partial("{}: {}".format, name))
    if kind == "forward" and settings.get("edit_on") != "rank0":
        assert_close(trained["weight"], probe.weight.grad)


@pytest.mark.parametrize("case", CASES)
def test_one_process(case):
    check(models.ONE_RANK, *CASES[case])
    check(models.ONE_RANK, *CASES[case], kind="full_backward_pre")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", PARALLELISMS)
def test_an_edit_of_a_part_is_that_of_the_whole(name, case):
    check(PARALLELISMS[name], *CASES[case])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", ["units of all ranks, in no order", "rows and units"])
@pytest.mark.parametrize("name", ["tp", "dp", "dtensor"])
def test_gradients_and_rank_0(name, case):
    check(PARALLELISMS[name], *CASES[case], kind="full_backward_pre")
    check(PARALLELISMS[name], *CASES[case], edit_on="rank0")


@pytest.mark.parametrize("output_ranks", ["rank0", "all"])
@pytest.mark.parametrize("parallelism", ways("one", *PARALLELISMS))
def test_records_alone(parallelism, output_ranks):
    model = models.mlp()
    whole = {}
    for site in ("fc1", "fc2", "out"):
        model.get_submodule(site).register_forward_hook(
            lambda module, args, output, site=site: whole.update({site: output.detach()})
        )
    model(BATCH)
    records = {}
    sharded = parallelism.shard(models.mlp())
    with FlexModel(sharded, records, **parallelism.sizes, output_ranks=output_ranks) as flex:
        for case, (select, _) in CASES.items():
            flex.register_forward_hook(HookFunction("fc1", output_name=case, select=select))
        for site in ("fc2", "out"):
            flex.register_forward_hook(HookFunction(site, select=Select(units=[3, 1])))
        for _ in range(2):  # the layouts are found out, and then known
            flex(parallelism.my_rows(BATCH))
    for case, (_, where) in CASES.items():
        for record in records.get(case, ()):
            assert_close(record, whole["fc1"][where], rtol=1e-12, atol=1e-14)
    for site in ("fc2", "out"):
        for record in records.get(site, ()):
            assert_close(record, whole[site][:, [3, 1]])
    is_first = parallelism is models.ONE_RANK or torch.distributed.get_rank() == 0
    assert set(records) == ({*CASES, "fc2", "out"} if output_ranks == "all" or is_first else set())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["forward", "full_backward_pre"])
@pytest.mark.parametrize("name", ["tp", "dp"])
def test_only_what_a_record_selects_is_copied(name, kind, monkeypatch):
    """On each rank, from a tensor of which it holds some units or rows; as batches change."""
    copied, take = [], Snapshots.take

    def taken(snapshots, tensor):
        copied.append(tensor.numel())
        return take(snapshots, tensor)

    monkeypatch.setattr(Snapshots, "take", taken)
    parallelism, records = models.TWO_RANKS[name], {}
    reference, seen = models.mlp(), {}
    fc1 = reference.fc1
    if kind == "forward":
        fc1.register_forward_hook(lambda module, args, output: seen.update(fc1=output.detach()))
    else:
        fc1.register_full_backward_pre_hook(lambda module, grads: seen.update(fc1=grads[0]))
    select, rank = Select(rows=[4, 1], units=[7, 6, 0]), torch.distributed.get_rank()
    expected = {"tp": (2 * 1, 2 * 2), "dp": (1 * 3, 1 * 3)}[name][rank]
    with FlexModel(parallelism.shard(models.mlp()), records, **parallelism.sizes) as flex:
        getattr(flex, f"register_{kind}_hook")(HookFunction("fc1", select=select))
        for batch in (BATCH, BATCH.flip(0), models.random(7, 6), BATCH):
            copied.clear()
            (reference(batch).sum() / len(batch)).backward()
            (flex(parallelism.my_rows(batch)).sum() * parallelism.dp / len(batch)).backward()
            if rank == 0:
                assert_close(records["fc1"], [seen["fc1"][[4, 1]][:, [7, 6, 0]]])
            assert copied == [expected if len(batch) == 5 else copied[0]]
            assert copied[0] <= 6


@pytest.mark.ranks(2)
def test_a_dtype():
    """It is moved, handed over and recorded in it, and the edit comes back in the tensor's own."""
    seen = []

    def edit(module, part, save_ctx, modules):
        seen.append(part.dtype)
        return part + part.flip(-1)

    model = models.mlp()
    model.fc1.register_forward_hook(
        lambda module, args, out: (out.float() + out.float().flip(-1)).double()
    )
    expected = model(BATCH)
    expected.mean().backward()
    records = {}
    parallelism = models.TWO_RANKS["tp"]
    sharded = parallelism.shard(models.mlp())
    with FlexModel(sharded, records, **parallelism.sizes, output_ranks="all") as flex:
        flex.register_forward_hook(
            HookFunction("fc1", editing_function=edit, select=Select(dtype=torch.float32))
        )
        output = flex(BATCH)
        assert flex.explain()[0].bytes_moved == 5 * 8 * 4
        mean_of_rows(output, parallelism).backward()
    assert seen == [torch.float32] and records["fc1"][0].dtype == torch.float32
    assert_close(output, expected, rtol=1e-6, atol=1e-7)
    gradients = parallelism.full_gradients(models.mlp(), sharded)
    assert_close(gradients["inp.weight"], model.inp.weight.grad, rtol=1e-6, atol=1e-7)


class SummedLater(models.MLP):
    """What fc2 gives is a DTensor that is a sum yet to be made."""

    def forward(self, x):
        hidden = self.fc2(self.act(self.fc1(self.inp(x))))
        if isinstance(hidden, DTensor):
            assert hidden.placements == (Partial(),)
            hidden = hidden.redistribute(placements=[Replicate()]).to_local()
        return self.out(hidden)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize("edit_on", ["all", "rank0"])
def test_a_part_of_a_sum(edit_on, dtype):
    def edit(module, part, save_ctx, modules):
        return part * 2 + part.flip(0)

    model = models.seeded(SummedLater).double()
    sharded = parallelize_module(
        models.seeded(SummedLater).double(),
        models.mesh(1, 2)["tp"],
        {
            "fc1": ColwiseParallel(use_local_output=False),
            "fc2": RowwiseParallel(use_local_output=False, output_layouts=Partial()),
        },
    )
    seen = []

    def hook(module, args, output):
        output = output.clone()
        seen.append(output[:, [4, 1]].detach())
        output[:, [4, 1]] = output[:, [4, 1]] * 2 + output[:, [4, 1]].flip(0)
        return output

    model.fc2.register_forward_hook(hook)
    expected = model(BATCH)
    expected.mean().backward()
    records = {}
    select = Select(units=[4, 1], dtype=dtype)
    with FlexModel(
        sharded, records, tensor_parallel_size=2, output_ranks="all", edit_on=edit_on
    ) as flex:
        flex.register_forward_hook(HookFunction("fc2", editing_function=edit, select=select))
        flex.register_forward_hook(HookFunction("fc2", output_name="after", select=select))
        output = flex(BATCH)
        output.mean().backward()
    rounding = {"rtol": 1e-5, "atol": 1e-6} if dtype else {"rtol": 1e-9, "atol": 1e-12}
    assert_close(records["fc2"][0], seen[0].to(dtype or torch.float64), **rounding)
    assert records["after"][0].dtype == (dtype or torch.float64)
    assert_close(output, expected, **rounding)
    for name in ("inp", "fc1", "fc2"):
        grad = sharded.get_submodule(name).weight.grad
        grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
        assert_close(grad, model.get_submodule(name).weight.grad, **rounding)


@pytest.mark.ranks(2)
def test_one_position_of_many_moves_little():
    """A thousandth of the bytes, as explain() counts them and dry_run() foretells them."""
    wide = models.seeded(models.Block, 64, 8, 64)
    parallelism = models.TWO_RANKS["tp"]
    x = models.random(1, 2048, 64, dtype=torch.float32)
    moved, told = {}, {}
    expected = None
    for select in (None, Select(positions=-1)):
        records = {}
        with FlexModel(parallelism.shard(wide), records, **parallelism.sizes) as flex:
            flex.register_forward_hook(HookFunction("attn.q", select=select))
            with torch.no_grad():
                told[select] = flex.dry_run(x)[0]
                flex(x)
            moved[select] = flex.explain().bytes_moved
            if records and select is None:
                expected = records["attn.q"][0][:, -1:]
            elif records:
                assert torch.equal(records["attn.q"][0], expected)
    part = next(select for select in moved if select is not None)
    assert 0 < moved[part] * 1000 <= moved[None]
    rank = torch.distributed.get_rank()
    assert told[part].forward.bytes_by_rank[rank] == moved[part]
    assert told[part].kept_bytes * 1000 <= told[None].kept_bytes


def test_a_part_that_is_not_there_is_an_error():
    with FlexModel(models.mlp(), {}) as flex:
        for select, error, text in [
            (Select(units=8), IndexError, "units: 8 is out of range, there are 8"),
            (Select(units=[True] * 3), IndexError, "the mask has 3 entries for 8 units"),
            (Select(units=0, dims={"units": 2}), ValueError, "units are dim 2"),
            (Select(positions=0), ValueError, "give the dim with dims={"),
            (Select(rows=0, units=0, dims={"rows": 1}), ValueError, "are both dim 1"),
            (Select(heads=0, num_heads=3), ValueError, "can't be divided into 3 equal heads"),
            (Select(units=[1, -7]), ValueError, "given twice"),
        ]:
            hook = HookFunction("fc1", select=select)
            wrong = pytest.raises((error, HookError), match=f"hook on 'fc1'.*{text}")
            with flex.register_forward_hook(hook), wrong:
                flex(BATCH)
        flex(BATCH)


@pytest.mark.ranks(2)
def test_every_rank_hears_of_it():
    parallelism = models.TWO_RANKS["tp"]
    with FlexModel(parallelism.shard(models.mlp()), {}, **parallelism.sizes) as flex:
        for function in (None, lambda module, part, save_ctx, modules: part * 2):
            hook = HookFunction("fc1", editing_function=function, select=Select(units=8))
            wrong = pytest.raises(
                (IndexError, HookError), match="units: 8 is out of range, there are 8"
            )
            with flex.register_forward_hook(hook), wrong:
                flex(BATCH)
        flex(BATCH)


@pytest.mark.ranks(2)
def test_other_parts_on_another_rank():
    parallelism = models.TWO_RANKS["tp"]
    with FlexModel(parallelism.shard(models.mlp()), {}, timeout=20, **parallelism.sizes) as flex:
        part = Select(rows=torch.tensor([0, dist.get_rank() + 1]))
        flex.register_forward_hook(HookFunction("fc1", select=part))
        with pytest.raises(HookMismatchError, match=r"rows=\[0, 1\].*rows=\[0, 2\]"):
            flex(BATCH)


def test_a_text_is_of_one_selection():
    units = [*range(9)]
    part = Select(units=units)
    text = repr(part)
    assert text == repr(Select(units=torch.tensor(units)))
    units[4] = 40
    assert text == repr(part) != repr(Select(units=units))


def test_bad_arguments():
    for arguments, error, text in [
        ({}, ValueError, "nothing is selected"),
        ({"heads": 1}, ValueError, "num_heads"),
        ({"heads": 1, "num_heads": 2, "units": 3}, ValueError, "heads= or units="),
        ({"columns": 1}, TypeError, "unknown arguments"),
        ({"units": 1.5}, TypeError, "expected an int, a slice"),
        ({"units": [True, 1]}, TypeError, "expected ints or bools"),
        ({"units": torch.ones(2, 2, dtype=torch.int64)}, TypeError, "expected an int, a slice"),
        ({"positions": torch.ones(2, 2) > 0}, TypeError, "no rectangular part"),
        ({"dtype": torch.int64}, TypeError, "floating"),
        ({"heads": 1, "num_heads": 0}, ValueError, "num_heads"),
    ]:
        with pytest.raises(error, match=text):
            Select(**arguments)
    with pytest.raises(TypeError, match=r"must be a flex_model\.Select"):
        HookFunction("fc1", select=slice(1))
    assert (
        repr(Select(rows=[1, 2], heads=3, num_heads=4))
        == "Select(rows=[1, 2], heads=3, num_heads=4)"
    )


@pytest.mark.ranks(2)
def test_pipelines():
    """Units of micro-batches; rows where there is one."""
    model = pipelines.make_mlp()
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
    records, outputs = {}, {}
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for name in names:
        model.get_submodule(name).register_forward_hook(
            lambda module, args, output, name=name: outputs.update({name: output})
        )
    model(x)
    row = HookFunction(names[-1], output_name="row", select=Select(rows=-1))
    schedule = pipelines.make_schedule(ScheduleGPipe, pipelines.make_mlp(), 4)
    with FlexModel(schedule, records) as flex, torch.no_grad():
        for name in names:
            flex.register_forward_hook(HookFunction(name, select=Select(units=[2, 0])))
        flex(x)
        for name in records:
            assert_close(records[name][0], outputs[name][:, [2, 0]])
        assert torch.distributed.get_rank() or set(records) == set(names)
        wrong = pytest.raises((ValueError, HookError), match="split into micro-batches")
        with flex.register_forward_hook(row), wrong:
            flex(x)
    with FlexModel(schedule, records, batch_mode="full") as flex, torch.no_grad():
        flex.register_forward_hook(row)
        flex(x)
        if torch.distributed.get_rank() == 0:
            assert_close(records["row"][0], outputs[names[-1]][-1:])


class OwnSummands(nn.Module):
    """What each tensor-parallel rank holds of a sum: its own columns times its rows of a weight."""

    def forward(self, x):
        return (
            x.chunk(2, -1)[dist.get_rank() % 2] @ models.random(8, 6).chunk(2)[dist.get_rank() % 2]
        )


@pytest.mark.ranks(4)
@pytest.mark.parametrize("output_ranks", ["rank0", "all"])
def test_a_dtype_of_rows_of_a_sum(output_ranks):
    """The plan of the gather was in another dtype than the rows."""
    x, records = models.random(4, 8), {}
    model = nn.Sequential(OwnSummands())
    sizes = {"tensor_parallel_size": 2, "data_parallel_size": 2}
    with FlexModel(model, records, output_ranks=output_ranks, **sizes) as flex:
        flex.annotate_layout("0", tp=Partial(), dp=Shard(0))
        flex.register_forward_hook(HookFunction("0", select=Select(dtype=torch.bfloat16)))
        flex(x.chunk(2)[dist.get_rank() // 2])
    if output_ranks == "all" or dist.get_rank() == 0:
        assert_close(records["0"][0], (x @ models.random(8, 6)).bfloat16())

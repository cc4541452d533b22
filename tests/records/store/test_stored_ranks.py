"""What several ranks write is what one process reads, bit for bit as the unsharded run has it.

Weights and inputs are small whole numbers, so sums are exact in any order.
"""

import errno
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing import assert_close

import models
from counted_traffic import payloads_of
from flex_model import (
    ActivationStore,
    FlexModel,
    HookError,
    HookFunction,
    HookMismatchError,
    Select,
    sequential,
)
from flex_model.records.store import files, session
from flex_model.records.store.files import Writer
from flex_model.records.store.manifest import Manifest
from pipelines import alone_group, make_mlp, make_schedule
from tests.records.store.test_stored_runs import assert_holds
from tiers import grid_but

pytest.importorskip("safetensors")
WIDTH = 6


class Exact(models.MLP):
    """Of whole numbers, all tensors are."""

    def __init__(self, hidden=8):
        super().__init__(WIDTH, hidden)
        self.act, self.join = nn.ReLU(), Join()

    def forward(self, x):
        return self.out(self.join(self.fc2(self.act(self.fc1(self.inp(x))))))


class Join(nn.Module):
    """Sums what is a partial sum."""

    def forward(self, x):
        return x.redistribute(placements=[Replicate()]).to_local() if isinstance(x, DTensor) else x


def whole_numbers(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).double()


def exact(hidden=8):
    model = Exact(hidden).double()
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(whole_numbers(*parameter.shape, seed=seed))
    return model


def mix(module, x, save_ctx, modules):
    return x.flip(-1) * 2 + x.sum(0, keepdim=True)


def hooked(model, output_ptr, **settings):
    flex = FlexModel(model, output_ptr, **settings)
    for name in ("inp", "fc1", "fc2"):
        flex.register_forward_hook(HookFunction(name))
    flex.register_forward_hook(HookFunction("act", editing_function=mix))
    flex.register_full_backward_pre_hook(HookFunction("fc1", output_name="fc1.grad"))
    flex.register_full_backward_pre_hook(HookFunction("inp", output_name="inp.grad"))
    return flex


BATCHES = [whole_numbers(rows, WIDTH, seed=rows) for rows in (4, 5, 6)]


def unsharded_records(hidden=8, scale=1.0, batches=BATCHES):
    """By batch; computed on this rank alone."""
    found = []
    with hooked(exact(hidden), {}, process_group=alone_group(), output_ranks="all") as flex:
        for batch in batches:
            (flex(batch).sum() * scale).backward()
            found.append({name: list(kept) for name, kept in flex.output_ptr.items()})
    return found


def write(folder, way, model, batches=BATCHES, **settings):
    store = ActivationStore(folder, **settings)
    with hooked(way.shard(model), store, **way.sizes) as flex:
        for batch in batches:
            rows = way.my_rows(batch)
            store.annotate(token_ids=rows[:, 0], text="t")
            flex(rows).sum().backward()
        explained = flex.explain()
    dist.barrier()
    return explained


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", models.TWO_RANKS)
def test_two_ranks_write_what_one_reads(name, tmp_path):
    way = models.TWO_RANKS[name]
    explained = write(tmp_path, way, exact(), shard_bytes=1000)
    assert_holds(tmp_path, unsharded_records(scale=1 / way.dp))
    store = ActivationStore(tmp_path)
    assert store.is_complete
    for i, batch in enumerate(BATCHES):
        assert torch.equal(store.annotations(i)["token_ids"], batch[:, 0])
        assert store.annotations(i)["text"] == "t"
    by_name = {(row.name, row.kind): row for row in explained}
    looks = [by_name["inp", "forward"], by_name["fc1", "forward"]]
    looks += [by_name["fc1", "full_backward_pre"], by_name["(all hooks)", ""]]
    assert [(row.bytes_moved, row.collectives) for row in looks] == [(0, 0)] * 4, str(explained)
    if name == "tp":
        assert "each rank stores its own shard" in by_name["fc1", "forward"].why
        sizes = [sum(p.stat().st_size for p in tmp_path.glob(f"*.rank-000{r}.*")) for r in (0, 1)]
        assert 0 < sizes[1] < sizes[0]  # which has the replicated ones, too


@pytest.mark.ranks(2)
def test_a_store_of_ddp_has_the_configuration_of_the_model_inside(tmp_path):
    for width, is_ddp in ((4, True), (4, False), (5, True)):
        model = exact()
        model.config = {"width": width}
        way = models.TWO_RANKS["ddp" if is_ddp else "tp"]
        if width == 4:
            write(tmp_path, way, model)
            continue
        with pytest.raises(ValueError, match="a model with another configuration"):
            FlexModel(way.shard(model), ActivationStore(tmp_path))
    assert ActivationStore(tmp_path).num_batches == 2 * len(BATCHES)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", models.TWO_RANKS)
def test_rows_and_statistics_are_those_of_the_full_tensors(name, tmp_path):
    write(tmp_path, models.TWO_RANKS[name], exact(), shard_bytes=1000)
    store, names = ActivationStore(tmp_path), ["inp", "fc2"]
    for site in ("fc1", "fc1.grad", "fc2"):
        full = torch.cat(list(store.tensors(site)))
        found = store.statistics(site)
        assert found.rows == len(full)
        torch.testing.assert_close(found.mean, full.mean(0))
        torch.testing.assert_close(found.variance, full.var(0, correction=0))
    for world, rank in ((1, 0), (2, 1)):
        for rows in store.loader(["fc1", *names], 4, buffer_rows=12, rank=rank, world=world):
            assert len(rows.records["fc1"]) == 4 // world
            for site, held in rows.records.items():
                for (batch, _, row), one in zip(rows.origins.tolist(), held):
                    assert torch.equal(one, store.batch(batch)[site][0][row])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("edit_on", ["all", "rank0"])
def test_uneven_shards(edit_on, tmp_path):
    way = models.TWO_RANKS["tp"]
    with hooked(
        way.shard(exact(7)), ActivationStore(tmp_path), **way.sizes, edit_on=edit_on
    ) as flex:
        for batch in BATCHES:
            flex(batch).sum().backward()
    assert_holds(tmp_path, unsharded_records(7))
    assert "S(1)" in ActivationStore(tmp_path).layout("fc1")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("edits", [False, True])
def test_partial_sums_are_summed_first(edits, tmp_path):
    plan = {
        "fc1": ColwiseParallel(),
        "fc2": RowwiseParallel(output_layouts=Partial(), use_local_output=False),
    }
    edit = mix if edits else None

    def model():
        made = exact()
        made.fc2.bias = None
        return made

    def run(model, output_ptr, **settings):
        with FlexModel(model, output_ptr, **settings) as flex:
            flex.register_forward_hook(HookFunction("fc2", editing_function=edit))
            flex.register_forward_hook(HookFunction("join"))
            output = flex(BATCHES[0])
            return output, {name: list(kept) for name, kept in records.items()}

    records = {}
    expected, found = run(model(), records, process_group=alone_group(), output_ranks="all")
    mesh = models.TWO_RANKS["dtensor"].mesh["tp"]
    sharded = parallelize_module(model(), mesh, plan)
    output, _ = run(sharded, ActivationStore(tmp_path), tensor_parallel_size=2)
    assert torch.equal(output, expected)
    assert_holds(tmp_path, [found])
    assert "P" in ActivationStore(tmp_path).layout("fc2")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["tp", "dp"])
def test_selected_parts_in_any_order(name, tmp_path):
    """Of sharded and of replicated sites, with and without edits, and in another dtype."""
    selections = [
        Select(units=[5, 0, 3]),
        Select(units=slice(4, 6)),  # of one rank
        Select(rows=[3, 1], units=-1, dtype=torch.float32),
    ]

    def run(output_ptr, model, rows, **settings):
        with FlexModel(model, output_ptr, **settings) as flex:
            for i, select in enumerate(selections):
                for name, edit in (("inp", None), ("fc1", None), ("act", mix)):
                    name_of = f"{name}{i}"
                    hook = HookFunction(name, None, edit, output_name=name_of, select=select)
                    flex.register_forward_hook(hook)
            flex(rows)
            return {name: list(kept) for name, kept in records.items()}

    way, batch, records = models.TWO_RANKS[name], BATCHES[0], {}
    settings = {"process_group": alone_group(), "output_ranks": "all"}
    expected = run(records, exact(), batch, **settings)
    run(ActivationStore(tmp_path), way.shard(exact()), way.my_rows(batch), **way.sizes)
    dist.barrier()
    assert_holds(tmp_path, [expected])
    assert expected["fc12"][0].shape == (2, 1) and expected["fc12"][0].dtype == torch.float32


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", grid_but(["tp x dp", "dtensor x fsdp2"], "tp x dp"))
def test_two_axes(name, tmp_path):
    way = models.FOUR_RANKS[name]
    write(tmp_path, way, exact())
    assert_holds(tmp_path, unsharded_records(scale=1 / way.dp))


@pytest.mark.ranks(2)
def test_a_store_goes_on_at_another_world_size(tmp_path):
    way = models.TWO_RANKS["tp"]
    write(tmp_path, way, exact(), BATCHES[:1])
    if dist.get_rank() == 0:
        with hooked(exact(), ActivationStore(tmp_path), process_group=alone_group()) as flex:
            flex(BATCHES[1]).sum().backward()
    else:
        alone_group()
    dist.barrier()
    write(tmp_path, way, exact(), BATCHES[2:])
    assert_holds(tmp_path, unsharded_records())


@pytest.mark.ranks(2)
def test_a_full_disk_of_one_rank_is_an_error_on_all(tmp_path, monkeypatch):
    way = models.TWO_RANKS["tp"]
    store = ActivationStore(tmp_path, shard_bytes=1)
    flex = hooked(way.shard(exact()), store, **way.sizes)
    flex(BATCHES[0]).sum().backward()
    store.flush()

    def full(file, chunk):
        raise OSError(errno.ENOSPC, "No space left on device")

    if dist.get_rank() == 1:
        monkeypatch.setattr(files, "write_chunk", full)

    def run_on():
        for _ in range(100):  # it is reported in the exchange after the failed write
            flex(BATCHES[1]).sum().backward()

    with pytest.raises(HookError, match=r"rank 1: OSError.*No space left"):
        run_on()
    with pytest.raises(HookError, match=r"No space left.*\(before\)"):
        flex(BATCHES[1])
    flex.restore()
    dist.barrier()
    assert_holds(tmp_path, unsharded_records(batches=BATCHES[:1]))


@pytest.mark.ranks(2)
def test_a_run_that_fails_on_one_rank_leaves_no_batch(tmp_path):
    way = models.TWO_RANKS["tp"]
    model = way.shard(exact())
    fails = []

    def fail(module, args):
        if fails:
            raise ZeroDivisionError(fails.pop())

    model.out.register_forward_pre_hook(fail)
    store = ActivationStore(tmp_path)
    flex = hooked(model, store, **way.sizes)
    flex(BATCHES[0]).sum().backward()
    if dist.get_rank() == 1:
        fails.append("on rank 1")
    with pytest.raises((ZeroDivisionError, HookError), match="on rank 1"):
        flex(BATCHES[1])
    flex(BATCHES[1]).sum().backward()
    late = flex(BATCHES[2]).sum()
    store.flush()
    with pytest.raises(HookError, match="its batch in the store was ended"):
        late.backward()
    flex.restore()
    dist.barrier()
    store, expected = ActivationStore(tmp_path), unsharded_records()
    assert store.num_batches == 3 and store.batch(2).keys() == {"inp", "fc1", "act", "fc2"}
    assert torch.equal(store.batch(1)["fc1.grad"][0], expected[1]["fc1.grad"][0])


def refuse(store, config):
    raise PermissionError("not yours")


@pytest.mark.ranks(2)
def test_what_ranks_do_not_agree_on(tmp_path, monkeypatch):
    way, rank = models.TWO_RANKS["tp"], dist.get_rank()
    with pytest.raises(HookMismatchError, match=r"rank 1 is at the store .*/1"):
        hooked(way.shard(exact()), ActivationStore(tmp_path / str(rank)), **way.sizes)
    with monkeypatch.context() as patch:
        if rank == 1:  # a host that does not have the file system
            patch.setattr(session, "_id_seen", lambda store: None)
        with pytest.raises(ValueError, match="ranks do not see the same"):
            hooked(way.shard(exact()), ActivationStore(tmp_path / "d"), **way.sizes)
    with monkeypatch.context() as patch:
        if rank == 0:
            patch.setattr(session, "_prepared", refuse)
        with pytest.raises(PermissionError, match=r"not yours \(on rank 0\)"):
            hooked(way.shard(exact()), ActivationStore(tmp_path / "d"), **way.sizes)
    hooked(way.shard(exact()), ActivationStore(tmp_path / "d"), **way.sizes).restore()
    folder = tmp_path / "a"
    folder.mkdir(exist_ok=True)
    dist.barrier()
    (folder / "thesis.tex").touch()
    dist.barrier()
    with pytest.raises(ValueError, match="holds other files"):
        ActivationStore(folder)
    store = ActivationStore(tmp_path / "b")
    flex = hooked(way.shard(exact()), store, **way.sizes)
    store.annotate(token_ids=torch.tensor([rank]))
    with pytest.raises(ValueError, match="tensor-parallel ranks give different values"):
        flex(BATCHES[0])
    flex.restore()
    dist.barrier()
    with hooked(way.shard(exact()), store, **way.sizes) as flex:
        store.annotate(token_ids=torch.tensor([3]))
        flex(BATCHES[0])
    assert ActivationStore(tmp_path / "b").annotations(0)["token_ids"].tolist() == [3]
    dist.barrier()
    store = ActivationStore(tmp_path / "c")
    with hooked(way.shard(exact()), store, **way.sizes) as flex:
        if rank == 1:
            store.annotate(text="alone")
        flex(BATCHES[0])
    dist.barrier()
    assert ActivationStore(tmp_path / "c").annotations(0) == {}


@pytest.mark.ranks(2)
def test_ctrl_c_of_one_rank_in_flush_leaves_nobody_waiting(tmp_path, monkeypatch):
    way, store = models.TWO_RANKS["tp"], ActivationStore(tmp_path)
    flex = hooked(way.shard(exact()), store, **way.sizes, timeout=30)
    flex(BATCHES[0])

    def interrupted(writer):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(Writer, "wait", interrupted)
        with pytest.raises((KeyboardInterrupt, HookError)) as caught:
            store.flush()
    if dist.get_rank() == 0:
        assert "rank 1 left" in str(caught.value)
    with pytest.warns(UserWarning, match="lacks the batches since its last flush: rank 1 left"):
        flex.restore()
    assert flex._core.is_closed


@pytest.mark.ranks(2)
def test_a_rank_that_outlives_the_others_writes_over_nothing(tmp_path):
    way = models.TWO_RANKS["tp"]
    write(tmp_path, way, exact(), BATCHES[:1])
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.safetensors")}
    dist.barrier()
    if dist.get_rank() == 0:  # as if the manifest had never listed them
        replace(Manifest.read(tmp_path), groups=()).write(tmp_path)
        for path in tmp_path.glob("batches-*.json"):
            path.unlink()
    dist.barrier()
    write(tmp_path, way, exact(), BATCHES[1:2])
    if dist.get_rank() == 1:
        for name, data in before.items():
            assert not (tmp_path / name).exists()
            (tmp_path / name).write_bytes(data)
    dist.barrier()
    assert_holds(tmp_path, unsharded_records(batches=BATCHES[1:2]))


@pytest.mark.ranks(2)
def test_an_exception_on_all_ranks_keeps_the_batches_before_it(tmp_path):
    way = models.TWO_RANKS["tp"]

    def run():
        with hooked(way.shard(exact()), ActivationStore(tmp_path), **way.sizes) as flex:
            for batch in BATCHES[:2]:
                flex(batch).sum().backward()
            flex(BATCHES[2])
            raise KeyError("the user's")

    with pytest.raises(KeyError):
        run()
    dist.barrier()
    assert_holds(tmp_path, unsharded_records(batches=BATCHES[:2]))  # the third has no gradients


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["tp", "dp"])
@pytest.mark.parametrize("is_own", [False, True])
def test_sequential_runs(name, is_own, tmp_path):
    """``store=`` and ``output_ptr=``: each rank writes its own part."""
    way, store = models.TWO_RANKS[name], ActivationStore(tmp_path)
    flex = FlexModel(way.shard(exact()), store if is_own else {}, **way.sizes)
    flex.register_forward_hook(HookFunction("fc1"))
    flex.register_forward_hook(HookFunction("act", editing_function=mix))
    batches = [{"x": way.my_rows(batch)} for batch in BATCHES]
    given = None if is_own else store
    sequential.run(flex, batches[:2], targets=["act"], window=1, store=given)
    outputs = sequential.run(flex, batches, targets=["act"], store=given)
    assert outputs[:2] == [None, None] and outputs[2] is not None
    other = [batches[0], {"x": batches[1]["x"] + 1}]
    with pytest.raises(ValueError, match=r"batch 1 .* from other inputs"):
        sequential.run(flex, other, targets=["act"], store=given)
    if is_own:
        with pytest.raises(ValueError, match="give one of them"):
            sequential.run(flex, batches, store=ActivationStore(tmp_path / "other"))
    else:
        flex(batches[0]["x"])
        if dist.get_rank() == 0:  # records go to the dict again
            assert flex.output_ptr["fc1"][0].shape == (4, 8)
        else:
            assert flex.output_ptr == {}
    flex.restore()
    dist.barrier()
    expected = [{n: r[n] for n in ("fc1", "act")} for r in unsharded_records()]
    assert_holds(tmp_path, expected)
    assert list(tmp_path.glob("*.rank-0001.*"))


@pytest.mark.ranks(2)
def test_a_pipeline_writes_from_rank_0(tmp_path):
    x, y = torch.randn(8, 8), torch.randn(8, 3)
    loss_fn = nn.functional.mse_loss

    def run(output_ptr):
        schedule = make_schedule(Schedule1F1B, make_mlp(layers=2), 4, loss_fn=loss_fn)
        with FlexModel(schedule, output_ptr) as flex:
            flex.register_forward_hook(HookFunction("layers.0.act"))
            flex.register_full_backward_pre_hook(HookFunction("layers.1.fc2"))
            found = []
            for scale in (1, 2):
                if output_ptr is not records:
                    output_ptr.annotate(token_ids=torch.full((8,), scale))
                flex(x * scale, target=y)
                found.append({name: list(kept) for name, kept in records.items()})
            flex(x, target=y, groups=())  # no hooks, no batch
            with flex.active():
                flex(x, target=y)
                flex(x, target=y)
            found.append({name: list(kept) for name, kept in records.items()})
        return found

    records = {}
    expected = run(records)
    run(ActivationStore(tmp_path))
    dist.barrier()
    if dist.get_rank() == 0:
        assert_holds(tmp_path, expected)
        assert len(expected[2]["layers.0.act"]) == 2
    assert ActivationStore(tmp_path).annotations(1)["token_ids"].tolist() == [2] * 8


@pytest.mark.ranks(2)
def test_a_forward_that_ends_early_is_a_batch(tmp_path):
    way = models.TWO_RANKS["tp"]
    with FlexModel(way.shard(exact()), ActivationStore(tmp_path), **way.sizes) as flex:
        flex.register_forward_hook(HookFunction("fc1"))
        for batch in BATCHES:
            flex.run_until(None, batch)
    dist.barrier()
    assert_holds(tmp_path, [{"fc1": records["fc1"]} for records in unsharded_records()])


@pytest.mark.ranks(2)
def test_a_dry_run_predicts_the_cost_of_a_store(tmp_path):
    way = models.TWO_RANKS["tp"]
    with FlexModel(way.shard(exact()), ActivationStore(tmp_path), **way.sizes) as flex:
        flex.register_forward_hook(HookFunction("fc1"))
        flex.register_forward_hook(HookFunction("act", editing_function=mix))
        dry = flex.dry_run(BATCHES[0])
        communicator = flex._core.communicator
        for _ in range(7):  # the first five wait for a backward that proves edits' gradients
            before = communicator.sequence
            flex(BATCHES[0])
            counted = communicator.sequence - before, payloads_of(communicator)
        assert (dry.forward.headers, dry.forward.payloads) == counted
        for row, cost in zip(dry, flex.explain()):
            assert (row.forward.bytes_by_rank or (0, 0))[dist.get_rank()] == cost.bytes_moved


TABLE = torch.arange(36).view(9, 4)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("counts", [(2, 2), (3, 1)])
def test_equal_rows_of_data_parallel_ranks_are_rows(counts, tmp_path):
    way, rank = models.TWO_RANKS["dp"], dist.get_rank()
    expected = []
    with hooked(way.shard(exact()), ActivationStore(tmp_path), **way.sizes) as flex:
        for i in range(4):  # rows grow by one: the third forward is the first that is predicted
            own = [torch.ones(count + i, WIDTH).double() for count in counts]
            notes = [{"token_ids": (one * 5).long(), "label": one[:, 0]} for one in own]
            flex.output_ptr.annotate(**notes[rank], table=TABLE)
            flex(own[rank])
            expected.append({name: torch.cat([one[name] for one in notes]) for name in notes[0]})
    dist.barrier()
    store = ActivationStore(tmp_path)
    for i, notes in enumerate(expected):
        found = store.annotations(i)
        assert torch.equal(found.pop("table"), TABLE) and found.keys() == notes.keys()
        for name, value in notes.items():
            assert torch.equal(found[name], value), name
    rows = next(iter(store.loader("inp", batch_rows=4)))
    assert sorted(rows.annotations) == ["label"]


@pytest.mark.ranks(2)
def test_what_may_be_rows_is_stated_or_refused(tmp_path):
    way, rank = models.TWO_RANKS["dp"], dist.get_rank()
    rows = torch.ones(len(TABLE), WIDTH).double()
    settings = {**way.sizes, "batch_dim": {"table": None}}
    with hooked(way.shard(exact()), ActivationStore(tmp_path / "a"), **settings) as flex:
        flex.output_ptr.annotate(table=TABLE)  # as many entries as rows
        flex(rows)
    dist.barrier()
    assert torch.equal(ActivationStore(tmp_path / "a").annotations(0)["table"], TABLE)
    for number, batch_dim in enumerate((0, {"table": None})):
        store = ActivationStore(tmp_path / f"b{number}")
        flex = hooked(way.shard(exact()), store, **way.sizes, batch_dim=batch_dim)
        store.annotate(table=torch.full((2 + number, 4), rank))
        with pytest.raises(
            ValueError, match=r"annotate\(table=...\): the data-parallel ranks give "
        ):
            flex(rows)
        flex.restore()


@pytest.mark.ranks(2)
def test_rows_of_any_forward_of_a_run_are_rows(tmp_path):
    way = models.TWO_RANKS["dp"]
    store, counts = ActivationStore(tmp_path / "a"), (2, 4)
    with hooked(way.shard(exact()), store, **way.sizes) as flex:
        store.annotate(**{f"of_{n}": torch.ones(n) for n in counts}, table=torch.ones(5))
        with flex.active():
            for count in counts:
                flex(torch.ones(count, WIDTH).double())
    dist.barrier()
    found = ActivationStore(tmp_path / "a").annotations(0)
    assert {n: len(note) for n, note in found.items()} == {"of_2": 4, "of_4": 8, "table": 5}
    for size in (1, 6):  # rows that a forward may repeat, and those of both forwards
        store = ActivationStore(tmp_path / f"b{size}")
        flex = hooked(way.shard(exact()), store, **way.sizes)
        store.annotate(mask=torch.ones(size, 4))
        with pytest.raises(ValueError, match=r"batch_dim=\{'mask': None\}"), flex.active():
            [flex(torch.ones(count, WIDTH).double()) for count in counts]
        flex.restore()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("lengths", [(4, 6), (5, None)])
def test_annotations_are_padded_as_records_are(lengths, tmp_path):
    rank, store = dist.get_rank(), ActivationStore(tmp_path)
    settings = {"data_parallel_size": 2, "dp_batch": "global", "batch_dim": {"table": None}}
    flex = FlexModel(nn.Sequential(nn.Embedding(50, 8), nn.ReLU()), store, **settings)
    flex.register_forward_hook(HookFunction("1"))
    tokens = torch.full((2, lengths[rank] or 3), rank + 7)
    store.annotate(token_ids=tokens, attention_mask=torch.ones_like(tokens), table=TABLE)
    with nullcontext() if lengths[rank] else flex.no_rows():
        flex(tokens)
    flex.restore()
    dist.barrier()
    store = ActivationStore(tmp_path)
    given = [length for length in lengths if length]
    found, shape = store.annotations(0), (2 * len(given), max(given))
    assert store.batch(0)["1"][0].shape[:2] == shape
    own = [torch.full((2, n), i + 7) for i, n in enumerate(lengths) if n]
    padded = [nn.functional.pad(one, (0, max(given) - one.shape[1])) for one in own]
    assert torch.equal(found["token_ids"], torch.cat(padded))
    assert torch.equal(found["attention_mask"], (torch.cat(padded) > 0).long())
    assert torch.equal(found["table"], TABLE)
    loader = store.loader("1", batch_rows=1)
    assert sum(len(rows.origins) for rows in loader) == 2 * sum(given)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transport", ["gloo", "auto"])
def test_a_default_device_is_the_users_alone(transport, tmp_path, monkeypatch):
    """`torch.set_default_device("cuda")` of a model on the CPU; here no GPU is needed to see it."""
    monkeypatch.setenv("FLEX_MODEL_TRANSPORT", transport)
    matrix, x = models.random(8, 8), models.random(4, 6)

    def numbers(model, folder):
        flex = FlexModel(model, ActivationStore(folder), tensor_parallel_size=2)
        edit = HookFunction("act", editing_function=lambda module, full, *_: full @ matrix)
        flex.register_forward_hook(edit)
        flex.register_full_backward_hook(HookFunction("fc1", output_name="gradient"))
        flex.register_forward_hook(HookFunction("fc2", select=Select(rows=[0, 2])))
        flex(x).square().mean().backward()
        flex.set_module_parameter("fc2.bias", flex.get_module_parameter("fc2.bias") + 1)
        found = [flex.get_module_parameter("fc2.bias")]
        flex.restore()
        dist.barrier()
        return [*found, ActivationStore(folder).batch(0)]

    one, other = (models.TWO_RANKS["dtensor"].shard(models.mlp()) for _ in range(2))
    expected = numbers(one, tmp_path / "expected")
    torch.set_default_device("meta")
    try:
        found = numbers(other, tmp_path / "found")
    finally:
        torch.set_default_device(None)
    assert_close(found, expected, rtol=0, atol=0)

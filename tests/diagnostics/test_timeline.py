"""``flex.timeline()``: what each rank did, when, and what it waited for."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

import models
import pipelines
from flex_model import FlexModel, HookFunction
from flex_model.diagnostics import timeline as timelines
from flex_model.errors import HookError


def slow(module, x, save_ctx, modules):
    time.sleep(0.02)
    return x * 2


def mixing(module, x, save_ctx, modules):
    return x.flip(-1) + x.mean()


def spans_of(timeline, rank, kind):
    return [span for span in timeline[rank] if span.kind == kind]


def test_on_one_process_hooks_that_only_look_are_seen_too():
    records, batch = {}, models.random(4, 6)
    with FlexModel(models.mlp(), records) as flex:
        flex.register_forward_hook(HookFunction("fc1"))
        flex.register_forward_hook(HookFunction("act", editing_function=slow))
        flex.register_full_backward_hook(HookFunction("fc2", output_name="grad"))
        expected = flex(batch)
        expected.sum().backward()
        before = {name: tensors[0] for name, tensors in records.items()}
        with flex.timeline() as timeline:
            output = flex(batch)
            output.sum().backward()
        after = {name: tensors[0] for name, tensors in records.items()}
    assert torch.equal(output, expected) and before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    (spans,) = timeline
    hooks = spans_of(timeline, 0, "hook")
    assert [span.site for span in hooks] == ["fc1", "act", "fc2"]
    (edit,) = spans_of(timeline, 0, "edit")
    assert 20e3 <= edit.end_us - edit.start_us <= timeline.end_us
    assert hooks[1].start_us <= edit.start_us and edit.end_us <= hooks[1].end_us
    assert spans[0].start_us == 0 and len(spans) == 4
    assert timeline.summary()[0]["edit_us"] >= 20e3
    assert "rank  hooks  edits" in str(timeline)


def test_hooks_of_compiled_models_are_seen():
    batch = models.random(4, 6)
    model = torch.compile(models.mlp(), backend="eager")
    with torch.no_grad(), FlexModel(model, {}) as flex:
        flex.register_forward_hook(HookFunction("act", editing_function=mixing))
        expected = flex(batch)
        with flex.timeline() as timeline:
            assert torch.equal(flex(batch), expected)
        assert torch.equal(flex(batch), expected)
    assert [span.kind for span in timeline[0]] == ["hook", "edit"]


def test_nothing_is_left_when_it_is_off():
    with FlexModel(models.mlp(), {}) as flex:
        flex.register_forward_hook(HookFunction("fc1", editing_function=mixing))
        core = flex._core
        before = [set(vars(one)) for one in (core, core.executor, core.communicator)]
        observers = (core.executor.observers, core.communicator.observers)
        assert observers == ([], [])
        with flex.timeline() as timeline:
            flex(models.random(4, 6))
            with pytest.raises(RuntimeError, match="one is being recorded already"):
                flex.timeline().__enter__()
        num_spans = len(timeline[0])
        assert [set(vars(one)) for one in (core, core.executor, core.communicator)] == before
        assert observers == ([], []) and core.executor.observers is observers[0]
        flex(models.random(4, 6))
        assert len(timeline[0]) == num_spans == 2


def test_only_the_last_spans_are_kept(monkeypatch):
    monkeypatch.setattr(timelines, "_REMEMBERED", 10)
    with FlexModel(models.mlp(), {}) as flex:
        flex.register_forward_hook(HookFunction("fc1"))
        with flex.timeline() as timeline:
            for _ in range(25):
                flex(models.random(4, 6))
    assert len(timeline[0]) == 10 and timeline.num_forgotten == [15]
    assert "the first 15 of a rank's spans are forgotten" in str(timeline)


def test_hooks_on_gradients_of_parameters_are_seen():
    with FlexModel(models.mlp(), {}) as flex:
        flex.register_hook(HookFunction("fc1.weight", editing_function=mixing))
        with flex.timeline() as timeline:
            flex(models.random(4, 6)).sum().backward()
    assert [(s.kind, s.site) for s in timeline[0]] == [(k, "fc1.weight") for k in ("hook", "edit")]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("edit_on", ["all", "rank0"])
def test_all_kinds_of_transfers_are_seen_with_their_bytes(edit_on):
    """A sum, an edit and records of data-parallel ranks, as ``flex.explain()`` counts them."""
    parallelism, batch, me = models.TWO_RANKS["ddp"], models.random(4, 6), dist.get_rank()
    model = parallelism.shard(models.mlp())
    with FlexModel(model, {}, edit_on=edit_on, **parallelism.sizes) as flex:
        flex.register_forward_hook(HookFunction("fc1"))
        flex.register_forward_hook(HookFunction("act", editing_function=mixing))
        flex.register_hook(HookFunction("fc1.weight"))
        run = lambda: flex(parallelism.my_rows(batch)).sum().backward()  # noqa: E731
        run()
        with flex.timeline() as timeline:
            run()
        told = flex.explain()
    (row,) = [row for row in timeline.summary() if row["rank"] == me]
    assert row["bytes"] == told.bytes_moved > 0
    assert row["headers"] == sum(of_hook.headers for of_hook in told)
    moved = [s for s in spans_of(timeline, me, "transfer") if not s.what.startswith("exchange,")]
    assert len(moved) == sum(of_hook.collectives for of_hook in told)


@pytest.mark.ranks(2)
def test_numbers_are_those_of_explain_and_of_the_run_without_it():
    parallelism, records, batch = models.TWO_RANKS["tp"], {}, models.random(4, 6)
    with FlexModel(parallelism.shard(models.mlp()), records, **parallelism.sizes) as flex:
        flex.register_forward_hook(HookFunction("act", editing_function=mixing))
        flex.register_forward_hook(HookFunction("fc1"))
        flex.register_full_backward_pre_hook(
            HookFunction("fc1", output_name="grad", editing_function=mixing)
        )
        expected = flex(batch)
        expected.sum().backward()
        grad = flex.get_module_gradient("fc1.weight", (8, 6))
        before = {name: tensors[0] for name, tensors in records.items()}
        flex.zero_grad()
        with flex.timeline() as timeline:
            output = flex(batch)
            output.sum().backward()
        told = flex.explain()
        assert torch.equal(output, expected)
        assert torch.equal(flex.get_module_gradient("fc1.weight", (8, 6)), grad)
        assert all(torch.equal(before[name], records[name][0]) for name in before)
        assert list(before) == list(records)
    me = dist.get_rank()
    assert timeline.ranks == (0, 1) and len(timeline) == 2
    own = timeline.summary()[me]
    assert own["bytes"] == told.bytes_moved
    assert own["headers"] == sum(row.headers for row in told)
    assert own["transfers"] == sum(row.collectives for row in told)
    assert (own["hooks"], own["edits"]) == (3, 2)
    (edited,) = [row for row in told if row.name == "act"]
    at_site = [span for span in timeline[me] if span.site == "act" and span.kind == "transfer"]
    forward = [span for span in at_site if "gradient of the edit" not in span.what]
    assert [span.num_bytes for span in at_site] == [256] * len(at_site) and len(forward) == 1
    assert edited.bytes_moved == 256 * len(at_site)


@pytest.mark.ranks(2)
def test_who_waits_is_told():
    """Rank 1 comes 300 ms late to the first exchange of an edit."""
    parallelism, me = models.TWO_RANKS["tp"], dist.get_rank()
    with FlexModel(parallelism.shard(models.mlp()), {}, **parallelism.sizes) as flex:
        flex.register_forward_hook(HookFunction("act", editing_function=mixing))
        flex(models.random(4, 6))  # layouts are settled
        late = flex.module.inp.register_forward_hook(lambda *args: time.sleep(0.3 * me))
        with flex.timeline() as timeline:
            flex(models.random(4, 6))
        late.remove()
    first, second = (row["waited_us"] for row in timeline.summary())
    header = next(span for span in timeline[0] if span.kind == "header" and span.site == "act")
    other = next(span for span in timeline[1] if span.kind == "header" and span.site == "act")
    assert other.waited_us == 0  # it was the last to come
    assert header.waited_us == pytest.approx(other.start_us - header.start_us)
    assert 50e3 < header.waited_us <= header.end_us - header.start_us
    assert first > 50e3 and second < first


@pytest.mark.ranks(2)
def test_after_an_error_a_rank_has_its_own():
    parallelism = models.TWO_RANKS["tp"]

    def fail(module, x, save_ctx, modules):
        raise ZeroDivisionError("on purpose")

    with FlexModel(parallelism.shard(models.mlp()), {}, **parallelism.sizes) as flex:
        handle = flex.register_forward_hook(HookFunction("act", editing_function=fail))
        with pytest.raises(HookError, match="on purpose"), flex.timeline() as timeline:
            flex(models.random(4, 6))
        assert timeline.ranks == (dist.get_rank(),)
        assert len(spans_of(timeline, 0, "hook")) == len(spans_of(timeline, 0, "edit")) == 1
        handle.remove()
        flex.register_forward_hook(HookFunction("act"))
        with flex.timeline() as timeline:  # it can be used again
            flex(models.random(4, 6))
        assert timeline.ranks == (0, 1)


@pytest.mark.ranks(2)
def test_a_pipeline_has_one_timeline_of_all_its_ranks():
    schedule = pipelines.make_schedule(Schedule1F1B, pipelines.make_mlp(), loss_fn=nn.MSELoss())
    with FlexModel(schedule, {}) as flex:
        for name in ("layers.1.fc1", "layers.6.fc1"):
            flex.register_forward_hook(HookFunction(name, editing_function=mixing))
        with flex.timeline() as timeline:
            flex(models.random(8, 8, dtype=torch.float32), target=torch.zeros(8, 3))
    assert timeline.ranks == (0, 1)
    for rank, site in enumerate(("layers.1.fc1", "layers.6.fc1")):
        assert [span.site for span in spans_of(timeline, rank, "edit")] == [site] * 4
    assert all(row["headers"] for row in timeline.summary())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["tp", "one"])
def test_ranges_in_a_trace_of_torchs_profiler(name):
    """By hook; a function that the dispatcher calls by itself elsewhere is among them."""
    parallelism = models.TWO_RANKS["tp"] if name == "tp" else models.Parallelism("one")
    group = None if name == "tp" else pipelines.alone_group()
    sharded = parallelism.shard(models.mlp())
    with FlexModel(sharded, {}, process_group=group, **parallelism.sizes) as flex:
        flex.register_forward_hook(HookFunction("fc1", editing_function=mixing))
        flex.register_full_backward_hook(HookFunction("fc2"))
        for _ in range(3):  # the function settles
            flex(models.random(4, 6)).sum().backward()
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
        ) as trace:
            flex(models.random(4, 6)).sum().backward()
        flex(models.random(4, 6))
    counts = {event.key: event.count for event in trace.key_averages()}
    ranges = {key: n for key, n in counts.items() if key.startswith("flex_model ")}
    site = "forward hook on 'fc1'"
    kinds = ["hook", "function", *(["gather", "scatter"] if name == "tp" else [])]
    assert {f"flex_model {kind} {site}" for kind in kinds} <= ranges.keys()
    assert [
        n for key, n in ranges.items() if key.startswith("flex_model hook") and "fc2" in key
    ] == [1]
    assert any("transfer all_gather" in key for key in ranges) == (name == "tp")

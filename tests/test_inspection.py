"""layouts(), dry_run() and verify(): against what real runs settle, cost and compute."""

import pytest
import torch
import torch.distributed as dist

import frameworks
from flex_model import FlexModel, HookFunction


def double(module, full, save_ctx, modules):
    return full * 2


def hooks_everywhere(flex, pair):
    """A looking and an editing hook at every site, of forward and backward kinds."""
    for i, (what, name) in enumerate(pair.sites.items()):
        edit = double if i % 2 else None
        for kind, register in (
            ("forward", flex.register_forward_hook),
            ("forward_pre", flex.register_forward_pre_hook),
            ("full_backward_pre", flex.register_full_backward_pre_hook),
        ):
            if kind == "forward_pre" and what in ("outside", "root", "shared by all rows"):
                continue
            if kind == "full_backward_pre" and what == "root":
                continue  # its output may be a model output without a graph of its own
            register(HookFunction(name, None, edit, output_name=f"{name} {kind}"))


def settled(flex):
    return {(row.name, row.kind): row for row in flex.layouts()}


def check_dry_run(name, tmp_path):
    """Layouts before are layouts after; costs are those that a run counts."""
    with frameworks.quiet(), frameworks.CASES[name].build(tmp_path) as pair:
        pair.oracle(*pair.inputs, **pair.keywords)
        pair.start()
        model = pair.shard()
        records = {}
        flex = FlexModel(model, records, **pair.sizes)
        hooks_everywhere(flex, pair)
        inputs = tuple(pair.rows(full) for full in pair.inputs)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        state = torch.get_rng_state()

        dry = flex.dry_run(*inputs, **pair.keywords)

        assert not records and torch.equal(torch.get_rng_state(), state)
        for key, value in model.state_dict().items():
            assert type(value) is type(before[key])
            assert torch.equal(frameworks.full_tensor(value), frameworks.full_tensor(before[key]))
        assert all(row.source == "not run yet" for row in flex.layouts())

        import os
        if dist.get_rank() == 0: open(f"/tmp/h_seeing_x/dry-{name}.txt", "w").write(str(dry))
        channel = flex._core.channel
        for _ in range(2):  # what the first one has to find out, the second one knows
            start = channel.sequence, channel.num_payloads
            output = frameworks.tensor_of(flex(*inputs, **pair.keywords))
            middle = channel.sequence, channel.num_payloads
            output.sum().backward()
            end = channel.sequence, channel.num_payloads
        found = settled(flex)
        for row in dry:
            real = found[row.name, row.kind]
            assert row.calls, row
            if row.layout is None:
                assert "values" in row.source, row
                assert real.source == "equal values on all ranks", (row, real)
                continue
            assert (row.full_shape, row.local_shapes, row.dtype) == (
                real.full_shape,
                real.local_shapes,
                real.dtype,
            ), (row, real)
            if not (row.kind == "full_backward_pre" and str(row.layout.tp) == "R"):
                assert row.layout == real.layout, (row, real)
        known = all(row.layout is not None for row in dry)
        if known:
            told = dry.forward.headers, dry.forward.payloads
            assert told == (middle[0] - start[0], middle[1] - start[1])
        assert str(dry).count("\n") == len(dry) + 3
        assert str(flex.layouts()).count("\n") == len(dry) + 1
        flex.restore()
        return dry, (end[0] - middle[0], end[1] - middle[1]), known


TWO = ["hf-llama-2", "native-tp-2", "native-sp-2", "native-dtensor-2", "fairscale-2", "ddp-2"]


@pytest.mark.ranks(2, timeout=200)
@pytest.mark.parametrize(
    "name", [TWO[0], TWO[2], *(pytest.param(n, marks=pytest.mark.slow) for n in TWO[3:] + TWO[1:2])]
)
def test_a_dry_run_tells_what_a_run_settles(name, tmp_path):
    check_dry_run(name, tmp_path)


@pytest.mark.ranks(2, timeout=200)
def test_a_dry_run_leaves_fsdp2_sharded(tmp_path):
    check_dry_run("fsdp2-2", tmp_path)


@pytest.mark.slow
@pytest.mark.ranks(4, timeout=200)
@pytest.mark.parametrize("name", ["tp-fsdp2-4", "hsdp-4", "hf-tp-fsdp-4", "fairscale-ddp-4"])
def test_a_dry_run_of_two_axes(name, tmp_path):
    check_dry_run(name, tmp_path)


# ---- verify --------------------------------------------------------------------------------------


def build(name, tmp_path):
    """A sharded model, its oracle and this rank's inputs."""
    pair = frameworks.CASES[name].build(tmp_path)
    return pair


@pytest.mark.ranks(2, timeout=200)
@pytest.mark.parametrize(
    "name",
    [
        "native-sp-2",
        "fsdp2-2",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("hf-llama-2", "fairscale-2", "ddp-2", "fsdp1-2")
        ),
    ],
)
def test_verify_finds_equal_what_is_equal_and_names_the_first_that_is_not(name, tmp_path):
    with frameworks.quiet(), frameworks.CASES[name].build(tmp_path) as pair:
        pair.oracle(*pair.inputs, **pair.keywords)
        pair.start()
        model = pair.shard()
        flex = FlexModel(model, {}, **pair.sizes)
        inputs = tuple(pair.rows(full) for full in pair.inputs)
        reference = pair.oracle if dist.get_rank() == 0 else None

        report = flex.verify(reference, *inputs, **pair.keywords)
        assert report.is_equal, report
        assert {row.result for row in report.rows} == {0}, report
        assert len(report.rows) > 6

        broken = pair.sites["row output"]
        if dist.get_rank() == 0:
            module = pair.oracle.get_submodule(broken)
            with torch.no_grad():
                module.weight[0] += 1.0
        report = flex.verify(reference, *inputs, **pair.keywords)
        first = report.first_difference
        assert (first.name, first.kind) == (broken, "forward"), report
        assert first.max_abs > 1e-3
        with pytest.raises(AssertionError, match=f"the first that differs: forward of {broken}"):
            flex.verify(reference, *inputs, raise_on_difference=True, **pair.keywords)
        flex.restore()

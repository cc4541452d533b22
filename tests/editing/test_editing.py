"""Ready editing functions: the same numbers on one process and on every sharding."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close

import models
import pipelines
from flex_model import FlexModel, HookError, HookFunction, editing, pipelining
from flex_model.pipelining import ScheduleGPipe, SplitPoint, pipeline
from tiers import grid_but

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}  # Llama's norms are computed in float32
HEADS = "model.layers.0.self_attn.o_proj"
NEURONS = "model.layers.1.mlp.act_fn"
ROWS, LENGTH, WIDTH = 4, 6, 32
DIRECTIONS = models.random(2, WIDTH, seed=5)
WHOLE = models.random(ROWS, LENGTH, WIDTH, seed=6)
OTHERS = models.random(7, LENGTH, WIDTH, seed=7)


def tokens(seed=0):
    return torch.randint(64, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))


def loss_of(logits, weights):
    return (logits.square() * weights[..., None]).mean()


WEIGHTS = models.random(ROWS, LENGTH, seed=8).abs()


def low_rank():
    return nn.Sequential(nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False))


def row_mask():
    mask = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    mask[0, 1] = mask[2, 3:] = mask[3, -1] = True
    return mask


# What can be done in micro-batches, too.
EDITS = {
    "zero": lambda: editing.zero(heads=[1, -1], num_heads=4),
    "zero all": lambda: editing.zero(),
    "zero units of rows": lambda: editing.zero(rows=[0, 3], units=[3, 17, 31]),
    "zero a row": lambda: editing.zero(rows=-1, positions=slice(1, 4)),
    "scale": lambda: editing.scale(2.5, units=slice(3, 29)),
    "clamp": lambda: editing.clamp(-0.02, 0.03, units=torch.arange(WIDTH) % 3 == 0),
    "mean": lambda: editing.mean(DIRECTIONS[0], heads=2, num_heads=4),
    "mean of rows": lambda: editing.mean(over="positions", rows=[1, 2]),
    "steer": lambda: editing.steer(DIRECTIONS[0], 2.0, positions=[0, -1]),
    "steer by row": lambda: editing.steer(WHOLE, 0.5, positions=row_mask()),
    "trainable vector": lambda: editing.steer("vector", positions="last"),
    "project out": lambda: editing.project_out(DIRECTIONS, positions=slice(1, None)),
    "project onto": lambda: editing.project_onto(DIRECTIONS[1], rows=[0, 2]),
    "patch": lambda: editing.patch(WHOLE, rows=[0, 3], positions=[2, 5], units=slice(9, 20)),
    "patch heads": lambda: editing.patch(WHOLE, heads=[0, 3], num_heads=4, rows=2),
    "noise": lambda: editing.noise(0.1, seed=3, positions=[1, 2]),
    "resample": lambda: editing.resample(OTHERS, seed=4, positions=slice(2, None)),
    "autoencoder": lambda: editing.splice(
        "sae", error=True, latents=editing.scale(3.0, units=[2, 39]), positions=[1, 4]
    ),
    "replaced": lambda: editing.splice("sae"),
    "adapter": lambda: editing.splice("adapter", add=True),
    "chain": lambda: (
        editing.zero(units=5)
        | (lambda module, x, save_ctx, modules: x + x.flip(-1))
        | editing.steer(DIRECTIONS[1], positions="last")
        | editing.splice("adapter", add=True, rows=0)
    ),
}
# What looks at the whole batch, or draws from torch's generator.
WHOLE_BATCH = {
    "mean of the batch": lambda: editing.mean(heads=3, num_heads=4),
    "resample the batch": lambda: editing.resample(units=slice(0, 16)),
    "noise of torch": lambda: editing.noise(0.1, units=slice(5, 25)),
}


class Harness:
    """A Llama that runs somehow. ``forward_and_backward`` is of the whole batch."""

    def __init__(self, sharding="none", **settings):
        self.sharding, self.records = sharding, {}
        model = models.llama(use_cache=False)
        if sharding == "pp":
            pipe = pipeline(
                model, (tokens()[:2],), split_spec={"model.layers.1": SplitPoint.BEGINNING}
            )
            stage = pipe.build_stage(dist.get_rank(), torch.device("cpu"))
            self.schedule = ScheduleGPipe(stage, 2, loss_fn=loss_of)
            self.flex = FlexModel(self.schedule, self.records)
        elif sharding == "tp":
            model = models.tensor_parallel_llama(model, models.mesh(1, 2)["tp"])
            self.flex = FlexModel(model, self.records, tensor_parallel_size=2, **settings)
        elif sharding == "dp":
            model = copy.deepcopy(model)
            for layer in model.model.layers:
                fully_shard(layer, mesh=models.mesh(2, 1)["dp"])
            fully_shard(model, mesh=models.mesh(2, 1)["dp"])
            self.flex = FlexModel(model, self.records, data_parallel_size=2)
        else:
            group = pipelines.alone_group() if dist.is_initialized() else None
            self.flex = FlexModel(model, self.records, process_group=group)
        sae, adapter = models.seeded(models.Autoencoder, WIDTH, 40), models.seeded(low_rank)
        self.flex.register_trainable_module("sae", sae.double())
        self.flex.register_trainable_module("adapter", adapter.double())
        vector = nn.ParameterList([nn.Parameter(DIRECTIONS[0].clone())])
        self.flex.register_trainable_module("vector", vector)

    def mine(self, batch):
        """This rank's rows."""
        return batch.chunk(2)[dist.get_rank()] if self.sharding == "dp" else batch

    def forward_and_backward(self):
        inputs, weights = self.mine(tokens()), self.mine(WEIGHTS)
        if self.sharding == "pp":
            self.flex(inputs, target=weights, losses=[])
        else:
            loss_of(self.flex(inputs).logits, weights).backward()

    def numbers(self, edit, site=HEADS, kind="forward_pre"):
        """What a run with the edit gives: records where they are, gradients everywhere."""
        register = getattr(self.flex, f"register_{kind}_hook")
        handles = [
            register(HookFunction(site, editing_function=edit)),
            self.flex.register_forward_hook(HookFunction("lm_head")),
            self.flex.register_full_backward_pre_hook(
                HookFunction("model.embed_tokens", output_name="gradient")
            ),
        ]
        self.flex.zero_grad()
        torch.manual_seed(9)
        try:
            self.forward_and_backward()
        finally:
            for handle in handles:
                handle.remove()
        found = {"logits": self.records.get("lm_head"), "gradient": self.records.get("gradient")}
        found = {name: records[0] for name, records in found.items() if records}
        for name in ("model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"):
            found[name] = self.flex.get_module_gradient(name)
        for name, parameter in self.flex.trainable_modules.named_parameters():
            if parameter.grad is not None:
                found[name] = parameter.grad.clone()
        return found


def check_all(sharding, edits):
    alone, sharded = Harness(), Harness(sharding)
    untouched = alone.numbers(lambda module, x, save_ctx, modules: x)
    for name, make in edits.items():
        expected, found = alone.numbers(make()), sharded.numbers(make())
        assert (expected["logits"] - untouched["logits"]).abs().max() > 1e-4, name
        if dist.get_rank() > 0:
            expected = {key: value for key, value in expected.items() if key in found}
        assert set(expected) == set(found), name
        assert_close(found, expected, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")
    # Edits of gradients, by the neurons' global numbers.
    # All that a layer gives is replaced: nothing flows back to it, on another stage or not.
    expected, found = (
        harness.numbers(editing.patch(WHOLE), "model.layers.0", "forward")
        for harness in (alone, sharded)
    )
    assert_close(found, {key: expected[key] for key in found}, **TOLERANCE)
    for make in (
        lambda: editing.zero(units=[3, 40]),
        lambda: editing.scale(0.5, rows=[1, 3], positions=slice(0, 3)),
    ):
        expected = alone.numbers(make(), NEURONS, "full_backward_pre")
        found = sharded.numbers(make(), NEURONS, "full_backward_pre")
        assert_close(found, {key: expected[key] for key in found}, **TOLERANCE)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sharding", grid_but(["tp", "dp", "pp"], "tp", "pp"))
def test_the_numbers_of_one_process(sharding):
    pytest.importorskip("transformers")
    check_all(sharding, EDITS if sharding == "pp" else EDITS | WHOLE_BATCH)


@pytest.mark.ranks(2)
def test_what_needs_the_whole_batch_is_refused_in_micro_batches():
    pytest.importorskip("transformers")
    alone, piped = Harness(), Harness("pp")
    for name, make in WHOLE_BATCH.items():
        with pytest.raises(HookError, match="batch_mode='full'"):
            piped.numbers(make())
        piped.flex.batch_mode = "full"
        expected, found = alone.numbers(make()), piped.numbers(make())
        piped.flex.batch_mode = "micro"
        assert_close(found, {key: expected[key] for key in found}, **TOLERANCE, msg=name)


@pytest.mark.ranks(2)
def test_edits_on_rank_0():
    """``edit_on="rank0"``: captures and patches are on rank 0 only."""
    pytest.importorskip("transformers")
    alone, sharded = Harness(), Harness("tp", edit_on="rank0")
    for name in ("zero units of rows", "patch", "chain"):
        expected, found = alone.numbers(EDITS[name]()), sharded.numbers(EDITS[name]())
        if dist.get_rank() > 0:  # gradients of trainable modules are on rank 0 alone
            found = {key: value for key, value in found.items() if key.startswith("model.")}
        assert_close(found, {key: expected[key] for key in found}, **TOLERANCE)
    site = [editing.Site(NEURONS, where={"units": [3, 40]})]
    maps = [
        editing.activation_patching(
            harness.flex, tokens(1), tokens(2), site, lambda logits: logits[:, -1, 3].mean()
        )
        for harness in (alone, sharded)
    ]
    assert maps[1].positions == maps[0].positions  # those of rank 0's captures
    assert_close(maps[1].values, maps[0].values, **TOLERANCE)


def experiments(harness):
    """Patching and lenses, on whichever sharding."""
    flex, clean, corrupted = harness.flex, harness.mine(tokens(1)), harness.mine(tokens(2))
    layers = ["model.layers.0", editing.Site("model.layers.1.mlp")]
    heads = [editing.Site(f"model.layers.{i}.self_attn.o_proj", "input") for i in range(2)]
    head = editing.Site(heads[0].module, "input", {"heads": 1, "num_heads": 4})
    sites = [*layers, head, editing.Site(NEURONS, where={"units": slice(0, 48, 5)})]

    def metric(logits):
        return loss_of(logits, WEIGHTS)

    with flex.active(), pytest.raises(RuntimeError, match="outside of active"):
        editing.activation_patching(flex, clean, corrupted, sites, metric)
    found = {}
    patched = editing.activation_patching(
        flex, clean, corrupted, sites, metric, output="lm_head", positions=[0, 3, "every"]
    )
    found["activation"] = patched.values
    found["ends"] = [patched.clean, patched.corrupted]
    of_head = editing.activation_patching(flex, clean, corrupted, [head], metric, output="lm_head")
    assert of_head.positions == tuple(range(clean.shape[1]))  # whichever rank has the site
    found["each position"] = of_head.values
    if harness.sharding != "pp":
        batched = editing.activation_patching(
            flex, clean, corrupted, sites, metric, positions=[0, 3, "every"], batch=5
        )
        assert_close(batched.values, patched.values, **TOLERANCE)
        assert_close([batched.clean, batched.corrupted], found["ends"], **TOLERANCE)
    else:
        with pytest.raises(RuntimeError, match=r"batch= is for a model that runs as a whole"):
            editing.activation_patching(flex, clean, corrupted, sites, metric, batch=2)
    for receivers in (["model.norm"], [editing.Site("model.layers.1.mlp", "input")]):
        found[f"path to {receivers}"] = editing.path_patching(
            flex, clean, corrupted, head, receivers, heads, metric, output="lm_head"
        )
    flex.zero_grad()
    in_pipeline = harness.sharding == "pp"
    how = {"target": WEIGHTS} if in_pipeline else {"metric": metric, "output": "lm_head"}
    estimated = editing.attribution_patching(flex, clean, corrupted, sites, **how)
    found["attribution"] = estimated.values
    assert flex.get_module_gradient("model.layers.0.mlp.up_proj.weight") is None

    lens = editing.logit_lens("lm_head.weight", norm="model.norm.weight", positions=[1, -1])
    tuned = editing.tuned_lens("sae", "lm_head.weight", norm="model.norm.weight")
    handles = [flex.register_forward_hook(lens.at(f"model.layers.{i}")) for i in range(2)]
    handles.append(flex.register_forward_hook(tuned.at("model.layers.1.mlp", output_name="tuned")))
    handles.append(flex.register_forward_hook(HookFunction("lm_head")))
    with torch.set_grad_enabled(not in_pipeline):
        flex(clean)
    read, read_tuned = lens.take(flex), tuned.take(flex)
    assert not vars(flex.save_ctx)
    if dist.get_rank() == 0:
        (logits,) = harness.records["lm_head"]
        (last,) = read["model.layers.1"]
        assert_close(last, logits[:, [1, -1]], **TOLERANCE)
        found["lens"] = {name: calls[0] for name, calls in read.items()}
        found["tuned lens"] = read_tuned["model.layers.1.mlp"][0].detach()
    if not in_pipeline:
        flex.zero_grad()
        read_tuned["model.layers.1.mlp"][0].square().mean().backward()
        found["translator"] = flex.trainable_modules["sae"].decoder.weight.grad
        assert flex.get_module_gradient("lm_head.weight") is None
    for handle in handles:
        handle.remove()
    assert not flex.hook_functions and not any("editing" in name for name in harness.records)
    return found


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sharding", grid_but(["tp", "dp", "pp"], "pp"))
def test_experiments_and_lenses(sharding):
    pytest.importorskip("transformers")
    expected, found = experiments(Harness()), experiments(Harness(sharding))
    assert_close(found, {name: expected[name] for name in found}, **TOLERANCE)


@pytest.mark.ranks(2)
def test_a_lens_joins_the_microbatches_of_one_call_in_one_step():
    """Those of two calls, or of a step that failed and the next, were joined as one batch."""
    model, found, fails = pipelines.make_mlp(), [], [False]
    model.layers[6] = pipelines.Twice(model.layers[6])
    x = models.random(8, pipelines.WIDTH, dtype=torch.float32)
    schedule = pipelines.make_schedule(ScheduleGPipe, model)

    def fail(module, full, save_ctx, modules):
        if fails[0] and pipelining.current_microbatch() == 1:
            raise ArithmeticError

    for wrapped, group in ((schedule, None), (model, pipelines.alone_group())):
        with torch.no_grad(), FlexModel(wrapped, {}, process_group=group) as flex:
            lens = editing.logit_lens("head.weight", kind="none")
            flex.register_forward_hook(lens.at("layers.6.block"))
            flex.register_forward_hook(HookFunction("layers.7", editing_function=fail))
            for fails[0] in (wrapped is schedule, False):
                with pytest.raises(HookError) if fails[0] else contextlib.nullcontext():
                    flex(-x if fails[0] else x)
            found.append(lens.take(flex)["layers.6.block"][-2:] if dist.get_rank() == 0 else None)
    assert dist.get_rank() or len(found[0]) == 2
    assert_close(*found)


@pytest.mark.ranks(4)
def test_rows_of_data_parallel_pipelines():
    """A micro-batch has rows of both parts of the batch: 0, 1, 8 and 9 are the first."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    place = mesh["dp"].get_local_rank()
    model, x = pipelines.make_mlp(), models.random(16, 8, dtype=torch.float32)
    whole, others = models.random(16, 8, seed=3), models.random(5, 8, seed=4)
    schedule = pipelines.make_schedule(ScheduleGPipe, model, group=mesh["pp"].get_group())
    sizes = {"pipeline_parallel_size": 2, "data_parallel_size": 2}
    edits = [
        editing.zero(rows=[1, 6, 9, -1], units=[0, 5]),
        editing.patch(whole, rows=slice(3, 13)),
        editing.steer(whole, rows=torch.arange(16) % 3 == 0),
        editing.noise(0.5, seed=1),
        editing.resample(others, seed=2, units=slice(2, 7)),
    ]
    alone, sharded = {}, {}
    lens = editing.logit_lens("head.weight", kind="none")
    with (
        torch.no_grad(),
        FlexModel(model, alone, process_group=pipelines.alone_group()) as one,
        FlexModel(schedule, sharded, **sizes) as flex,
    ):
        one.register_forward_hook(HookFunction("head"))
        flex.register_forward_hook(HookFunction("head"))
        for edit in edits:
            edit = edit | lens
            with one.register_forward_hook(edit.at("layers.5")):
                one(x)
            with flex.register_forward_hook(edit.at("layers.5")):
                flex(x.chunk(2)[place])
            expected, found = lens.take(one), lens.take(flex)
            if dist.get_rank() == 0:
                assert_close(sharded["head"], alone["head"], msg=repr(edit))
                assert_close(found, expected, msg=repr(edit))
            else:
                assert found == {}

"""Hooks on models of images or sound and text, on one process and in a pipeline, each against
torch's hooks on the unsharded model.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.testing import assert_close

from cells import Cell, torch_hook
from flex_model import FlexModel, HookFunction
from flex_model.pipelining import ScheduleGPipe, SplitPoint, pipeline
from frameworks import randomise
from modalities import FAMILIES, mix, without_cache
from shared_edits import mixing, mixing_features

transformers = pytest.importorskip("transformers")
KINDS = ("forward", "forward_pre", "full_backward_pre", "full_backward")


def loss_of(logits):
    return logits.double().sin().mean()


def mixed(module, full, save_ctx, modules):
    return mix(module, mixing_features(module, full, save_ctx, modules), save_ctx, modules)


def sites_of(family):
    is_whisper = family.layer_class.startswith("Whisper")
    inner = ("fc1", "encoder_attn.out_proj") if is_whisper else ("mlp.act_fn", "self_attn.o_proj")
    within = [f"{family.layers}.0.{name}" for name in inner]
    return [f"{family.tower}.0", f"{family.layers}.1", *within]


def reference(model, cell, batch):
    """The output, records and gradients under torch's own hook."""
    model.zero_grad()
    records = []
    with torch_hook(model, cell, {}, records):
        logits = model(**batch).logits
        loss_of(logits).backward()
    return logits.detach(), records, {n: p.grad for n, p in model.named_parameters()}


def hooked(model, cell, batch, names):
    model.zero_grad()
    with FlexModel(model, found := {}) as flex:
        function = HookFunction(cell.site, editing_function=cell.edit)
        getattr(flex, f"register_{cell.kind}_hook")(function)
        logits = flex(**batch).logits
        loss_of(logits).backward()
        gradients = {name: flex.get_module_gradient(name) for name in names}
    return logits.detach(), found.get(cell.site, []), gradients


def check(found, expected, exact, is_first=True):
    # Norms of these models compute in float32, and sums over ranks are reordered.
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-8}
    assert_close(found[0], expected[0], **tolerance)
    assert_close(found[1], expected[1] if is_first else [], **tolerance)
    for name, gradient in expected[2].items():
        if gradient is None:
            assert found[2][name] is None, name
        else:
            assert_close(found[2][name], gradient, **tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", ["llava", "whisper"])  # all are rows of the table
def test_hooks_on_one_process(name):
    family = FAMILIES[name]
    model, batch = family.make(torch.float64), without_cache(family.batch(3, 12, 1, torch.float64))
    for kind in KINDS:
        for site in sites_of(family):
            # Copies that never ran: transformers collects hidden states by hooks of its own, which
            # come after those that are there in the first forward.
            cell, twins = Cell(kind, site, mixed), [copy.deepcopy(model) for _ in range(2)]
            expected = reference(twins[0], cell, batch)
            check(hooked(twins[1], cell, batch, expected[2]), expected, exact=True)


def cross_entropy(output, target):
    logits = output[0] if isinstance(output, tuple) else output
    return loss_of(logits)


NUM_MICROBATCHES = 2


def stepped(model, family, batch, spec=None):
    """One step of a schedule over a stage for each layer of the text, with an edit of both: its
    output, the records, and the gradients but for those of weights that several stages have, which
    are not summed, as with torch's stages. The dim of the rows is stated: the models compare the
    numbers of places and features of a micro-batch's images, so nothing is proven after that.
    """
    example = {name: value[: len(value) // 2] for name, value in batch.items()}
    pipe = pipeline(model, (), example, split_spec={f"{family.layers}.1": SplitPoint.BEGINNING})
    stage = pipe.build_stage(dist.get_rank(), torch.device("cpu"))
    schedule = ScheduleGPipe(stage, NUM_MICROBATCHES, loss_fn=cross_entropy, kwargs_chunk_spec=spec)
    with FlexModel(schedule, found := {}, return_on="all", microbatch_dim=0) as flex:
        for layer in (0, 1):
            flex.register_forward_hook(
                HookFunction(f"{family.layers}.{layer}", editing_function=mixing)
            )
        output = flex(target=torch.zeros(4), losses=[], **batch)
        twice = {name for one in pipe.replicated_params for name in one.values()}
        gradients = {
            name: flex.get_module_gradient(name)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and name not in twice
        }
    return output[0] if isinstance(output, tuple) else output, found, gradients


@pytest.mark.grid
@pytest.mark.ranks(2, timeout=240)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_pipeline_split_in_the_layers_of_the_text(name):
    family, dtype = FAMILIES[name], torch.float64
    model = randomise(family.make(dtype))
    batch = family.batch(4, 12, 1, dtype)
    sites = [f"{family.layers}.0", f"{family.layers}.1"]  # towers are in both stages
    records, handles = {site: [] for site in sites}, []
    for site in sites:

        def hook(module, args, output, kept=records[site]):
            kept.append(output.detach().clone())
            return torch.cat(
                [mixing(None, part, None, {}) for part in output.chunk(NUM_MICROBATCHES)]
            )

        handles.append(model.get_submodule(site).register_forward_hook(hook))
    expected = model(**without_cache(batch)).logits
    loss_of(expected).backward()
    for handle in handles:
        handle.remove()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()

    spec = None
    if name.startswith("qwen"):  # a row of its pixels is a patch
        with pytest.raises(
            ValueError, match=r"of 'pixel_values' \(64 rows\); make .*kwargs_chunk_spec="
        ):
            stepped(model, family, batch)
        spec = dict.fromkeys(batch, TensorChunkSpec(0))
    output, found, edited = stepped(model, family, batch, spec)
    seen = records if dist.get_rank() == 0 else {}
    found = {site: found.get(site, []) for site in seen}
    check(
        (output, found, edited), (expected.detach(), seen, {n: gradients[n] for n in edited}), False
    )


@pytest.mark.grid
@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
@pytest.mark.parametrize("rows_of_example", [4, 2])
def test_a_whole_batch_in_stages_made_of_an_example(name, rows_of_example):
    """With as many rows and patches as the example, or others."""
    family, dtype = FAMILIES[name], torch.float64
    batch, site = family.batch(4, 12, 1, dtype), f"{family.layers}.0"
    cell = Cell("forward", site, mixing)
    logits, records, gradients = reference(
        randomise(family.make(dtype)), cell, without_cache(batch)
    )
    model, weight = randomise(family.make(dtype)), f"{site}.mlp.up_proj.weight"
    example = family.batch(rows_of_example, 12, 1, dtype)
    spec = {f"{family.layers}.1": SplitPoint.BEGINNING}
    stage = pipeline(model, (), example, split_spec=spec).build_stage(
        dist.get_rank(), torch.device("cpu")
    )
    chunks = dict.fromkeys(batch, TensorChunkSpec(0))
    schedule = ScheduleGPipe(stage, 2, loss_fn=cross_entropy, kwargs_chunk_spec=chunks)
    with FlexModel(schedule, found := {}, return_on="all", batch_mode="full") as flex:
        flex.register_forward_hook(HookFunction(site, editing_function=mixing))
        output = flex(target=torch.zeros(4), losses=[], **batch)
        output = output[0] if isinstance(output, tuple) else output
        gradient = flex.get_module_gradient(weight)
    found = output, found.get(site, []), {weight: gradient}
    check(found, (logits, records, {weight: gradients[weight]}), False, dist.get_rank() == 0)


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "idefics3", "gemma3", "mistral3"])
def test_a_tower_is_not_split(name):
    family = FAMILIES[name]
    model, example = family.make(), family.batch(2, 12, 1)
    spec = {f"{family.tower}.1": SplitPoint.BEGINNING}
    with pytest.raises(ValueError, match=f"cannot split {type(model).__name__} with method"):
        pipeline(model, (), example, split_spec=spec)

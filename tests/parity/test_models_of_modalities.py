"""Hooks on models of images or sound and text in a pipeline, against torch's hooks on the unsharded
model. On one process and sharded they are rows of the table.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.testing import assert_close

from flex_model import FlexModel, HookFunction
from flex_model.pipelining import ScheduleGPipe, SplitPoint, pipeline
from frameworks import randomise
from modalities import FAMILIES, without_cache
from shared_edits import mixing

transformers = pytest.importorskip("transformers")


def loss_of(logits):
    return logits.double().sin().mean()


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
    # Norms of these models compute in float32, and sums over ranks are reordered.
    tolerance = {"rtol": 1e-5, "atol": 1e-8}
    assert_close(output, expected.detach(), **tolerance)
    if dist.get_rank() == 0:
        assert_close({site: found[site] for site in sites}, records, **tolerance)
    for name, gradient in edited.items():
        assert_close(gradient, gradients[name], **tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "idefics3", "gemma3", "mistral3"])
def test_a_tower_is_not_split(name):
    family = FAMILIES[name]
    model, example = family.make(), family.batch(2, 12, 1)
    spec = {f"{family.tower}.1": SplitPoint.BEGINNING}
    with pytest.raises(ValueError, match=f"cannot split {type(model).__name__} with method"):
        pipeline(model, (), example, split_spec=spec)

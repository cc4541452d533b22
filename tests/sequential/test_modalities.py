"""Models of images or sound and text, sequentially: equal to plain forwards, bit for bit."""

import copy

import pytest
import torch
from test_engine import assert_equal, torch_hooks
from test_traced import called, run_by_hand

from flex_model import FlexModel, HookFunction, TraceError, sequential
from flex_model.sequential import trace_subgraphs
from modalities import FAMILIES, mix, without_cache
from tiers import grid_but

pytest.importorskip("transformers")


#: Their code behind the tower goes through the images one by one, in Python.
COUNT_IMAGES = {"llava", "pixtral", "idefics3", "mistral3"}


def attributes_of(model):
    """Names and kinds: what a model keeps of its last input is a tensor, never a proxy."""
    return [{name: type(value) for name, value in vars(m).items()} for m in model.modules()]


def targets_of(family, which):
    names = {"layers": [family.layer_class], "tower": [family.tower_class]}
    return names.get(which) or [family.layer_class, family.tower_class]


CASES = [
    (name, which)
    for name in FAMILIES
    for which in (["layers"] if name in COUNT_IMAGES else ["layers", "tower", "both"])
]


@pytest.mark.parametrize(
    ("name", "which"),
    [
        one
        if one[0] in COUNT_IMAGES or one[1] == "both"
        else pytest.param(*one, marks=pytest.mark.grid)
        for one in CASES
    ],
)
def test_subgraphs_equal_the_model(name, which):
    family = FAMILIES[name]
    model, batches = family.make(), family.batches()
    names = targets_of(family, which)
    targets = sequential.match_modules(model, names)
    with torch.no_grad():
        expected = [model(**without_cache(batch)) for batch in batches]
    attributes, hooks = attributes_of(model), torch_hooks(model)
    for each in (1, 3):
        subgraphs = trace_subgraphs(model, batches[0], names, [], targets_per_subgraph=each)
        counts = [sum(m in targets for m in called(model, one)) for one in subgraphs]
        groups = [each] * (len(targets) // each) + [len(targets) % each] * (len(targets) % each > 0)
        assert counts == [*groups, 0]
        assert attributes_of(model) == attributes
        with torch.no_grad():
            for batch, output in zip(batches, expected):
                assert_equal(run_by_hand(model, subgraphs, batch), output)
    assert torch_hooks(model) == hooks  # transformers' own, which collect hidden states


@pytest.mark.parametrize("name", sorted(COUNT_IMAGES))
def test_code_that_counts_images_does_not_trace(name):
    family = FAMILIES[name]
    names = targets_of(family, "tower")
    with pytest.raises(TraceError, match=r"where the subgraphs were traced.*sequential\.run"):
        trace_subgraphs(family.make(), family.batches()[0], names)


@pytest.mark.parametrize("name", grid_but(FAMILIES, "llava"))
def test_methods_to_ignore(name):
    """Names that newer callers pass; those that a model does not have are no error."""
    family = FAMILIES[name]
    model, batches = family.make(), family.batches()
    ignore = ["get_image_features", "get_rope_index", "create_causal_mask", "_prepare_masks"]
    subgraphs = trace_subgraphs(model, batches[0], [family.layer_class], ignore)
    with torch.no_grad():
        for batch in batches:
            output = run_by_hand(model, subgraphs, batch)
            assert_equal(output, model(**without_cache(batch)))


@pytest.mark.parametrize("weights", ["own", "loaded"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_run_equals_plain_forwards(name, weights):
    """With hooks in the tower and in a layer: the records and the outputs, also of edits."""
    family = FAMILIES[name]
    model, batches = family.make(), [without_cache(one) for one in family.batches()]
    sites = [f"{family.tower}.0", f"{family.layers}.1"]
    reference, expected_records = copy.deepcopy(model), {site: [] for site in sites}
    for site in sites:
        records = expected_records[site]

        def hook(module, args, output, records=records):
            records.append(output.detach().clone())
            return mix(module, output, None, None)

        reference.get_submodule(site).register_forward_hook(hook)
    with torch.no_grad():
        expected = [reference(**batch) for batch in batches]
    state = model.state_dict()
    run_model = model if weights == "own" else copy.deepcopy(model).to("meta")
    with FlexModel(run_model, found := {}) as flex, torch.no_grad():
        for site in sites:
            flex.register_forward_hook(HookFunction(site, editing_function=mix))
        loaded = {} if weights == "own" else {"weights": state, "device": "cpu"}
        outputs = sequential.run(flex, batches, window=3, **loaded)
    for output, other in zip(outputs, expected, strict=True):
        assert_equal(output, other)
    assert_equal(found, expected_records)
    assert len(torch_hooks(run_model)) == len(torch_hooks(reference)) - len(sites)

"""Models of images or sound and text, sequentially: equal to plain forwards, bit for bit."""

import pytest
import torch
from test_engine import assert_equal
from traced_models import called, run_by_hand

from flex_model import TraceError, sequential
from flex_model.sequential import trace_subgraphs
from modalities import FAMILIES, without_cache
from models import torch_hooks

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

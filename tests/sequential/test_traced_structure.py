"""What traced code got from Python for the sample is checked when subgraphs run: another class,
dtype, truth, length or None is an error.
"""

from types import SimpleNamespace

import pytest
import torch
from test_engine import assert_equal
from torch import nn
from traced_models import Model, model_of, run_by_hand

import models
from flex_model import TraceError, sequential
from flex_model.sequential import trace_subgraphs

X = models.random(2, 6, dtype=torch.float32)
MANY = models.random(12, 6, seed=1, dtype=torch.float32)
LARGE = X.abs() + 10


def is_large(x):
    return bool(x.sum() > 50)


class Helper(nn.Module):
    def forward(self, x):
        return None if is_large(x) else x * 0.5


def mask_of(x):
    return None if is_large(x) else x * 0.5


def pair_of(x):
    return (x, None) if is_large(x) else (x, x)


def some_of(x):
    return x if is_large(x) else (x, x)


def object_of(x):
    return SimpleNamespace(mask=mask_of(x), mode="large" if is_large(x) else "small", scale=2.0)


def list_of(x):
    return [x] * (3 if is_large(x) else 2)


def dict_of(x):
    return {"large": x} if is_large(x) else {"x": x}


def function_is_none(self, x):
    y = self.blocks[0](x)
    return self.blocks[1](y * (2 if mask_of(x) is None else 3))


def attribute_is_none(self, x):
    found = object_of(x)
    return self.around(x) if found.mask is None else self.around(x, 2)


def kind(self, x):
    some = some_of(x)
    return self.around(some[0] if isinstance(some, tuple) else some)


def items(self, x):
    return self.around(x, 3) if "large" in dict_of(x) else self.around(x)


def loop(self, x):
    for one in list_of(x):
        x = x + one
    return self.around(x)


def in_a_lambda(self, x):
    """In code that the forward does not name."""
    choose = OTHERS.choose
    return choose(self, x)


def passed_on(self, x):
    """To a function that the traced code does not name, and which leads to no target."""
    return self.around(OTHERS.masked(x, mask_of(x)))


def masked(x, mask):
    return x * 5 if mask is None else x


OTHERS = SimpleNamespace(
    choose=lambda self, x: self.around(x, 3) if self.helper(x) is None else self.around(x),
    masked=masked,
)
OF_HELPERS = [function_is_none, attribute_is_none, kind, items, loop, in_a_lambda, passed_on]


@pytest.mark.parametrize("name", ["small", "large"])
@pytest.mark.parametrize("forward", OF_HELPERS)
def test_what_a_helper_returns_otherwise(forward, name):
    model, samples = model_of(forward), {"small": X, "large": LARGE}
    model.helper = Helper()
    outputs = sequential.run(model, [X, LARGE])
    assert all(assert_equal(o, model(b)) is None for o, b in zip(outputs, [X, LARGE]))
    subgraphs = trace_subgraphs(model, {"x": samples[name]}, ["Linear"])
    same, others = [X, MANY / 100], [LARGE, MANY.abs() + 10]
    same, others = (same, others) if name == "small" else (others, same)
    for x in same:
        assert_equal(run_by_hand(model, subgraphs, {"x": x}), model(x))
    for x in others:
        with pytest.raises(TraceError, match=r"where the subgraphs were traced.*sequential\.run"):
            run_by_hand(model, subgraphs, {"x": x})


@pytest.mark.parametrize(
    ("forward", "other"),
    [
        (lambda self, x: self.around(x, 3 if x.shape[0] > 10 else 2), MANY),
        (lambda self, x: self.around(x.float(), 3 if x.dtype == torch.float64 else 2), X.double()),
        (lambda self, x: self.around(x, 3 if x.requires_grad else 2), X.clone().requires_grad_()),
    ],
)
def test_properties_of_a_tensor(forward, other):
    model = model_of(forward)
    subgraphs = trace_subgraphs(model, {"x": X}, ["Linear"])
    assert_equal(run_by_hand(model, subgraphs, {"x": MANY[:5]}), model(MANY[:5]))
    with pytest.raises(TraceError, match=r"where the subgraphs were traced: the code around.*run"):
        run_by_hand(model, subgraphs, {"x": other})


class IsNotEmpty(Model):
    """Its mask is None where nothing is padded, as that of transformers, and only passed on."""

    def forward(self, x, mask):
        return self.blocks[1](self.blocks[0](x) + combined(x, mask_or_none(mask)))


class AsksForMask(IsNotEmpty):
    def forward(self, x, mask):
        found = mask_or_none(mask)
        return self.around(x, 2 if found is None else 3)


def mask_or_none(mask):
    return None if mask.all() else mask


def combined(x, mask):
    return x if mask is None else x * mask.sum()


@pytest.mark.parametrize("is_whole", [True, False])
def test_what_is_none_for_some_inputs_is_verified_with_both(is_whole):
    whole = torch.ones(2, 6, dtype=torch.long)
    padded = whole.clone()
    padded[1, :2] = 0
    sample = {"x": X, "mask": whole if is_whole else padded}
    model = IsNotEmpty()
    subgraphs = trace_subgraphs(model, sample, ["Linear"])
    for mask in (whole, padded):
        found = run_by_hand(model, subgraphs, {"x": X, "mask": mask})
        assert_equal(found, model(X, mask))
    with pytest.raises(TraceError, match="differs from the model's"):
        trace_subgraphs(AsksForMask(), sample, ["Linear"])


@pytest.mark.parametrize(
    ("forward", "pairs"),
    [
        (lambda self, x, y: self.around(x, 3 if y else 2), [(True, False)]),
        (lambda self, x, y: self.around(x, 3 if y is True else 2), [(True, False), (False, True)]),
        (lambda self, x, y: self.around(x, 3 if y > 4 else 2), [(3, 5)]),
        (
            lambda self, x, y: self.around(x, 3 if "a" in y or y.get("b") is not None else 2),
            [({"a": X}, {"c": X}), ({"c": X}, {"b": X})],
        ),
    ],
)
def test_arguments_that_are_no_tensors(forward, pairs):
    model = model_of(forward)
    for first, other in pairs:
        subgraphs = trace_subgraphs(model, {"x": X, "y": first}, ["Linear"])
        assert_equal(run_by_hand(model, subgraphs, {"x": MANY, "y": first}), model(MANY, first))
        with pytest.raises(TraceError, match=r"with this input, .*, and it was"):
            run_by_hand(model, subgraphs, {"x": X, "y": other})

"""What subgraphs depend on besides their inputs: it is followed, or an error."""

import contextlib
import copy

import pytest
import torch
from test_engine import Stack, assert_equal
from torch import nn
from traced_models import Model, model_of, run_by_hand

import models
from flex_model import TraceError, sequential
from flex_model.sequential import trace_subgraphs

X, OTHER = (models.random(4, 6, seed=seed, dtype=torch.float32) for seed in (0, 1))


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("factor", 5.0, "model.factor is 5.0, and it was 2.0"),
        ("factor", None, "model.factor is None, and it was 2.0"),
        ("training", True, "model.training is True, and it was False"),
    ],
)
def test_a_flag_or_number_of_a_traced_module_has_changed(name, value, match):
    read = {
        "factor": lambda self, x: self.around(x, self.factor),
        "training": lambda self, x: self.around(nn.functional.dropout(x, 0.9, self.training)),
    }
    model = model_of(read[name]).eval()
    subgraphs = trace_subgraphs(model, {"x": X}, ["Linear"])
    assert_equal(run_by_hand(model, subgraphs, {"x": OTHER}), model(OTHER))
    before = getattr(model, name)
    setattr(model, name, value)
    with pytest.raises(TraceError, match=rf"{match}.*call trace_subgraphs again.*run"):
        run_by_hand(model, subgraphs, {"x": OTHER})
    setattr(model, name, before)
    assert_equal(run_by_hand(model, subgraphs, {"x": OTHER}), model(OTHER))


def test_whether_gradients_are_on():
    model = model_of(lambda self, x: self.around(x, 3 if torch.is_grad_enabled() else 2))
    subgraphs = trace_subgraphs(model, {"x": X}, ["Linear"])
    with torch.no_grad():
        assert_equal(run_by_hand(model, subgraphs, {"x": OTHER}), model(OTHER))
    with pytest.raises(TraceError, match=r"'is_grad_enabled' is True, and it was False"):
        run_by_hand(model, subgraphs, {"x": OTHER})


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: self.around(x + self.shift * 2),
        lambda self, x: self.around(x + self.scale * 2),
        lambda self, x: self.around(x + torch.stack([self.shift])),
    ],
)
def test_weights_are_those_of_the_run(forward):
    """What follows from buffers and parameters alone is no constant, and has gradients."""
    model = model_of(forward)
    subgraphs = trace_subgraphs(model, {"x": X}, ["Linear"])
    with torch.no_grad():
        model.scale.add_(1)
    model.shift = torch.ones(6)
    output = run_by_hand(model, subgraphs, {"x": OTHER})
    assert_equal(output, model(OTHER))
    output.sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    model(OTHER).sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def counter(self, x):
    self.calls += 1
    return self.around(x, 2 if self.calls > 100 else 1)


def keeps_an_average(self, x):
    self.table = self.table * 0.9 + x.mean() * 0.0
    return self.around(x)


@pytest.mark.parametrize("forward", [counter, keeps_an_average])
def test_what_the_traced_code_changes_itself(forward):
    with pytest.raises(TraceError, match=r"the code around the targets changes model\.\w+, which"):
        trace_subgraphs(model_of(forward), {"x": X}, ["Linear"])


class Buffers(Model):
    """The forward changes a buffer in place; so does a module."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        self.shift.mul_(0.5).add_(x.detach().mean(0))
        return self.around(self.norm(x) + self.shift)


def test_buffers_that_a_forward_changes():
    model = Buffers()
    model.norm.momentum = 0.0  # else no two forwards are equal
    before = copy.deepcopy(model.state_dict())
    with contextlib.suppress(TraceError):
        trace_subgraphs(model, {"x": X}, ["Linear"])
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def autocast(self, x):
    with torch.autocast("cpu", enabled=False):
        return self.around(x.float())


def no_grad(self, x):
    x = self.blocks[0](x)
    with torch.no_grad():
        scale = x.mean() + self.scale
    return self.blocks[1](x * scale)


@pytest.mark.parametrize("forward", [autocast, no_grad])
def test_contexts_around_targets(forward):
    with pytest.raises(TraceError, match=f"changes a mode of torch \\({forward.__name__}\\)"):
        trace_subgraphs(model_of(forward), {"x": X}, ["Linear"])


def branch(self, x):
    if x.sum() > 0:
        x = x + 1
    return self.around(x)


def rows(self, x):
    return self.around(torch.stack([row for row in x if row.sum() > 0]))


def calls_a_target(self, x):
    if x.sum() > 0:
        x = self.blocks[0](x)
    return self.blocks[1](x)


@pytest.mark.parametrize("forward", [branch, rows, calls_a_target])
def test_code_around_targets_that_reads_values(forward):
    """Subgraphs are for inputs with the sample's answers."""
    model, sample = model_of(forward), X.abs() + 2
    other = torch.cat([-sample[:1], sample[1:]]) if forward is rows else -sample
    outputs = sequential.run(model, [sample, other])
    assert all(assert_equal(o, model(b)) is None for o, b in zip(outputs, [sample, other]))
    message = r"with this input, '\w+' is .*, and it was .*sequential\.run"
    if forward is rows:  # it is verified with another number of rows
        with pytest.raises(TraceError, match=message):
            trace_subgraphs(model, {"x": sample}, ["Linear"])
        return
    subgraphs = trace_subgraphs(model, {"x": sample}, ["Linear"])
    assert_equal(run_by_hand(model, subgraphs, {"x": sample * 2}), model(sample * 2))
    with pytest.raises(TraceError, match=message):
        run_by_hand(model, subgraphs, {"x": other})


class Method(Model):
    """Methods that lead to no target read values in each run."""

    def forward(self, x):
        return self.around(self.scaled(x))

    def scaled(self, x):
        self.last = x
        return x * 2 if float(x.detach().sum()) > 0 else x * 3


def test_methods_that_read_values():
    model = Method()
    subgraphs = trace_subgraphs(model, {"x": X}, ["Linear"])
    for x in (X, OTHER, X.abs(), -X.abs()):
        assert_equal(run_by_hand(model, subgraphs, {"x": x}), model(x))


def checked(x):
    if x.shape[0] != 4 or float(x[0, 0]) != float(X[0, 0]):
        raise ValueError("another input")
    return x


def test_a_model_that_takes_one_input_is_not_checked():
    with pytest.raises(TraceError, match="runs on no other input that was made from the sample"):
        trace_subgraphs(model_of(lambda self, x: self.around(checked(x))), {"x": X}, ["Linear"])


def test_targets_per_subgraph():
    model = Stack(5)
    for each, number in ((1, 6), (2, 4), (5, 2), (9, 2)):
        subgraphs = trace_subgraphs(model, {"x": X}, ["Linear"], targets_per_subgraph=each)
        assert len(subgraphs) == number
        assert_equal(run_by_hand(model, subgraphs, {"x": OTHER}), model(OTHER))
    with pytest.raises(ValueError, match="targets_per_subgraph must be at least 1, got 0"):
        trace_subgraphs(model, {"x": X}, ["Linear"], targets_per_subgraph=0)

"""What subgraphs depend on besides their inputs: it is followed, or an error."""

import contextlib
import copy
from types import SimpleNamespace

import pytest
import torch
from test_engine import Stack, assert_equal
from test_traced import run_by_hand
from torch import nn

import models
from flex_model import TraceError, sequential
from flex_model.sequential import trace_subgraphs

X, OTHER = (models.random(4, 6, seed=seed, dtype=torch.float32) for seed in (0, 1))


class Model(nn.Module):
    kind = "mean"

    def __init__(self):
        super().__init__()
        self.blocks = models.seeded(lambda: nn.ModuleList(nn.Linear(6, 6) for _ in range(2)))
        self.register_buffer("shift", torch.arange(6.0))
        self.weight = nn.Parameter(torch.ones(6))
        self.factor, self.calls = 2.0, 0
        self.table = torch.ones(6)
        self.config = SimpleNamespace(scales=[1.0, 2.0], inner=SimpleNamespace(is_large=False))

    def around(self, x, scale=1.0):
        return self.blocks[1](self.blocks[0](x) * scale)

    def read(self):
        return self.factor * 3

    @property
    def doubled(self):
        return self.factor * 2


def model_of(code, *, name="forward"):
    """A model of which ``code`` is the value of the forward."""
    return type("Made", (Model,), {name: eval(f"lambda self, x: {code}", globals())})()


@pytest.mark.parametrize(
    ("code", "name", "value", "match"),
    [
        ("self.around(x, self.factor)", "factor", 5.0, "model.factor is 5.0, and it was 2.0"),
        ("self.around(x, self.factor)", "factor", None, "model.factor is None, and it was 2.0"),
        (
            "self.around(nn.functional.dropout(x, 0.9, self.training))",
            "training",
            True,
            "model.training is True, and it was False",
        ),
    ],
)
def test_a_flag_or_number_of_a_traced_module_has_changed(code, name, value, match):
    model = model_of(code).eval()
    subgraphs = trace_subgraphs(model, {"x": X}, ["Linear"])
    assert_equal(run_by_hand(model, subgraphs, {"x": OTHER}), model(OTHER))
    before = getattr(model, name)
    setattr(model, name, value)
    with pytest.raises(TraceError, match=rf"{match}.*call trace_subgraphs again.*run"):
        run_by_hand(model, subgraphs, {"x": OTHER})
    setattr(model, name, before)
    assert_equal(run_by_hand(model, subgraphs, {"x": OTHER}), model(OTHER))


def test_whether_gradients_are_on():
    model = model_of("self.around(x, 3 if torch.is_grad_enabled() else 2)")
    subgraphs = trace_subgraphs(model, {"x": X}, ["Linear"])
    with torch.no_grad():
        assert_equal(run_by_hand(model, subgraphs, {"x": OTHER}), model(OTHER))
    with pytest.raises(TraceError, match=r"'is_grad_enabled' is True, and it was False"):
        run_by_hand(model, subgraphs, {"x": OTHER})


@pytest.mark.parametrize("code", ["self.shift * 2", "self.weight * 2", "torch.stack([self.shift])"])
def test_weights_are_those_of_the_run(code):
    """What follows from buffers and parameters alone is no constant, and has gradients."""
    model = model_of(f"self.around(x + {code})")
    subgraphs = trace_subgraphs(model, {"x": X}, ["Linear"])
    with torch.no_grad():
        model.weight.add_(1)
    model.shift = torch.ones(6)
    output = run_by_hand(model, subgraphs, {"x": OTHER})
    assert_equal(output, model(OTHER))
    if "weight" in code:
        output.sum().backward()
        found, model.weight.grad = model.weight.grad, None
        model(OTHER).sum().backward()
        assert_equal(found, model.weight.grad)


class Counter(Model):
    def forward(self, x):
        self.calls += 1
        return self.around(x, 2 if self.calls > 100 else 1)


class KeepsAnAverage(Model):
    def forward(self, x):
        self.table = self.table * 0.9 + x.mean() * 0.0
        return self.around(x)


@pytest.mark.parametrize("kind", [Counter, KeepsAnAverage])
def test_what_the_traced_code_changes_itself(kind):
    with pytest.raises(TraceError, match=r"the code around the targets changes model\.\w+, which"):
        trace_subgraphs(kind(), {"x": X}, ["Linear"])


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


class Autocast(Model):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.around(x.float())


class NoGrad(Model):
    def forward(self, x):
        x = self.blocks[0](x)
        with torch.no_grad():
            scale = x.mean() + self.weight
        return self.blocks[1](x * scale)


@pytest.mark.parametrize(("kind", "mode"), [(Autocast, "autocast"), (NoGrad, "no_grad")])
def test_contexts_around_targets(kind, mode):
    with pytest.raises(TraceError, match=f"changes a mode of torch \\({mode}\\)"):
        trace_subgraphs(kind(), {"x": X}, ["Linear"])


class Branch(Model):
    def forward(self, x):
        if x.sum() > 0:
            x = x + 1
        return self.around(x)


class Rows(Model):
    def forward(self, x):
        return self.around(torch.stack([row for row in x if row.sum() > 0]))


class CallsATarget(Model):
    def forward(self, x):
        if x.sum() > 0:
            x = self.blocks[0](x)
        return self.blocks[1](x)


def is_large(x):
    return bool(x.sum() > 1e9)


@pytest.mark.parametrize("kind", [Branch, Rows, CallsATarget])
def test_code_around_targets_that_reads_values(kind):
    """Subgraphs are for inputs with the sample's answers."""
    model, sample = kind(), X.abs() + 2
    other = torch.cat([-sample[:1], sample[1:]]) if kind is Rows else -sample
    outputs = sequential.run(model, [sample, other])
    assert all(assert_equal(o, model(b)) is None for o, b in zip(outputs, [sample, other]))
    message = r"with this input, '\w+' is .*, and it was .*sequential\.run"
    if kind is Rows:  # it is verified with another number of rows
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


class OneShape(Model):
    def forward(self, x):
        return self.around(checked(x))


def checked(x):
    if x.shape[0] != 4 or float(x[0, 0]) != float(X[0, 0]):
        raise ValueError("another input")
    return x


def test_a_model_that_takes_one_input_is_not_checked():
    with pytest.raises(TraceError, match="runs on no other input that was made from the sample"):
        trace_subgraphs(OneShape(), {"x": X}, ["Linear"])


def test_targets_per_subgraph():
    model = Stack(5)
    for each, number in ((1, 6), (2, 4), (5, 2), (9, 2)):
        subgraphs = trace_subgraphs(model, {"x": X}, ["Linear"], targets_per_subgraph=each)
        assert len(subgraphs) == number
        assert_equal(run_by_hand(model, subgraphs, {"x": OTHER}), model(OTHER))
    with pytest.raises(ValueError, match="targets_per_subgraph must be at least 1, got 0"):
        trace_subgraphs(model, {"x": X}, ["Linear"], targets_per_subgraph=0)

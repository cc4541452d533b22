"""Statements around targets that read values: they are nodes of the graph, or a TraceError."""

import functools

import pytest
import torch
from test_engine import Stack, assert_equal
from test_traced import run_by_hand
from torch import nn

import models
from flex_model import TraceError, sequential
from flex_model.sequential import trace_subgraphs

BATCHES = [models.random(rows, 6, seed=rows, dtype=torch.float32) for rows in (2, 4, 1, 3)]
BATCHES[2] = BATCHES[2].abs() + 2
SUM_OF_ONES = 0.0


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = models.seeded(lambda: nn.ModuleList(nn.Linear(6, 6) for _ in range(2)))
        self.last = None

    def scaled(self, x):
        """A method that leads to no target."""
        self.last = x
        return x * 2 if float(x.detach().sum()) > SUM_OF_ONES else x * 3


class Branch(Model):
    def forward(self, x):
        if x.sum() > SUM_OF_ONES:
            x = x + 1
        elif x.min() < -1:
            x, _ = x - 1, None
        return self.blocks[1](self.blocks[0](x))


class Number(Model):
    def forward(self, x):
        scale = max(0.0, x.max().item() - 1)
        shift = scale + 1 if scale > 0 else int(x.argmax()) - 1
        return {
            "x": self.blocks[1](self.blocks[0](x) * scale + shift),
            "scale": torch.tensor(scale),
        }


class Rows(Model):
    """A list that is appended to, a comprehension, and what a loop keeps for its next turn."""

    def forward(self, x):
        rows = []
        total = x.new_zeros(())
        for row in x:
            total = total + row.sum()
            if row.sum() < 0:
                continue
            for value in row:
                if value > 1:
                    rows.append(row * value)
                    break
            else:
                rows.append(row * total)
        rows.append(x[0])
        y = self.blocks[0](torch.stack(rows))
        kept = [row for row in y if (double := row.sum() * 2) > -100]
        return self.blocks[1](torch.stack(kept) + double)


class Method(Model):
    def forward(self, x):
        y = self.blocks[0](self.scaled(x))
        return self.blocks[1](self.scaled(y) if len(self.blocks) else y)


class Returned(Model):
    def before(self, x):
        x = self.blocks[0](x)
        return x if x.sum() > SUM_OF_ONES else -x

    def forward(self, x):
        result = {}
        result["x"] = self.before(x)
        result["y"] = [row for row in x if row.sum() > SUM_OF_ONES][-1:]
        return self.blocks[1](torch.cat([result["x"], *(y[None] for y in result["y"])]))


def passed_on(method):
    @functools.wraps(method)
    def call(self, *args, **kwargs):
        return method(self, *args, **kwargs)

    return call


class Decorated(Model):
    """Two decorators with the code of one, free variables and ``super()``."""

    @passed_on
    def forward(self, x):
        offset = 1

        def add(value):
            return value + offset

        x = self.before(x)
        if x.sum() > SUM_OF_ONES:
            x = add(x)
        super().eval()
        return self.after(x)

    @passed_on
    def before(self, x):
        return x * 2 if x.sum() > SUM_OF_ONES else x

    @passed_on
    def after(self, x):
        x = self.blocks[0](x)
        try:
            x = self.blocks[1](x)
        finally:
            shift = 2 if x.max() > 0 else 1
        return x + shift


@pytest.mark.parametrize("kind", [Branch, Number, Rows, Method, Returned, Decorated])
@pytest.mark.parametrize("sample", BATCHES)
def test_statements_that_read_values_are_nodes(kind, sample):
    model = kind()
    codes = {name: vars(kind)[name] for name in vars(kind)}
    subgraphs = trace_subgraphs(model, {"x": sample}, ["Linear"])
    assert len(subgraphs) == 3
    assert {name: vars(kind)[name] for name in vars(kind)} == codes
    assert "_flex_model_statement" not in globals()
    for batch in BATCHES:
        assert_equal(run_by_hand(model, subgraphs, {"x": batch}), model(batch))


class CallsATarget(Model):
    def forward(self, x):
        if x.sum() > SUM_OF_ONES:
            x = self.blocks[0](x)
        return self.blocks[1](x)


class Leaves(Model):
    def forward(self, x):
        if x.sum() > 1e9:
            return x
        return self.blocks[1](self.blocks[0](x))


class Stops(Model):
    def forward(self, x):
        for block in self.blocks:
            if x.sum() > 1e9:
                break
            x = block(x)
        return x


class ChangesAList(Model):
    def forward(self, x):
        kept = self.made(x)
        if x.sum() > 1e9:
            kept.append(x)
        return self.blocks[1](self.blocks[0](kept[-1]))

    def made(self, x):
        return [x, x + 1]


class AsksThroughAFunction(Model):
    """A function around no target returns a truth."""

    def forward(self, x):
        return self.blocks[1](self.blocks[0](x)) * (2 if is_large(x) else 3)


def is_large(x):
    return bool(x.sum() > 1e9)


@pytest.mark.parametrize("kind", [CallsATarget, Leaves, Stops, AsksThroughAFunction])
def test_statements_that_can_be_no_node(kind):
    model = kind()
    with pytest.raises(TraceError, match="asks in Python for the values of") as caught:
        trace_subgraphs(model, {"x": BATCHES[2]}, ["Linear"])
    assert "sequential.run" in str(caught.value)
    outputs = sequential.run(model, BATCHES)
    assert all(assert_equal(o, model(b)) is None for o, b in zip(outputs, BATCHES))


def test_a_list_that_a_statement_changes():
    """The list of another function: whether it is changed is known when the graph runs."""
    model = ChangesAList()
    subgraphs = trace_subgraphs(model, {"x": BATCHES[0]}, ["Linear"])
    for batch in BATCHES:
        assert_equal(run_by_hand(model, subgraphs, {"x": batch}), model(batch))
    large = BATCHES[0] + 1e9
    assert_equal(run_by_hand(model, subgraphs, {"x": large}), model(large))


class AssignsNothingElse(Model):
    """With values that no graph computes: a statement assigns None, or another variable."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, x):
        mask, mode = x * 0.5, "few"
        if x.sum() > 1e9:
            if self.what == "None":
                mask = None
            elif self.what == "text":
                mode = "many"
            else:
                extra = x
        y = self.blocks[0](x)
        y = y if mask is None else y + mask
        y = y if mode == "few" else y * 2
        if self.what == "unbound" and "extra" in locals():
            y = y + extra
        return self.blocks[1](y)


@pytest.mark.parametrize("what", ["None", "text", "unbound"])
def test_what_a_statement_assigns_otherwise_is_an_error_when_it_runs(what):
    model = AssignsNothingElse(what)
    subgraphs = trace_subgraphs(model, {"x": BATCHES[0]}, ["Linear"])
    for batch in BATCHES:
        assert_equal(run_by_hand(model, subgraphs, {"x": batch}), model(batch))
    with pytest.raises(TraceError, match=r"test_traced_statements\.py:\d+: with this input.*run"):
        run_by_hand(model, subgraphs, {"x": BATCHES[0] + 1e9})


class OneShape(Model):
    def forward(self, x):
        if x.shape[0] != 2 or float(x[0, 0]) != float(BATCHES[0][0, 0]):
            raise ValueError("another input")
        return self.blocks[1](self.blocks[0](x))


def test_a_model_that_takes_one_input_is_not_checked():
    with pytest.raises(TraceError, match="runs on no other input that was made from the sample"):
        trace_subgraphs(OneShape(), {"x": BATCHES[0]}, ["Linear"])


def test_targets_per_subgraph():
    model = Stack(5)
    for each, number in ((1, 6), (2, 4), (5, 2), (9, 2)):
        subgraphs = trace_subgraphs(model, {"x": BATCHES[0]}, ["Linear"], targets_per_subgraph=each)
        assert len(subgraphs) == number
        assert_equal(run_by_hand(model, subgraphs, {"x": BATCHES[1]}), model(BATCHES[1]))
    with pytest.raises(ValueError, match="targets_per_subgraph must be at least 1, got 0"):
        trace_subgraphs(model, {"x": BATCHES[0]}, ["Linear"], targets_per_subgraph=0)

"""Each ready edit beside what it says, written out with torch; and their arguments. `test_editing`
has the shardings.
"""

import re
from argparse import Namespace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import models
from flex_model import FlexModel, editing
from flex_model.runs.step import MicrobatchState, current_microbatch, current_rows

X = models.random(3, 5, 8)  # rows, positions, units
VECTOR = models.random(8, seed=3)
WHOLE = models.random(3, 5, 8, seed=4)


def call(edit, x=X, **modules):
    return edit(None, x.clone(), Namespace(), modules)


def changed(positions=slice(None), rows=slice(None), units=slice(None), to=0.0):
    expected = X.clone()
    expected[rows, positions, units] = to
    return expected


def patching(**settings):
    inputs = models.random(4, 6)
    given = {"clean": inputs, "corrupted": inputs, "sites": ["fc1"], "metric": torch.sum}
    return editing.activation_patching(FlexModel(models.mlp()), **{**given, **settings})


def path(receivers=("fc2",), frozen=("act",)):
    inputs = models.random(4, 6)
    flex = FlexModel(models.mlp())
    return editing.path_patching(flex, inputs, inputs, "fc1", receivers, frozen, torch.sum)


# ---- Where an edit acts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "chosen",
    [3, -2, [3], (-2,), range(3, 4), slice(3, 4), slice(-2, -1), torch.tensor(3), torch.tensor([3])]
    + [[False, False, False, True, False], torch.arange(5) == 3],
    ids=str,
)
def test_one_position_can_be_said_in_many_ways(chosen):
    assert_close(call(editing.zero(positions=chosen)), changed(3), rtol=0, atol=0)


def test_regions():
    index = torch.meshgrid(
        torch.tensor([0, 2]), torch.tensor([1, 4]), torch.tensor([0, 3, 7]), indexing="ij"
    )
    expected = X.clone()
    expected[index] = 0
    found = call(editing.zero(rows=[0, -1], positions=[1, -1], units=[0, 3, 7]))
    assert_close(found, expected, rtol=0, atol=0)
    zero, scale = editing.zero, editing.scale
    assert_close(
        call(zero(positions="last", units=slice(None, None, 3))), changed(4, units=[0, 3, 6])
    )
    assert_close(call(zero(positions="every")), torch.zeros_like(X))
    assert_close(call(zero(heads=[1, -1], num_heads=4)), changed(units=[2, 3, 6, 7]))
    assert_close(call(zero(heads=0, num_heads=2, rows=1)), changed(units=slice(4), rows=1))
    mask = torch.rand(3, 5) > 0.5
    given = mask.clone()
    edit = scale(3.0, positions=given, units=[1, 2])
    given.zero_()
    both = call(edit)
    inside = mask[..., None] & torch.tensor([False, True, True] + [False] * 5)
    assert_close(both, torch.where(inside, 3 * X, X))
    # Elsewhere: (positions, rows, units), and heads with a dim of their own.
    turned = call(
        zero(positions=3, rows=[0, 1], dims={"positions": 0, "rows": 1}), X.transpose(0, 1)
    )
    assert_close(turned.transpose(0, 1), changed(3, rows=[0, 1]))
    patterns = call(zero(heads=[0, 4], dims={"heads": 1, "positions": 2}))
    assert_close(patterns, changed([0, 4]))
    masked = call(zero(positions=mask, dims={"positions": 0, "rows": 1}), X.transpose(0, 1))
    assert_close(masked.transpose(0, 1), X * ~mask[..., None])


@pytest.mark.parametrize("shape", [(15, 8), (3, 2, 5, 4)])
def test_dims_are_not_guessed(shape):
    for edit in (editing.zero(positions=1), editing.mean(over="positions")):
        with pytest.raises(ValueError, match="give the dim with dims="):
            call(edit, X.reshape(shape))
    if len(shape) == 4:
        with pytest.raises(ValueError, match="give the dim with dims="):
            call(editing.zero(heads=1, num_heads=2), X.reshape(shape))
    there = call(editing.zero(positions=1, dims={"positions": 1}), X.reshape(shape))
    assert_close(there.select(1, 1), torch.zeros_like(there.select(1, 1)))


def test_nothing_chosen_is_no_edit():
    full = X.clone()
    for nothing in (slice(9, 12), [], torch.zeros(5, dtype=torch.bool)):
        assert editing.zero(positions=nothing)(None, full, Namespace(), {}) is full
    assert full._version == 0


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: editing.zero(position=3), "unknown arguments"),
        (lambda: editing.zero(heads=3), "heads= needs num_heads="),
        (lambda: editing.zero(heads=1, num_heads=0), "num_heads"),
        (lambda: editing.zero(heads=1, num_heads=2, units=3), "heads= or units="),
        (lambda: editing.zero(positions=1.5), "positions: expected an int, a slice"),
        (lambda: editing.zero(positions="first"), "'every' or 'last'"),
        (lambda: editing.zero(rows="last"), "rows: expected"),
        (lambda: editing.zero(units=[True, 3]), "expected ints or bools"),
        (lambda: editing.zero(units=torch.ones(2, 2)), "units: expected"),
        (lambda: editing.zero(dims={"position": 1}), "dims: expected a mapping of"),
        (lambda: editing.zero(positions=torch.ones(3, 5, dtype=torch.bool), rows=1), "leave out"),
        (lambda: editing.clamp(3, 1), "must not be above max"),
        (lambda: editing.mean(over="units"), "over must be"),
        (lambda: editing.noise(-1), "std"),
        (lambda: editing.scale("x"), "scale: factor must be a number, got 'x'"),
        (lambda: editing.scale(None), "scale: factor must be a number, got None"),
        (lambda: editing.scale(VECTOR), "scale: factor must be a number, got a tensor (8,)"),
        (lambda: editing.clamp("low"), "clamp: min must be a number, got 'low'"),
        (lambda: editing.clamp(max=[1.0]), "clamp: max must be a number, got [1.0]"),
        (lambda: editing.mean("x"), "mean must be a Tensor, a number or None, got 'x'"),
        (lambda: editing.noise("x"), "noise: std must be a number"),
        (lambda: editing.noise(1.0, seed=1.5), "noise: seed must be an int or None, got 1.5"),
        (lambda: editing.resample(seed="a"), "resample: seed must be an int or None, got 'a'"),
        (lambda: editing.resample("other"), "source must be a Tensor, a Capture or None"),
        (lambda: editing.steer(VECTOR, "much"), "steer: strength must be a number, got 'much'"),
        (lambda: editing.steer(3.0), "must be a Tensor or"),
        (lambda: editing.project_out(torch.zeros(8)), "is zero"),
        (lambda: editing.project_out(torch.ones(2, 8)), "depends on the others"),
        (lambda: editing.patch([1.0]), "Tensor or a Capture"),
        (lambda: editing.splice("m", latents=3.0), "splice: latents must be an Edit"),
        (lambda: editing.logit_lens(None), "weights are given by name"),
        (lambda: editing.logit_lens("w", positions=torch.ones(3, 5) > 0), "no rectangular part"),
        (lambda: editing.logit_lens("w", eps="x"), "logit_lens: eps must be a number, got 'x'"),
        (lambda: editing.logit_lens("w", name=3), "logit_lens: name must be a str, got int"),
        (lambda: editing.tuned_lens(None, "w"), "translator must be a str, got NoneType"),
        (lambda: editing.logit_lens("w", kind="batch"), "kind must be"),
        (lambda: editing.logit_lens(VECTOR), "weights are given by name"),
        (lambda: editing.chain(3), "expected editing functions"),
        (lambda: editing.zero(dims=3), "dims: expected a mapping, as {'rows': 1}, got 3"),
        (lambda: editing.Site("a", "middle"), "side must be"),
        (lambda: editing.Site(3), "the name of a module must be a str, got int"),
        (lambda: editing.Site("a", "input", 3), "Site: where must be a mapping, got int"),
        (lambda: patching(sites="fc1"), "must be a list of Sites or names of modules, got 'fc1'"),
        (
            lambda: patching(sites=None),
            "sites must be a list of Sites or names of modules, got None",
        ),
        (lambda: patching(metric="sum"), "metric must be a function of the output, got 'sum'"),
        (lambda: patching(positions="last"), "for one position give ['last']"),
        (lambda: patching(clean=3), "the inputs of a run must be a tensor"),
        (lambda: path(receivers="fc2"), "receivers must be a list of Sites or names of modules"),
        (lambda: path(frozen=3), "frozen must be a list of Sites or names of modules"),
        (lambda: editing.zero().at("a", parameters=["b"]), "are set by the edit"),
    ],
)
def test_wrong_arguments(make, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: editing.zero(positions=5), "5 is out of range, there are 5"),
        (lambda: editing.zero(rows=[0, -4]), "-4 is out of range"),
        (lambda: editing.zero(units=[True] * 3), "the mask has 3 entries for 8 units"),
        (lambda: editing.zero(heads=0, num_heads=3), "into 3 equal heads"),
        (lambda: editing.zero(heads=4, num_heads=4), "heads: 4 is out of range"),
        (lambda: editing.zero(positions=torch.ones(2, 5, dtype=torch.bool)), "3 rows of 5"),
        (lambda: editing.zero(positions=1, units=1, dims={"units": 1}), "are both dim 1"),
        (lambda: editing.zero(positions=1, dims={"positions": 3}), "positions are dim 3"),
        (lambda: editing.steer(torch.ones(2, 5, 8)), "can't be broadcast"),
        (lambda: editing.steer(WHOLE[0], dims={"positions": 0, "rows": 1}), "own for the rows"),
        (lambda: editing.mean(VECTOR, dims={"units": 1}), "own for the units, dim 1"),
        (lambda: editing.steer("nobody"), "no trainable module"),
        (lambda: editing.steer("linear"), "must have one parameter, got 2"),
        (lambda: editing.project_out(torch.ones(7)), "have 7 units"),
        (lambda: editing.patch(WHOLE[:2]), "can't be broadcast"),
        (lambda: editing.patch(WHOLE[0]), "same batch size"),
        (lambda: editing.resample(WHOLE[:, :4]), "number of rows only"),
        (lambda: editing.resample(WHOLE[0]), "number of rows only"),
        (lambda: editing.splice("nobody"), "no trainable module"),
        (lambda: editing.splice("narrow"), "must return a tensor of shape (3, 5, 8)"),
        (lambda: editing.splice("linear", latents=editing.zero()), "encode and decode"),
    ],
)
def test_what_does_not_fit_the_activation(make, message):
    modules = {"linear": nn.Linear(8, 8), "narrow": nn.Linear(8, 2)}
    with pytest.raises(Exception, match=re.escape(message)) as raised:
        call(make(), **modules)
    assert isinstance(raised.value, (IndexError, KeyError, RuntimeError, TypeError, ValueError))


def test_values_that_the_activation_cannot_hold_are_an_error():
    numbers = torch.arange(24).reshape(1, 3, 8)
    for edit in (editing.scale(0.5, units=1), editing.noise(1.0), editing.steer(VECTOR)):
        with pytest.raises(TypeError, match=r"an activation of torch\.int64 can't hold the edit's"):
            call(edit, numbers)
    with pytest.raises(TypeError, match=r"torch\.float64 can't hold the edit's torch\.complex"):
        call(editing.scale(1j, units=1), X.double())
    assert_close(call(editing.scale(2, units=1), numbers)[..., 1], numbers[..., 1] * 2)


# ---- What an edit does ---------------------------------------------------------------------------


def projected(x, *directions):
    q = torch.linalg.qr(torch.stack(directions).T).Q
    return x @ q @ q.T


def test_values():
    def add_one(module, full, save_ctx, modules):
        full += 1  # in place, and returns nothing

    for edit, expected in (
        (editing.zero(units=2), changed(units=2)),
        (editing.scale(-2.0), -2 * X),
        (editing.clamp(0.1), X.clamp(min=0.1)),
        (editing.clamp(5.0, 5.0, units=7), changed(units=7, to=5.0)),
        (editing.mean(VECTOR, positions=2), changed(2, to=VECTOR)),
        (editing.mean(1.5), torch.full_like(X, 1.5)),
        (editing.mean(), X.mean((0, 1)).expand_as(X)),
        (editing.mean(over="rows", units=1), changed(units=1, to=X.mean(0)[:, 1])),
        (editing.mean(over="positions"), X.mean(1, keepdim=True).expand_as(X)),
        (editing.steer(VECTOR, 0.5), X + 0.5 * VECTOR),
        (editing.steer(WHOLE[0], positions=[0, 3]), changed([0, 3], to=(X + WHOLE[0])[:, [0, 3]])),
        (editing.steer(VECTOR, dims={"positions": 0, "rows": 1}), X + VECTOR),
        (editing.steer(WHOLE[:, :1], dims={"positions": 0, "rows": 1}), X + WHOLE[:, :1]),
        (editing.project_out(3 * VECTOR), X - projected(X, VECTOR)),
        (editing.project_onto(WHOLE[0, :2]), projected(X, *WHOLE[0, :2])),
        (editing.patch(WHOLE, rows=1), changed(rows=1, to=WHOLE[1])),
        (editing.patch(WHOLE.float()), WHOLE.float().double()),
        (editing.zero(units=2) | editing.scale(2.0), 2 * changed(units=2)),
        (add_one | editing.scale(2.0) | add_one, 2 * (X + 1) + 1),
        (editing.patch(WHOLE) | editing.zero(units=2), WHOLE * (torch.arange(8) != 2)),
    ):
        source = WHOLE.clone()
        assert_close(call(edit), expected, msg=lambda text, edit=edit: f"{edit}: {text}")
        assert_close(WHOLE, source, rtol=0, atol=0)
    half = call(editing.noise(0.1, seed=0) | editing.steer(VECTOR), X.bfloat16())
    assert half.dtype == torch.bfloat16


def test_random_edits():
    first, again = (call(editing.noise(0.1, seed=3, units=slice(4))) for _ in range(2))
    assert_close(first, again, rtol=0, atol=0)
    assert_close(first[..., 4:], X[..., 4:], rtol=0, atol=0)
    assert 0.05 < (first - X)[..., :4].std() < 0.2
    assert not torch.equal(call(editing.noise(0.1)), call(editing.noise(0.1)))
    many = models.random(50, 2, 8)
    resampled = call(editing.resample(), many)
    origin = [int((many == row).all((1, 2)).nonzero()) for row in resampled]
    assert sorted(origin) == list(range(50)) and all(a != b for a, b in enumerate(origin))
    drawn = call(editing.resample(many[:4], seed=1), many)
    assert {int((many == row).all((1, 2)).nonzero()) for row in drawn} == set(range(4))


def test_gradients():
    x = X.clone().requires_grad_()
    mask = torch.arange(15).reshape(3, 5) % 2 == 0
    linear = nn.Linear(8, 8).double()
    vector = nn.ParameterList([nn.Parameter(VECTOR.clone())])
    for edit in (
        editing.zero(units=[1, 4], positions=[0, 2]),
        editing.scale(3.0, positions=mask),
        editing.clamp(-0.5, 0.5),
        editing.mean(over="positions", units=3),
        editing.project_out(WHOLE[0, :2], positions=slice(1, 3)),
        editing.patch(WHOLE, rows=[0, 2]),
        editing.resample(seed=1),
        editing.splice("linear", positions=[1, 3]) | editing.scale(2.0, rows=0),
        editing.steer("vector", 2.0, positions="last"),
        editing.steer("vector", 2.0, positions=[2, 4, -1], rows=[0, 0]),
    ):
        modules = {"linear": linear, "vector": vector}
        parameters = [*linear.parameters(), *vector.parameters()]

        def run(x, *parameters, edit=edit, modules=modules):
            return call(edit, x, **modules)

        assert torch.autograd.gradcheck(run, (x, *parameters)), edit


def test_a_spliced_autoencoder():
    sae, x = models.seeded(models.Autoencoder, 8, 16), X.clone().requires_grad_()
    made = sae(X.float())
    assert_close(call(editing.splice("sae"), sae=sae), made.double())
    with_error = call(editing.splice("sae", error=True), x, sae=sae)
    assert_close(with_error, X, rtol=1e-4, atol=1e-4)
    (grad,) = torch.autograd.grad(with_error.sum(), x)
    (through,) = torch.autograd.grad(sae(given := X.float().requires_grad_()).sum(), given)
    assert_close(grad, through.double(), rtol=1e-5, atol=1e-5)
    without = call(editing.splice("sae", error=True, latents=editing.zero(units=4)), sae=sae)
    active = sae.encode(X.float())[..., 4, None] * sae.decoder.weight[:, 4]
    assert_close(without, (X - active.double()), rtol=1e-4, atol=1e-4)


def test_a_quantised_module_gets_no_integers():
    class Quantised(nn.Module):
        def __init__(self):
            super().__init__()
            self.codes = nn.Parameter(torch.arange(8, dtype=torch.uint8), requires_grad=False)
            self.scale = nn.Parameter(torch.tensor(0.5).double())

        def forward(self, x):
            return x * self.codes * self.scale

    found = call(editing.splice("adapter"), adapter=Quantised())
    assert_close(found, X * torch.arange(8) / 2)


def test_a_module_gets_the_tokens_of_a_mask_only():
    class Largest(nn.Module):
        def forward(self, x):
            return x * (x > x.flatten().topk(4).values[-1])

    mask = torch.arange(15).reshape(3, 5) % 3 == 0
    expected = X.clone()
    expected[mask] = Largest()(X[mask])
    assert_close(call(editing.splice("largest", positions=mask), largest=Largest()), expected)
    turned = editing.splice("largest", positions=mask, dims={"positions": 0, "rows": 1})
    turned = call(turned, X.transpose(0, 1), largest=Largest())
    assert_close(turned.transpose(0, 1), expected)


def test_how_edits_show_themselves():
    edit = editing.zero(heads=3, num_heads=8) | editing.steer(VECTOR, 2.0, positions=slice(1, None))
    text = "zero(heads=3, num_heads=8) | steer(tensor(8,), 2.0, positions=1:)"
    assert repr(edit) == text
    assert repr(edit.at("a.b")) == f"HookFunction('a.b', editing_function={text})"
    assert (
        repr(editing.mean(torch.tensor(0.5), units=list(range(9))))
        == "mean(units=<9 of them>, mean=0.5)"
    )
    assert repr(editing.chain(editing.capture(), test_values)) == "capture() | test_values"


def test_rows_of_a_micro_batch():
    step = MicrobatchState(rows=[[2, 2], [1, 1]])
    assert current_rows() is None
    with step.at(0, 1):
        assert (current_microbatch(), current_rows()) == (1, ([2, 3, 5], 6))
        of_batch = torch.arange(6.0)[:, None, None].expand(6, 5, 8)
        assert_close(
            call(editing.patch(of_batch, rows=[2, 5]))[:, 0, 0],
            torch.tensor([2, X[1, 0, 0], 5]).double(),
        )
        with pytest.raises(IndexError, match="there are 6"):
            call(editing.zero(rows=6))
        with pytest.raises(ValueError, match="the micro-batch has 3 rows"):
            call(editing.zero(rows=0), X.flatten(0, 1))
        assert_close(call(editing.zero(units=3), X.flatten(0, 1)), changed(units=3).flatten(0, 1))

"""Plots: what was drawn, read back from the axes."""

import sys

import pytest
import torch

from flex_model.visualize import plot_induction_scores, plot_logit_lens, plot_patching

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
pyplot = pytest.importorskip("matplotlib.pyplot")

TOKENS = ["The", " cat", "\n", "costs$5", "an_extraordinary_token"]
SHOWN = ["The", "\u2423cat", "\u21b5", r"costs\$5", "an_extrao\u2026"]


@pytest.fixture(autouse=True)
def closed():
    yield
    pyplot.close("all")


def image_of(ax):
    (image,) = ax.images
    return torch.tensor(image.get_array().tolist(), dtype=torch.float64), image.get_clim()


def labels(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def test_induction_scores():
    scores = torch.rand(3, 4, dtype=torch.bfloat16, requires_grad=True)
    with torch.no_grad():
        scores[1, 2] = 1.0
    ax = plot_induction_scores(scores, title="mine")
    drawn, limits = image_of(ax)
    assert torch.equal(drawn, scores.double()) and limits == (0.0, 1.0)
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title()) == ("head", "layer", "mine")
    assert labels(ax.xaxis) == ["0", "1", "2", "3"] and labels(ax.yaxis) == ["0", "1", "2"]
    (outline,) = ax.patches
    assert outline.get_xy() == (1.5, 0.5)  # around layer 1, head 2
    ax.figure.canvas.draw()


def test_patching_has_token_labels_and_colours_around_zero():
    effects = torch.linspace(-0.5, 2.0, 10).reshape(2, 5)
    ax = plot_patching(effects, TOKENS, layers=["attn", "mlp"], label="logit difference")
    drawn, limits = image_of(ax)
    assert torch.equal(drawn, effects.double()) and limits == (-2.0, 2.0)
    assert labels(ax.xaxis) == SHOWN and labels(ax.yaxis) == ["attn", "mlp"]
    assert ax.get_xlabel() == "token"
    assert ax.figure.axes[1].get_ylabel() == "logit difference"
    ax.figure.canvas.draw()  # "$" begins no formula
    ax = plot_patching(torch.zeros(2, 3))  # without tokens or effects
    assert image_of(ax)[1] == (-1.0, 1.0)
    assert labels(ax.xaxis) == ["0", "1", "2"] and ax.get_xlabel() == "position"


def test_logit_lens_writes_the_top_tokens():
    probabilities = torch.tensor([[0.1, 0.9], [0.5, 0.7], [0.3, 0.2]])
    words = [["a", " b"], ["c", "d"], ["e", "f$"]]
    ax = plot_logit_lens(probabilities, words, [" x", "y"])
    drawn, limits = image_of(ax)
    assert torch.equal(drawn, probabilities.double()) and limits == (0.0, 1.0)
    written = {text.get_position(): text.get_text() for text in ax.texts}
    assert written == {
        (0, 0): "a",
        (1, 0): "\u2423b",
        (0, 1): "c",
        (1, 1): "d",
        (0, 2): "e",
        (1, 2): r"f\$",
    }
    colors = {text.get_position(): text.get_color() for text in ax.texts}
    assert colors[1, 0] == "black" and colors[0, 0] == "white"
    assert labels(ax.xaxis) == ["\u2423x", "y"] and labels(ax.yaxis) == ["0", "1", "2"]
    ax.figure.canvas.draw()


def test_axes_of_ones_own_are_used():
    figure, (left, right) = pyplot.subplots(1, 2)
    assert plot_patching(torch.ones(2, 2), ax=right) is right
    assert not left.images and len(right.images) == 1 and right.figure is figure


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (
            lambda: plot_induction_scores(torch.ones(3)),
            r"scores must be .*\(layers, heads\).*\(3,\)",
        ),
        (
            lambda: plot_patching([[1.0]]),
            r"effects must be a tensor \(layers, positions\), got list",
        ),
        (lambda: plot_patching(torch.ones(0, 3)), r"got \(0, 3\)"),
        (lambda: plot_patching(torch.ones(2, 3), ["a"]), "expected 3 tokens, got 1"),
        (lambda: plot_patching(torch.ones(2, 3), layers=["a"]), "expected 2 layers, got 1"),
        (lambda: plot_patching(torch.tensor([[1, torch.nan]])), r"effects\[0, 1\] is nan"),
        (lambda: plot_logit_lens(torch.ones(2, 1), [["a"]]), "expected 2 top_tokens, got 1"),
        (lambda: plot_logit_lens(torch.ones(1, 2), [["a"]]), r"expected 2 top_tokens\[layer\]"),
    ],
)
def test_what_can_not_be_drawn(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()


@pytest.mark.parametrize(
    "draw",
    [
        lambda: plot_induction_scores(torch.ones(1, 1)),
        lambda: plot_patching(torch.ones(1, 1)),
        lambda: plot_logit_lens(torch.ones(1, 1), [["a"]]),
    ],
)
def test_without_matplotlib_the_extra_is_named(draw, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"pip install flex_model\[plots\]"):
        draw()

"""Plots of hook results: the functions take plain tensors and return matplotlib ``Axes``.

matplotlib is an extra: ``pip install flex_model[plots]``.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_CELL_INCHES = 0.45
_DIVERGING, _RISING = "RdBu_r", "viridis"
_CELL_CHARACTERS = 10


def plot_induction_scores(
    scores: Tensor, *, ax: Any = None, title: str = "Induction scores"
) -> Any:
    """Plot each head's attention to the token after the current token's earlier occurrence.

    Example::

        plot_induction_scores(scores).figure.savefig("heads.png")

    Args:
        scores: ``(layers, heads)``, from 0 to 1.
        ax: The axes to draw on (default: new axes).

    Returns:
        The ``matplotlib.axes.Axes``; the largest score is outlined.

    Raises:
        ValueError: a wrong number of dims, or values that aren't finite.
        ImportError: matplotlib isn't installed.
    """
    values = _checked("plot_induction_scores", "scores", scores, ("layers", "heads"))
    ax = _heat_map(ax, values, _RISING, 0.0, max(1.0, float(values.max())), "score", title)
    ax.set_xlabel("head")
    _label_layers(ax, values.shape[0], None)
    ax.set_xticks(range(values.shape[1]))
    best = int(values.argmax())
    layer, head = divmod(best, values.shape[1])
    _outline(ax, layer, head)
    return ax


def plot_patching(
    effects: Tensor,
    tokens: Sequence[str] | None = None,
    *,
    layers: Sequence[str] | None = None,
    ax: Any = None,
    label: str = "effect",
    title: str = "Activation patching",
) -> Any:
    """Plot the effect of patching each layer at each position. Colours are symmetric around zero.

    Example::

        plot_patching(effects, ["The", " capital", " of", " France"])

    Args:
        effects: ``(layers, positions)``.
        tokens: The labels of the positions.
        layers: Names of the layers (default: their numbers).
        ax: The axes to draw on (default: new axes).
        label: The label of the colour bar.

    Raises:
        ValueError: a wrong number of dims, labels or layers that do not match, or values that
            aren't finite.
        ImportError: matplotlib isn't installed.
    """
    values = _checked("plot_patching", "effects", effects, ("layers", "positions"))
    _check_labels("plot_patching", "tokens", tokens, values.shape[1])
    _check_labels("plot_patching", "layers", layers, values.shape[0])
    most = float(values.abs().max()) or 1.0
    ax = _heat_map(ax, values, _DIVERGING, -most, most, label, title)
    _label_positions(ax, values.shape[1], tokens)
    _label_layers(ax, values.shape[0], layers)
    return ax


def plot_logit_lens(
    probabilities: Tensor,
    top_tokens: Sequence[Sequence[str]],
    tokens: Sequence[str] | None = None,
    *,
    layers: Sequence[str] | None = None,
    ax: Any = None,
    title: str = "Logit lens",
) -> Any:
    """Plot each layer's top token at each position, coloured by its probability.

    Example::

        probabilities, best = lens_logits.softmax(-1).max(-1)        # (layers, positions)
        words = [[tokenizer.decode(i) for i in row] for row in best]
        plot_logit_lens(probabilities, words, prompt_tokens)

    Args:
        probabilities: ``(layers, positions)``, of the top tokens.
        top_tokens: The top tokens by layer and position.
        tokens: The input tokens, as labels of the positions.
        layers: Names of the layers (default: their numbers).
        ax: The axes to draw on (default: new axes).

    Raises:
        ValueError: a wrong number of dims, texts that do not match, or values that aren't finite.
        ImportError: matplotlib isn't installed.
    """
    where = "plot_logit_lens"
    values = _checked(where, "probabilities", probabilities, ("layers", "positions"))
    _check_labels(where, "top_tokens", top_tokens, values.shape[0])
    for row in top_tokens:
        _check_labels(where, "top_tokens[layer]", row, values.shape[1])
    _check_labels(where, "tokens", tokens, values.shape[1])
    _check_labels(where, "layers", layers, values.shape[0])
    ax = _heat_map(ax, values, _RISING, 0.0, 1.0, "probability", title, cell_width=2)
    for layer, row in enumerate(top_tokens):
        for position, token in enumerate(row):
            color = "black" if values[layer, position] > 0.6 else "white"
            place = {"ha": "center", "va": "center", "fontsize": 8}
            ax.text(position, layer, _visible(token), color=color, **place)
    _label_positions(ax, values.shape[1], tokens)
    _label_layers(ax, values.shape[0], layers)
    return ax


# ---- Shared by the plots -------------------------------------------------------------------------


def _pyplot() -> Any:
    try:
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise ImportError(
            "plots need matplotlib, which is not installed; pip install flex_model[plots]"
        ) from error


def _checked(where: str, name: str, values: Tensor, dims: tuple[str, str]) -> Tensor:
    if not isinstance(values, Tensor) or values.dim() != 2 or not values.numel():
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"{where}: {name} must be a tensor ({dims[0]}, {dims[1]}), got {got}")
    values = values.detach().to("cpu", torch.float64)
    if not values.isfinite().all():
        layer, column = (~values.isfinite()).nonzero()[0].tolist()
        raise ValueError(
            f"{where}: {name}[{layer}, {column}] is {values[layer, column].item()}; give finite "
            "numbers, or fill missing values with 0"
        )
    return values


def _check_labels(where: str, name: str, labels: Sequence[Any] | None, count: int) -> None:
    if labels is not None and len(labels) != count:
        raise ValueError(f"{where}: expected {count} {name}, got {len(labels)}")


def _heat_map(
    ax: Any,
    values: Tensor,
    colors: str,
    low: float,
    high: float,
    label: str,
    title: str,
    cell_width: int = 1,
) -> Any:
    if ax is None:
        rows, columns = values.shape
        size = (2.5 + columns * _CELL_INCHES * cell_width, 1.8 + rows * _CELL_INCHES)
        _, ax = _pyplot().subplots(figsize=size, layout="constrained")
    image = ax.imshow(values.numpy(), cmap=colors, vmin=low, vmax=high, aspect="auto")
    ax.figure.colorbar(image, ax=ax, label=label)
    ax.set_title(title)
    return ax


def _label_layers(ax: Any, count: int, layers: Sequence[str] | None) -> None:
    ax.set_ylabel("layer")
    ax.set_yticks(range(count), layers if layers is not None else [str(i) for i in range(count)])


def _label_positions(ax: Any, count: int, tokens: Sequence[str] | None) -> None:
    ax.set_xlabel("position" if tokens is None else "token")
    if tokens is None:
        ax.set_xticks(range(count))
    else:
        ax.set_xticks(range(count), [_visible(token) for token in tokens], rotation=60, ha="right")


def _visible(token: str) -> str:
    """Return a token with visible white space, shortened, and ``$`` escaped (TeX begins there)."""
    shown = token.replace(" ", "\u2423").replace("\n", "\u21b5").replace("\t", "\u21e5")
    if len(shown) > _CELL_CHARACTERS:
        shown = shown[: _CELL_CHARACTERS - 1] + "\u2026"
    return shown.replace("$", r"\$")


def _outline(ax: Any, row: int, column: int) -> None:
    patches = importlib.import_module("matplotlib.patches")
    ax.add_patch(
        patches.Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="red", linewidth=2)
    )

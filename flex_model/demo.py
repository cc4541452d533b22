"""``python -m flex_model demo``: finds and ablates an induction head, on one process and on ranks
that it starts itself, with the same numbers.

The model is written by hand, so nothing is trained or downloaded: two layers of attention over
one-hot tokens and positions. A previous-token head in layer 0 copies the token before; the
induction head in layer 1 (Elhage et al., "A Mathematical Framework for Transformer Circuits", 2021)
finds the earlier occurrence of the current token and copies the token after it. All other heads are
small noise.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from flex_model import editing
from flex_model.diagnostics.local_ranks import run_on_ranks
from flex_model.hooks.function import HookFunction
from flex_model.inspection import text
from flex_model.model import FlexModel

VOCABULARY, PERIOD, HEADS, HEAD_SIZE = 24, 16, 4, 32
_LENGTH = 2 * PERIOD  # a random text, twice
_PREVIOUS_HEAD, _INDUCTION_HEAD = 1, 2  # of layer 0, of layer 1
_SHARPNESS, _NOISE = 60.0, 0.02
_TOKEN, _POSITION = 0, VOCABULARY  # the first unit of each part of a hidden state
_BEFORE, _NEXT = VOCABULARY + _LENGTH, 2 * VOCABULARY + _LENGTH
_WIDTH = 3 * VOCABULARY + _LENGTH
_TOLERANCE = 1e-9  # float64, sums in another order


class Layer(nn.Module):
    """Causal attention with a residual; ``pattern`` outputs (batch, heads, query, key)."""

    def __init__(self) -> None:
        super().__init__()
        inner = HEADS * HEAD_SIZE
        self.q, self.k, self.v = (nn.Linear(_WIDTH, inner, bias=False) for _ in range(3))
        self.pattern = nn.Softmax(-1)
        self.o = nn.Linear(inner, _WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        split = (batch, length, -1, HEAD_SIZE)
        q, k, v = (layer(x).view(split).transpose(1, 2) for layer in (self.q, self.k, self.v))
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        pattern = self.pattern((q @ k.transpose(-1, -2)).masked_fill(hidden, -torch.inf))
        return x + self.o((pattern @ v).transpose(1, 2).reshape(batch, length, -1))


class CopyingModel(nn.Module):
    """A model that predicts the token after the last token's earlier occurrence."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, _WIDTH)
        self.positions = nn.Embedding(_LENGTH, _WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(_WIDTH, VOCABULARY, bias=False)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(_NOISE * noise)
            _identity(self.tokens.weight, 0, _TOKEN, VOCABULARY)
            _identity(self.positions.weight, 0, _POSITION, _LENGTH)
            _identity(self.head.weight, 0, _NEXT, VOCABULARY, 10.0)
            first, second = cast(list[Layer], list(self.layers))
            start = _PREVIOUS_HEAD * HEAD_SIZE  # query i matches the key of position i - 1
            _identity(first.q.weight, start, _POSITION, _LENGTH, _SHARPNESS)
            _identity(first.k.weight, start + 1, _POSITION, _LENGTH - 1)
            _copy(first, start, _TOKEN, _BEFORE)
            start = _INDUCTION_HEAD * HEAD_SIZE  # a token matches positions that it precedes
            _identity(second.q.weight, start, _TOKEN, VOCABULARY, _SHARPNESS)
            _identity(second.k.weight, start, _BEFORE, VOCABULARY)
            # Position 0 has no previous token: there the head of layer 0 copies the token itself.
            second.q.weight[start + VOCABULARY, _TOKEN : _TOKEN + VOCABULARY] += _SHARPNESS
            second.k.weight[start + VOCABULARY, _POSITION] -= 1
            _copy(second, start, _TOKEN, _NEXT)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _identity(weight: Tensor, row: int, column: int, size: int, scale: float = 1.0) -> None:
    weight[row : row + size, column : column + size] += scale * torch.eye(size)


def _copy(layer: Layer, start: int, source: int, target: int) -> None:
    """Let the head whose rows begin at ``start`` copy a token from one part to another."""
    _identity(layer.v.weight, start, source, VOCABULARY)
    _identity(layer.o.weight, target, start, VOCABULARY)


def sharded(model: CopyingModel, num_ranks: int) -> CopyingModel:
    """Shard the heads over the ranks."""
    # Imported here, since it takes over a second that other commands don't need.
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan: dict[str, Any] = {name: ColwiseParallel() for name in "qkv"}
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("tp",))
    for layer in model.layers:
        parallelize_module(layer, mesh, plan | {"o": RowwiseParallel()})
    return model


# ---- The experiment, on any number of ranks ------------------------------------------------------


@dataclass
class Findings:
    """The results of the experiment on a number of ranks.

    Attributes:
        best: The layer and head with the largest score.
        scores: ``(layers, heads)``: the mean attention to the token after the earlier occurrence.
        tensors: The tensors that must be the same on any number of ranks.
        losses: The losses of the second half, by ablated head.
        picture: The output of ``flex.show()``.
    """

    best: tuple[int, int]
    scores: Tensor
    tensors: dict[str, Tensor]
    losses: dict[str, float]
    picture: str


def explore(model: nn.Module, num_ranks: int, html: str | None = None) -> Findings:
    """Find the induction head, and compute the loss without it. Collective."""
    torch.manual_seed(0)
    half = torch.stack([torch.randperm(VOCABULARY)[:PERIOD] for _ in range(4)])
    tokens = torch.cat([half, half], 1)
    records: dict[str, list[Tensor]] = {}
    wrap = {"tensor_parallel_size": num_ranks, "output_ranks": "all"}
    with FlexModel(model, records, **wrap) as flex:  # type: ignore[arg-type]
        patterns = flex.create_hook_group("patterns", "pattern")
        logits = flex(tokens)
        scores = torch.stack([_induction_scores(records[f.module_name][0]) for f in patterns])
        layer, head = divmod(int(scores.argmax()), HEADS)
        tensors = {f.module_name: records[f.module_name][0] for f in patterns}
        tensors["logits"] = logits.detach()
        losses = {"all heads": _loss(logits, tokens).item()}
        for other in ((head + 1) % HEADS, head):
            name = f"without layer {layer}, head {other}"
            zero_head = editing.zero(heads=other, num_heads=HEADS)
            edit = HookFunction(f"layers.{layer}.o", editing_function=zero_head)
            with flex.register_forward_pre_hook(edit):
                flex.update_hook_groups(edit, "ablations")
                with flex.timeline():
                    model.zero_grad()
                    logits = flex(tokens)
                    loss = _loss(logits, tokens)
                    loss.backward()
                losses[name], tensors[f"logits {name}"] = loss.item(), logits.detach()
                weight = f"layers.{layer}.v.weight"
                grad = flex.get_module_gradient(weight)
                assert grad is not None
                tensors[f"gradient of {weight} {name}"] = grad
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    flex.show(show_all=True)
                if html is not None:
                    flex.show(html=html)
    return Findings((layer, head), scores, tensors, losses, out.getvalue())


def _induction_scores(pattern: Tensor) -> Tensor:
    """Return each head's mean attention of the second half to the token after the earlier one."""
    return pattern.diagonal(1 - PERIOD, 2, 3)[..., 1:].mean((0, 2))


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the loss of the predictable tokens: the second half without its first token."""
    predicted, expected = logits[:, PERIOD:-1], tokens[:, PERIOD + 1 :]
    return functional.cross_entropy(predicted.flatten(0, 1), expected.flatten())


# ---- Ranks ---------------------------------------------------------------------------------------


def on_ranks(num_ranks: int, html: str | None = None) -> Findings:
    """Start the ranks, run the experiment, and return the findings of rank 0.

    Raises:
        RankError: a rank failed or sent no result.
    """
    if num_ranks == 1:
        return explore(CopyingModel().double(), 1, html)
    best, scores, tensors, losses, picture = run_on_ranks(num_ranks, _explore, num_ranks, html)[0]
    values = {name: torch.tensor(value, dtype=torch.float64) for name, value in tensors.items()}
    return Findings(best, torch.tensor(scores, dtype=torch.float64), values, losses, picture)


def _explore(rank: int, num_ranks: int, html: str | None) -> tuple[Any, ...]:
    found = explore(sharded(CopyingModel().double(), num_ranks), num_ranks, html)
    # Lists, because a tensor would be sent in shared memory that ends with this process.
    tensors = {name: tensor.tolist() for name, tensor in found.tensors.items()}
    return found.best, found.scores.tolist(), tensors, found.losses, found.picture


# ---- The command ---------------------------------------------------------------------------------


@dataclass
class DemoComparison:
    """The comparison of one process with several ranks; prints as text."""

    one: Findings
    several: Findings
    num_ranks: int

    @property
    def differences(self) -> dict[str, float]:
        """The largest difference of each tensor."""
        return {
            name: float((tensor - self.several.tensors[name]).abs().max())
            for name, tensor in self.one.tensors.items()
        }

    @property
    def is_equal(self) -> bool:
        """Whether both results are the same, up to the order of sums."""
        is_same_head = self.one.best == self.several.best
        return is_same_head and all(value <= _TOLERANCE for value in self.differences.values())

    def json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "ranks": [1, self.num_ranks],
            "induction_head": self.several.best,
            "induction_scores": self.several.scores.tolist(),
            "losses": [self.one.losses, self.several.losses],
            "largest_differences": self.differences,
            "is_equal": self.is_equal,
        }

    def __str__(self) -> str:
        layer, head = self.several.best
        scores = [
            [str(row), *(f"{score:.3f}" for score in of_layer)]
            for row, of_layer in enumerate(self.several.scores.tolist())
        ]
        ranks = f"{self.num_ranks} rank{'s' * (self.num_ranks > 1)}"
        losses = [
            [what, f"{loss:.6f}", f"{self.several.losses[what]:.6f}"]
            for what, loss in self.one.losses.items()
            if what in self.several.losses
        ]
        differences = [[name, f"{value:.1e}"] for name, value in self.differences.items()]
        equal = "equal" if self.is_equal else "NOT EQUAL"
        lines = [
            self.several.picture,
            f"induction scores, found on {ranks}",
            text.Table(["layer", *(f"head {i}" for i in range(HEADS))], scores),
            f"the induction head: layer {layer}, head {head}",
            "",
            text.Table(["loss on the repeated half", "1 process", ranks], losses),
            "",
            text.Table([f"1 process and {ranks}", "largest difference"], differences),
            f"all {len(differences)} tensors are {equal} (float64, up to {_TOLERANCE:g})",
        ]
        return "\n".join(map(str, lines))

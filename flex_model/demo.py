"""``python -m flex_model demo``: an induction head is found and taken out, on one process and on
ranks that it starts itself, with the same numbers.

The model is made by hand, so nothing is trained or downloaded: two layers of attention over one-hot
tokens and positions. A head of layer 0 finds the token before; one of layer 1, the induction head
(Elhage et al., "A Mathematical Framework for Transformer Circuits", 2021), finds where the token
stood before, and copies what came after it. All other heads are small noise.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from flex_model import editing
from flex_model.hooks.function import HookFunction
from flex_model.inspection import text
from flex_model.model import FlexModel

VOCABULARY, PERIOD, HEADS, HEAD_SIZE = 24, 16, 4, 32
_LENGTH = 2 * PERIOD  # a random text, twice
_PREVIOUS_HEAD, _INDUCTION_HEAD = 1, 2  # of layer 0, of layer 1
_SHARPNESS, _NOISE = 60.0, 0.02
_TOKEN, _POSITION = 0, VOCABULARY  # where a hidden state has what
_BEFORE, _NEXT = VOCABULARY + _LENGTH, 2 * VOCABULARY + _LENGTH
_WIDTH = 3 * VOCABULARY + _LENGTH
_TOLERANCE = 1e-9  # float64, sums in another order
_TIMEOUT_S = 120.0


class DemoError(RuntimeError):
    """A rank failed, or says nothing."""


class Layer(nn.Module):
    """Causal attention, added to what it reads; ``pattern`` gives (batch, heads, query, key)."""

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
    """Says what came after the last token where that stood before."""

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
            start = _PREVIOUS_HEAD * HEAD_SIZE  # position i asks for key i, which i - 1 has
            _identity(first.q.weight, start, _POSITION, _LENGTH, _SHARPNESS)
            _identity(first.k.weight, start + 1, _POSITION, _LENGTH - 1)
            _copy(first, start, _TOKEN, _BEFORE)
            start = _INDUCTION_HEAD * HEAD_SIZE  # a token asks for where it is the one before
            _identity(second.q.weight, start, _TOKEN, VOCABULARY, _SHARPNESS)
            _identity(second.k.weight, start, _BEFORE, VOCABULARY)
            # Nothing stands before position 0, where the head of layer 0 finds the token itself.
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
    """The head whose rows begin at ``start`` moves a token from one place to another."""
    _identity(layer.v.weight, start, source, VOCABULARY)
    _identity(layer.o.weight, target, start, VOCABULARY)


def sharded(model: CopyingModel, num_ranks: int) -> CopyingModel:
    """Heads split over the ranks."""
    # Over a second, which other commands do without.
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


# ---- What is done on any number of ranks ---------------------------------------------------------


@dataclass
class Findings:
    """What the script found on one number of ranks.

    Attributes:
        scores: ``(layers, heads)``: how much a head attends to what came after the token before.
        tensors: What must be the same on any number of ranks.
        losses: Of the second half, by what was taken out.
        picture: As ``flex.show()`` prints it.
    """

    best: tuple[int, int]
    scores: Tensor
    tensors: dict[str, Tensor]
    losses: dict[str, float]
    picture: str


def explore(model: nn.Module, num_ranks: int, html: str | None = None) -> Findings:
    """Find the induction head, and see what becomes of the loss without it. Collective."""
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
    """By head: the mean attention of the second half to what came after the token before."""
    return pattern.diagonal(1 - PERIOD, 2, 3)[..., 1:].mean((0, 2))


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Of what can be known: the second half, but for its first token."""
    said, wanted = logits[:, PERIOD:-1], tokens[:, PERIOD + 1 :]
    return functional.cross_entropy(said.flatten(0, 1), wanted.flatten())


# ---- Ranks ---------------------------------------------------------------------------------------


def on_ranks(num_ranks: int, html: str | None = None) -> Findings:
    """What rank 0 found; the ranks are started here.

    Raises:
        DemoError: a rank failed, or says nothing.
    """
    if num_ranks == 1:
        return explore(CopyingModel().double(), 1, html)
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks, pipes = [], []
    for rank in range(num_ranks):
        here, there = context.Pipe()
        arguments = (rank, num_ranks, store.port, there, html)
        ranks.append(context.Process(target=_rank, args=arguments, daemon=True))
        ranks[-1].start()
        there.close()
        pipes.append(here)
    told: list[Any] = []
    try:
        for rank, pipe in enumerate(pipes):
            try:
                told.append(pipe.recv() if pipe.poll(_TIMEOUT_S) else "says nothing")
            except EOFError:
                told.append("ended without a word")
            if isinstance(told[-1], str):
                raise DemoError(f"rank {rank} {told[-1]}")
    finally:
        for process in ranks:
            process.join(5)
            process.kill()
    best, scores, tensors, losses, picture = told[0]
    values = {name: torch.tensor(value, dtype=torch.float64) for name, value in tensors.items()}
    return Findings(best, torch.tensor(scores, dtype=torch.float64), values, losses, picture)


def _rank(rank: int, num_ranks: int, port: int, pipe: Connection, html: str | None) -> None:
    try:
        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        timeout = timedelta(seconds=_TIMEOUT_S)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout
        )
        found = explore(sharded(CopyingModel().double(), num_ranks), num_ranks, html)
        # Lists: a tensor would travel in memory that ends with this process.
        tensors = {name: tensor.tolist() for name, tensor in found.tensors.items()}
        pipe.send((found.best, found.scores.tolist(), tensors, found.losses, found.picture))
    except BaseException as error:
        pipe.send(f"failed: {type(error).__name__}: {error}")
    os._exit(0)  # gloo's threads abort an orderly exit now and then


# ---- The command ---------------------------------------------------------------------------------


@dataclass
class Comparison:
    """One process beside several ranks; prints as text."""

    one: Findings
    several: Findings
    num_ranks: int

    @property
    def differences(self) -> dict[str, float]:
        """The largest of each tensor."""
        return {
            name: float((tensor - self.several.tensors[name]).abs().max())
            for name, tensor in self.one.tensors.items()
        }

    @property
    def is_equal(self) -> bool:
        """Whether both found the same, up to sums in another order."""
        is_same_head = self.one.best == self.several.best
        return is_same_head and all(value <= _TOLERANCE for value in self.differences.values())

    def json(self) -> dict[str, Any]:
        """Of plain values."""
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
        return "\n".join(
            [
                self.several.picture,
                f"induction scores, found on {ranks}",
                text.table(["layer", *(f"head {i}" for i in range(HEADS))], scores),
                f"the induction head: layer {layer}, head {head}",
                "",
                text.table(["loss on the repeated half", "1 process", ranks], losses),
                "",
                text.table([f"1 process and {ranks}", "largest difference"], differences),
                f"all {len(differences)} tensors are {equal} (float64, up to {_TOLERANCE:g})",
            ]
        )

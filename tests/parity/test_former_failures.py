"""Programs that were refused without need, or on which following ended with an error of torch's
own ("view size is not compatible", "index out of range", a convolution's weight): batches of other
sizes, one row, one token, one head a rank, heads joined with the batch, whole heads in unequal
shares, modules first reached late.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard
from torch.testing import assert_close

import models
from flex_model import FlexModel, HookFunction
from flex_model.errors import HookNotCalledWarning

WIDTH = 8


def mixed(module, full, save_ctx, modules):
    """Every element of the result depends on several of other ranks."""
    return full + 0.5 * full.flip(tuple(range(full.ndim))).cumsum(0)


class Attention(nn.Module):
    """Heads that are joined with the batch for the products."""

    columns, rows = ("q", "k", "v"), ("o",)

    def __init__(self, num_heads, steps):
        super().__init__()
        self.head_dim, self.steps = WIDTH // num_heads, steps
        for name in "qkvo":
            setattr(self, name, models.seeded(nn.Linear, WIDTH, WIDTH, seed=ord(name)).double())
        self.scores, self.heads = nn.Identity(), nn.Identity()

    def forward(self, x):
        rows, length, _ = x.shape
        size = (rows, length, -1, self.head_dim)
        q, k, v = (proj(x).view(size).transpose(1, 2) for proj in (self.q, self.k, self.v))
        if self.steps == "joined":
            flat = (-1, length, self.head_dim)
            weights = torch.bmm(q.reshape(flat), k.reshape(flat).transpose(1, 2))
            weights = self.scores(weights.softmax(-1))
            heads = torch.bmm(weights, v.reshape(flat)).view(rows, -1, length, self.head_dim)
        else:
            weights = self.scores(torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1))
            heads = torch.einsum("bhqk,bhkd->bhqd", weights, v)
        return self.o(self.heads(heads).transpose(1, 2).reshape(rows, length, -1))


class Windows(nn.Module):
    """Convolutions over the positions, and rows and positions joined and taken apart again."""

    columns = rows = ()

    def __init__(self):
        super().__init__()
        self.first = models.seeded(nn.Conv1d, WIDTH, WIDTH, 3, padding=1, groups=2).double()
        self.second = models.seeded(nn.Linear, WIDTH, WIDTH, seed=3).double()
        self.moved, self.joined, self.apart = nn.Identity(), nn.Identity(), nn.Identity()

    def forward(self, x):
        rows, length, _ = x.shape
        h = self.moved(self.first(x.transpose(1, 2)).permute(2, 0, 1))  # positions first
        h = self.joined(self.second(h.reshape(-1, WIDTH)))
        return self.apart(h.view(length, rows, WIDTH).transpose(0, 1))


class Positions(nn.Module):
    """A table that is as long as the longest input."""

    columns = rows = ()

    def __init__(self):
        super().__init__()
        self.table = models.seeded(nn.Embedding, 6, WIDTH).double()
        self.chosen, self.last = nn.Identity(), nn.Identity()

    def forward(self, x):
        places = torch.arange(x.shape[1])
        h = self.chosen(x + self.table(places)[None])
        return self.last(h[:, -1:].expand(-1, x.shape[1], -1) * h)


MODELS = {
    "heads joined with the batch": lambda: Attention(4, "joined"),
    "one head a rank, joined with the batch": lambda: Attention(2, "joined"),
    "one head a rank, by einsum": lambda: Attention(2, "einsum"),
    "windows": Windows,
    "positions": Positions,
}
BATCHES = {
    "one row first": [(2, 3), (4, 3), (2, 3)],
    "one token first": [(4, 1), (4, 4), (4, 1)],
    "longer and shorter": [(4, 4), (2, 6), (6, 2)],
}


def run(model, batches, mine=lambda full: full):
    """Outputs of the batches, and the input's gradient of the last."""
    outputs = []
    for i, (rows, length) in enumerate(batches):
        x = mine(models.random(rows, length, WIDTH, seed=i)).clone().requires_grad_()
        outputs.append(model(x))
    outputs[-1].square().sum().backward()
    return [output.detach() for output in outputs], x.grad


@pytest.mark.ranks(2, timeout=60)
@pytest.mark.parametrize("batches", BATCHES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("axis", ["tp", "dp"])
def test_edits_that_mix_ranks(name, batches, axis):
    whole = MODELS[name]()
    if axis == "tp" and not whole.columns:
        return
    if (axis, name, batches) == ("tp", "one head a rank, joined with the batch", "one token first"):
        return  # refused: nothing tells (rows, heads, 1, size) from (rows, 1, 1, heads * size)
    parallelism = models.TWO_RANKS[axis]
    sites = [site for site, module in whole.named_modules() if isinstance(module, nn.Identity)]

    def mine(full):
        return full.chunk(2)[dist.get_rank()] if axis == "dp" else full

    for site in sites:
        hook = whole.get_submodule(site).register_forward_hook(
            lambda module, args, output: mixed(module, output, None, None)
        )
        expected, gradient = run(whole, BATCHES[batches])
        hook.remove()
        with FlexModel(parallelism.shard(whole), timeout=20, **parallelism.sizes) as flex:
            flex.register_forward_hook(HookFunction(site, None, mixed))
            got, own = run(flex, BATCHES[batches], mine)
        for full, output in zip(expected, got):
            assert_close(output, mine(full), msg=lambda text, site=site: f"{site}: {text}")
        assert_close(own, mine(gradient), msg=lambda text, site=site: f"{site}: {text}")


@pytest.mark.ranks(2)
def test_weights_of_each_head():
    """By einsum, with a parameter that is split along the heads, which is stated."""

    class Each(nn.Module):
        def __init__(self, part):
            super().__init__()
            self.weight = nn.Parameter(part(models.random(4, 2, 2)))
            self.column = nn.Parameter(part(models.random(WIDTH, WIDTH, seed=5)))
            self.heads, self.head_dim = nn.Identity(), 2

        def forward(self, x):
            h = F.linear(x, self.column).unflatten(-1, (-1, self.head_dim))
            return self.heads(torch.einsum("bshd,hde->bshe", h, self.weight))

    x = models.random(3, 2, WIDTH)
    expected = mixed(None, Each(lambda full: full)(x), None, None)
    model = Each(lambda full: full.chunk(2)[dist.get_rank()].clone())
    with FlexModel(model, records := {}, tensor_parallel_size=2, timeout=20) as flex:
        flex.annotate_layout("", kind="parameter", tp=Shard(0))
        flex.register_forward_hook(HookFunction("heads", None, mixed, output_name="before"))
        flex(x)
        if dist.get_rank() == 0:
            assert_close(mixed(None, records["before"][0], None, None), expected)


@pytest.mark.ranks(2)
def test_a_module_that_is_first_reached_after_many_forwards():
    """Nothing was known of it."""

    class Late(nn.Module):
        columns, rows = ("up",), ("down",)

        def __init__(self):
            super().__init__()
            self.up, self.down = (models.seeded(nn.Linear, WIDTH, WIDTH, seed=i) for i in (1, 2))
            self.late = nn.Identity()

        def forward(self, x, is_late=False):
            h = self.up(x).tanh()
            return self.down(self.late(h) if is_late else h)

    whole, x = Late().double(), models.random(4, WIDTH)
    parallelism = models.TWO_RANKS["tp"]
    with FlexModel(
        parallelism.shard(whole), records := {}, timeout=20, tensor_parallel_size=2
    ) as flex:
        flex.register_forward_hook(HookFunction("late"))
        with pytest.warns(HookNotCalledWarning):
            flex(x)
        for _ in range(9):
            flex(x)
        flex(x, is_late=True)
    if dist.get_rank() == 0:
        assert_close(records["late"][0], whole.up(x).tanh())

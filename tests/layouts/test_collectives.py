"""What collectives make of shards, of partial sums and of replicas, written into a model by hand.
What is a part of the unsharded program is compared with it, forward and backward, through an edit
that mixes shards. After a sum, a gather or a broadcast all ranks have the same tensor, whatever it
was made of.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp
from torch.distributed.tensor import Replicate
from torch.testing import assert_close

import models
from flex_model import FlexModel, HookFunction
from flex_model.distributed import placement
from flex_model.distributed.mesh import Mesh
from flex_model.layouts.statements import statement_of
from followed import Sites, follow, unsharded
from models import SumOverRanks

X = models.random(4, 6)


def whole_program(function):
    """A Linear, and what ``function`` makes of it."""
    linear = models.seeded(nn.Linear, 6, 6).double()
    return Sites(lambda m, x: m.made(function(m.whole(x))), "made", whole=linear)


def sharded_program(function):
    """The same of a Linear that all ranks have: of this rank's part of its columns, and of all."""
    return whole_program(lambda h: function(h.chunk(2, 1)[dist.get_rank()], h))


def total(x, op=ReduceOp.SUM):
    x = x.contiguous().clone()
    dist.all_reduce(x, op)
    return x


def parts(x):
    """Of all ranks, by a gather into a list."""
    found = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(found, x.contiguous())
    return found


def one_tensor(x):
    """Of all ranks, one after the other along the first dim."""
    found = x.new_empty(2 * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(found, x.contiguous())
    return found


def scattered(x):
    """The rank's rows of the sum."""
    found = x.new_empty(x.shape[0] // 2, *x.shape[1:])
    dist.reduce_scatter_tensor(found, x.contiguous())
    return found


def in_its_place(shard):
    """The shard in the full tensor, and zeros beside it."""
    rank, size = dist.get_rank(), shard.shape[1]
    full = torch.zeros(4, 6, dtype=shard.dtype)
    full[:, rank * size : (rank + 1) * size] = shard
    return full


def in_halves(x):
    """Reduced in two buckets, which show parts of its memory."""
    x = x.clone()
    dist.all_reduce(x[:2])
    dist.all_reduce(x[2:])
    return x


def shown_before(x):
    x = x.clone()
    half = x[:2]
    dist.all_reduce(x)
    return half


def on_rank_0(x):
    x = x.clone()
    dist.reduce(x, 0)
    return x


def from_the_other(x):
    received, other = torch.zeros_like(x), 1 - dist.get_rank()
    sent = x.contiguous()
    transfers = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)]
    for work in dist.batch_isend_irecv(transfers):
        work.wait()
    return received


def to_all(x):
    received = torch.zeros_like(x)
    dist.all_to_all_single(received, x.contiguous())
    return received


def own_columns_written(shard, whole):
    """Each rank writes to another part of what all have."""
    made, size = whole.clone(), shard.shape[1]
    made[:, dist.get_rank() * size :][:, :size] *= 2
    return made


def by_row(start, x):
    """Rows added to others, as an expert layer puts its rows back."""
    rows = torch.tensor([2, 0, 2, 1])
    return start.scatter_add_(0, rows[:, None].expand(-1, x.shape[1]), x)


def zeros():
    return torch.zeros(4, 4, dtype=torch.float64)


def broadcast(x):
    x = x.clone()
    dist.broadcast(x, 0)
    return x


def columns_in_rows(x):
    made = x.new_zeros(8, 2)
    made[:4], made[4:] = x.chunk(2, 1)
    return made


def more_on_rank_0(x):
    """As a row-parallel layer adds its bias before the sum: on one rank."""
    return x if dist.get_rank() else x + torch.ones(x.shape[1])


# What each rank does with its shard and the whole; what the unsharded program does.
KNOWN = {
    "sum": (lambda p, h: total(p.sum(1)), lambda h: h.sum(1)),
    "mean, by the number of ranks": (lambda p, h: total(p.mean(1) / 2), lambda h: h.mean(1)),
    "largest": (lambda p, h: total(p.amax(1), ReduceOp.MAX), lambda h: h.amax(1)),
    "smallest": (lambda p, h: total(p.amin(1), ReduceOp.MIN), lambda h: h.amin(1)),
    "largest of replicas": (lambda p, h: total(h, ReduceOp.MAX), lambda h: h),
    "gathered, joined": (lambda p, h: torch.cat(parts(p), 1), lambda h: h),
    "gathered, by name": (lambda p, h: torch.cat(one_tensor(p).chunk(2), 1), lambda h: h),
    "one row, gathered": (lambda p, h: one_tensor(p[:1]).view(1, 6), lambda h: h[:1]),
    "gathered rows": (lambda p, h: one_tensor(p.t()).t(), lambda h: h),
    "broadcast of replicas": (lambda p, h: broadcast(h), lambda h: h),
    "in its place": (lambda p, h: total(in_its_place(p)), lambda h: h),
    "more on rank 0, then summed": (
        lambda p, h: total(more_on_rank_0(p).sum(1)).cos(),
        lambda h: (h.sum(1) + 3).cos(),
    ),
    "more on rank 0, then gathered": (
        lambda p, h: torch.cat(parts(more_on_rank_0(p)), 1).cos(),
        lambda h: (h + torch.tensor([1, 1, 1, 0, 0, 0])).cos(),
    ),
    "replicas, scattered": (lambda p, h: scattered(h), lambda h: 2 * h),
    "a partial sum, scattered": (lambda p, h: scattered(p @ p.t()), lambda h: h @ h.t()),
    "a partial sum, scattered by columns": (
        lambda p, h: scattered(torch.cat((p @ p.t()).chunk(2, 1)).float() * 2).double(),
        lambda h: h @ h.t() * 2,
    ),
    "a partial sum, scattered after its dims are moved": (
        lambda p, h: scattered((p @ p.t()).view(2, 2, 4).permute(2, 0, 1)),
        lambda h: (h @ h.t()).view(2, 2, 4).permute(2, 0, 1),
    ),
    "partial sums, added to zeros": (
        lambda p, h: total(by_row(zeros(), p @ p.t())),
        lambda h: by_row(zeros(), h @ h.t()),
    ),
}
ALIKE = {
    "sum of replicas": lambda p, h: total(h),
    "half the sum of replicas": lambda p, h: total(h) / 2,
    "largest of shards": lambda p, h: total(p, ReduceOp.MAX),
    "sum of the largest": lambda p, h: total(p.amax(1)),
    "largest of sums": lambda p, h: total(p.sum(1), ReduceOp.MAX),
    "sum of shards": lambda p, h: total(p),
    "product": lambda p, h: total(p.prod(1), ReduceOp.PRODUCT),
    "mean of sums": lambda p, h: total(p.mean(1)),
    "joined along another dim": lambda p, h: torch.cat(parts(p), 0),
    "joined in another order": lambda p, h: torch.cat(parts(p)[::-1], 1),
    "one of the parts": lambda p, h: parts(p)[1],
    "partial sums, added to ones": lambda p, h: total(by_row(zeros() + 1, p @ p.t())),
    "broadcast of a shard": lambda p, h: broadcast(p),
}
REFUSED = {
    # The ranks' columns, brought to the front by other operations than those that are read.
    "columns of a sum, by views": lambda p, h: scattered(
        (p @ p.t()).unflatten(1, (2, -1)).transpose(0, 1).flatten(0, 1)
    ),
    "columns of a sum, stacked": lambda p, h: scattered(
        torch.stack((p @ p.t()).chunk(2, 1)).flatten(0, 1)
    ),
    "columns of a sum, written": lambda p, h: scattered(columns_in_rows(p @ p.t())),
    "columns of a sum, by their numbers": lambda p, h: scattered(
        (p @ p.t()).flatten()[torch.arange(16).view(4, 2, 2).transpose(0, 1).flatten()].view(8, 2)
    ),
    "columns of one row of a sum": lambda p, h: scattered((p @ p.t())[:1].view(2, 2)),
    # c10d does not say what it writes to: other views kept what they were, and what was received.
    "reduced in two halves": lambda p, h: in_halves(p.sum(1)),
    "shown before it is reduced": lambda p, h: shown_before(p.sum(1)),
    "reduced to one rank": lambda p, h: on_rank_0(p.sum(1)),
    "from the other rank": lambda p, h: from_the_other(p),
    "all to all": lambda p, h: to_all(p),
    "own columns, written": lambda p, h: own_columns_written(p, h),
    "each minus the mean of its shard": lambda p, h: p - p.mean(1, keepdim=True),
}


def proven(function):
    """What is proven of the result, on two tensor-parallel ranks; None for nothing."""
    replicated = statement_of("whole", "parameter", 0, Replicate(), None, None, None)
    mesh = Mesh.from_sizes(tp_size=2)
    pair = [(placement.Replicate(), placement.Replicate())]
    found, _, _ = follow(sharded_program(function), mesh, [X], pair, [replicated])
    return found["made"][0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", KNOWN)
def test_what_ranks_have_after_a_collective(name):
    mine, whole = KNOWN[name]
    found = proven(mine)
    assert found is not None
    assert_close(found, unsharded(whole_program(whole), [X])["made"][0])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ALIKE)
def test_what_all_ranks_have_alike(name):
    own = sharded_program(ALIKE[name])(X).detach()
    assert_close(proven(ALIKE[name]), own)
    dist.all_gather(of_ranks := [torch.empty_like(own), torch.empty_like(own)], own.contiguous())
    assert_close(*of_ranks)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_part_of_the_unsharded_program_is_not_known(name):
    assert proven(REFUSED[name]) is None


def mixed(module, full, save_ctx, modules):
    return full + 0.5 * full.flip(0).cumsum(0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["sum", "mean, by the number of ranks"])
def test_edits_of_what_was_summed_and_their_gradients(name):
    """The gradients of the weight are parts of a sum: each rank returns that of its shard."""
    scale = 1 if name == "sum" else 2
    part, whole = {"sum": (torch.sum, torch.sum), "mean": (torch.mean,) * 2}[name.split(",")[0]]
    group = models.mesh(1, 2)["tp"].get_group()
    sharded = sharded_program(lambda p, h: SumOverRanks.apply(part(p.tanh(), 1) / scale, group))
    expected = whole_program(lambda h: whole(h.tanh(), 1))
    expected.whole.register_full_backward_pre_hook(
        lambda module, grads: seen.update(gradient=grads[0])
    )
    seen = {}
    made = expected.made.register_forward_hook(lambda m, args, output: mixed(m, output, None, None))
    expected(X.clone().requires_grad_()).square().sum().backward()
    made.remove()
    with FlexModel(sharded, records := {}, tensor_parallel_size=2, timeout=20) as flex:
        flex.annotate_layout("whole", kind="parameter", tp=Replicate())
        flex.register_forward_hook(HookFunction("made", None, mixed))
        flex.register_full_backward_pre_hook(HookFunction("whole", output_name="gradient"))
        flex(X.clone().requires_grad_()).square().sum().backward()
    if dist.get_rank() == 0:
        assert_close(records["gradient"][0], seen["gradient"])


class Scattered(nn.Module):
    """A row-parallel layer whose ranks keep their part of the length of its sum."""

    def __init__(self, whole, group):
        super().__init__()
        self.in_features, self.out_features, self.group = 6, 6, group
        self.weight = nn.Parameter(whole.weight.detach().chunk(2, 1)[group.rank()].clone())
        self.site = nn.Tanh()

    def forward(self, x):
        h = x.chunk(2, -1)[self.group.rank()] @ self.weight.t()
        found = h.new_empty(len(h) // 2, *h.shape[1:])
        dist.reduce_scatter_tensor(found, h.contiguous(), group=self.group)
        return self.site(found)


@pytest.mark.ranks(4)
def test_sums_that_are_scattered_beside_rows():
    """Gloo copies the result from a part of a buffer of its own."""
    mesh, x, records = models.mesh(2, 2), models.random(4, 6, 6), {}
    whole = models.seeded(nn.Linear, 6, 6, bias=False).double()
    model = Scattered(whole, mesh["tp"].get_group())
    rows = x.chunk(2, 1)[mesh["dp"].get_local_rank()]
    with (
        torch.no_grad(),
        FlexModel(model, records, device_mesh=mesh, batch_dim=1, output_ranks="all") as flex,
    ):
        flex.register_forward_hook(HookFunction("site", None, mixed))
        found = flex(rows)
        expected = whole(x).tanh()
    assert_close(records["site"], [expected])
    edited = mixed(None, expected, None, None).chunk(2, 1)[mesh["dp"].get_local_rank()]
    assert_close(found, edited.chunk(2)[mesh["tp"].get_local_rank()])

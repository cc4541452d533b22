"""What programs are made of: layers and collectives that are no-ops on one rank.

This text is executed once for the unsharded model and once for each rank's, with the names of the
mesh below set.
"""

import numpy as np  # noqa: F401  # programs use it
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn

import models
from flex_model.layouts import register_function

tp, tp_rank, tp_group = 1, 0, None
dp, dp_rank, dp_group = 1, 0, None
states = True  # whether layers by hand say how wide they are in all
tiles = 1  # into how many equal parts "tiled" weights are made


# ---- Weights -------------------------------------------------------------------------------------


def weight(*shape, seed, init="", cut=None):
    """A full parameter, the same on every rank and however it is split.

    "tiled": every rank's part along ``cut`` is equal, as after ``torch.manual_seed`` on each.
    """
    init = init or "normal"
    if init == "zero":
        return torch.zeros(shape, dtype=torch.float64)
    if init == "constant":
        return torch.full(shape, 0.25, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1000 + seed)
    if init == "tiled" and cut is not None and shape[cut] % tiles == 0:
        part = list(shape)
        part[cut] //= tiles
        return torch.cat([draw(part, generator)] * tiles, cut)
    if init == "halves" and shape[-1] % 2 == 0:
        return draw((*shape[:-1], shape[-1] // 2), generator).repeat(*[1] * (len(shape) - 1), 2)
    full = draw(shape, generator)
    if init == "symmetric" and len(shape) == 2 and shape[0] == shape[1]:
        full = (full + full.T) / 2
    return full


def draw(shape, generator):
    full = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    return full * 0.5 if len(shape) > 1 else full * 0.2 + 0.7


def share(n, rank=None):
    """How many of ``n`` a rank has: the first have one more where it splits unevenly."""
    rank = tp_rank if rank is None else rank
    return n // tp + (rank < n % tp)


def my_part(full, dim, unit=1, parts=1):
    """This rank's part of each of the ``parts`` of a dim, in whole units."""
    pieces = []
    for part in full.chunk(parts, dim):
        whole = part.unflatten(dim, (-1, unit))
        pieces.append(whole.tensor_split(tp, dim)[tp_rank].flatten(dim, dim + 1))
    return torch.cat(pieces, dim).clone()


# ---- Collectives with a backward of their own ----------------------------------------------------


class FunctionalSum(torch.autograd.Function):
    """A sum over ranks by a functional collective, whose result is asynchronous."""

    @staticmethod
    def forward(ctx, x):
        return funcol.all_reduce(x, "sum", tp_group)

    @staticmethod
    def backward(ctx, grad):
        return grad


class GatherParts(torch.autograd.Function):
    """The ranks' parts along a dim, side by side; the gradient is this rank's part of it."""

    @staticmethod
    def forward(ctx, x, dim):
        ctx.dim, ctx.size = dim, x.shape[dim]
        return all_gather(x, dim)

    @staticmethod
    def backward(ctx, grad):
        return mine(grad, ctx.dim), None


class GatherEvenParts(torch.autograd.Function):
    """`GatherParts` of parts of one size, which no rank has to tell the others."""

    @staticmethod
    def forward(ctx, x, dim):
        ctx.dim, x = dim, x.contiguous()
        parts = [torch.empty_like(x) for _ in range(tp)]
        dist.all_gather(parts, x, group=tp_group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, grad):
        return mine(grad, ctx.dim), None


class GatherAndReduce(torch.autograd.Function):
    """The parts side by side, for ranks that each use all of them in part."""

    @staticmethod
    def forward(ctx, x, dim):
        ctx.dim = dim
        return all_gather(x, dim)

    @staticmethod
    def backward(ctx, grad):
        return mine(all_reduce(grad), ctx.dim), None


class TakePart(torch.autograd.Function):
    """This rank's part of a tensor that all have."""

    @staticmethod
    def forward(ctx, x, dim):
        ctx.dim = dim
        return mine(x, dim)

    @staticmethod
    def backward(ctx, grad):
        return all_gather(grad, ctx.dim), None


class ReduceAndScatter(torch.autograd.Function):
    """This rank's part of the sum of partial results."""

    @staticmethod
    def forward(ctx, x, dim):
        ctx.dim = dim
        return mine(all_reduce(x), dim)

    @staticmethod
    def backward(ctx, grad):
        return all_gather(grad, ctx.dim), None


class GatherRows(torch.autograd.Function):
    """The rows of all data-parallel ranks; the gradient of this rank's is a sum over the ranks."""

    @staticmethod
    def forward(ctx, x):
        rows = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dp)]
        dist.all_gather(rows, x.contiguous(), group=dp_group)
        return torch.cat(rows)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=dp_group)
        return grad.chunk(dp)[dp_rank]


register_function(TakePart, gradient="whole")


def all_reduce(x):
    x = x.contiguous().clone()
    dist.all_reduce(x, group=tp_group)
    return x


def all_gather(x, dim):
    """Of parts as `share` makes them."""
    x = x.movedim(dim, 0).contiguous()
    sizes = [torch.zeros(1, dtype=torch.long) for _ in range(tp)]
    dist.all_gather(sizes, torch.tensor([x.shape[0]]), group=tp_group)
    most = max(int(size) for size in sizes)
    padded = x.new_zeros(most, *x.shape[1:])
    padded[: x.shape[0]] = x
    parts = [torch.empty_like(padded) for _ in range(tp)]
    dist.all_gather(parts, padded, group=tp_group)
    whole = torch.cat([part[: int(size)] for part, size in zip(parts, sizes)])
    return whole.movedim(0, dim)


def mine(x, dim):
    return x.tensor_split(tp, dim)[tp_rank].contiguous()


def copy_to(x):
    return models.CopyToRanks.apply(x, tp_group) if tp > 1 else x


def reduce_from(x):
    return models.SumOverRanks.apply(x, tp_group) if tp > 1 else x


def functional_sum(x):
    return FunctionalSum.apply(x) if tp > 1 else x


def sum_in_place(x):
    """Without a gradient, as code for inference does it."""
    if tp > 1:
        dist.all_reduce(x, group=tp_group)
    return x


def sum_in_two_steps(x):
    """Over pairs of ranks, then across the pairs."""
    return TwoSteps.apply(x) if tp == 4 else reduce_from(x)


class TwoSteps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        for group in subgroups():
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def subgroups():
    """My pair of neighbours, then my pair across: made once for each process."""
    if not hasattr(dist, "_fuzz_pairs"):
        pairs = [[0, 1], [2, 3], [0, 2], [1, 3]]
        made = [dist.new_group(pair) for pair in pairs]
        dist._fuzz_pairs = [g for g, pair in zip(made, pairs) if dist.get_rank() in pair]
    return dist._fuzz_pairs


def max_over_ranks(x):
    if tp > 1:
        x = x.contiguous().clone()
        dist.all_reduce(x, dist.ReduceOp.MAX, group=tp_group)
    return x


def gather(x, dim):
    return GatherParts.apply(x, dim) if tp > 1 else x


def gather_even(x, dim):
    return GatherEvenParts.apply(x, dim) if tp > 1 else x


def gather_tensor(x, dim):
    """By the functional collective, which knows no gradient here."""
    return funcol.all_gather_tensor(x.contiguous(), dim, tp_group) if tp > 1 else x


def gather_and_reduce(x, dim):
    return GatherAndReduce.apply(x, dim) if tp > 1 else x


def gather_rows(x):
    return GatherRows.apply(x) if dp > 1 else x


def take_part(x, dim):
    return TakePart.apply(x, dim) if tp > 1 else x


def reduce_and_scatter(x, dim):
    return ReduceAndScatter.apply(x, dim) if tp > 1 else x


# ---- Layers by hand ------------------------------------------------------------------------------


class Column(nn.Module):
    """A linear layer of which each rank has some output features, of each of its ``parts``."""

    def __init__(self, inner, outer, seed, bias=True, unit=1, parts=1, init="", copies=True):
        super().__init__()
        full = weight(outer, inner, seed=seed, init=init, cut=0)
        self.weight = nn.Parameter(my_part(full, 0, unit, parts))
        self.bias = None
        if bias:
            full = weight(outer, seed=seed + 1, init=init, cut=0)
            self.bias = nn.Parameter(my_part(full, 0, unit, parts))
        self.copies = copies
        if states and parts == 1:
            self.in_features, self.out_features = inner, outer
        elif states:  # sizes say nothing of parts: Megatron's marks do
            for parameter in self.parameters():
                parameter.tensor_model_parallel = True
                parameter.partition_dim, parameter.partition_stride = 0, parts

    def forward(self, x):
        return F.linear(copy_to(x) if self.copies else x, self.weight, self.bias)


class Heads(nn.Module):
    """Features as heads, of a size that is stated."""

    def __init__(self, heads, head_dim):
        super().__init__()
        self.heads, self.head_dim = heads, head_dim

    def forward(self, x):
        return x.view(*x.shape[:2], self.heads, self.head_dim).transpose(1, 2)


class Row(nn.Module):
    """A linear layer of which each rank has some input features.

    ``ending``: what becomes of the partial sums.
    """

    def __init__(self, inner, outer, seed, bias=True, unit=1, init="", ending=reduce_from):
        super().__init__()
        full = weight(outer, inner, seed=seed, init=init, cut=1)
        self.weight = nn.Parameter(my_part(full, 1, unit))
        self.bias = nn.Parameter(weight(outer, seed=seed + 1)) if bias else None
        self.ending = ending
        if states:
            self.in_features, self.out_features = inner, outer

    def forward(self, x):
        h = self.ending(F.linear(x, self.weight))
        return h if self.bias is None else h + self.bias


class VocabEmbedding(nn.Module):
    """Each rank has some rows of the table; other ids give zeros, and the ranks add theirs."""

    def __init__(self, words, width, seed, init=""):
        super().__init__()
        self.weight = nn.Parameter(my_part(weight(words, width, seed=seed, init=init, cut=0), 0))
        self.start = sum(share(words, rank) for rank in range(tp_rank))
        if states:
            self.num_embeddings, self.embedding_dim = words, width

    def forward(self, ids):
        ids = ids - self.start
        other = (ids < 0) | (ids >= len(self.weight))
        h = F.embedding(ids.masked_fill(other, 0), self.weight)
        return reduce_from(h.masked_fill(other[..., None], 0))


class SplitNorm(nn.Module):
    """A layer norm on rows of a tensor that tp splits elsewhere; its weights are whole.

    ``copies``: their gradients are summed here; else each rank keeps its partial gradient.
    """

    def __init__(self, width, seed, copies=True):
        super().__init__()
        self.weight = nn.Parameter(weight(width, seed=seed))
        self.copies = copies

    def forward(self, x):
        scale = copy_to(self.weight) if self.copies else self.weight
        return F.layer_norm(x, (x.shape[-1],), scale)


def linear(inner, outer, seed, bias=True, init=""):
    """torch's own layer; frameworks split it."""
    layer = nn.Linear(inner, outer, bias=bias, dtype=torch.float64)
    fill(layer, seed, init)
    return layer


def fill(module, seed, init=""):
    """Give every parameter of torch's own module its value."""
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.copy_(weight(*parameter.shape, seed=seed + index, init=init, cut=0))
    return module.double()


class Several(nn.Module):
    """Takes two tensors and gives two, in a tuple with a dict."""

    def forward(self, x, other):
        return x * 1.5, {"sum": x + other, "none": x.new_ones(1)}


# ---- Collectives without a gradient --------------------------------------------------------------


def next_part(x, dim, size):
    if tp == 1:
        return x.roll(-size, dim)
    parts = [torch.empty_like(x).contiguous() for _ in range(tp)]
    dist.all_gather(parts, x.contiguous(), group=tp_group)
    return parts[(tp_rank + 1) % tp]


def swap_parts(x, source, target):
    """Split along ``source`` before, along ``target`` after."""
    if tp == 1:
        return x
    sent = torch.stack(x.chunk(tp, target)).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=tp_group)
    return torch.cat(received.unbind(0), source)


def from_rank_0(x):
    if tp > 1:
        x = x.contiguous().clone()
        dist.broadcast(x, group_src=0, group=tp_group)
    return x

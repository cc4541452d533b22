"""What operations make of a split, checked on the values: the operation on every rank's shard must
give the shards, by the placement that the rule tells, of the operation on the full tensor.
"""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from flex_model.distributed import propagation
from flex_model.distributed.layout import Partial, Replicate, Shard, ShardLayout
from flex_model.distributed.propagation import AxisPlace, Cut

RANKS = 2


def shard_of(full, place, rank, ranks=RANKS):
    """This rank's part of ``full``; of a partial sum, what adds up to it."""
    if isinstance(place, Replicate):
        return full.clone()
    if isinstance(place, Partial):
        return full * (0.25 if rank == 0 else 0.75 / (ranks - 1))
    pieces = []
    for part in full.chunk(place.parts, place.dim):
        pieces.append(part.tensor_split(ranks, place.dim)[rank])
    return torch.cat(pieces, place.dim)


def joined(shards, place):
    """The full tensor of the ranks' shards, by the library's own layout."""
    if isinstance(place, Partial):
        return sum(shards)
    if isinstance(place, Replicate):
        return shards[0]
    shapes = [tuple(shard.shape) for shard in shards]
    plan = ShardLayout(tp=place).plan(shapes, 1, len(shards), shards[0].element_size())
    data = plan.assemble([shard.contiguous().numpy() for shard in shards])
    return torch.frombuffer(bytearray(data), dtype=shards[0].dtype).view(plan.full_sizes)


class Follow(TorchDispatchMode):
    """One rank's operations, with the placements of all tensors by identity."""

    def __init__(self, rank, ranks=RANKS):
        super().__init__()
        self.axis = AxisPlace(rank, ranks)
        self.places = {id(CONV): Replicate(), id(INDEX): Replicate()}
        self.kept = []

    def know(self, tensor, place):
        self.places[id(tensor)] = place
        self.kept.append(tensor)
        return tensor

    def place(self, tensor):
        return self.places.get(id(tensor), Replicate() if tensor.dim() == 0 else None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        outputs = [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor)]
        found = propagation.after(func, args, kwargs or {}, outputs, self.place, self.axis)
        for output, place in zip(outputs, found):
            self.know(output, place)
        return result


def followed(operation, fulls, places, ranks=RANKS):
    """The placements of the operation's result on each rank, its shards, and the full result."""
    shards, found = [], []
    for rank in range(ranks):
        follow = Follow(rank, ranks)
        inputs = [
            follow.know(shard_of(full, place, rank, ranks), place)
            for full, place in zip(fulls, places)
        ]
        with torch.no_grad(), follow:
            result = operation(*inputs)
        shards.append(result)
        found.append(follow.place(result))
    return found, shards, operation(*fulls)


def check(operation, fulls, places, expected=..., ranks=RANKS):
    found, shards, full = followed(operation, fulls, places, ranks)
    assert all(place == found[0] for place in found), found
    if expected is not ...:
        assert found[0] == expected
    if found[0] is not None and not isinstance(found[0], Cut):
        torch.testing.assert_close(joined(shards, found[0]), full)
    return found[0]


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


R, P = Replicate(), Partial()
X, CONV, INDEX = random(4, 6, 8), random(5, 6, 3), torch.tensor([3, 1])

UNARY = {
    "transpose": (lambda x: x.transpose(1, 2), Shard(2), Shard(1)),
    "permute": (lambda x: x.permute(2, 0, 1), Shard(2), Shard(0)),
    "t": (lambda x: x[0].t(), Shard(2), Shard(0)),
    "unsqueeze": (lambda x: x.unsqueeze(1), Shard(2), Shard(3)),
    "squeeze": (lambda x: x[:, :1].squeeze(1), Shard(2), Shard(1)),
    "expand": (lambda x: x[:, None].expand(4, 3, 6, x.shape[2]), Shard(2), Shard(3)),
    "clone": (lambda x: x.clone(), Shard(1), Shard(1)),
    "gelu": (F.gelu, Shard(2), Shard(2)),
    "softmax along another dim": (lambda x: x.softmax(1), Shard(2), Shard(2)),
    "softmax along the dim": (lambda x: x.softmax(2), Shard(2), None),
    "layer norm": (lambda x: F.layer_norm(x, (8,)), Shard(1), Shard(1)),
    "layer norm over the dim": (lambda x: F.layer_norm(x, x.shape[2:]), Shard(2), None),
    "mean over another dim": (lambda x: x.mean(1), Shard(2), Shard(1)),
    "mean over the dim": (lambda x: x.mean(2), Shard(2), None),
    "sum over the dim": (lambda x: x.sum(2), Shard(2), P),
    "sum over another dim": (lambda x: x.sum(0), Shard(2), Shard(1)),
    "count over the dim": (lambda x: x.count_nonzero(2), Shard(2), P),
    "count over all": (lambda x: x.count_nonzero(), Shard(2), P),
    "count over another dim": (lambda x: x.count_nonzero(1), Shard(2), Shard(1)),
    "count of a sum": (lambda x: x.count_nonzero(1), P, None),
    "cumsum along the dim": (lambda x: x.cumsum(2), Shard(2), None),
    "cumsum along another dim": (lambda x: x.cumsum(1), Shard(2), Shard(2)),
    "sort along the dim": (lambda x: x.sort(2)[0], Shard(2), None),
    "sort along the last dim": (lambda x: x.sort()[0], Shard(2), None),
    "topk along another dim": (lambda x: x.topk(2, 2)[0], Shard(1), Shard(1)),
    "flip along the dim": (lambda x: x.flip(2), Shard(2), None),
    "roll along another dim": (lambda x: x.roll(1, 0), Shard(2), Shard(2)),
    "roll along the dim": (lambda x: x.roll(1, 2), Shard(2), None),
    "roll over all": (lambda x: x.roll(1), Shard(2), None),
    "tril of other dims": (lambda x: x.tril(), Shard(0), None),
    "tril of the dim": (lambda x: x.tril(), Shard(2), None),
    "argmax": (lambda x: x.argmax(2), Shard(2), None),
    "select another dim": (lambda x: x.select(0, 1), Shard(2), Shard(1)),
    "narrow another dim": (lambda x: x.narrow(1, 2, 3), Shard(2), Shard(2)),
    "index of another dim": (lambda x: x[:, INDEX], Shard(2), Shard(2)),
    "index_select": (lambda x: x.index_select(1, INDEX), Shard(2), Shard(2)),
    "index_select along the dim": (lambda x: x.index_select(2, INDEX), Shard(2), None),
    "scalar multiple of a sum": (lambda x: x * 2.0, P, P),
    "function of a sum": (torch.tanh, P, None),
    "sum moved": (lambda x: x.transpose(0, 1), P, P),
    "gate and up": (lambda x: x.chunk(2, -1)[0], Shard(2, 2), Shard(2)),
    "gated": (lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], Shard(2, 2), Shard(2)),
    "half of a plain shard": (lambda x: x.chunk(2, -1)[0], Shard(2), None),
    "pad along the dim": (lambda x: F.pad(x, (1, 1)), Shard(2), None),
    "pad along another dim": (lambda x: F.pad(x, (0, 0, 1, 1)), Shard(2), Shard(2)),
    "repeat along the dim": (lambda x: x.repeat(1, 1, 2), Shard(2), None),
    "unfold along the dim": (lambda x: x.unfold(2, 2, 2), Shard(2), None),
    "diagonal with the dim": (lambda x: x.diagonal(0, 1, 2), Shard(2), None),
    "norm over the dim": (lambda x: torch.linalg.vector_norm(x, dim=2), Shard(2), None),
    "logsumexp over the dim": (lambda x: x.logsumexp(2), Shard(2), None),
    "var over all": (lambda x: x.var(), Shard(2), None),
    "complex numbers": (
        lambda x: torch.view_as_complex(x.view(4, -1, 4, 2)).abs(),
        Shard(1),
        Shard(1),
    ),
    "repeat along another dim": (lambda x: x.repeat(2, 1, 1), Shard(2), Shard(2)),
    "convolution over positions": (lambda x: F.conv1d(x, CONV, padding=1), Shard(2), None),
    "pooling of positions": (lambda x: F.avg_pool1d(x, 3, 1, 1), Shard(2), None),
    "glu along the dim": (lambda x: F.glu(x, 2), Shard(2), None),
    "glu along another dim": (lambda x: F.glu(x, 0), Shard(2), Shard(2)),
}


@pytest.mark.parametrize("name", UNARY)
def test_operations_of_one_tensor(name):
    operation, place, expected = UNARY[name]
    found = check(operation, [X], [place])
    assert found == expected or (found is None and "index" in name)


W, V = random(8, 10), random(10, 8)

SEVERAL = {
    "columns": (lambda x, w: x @ w, [X, W], [R, Shard(1)], Shard(2)),
    "rows": (lambda x, w: x @ w, [X, W], [Shard(2), Shard(0)], P),
    "batch": (lambda x, w: x @ w, [X, W], [Shard(0), R], Shard(0)),
    "tokens": (lambda x, w: F.linear(x, w.t()), [X, W], [Shard(1), R], Shard(1)),
    "column bias": (
        lambda x, w, b: F.linear(x, w.t(), b),
        [X, W, random(10)],
        [R, Shard(1), Shard(0)],
        Shard(2),
    ),
    "row bias on every rank": (
        lambda x, w, b: F.linear(x, w.t(), b),
        [X, W, random(10)],
        [Shard(2), Shard(0), R],
        None,
    ),
    "columns without parts": (
        lambda x, w: x @ w,
        [X, random(8, 12)],
        [R, Shard(1, 2)],
        Shard(2, 2),
    ),
    "sum of products": (lambda x, w: x @ w, [X, W], [P, R], P),
    "product of sums": (lambda x, w: x @ w, [X, W], [P, P], None),
    "bmm over heads": (
        torch.bmm,
        [random(4, 3, 5), random(4, 5, 2)],
        [Shard(0), Shard(0)],
        Shard(0),
    ),
    "bmm of sequences": (torch.bmm, [random(4, 6, 5), random(4, 5, 2)], [Shard(1), R], Shard(1)),
    "add": (torch.add, [X, X.flip(0)], [Shard(2), Shard(2)], Shard(2)),
    "bias": (torch.add, [X, random(8)], [Shard(2), Shard(0)], Shard(2)),
    "mask": (torch.add, [X, random(4, 6, 1)], [Shard(2), R], Shard(2)),
    "sum of sums": (torch.add, [X, X.flip(0)], [P, P], P),
    "sum and whole": (torch.add, [X, X.flip(0)], [P, R], None),
    "scaled sum": (torch.mul, [X, X.flip(0)], [P, R], P),
    "cat along another dim": (
        lambda a, b: torch.cat([a, b], 0),
        [X, X],
        [Shard(2), Shard(2)],
        Shard(2),
    ),
    "cat along the dim": (
        lambda a, b: torch.cat([a, b], 2),
        [X, X.flip(0)],
        [Shard(2), Shard(2)],
        Shard(2, 2),
    ),
    "stack": (lambda a, b: torch.stack([a, b], 1), [X, X], [Shard(2), Shard(2)], Shard(3)),
    "embedding of features": (
        F.embedding,
        [torch.tensor([[1, 3], [2, 0]]), W],
        [R, Shard(1)],
        Shard(2),
    ),
    "embedding of batch": (
        F.embedding,
        [torch.tensor([[1, 3], [2, 0]]), W],
        [Shard(0), R],
        Shard(0),
    ),
    "attention over heads": (
        F.scaled_dot_product_attention,
        [random(2, 4, 6, 8)] * 3,
        [Shard(1)] * 3,
        Shard(1),
    ),
    "attention, keys split": (
        F.scaled_dot_product_attention,
        [random(2, 4, 6, 8)] * 3,
        [R, Shard(2), Shard(2)],
        None,
    ),
    "attention, queries split": (
        F.scaled_dot_product_attention,
        [random(2, 4, 6, 8)] * 3,
        [Shard(2), R, R],
        Shard(2),
    ),
    "convolution of channels": (
        F.conv1d,
        [random(2, 3, 7), random(4, 3, 2)],
        [R, Shard(0)],
        Shard(1),
    ),
    "convolution over channels": (
        F.conv1d,
        [random(2, 4, 7), random(6, 4, 2)],
        [Shard(1), Shard(1)],
        None,
    ),
    "where": (torch.where, [X > 0, X, X.flip(0)], [Shard(2), Shard(2), Shard(2)], Shard(2)),
    "masked fill": (lambda x, m: x.masked_fill(m, 0.0), [X, X > 0], [Shard(1), Shard(1)], Shard(1)),
    "complex": (torch.complex, [X, X.flip(0)], [Shard(2), Shard(2)], Shard(2)),
    "polar": (torch.polar, [X, X.flip(0)], [Shard(1), Shard(1)], Shard(1)),
    "complex of sums": (torch.complex, [X, X], [P, P], None),
    "prelu": (F.prelu, [X, random(1)], [Shard(2), R], Shard(2)),
    "outer product": (torch.outer, [random(4), random(6)], [R, Shard(0)], Shard(1)),
    "index add": (
        lambda x, s: x.index_add(0, torch.tensor([1, 2, 0, 3]), s),
        [X, X],
        [Shard(2), Shard(2)],
        Shard(2),
    ),
    "copy": (lambda x, s: x.clone().copy_(s), [X, X.flip(0)], [Shard(2), Shard(2)], Shard(2)),
    "gather along another dim": (
        lambda x, i: x.gather(0, i),
        [X, X.argsort(0)],
        [Shard(2), Shard(2)],
        Shard(2),
    ),
    "split in two ways": (torch.add, [random(4, 4), random(4, 4)], [Shard(0), Shard(1)], None),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_operations_of_several_tensors(name):
    operation, fulls, places, expected = SEVERAL[name]
    if name == "split in two ways":
        shards = [random(2, 4), random(2, 4)]
        follow = Follow(0)
        for shard, place in zip(shards, places):
            follow.know(shard, place)
        with follow:
            assert follow.place(operation(*shards)) == expected
        return
    check(operation, fulls, places, expected)


# ---- Slices that may be this rank's own part -----------------------------------------------------


def test_a_rank_that_takes_its_own_slice_may_hold_a_part():
    for rank in range(4):
        follow = Follow(rank, 4)
        x = follow.know(random(2, 8), R)
        with follow:
            assert follow.place(x[:, 2 * rank : 2 * rank + 2]) == Cut(Shard(1))
            assert follow.place(x.chunk(4, 1)[rank]) == Cut(Shard(1))
            assert follow.place(x.narrow(1, rank // 2 * 4, 4)) == Cut(Shard(1, pieces=2, stride=2))
            assert follow.place(x[:, 1:3]) == R
            assert follow.place(x[:, : 2 if rank else 3]) == R
            assert follow.place(torch.cat(x.chunk(4, 1), 0)) == R
            assert follow.place(x.chunk(4, 1)[rank] * 2) == Cut(Shard(1))


# ---- Views: all that split and join dims ---------------------------------------------------------


@st.composite
def views(draw):
    """A full shape, which dim of it is split, and the same elements in another shape."""
    factors = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    split = draw(st.integers(0, len(factors) - 1))

    def grouped(sizes):
        cuts = sorted(draw(st.sets(st.integers(1, max(1, len(sizes) - 1)), max_size=3)))
        bounds = [0, *[cut for cut in cuts if cut < len(sizes)], len(sizes)]
        return [tuple(range(a, b)) for a, b in itertools.pairwise(bounds)]

    return factors, split, grouped(factors), grouped(factors)


@settings(max_examples=600, deadline=None)
@given(views())
def test_views_split_and_join_dims(case):
    """The atoms of the full tensor are grouped into dims before and after; one atom is split."""
    factors, split, before, after = case
    full_factors = list(factors)
    full_factors[split] *= RANKS
    dim = next(i for i, group in enumerate(before) if split in group)
    if before[dim][0] != split:
        return  # a split dim has its split atom first

    def shape(groups, sizes):
        return tuple(math.prod(sizes[i] for i in group) for group in groups)

    place = Shard(dim)
    found = propagation.reshaped(shape(before, factors), shape(after, factors), place)
    if found is None:
        return
    full = torch.arange(math.prod(full_factors)).view(shape(before, full_factors))
    shards = [shard_of(full, place, rank).reshape(shape(after, factors)) for rank in range(RANKS)]
    result = joined(shards, found)
    if result.shape != shape(after, full_factors):
        # One place a rank: which of the dims of size 1 is the split one, only the model knows.
        assert factors[split] == 1
        return
    assert torch.equal(result, full.view(shape(after, full_factors)))


HEADS = {
    "into heads": ((2, 5, 8), (2, 5, 2, 4), Shard(2), Shard(2)),
    "into one head a rank": ((2, 5, 4), (2, 5, 1, 4), Shard(2), None),
    "into heads by -1": ((2, 5, 4), (2, 5, -1, 4), Shard(2), Shard(2)),
    "into heads by -1, one token": ((2, 1, 4), (2, 1, -1, 4), Shard(2), Shard(2)),
    "out of heads": ((2, 5, 2, 4), (2, 5, 8), Shard(2), Shard(2)),
    "out of one head a rank": ((2, 5, 1, 4), (2, 5, 4), Shard(2), Shard(2)),
    "out of one head a rank, one token": ((2, 1, 1, 4), (2, 1, 4), Shard(2), Shard(2)),
    "heads into the batch": ((2, 3, 5, 4), (6, 5, 4), Shard(1), Shard(0, 2)),
    "one head a rank into the batch": ((2, 1, 5, 4), (2, 5, 4), Shard(1), Shard(0, 2)),
    "heads out of the batch": ((6, 5, 5), (2, 3, 5, 5), Shard(0, 2), Shard(1)),
    "one head a rank out of the batch": ((2, 5, 5), (2, 1, 5, 5), Shard(0, 2), Shard(1)),
    "tokens": ((2, 5, 4), (10, 4), Shard(1), Shard(0, 2)),
    "tokens back": ((10, 4), (2, 5, 4), Shard(0, 2), Shard(1)),
    "rows of the batch": ((2, 5, 4), (10, 4), Shard(0), Shard(0)),
    "one row of the batch": ((1, 5, 4), (5, 4), Shard(0), Shard(0)),
    "one row of the batch back": ((1, 5, 8), (1, 5, 2, 4), Shard(0), Shard(0)),
    "a mask of one row": ((1, 5), (1, 1, 1, 5), Shard(0), Shard(0)),
    "key-value groups": ((2, 3, 2, 5, 4), (2, 6, 5, 4), Shard(1), Shard(1)),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_and_tokens(name):
    before, after, place, expected = HEADS[name]
    flexible = after.index(-1) if -1 in after else None
    after = tuple(abs(size) for size in after)
    assert propagation.reshaped(before, after, place, flexible) == expected

"""What programs make of sizes, and of numbers that they read from tensors. Where a rank's own rows
give other numbers than the whole batch, the ranks still hold their rows at their place, or one
tensor that all have; what is known is what they hold together.
"""

import copy
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import models
from followed import Sites, follow, unsharded
from test_proofs import ROWS, WHOLE, compare, mesh_of

VALUES_OF_SIZES = {
    "divided": lambda x, n: x / n,
    "from a number": lambda x, n: n - x,
    "number over": lambda x, n: n / x,
    "power of a number": lambda x, n: n**x,
    "negative": lambda x, n: x * -n,
    "root": lambda x, n: x / math.sqrt(n),
    "int": lambda x, n: x * int(n),
    "float": lambda x, n: x * float(n),
    "rounded": lambda x, n: x * math.ceil(n / 2),
    "ratio": lambda x, n: x * (1 / n),
    "clamped": lambda x, n: x.clamp(max=n / 8),
    "added times": lambda x, n: torch.add(x, x, alpha=n),
    "filled": lambda x, n: x.clone().fill_(n),
    "rolled": lambda x, n: x.roll(n, 1),
    "full": lambda x, n: x * torch.full((1,), n),
    "scalar tensor": lambda x, n: x / torch.scalar_tensor(n),
    "tensor": lambda x, n: x / torch.tensor(n),
    "tensor of a float": lambda x, n: x / torch.tensor(float(n)),
    "tensor of a list": lambda x, n: x / torch.tensor([n, 2 * n, 3, 4, 5]),
    "as_tensor": lambda x, n: x / torch.as_tensor(n),
    "new_tensor": lambda x, n: x / x.new_tensor([n]),
    "where": lambda x, n: torch.where(x > 0.5, x, n),
    "read": lambda x, n: x * torch.tensor(n + 2).item(),
}


def made_of_sizes(make, size):
    return Sites(lambda m, x: m.after(make(x, size(x))), "after")


def check_held_together(found, own):
    """What is proven of the ranks' own tensors: their rows in order, or the same tensor."""
    dist.all_gather_object(of_ranks := [None, None], own.detach())
    if found.shape == own.shape:
        torch.testing.assert_close(*of_ranks)
        torch.testing.assert_close(found, own)
    else:
        torch.testing.assert_close(found, torch.cat(of_ranks))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", VALUES_OF_SIZES)
def test_values_made_of_sizes(name):
    make = VALUES_OF_SIZES[name]
    torch.manual_seed(0)
    x = torch.rand(6, 5)
    mine = x.chunk(2)[dist.get_rank()]
    for size in (lambda x: x.shape[0], lambda x: x.size(0), len, torch.Tensor.numel):
        model = made_of_sizes(make, size)
        found, _, _ = follow(model, mesh_of(dp_size=2), [mine], [ROWS])
        check_held_together(found["after"][0], model(mine))
    for size in (lambda x: x.shape[1], lambda x: len(x[0])):
        model = made_of_sizes(make, size)
        found, _, _ = follow(model, mesh_of(dp_size=2), [mine], [ROWS])
        compare(found, unsharded(model, [x]))


SUMS = {  # over the split dim, and whether a site may hold them
    "by own size": (lambda x, n: x.sum(0) / n, False),
    "by one over own size": (lambda x, n: (1 / n) * x.sum(0), False),
    "by own number of elements": (lambda x, n: x.sum(0).div_(n * x.shape[1]), False),
    "by an expression that has no value": (lambda x, n: x.sum(0) * (n // (n - n + 1)), False),
    "added times own size": (lambda x, n: torch.add(x.sum(0), x.sum(0), alpha=n), False),
    "a product by own size": (lambda x, n: torch.addmm(x.mT @ x, x.mT, x, alpha=1 / n), False),
    "by another size": (lambda x, n: x.sum(0) / x.shape[1] * 7 + x.sum(0) / 1.7, True),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("axis", ["dp", "tp"])
@pytest.mark.parametrize("name", SUMS)
def test_sums_that_are_scaled_by_sizes(name, axis):
    """A sum over the ranks, of which each scales by its own size, is not known before they meet:
    it was taken for a part of the full sum.
    """
    make, is_known = SUMS[name]
    x = models.random(6, 5)

    def synced(m, x):
        own = m.own(make(x, size(x)))
        dist.all_reduce(mean := own.clone())
        return m.after(x * mean.sum())

    sizes = [lambda x: x.shape[0]] + [len, lambda x: float(x[:, 0].numel())] * (axis == "dp")
    for size in sizes if "no value" not in name else sizes[:1]:
        mine, model = x.chunk(2)[dist.get_rank()], Sites(synced, "own after")
        placement = ROWS if axis == "dp" else ROWS[::-1]
        found, _, _ = follow(model, mesh_of(**{f"{axis}_size": 2}), [mine], [placement])
        (own,), (after,) = found["own"], found["after"]
        assert (own is not None) == is_known
        if own is not None:
            torch.testing.assert_close(own, make(x, size(x)))
        check_held_together(after, model(mine))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_sums_that_are_scaled_by_plain_numbers(rows):
    """One that is no multiple of the rows; with one row a rank, one that is not whole."""
    x = models.random(2 * rows, 5)
    lines = {"whole": lambda x: x.sum(0) * 6, "root": lambda x: x.sum(0) * 5**-0.5}
    model = Sites(lambda m, x: m.whole(lines["whole"](x)) + m.root(lines["root"](x)), "whole root")
    found, _, _ = follow(model, mesh_of(dp_size=2), [x.chunk(2)[dist.get_rank()]], [ROWS])
    compare(found, unsharded(model, [x]), {"whole", ""})


# ---- Calls that take their number for something else than an operation inside of them does ------

X = models.random(4, 5, 8)  # two rows a rank


def made(make):
    """What is made of the input, by this model's weights."""
    linear = models.seeded(nn.Linear, 8, 8).double()
    return Sites(lambda m, x: m.made(make(m, x)), "made", linear=linear)


def proven(make, x=X):
    """On two data-parallel ranks, of which each has its rows; None for nothing."""
    mine = x.chunk(2)[dist.get_rank()]
    found, _, _ = follow(made(make), mesh_of(dp_size=2), [mine], [ROWS])
    return found["made"][0]


def check_made(make, x=X):
    """What is known of the result is what ranks hold together; return whether it is known."""
    found = proven(make, x)
    if found is not None:
        check_held_together(found, made(make)(x.chunk(2)[dist.get_rank()]))
    return found is not None


def written(x, index, number):
    copied = x.clone()
    copied[index] = number
    return copied


UNKNOWN = {  # by numbers that the whole batch would not pass, and what becomes no number
    "narrow", "tensor_split", "a slice", "split, beside an equal dim",
    "a slice, beside an equal one", "a place, beside others", "unfold", "one of two, broadcast",
    "a size of a list", "a size of a length", "an array", "the smaller number",
    "tile", "stacked", "joined", "one for each part",
}  # fmt: skip
COUNTS = {
    "narrow": lambda m, x: x.narrow(1, 0, x.shape[0]),
    "tile": lambda m, x: x.tile(1, x.shape[0], 1),
    "chunk": lambda m, x: x.chunk(x.shape[0], -1)[0],
    "tensor_split": lambda m, x: x.tensor_split(x.shape[0], -1)[0],
    "adaptive pooling": lambda m, x: F.adaptive_avg_pool1d(x, x.shape[0]),
    "pooling": lambda m, x: F.avg_pool1d(x, x.shape[0]),
    "differences": lambda m, x: x.diff(x.shape[0], 1),
    "a transform": lambda m, x: torch.fft.fft(x, n=x.shape[0], dim=2).real,
    "broadcast_to": lambda m, x: torch.broadcast_to(m.linear.bias, (3 * x.shape[0], 8)),
    "a slice": lambda m, x: x[:, : x.shape[0]],
    "split, beside an equal dim": lambda m, x: x.split(x.shape[0], 2)[0],
    "a slice, beside an equal one": lambda m, x: x[:, : x.shape[0], :2],
    "a place, beside others": lambda m, x: x[:, x.shape[0] - 1, 1],
    "unfold": lambda m, x: x.unfold(2, x.shape[0], 1),
    "stacked": lambda m, x: torch.stack([m.linear.bias] * x.shape[0]),
    "joined": lambda m, x: torch.cat([m.linear.bias[None]] * x.shape[0]),
    "a list's length": lambda m, x: torch.tensor([1.0] * (3 * x.shape[0])),
    "a list of lengths": lambda m, x: torch.tensor([0] + [x.shape[1]] * x.shape[0]).cumsum(0),
    # Slices that take all of a dim on a rank, so that torch leaves them out.
    "rows, of all dims": lambda m, x: x[:2, ...],
    "rows that are set": lambda m, x: written(x, slice(2), 0),
    "from none of the rows": lambda m, x: x[:, x.shape[0] - 2 :],
    "a step of one row": lambda m, x: m.linear.weight[:: x.shape[0] - 1],
    # Elements that are written.
    "written": lambda m, x: written(x, (slice(None), 0), x.shape[0]),
    "a ratio, written": lambda m, x: written(x, (slice(None), 0), 1 / x.shape[0]),
    "written by a mask": lambda m, x: written(x, x > 0, x.shape[0]),
    # Numbers that are the default.
    "a factor of one": lambda m, x: torch.add(x, x, alpha=x.shape[0] - 1),
    "a slope of one": lambda m, x: F.elu(x, alpha=x.shape[0] - 1),
    "the main diagonal": lambda m, x: m.linear.weight.tril(x.shape[0] - 2),
    # An int where a float is expected.
    "a bound": lambda m, x: F.huber_loss(x, x * 3, reduction="none", delta=x.shape[0]),
    "a scale": lambda m, x: F.interpolate(x, scale_factor=x.shape[0]),
    "no number": lambda m, x: (x * torch.nan).nan_to_num(nan=x.shape[0]),
    "an imaginary part": lambda m, x: x * complex(0.0, float(x.shape[0])),
    # Dims.
    "a sum's dim": lambda m, x: x.sum(x.shape[0] - 1),
    "a joint's dim": lambda m, x: torch.cat([x, x], x.shape[0] // 2),
    # What else is as long as there are rows.
    "a split's length": lambda m, x: x / len(x.split(1)),
    "one for each part": lambda m, x: torch.stack([m.linear.bias for _ in x.split(1)]),
    "a copy": lambda m, x: x / copy.copy(x.shape[0]),
    "a deep copy": lambda m, x: x / copy.deepcopy(x.shape[0]),
    "a storage": lambda m, x: x * x.untyped_storage().nbytes(),
    "one of two, broadcast": lambda m, x: torch.broadcast_tensors(x[0], x)[0],
    "a place in a dict": lambda m, x: x * {2: 1.0, 4: 3.0}[x.shape[0]],
}


READ = {
    "a sum": lambda m, x: x / ((x > -9).sum().item() + 1e-6),
    "twice a sum": lambda m, x: x / (2 * (x > -9).sum().item()),
    "a list": lambda m, x: x / sum((x > -9).sum((1, 2)).tolist()),
    "a size of a list": lambda m, x: torch.zeros(sum((x[..., 0] > -9).sum(1).tolist()), 2),
    "a length": lambda m, x: x / (3 * len(x)),
    "an int of a size": lambda m, x: x / (2 * int(x.shape[0])),
    "a size of a length": lambda m, x: torch.ones(3 * len(x)),
    "an int of a size, written": lambda m, x: written(x, (slice(None), 0), 2 * int(x.shape[0])),
    "an int of a size in a list": lambda m, x: x / torch.tensor([3 * int(x.shape[0]), 1])[0],
    "bytes": lambda m, x: x / x.nbytes,
    "a stride": lambda m, x: x / x.transpose(0, 1).contiguous().stride(0),
    "an array": lambda m, x: x / float(x.numpy().sum()),
}


CHOICES = {
    "more than two rows": lambda m, x: x * 3 if x.shape[0] > 2 else x,
    "the smaller number": lambda m, x: x[:, : min(x.shape[0], 3)],
    "the larger number": lambda m, x: torch.zeros(max(x.shape[0], 3)),
    "four rows": lambda m, x: x * 3 if x.shape[0] in (4, 8) else x,
    "not one row": lambda m, x: x * 3 if x.shape[0] != 4 else x,
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", COUNTS | READ | CHOICES)
def test_what_is_made_with_the_number_of_rows_or_chosen_by_it(name):
    assert check_made((COUNTS | READ | CHOICES)[name]) == (name not in UNKNOWN)


@pytest.mark.ranks(2)
def test_keywords_in_another_order():
    """The number of rows was taken for that of what fills them."""

    def filled(m, x):
        return torch.full(fill_value=2.0, size=(x.shape[0], 2))

    torch.testing.assert_close(proven(filled), made(filled)(X))


WHOLE_SLICES = {
    "by its own size": lambda m, x: x[: x.shape[0], :5],
    "of the features": lambda m, x: x[..., :8],
    "behind a new dim": lambda m, x: x[None, :, :5],
    "that are set": lambda m, x: written(x, (slice(None), slice(5)), 0),
}


SAME_CHOICES = {
    "more than one row": lambda m, x: x * 3 if x.shape[0] > 1 else x,
    "features": lambda m, x: x * 3 if x.shape[2] == 8 else x,
    "the smaller number": lambda m, x: x[:, : min(x.shape[1], 3)],
    "a number of all": lambda m, x: x / x.shape[1] + torch.zeros(x.shape[0], 1, x.shape[2]),
}


def number(m, value):
    """A tensor of one number, as a layer keeps it in a buffer."""
    return m.linear.weight.new_tensor(value, dtype=torch.long)


NUMBERS_OF_TENSORS = {
    "amounts": lambda m, x: F.pad(x, (number(m, 1), number(m, 2))),
    "an amount beside a size": lambda m, x: F.pad(x, (number(m, 2), x.shape[2])),
    "what fills": lambda m, x: F.pad(x, (1, 1), value=number(m, 3)),
    "sizes": lambda m, x: x.reshape(x.shape[0], number(m, 5), number(m, 2), 4),
    "a size that equals the rows": lambda m, x: x.reshape(x.shape[0], 5, 4, number(m, 2)),
    "a size that stands first": lambda m, x: x.mT.reshape(number(m, 2), -1).view_as(x.mT),
    "a size by name": lambda m, x: x.unflatten(2, sizes=(number(m, 2), 4)),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", WHOLE_SLICES | SAME_CHOICES | NUMBERS_OF_TENSORS)
def test_slices_and_choices_that_are_those_of_the_unsharded_program_are_known(name):
    lines = (WHOLE_SLICES | SAME_CHOICES | NUMBERS_OF_TENSORS)[name]
    torch.testing.assert_close(proven(lines), made(lines)(X))


# ---- Numbers of each rank ------------------------------------------------------------------------

H = models.random(4, 6)


def on_each(x, first, second):
    return second if dist.get_rank() else first


OF_RANKS = {
    # One of them is the default, which torch leaves out of the call: that of rank 0 was taken.
    "a diagonal": lambda m, x: x.tril(on_each(x, 0, 1)),
    "a dim": lambda m, x: x.argsort(on_each(x, -1, 0)),
    "an order": lambda m, x: x.sort(1, descending=on_each(x, False, True)).values,
    "a slope": lambda m, x: F.leaky_relu(x, on_each(x, 0.01, 1.0)),
    "a bound or none": lambda m, x: x.sigmoid().logit(on_each(x, None, 0.2)),
    "the other bound": lambda m, x: x.clamp(on_each(x, 0, None), 1),
    "a factor": lambda m, x: torch.add(x, x, alpha=on_each(x, 1, 2)),
    "a correction": lambda m, x: x.std(1, correction=on_each(x, 1, 0)),
    "a norm": lambda m, x: x.norm(on_each(x, 2, 1), 1),
    "a step": lambda m, x: x[:: on_each(x, 1, 2)],
    "a word": lambda m, x: F.gelu(x, approximate=on_each(x, "none", "tanh")),
    "decimals": lambda m, x: x.round(decimals=on_each(x, 0, 1)),
    "training": lambda m, x: F.dropout(x, 0.5, training=on_each(x, False, True)),
    # Tensors that were made of Python's numbers.
    "a constant": lambda m, x: x * torch.tensor(on_each(x, 1.0, 2.0)),
    "a list": lambda m, x: x * torch.tensor(on_each(x, [0] * 6, [1] * 6)),
    "an array": lambda m, x: x * torch.from_numpy(np.ones(6) * on_each(x, 1, 2)),
    "a choice": lambda m, x: torch.where(torch.tensor(on_each(x, True, False)), x, -x),
    "an index": lambda m, x: x.index_fill(0, torch.tensor([on_each(x, 0, 1)]), 0.0),
    # It was taken for a share, since 0 and 1 add up to 1.
    "a factor of 0 or 1": lambda m, x: x * on_each(x, 0, 1),
    "an amount of a tensor": lambda m, x: F.pad(x, (torch.tensor(on_each(x, 0, 1)), 0)),
    "several of one dim": lambda m, x: x.roll(on_each(x, (1,), (1, 1)), on_each(x, (1,), (0, 1))),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", OF_RANKS)
def test_what_ranks_pass_unlike_is_not_known(name):
    found, _, _ = follow(made(OF_RANKS[name]), mesh_of(tp_size=2), [H], [WHOLE])
    assert found["made"] == [None]


WINDOWS = {  # of (2, 4, 8), by ``n``, which may be the number of ranks
    "patches": lambda x, b, h, w, n: x.view(b, h // n, 2, w // n, 2),
    "of two sizes": lambda x, b, h, w, n: x.reshape(b, h // n, 2, w // 4 // n, 8),
    "rounded": lambda x, b, h, w, n: x.view(b, int(h / n), 2, int(w / n), 2),
    "one dim": lambda x, b, h, w, n: x.unflatten(2, (w // n // n, 4)),
}
OTHER_SHARES = {  # shapes that differ where ``n`` is 1
    "the rest": lambda x, b, h, w, n: x.view(b, h // n, -1, w // n),
    "a number over a share": lambda x, b, h, w, n: x.view(b, h // n, 8 // (h // n), 4),
    "less a share": lambda x, b, h, w, n: x.view(b, h // n, 6 - h // n, 4),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", WINDOWS)
def test_windows_of_a_whole_tensor_by_the_number_of_ranks(name):
    """None of these sizes can be smaller in the unsharded program, so none is larger. (They were
    not known.)
    """
    model, x = made(lambda m, x: WINDOWS[name](x, *x.shape, 2)), torch.rand(2, 4, 8)
    found, _, _ = follow(model, mesh_of(tp_size=2), [x], [WHOLE])
    compare(found, unsharded(model, [x]))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", OTHER_SHARES)
def test_shares_of_a_whole_tensor_that_may_be_smaller_are_not_known(name):
    x = torch.rand(2, 4, 8)
    model = made(lambda m, x: OTHER_SHARES[name](x, *x.shape, 2))
    found, _, _ = follow(model, mesh_of(tp_size=2), [x], [WHOLE])
    assert found["made"] == [None]


COUNTED = {
    "numbers": lambda n, start: torch.arange(n) + start,
    "floats": lambda n, start: torch.arange(n).double() + start,
    "between": lambda n, start: torch.arange(start, start + n),
    "an embedding's place": lambda n, start: (torch.arange(n) + start) * 2,
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", COUNTED)
def test_numbers_that_go_on_from_rank_to_rank(name):
    """As many numbers as the split dim has on a rank, from where the rank's part begins. Refused
    before, as sequence parallelism and slopes of heads have them.
    """

    def counted(m, x):
        shard = x.chunk(2, 1)[dist.get_rank()]
        return COUNTED[name](shard.shape[1], dist.get_rank() * shard.shape[1])

    found, _, _ = follow(made(counted), mesh_of(tp_size=2), [H], [WHOLE])
    torch.testing.assert_close(found["made"], [COUNTED[name](H.shape[1], 0)])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("count, by", [(3, 0), (3, 2), (3, 4), (6, 6)])
def test_numbers_that_do_not_go_on_from_rank_to_rank_are_not_known(count, by):
    """Of 3 columns of a rank; 6 are as long as a dim that all ranks have: the unsharded program has
    just this one.
    """

    def counted(m, x):
        shard = x.chunk(2, 1)[dist.get_rank()] if count == 3 else x
        return torch.arange(shard.shape[1]) + dist.get_rank() * by

    found, _, _ = follow(made(counted), mesh_of(tp_size=2), [H], [WHOLE])
    assert found["made"] == [None]


# ---- Layers whose sizes coincide with those of rows or shards -----------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rows", [2, 4])
def test_attention_with_as_many_heads_as_rows(rows):
    """Refused before: its heads were taken for rows."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 6, dropout=0.0, batch_first=True).double()
    x = models.random(rows, 4, 8)
    expected = unsharded(layer, [x])
    mine = x.chunk(2)[dist.get_rank()]
    found, _, _ = follow(layer, mesh_of(dp_size=2), [mine], [ROWS])
    compare(found, expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_with_states_as_wide_as_the_rows_of_a_rank(kind):
    """Refused before: states of zeros were given the rank's own size."""
    torch.manual_seed(0)
    layer, x = kind(8, 2, batch_first=True).double(), models.random(4, 5, 8)
    expected = unsharded(layer, [x])
    mine = x.chunk(2)[dist.get_rank()]
    found, _, _ = follow(layer, mesh_of(dp_size=2), [mine], [ROWS])
    torch.testing.assert_close(found[""][0], expected[""][0])


# ---- Functions of torch that run other code -----------------------------------------------------


@pytest.mark.ranks(2)
def test_a_product_written_to_memory_that_others_show():
    """What showed it was taken for the zeros that it was."""

    def product(m, x):
        target = torch.zeros(8, 8, dtype=x.dtype)
        flat = target.view(64)
        torch.matmul(x[:, 0].T, x[:, 0], out=target)
        return x * flat.sum()

    assert proven(product) is None


@torch.jit.script
def over_rows(x):
    return x / x.shape[0]


@torch.jit.script
def columns(x):
    return x[:, : x.size(0)]


@torch.jit.script
def rolled(x):
    return x.roll(x.size(0), 1)


@torch.jit.script
def zeros_of_rows(x):
    return torch.zeros(x.size(0), 3)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("script", ["over_rows", "columns", "rolled", "zeros_of_rows"])
@pytest.mark.parametrize("rows", [2, 4])
def test_numbers_that_scripts_make_of_sizes(script, rows):
    is_known = check_made(lambda m, x: globals()[script](x), X[:rows])
    assert is_known == (script != "zeros_of_rows")


@pytest.mark.ranks(2)
def test_grids_and_gradients_of_functions():
    """They crashed."""

    def grid(m, x):
        i, j = torch.meshgrid(torch.arange(5), torch.arange(8), indexing="ij")
        return x + i + j

    torch.testing.assert_close(proven(grid), made(grid)(X))
    gradient = torch.func.vmap(torch.func.grad(lambda row: (row**2).sum() / row.shape[0]))
    found = proven(lambda m, x: gradient(x))
    assert found is None or torch.equal(found, gradient(X))

"""What changes a model's path between two forwards is in the key under which layouts are
remembered. In each test the layouts of the first forward were used for the next one before, and
the records were silently wrong.
"""

import collections
import copy
import enum
import functools
from types import SimpleNamespace as Namespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

import models
import pipelines
from flex_model import FlexModel, HookFunction
from shared_edits import mixing_features

X = models.random(4, 8)


class Slots:
    """An object without a dict."""

    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value

    def __bool__(self):
        return self.value


class Along:
    """An object with a method that depends on an attribute."""

    def __init__(self, dim):
        self.dim = dim

    def softmax(self, x):
        return x.softmax(self.dim)


class Choice(enum.Enum):
    """Of which only the second is true."""

    NO, YES = range(2)

    def __bool__(self):
        return self is Choice.YES


class Takes(nn.Module):
    """What it does depends on an argument."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.front, self.head = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()

    def forward(self, x, choice):
        h = self.front(x)
        if isinstance(choice, type):
            h = choice(8).double()(h)
        elif callable(choice):
            h = choice(h)
        elif choice.any() if isinstance(choice, np.ndarray) else choice:
            h = h - h.mean(0)
        return self.head(h)


def mine(batch):
    return batch.chunk(2)[dist.get_rank()]


def compare(flex, whole, *args):
    """A forward of the whole model and one of the ranks' rows have the same result."""
    with torch.no_grad():
        expected = whole(X, *args)
        flex(mine(X), *args)
    if dist.get_rank() == 0:
        recorded = flex.output_ptr["head" if hasattr(whole, "head") else "2"]
        assert_close(recorded[0], expected)


def softmax_along(dim):
    return lambda x: x.softmax(dim)


class Upright(nn.Identity):
    def __init__(self, width=0):
        super().__init__()


class Flipped(Upright):
    def forward(self, x):
        return x.flip(0)


PARTIAL = functools.partial
PAIRS = {
    "numpy bool": (np.bool_(False), np.bool_(True)),
    "numpy int": (np.int64(0), np.int64(1)),
    "complex": (0j, 1j),
    "range": (range(0), range(1)),
    "set": (set(), {1}),
    "frozenset": (frozenset(), frozenset([1])),
    "deque": (collections.deque(), collections.deque([1])),
    "array": (np.array([0]), np.array([1])),
    "slots": (Slots(False), Slots(True)),
    "enum": (Choice.NO, Choice.YES),
    "arguments of partial": (PARTIAL(torch.softmax, dim=1), PARTIAL(torch.softmax, dim=0)),
    "function of partial": (PARTIAL(torch.softmax, dim=1), PARTIAL(torch.cumsum, dim=0)),
    "closure": (softmax_along(-1), softmax_along(-2)),
    "default": (lambda x, dim=-1: x.softmax(dim), lambda x, dim=-2: x.softmax(dim)),
    "code": (lambda x: x.softmax(-1), lambda x: x.softmax(-2)),
    "method": (Along(-1).softmax, Along(-2).softmax),
    "class": (Upright, Flipped),
    "module": (nn.Softmax(1), nn.Softmax(0)),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", PAIRS)
def test_an_argument_of_another_value_is_another_kind_of_input(name):
    flex, whole = FlexModel(Takes(), {}, data_parallel_size=2), Takes()
    flex.register_forward_hook(HookFunction("head"))
    first, second = PAIRS[name]
    with flex:
        compare(flex, whole, first)
        with pytest.raises(ValueError, match="not known"):
            compare(flex, whole, second)


MADE_ANEW = {
    "closure": lambda: softmax_along(-1),
    "code": lambda: lambda x: x.softmax(1),
    "partial": lambda: PARTIAL(torch.softmax, dim=1),
    "method": lambda: Along(1).softmax,
    "set": lambda: {3, "a", ()},
    "array": lambda: np.ones(3),
    "slots": lambda: Slots(True),
    "object": object,
    "iterator": lambda: iter([]),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", MADE_ANEW)
def test_an_argument_that_is_made_anew_at_each_call_is_the_same(name):
    """This was so before."""
    flex = FlexModel(Takes(), {}, data_parallel_size=2)
    flex.register_forward_hook(HookFunction("front"))
    with flex:
        for _ in range(3):
            flex(mine(X), MADE_ANEW[name]())
        assert flex._core.tracking.num_followed == 1


class Center(nn.Module):
    """Needs the rows of all ranks."""

    def forward(self, x):
        return x - x.mean(0)


def center(x):
    return x - x.mean(0)


CHANGES = {  # all kinds of changes: test_module_walk
    "a module replaced": lambda m: m.__setitem__(1, Center()),
    "forward set": lambda m: setattr(m[1], "forward", center),
    "pre-hook": lambda m: m[1].register_forward_pre_hook(lambda s, args: center(*args)),
}


def stack():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Identity(), nn.Linear(8, 8)).double()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_was_changed_is_followed_anew(name):
    model, whole = stack(), stack()
    flex = FlexModel(model, {}, data_parallel_size=2)
    with flex:
        flex.register_forward_hook(HookFunction("2"))
        compare(flex, whole)
        CHANGES[name](model), CHANGES[name](whole)
        with pytest.raises(ValueError, match="not known"):
            compare(flex, whole)
        assert flex._core.tracking.num_followed == 2


class Flagged(nn.Module):
    """Centers rows by its own state."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.front, self.head = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()
        self.flag, self.choice, self.steps = False, Choice.NO, [0]
        self.config = Namespace(inner=Namespace(flag=False))

    def forward(self, x):
        h = self.front(x)
        is_on = self.flag or self.choice or self.steps[0] or self.config.inner.flag
        return self.head(h - h.mean(0) if is_on else h)


STATES = {  # all kinds of attributes: test_module_walk
    "flag": lambda m: setattr(m, "flag", True),
    "enum": lambda m: setattr(m, "choice", Choice.YES),
    "item of a list": lambda m: m.steps.__setitem__(0, 1),
    "attribute of a nested object": lambda m: setattr(m.config.inner, "flag", True),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", STATES)
def test_a_model_whose_attributes_changed_is_followed_anew(name):
    """Silently wrong before: only ``follow="always"`` followed such a model."""
    model, whole = Flagged(), Flagged()
    with FlexModel(model, {}, data_parallel_size=2) as flex:
        flex.register_forward_hook(HookFunction("head"))
        for _ in range(2):
            compare(flex, whole)
        assert flex._core.tracking.num_followed == 1
        STATES[name](model), STATES[name](whole)
        with pytest.raises(ValueError, match="not known"):
            compare(flex, whole)


class Keeps(nn.Module):
    """Keeps a tensor as a plain attribute from forward to forward."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.front, self.head, self.how = nn.Linear(8, 8), nn.Linear(8, 8), how
        self.double()
        self.kept = None if "None" in how else torch.zeros(8).double()

    def forward(self, x):
        h = self.front(x)
        kept, center = self.kept, h.detach().mean(0)
        if "weight" in self.how:  # all ranks have the same
            center = self.front.weight.detach().mean(0)
        if kept is not None:
            kept = kept.one if isinstance(kept, Namespace) else kept
            h = h - (kept[0] if isinstance(kept, list) else kept)
        if "in place" in self.how:
            self.kept.mul_(0.9).add_(center, alpha=0.1)
        elif "replaced" in self.how:
            self.kept = self.kept * 0.9 + center * 0.1
        elif "object" in self.how:
            self.kept = Namespace(one=center)
        else:
            self.kept = [center] if "list" in self.how else center
        return self.head(h)


HOW = [
    "replaced",
    "in place",
    "None at first",
    "None at first, in a list",
    "None at first, in an object",
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", HOW)
def test_a_tensor_that_a_forward_left_in_an_attribute_is_not_known_to_the_next(how):
    flex, whole = FlexModel(Keeps(how), {}, data_parallel_size=2), Keeps(how)
    with flex:
        flex.register_forward_hook(HookFunction("head"))
        compare(flex, whole)
        with pytest.raises(ValueError, match="not known"):
            compare(flex, whole)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", HOW)
def test_a_tensor_in_an_attribute_that_all_ranks_have_stays_known(how):
    """This was so before."""
    how = f"{how}, of a weight"
    flex, whole = FlexModel(Keeps(how), {}, data_parallel_size=2), Keeps(how)
    with flex:
        flex.register_forward_hook(HookFunction("head"))
        for _ in range(5):
            compare(flex, whole)
        assert flex._core.tracking.num_followed == 2


@pytest.mark.ranks(2)
def test_a_tensor_in_an_attribute_of_a_forward_without_hooks_is_not_known():
    how = "in place, of a weight"
    flex, whole = FlexModel(Keeps(how), {}, data_parallel_size=2), Keeps(how)
    with flex:
        with flex.register_forward_hook(HookFunction("head")):
            compare(flex, whole)
        flex(mine(X))
        flex.register_forward_hook(HookFunction("head"))
        with pytest.raises(ValueError, match="not known"):
            flex(mine(X))


# ---- Lengths that grow ---------------------------------------------------------------------------


class LongIsCentered(nn.Module):
    """From some length on the rows of the batch are centered."""

    def __init__(self, longest):
        super().__init__()
        torch.manual_seed(0)
        self.longest, self.head = longest, nn.Linear(8, 8).double()

    def forward(self, x):
        return self.head(x - x.mean(0) if x.shape[1] > self.longest else x)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("longest", [5, 20])
def test_lengths_are_predicted_up_to_the_one_that_decides_otherwise(longest):
    """They were predicted whatever the model compares them with, without a word."""
    flex, whole = (
        FlexModel(LongIsCentered(longest), {}, data_parallel_size=2),
        LongIsCentered(longest),
    )
    with flex, torch.no_grad():
        flex.register_forward_hook(HookFunction("head"))
        for length in range(1, 6):
            full = torch.randn(
                4, length, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
            )
            flex(mine(full))
            if dist.get_rank() == 0:
                torch.testing.assert_close(flex.output_ptr["head"][0], whole(full))
        assert flex._core.tracking.num_followed == 2
        longer = torch.ones(4, 6, 8, dtype=torch.float64)
        if longest == 5:
            with pytest.raises(ValueError, match="not known"):
                flex(mine(longer))
        else:
            flex(mine(longer))
            assert flex._core.tracking.num_followed == 2


class LastFour(nn.Module):
    """Keeps a window of positions, which grows with the length at first."""

    columns, rows = ("up",), ("down",)

    def __init__(self):
        super().__init__()
        self.up, self.down, self.window = nn.Linear(8, 8), nn.Linear(8, 8), nn.Identity()

    def forward(self, x):
        return self.down(self.window(self.up(x)[:, -4:]))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("first, num_followed", [(1, 4), (3, 3)])
def test_a_window_of_positions_is_predicted_before_and_after_it_is_full(first, num_followed):
    """It was predicted to grow on, and refused."""
    way, model, found = models.TWO_RANKS["dtensor"], models.seeded(LastFour), []
    for one, sizes, expected in (
        (copy.deepcopy(model), {"process_group": pipelines.alone_group()}, 0),
        (way.shard(model), way.sizes, num_followed),
    ):
        with FlexModel(one, records := {}, output_ranks="all", timeout=20, **sizes) as flex:
            flex.register_forward_hook(HookFunction("window", editing_function=mixing_features))
            flex.register_full_backward_hook(HookFunction("window", output_name="gradient"))
            for length in range(first, 9):
                flex(models.random(2, length, 8).float()).square().sum().backward()
                found.append({name: list(kept) for name, kept in records.items()})
            assert flex._core.tracking.num_followed == expected
    half = len(found) // 2
    assert_close(found[half:], found[:half])

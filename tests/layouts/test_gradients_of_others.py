"""Gradients that others than the rules of operations have a hand in: hooks of the model's own,
``autograd.Function``s, other FlexModels, backwards inside of a forward. On 2 ranks, compared with
the unsharded model, or refused.
"""

import gc
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import models
import pipelines
from flex_model import FlexModel, HookError, HookFunction
from shared_edits import double

BATCH = models.random(4, 8)


def flex_of(model, records, axis, is_sharded, **settings):
    size = 2 if is_sharded else 1
    along = {"dp": {"data_parallel_size": size}, "tp": {"tensor_parallel_size": size}}[axis]
    group = None if is_sharded else pipelines.alone_group()
    return FlexModel(model, records, process_group=group, timeout=20, **along, **settings)


def rows(x, is_sharded):
    return x.chunk(2)[dist.get_rank()].clone() if is_sharded else x


def linears(*middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), *middle, nn.Linear(8, 8)).double()


def mixed_rows(module, full, save_ctx, modules):
    return full + 0.5 * full.flip(0).cumsum(0)


def joined(records):
    """The ranks' own records together, on rank 0: the gradients of the ranks' mean loss."""
    dist.all_gather_object(of_ranks := [None, None], records)
    return {
        site: [
            sum(each) / 2 if site.endswith("weight") else torch.cat(each) / 2
            for each in zip(*(one[site] for one in of_ranks))
        ]
        for site in records
        if dist.get_rank() == 0
    }


def check_alone_and_sharded(make, sites, x=BATCH, edited=None, is_own=False):
    """What hooks on gradients record of the model alone, they record over data-parallel ranks;
    ``edited``: a module whose output an edit mixes the rows of; ``is_own``: whether the model alone
    is run on each rank's rows, since it computes something else of all of them.
    """
    found = []
    for is_sharded in (False, True):
        with flex_of(make(), records := {}, "dp", is_sharded) as flex:
            if edited is not None:
                flex.register_forward_hook(
                    HookFunction(edited, None, mixed_rows, output_name="edited")
                )
            for site in sites:
                if site.endswith("weight"):
                    flex.register_hook(HookFunction(site))
                else:
                    flex.register_full_backward_pre_hook(HookFunction(site))
            given = rows(x, is_sharded or is_own)
            if x.is_floating_point():  # else torch warns of backward hooks without a gradient
                given = given.clone().requires_grad_()
            flex(given).square().mean().backward()
        found.append(joined(records) if is_own and not is_sharded else records)
    if dist.get_rank() == 0:
        assert_close(found[1], found[0])


class Columns(nn.Linear):
    """The rows of a weight whose halves are equal; no copy to the ranks comes before it, so that
    gradients there are parts of a sum.
    """

    def __init__(self, group):
        torch.manual_seed(0)
        super().__init__(8, 16 // group.size())
        self.out_features = 16
        half = models.random(8, 8)
        self.weight = nn.Parameter(half.repeat(2 // group.size(), 1))
        self.bias = nn.Parameter(half[0].repeat(2 // group.size()))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("module", [nn.Identity(), nn.Dropout(0.1).eval()], ids=str)
def test_a_hook_on_a_module_that_returns_its_input(module):
    """Silently wrong before: the gradients in front of it were taken to be whole."""

    def make(group):
        norm = nn.LayerNorm(8).double()
        return nn.Sequential(norm, module, Columns(group), nn.Tanh())

    expected, found = [], []
    for is_sharded, records in ((False, expected), (True, found)):
        group = dist.group.WORLD if is_sharded else pipelines.alone_group()
        with flex_of(make(group), kept := {}, "tp", is_sharded) as flex:
            flex.register_full_backward_pre_hook(HookFunction("1"))
            flex.register_hook(HookFunction("0.weight"))
            flex(BATCH).square().sum().backward()
        records.append(kept)
    if dist.get_rank() == 0:
        assert_close(found, expected)


class Stop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, on_ranks):
        ctx.stops = dist.get_rank() in on_ranks
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return None if ctx.stops else grad, None


class Stopping(nn.Module):
    def __init__(self, on_ranks):
        super().__init__()
        torch.manual_seed(0)
        self.front, self.head, self.on_ranks = nn.Linear(8, 8), nn.Linear(8, 8), on_ranks

    def forward(self, x):
        return self.head(Stop.apply(self.front(x), self.on_ranks))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_parameter_without_a_gradient(is_sharded):
    """Crashed before: the editing function was said to raise an AttributeError."""
    with flex_of(Stopping({0, 1}), records := {}, "dp", is_sharded) as flex:
        for name in ("front.weight", "head.weight"):
            flex.register_hook(HookFunction(name))
        flex(torch.ones(2, 8)).sum().backward()
    assert list(records) == (["head.weight"] if dist.get_rank() == 0 or not is_sharded else [])


@pytest.mark.ranks(2)
def test_a_parameter_that_one_rank_alone_has_no_gradient_of():
    with flex_of(Stopping({1}), {}, "dp", True) as flex:
        flex.register_hook(HookFunction("front.weight"))
        with pytest.raises(HookError):
            flex(torch.ones(2, 8)).sum().backward()


class Raises(nn.Module):
    def forward(self, x):
        raise ValueError("the model's own error")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("others", ["another wrap", "a hook of the user's"])
def test_an_error_of_the_models_own_is_told(others):
    """A RuntimeError of torch's hid it: "OrderedDict mutated during iteration"."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Identity(), Raises()).double()
    wraps = [flex_of(model, {}, "dp", True) for _ in range(2 if others == "another wrap" else 1)]
    for flex in wraps:
        flex.register_forward_hook(HookFunction("1"))
    if others != "another wrap":
        model.register_forward_hook(lambda module, args, output: None)
    with pytest.raises(ValueError, match="the model's own error"):
        wraps[0](rows(BATCH, True))
    for flex in reversed(wraps):
        flex.restore()


WORDS = torch.tensor([[1, 2, 2, 3], [2, 2, 5, 0], [1, 1, 1, 4], [3, 2, 6, 7]])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("by_counts", [False, True])
def test_an_embedding_whose_gradient_counts_words(by_counts):
    """Each rank counts the words of its own rows."""

    def make():
        torch.manual_seed(0)
        words = nn.Embedding(8, 8, scale_grad_by_freq=by_counts)
        return nn.Sequential(words, nn.Linear(8, 8)).double()

    check_alone_and_sharded(make, ["0.weight"], x=WORDS, is_own=by_counts)


def clamp(grad):
    return grad.clamp(-1e-3, 1e-3)


def normalize(grad):
    return grad / grad.norm()


def pre_hook(module, hook):
    module.register_full_backward_pre_hook(lambda module, grad: (hook(grad[0]),))


def behind(module, hook):
    module.register_full_backward_hook(lambda module, given, grad: (hook(given[0]),))


HOOKED = {  # a hook of the model's own, there before the forward
    "a weight": lambda model, hook: model[0].weight.register_hook(hook),
    "the last module": lambda model, hook: pre_hook(model[2], hook),
    "before a module": lambda model, hook: pre_hook(model[1], hook),
    "behind a module": lambda model, hook: behind(model[1], hook),
    "before all": pre_hook,
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("hook", [clamp, normalize])
@pytest.mark.parametrize("place", HOOKED)
def test_hooks_of_the_models_own(place, hook):
    """Each rank changes the gradient of its own loss."""

    def make():
        HOOKED[place](model := linears(nn.Tanh()), hook)
        return model

    sites = ["0", "0.weight", "2", "2.weight"]
    check_alone_and_sharded(make, sites, is_own=True)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("place", ["a weight", "before a module"])
def test_a_collective_as_a_hook_is_none_of_a_frameworks(place):
    """Silently wrong before: its sum was summed again, as for hooks that return what they get."""
    model = nn.Sequential(nn.LayerNorm(8), nn.Identity(), Columns(dist.group.WORLD)).double()
    hook = partial(funcol.all_reduce, reduceOp="sum", group=dist.group.WORLD)
    if place == "a weight":
        model[0].weight.register_hook(hook)
    else:
        model[0].register_forward_hook(
            lambda module, args, output: output.register_hook(hook) and None
        )
    with flex_of(model, {}, "tp", True) as flex:
        flex.register_hook(HookFunction("0.weight"))
        loss = flex(BATCH).square().sum()
        with pytest.raises(
            ValueError, match=r"'0\.weight'.*a hook of the model's own on gradients"
        ):
            loss.backward()


class InPieces(nn.Module):
    def forward(self, h):
        pieces = torch.empty_like(h)
        pieces[:, :1] = h[:, :1] * 2
        pieces[:, 1:] = h[:, 1:].flip(1)
        return pieces


class OnRank0(nn.Module):
    """Does something with the first layer's output, on rank 0."""

    def __init__(self, line):
        super().__init__()
        self.first, self.last = linears()
        self.kept, self.line = [], line

    def forward(self, x):
        h = self.first(x)
        is_other = dist.is_initialized() and dist.get_rank()
        found = None if is_other else self.line(self, h)
        return self.last(h if found is None else found)


LOGS = {
    "a norm": lambda m, h: m.kept.append(h.norm().item()),
    "printed": lambda m, h: print((h.abs() * 2).mean().item(), h.min()),
    "asserted": lambda m, h: m.kept.append(bool(torch.isfinite(h).all())),
    "in a loop": lambda m, h: m.kept.extend([row.max().item() for row in h]),
}
KEPT = {
    "a tensor": lambda m, h: m.kept.append(h.norm()),
    "one made of it": lambda m, h: m.kept.append(h.norm() * 2),
    "in place": lambda m, h: m.kept.append(h.mul_(2).norm().item()),
    "the next input": lambda m, h: h * 1,
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", LOGS)
def test_what_one_rank_alone_reads_takes_no_part_in_gradients(name):
    records = {}
    for is_sharded in (False, True):
        model = OnRank0(LOGS[name])
        with flex_of(model, found := {}, "tp", is_sharded) as flex:
            flex.annotate_layout("", kind="parameter", tp=Replicate())
            flex.register_forward_hook(HookFunction("first", None, mixed_rows))
            flex.register_full_backward_hook(HookFunction("first", output_name="gradient"))
            flex(BATCH.clone().requires_grad_()).square().sum().backward()
            found["weight"] = [flex.get_module_gradient("first.weight")]
        records[is_sharded] = found
    if dist.get_rank() == 0:
        assert_close(records[True], records[False])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", KEPT)
def test_what_one_rank_alone_makes_and_keeps_may_have_a_gradient(name):
    with flex_of(OnRank0(KEPT[name]), {}, "tp", True) as flex:
        flex.annotate_layout("", kind="parameter", tp=Replicate())
        flex.register_forward_hook(HookFunction("first", None, mixed_rows))
        with pytest.raises(ValueError, match=r"hold the gradient .* is not known"):
            flex(BATCH.clone().requires_grad_()).sum().backward()


@pytest.mark.ranks(2)
def test_a_blank_tensor_that_is_written_in_pieces():
    """Refused before: what some of it is written of has the gradient of the whole."""
    sites = ["0", "0.weight", "1", "2", "2.weight"]
    check_alone_and_sharded(lambda: linears(InPieces()), sites, edited="1")


class OverRows(nn.Module):
    """Mixes the rows of the batch, of which each rank has its own."""

    def forward(self, h):
        return h - h.mean(0)


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixing, self.site = OverRows(), nn.Identity()

    def forward(self, h):
        return checkpoint(lambda h: self.site(self.mixing(h)), h, use_reentrant=False)


@pytest.mark.ranks(2)
def test_a_refused_edit_keeps_nothing_of_a_checkpoint():
    """The error kept the frames alive that it was raised through, until garbage was collected; with
    them torch's hooks on saved tensors, at which later checkpoints failed.
    """
    gc.disable()
    try:
        with flex_of(linears(Recomputed()), {}, "dp", True) as flex:
            flex.register_forward_hook(HookFunction("1.site", editing_function=double))
            try:
                flex(rows(BATCH, True))
            except ValueError:
                pass
            else:
                raise AssertionError("the edit was not refused")
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    finally:
        gc.enable()


class Forces(nn.Module):
    """Returns minus the gradient of an energy."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.front, self.head = nn.Linear(8, 8).double(), nn.Linear(8, 1).double()
        self.only_energy = False

    def forward(self, x):
        x = x.detach().requires_grad_()
        energy = self.head(self.front(x).tanh())
        if self.only_energy:
            return energy
        return -torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_followed", [True, False])
def test_a_backward_inside_of_the_forward(is_followed):
    """Silently wrong before: its gradients were divided as those of the ranks' mean loss are."""
    model = Forces()
    with flex_of(model, {}, "dp", True) as flex:
        flex.register_full_backward_pre_hook(HookFunction("front"))
        if not is_followed:
            model.only_energy = True
            flex(rows(BATCH, True)).mean().backward()
            model.only_energy = False
        with pytest.raises(ValueError, match=r"'front': a backward that begins inside"):
            flex(rows(BATCH, True))
    with flex_of(model, records := {}, "dp", True) as flex:
        flex.register_forward_hook(HookFunction("front"))
        flex(rows(BATCH, True))
    if dist.get_rank() == 0:
        assert_close(records["front"][0], model.front(BATCH))


class ForcesOfMlp(models.MLP):
    """Goes on from the gradient of an energy."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        x = x.detach().requires_grad_()
        energy = super().forward(x)
        return self.last(torch.autograd.grad(energy.sum(), x, retain_graph=True)[0]), energy


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["tp", "dtensor"])
def test_a_forward_goes_on_after_a_backward_inside_of_it(name):
    """Records were delivered at the end of that backward, which ended what was followed: nothing
    behind it was known.
    """
    model, tp = models.seeded(ForcesOfMlp).double(), models.TWO_RANKS[name]
    expected: dict[str, list] = {}
    model.last.register_forward_hook(lambda m, args, output: expected["last"].append(output))
    x = models.random(4, 6)

    def edit(module, full, save_ctx=None, modules=None):
        return full.flip(1) if isinstance(full, torch.Tensor) else (full[0].flip(1),)

    model.act.register_full_backward_pre_hook(lambda m, grads: expected["act"].append(grads[0]))
    model.act.register_full_backward_pre_hook(edit)
    sharded = tp.shard(models.seeded(ForcesOfMlp).double())
    with FlexModel(sharded, {}, output_ranks="all", **tp.sizes) as flex:
        flex.register_forward_hook(HookFunction("last"))
        flex.register_full_backward_pre_hook(HookFunction("act", editing_function=edit))
        for _ in range(2):  # followed, then known
            expected |= {"act": [], "last": []}
            for one in (model, flex):
                force, energy = one(x)
                (force.sum() + energy.sum()).backward()
            assert_close(dict(flex.output_ptr), expected)


class CopiesOrNot(nn.Module):
    """A column layer, with a copy to the ranks in front of it or without one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(8).double()
        self.columns = models.ColumnLinear(nn.Linear(8, 8).double(), dist.group.WORLD)
        self.columns.in_features = self.columns.out_features = 8

    def forward(self, x, copies):
        x = self.norm(x)
        return self.columns(x) if copies else F.linear(x, self.columns.weight)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("lengths", [(), (3, 5, 7, 9)])
def test_a_weight_whose_gradient_other_forwards_hold_otherwise(lengths):
    """Silently wrong before, twice the gradient: of the forwards that were followed, only the last
    four were searched for the backward of another one.
    """
    with flex_of(CopiesOrNot(), records := {}, "tp", True) as flex:
        flex.register_hook(HookFunction("norm.weight"))
        flex(models.random(2, 8), True).square().sum().backward()
        found = [list(kept) for kept in records.values()]
        for length in lengths:
            flex(models.random(length, 8), False)
        loss = flex(models.random(2, 8), True).square().sum()
        if lengths:
            with pytest.raises(ValueError, match=r"'norm.weight'.*not known"):
                loss.backward()
            return
        loss.backward()
        assert_close(list(records.values()), found)


def functional(name):
    """A functional collective with a backward, which torch 2.15 calls by another name."""
    return getattr(funcol, f"{name}_single_autograd", None) or getattr(
        funcol, f"{name}_tensor_autograd"
    )


ALL_GATHER, REDUCE_SCATTER = functional("all_gather"), functional("reduce_scatter")


class SequenceParallel(nn.Module):
    """Shards rows before and after a column and a row layer, by collectives that have a backward:
    the gather's sums what each rank has, the reduce-scatter's gathers.
    """

    def __init__(self, group):
        super().__init__()
        self.group = group
        self.site, self.between = nn.Identity(), nn.Identity()
        torch.manual_seed(0)
        rank, size = dist.get_rank(group), group.size()
        self.up, self.down = nn.Linear(8, 16).double(), nn.Linear(16, 8, bias=False).double()
        self.up.weight = nn.Parameter(self.up.weight.detach().chunk(size)[rank])
        self.up.bias = nn.Parameter(self.up.bias.detach().chunk(size)[rank])
        self.down.weight = nn.Parameter(self.down.weight.detach().chunk(size, 1)[rank])

    def forward(self, x):
        rank, size = dist.get_rank(self.group), self.group.size()
        rows = self.site(x.chunk(size)[rank].sin())
        whole = ALL_GATHER(rows.contiguous(), 0, self.group)
        part = self.down(self.up(self.between(whole)).tanh())
        return REDUCE_SCATTER(part, "sum", 0, self.group)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("edited", [None, "site", "between"])
def test_gradients_that_collectives_with_a_backward_pass_on(edited):
    found = []
    for is_sharded in (False, True):
        group = dist.group.WORLD if is_sharded else pipelines.alone_group()
        x = BATCH.clone().requires_grad_()
        records = {}
        with flex_of(SequenceParallel(group), records, "tp", is_sharded) as flex:
            flex.register_full_backward_pre_hook(HookFunction("site"))
            if edited is not None:
                flex.register_forward_hook(
                    HookFunction(edited, None, mixed_rows, output_name="edited")
                )
            flex(x).square().sum().backward()
        if is_sharded:
            dist.all_reduce(x.grad)  # each rank's rows
        found.append((records, x.grad))
    assert_close(found[1][1], found[0][1])
    if dist.get_rank() == 0:
        assert_close(found[1][0], found[0][0])

"""Gradients of tensors that all ranks hold: each has the whole, or a part of a sum, whatever their
values are. Every model is compared with the unsharded one.
"""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import models
import pipelines
from flex_model import FlexModel, HookError, HookFunction
from models import CopyToRanks, Gather, SumOverRanks
from shared_edits import mixing_features
from tiers import ways

BATCH = models.random(4, 6)


class Call(nn.Module):
    def __init__(self, function, *args):
        super().__init__()
        self.function, self.args = function, args

    def forward(self, x):
        return self.function(x, *self.args)


class Columns(nn.Linear):
    """Some of the rows of a Linear's weight; says how many there are in all."""

    def __init__(self, linear, group):
        super().__init__(linear.in_features, linear.out_features // group.size())
        self.out_features = linear.out_features
        self.weight = nn.Parameter(models.my_part(linear.weight.detach(), 0, group))
        self.bias = nn.Parameter(models.my_part(linear.bias.detach(), 0, group))


class Rows(nn.Module):
    def __init__(self, linear, group):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = nn.Parameter(models.my_part(linear.weight.detach(), 1, group))

    def forward(self, x):
        return F.linear(x, self.weight)


def part_of(x, rank):
    return x.narrow(-1, rank * x.shape[-1] // 2, x.shape[-1] // 2)


def wholes(weights):
    """A norm, a Linear to more columns, and one back."""
    norm, first, second = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6, bias=False)
    layers = nn.ModuleList([norm, first, second]).double()
    for i, parameter in enumerate(layers.parameters()):
        with torch.no_grad():
            parameter.copy_(models.random(*parameter.shape, seed=i))
            if weights == "constant":
                parameter.fill_(0.5)
            elif weights == "halves":  # what one rank has is what the other has
                parameter.copy_(torch.cat([parameter.chunk(2)[0]] * 2))
    return layers


def pair(way, weights, group):
    """A model split over the ranks in one way, and the whole one; the same names."""
    norm, first, second = wholes(weights)
    rank, whole = group.rank(), nn.Identity
    copy, total = Call(CopyToRanks.apply, group), Call(SumOverRanks.apply, group)
    columns, rows = Columns(first, group), Rows(second, group)
    gathers_whole, gathers_parts = (Call(Gather.apply, group, -1, takes) for takes in (False, True))
    layers = {  # of a rank, and of the whole model
        "copied": [
            (norm, norm), (copy, whole()), (columns, first), (nn.GELU(), nn.GELU()), (rows, second),
            (total, whole()),
        ],
        "gathered": [
            (norm, norm), (copy, whole()), (columns, first), (gathers_whole, whole()),
            (nn.GELU(), nn.GELU()), (second, second),
        ],
        # Each rank uses its part of what was gathered, so gradients of it are parts of a sum.
        "gathered in parts": [
            (norm, norm), (copy, whole()), (columns, first), (gathers_parts, whole()),
            (Call(part_of, rank), whole()), (rows, second), (total, whole()),
        ],
        # Gradients in front of it are parts of a sum, which nobody does here.
        "split by hand": [
            (norm, norm), (Call(part_of, rank), whole()), (nn.GELU(), nn.GELU()),
            (gathers_whole, whole()), (nn.Tanh(), nn.Tanh()),
        ],
    }[way]  # fmt: skip
    return tuple(nn.Sequential(*of_all) for of_all in zip(*layers))


WAYS = ["copied", "gathered", "gathered in parts", "split by hand"]


def wrapped(model, way, is_sharded, records=None, prefix=""):
    """A FlexModel, whose whole layers are stated."""
    size, group = (2, None) if is_sharded else (1, pipelines.alone_group())
    records = {} if records is None else records
    flex = FlexModel(model, records, tensor_parallel_size=size, process_group=group, timeout=20)
    if is_sharded:
        for name in ("0", "5") if way == "gathered" else ("0",):
            flex.annotate_layout(f"{prefix}{name}", kind="parameter", tp=Replicate())
    return flex


def record(model, way, is_sharded, losses, register, prefix=""):
    """What hooks recorded, backward by backward."""
    found, records = [], {}
    with wrapped(model, way, is_sharded, records, prefix) as flex:
        register(flex)
        for scale in losses:
            x = BATCH.clone().requires_grad_()
            (flex(x).square().sum() * scale).backward()
            found.append({name: list(kept) for name, kept in records.items()})
            found.append({"x": [x.grad]})
    return found


SITES = dict(zip(WAYS, ("012345", "012345", "0123456", "01234")))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("weights", ["normal", "halves", "constant"])
@pytest.mark.parametrize("losses", [(1, 1), (0, 1), (1, 0)], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_at_every_module(way, losses, weights):
    """Failed before: equal parts of a sum (constant weights, a loss of zero) were taken as whole,
    and what a first backward showed was remembered.
    """
    group = dist.group.WORLD

    def register(flex):
        for kind in ("full_backward", "full_backward_pre"):
            for site in SITES[way]:
                name = f"{kind} {site}"
                getattr(flex, f"register_{kind}_hook")(HookFunction(site, output_name=name))

    check(way, weights, losses, register, group)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("weights", ["normal", "halves", "constant"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("edit_on", ["all", "rank0"])
def test_gradients_through_edits(way, weights, edit_on):
    """Edits that mix, before and after which gradients are recorded, are whole or in parts."""
    group = dist.group.WORLD

    def register(flex):
        for site in SITES[way]:
            flex.register_forward_hook(HookFunction(site, editing_function=mixing_features))
        flex.register_full_backward_pre_hook(HookFunction("0", output_name="grad"))

    check(way, weights, (0, 1), register, group)


def check(way, weights, losses, register, group):
    sharded, whole = pair(way, weights, group)
    compare(way, *(record(m, way, m is sharded, losses, register) for m in (sharded, whole)))


def compare(way, found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        if "x" in ours and way == "split by hand":
            continue  # as the model itself leaves it: a part of a sum
        if dist.get_rank() == 0 or "x" in ours:
            assert_close(ours, theirs)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("weights", ["normal", "constant"])
@pytest.mark.parametrize("way", ["copied", "split by hand"])
def test_gradients_of_weights(way, weights):
    """Of the norm in front: whole, or a part of a sum on each rank."""
    group = dist.group.WORLD

    def register(flex):
        for name in ("0.weight", "0.bias"):
            flex.register_hook(HookFunction(name, output_name=name))

    check(way, weights, (0, 1), register, group)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("weights", ["normal", "constant"])
@pytest.mark.parametrize("way", WAYS)
def test_a_loss_on_what_was_kept_alone(way, weights):
    """Failed before: what only was kept was taken as whole, beside parts of a sum."""
    group = models.mesh(1, 2)["tp"].get_group()
    found = []
    for model, is_sharded in zip(pair(way, weights, group), (True, False)):
        with wrapped(model, way, is_sharded) as flex:

            def keep(module, full, save_ctx, modules):
                save_ctx.kept = full

            flex.register_forward_hook(HookFunction("0", editing_function=keep))
            for with_output in (True, False, True):
                x = BATCH.clone().requires_grad_()
                output = flex(x)
                loss = flex.save_ctx.kept.square().sum()
                (loss + output.sum() if with_output else loss).backward()
                grad = x.grad
                if is_sharded and way == "split by hand":
                    grad = grad.clone()
                    dist.all_reduce(grad, group=group)
                found.append(grad)
    for ours, theirs in zip(found[:3], found[3:], strict=True):
        assert_close(ours, theirs)


class Recomputed(nn.Module):
    def __init__(self, layers, use_reentrant):
        super().__init__()
        self.layers, self.use_reentrant = layers, use_reentrant

    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=self.use_reentrant)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("weights", ["normal", "constant"])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_in_recomputed_blocks(way, weights, use_reentrant):
    def register(flex):
        flex.register_forward_hook(HookFunction("layers.0", editing_function=mixing_features))
        flex.register_full_backward_pre_hook(HookFunction("layers.0", output_name="grad"))

    both = [Recomputed(one, use_reentrant) for one in pair(way, weights, dist.group.WORLD)]
    if use_reentrant:
        with pytest.raises(ValueError, match="use_reentrant=False"):
            record(both[0], way, True, (1,), register, "layers.")
        return
    runs = (record(one, way, one is both[0], (0, 1), register, "layers.") for one in both)
    compare(way, *runs)


@pytest.mark.parametrize("way", ways("ddp", "fsdp2", "dtensor"))
@pytest.mark.parametrize("kind", ["full_backward", "full_backward_pre"])
def test_a_gradient_hook_alone_in_a_reentrant_checkpoint(way, kind):
    """Hooks of the forward noted the key of the forward; without any, nothing was known."""
    model = models.seeded(models.Checkpointed).double()
    twin, expected = copy.deepcopy(model), []
    recomputing = copy.deepcopy(model)
    recomputing.recompute = "reentrant"
    sharded = way.shard(recomputing)
    getattr(twin.b.act, f"register_{kind}_hook")(
        lambda module, grads, *_: expected.append(grads[0]) or (grads[0].sin(),)
    )

    def edit(module, grad, save_ctx, modules):
        return grad.sin()

    settings = dict(output_ranks="all", timeout=20, **way.sizes)
    with FlexModel(sharded, records := {}, **settings) as flex:
        getattr(flex, f"register_{kind}_hook")(HookFunction("b.act", editing_function=edit))
        for step in range(2):
            expected.clear()
            for one in (twin, sharded):
                one.zero_grad()
            twin(BATCH + step).square().mean().backward()
            flex(way.my_rows(BATCH + step)).square().mean().backward()
            assert_close(records["b.act"], expected)
            of_twin = {name: parameter.grad for name, parameter in twin.named_parameters()}
            assert_close(way.full_gradients(model, sharded), of_twin)


class Twice(nn.Module):
    """A module that is called with a whole tensor and with a part of it, both recomputed."""

    columns, rows = ("wide",), ()

    def __init__(self):
        super().__init__()
        self.wide, self.same = nn.Linear(6, 8), nn.Identity()

    def run(self, x):
        return self.same(self.wide(self.same(x)))

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=True)


class Beside(Twice):
    """Only the whole one is recomputed, after the gradient of the other."""

    def forward(self, x):
        whole = checkpoint(self.same, x[:, :4], use_reentrant=True)
        return whole.sum() + self.same(self.wide(x)).sum()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [Twice, Beside])
def test_a_gradient_hook_alone_on_tensors_of_two_layouts_is_refused_in_a_reentrant_checkpoint(make):
    way = models.TWO_RANKS["dtensor"]
    with FlexModel(way.shard(models.seeded(make).double()), timeout=20, **way.sizes) as flex:
        flex.register_full_backward_pre_hook(HookFunction("same"))
        with pytest.raises(HookError, match="'same': the module was called with tensors of diff"):
            flex(BATCH.clone().requires_grad_()).square().sum().backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "follow, within", [("always", contextlib.nullcontext), ("new", FlexModel.active)]
)
def test_a_gradient_hook_in_a_reentrant_checkpoint_of_a_forward_of_its_own(follow, within):
    model, expected = models.seeded(models.Checkpointed, "reentrant").double(), []
    twin = copy.deepcopy(model)
    twin.b.act.register_full_backward_pre_hook(lambda _, grads: expected.append(grads[0]))
    sizes = {"data_parallel_size": 2, "follow": follow}
    with FlexModel(model, records := {}, output_ranks="all", timeout=20, **sizes) as flex:
        flex.register_full_backward_pre_hook(HookFunction("b.act"))
        loss = flex(BATCH.chunk(2)[dist.get_rank()]).square().mean()
        with within(flex):
            loss.backward()
    twin(BATCH).square().mean().backward()
    assert_close(records["b.act"], expected)


class Shared(nn.Module):
    """An activation of rows, in parts and whole along tp, and of a table that all ranks have."""

    columns, rows = ("up",), ("down",)

    def __init__(self):
        super().__init__()
        self.act, self.table = nn.Tanh(), nn.Parameter(torch.randn(2, 4))
        self.small, self.up, self.down = nn.Linear(6, 4), nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x, has_graph):
        with torch.set_grad_enabled(has_graph):
            h = self.down(self.act(self.up(x)))
        return (h + self.act(self.small(x))) @ self.act(self.table).T


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["no_grad", "frozen"])
@pytest.mark.parametrize("axis", ["tp", "dp"])
def test_calls_that_need_no_gradient_are_counted_in_each_forward(axis, how):
    def edit(module, grad, save_ctx, modules):
        return grad.cumsum(-1)

    model, rows, sizes = models.seeded(Shared).double(), BATCH, {"data_parallel_size": 2}
    twin, expected = copy.deepcopy(model), []
    twin.act.register_full_backward_pre_hook(
        lambda module, grads: expected.append(grads[0]) or (grads[0].cumsum(-1),)
    )
    if axis == "tp":
        model, sizes = models.TWO_RANKS["dtensor"].shard(model), {"tensor_parallel_size": 2}
    else:
        rows = BATCH.chunk(2)[dist.get_rank()]
    with FlexModel(model, records := {}, output_ranks="all", timeout=20, **sizes) as flex:
        flex.register_full_backward_pre_hook(HookFunction("act", editing_function=edit))
        for step in range(2):
            for one in (twin, model):
                one.up.requires_grad_(how == "no_grad" or step == 1)
            expected.clear()
            twin(BATCH, how == "frozen").square().mean().backward()
            flex(rows, how == "frozen").square().mean().backward()
            assert_close(records["act"], expected)
            if axis == "tp":
                assert_close(model.small.weight.grad, twin.small.weight.grad)


class Both(nn.Module):
    """A column layer without a copy to the ranks, beside a residual."""

    def __init__(self, group):
        super().__init__()
        self.same, self.columns = nn.Identity(), Columns(nn.Linear(6, 8).double(), group)
        self.total = Call(SumOverRanks.apply, group)

    def forward(self, x):
        x = self.same(x)
        return self.total(self.columns(x).square().sum(-1, keepdim=True)) + x


@pytest.mark.ranks(2)
@pytest.mark.parametrize("factor", [0, 1])
def test_a_tensor_that_is_read_whole_and_in_parts_is_refused_until_it_is_stated(factor):
    """Its gradient is a sum of both, which no placement says. Silently wrong before where the
    ranks' gradients differed: they were summed, though a part of each is whole.
    """
    group = models.mesh(1, 2)["tp"].get_group()
    torch.manual_seed(0)
    with FlexModel(Both(group), {}, tensor_parallel_size=2, timeout=20) as flex:
        flex.annotate_layout(models.INPUT, kind="forward_pre", tp=Replicate())
        flex.register_full_backward_pre_hook(HookFunction("same"))
        with pytest.raises(ValueError, match=r"'same'.*read both whole and in parts.*placements="):
            (flex(BATCH.clone().requires_grad_()).sum() * factor).backward()
    with FlexModel(Both(group), {}, tensor_parallel_size=2, timeout=20) as flex:
        flex.register_full_backward_pre_hook(HookFunction("same", placements={"tp": Shard(1)}))
        with pytest.raises(ValueError, match=r"'same': it is stated to be split.*replicated"):
            flex(BATCH.clone().requires_grad_()).sum().backward()


class Latent(nn.Module):
    """Latent attention under transformers' ``mla_kv_a_proj``: one part of a latent tensor goes to a
    column layer, the other one to each rank's heads; they are joined and split again between.
    """

    def __init__(self, linear, copy, total):
        super().__init__()
        self.same, self.joined, self.heads = nn.Identity(), nn.Identity(), linear
        self.copy, self.total = copy, total

    def forward(self, x):
        latent, shared = self.same(x).split([4, 2], -1)
        joined = self.joined(torch.cat([latent, self.copy(shared)], -1))
        latent, shared = joined.split([4, 2], -1)
        heads = self.heads(self.copy(latent)) * shared.sum(-1, keepdim=True)
        return self.total(heads.square().sum(-1, keepdim=True))


@pytest.mark.ranks(2)
def test_a_gradient_goes_through_what_is_joined_and_split_again_part_by_part():
    group = models.mesh(1, 2)["tp"].get_group()
    linear = models.seeded(nn.Linear, 4, 8).double()
    whole = Latent(linear, nn.Identity(), nn.Identity())
    copy, total = Call(CopyToRanks.apply, group), Call(SumOverRanks.apply, group)
    sharded, records, expected = Latent(Columns(linear, group), copy, total), {}, {}
    for model in (sharded, whole):
        x = BATCH.clone().requires_grad_()
        if model is whole:
            model.same.register_forward_hook(
                lambda m, args, output: mixing_features(m, output, None, None)
            )
            model.same.register_full_backward_pre_hook(lambda m, g: expected.update(same=g[0]))
            model(x).sum().backward()
            continue
        with FlexModel(model, records, tensor_parallel_size=2, output_ranks="all") as flex:
            flex.annotate_layout(models.INPUT, kind="forward_pre", tp=Replicate())
            flex.register_forward_hook(HookFunction("same", editing_function=mixing_features))
            flex.register_full_backward_pre_hook(HookFunction("same", output_name="gradient"))
            flex(x).sum().backward()
            given, (found,) = x.grad, records["gradient"]
            # Of what was joined a part is whole, and the other one a sum: no placement says that.
            flex.register_full_backward_pre_hook(HookFunction("joined"))
            with pytest.raises(ValueError, match="read both whole and in parts"):
                flex(x).sum().backward()
    assert_close(given, x.grad)
    assert_close(found, expected["same"])


class SharedHeads(nn.Module):
    """Two heads of keys and four of queries: each rank has a query, two ranks share keys."""

    def __init__(self, group=None):
        super().__init__()
        self.keys = models.seeded(nn.Linear, 6, 6).double()
        self.queries = models.seeded(nn.Linear, 6, 12, seed=3).double()
        self.norm, self.group = nn.LayerNorm(3).double(), group

    def forward(self, x):
        keys, queries = self.keys(x).unflatten(-1, (2, 3)), self.queries(x).unflatten(-1, (4, 3))
        if self.group is not None:
            rank, shared = self.group.rank(), self.group.rank() // 2
            keys, queries = keys[:, shared : shared + 1], queries[:, rank : rank + 1]
        keys = self.norm(keys).repeat_interleave(queries.shape[1] // keys.shape[1], 1)
        out = (keys * queries.sin()).sum(1)
        return out if self.group is None else SumOverRanks.apply(out, self.group)


@pytest.mark.ranks(4)
def test_the_gradient_of_a_piece_that_ranks_share_is_refused():
    """Silently wrong before: it was that of one of the ranks alone."""
    whole, sharded, records, expected = SharedHeads(), SharedHeads(dist.group.WORLD), {}, {}
    whole.norm.register_forward_hook(
        lambda module, args, output: mixing_features(module, output, None, None)
    )
    whole.keys.register_full_backward_pre_hook(lambda m, g: expected.update(keys=list(g)))
    whole(BATCH).square().sum().backward()
    with FlexModel(sharded, records, tensor_parallel_size=4, timeout=20) as flex:
        models.replicas(flex)
        edit = HookFunction("norm", None, mixing_features, output_name="edited")
        flex.register_forward_hook(edit)
        flex.register_full_backward_pre_hook(HookFunction("keys"))
        flex(BATCH).square().sum().backward()
        if dist.get_rank() == 0:
            assert_close(records["keys"], expected["keys"])
        flex.register_full_backward_pre_hook(HookFunction("norm"))
        loss = flex(BATCH).square().sum()
        with pytest.raises(
            ValueError, match=r"'norm'.*hold the same piece.*hook the tensor before"
        ):
            loss.backward()


# ---- What was made of a tensor, and what hands its gradient on -----------------------------------


class MeanGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad - grad.mean()


class SizeGrad(MeanGrad):
    @staticmethod
    def backward(ctx, grad):
        return grad / grad.shape[0] / grad.shape[-1]


class ClampedGrad(MeanGrad):
    """Not linear: along dp a rank's gradients are those of its own loss, larger than the mean's."""

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-1e-3, 1e-3)


class DoubledGrad(MeanGrad):
    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class SignsGrad(torch.autograd.Function):
    """Hands on another gradient than it got."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0].sign() * 0.01


class InPlaceGrad(SignsGrad):
    @staticmethod
    def backward(ctx, grad):
        return grad.clone().mul_(ctx.saved_tensors[0])


def recomputed(h):
    return checkpoint(lambda h: (h - h.mean(0)).tanh(), h, use_reentrant=True)


def hooked(hook):
    def call(h):
        h = h * 1
        h.register_hook(hook)
        return h.tanh()

    return call


def unread(h):
    h.softmax(0), h.softmax(-1)
    return h.tanh()


def without_gradient(h):
    h.detach().softmax(0), h.argmax(0), (h > 0).float().mean(0)
    return h.tanh()


# What is made of ``h`` is not what the unsharded program makes of all rows, or its gradient isn't.
MIXED = {
    "divided by its size": lambda h: h / h.shape[0] / h.shape[-1],
    "centered": lambda h: h - h.mean((0, -1), keepdim=True),
    "softmax": lambda h: h.softmax(0).softmax(-1),
    "behind others": lambda h: ((h.tanh() + 1).view(-1, 2, h.shape[-1] // 2) - h.mean()).flatten(1),
    "Function of the mean": MeanGrad.apply,
    "Function of the size": SizeGrad.apply,
    "hook": hooked(lambda grad: grad / grad.norm()),
    "hook that clamps": hooked(lambda grad: grad.clamp(-1e-3, 1e-3)),
    "batch norm": lambda h: F.batch_norm(h, None, None, training=True).sin(),
    "Function that clamps": ClampedGrad.apply,
    "Function of signs": SignsGrad.apply,
    "recomputed": recomputed,
    "a loss of its own": unread,
}
FINE = {
    "nothing": lambda h: h,
    "tanh": torch.tanh,
    "Function": DoubledGrad.apply,
    "Function in place": InPlaceGrad.apply,
    "without a gradient": without_gradient,
    "in parts": lambda h: h.square().sum(-1, keepdim=True) + h,
}


class Around(nn.Module):
    """A column layer, an operation, and a row layer; along dp they are whole."""

    def __init__(self, operation, group=None):
        super().__init__()
        torch.manual_seed(0)
        first, second = nn.Linear(6, 8).double(), nn.Linear(8, 6, bias=False).double()
        self.first, self.second = first, second
        if group is not None:
            self.first, self.second = Columns(first, group), Rows(second, group)
        self.site, self.made, self.group = nn.Identity(), Call(operation), group

    def forward(self, x):
        y = self.second(self.made(self.site(self.first(x))))
        return y if self.group is None else SumOverRanks.apply(y, self.group)


SITES_AROUND = ("site", "first", "first.weight")


def hook_on(flex, site, **settings):
    function = HookFunction(site, **settings)
    if "weight" in site:
        return flex.register_hook(function)
    kind = flex.register_full_backward_pre_hook if site == "first" else None
    return (kind or flex.register_full_backward_hook)(function)


def gradients_around(operation, axis, site, prepare=lambda flex: None, **settings):
    """What a hook recorded in two backwards, sharded and unsharded."""
    rank, found = dist.get_rank(), []
    batch = models.random(4, 6, seed=7)
    for is_sharded in (False, True):
        own = None if is_sharded else pipelines.alone_group()
        group = models.mesh(1, 2)["tp"].get_group() if is_sharded and axis == "tp" else None
        sizes = {"data_parallel_size": 2} if axis == "dp" else {"tensor_parallel_size": 2}
        x = batch.chunk(2)[rank] if is_sharded and axis == "dp" else batch
        records = {}
        sizes = sizes if is_sharded else {}
        with FlexModel(
            Around(operation, group), records, process_group=own, timeout=20, **sizes
        ) as flex:
            if is_sharded:
                prepare(flex)
            hook_on(flex, site, **(settings if is_sharded else {}))
            kept = []
            for _ in range(2):
                flex(x).square().mean().backward()
                kept += records[site] if rank == 0 or not is_sharded else []
        found.append(kept)
    return found


@pytest.mark.ranks(2)
@pytest.mark.parametrize("site", SITES_AROUND)
@pytest.mark.parametrize("axis", ["dp", "tp"])
@pytest.mark.parametrize("name", [*FINE])
def test_gradients_before_operations_that_ranks_may_do_alone(name, axis, site):
    operation = FINE[name]
    if name == "in parts" and axis == "tp":
        operation = torch.tanh
    expected, found = gradients_around(operation, axis, site)
    if dist.get_rank() == 0:
        assert_close(found, expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("site", SITES_AROUND)
@pytest.mark.parametrize("name", MIXED)
def test_gradients_before_what_each_rank_computes_of_its_own_rows(name, site):
    """They are the gradients of the mean of the ranks' own losses, whatever those are."""
    batch, records = models.random(4, 6, seed=7).chunk(2)[dist.get_rank()], {}
    with FlexModel(Around(MIXED[name]), records, process_group=pipelines.alone_group()) as flex:
        hook_on(flex, site)
        flex(batch).square().mean().backward()
    dist.all_gather_object(of_ranks := [None, None], records[site][0])
    expected = sum(of_ranks) / 2 if "weight" in site else torch.cat(of_ranks) / 2
    _, found = gradients_around(MIXED[name], "dp", site)
    if dist.get_rank() == 0:
        assert_close(found, [expected, expected])


class Loss(nn.Module):
    """Returns the mean loss of its rows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.site, self.classes = nn.Tanh(), nn.Linear(6, 5).double()

    def forward(self, x):
        scores = self.classes(self.site(x))
        return F.cross_entropy(scores, scores.detach().argmax(-1)), scores


@pytest.mark.ranks(2)
@pytest.mark.parametrize("site", ["site", "classes.weight"])
def test_gradients_of_a_loss_that_the_model_returns(site):
    """How a mean of rows is placed along dp is not known, but the loss is the ranks' mean."""
    rank, found = dist.get_rank(), []
    for is_sharded in (False, True):
        own = None if is_sharded else pipelines.alone_group()
        x = (BATCH.chunk(2)[rank] if is_sharded else BATCH).clone().requires_grad_()
        size = 2 if is_sharded else 1
        with FlexModel(
            Loss(), records := {}, data_parallel_size=size, process_group=own, timeout=20
        ) as flex:
            hook_on(flex, site)
            flex(x)[0].backward()
        found.append(records.get(site))
    if rank == 0:
        assert_close(found[1], found[0])


class Statistics(Around):
    def forward(self, x):
        """Also return what no loss depends on."""
        x = self.site(x)
        normed, mean, _ = torch.native_layer_norm(x, [6], None, None, 1e-5)
        y = self.second(self.made(self.first(normed)))
        return (y if self.group is None else SumOverRanks.apply(y, self.group)), mean, x.detach()


@pytest.mark.ranks(2)
def test_returned_tensors_without_gradients_count_as_unread():
    found = []
    for size in (1, 2):
        own, group = pipelines.alone_group(), models.mesh(1, 2)["tp"].get_group()
        model = Statistics(torch.tanh, group if size == 2 else None)
        with FlexModel(
            model,
            records := {},
            tensor_parallel_size=size,
            process_group=own if size == 1 else None,
            output_ranks="all",
        ) as flex:
            flex.register_full_backward_hook(HookFunction("site"))
            flex(BATCH.clone().requires_grad_())[0].square().mean().backward()
        found.append(records["site"])
    assert_close(found[1], found[0])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_layers_that_are_unfrozen(way):
    """The layouts of the frozen model's forwards were used, and refused."""
    found = []
    for model, is_sharded in zip(pair(way, "normal", dist.group.WORLD), (True, False)):
        records = {}
        with wrapped(model, way, is_sharded, records) as flex:
            flex.register_forward_hook(HookFunction("0", editing_function=mixing_features))
            for site in SITES[way]:
                flex.register_full_backward_hook(HookFunction(site, output_name=f"to {site}"))
            for layers, requires_grad in (
                (model, False),
                (model, False),
                (model[2:], True),
                (model, True),
            ):
                layers.requires_grad_(requires_grad)
                result = flex(BATCH)
                if result.requires_grad:
                    result.square().sum().backward()
                found.append({name: list(kept) for name, kept in records.items()})
    if dist.get_rank() == 0:
        assert_close(found[:4], found[4:])

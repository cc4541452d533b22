"""Scripts in the style of release 0.1.0: layers that split by hand, and ``expected_shape`` alone to
say so. Values, edits, gradients and parameters equal the unsharded model's.
"""

import argparse

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import models
from flex_model.core import FlexModel, HookFunction
from oracle import register, watch
from tiers import on_ranks

BATCH, LENGTH, WIDTH = 3, 4, 6
WIDE = {"even": 8, "uneven": 11}
STYLES = ("functions", "plain", "functional")  # the last two have no gradients


# ---- What a script of then brings along ----------------------------------------------------------


class CopyToModelParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class ReduceFromModelParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class GatherFromModelParallel(torch.autograd.Function):
    """Of parts as `share` makes them."""

    @staticmethod
    def forward(ctx, x):
        ctx.size = x.shape[-1]
        sizes = [None] * dist.get_world_size()
        dist.all_gather_object(sizes, ctx.size)
        ctx.start = sum(sizes[: dist.get_rank()])
        padded = x.new_zeros(*x.shape[:-1], max(sizes))
        padded[..., : ctx.size] = x
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes)], -1)

    @staticmethod
    def backward(ctx, grad):
        return grad.narrow(-1, ctx.start, ctx.size).contiguous()


def share(full, dim):
    return full.detach().tensor_split(dist.get_world_size(), dim)[dist.get_rank()].clone()


class ColumnParallel(nn.Module):
    """Some output features on each rank. Nothing says how wide it is in all."""

    def __init__(self, linear, style, gathers=False):
        super().__init__()
        self.weight = nn.Parameter(share(linear.weight, 0))
        self.bias = nn.Parameter(share(linear.bias, 0))
        self.style, self.gathers = style, gathers

    def forward(self, x):
        if self.style == "functions":
            x = CopyToModelParallel.apply(x)
        x = F.linear(x, self.weight, self.bias)
        return GatherFromModelParallel.apply(x) if self.gathers else x


class RowParallel(nn.Module):
    """Some input features on each rank."""

    def __init__(self, linear, style):
        super().__init__()
        self.weight = nn.Parameter(share(linear.weight, 1))
        self.bias = nn.Parameter(linear.bias.detach().clone())
        self.style = style

    def forward(self, x):
        x = F.linear(x, self.weight)
        if self.style == "functions":
            x = ReduceFromModelParallel.apply(x)
        elif self.style == "plain":
            dist.all_reduce(x)
        else:
            x = funcol.all_reduce(x, "sum", dist.group.WORLD)
        return x + self.bias


class FeedForward(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, wide), nn.Linear(WIDTH, wide)
        self.w2, self.act = nn.Linear(wide, WIDTH), nn.SiLU()

    def forward(self, x):
        return self.w2(self.act(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.norm, self.feed_forward = nn.LayerNorm(WIDTH), FeedForward(wide)

    def forward(self, x):
        return x + self.feed_forward(self.norm(x))


class Model(nn.Module):
    """Two layers and a head whose output is gathered."""

    def __init__(self, wide):
        super().__init__()
        self.tok = nn.Embedding(12, WIDTH)
        self.layers = nn.ModuleList(Layer(wide) for _ in range(2))
        self.output = nn.Linear(WIDTH, wide)

    def forward(self, ids):
        h = self.tok(ids)
        for layer in self.layers:
            h = layer(h)
        return self.output(h)


def whole(wide):
    return models.seeded(Model, wide).double()


def split(wide, style):
    model = whole(wide)
    for layer in model.layers:
        mlp = layer.feed_forward
        mlp.w1, mlp.w3 = ColumnParallel(mlp.w1, style), ColumnParallel(mlp.w3, style)
        mlp.w2 = RowParallel(mlp.w2, style)
    model.output = ColumnParallel(model.output, style, gathers=True)
    return model


def wrap(model, records):
    return FlexModel(
        model,
        records,
        tensor_parallel_size=dist.get_world_size(),
        pipeline_parallel_size=1,
        data_parallel_size=1,
    )


def ids():
    return models.seeded(torch.randint, 0, 12, (BATCH, LENGTH), seed=4)


# ---- Editing functions and the sites that need a hint --------------------------------------------


def editing_function(current_module, inputs, save_ctx, modules):
    """As in the README of then: cached, edited in whole, and passed through a trained layer."""
    save_ctx.activation = inputs
    mixed = inputs + 0.5 * inputs.flip(-1).cumsum(-1) * inputs.mean(0, keepdim=True)
    return modules["probe"].forward(mixed)


def by_svd(current_module, inputs, save_ctx, modules):
    values = torch.linalg.svdvals(inputs.detach().flatten(0, 1))
    return torch.where(inputs > values[-1] / 10, inputs, 0.0)


def in_place(current_module, inputs, save_ctx, modules):
    inputs[..., -1] = 0  # of the last rank
    return inputs


#: Of (batch, length, wide): on each rank some of the last dim.
SPLIT = ("layers.0.feed_forward.w1", "layers.1.feed_forward.w3", "layers.0.feed_forward.act")
#: And those that all ranks have: in front of a Function of the script's own, and behind all.
FRONT = ("tok", "layers.0.norm", "layers.1.feed_forward.w2", "layers.1")
LAST = ("output",)


def full_shape(site, wide):
    """With the one size that may be split; where it is the ranks' own, that nothing is."""
    return (None, None, WIDTH if site in FRONT else wide)


def probe(width):
    return models.seeded(nn.Linear, width, width, seed=5).double()


def oracle(wide, site, edit, kind="forward"):
    """The record, the output, the loss's gradients and the probe's, of the model on one process."""
    model, width = whole(wide), WIDTH if site in FRONT else wide
    modules = nn.ModuleDict({"probe": probe(width)})
    records = watch(model, site, edit, kind, modules)
    output = model(ids())
    output.sin().mean().backward()
    return records[0], output.detach(), model, modules["probe"]


def check_run(wide, edit, sites, style="functions", trains=True):
    for site in sites:
        expected, output, model, trained = oracle(wide, site, edit)
        flex = wrap(split(wide, style), records := {})
        flex.register_trainable_module("probe", probe(trained.in_features))
        flex.register_forward_hook(HookFunction(site, full_shape(site, wide), edit))
        with torch.set_grad_enabled(trains):
            found = flex(ids())
        assert_close(found.detach(), output, msg=lambda text, s=site: f"{s}: {text}")
        if dist.get_rank() == 0:
            assert_close(records[site], [expected], msg=lambda text, s=site: f"{s}: {text}")
        if trains:
            found.sin().mean().backward()
            for name, parameter in flex.trainable_modules["probe"].named_parameters():
                gradient = trained.get_parameter(name).grad
                assert_close(parameter.grad, gradient, msg=lambda text, s=site: f"{s}: {text}")
            check_local_gradients(flex, model)
        flex.restore()


def check_local_gradients(flex, model):
    """Each rank's are its part of the whole model's."""
    for name, parameter in flex.module.named_parameters():
        full = model.get_parameter(name).grad
        dim = next((d for d in range(full.ndim) if full.shape[d] != parameter.shape[d]), None)
        mine = full if dim is None else share(full, dim)
        assert_close(parameter.grad, mine, msg=lambda text, name=name: f"{name}: {text}")


# ---- On two and four ranks -----------------------------------------------------------------------


WIDES = on_ranks(2, "uneven", grid=["even"]) + on_ranks(4, grid=WIDE)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("wide", WIDES)
def test_values(wide, style):
    """Every site, with a hint."""
    check_run(WIDE[wide], None, SPLIT + FRONT + LAST, style, trains=False)


EDITS = {"a probe": editing_function, "by its values": by_svd, "in place": in_place}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("wide", WIDES)
def test_edits(wide, name):
    """Without gradients at every site."""
    check_run(WIDE[wide], EDITS[name], SPLIT + FRONT + LAST, trains=False)


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("wide", WIDES)
def test_gradients_through_edits(wide, name):
    """A split tensor's gradient is split as it is; behind all Functions the loss's is whole."""
    check_run(WIDE[wide], EDITS[name], SPLIT + LAST)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("site", FRONT)
def test_gradients_in_front_of_functions_that_are_not_declared(site):
    """Right, or refused with the line to write: a Function's backward may sum over the ranks."""
    try:
        check_run(WIDE["even"], editing_function, (site,))
    except ValueError as error:
        if "is not known" not in str(error) or f"hook on {site!r}" not in str(error):
            raise


@pytest.mark.parametrize("wide", on_ranks(2, *WIDE) + on_ranks(4, grid=WIDE))
def test_parameters(wide):
    """In full, by the sizes that are given: weights of rows and of columns."""
    model, flex = whole(WIDE[wide]), wrap(split(WIDE[wide], "plain"), {})
    for name, parameter in model.named_parameters():
        full = flex.get_module_parameter(name, tuple(parameter.shape))
        assert torch.equal(full, parameter.detach()), name
        assert full.device.type == "cpu" and not full.requires_grad


# ---- Gradients -----------------------------------------------------------------------------------

BACKWARD = ("full_backward_pre", "full_backward")


def check_gradients(wide, site, kind, shape, edit):
    expected, _, model, _ = oracle(wide, site, edit, kind)
    flex = wrap(split(wide, "functions"), records := {})
    register(flex, kind, HookFunction(site, shape, edit))
    flex(ids()).sin().mean().backward()
    if dist.get_rank() == 0:
        assert_close(records[site], [expected])
    check_local_gradients(flex, model)


def doubled(current_module, inputs, save_ctx, modules):
    return inputs + inputs.flip(-1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("edit", [None, doubled], ids=["read", "edit"])
@pytest.mark.parametrize("wide", WIDE)
def test_gradients_of_split_sites(wide, edit):
    """Their expected shape is that of the tensor passed."""
    wide = WIDE[wide]
    for site in SPLIT:
        check_gradients(wide, site, BACKWARD[0], (None, None, wide), edit)
    check_gradients(wide, "layers.1.feed_forward.act", BACKWARD[1], (None, None, wide), edit)


# ---- What a hint says, and what it doesn't -------------------------------------------------------


@pytest.mark.ranks(2)
def test_groups_with_an_expected_shape():
    wide = WIDE["even"]
    flex = wrap(split(wide, "functions"), {})
    flex.create_hook_group("wide", "feed_forward.w1", (None, None, wide), doubled, 0)
    model = whole(wide)
    for layer in model.layers:
        layer.feed_forward.w1.register_forward_hook(lambda m, args, out: out + out.flip(-1))
    assert_close(flex(ids(), groups=["wide"]), model(ids()))
    assert_close(flex(ids(), groups=["wide"], complement=True), whole(wide)(ids()))


@pytest.mark.ranks(2)
def test_a_saved_activation_is_used_at_another_site():
    """A cached activation of one site is added at another, as activation patching does it."""
    wide = WIDE["uneven"]

    def keep(module, inputs, save_ctx, modules):
        save_ctx.activation = inputs

    def patch(module, inputs, save_ctx, modules):
        return inputs + save_ctx.activation.flip(-1)

    def run(model, register):
        register(model, "layers.0.feed_forward.w1", keep)
        register(model, "layers.1.feed_forward.w3", patch)
        output = model(ids())
        output.sin().mean().backward()
        return output.detach()

    context, alone = argparse.Namespace(), whole(wide)

    def plain(model, site, edit):
        module = model.get_submodule(site)
        module.register_forward_hook(lambda module, args, out: edit(module, out, context, {}))

    expected = run(alone, plain)
    flex = wrap(split(wide, "functions"), {})

    def hooked(model, site, edit):
        model.register_forward_hook(HookFunction(site, (None, None, wide), edit))

    found = run(flex, hooked)
    assert_close(found, expected)
    gradient = flex.module.layers[0].feed_forward.w1.weight.grad
    assert_close(gradient, share(alone.layers[0].feed_forward.w1.weight.grad, 0))


class Fused(nn.Module):
    """Gate and up in one weight, of each of which a rank has a half."""

    def __init__(self, linear):
        super().__init__()
        gate, up = linear.weight.chunk(2)
        self.weight = nn.Parameter(torch.cat([share(gate, 0), share(up, 0)]))
        self.weight.tensor_model_parallel = True
        self.weight.partition_dim, self.weight.partition_stride = 0, 2
        self.site = nn.Identity()

    def forward(self, x):
        gate, up = self.site(F.linear(x, self.weight)).chunk(2, -1)
        return F.silu(gate) * up


@pytest.mark.ranks(2)
def test_a_proof_that_parts_interleave_wins():
    linear = models.seeded(nn.Linear, WIDTH, 8).double()
    x, records = models.random(BATCH, LENGTH, WIDTH), {}
    flex = wrap(Fused(linear), records)
    flex.register_forward_hook(HookFunction("site", (None, None, 8)))
    with torch.no_grad():
        flex(x)
    if dist.get_rank() == 0:
        assert_close(records["site"][0], F.linear(x, linear.weight).detach())
    full = flex.get_module_parameter("weight", (8, WIDTH))
    assert_close(full, linear.weight.detach())

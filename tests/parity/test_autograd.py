"""Graphs that an edit or a user can make: each equals the unsharded model under torch's hook."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.testing import assert_close

import models
from cells import mean_loss
from flex_model import FlexModel, HookFunction
from flex_model.errors import HookError
from shared_edits import mixing_features, mixing_rows
from tiers import ways

BATCH = models.random(4, 6)
PARALLELISMS = ("tp", "dp")


def triple_some(full):
    full[:, 2:5].mul_(3)


def no_grad_zero(full):
    with torch.no_grad():
        full[:, 0] = 0


EDITS = {
    "detached": lambda full: (full * 2).detach(),
    "transposed back": lambda full: (full * 2).T.contiguous().T,
    "a view": lambda full: full.view(-1).view(4, 8),
    "flipped": lambda full: full.flip(0),
    "expanded": lambda full: full[:1].expand(4, -1),
    "in place on a view": triple_some,
    "in place without grad": no_grad_zero,
}


def sharded_and_unsharded(name, edit, use):
    """``use(model, mine, probe)`` makes gradients, on both models; compare all of them."""
    parallelism = models.TWO_RANKS[name]
    model, probe = models.mlp(), models.seeded(nn.Linear, 8, 8).double()

    def hook(module, args, output):
        given = output.clone()
        edited = edit(given, probe)
        return given if edited is None else edited

    model.fc1.register_forward_hook(hook)
    use(model, lambda rows: rows)

    def ours(module, full, save_ctx, modules):
        return edit(full, modules["probe"])

    sharded = parallelism.shard(models.mlp())
    with FlexModel(sharded, **parallelism.sizes) as flex:
        flex.register_trainable_module("probe", models.seeded(nn.Linear, 8, 8).double())
        flex.register_forward_hook(HookFunction("fc1", editing_function=ours))
        use(flex, parallelism.my_rows)
        trained = {n: p.grad for n, p in flex.trainable_modules["probe"].named_parameters()}
    gradients = parallelism.full_gradients(models.mlp(), sharded)
    assert_close(trained, {n: p.grad for n, p in probe.named_parameters()})
    for parameter_name, parameter in model.named_parameters():
        if parameter.grad is None or not parameter.grad.any():
            got = gradients.get(parameter_name)
            assert got is None or not got.any(), parameter_name
        else:
            assert_close(gradients[parameter_name], parameter.grad)


def one_backward(model, mine):
    mean_loss(model(mine(BATCH))).backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("name", PARALLELISMS)
def test_what_an_edit_may_return(name, edit):
    sharded_and_unsharded(name, lambda full, probe: EDITS[edit](full), one_backward)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", PARALLELISMS)
def test_an_edit_may_return_a_parameter(name):
    sharded_and_unsharded(name, lambda full, probe: probe.weight[:4], one_backward)
    sharded_and_unsharded(name, lambda full, probe: full * probe.bias, one_backward)


def one_backward_of_two_forwards(model, mine):
    first, second = model(mine(BATCH)), model(mine(2 * BATCH))
    (mean_loss(first) + mean_loss(second)).backward()


def two_backwards_of_one_graph(model, mine):
    loss = mean_loss(model(mine(BATCH)))
    loss.backward(retain_graph=True)
    loss.backward()


def backwards_in_another_order(model, mine):
    first, second = model(mine(BATCH)), model(mine(2 * BATCH))
    mean_loss(second).backward()
    mean_loss(first).backward()


def forward_without_grad_between(model, mine):
    output = model(mine(BATCH))
    with torch.no_grad():
        model(mine(2 * BATCH))
    mean_loss(output).backward()


USES = (
    one_backward_of_two_forwards,
    two_backwards_of_one_graph,
    backwards_in_another_order,
    forward_without_grad_between,
)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", PARALLELISMS)
def test_graphs_that_a_user_may_make(name, use):
    sharded_and_unsharded(name, lambda full, probe: probe(full).tanh(), use)


def mixing(module, full, save_ctx, modules):
    return mixing_rows(module, mixing_features(module, full, None, None), None, None).tanh()


def second_derivatives(model, x, dp=1):
    """The Hessian times a vector, of the parameters; and the gradients of a gradient penalty. The
    gradient of a rank's mean over rows is dp times that of the whole batch's.
    """
    parameters = [*model.parameters()]
    directions = [parameter.detach().cos() for parameter in parameters]
    x = x.clone().requires_grad_()
    loss = model(x).square().mean()
    first = torch.autograd.grad(loss, [x, *parameters], create_graph=True)
    products = torch.autograd.grad(first[1:], parameters, directions, retain_graph=True)
    (100 / dp * first[0].square().sum()).backward()
    return products


def check_second_derivatives(flex, parallelism, model):
    """Compare with ``model`` on the whole batch."""
    expected = second_derivatives(model, BATCH)
    products = second_derivatives(flex, parallelism.my_rows(BATCH), parallelism.dp)
    gradients = parallelism.full_gradients(model, flex.module)
    for (name, parameter), product, own in zip(model.named_parameters(), expected, products):
        assert_close(parallelism.full(model, name, own, average=True), product)
        if parameter.grad is None:  # of the last bias, which no gradient depends on
            continue
        assert parameter.grad.abs().max() > 1e-5
        assert_close(gradients[name], parameter.grad)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("site", ["inp", "fc1", "fc2"])
@pytest.mark.parametrize("name", ["tp", "dp", "ddp"])
def test_second_derivatives_through_an_edit_that_mixes_shards(name, site):
    parallelism, model = models.TWO_RANKS[name], models.mlp()
    with FlexModel(parallelism.shard(model), **parallelism.sizes) as flex:
        flex.register_forward_hook(HookFunction(site, editing_function=mixing))
        hook = lambda module, args, output: mixing(module, output, None, None)  # noqa: E731
        model.get_submodule(site).register_forward_hook(hook)
        check_second_derivatives(flex, parallelism, model)


class Scaled(nn.Module):
    """Multiplies rows by what all of them share: the output of ``site``, the same on all ranks."""

    columns = rows = ()

    def __init__(self):
        super().__init__()
        self.register_buffer("table", models.random(4, 6))
        self.inp, self.site = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.inp(x).tanh() * self.site(self.table).sum(0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["dp", "ddp"])
def test_second_derivatives_through_an_edit_of_what_all_rows_share(name):
    parallelism, model = models.TWO_RANKS[name], models.seeded(Scaled).double()
    with FlexModel(parallelism.shard(model), **parallelism.sizes) as flex:
        flex.register_forward_hook(HookFunction("site", editing_function=mixing))
        model.site.register_forward_hook(lambda module, args, y: mixing(module, y, None, None))
        check_second_derivatives(flex, parallelism, model)


def hook_gradient(model, site, edit):
    def hook(module, args, output):
        output.register_hook(lambda grad: edit(module, grad, None, None))

    model.get_submodule(site).register_forward_hook(hook)


@pytest.mark.parametrize("parallelism", ways("one", "tp", "dp", "ddp"))
def test_second_derivatives_through_an_edit_of_a_gradient(parallelism):
    """What edits it, and the identity at the edge of a module where it is read."""
    model, records = models.mlp(), {}
    with FlexModel(parallelism.shard(model), records, **parallelism.sizes) as flex:
        flex.register_full_backward_pre_hook(HookFunction("fc1", editing_function=mixing))
        flex.register_full_backward_hook(HookFunction("fc2"))
        hook_gradient(model, "fc1", mixing)
        check_second_derivatives(flex, parallelism, model)
    assert not any(record.requires_grad for record in records.get("fc2", []))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "edit_on", "why"),
    [
        ("tp", "rank0", "runs on rank 0 only"),
        ("dp", "rank0", "runs on rank 0 only"),
        ("dtensor", "all", "DTensor have no second derivative"),
        ("fsdp2", "all", "FSDP frees"),
    ],
)
def test_second_derivatives_that_would_be_wrong_are_refused_on_every_rank(name, edit_on, why):
    parallelism = models.TWO_RANKS[name]
    flex = FlexModel(parallelism.shard(models.mlp()), edit_on=edit_on, **parallelism.sizes)
    flex.register_forward_hook(HookFunction("fc1", editing_function=mixing))
    x = parallelism.my_rows(BATCH).clone().requires_grad_()
    with pytest.raises(HookError, match=f"'fc1'.*create_graph=True is refused.*{why}"):
        torch.autograd.grad(mean_loss(flex(x)), x, create_graph=True)
    mean_loss(flex(x)).backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", PARALLELISMS)
def test_a_loss_on_an_activation_kept_in_save_ctx(name):
    parallelism = models.TWO_RANKS[name]

    def keep(module, full, save_ctx, modules):
        save_ctx.kept = full

    model, kept = models.mlp(), []
    model.fc1.register_forward_hook(lambda module, args, output: kept.append(output))
    (mean_loss(model(BATCH)) + kept[0].cos().mean()).backward()

    flex = FlexModel(parallelism.shard(models.mlp()), **parallelism.sizes)
    flex.register_forward_hook(HookFunction("fc1", editing_function=keep))
    output = flex(parallelism.my_rows(BATCH))
    (mean_loss(output) + flex.save_ctx.kept.cos().mean()).backward()
    gradients = parallelism.full_gradients(model, flex.module)
    for parameter_name, parameter in model.named_parameters():
        assert_close(gradients[parameter_name], parameter.grad)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("edit_on", ["all", "rank0"])
@pytest.mark.parametrize("layout", [Shard(-1), Replicate(), Partial()], ids=str)
def test_what_the_user_keeps_of_an_edit_stays_as_the_model_writes_to_it(layout, edit_on, grad):
    """Exp keeps its result for backward, too."""
    kept = []

    def edit(module, full, save_ctx, modules):
        kept.append(full.exp())
        return kept[-1]

    weight, x = models.random(6, 8), models.random(4, 8).mul_(0.1)
    layer = nn.Linear(8, 6, bias=False, dtype=torch.float64)
    layer.weight.data.copy_(weight)
    model = parallelize_module(
        nn.Sequential(layer),
        models.mesh(1, 2)["tp"],
        {"0": RowwiseParallel(use_local_output=False, output_layouts=layout)},
    )
    with FlexModel(model, tensor_parallel_size=2, edit_on=edit_on) as flex:
        flex.annotate_layout(models.INPUT, kind="forward_pre", tp=Shard(1))
        flex.register_forward_hook(HookFunction("0", editing_function=edit))
        with torch.set_grad_enabled(grad):
            output = flex(x.chunk(2, -1)[dist.get_rank()]).mul_(3)
        edited = (x @ weight.t()).exp()
        assert_close(output.full_tensor(), 3 * edited)
        for full in kept:
            assert_close(full, edited)
        if grad:
            output.full_tensor().sum().backward()
            assert_close(layer.weight.grad.full_tensor(), (3 * edited).t() @ x)


class Reduced(nn.Module):
    """A DTensor that is a mean, a maximum or a minimum of what the ranks hold."""

    def __init__(self, op, edit=None):
        super().__init__()
        self.site, self.placements, self.edit = nn.Identity(), [Partial(op)], edit

    def forward(self, x):
        mesh, factor = models.mesh(1, 2)["tp"], dist.get_rank() + 1
        h = self.site(DTensor.from_local(factor * x, mesh, self.placements, run_check=False))
        h = h.redistribute(placements=[Replicate()]).to_local()
        return h if self.edit is None else self.edit(h)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
@pytest.mark.parametrize("edits", [False, True])
def test_a_dtensor_of_which_another_reduction_than_a_sum_is_due(op, edits):
    """Means, maxima and minima were refused."""
    x, edit = models.random(4, 6).requires_grad_(), torch.tanh if edits else None
    whole, expected = Reduced(op)(x).detach(), Reduced(op, edit)(x)
    (expected_grad,) = torch.autograd.grad(expected.square().sum(), x)
    with FlexModel(Reduced(op), records := {}, tensor_parallel_size=2) as flex:
        function = (lambda module, full, save_ctx, modules: full.tanh()) if edits else None
        flex.register_forward_hook(HookFunction("site", editing_function=function))
        for _ in range(3):
            output = flex(x)
        (grad,) = torch.autograd.grad(output.square().sum(), x)
    assert_close((output, grad), (expected, expected_grad))
    if dist.get_rank() == 0:
        assert_close(records["site"][0], whole)

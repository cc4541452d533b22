"""Graphs that an edit or a user can make: each equals the unsharded model under torch's hook."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.testing import assert_close

import models
import pipelines
from cells import mean_loss
from flex_model import FlexModel, HookFunction, Select

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


@pytest.mark.ranks(2)
def test_the_gradient_of_the_input():
    parallelism = models.TWO_RANKS["tp"]
    model = models.mlp()
    flex = FlexModel(parallelism.shard(model), tensor_parallel_size=2)
    edit = lambda module, full, save_ctx, modules: full.tanh()  # noqa: E731
    flex.register_forward_hook(HookFunction("fc1", editing_function=edit))
    model.fc1.register_forward_hook(lambda module, args, output: output.tanh())
    x = BATCH.clone().requires_grad_()
    (got,) = torch.autograd.grad(mean_loss(flex(x)), x)
    (expected,) = torch.autograd.grad(mean_loss(model(x)), x)
    assert_close(got, expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("edit_on", ["all", "rank0"])
@pytest.mark.parametrize("name", PARALLELISMS)
def test_a_second_derivative_through_an_edit_is_an_error_on_every_rank(name, edit_on):
    parallelism = models.TWO_RANKS[name]
    flex = FlexModel(parallelism.shard(models.mlp()), edit_on=edit_on, **parallelism.sizes)
    edit = lambda module, full, save_ctx, modules: full.softmax(-1)  # noqa: E731
    flex.register_forward_hook(HookFunction("fc1", editing_function=edit))
    x = parallelism.my_rows(BATCH).clone().requires_grad_()
    (first,) = torch.autograd.grad(mean_loss(flex(x)), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.square().sum().backward()


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


class Copied(nn.Module):
    """The input of a column-parallel layer as its ranks share it: a module of its own, whose
    gradients are parts of a sum.
    """

    def __init__(self, group):
        super().__init__()
        self.group = group

    def forward(self, x):
        return x * 1 if self.group is None else models.CopyToRanks.apply(x, self.group)


class ColumnsOfCopy(models.ColumnLinear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


def copied_mlp(group):
    model = models.mlp()
    if group is not None:
        fc1 = ColumnsOfCopy(model.fc1, group)
        model = models.tensor_parallel(model, group)
        model.fc1 = fc1
        model.fc1.in_features, model.fc1.out_features = 6, 8
    model.inp = nn.Sequential(model.inp, Copied(group))
    return model


@pytest.mark.ranks(2)
@pytest.mark.parametrize("select", [None, Select(units=[4, 1])])
@pytest.mark.parametrize("edits", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
def test_a_loss_on_a_kept_activation_whose_gradients_the_model_sums(passes, edits, select):
    def keep(module, full, save_ctx, modules):
        save_ctx.kept = full

    def gradients(group, process_group, size):
        model = copied_mlp(group)
        sizes = {"tensor_parallel_size": size, "process_group": process_group}
        with FlexModel(model, **sizes) as flex:
            if edits:
                edit = lambda module, full, save_ctx, modules: full + full.flip(-1)  # noqa: E731
                flex.register_forward_hook(
                    HookFunction("inp.1", editing_function=edit, output_name="edited")
                )
            flex.register_forward_hook(HookFunction("inp.1", editing_function=keep, select=select))
            for _ in range(passes):
                loss = mean_loss(flex(BATCH))
                (loss + flex.save_ctx.kept.cos().mean()).backward()
        return [parameter.grad for parameter in model.inp[0].parameters()]

    group = models.mesh(1, 2)["tp"].get_group()
    expected = gradients(None, pipelines.alone_group(), 1)
    assert_close(gradients(group, None, 2), expected)

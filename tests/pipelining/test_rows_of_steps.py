"""What is proven of the rows of micro-batches holds for all of them alike, and in later steps as
far as nothing that the path depends on has changed.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flex_model import FlexModel, HookError, HookFunction
from flex_model.pipelining.instrumented_stage import stages_of
from flex_model.selection import Select
from pipelines import ALL, Transposed, make_mlp, make_schedule, part, unsplit
from test_pipelining import MSE, check_records, data

GPIPE = ALL[0]
NAME = "layers.6.act"  # of the last of two stages


class Path(nn.Module):
    """Its path depends on more than the inputs of the model, or on their values."""

    def __init__(self, kind=""):
        super().__init__()
        self.kind = kind
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x):
        values = x.detach()
        if self.kind == "an attribute":
            return x.flip(0)
        if self.kind == "a number":
            return x.roll(int(values[0].sum().item() > values.mean().item()), 1)
        if self.kind == "a branch":
            return x * 2 if values.sum() < 1e6 else x.flip(0)
        return self.norm(x) if self.kind == "statistics" else x


class Last(nn.Module):
    """A last stage with a flag among its arguments."""

    def __init__(self, model):
        super().__init__()
        self.model, self.inner = model, nn.Identity()

    def forward(self, x, is_reversed=False):
        x = self.model(x)
        return self.inner(x.flip(0)).flip(0) if is_reversed else self.inner(x)


class Factor(nn.Module):
    """A stage that is given what is to get gradients, too."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, by):
        return self.model(x * by)


def with_path(path):
    model = make_mlp()
    model.layers[6].act = path
    return model.eval()


def record(flex):
    flex.register_forward_hook(HookFunction(NAME))


def record_fc1(flex):
    flex.register_forward_hook(HookFunction("layers.6.fc1"))


def record_both(flex):
    record(flex)
    record_fc1(flex)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("change", ["an attribute", "a hook", "a forward"])
def test_a_step_whose_modules_have_changed_is_followed_anew(change):
    """Rows in reverse order have the sizes of those in order."""
    model, (x, y) = with_path(Path()), data()
    schedule = make_schedule(GPIPE, model, loss_fn=MSE)
    with FlexModel(schedule, records := {}) as flex:
        record(flex)
        flex(x, target=y)
        check_records(records, unsplit(model, record, x, y, MSE)["records"])
        if dist.get_rank() == 1:
            path = stages_of(schedule)[0].submod.layers[6].act
            if change == "an attribute":
                path.kind = change
            elif change == "a hook":
                path.register_forward_hook(lambda module, args, output: output.flip(0))
            else:
                path.forward = lambda x: x.flip(0)
        if change == "a hook":  # it is called after ours
            flex.register_forward_hook(HookFunction("layers.6.fc2"))
        with pytest.raises(HookError, match=r"is not known .lost at flip"):
            flex(x, target=y)


@pytest.mark.ranks(2)
def test_an_argument_that_is_no_tensor_may_choose_the_path():
    def cut(model, index, size):
        stage = part(model, index, size)
        return Last(stage) if index == size - 1 else stage

    model, (x, y) = make_mlp(), data()
    with FlexModel(make_schedule(GPIPE, model, cut=cut, loss_fn=MSE), records := {}) as flex:
        flex.register_forward_hook(HookFunction("inner"))
        for is_reversed in (False, True, False):
            if is_reversed:
                with pytest.raises(HookError, match=r"is not known .lost at flip"):
                    flex(x, target=y, is_reversed=True)
            else:
                flex(x, target=y, is_reversed=False)
                check_records(records, {"inner": [model(x).detach()]})


@pytest.mark.ranks(2)
def test_what_is_one_micro_batchs_own_leaves_its_rows_in_their_place():
    model, (x, y) = with_path(Path("a number")), data()
    path, seen = model.layers[6].act, []
    handle = path.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    for rows in x.chunk(4):
        model(rows)
    handle.remove()
    with FlexModel(make_schedule(GPIPE, model, 4, loss_fn=MSE), records := {}) as flex:
        record(flex)
        flex(x, target=y)
        check_records(records, {NAME: [torch.cat(seen)]})


@pytest.mark.ranks(2)
def test_branches_on_values_that_are_to_be_followed_always():
    model, (x, y) = with_path(Path("a branch")), data()
    schedule = make_schedule(GPIPE, model, loss_fn=MSE)
    with FlexModel(schedule, records := {}, follow="always") as flex:
        for register, recorded in ((record_fc1, record_fc1), (record, record_both)):
            register(flex)
            expected = unsplit(model, recorded, x, y, MSE)["records"]
            for _ in range(2):
                flex(x, target=y)
                check_records(records, expected)


@pytest.mark.ranks(2)
def test_statistics_that_earlier_steps_wrote():
    model, (x, y) = with_path(Path("statistics")), data()
    schedule = make_schedule(GPIPE, model, loss_fn=MSE)
    with FlexModel(schedule, records := {}) as flex:
        record(flex)
        flex(x, target=y)
        check_records(records, unsplit(model, record, x, y, MSE)["records"])
        flex.train()
        flex(x, target=y, groups=())
        flex.eval()
        seen = []
        if dist.get_rank() == 1:  # its stage has the statistics
            path = stages_of(schedule)[0].submod.layers[6].act
            path.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
        flex(x, target=y)
        of_ranks = [None, None]
        dist.all_gather_object(of_ranks, seen)
        check_records(records, {NAME: [torch.cat(of_ranks[1])]})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("num_microbatches", [2, 8])
@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize("along_rows", [True, False])
def test_a_selection_along_the_dim_of_the_rows(num_microbatches, is_recorded, along_rows):
    """The rows are along dim 1: an index there is another row in each micro-batch."""
    inner = "layers.6.act.inner"
    dims = {"units": 1} if along_rows else {"units": 0, "rows": 1}

    def script(flex):
        double = HookFunction(
            inner,
            editing_function=lambda module, x, save_ctx, modules: x * 2,
            select=Select(units=0, dims=dims),
            record=is_recorded,
        )
        flex.register_forward_hook(double)
        flex.register_forward_hook(HookFunction("layers.6.fc2"))

    model, (x, y) = with_path(Transposed()), data()
    schedule = make_schedule(GPIPE, model, num_microbatches, loss_fn=MSE)
    stated = None if along_rows else {inner: 1}
    with FlexModel(schedule, records := {}, microbatch_dim=stated) as flex:
        script(flex)
        if along_rows:
            with pytest.raises(HookError, match="selects along dim 1, along which the batch"):
                flex(x, target=y)
            return
        for _ in range(2):
            flex(x, target=y)
            check_records(records, unsplit(model, script, x, y, MSE)["records"])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("mode", ["micro", "full"])
def test_inputs_get_gradients_of_the_mean_loss(kind, mode):
    """Inputs that are split and those that are not; in the first stage and in the last."""
    model, (x, y) = make_mlp(), data()
    x.requires_grad_()
    by = torch.rand(1, 8).requires_grad_()

    def cut(model, index, size):
        stage = part(model, index, size)
        return Factor(stage) if index in (0, size - 1) else stage

    schedule = make_schedule(kind, model, cut=cut, loss_fn=MSE)
    with FlexModel(schedule, batch_mode=mode) as flex:
        for _ in range(2):
            (x * 1).sum().backward()  # what was there before is kept
            flex(x, target=y, by=by)
    size = schedule._num_stages
    whole, first, last = (one.detach().clone().requires_grad_() for one in (x, by, by))
    h = model.emb(whole * first)
    for i, layer in enumerate(model.layers):
        h = layer(h * last if i == len(model.layers) * (size - 1) // size else h)
    MSE(model.head(h), y).backward()
    stages = stages_of(schedule)
    here = [(stages[0].is_first, first), (stages[-1].is_last, last)]
    own = [2 * one.grad for is_here, one in here if is_here]
    assert (by.grad is None) == (not own)
    if own:
        torch.testing.assert_close(by.grad, sum(own), rtol=0, atol=1e-6)
    if stages[0].is_first:
        torch.testing.assert_close(x.grad, 2 * whole.grad + 2, rtol=0, atol=1e-6)

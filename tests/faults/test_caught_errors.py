"""Errors that the user catches, so that the loop goes on: no later record is another batch's."""

import contextlib
import copy
import random
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing import assert_close

import models
from flex_model import FlexModel, HookError, HookFunction
from pipelines import alone_group
from shared_edits import double, mixing_features
from tiers import grid_but

BATCH = models.random(4, 6)
STEPS = 50
TRANSPORTS = ["shared_memory", "gloo"]


class Failing(models.MLP):
    """Raises in its forward when told to, where no collective of its own comes after."""

    fails = False

    def forward(self, x):
        x = self.fc2(self.act(self.fc1(self.inp(x))))
        if self.fails:
            raise LookupError("the model went wrong")
        return self.out(x)


def expected_records(batch):
    """Of each hook below, on one rank: values that only this batch has."""
    model = models.seeded(Failing).double()
    hidden = model.fc1(model.inp(batch))
    act = model.act(2 * hidden)
    act.retain_grad()
    output = model.out(model.fc2(act))
    output.square().sum().backward()
    return {"fc1": [hidden.detach()], "act": [act.detach()], "grad": [act.grad], "out": [output]}


class Stopped(BaseException):
    """As ``pytest.fail`` and asyncio raise: no Exception."""


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "kind, text",
    [
        ("forward", "rank 1 left while it was at"),
        ("full_backward", "rank 1: the model's own backward failed or was interrupted"),
    ],
)
def test_what_is_no_exception_ends_the_run_of_all_ranks_at_once(kind, text):
    def edit(module, full, save_ctx, modules):
        if dist.get_rank() == 1:
            raise Stopped("by the user")

    flex = FlexModel(models.mlp(), {}, data_parallel_size=2, timeout=30)
    getattr(flex, f"register_{kind}_hook")(HookFunction("act", None, edit))
    start, batch = time.monotonic(), models.random(4, 6).chunk(2)[dist.get_rank()]
    with pytest.raises(Stopped if dist.get_rank() == 1 else HookError) as caught:
        flex(batch).sum().backward()
    assert time.monotonic() - start < 10
    assert dist.get_rank() == 1 or text in str(caught.value)
    flex.restore()


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("edit_on", grid_but(["all", "rank0"], "all"))
@pytest.mark.parametrize("transport", grid_but(TRANSPORTS, "shared_memory"))
def test_after_fifty_caught_errors_no_record_is_of_another_batch(transport, edit_on, monkeypatch):
    """An edit of the forward, an edit of the backward, or the model itself, on any rank."""
    monkeypatch.setenv("FLEX_MODEL_TRANSPORT", transport)
    choose, rank, failing, records = random.Random(edit_on), dist.get_rank(), [None], {}

    def edit_of(kind):
        def edit(module, full, save_ctx, modules):
            if failing[0] == kind:
                raise ArithmeticError(f"the {kind} edit went wrong")
            return full * 2 if kind == "forward" else None

        return edit

    model = models.TWO_RANKS["tp"].shard(models.seeded(Failing).double())
    flex = FlexModel(model, records, tensor_parallel_size=2, edit_on=edit_on, timeout=30)
    flex.register_forward_hook(HookFunction("fc1", (None, 8), edit_of("forward")))
    flex.register_forward_hook(HookFunction("act", (None, 8)))
    # An edit, at which a rank waits for one whose model fails before it.
    flex.register_forward_hook(HookFunction("out", None, lambda module, full, *_: full + 0))
    hook = HookFunction("act", (None, 8), edit_of("backward"), output_name="grad")
    flex.register_full_backward_pre_hook(hook)
    slowest, errors = 0.0, 0
    for step in range(STEPS):
        kind = choose.choice([None, "forward", "backward", "model"])
        where = 0 if edit_on == "rank0" and kind != "model" else choose.randrange(2)
        failing[0] = kind if rank == where else None
        model.fails = kind == "model" and rank == where
        batch, start = BATCH + step, time.monotonic()
        if kind is not None:
            mine = LookupError if kind == "model" and rank == where else HookError
            with pytest.raises(mine, match=r"went wrong") as error:
                flex(batch).square().sum().backward()
            assert mine is LookupError or f"rank {where}" in str(error.value)
            slowest = max(slowest, time.monotonic() - start)
            assert not any(record is None for kept in records.values() for record in kept)
            errors += 1
            continue
        output = flex(batch)
        output.square().sum().backward()
        assert_close(output, expected_records(batch)["out"][0])
        if rank == 0:
            assert_close(records, expected_records(batch))
    assert errors > STEPS / 2
    assert slowest < 2
    print(f"{errors} errors, slowest {slowest:.3f} s")
    flex.restore()


class _FailingGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, model):
        ctx.model = model
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.model.fails:
            raise LookupError("the gradient went wrong")
        return grad, None


class FailingBackward(models.MLP):
    """Raises in its backward when told to: before the hooks below, or between two of them."""

    fails = False
    where = "first"

    def forward(self, x):
        x = self.fc2(self.act(self.fc1(self._maybe(self.inp(x), "between"))))
        return self.out(self._maybe(x, "first"))

    def _maybe(self, x, where):
        return _FailingGradient.apply(x, self) if self.where == where else x


@pytest.mark.ranks(2)
def test_a_collective_that_the_failed_rank_never_called_ends_the_flex_model():
    """The sum of the other rank's output was paired with this one's next: silent wrong numbers."""
    fails, plan = [False], {"0": ColwiseParallel(), "1": RowwiseParallel()}

    def hook(module, args):
        if fails[0] and dist.get_rank() == 1:
            raise MemoryError("out of memory")

    model = models.seeded(nn.Sequential, nn.Linear(6, 8), nn.Linear(8, 6)).double()
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    model[1].register_forward_pre_hook(hook)
    flex = FlexModel(model, {}, timeout=20)
    flex.register_forward_hook(HookFunction("0"))
    with torch.no_grad():
        flex(BATCH)
        fails[0] = True
        with pytest.raises(MemoryError if dist.get_rank() else HookError, match="out of memory"):
            flex(BATCH)
        fails[0] = False
        with pytest.raises(HookError, match=r"can't be used.*has not waited for"):
            flex(BATCH)
        flex.restore()
        if dist.get_rank() == 1:
            model[1](torch.zeros(4, 4, dtype=torch.float64))  # meets what rank 0 has begun


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["ddp", "dtensor"])
def test_a_run_keeps_the_records_of_a_forward_that_failed_alike_on_all_ranks(name, monkeypatch):
    """As one process does: how they are placed was compared at the end of a forward only."""
    found = []
    for way, group in ((models.TWO_RANKS[name], None), (models.ONE_RANK, alone_group())):
        model, records = way.shard(models.seeded(Failing).double()), {}
        flex = FlexModel(model, records, process_group=group, output_ranks="all")
        for site in ("fc1", "act", "out"):
            flex.register_forward_hook(HookFunction(site))
        with flex.active():
            for fails in (True, False, True):
                monkeypatch.setattr(Failing, "fails", fails)
                with pytest.raises(LookupError) if fails else contextlib.nullcontext():
                    flex(way.my_rows(BATCH))
        found.append(records)
        flex.restore()
    assert {site: len(kept) for site, kept in found[0].items()} == {"fc1": 3, "act": 3, "out": 1}
    assert_close(*found)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("inside", [(), (1,)])
def test_code_around_forwards_that_fails_on_all_ranks(inside):
    """All have called the same collectives, unless one has failed inside of a forward."""
    fails, plan = [()], {"0": ColwiseParallel(), "1": RowwiseParallel()}

    def hook(module, args):
        if dist.get_rank() in fails[0]:
            raise LookupError("inside")

    model = models.seeded(nn.Sequential, nn.Linear(6, 8), nn.Linear(8, 6)).double()
    expected = model(BATCH).detach()
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    model[1].register_forward_pre_hook(hook)
    flex = FlexModel(model, {}, timeout=20)
    flex.register_forward_hook(HookFunction("0"))

    def run(stopping):
        with flex.active():
            flex(BATCH)
            if dist.get_rank() in stopping:
                raise LookupError

    with torch.no_grad():
        for failing in ((), inside):
            fails[0] = ()
            flex(BATCH)  # the next one is not followed: it ends without an exchange
            fails[0] = failing
            with pytest.raises(LookupError):
                run((0, 1))
        fails[0] = ()
        if inside:
            with pytest.raises(HookError, match=r"can't be used.*has not waited for"):
                flex(BATCH)
            if dist.get_rank() == 1:
                model[1](torch.zeros(4, 4, dtype=torch.float64))  # meets what rank 0 has begun
        else:
            assert_close(flex(BATCH), expected)
            with pytest.raises((LookupError, HookError)) as caught:
                run((1,))
            text = "rank 1: code in active() or generate(), outside of the model's forward, failed:"
            assert dist.get_rank() == 1 or str(caught.value).startswith(f"{text} LookupError (")
    flex.restore()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transport", grid_but(TRANSPORTS, "shared_memory"))
@pytest.mark.parametrize("where", ["first", "between"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_backward_that_fails_outside_of_hooks_is_told(
    transport, where, checkpointed, monkeypatch
):
    """On one rank or on both: all raise at once, and the next step works."""
    monkeypatch.setenv("FLEX_MODEL_TRANSPORT", transport)
    model, records, rank = models.seeded(FailingBackward).double(), {}, dist.get_rank()
    model.where = where
    flex = FlexModel(model, records, data_parallel_size=2, timeout=30)
    flex.register_full_backward_hook(HookFunction("fc1", editing_function=double))
    flex.register_full_backward_pre_hook(HookFunction("inp"))
    if checkpointed:
        flex.register_forward_hook(HookFunction("act", editing_function=double))
    expected = None
    for step in range(12):
        failing = [(), (0,), (1,), (0, 1)][step % 4]
        model.fails = rank in failing
        if checkpointed:
            output = torch.utils.checkpoint.checkpoint(flex, BATCH, use_reentrant=False)
        else:
            output = flex(BATCH)
        start = time.monotonic()
        if failing:
            mine = LookupError if model.fails else HookError
            with pytest.raises(mine, match=r"the gradient went wrong|own backward failed") as error:
                output.square().sum().backward()
            assert mine is LookupError or f"rank {failing[0]}" in str(error.value)
        else:
            output.square().sum().backward()
            if rank == 0:
                expected = expected or {name: list(kept) for name, kept in records.items()}
                assert len(records["inp"]) == 1
                assert_close(records, expected, rtol=0, atol=0)
        assert time.monotonic() - start < 2
    flex.restore()


@torch.library.custom_op("caught_errors::tanh", mutates_args=())
def opaque_tanh(x: torch.Tensor) -> torch.Tensor:
    return x.tanh()


def save_output(ctx, inputs, output):
    ctx.save_for_backward(output)


opaque_tanh.register_autograd(
    lambda ctx, grad: grad * (1 - ctx.saved_tensors[0] ** 2), setup_context=save_output
)


class Opaque(nn.Module):
    def forward(self, x):
        return opaque_tanh(x)  # it has no rule


def refused_backward(flex, model, batch):
    """Of the sharded model, after a backward that all ranks refuse; or of its twin."""
    flex.register_full_backward_hook(HookFunction("3", output_name="grad"))
    handle = flex.register_forward_hook(HookFunction("0", editing_function=mixing_features))
    results = []
    for is_first in (True, False):
        batch = batch.clone().requires_grad_()
        loss = flex(batch).square().mean()
        if is_first and flex.module is not model:
            kwargs = {} if isinstance(model[1], Opaque) else {"create_graph": True}
            with pytest.raises((HookError, ValueError), match=r"is refused|is not known") as error:
                torch.autograd.grad(loss, batch, retain_graph=True, **kwargs)
            assert "hook on '0'" in str(error.value) and flex.output_ptr.get("grad", []) == []
            if not kwargs:
                flex.annotate_layout("1", tp=Replicate())
                loss = flex(batch).square().mean()
        results += [loss, *torch.autograd.grad(loss, batch)]
        results += [*flex.output_ptr.get("grad", []), *flex.output_ptr.get("0", [])]
    handle.remove()
    return results


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layer", [nn.Tanh, Opaque])
def test_after_a_backward_that_is_refused_alike_the_next_one_is_right(layer):
    """It ended the FlexModel, whose output is of a collective that is not waited for; and the next
    backward of its graph delivered what it had kept.
    """
    layers = nn.Linear(6, 6), layer(), nn.Linear(6, 8), nn.Linear(8, 6)
    model = models.seeded(nn.Sequential, *layers).double()
    expected = refused_backward(FlexModel(model, {}, process_group=alone_group()), model, BATCH)
    sharded = copy.deepcopy(model)
    plan = {"2": ColwiseParallel(), "3": RowwiseParallel()}
    parallelize_module(sharded, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan)
    with FlexModel(sharded, {}, timeout=20, output_ranks="all") as flex:
        assert_close(refused_backward(flex, model, BATCH), expected)


# ---- Calls from where they are not awaited ------------------------------------------------------


def calls_the_wrap(flex):
    def edit(module, full, save_ctx, modules):
        flex(BATCH)
        return full

    return edit


def calls_the_module(flex):
    def edit(module, full, save_ctx, modules):
        flex.module(BATCH)
        return full

    return edit


def calls_its_own_module(flex):
    def edit(module, full, save_ctx, modules):
        return module(full[:, :6])

    return edit


def gathers_a_parameter(flex):
    def edit(module, full, save_ctx, modules):
        return full + flex.get_module_parameter("out.bias").sum()

    return edit


REENTRANT = [calls_the_wrap, calls_the_module, calls_its_own_module]
AMONG_RANKS = [*REENTRANT, gathers_a_parameter]


def check_reentrancy(reenter, **settings):
    records, model = {}, models.mlp()
    flex = models.replicas(FlexModel(model, records, timeout=20, **settings))
    handle = flex.register_forward_hook(HookFunction("fc1", editing_function=reenter(flex)))
    start = time.monotonic()
    with pytest.raises(HookError, match=r"'fc1'.*inside an editing function"):
        flex(BATCH)
    assert time.monotonic() - start < 2
    handle.remove()
    flex.register_forward_hook(HookFunction("fc1", editing_function=double))
    flex(BATCH)
    if "tensor_parallel_size" not in settings or dist.get_rank() == 0:
        oracle = models.mlp()
        assert_close(records["fc1"], [oracle.fc1(oracle.inp(BATCH)).detach()])


@pytest.mark.parametrize("reenter", REENTRANT)
def test_an_edit_that_runs_the_hooked_model_is_an_error(reenter):
    check_reentrancy(reenter)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", [reenter.__name__ for reenter in AMONG_RANKS])
@pytest.mark.parametrize("edit_on", ["all", "rank0"])
def test_an_edit_that_runs_the_hooked_model_is_an_error_on_two_ranks(name, edit_on):
    check_reentrancy(globals()[name], tensor_parallel_size=2, edit_on=edit_on)

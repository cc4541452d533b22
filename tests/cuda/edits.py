"""Processes with a GPU each, whose hook reads or edits a sharded tensor: test_peers_cuda.py starts
them.

    python -m tests.cuda.edits RANK NUM_RANKS STORE_FILE

Prints nothing and exits with 0 if the edits are right, tensors do not pass through the host inside
a forward or backward, the host does not wait for them there, and each transfer takes two launches
at most; and if parameters that differ between ranks are an error where the run ends.
"""

import contextlib
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flex_model import FlexModel, HookFunction
from flex_model.selection import Select
from tests import models
from tests.cuda.processes import run_rank, waits_are_errors

TIMEOUT_S = 60.0
SIZE = (64, 32)
WAITS = [
    (torch.cuda.Event, "synchronize"),
    (torch.cuda.Event, "query"),
    (torch.cuda, "synchronize"),
]
WAITS += [(torch.cuda.Stream, "synchronize"), (torch.cuda.Stream, "query")]


class Waits:
    """Counts, inside, waits of the host for a GPU."""

    def __init__(self, count):
        self.count = count

    def __enter__(self):
        self.patches = []
        for owner, name in WAITS:
            original = getattr(owner, name)

            def counted(*args, _name=name, _original=original, **kwargs):
                self.count["wait"] += 1
                return _original(*args, **kwargs)

            self.patches.append(mock.patch.object(owner, name, counted))
        for patch in self.patches:
            patch.start()
        self.errors = waits_are_errors()
        self.errors.__enter__()

    def __exit__(self, *_):
        self.errors.__exit__(None, None, None)
        for patch in self.patches:
            patch.stop()


class Counted(TorchDispatchMode):
    """Counts, inside and from ``begin`` to ``end``, operators that take tensors from a GPU to the
    host or back, all operators, and waits.
    """

    def __init__(self):
        super().__init__()
        self.count = Counter()
        self.waits, self.is_counting = Waits(self.count), False

    def begin(self, *_):
        self.is_counting = True
        self.waits.__enter__()

    def end(self, *_):
        self.waits.__exit__()
        self.is_counting = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
        devices = {tensor.device.type for tensor in tensors if tensor.dim()}
        if self.is_counting:
            self.count["operator"] += 1
            self.count["crossing"] += len(devices) > 1
        return result


class Model(nn.Module):
    """Counts from its first module to its second; in the backward to the parameter's gradient."""

    counted = None  # of the class: a model whose own changes is followed anew

    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Identity(), nn.Identity()
        self.scale = nn.Parameter(torch.full((width,), 3.0))
        self.whole = nn.Parameter(torch.full(SIZE[1:], 3.0))  # on every rank; hooks alone read it
        self.scale.register_post_accumulate_grad_hook(lambda _: self.counted and self.counted.end())

    def forward(self, x):
        x, counted = x * self.scale, self.counted
        if counted is None:
            return self.second(self.first(x))
        with counted:
            counted.begin()
            y = self.first(x)
            counted.end()
        y.register_hook(counted.begin)
        return self.second(y)


def edit(module, full, save_ctx, modules):
    return full * full.sum(1, keepdim=True)


def edit_a_vector(module, full, save_ctx, modules):
    return full * full.sum()


def edit_that_draws(module, full, save_ctx, modules):
    return edit(module, full, save_ctx, modules) + 0 * torch.rand_like(full)


def edit_by_a_module(module, full, save_ctx, modules):
    return modules["probe"](full)


used = []  # the hook, for its parameters


def edit_by_a_parameter(module, full, save_ctx, modules):
    return full * used[0].parameters["scale"]


def edit_by_a_replica(module, full, save_ctx, modules):
    return full * used[0].parameters["whole"]


def unchanged(full, edited):
    return full


def whole(full, edited):
    return edited(full)


def units(full, edited):
    at = [5, 30, 2, 17]
    return full.index_copy(1, torch.tensor(at), edited(full[:, at]))


def in_bfloat16(full, edited):
    part = edited(full[:, 4:24].to(torch.bfloat16)).to(full.dtype)
    return torch.cat([full[:, :4], part, full[:, 24:]], 1)


# By name: the kind of hook, the placement, the selection, what it does, and the editing function.
CASES = {
    "read": ("forward", Shard(1), None, unchanged, None),
    "read gradient": ("full_backward", Shard(1), None, unchanged, None),
    "whole": ("forward", Shard(1), None, whole, edit),
    "units": ("forward", Shard(1), Select(units=[5, 30, 2, 17]), units, edit),
    "dtype": (
        "forward",
        Shard(1),
        Select(units=slice(4, 24), dtype=torch.bfloat16),
        in_bfloat16,
        edit,
    ),
    "partial sums": ("forward", Partial(), None, whole, edit),
    "trainable": ("forward", Shard(1), None, whole, edit_by_a_module),
    "named parameter": ("forward", Shard(1), None, whole, edit_by_a_parameter),
    "named replica": ("forward", Shard(1), None, whole, edit_by_a_replica),
    "random": ("forward", Shard(1), None, whole, edit_that_draws),
    "gradient": ("full_backward", Shard(1), None, whole, edit),
    "gradient by a replica": ("full_backward", Shard(1), None, whole, edit_by_a_replica),
    "gradient units": ("full_backward_pre", Shard(1), Select(units=[5, 30, 2, 17]), units, edit),
    "parameter": ("parameter", Shard(1), None, whole, edit_a_vector),
}

NAMED = {edit_by_a_parameter: ("scale",), edit_by_a_replica: ("whole",)}


def reference_of(name, edited):
    """The output, and the gradients of the input and of the parameter."""
    kind, _, _, reference, _ = CASES[name]
    full = models.random(*SIZE, dtype=torch.float32).requires_grad_()
    scale = torch.full(SIZE[1:], 3.0, requires_grad=True)
    weight = models.random(*SIZE, seed=3, dtype=torch.float32)
    hidden = full * scale
    change = lambda tensor: reference(tensor, edited)  # noqa: E731
    output = change(hidden) if kind == "forward" else hidden
    if kind.startswith("full_backward"):
        hidden.register_hook(change)
    if kind == "parameter":
        scale.register_hook(change)
    (output * weight).sum().backward()
    return full.detach(), weight, output.detach(), full.grad, scale.grad


def check(name, rank, num_ranks, device, edit_on):
    kind, placement, select, _, function = CASES[name]
    is_partial = isinstance(placement, Partial)
    model = Model(SIZE[1] // (1 if is_partial else num_ranks)).to(device)
    probe = models.seeded(nn.Linear, SIZE[1], SIZE[1]).float()
    flex = FlexModel(model, records := {}, tensor_parallel_size=num_ranks, edit_on=edit_on)
    flex.annotate_layout(models.INPUT, kind="forward_pre", tp=placement)
    flex.annotate_layout("scale", kind="parameter", tp=Replicate() if is_partial else Shard(0))
    flex.annotate_layout("whole", kind="parameter", tp=Replicate())
    flex.register_trainable_module("probe", models.seeded(nn.Linear, *probe.weight.shape).float())
    flex.trainable_modules.to(device)
    site = "scale" if kind == "parameter" else "first"
    register = flex.register_hook if kind == "parameter" else getattr(flex, f"register_{kind}_hook")
    edited = lambda part: function(None, part, None, {"probe": probe})  # noqa: E731
    full_parameters = dict.fromkeys(("scale", "whole"), torch.full(SIZE[1:], 3.0))
    used[:] = [SimpleNamespace(parameters=full_parameters)]
    full, weight, output, grad, scale_grad = reference_of(name, edited)
    named = NAMED.get(function, ())
    hook = HookFunction(site, editing_function=function, select=select, parameters=named)
    used[:] = [hook]
    register(hook)

    def part(tensor):
        if is_partial:
            return tensor if rank == 0 else tensor * 0
        return tensor.chunk(num_ranks, -1)[rank]

    near = {"rtol": 1e-4, "atol": 1e-4}  # sums over rows
    for is_first in (True, False):  # the first run finds the layouts
        counted = Model.counted = None if is_first else Counted()
        x = part(full).to(device).requires_grad_()
        y = flex(x)
        torch.testing.assert_close(y.cpu(), part(output))
        loss, model.scale.grad = (y * part(weight).to(device)).sum(), None
        with counted or contextlib.nullcontext():
            num_operators = 0 if is_first else counted.count["operator"]
            loss.backward()
        if not is_first:
            count = counted.count
            assert (count["crossing"], count["wait"]) == (0, 0), (name, edit_on, count)
            assert not counted.is_counting and count["operator"] > num_operators
        if not is_partial:
            torch.testing.assert_close(x.grad.cpu(), part(grad), **near)
            torch.testing.assert_close(model.scale.grad.cpu(), part(scale_grad), **near)
        if rank == 0:
            (record,) = records[site]
            assert record.device.type == "cpu"
    flex.restore()


def check_replicas_that_differ(rank, num_ranks, device, kind):
    """Ranks have other values, on GPUs, and on rank 0's host: the run or the backward fails."""
    model = Model(SIZE[1] // num_ranks).to(device)
    flex = FlexModel(model, records := {}, tensor_parallel_size=num_ranks)
    flex.annotate_layout(models.INPUT, kind="forward_pre", tp=Shard(1))
    flex.annotate_layout("scale", kind="parameter", tp=Shard(0))
    flex.annotate_layout("whole", kind="parameter", tp=Replicate())
    used[:] = [HookFunction("first", editing_function=edit_by_a_replica, parameters=("whole",))]
    getattr(flex, f"register_{kind}_hook")(used[0])
    x = torch.ones(SIZE[0], SIZE[1] // num_ranks, device=device, requires_grad=True)

    def output():
        x.grad, y = None, flex(x)
        y.sum().backward()
        return x.grad if kind == "full_backward" else y

    Model.counted = None
    for is_on_host in (False, True):
        if is_on_host and rank == 0:
            model.whole.data = model.whole.data.cpu()
        model.whole.data.add_(rank)
        for _ in range(2):
            with pytest.raises(ValueError, match="'whole': the tensor-parallel ranks hold diff"):
                output()
            assert not records.get("first")
        model.whole.data.sub_(rank)  # after an error the model works on
        assert (output() == 9.0).all()
        if rank == 0:
            assert len(records["first"]) == 1
    flex.restore()


def check_all(rank, num_ranks, device):
    for edit_on in ("all", "rank0"):
        for name in CASES:
            check(name, rank, num_ranks, device, edit_on)
    for kind in ("forward", "full_backward"):
        check_replicas_that_differ(rank, num_ranks, device, kind)


if __name__ == "__main__":
    run_rank(check_all, TIMEOUT_S)

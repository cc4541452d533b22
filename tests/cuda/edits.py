"""Processes with a GPU each, whose hook edits a sharded tensor: what test_peers_cuda.py starts.

    python -m tests.cuda.edits RANK NUM_RANKS STORE_FILE

Prints nothing and exits with 0 if the edits are right, their tensors do not pass through the host,
the host does not wait for them, and each transfer takes two launches at most.
"""

import contextlib
import sys
from collections import Counter
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Partial, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flex_model import FlexModel, HookFunction
from flex_model.distributed.transports.peer_memory import PeerMemory
from flex_model.selection import Select
from tests import models
from tests.cuda.processes import join_ranks, run_rank, waits_are_errors

TIMEOUT_S = 60.0
SIZE = (64, 32)
TRANSFERS = "all_gather", "gather_to_first", "scatter_from_first", "broadcast"
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
    """Counts, inside, operators that take tensors from a GPU to the host or back, and waits."""

    def __init__(self):
        super().__init__()
        self.count = Counter()
        self.waits = Waits(self.count)

    def __enter__(self):
        self.waits.__enter__()
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        self.waits.__exit__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
        devices = {tensor.device.type for tensor in tensors if tensor.dim()}
        self.count["crossing"] += len(devices) > 1
        return result


class Launches(TorchDispatchMode):
    """Counts, inside, kernels: those of the package, and of torch's copies."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        runtime = sys.modules.get("tests.cuda.emulated.runtime")
        is_ours = function.namespace == "flex_model"
        before = runtime.library.emulated_num_launches() if runtime else 0
        result = function(*args, **(kwargs or {}))
        if is_ours and runtime:
            self.count += runtime.library.emulated_num_launches() - before
        else:
            self.count += is_ours or function.__name__.split(".")[0] in ("copy_", "clone")
        return result


def count_launches():
    """From now on, return the list of transfers by peer memory, each with its launches."""
    transfers = []
    for name in TRANSFERS:
        original = getattr(PeerMemory, name)

        def counted(*args, _name=name, _original=original, **kwargs):
            with Launches() as launches:
                result = _original(*args, **kwargs)
            transfers.append((_name, launches.count))
            return result

        setattr(PeerMemory, name, counted)
    return transfers


class Model(nn.Module):
    """Watches from the output of its first module to the input of its second."""

    counted = contextlib.nullcontext()  # of the class: a model whose own changes is followed anew

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Identity(), nn.Identity()
        self.register_buffer("where_it_is", torch.zeros(1))

    def forward(self, x):
        x = x * 3
        with self.counted:
            y = self.first(x)
        if isinstance(self.counted, Counted):  # in the backward, too
            x.register_hook(lambda _: self.counted.waits.__exit__())
            y.register_hook(lambda _: self.counted.waits.__enter__())
        return self.second(y)


def edit(module, full, save_ctx, modules):
    return full * full.sum(1, keepdim=True)


def edit_that_draws(module, full, save_ctx, modules):
    return edit(module, full, save_ctx, modules) + 0 * torch.rand_like(full)


def edit_by_a_module(module, full, save_ctx, modules):
    return modules["probe"](full)


def whole(full, edited):
    return edited(full)


def units(full, edited):
    at = [5, 30, 2, 17]
    return full.index_copy(1, torch.tensor(at), edited(full[:, at]))


def in_bfloat16(full, edited):
    part = edited(full[:, 4:24].to(torch.bfloat16)).to(full.dtype)
    return torch.cat([full[:, :4], part, full[:, 24:]], 1)


# By name: the placement, the selection, what it does, and the editing function.
CASES = {
    "whole": (Shard(1), None, whole, edit),
    "units": (Shard(1), Select(units=[5, 30, 2, 17]), units, edit),
    "dtype": (Shard(1), Select(units=slice(4, 24), dtype=torch.bfloat16), in_bfloat16, edit),
    "partial sums": (Partial(), None, whole, edit),
    "trainable": (Shard(1), None, whole, edit_by_a_module),
    "random": (Shard(1), None, whole, edit_that_draws),
}


def check(name, rank, num_ranks, device, edit_on):
    placement, select, reference, function = CASES[name]
    model, probe = Model().to(device), models.seeded(nn.Linear, SIZE[1], SIZE[1]).float()
    flex = FlexModel(model, records := {}, tensor_parallel_size=num_ranks, edit_on=edit_on)
    flex.annotate_layout(models.INPUT, kind="forward_pre", tp=placement)
    flex.register_trainable_module("probe", models.seeded(nn.Linear, *probe.weight.shape).float())
    flex.trainable_modules.to(device)
    flex.register_forward_hook(HookFunction("first", editing_function=function, select=select))
    full = models.random(*SIZE, dtype=torch.float32).requires_grad_()
    weight = models.random(*SIZE, seed=3, dtype=torch.float32)
    edited = lambda part: function(None, part, None, {"probe": probe})  # noqa: E731
    expected = reference(full * 3, edited)
    (expected * weight).sum().backward()

    def part(tensor):
        if isinstance(placement, Partial):
            return tensor if rank == 0 else tensor * 0
        return tensor.detach().chunk(num_ranks, 1)[rank]

    for is_first in (True, False):  # the first run finds the layouts
        Model.counted = contextlib.nullcontext() if is_first else Counted()
        x = part(full.detach()).to(device).requires_grad_()
        y = flex(x)
        torch.testing.assert_close(y.cpu(), part(expected))
        if not is_first:
            count = model.counted.count
            assert (count["crossing"], count["wait"]) == (0, 0), (name, edit_on, count)
        (y * part(weight).to(device)).sum().backward()
        if not is_first:
            assert count["wait"] == 0, (name, edit_on, count)
        if not isinstance(placement, Partial):
            torch.testing.assert_close(x.grad.cpu(), part(full.grad))
        if rank == 0:
            (record,) = records["first"]
            assert record.device.type == "cpu"
    flex.restore()


def main():
    rank, num_ranks, path = *map(int, sys.argv[1:3]), sys.argv[3]
    device = join_ranks(rank, num_ranks, path, TIMEOUT_S)
    transfers = count_launches()
    for edit_on in ("all", "rank0"):
        for name in CASES:
            check(name, rank, num_ranks, device, edit_on)
    assert max(count for _, count in transfers) == 2, transfers
    assert {name for name, _ in transfers} == set(TRANSFERS), transfers
    dist.destroy_process_group()


if __name__ == "__main__":
    run_rank(main)

"""Ranks that are a forward apart, since one of them ran it without hooks, which exchanges nothing:
every script here mixed the records of two forwards before.
"""

import contextlib
import time

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

import models
from flex_model import FlexModel, HookError, HookFunction, HookMismatchError
from shared_edits import double

BATCHES = [models.random(4, 6, seed=seed) for seed in range(4)]


def use(transport, monkeypatch):
    """Let the ranks communicate by it."""
    if transport == "two hosts":
        monkeypatch.setenv("FLEX_MODEL_HOST", f"host {dist.get_rank()}")
    else:
        monkeypatch.setenv("FLEX_MODEL_TRANSPORT", transport)


def hooked(name, edit=None, **settings):
    parallelism, records = models.TWO_RANKS[name], {}
    flex = FlexModel(
        parallelism.shard(models.mlp()), records, timeout=20, **parallelism.sizes, **settings
    )
    shape = (None, 8) if parallelism.by_hand else None
    flex.register_forward_hook(HookFunction("fc1", shape, edit))
    return flex, records, parallelism


def check_found(run, groups="all", context=None):
    """One rank has no hooks in a forward, the other in the next."""
    is_early = dist.get_rank() == 0
    differ = pytest.raises(HookMismatchError, match=r"(?s)rank 0 is at.*rank 1 is at")
    with differ as caught, context or contextlib.nullcontext():
        run(0, groups)
        run(1, () if is_early else groups)
        run(2, groups if is_early else ())
    text = str(caught.value)
    assert "before which it made 1 such runs without hooks" in text.split("rank 1 is at")[0]
    assert "before which it made 0 such runs without hooks" in text.split("rank 1 is at")[1]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("edit", [None, double])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("transport", ["shared_memory", "gloo", "two hosts"])
def test_a_rank_that_leaves_the_hooks_out_of_another_forward(transport, grad, edit, monkeypatch):
    use(transport, monkeypatch)
    flex, records, parallelism = hooked("dp", edit)

    def run(number, groups="all"):
        flex(parallelism.my_rows(BATCHES[number]), groups=groups)

    with torch.set_grad_enabled(grad):
        check_found(run)
        assert not any(records.values())
        run(3)  # works again
    if dist.get_rank() == 0:
        inp, fc1 = models.mlp().inp, models.mlp().fc1
        assert_close(records["fc1"], [fc1(inp(BATCHES[3])).detach()])


@pytest.mark.ranks(2)
def test_inside_one_run():
    flex, _, parallelism = hooked("dp")

    def run(number, groups):
        flex(parallelism.my_rows(BATCHES[number]), groups=groups)

    check_found(run, context=flex.active())


@pytest.mark.ranks(2)
def test_backward_hooks_only():
    flex, _, parallelism = hooked("dp")
    handle = flex.register_full_backward_hook(HookFunction("fc2", output_name="grad"))
    flex.update_hook_groups(handle.hook_function, "gradients")

    def run(number, groups):
        flex(parallelism.my_rows(BATCHES[number]), groups=groups).sum().backward()

    check_found(run, "gradients")


@pytest.mark.ranks(2)
def test_a_rank_may_evaluate_alone_without_hooks_in_another_mode():
    """In the middle of a training, say, where the others wait for it."""
    flex, records, parallelism = hooked("dp")
    for number in range(3):
        flex(parallelism.my_rows(BATCHES[number])).sum().backward()
        if dist.get_rank() == 0:
            for _ in range(number):
                with torch.no_grad():
                    flex(BATCHES[3], groups=())
    flex.module.train()
    if dist.get_rank() == 1:
        flex.module.eval()
        flex(BATCHES[3], groups=())
        flex.module.train()
    flex(parallelism.my_rows(BATCHES[3]))
    if dist.get_rank() == 0:
        inp, fc1 = models.mlp().inp, models.mlp().fc1
        assert_close(records["fc1"], [fc1(inp(BATCHES[3])).detach()])


@pytest.mark.ranks(2)
def test_all_ranks_may_leave_the_hooks_out():
    flex, records, _ = hooked("tp", double)
    for groups in ("all", (), (), "all", (), "all"):
        flex(BATCHES[0], groups=groups)
    with flex.active():
        for groups in ("all", (), (), "all"):
            flex(BATCHES[0], groups=groups)
    if dist.get_rank() == 0:
        assert len(records["fc1"]) == 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transport", ["shared_memory", "gloo", "two hosts"])
def test_a_rank_without_hooks_that_waits_inside_the_model_is_named_soon(transport, monkeypatch):
    """Tensor parallel ranks can't get a forward apart: the one without hooks waits in the model's
    own collective. Before, the other told of it at its deadline only, and not why.
    """
    use(transport, monkeypatch)
    flex, _, _ = hooked("tp", double)
    flex(BATCHES[0])
    start = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(HookError, match=r"'all'.*groups \[\]") as caught:
            flex(BATCHES[1])
        assert isinstance(caught.value, HookMismatchError)
        assert time.monotonic() - start < 10
        dist.all_reduce(torch.zeros(4, 6, dtype=torch.float64))  # for which rank 1 waits
    else:
        flex(BATCHES[1], groups=())

"""Ctrl-C on one rank: it leaves at once, wherever it is, and the others hear of it at once."""

import functools
import gc
import random
import signal
import time
import traceback

import pytest
import torch
from torch import nn

import models
from flex_model import FlexModel, HookFunction
from flex_model.distributed.gather import TensorSpec
from forked_ranks import Ranks
from shared_edits import double
from tiers import grid_but

pytestmark = pytest.mark.slow

TRANSPORTS = ["shared_memory", "gloo"]
QUICK = grid_but(TRANSPORTS, "shared_memory")  # gloo: at any moment, below
BATCH = models.random(4, 8)


class Slow(nn.Module):
    """Takes a while, in Python; the operators are the same on all ranks, or layouts are refused."""

    seconds = 0.0
    backward_seconds = 0.0
    end_seconds = 0.0

    def forward(self, x):
        x.register_hook(self._backward) if x.requires_grad else None
        return self._compute(x + 0, self.seconds)

    def _compute(self, x, seconds):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pass
        return x

    def _backward(self, grad):
        if self.end_seconds:
            end = functools.partial(self._compute, torch.zeros(()), self.end_seconds)
            torch.autograd.Variable._execution_engine.queue_callback(end)
        return self._compute(grad, self.backward_seconds)


def wrapped(size):
    model = nn.Sequential(Slow(), models.mlp(width=8), Slow())
    flex = FlexModel(model, {}, data_parallel_size=size, timeout=60)
    flex.register_forward_hook(HookFunction("1.fc1", (None, 8), double))
    flex.register_forward_hook(HookFunction("1.act"))
    flex.register_full_backward_hook(HookFunction("1.fc2"))
    flex(BATCH).sum().backward()
    return flex


def train(rank, tell, size, seconds, stays, backward_seconds, end_seconds):
    """Until Ctrl-C. ``seconds``: of each rank's own forward. ``stays``: the process lives on, so
    that the others can't hear of it by its end.
    """
    flex = wrapped(size)
    flex.module[0].seconds = seconds[rank]
    flex.module[2].backward_seconds = backward_seconds[rank]
    flex.module[2].end_seconds = end_seconds[rank]
    gc.collect()
    gc.freeze()  # Python ignores a Ctrl-C that comes in the __del__ of some garbage
    tell("training")
    try:
        while True:
            flex(BATCH).sum().backward()
    except KeyboardInterrupt as error:
        tell("left", (time.monotonic(), traceback.format_exc()))
        if stays and is_in_a_run(error):
            time.sleep(60)  # the process lives on


def is_in_a_run(error):
    """Whether Ctrl-C came in a run or in its backward: outside only the process's end tells.

    Python raises it at the first line of a function, too, where nothing of that has begun.
    """
    inside = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)[1:]
        if "flex_model" in frame.filename or frame.filename == __file__
    ]
    begin = FlexModel.__call__.__code__
    at_begin = (begin.co_filename, begin.co_firstlineno)
    return [(frame.filename, frame.lineno) for frame in inside] not in ([], [at_begin])


NO_SECONDS = (0.0,) * 4


def interrupt(
    size,
    transport,
    seconds,
    after,
    victim,
    stays,
    backward_seconds=NO_SECONDS,
    end_seconds=NO_SECONDS,
):
    """How long the interrupted rank took to leave, and the slowest of the others to hear of it."""
    environment = {"FLEX_MODEL_TRANSPORT": transport}
    arguments = (size, seconds, stays, backward_seconds, end_seconds)
    with Ranks(size, train, *arguments, environment=environment) as ranks:
        ranks.told("training")
        time.sleep(after)
        start = ranks.signal(victim, signal.SIGINT)
        left, where = ranks.hears(victim, "left", 5)
        print(where)
        others = ranks.outcomes(5, of=set(range(size)) - {victim})
    for other in others.values():
        assert other.kind == "HookError", other
        assert f"rank {victim}" in other.text, other
        assert "left" in other.text or "interrupted" in other.text or "died" in other.text, other
    heard = max(other.when for other in others.values()) - start
    assert left - start < 1
    assert heard < 3
    return left - start, heard


@pytest.mark.parametrize("transport", QUICK)
@pytest.mark.parametrize("where", ["in a gather", "in the model"])
def test_a_rank_leaves_a_gather_at_ctrl_c_and_the_others_are_told(where, transport):
    seconds = [0.0, 2.0] if where == "in a gather" else [20.0, 0.0]  # of rank 0, who is interrupted
    print(interrupt(2, transport, seconds, after=0.5, victim=0, stays=True))


@pytest.mark.parametrize("transport", QUICK)
@pytest.mark.parametrize("others", [0.0, 2.0])  # of their own backward: they come later
def test_a_rank_leaves_the_models_own_backward_at_ctrl_c(others, transport):
    seconds, backward_seconds = [0.0, 0.0], [20.0, others]
    print(interrupt(2, transport, seconds, 0.5, 0, True, backward_seconds))


@pytest.mark.parametrize("transport", QUICK)
def test_a_rank_leaves_what_is_queued_for_the_backwards_end_at_ctrl_c(transport):
    """No rank was told: the pass counted as ended by then."""
    print(interrupt(2, transport, [0.0, 0.0], 0.5, 0, True, end_seconds=[20.0, 0.0]))


def leave_before_a_payload(rank, tell, size):
    """Rank 0 is interrupted in the backward of an edit, once all ranks have agreed on a gather."""
    flex = wrapped(size)
    flex(BATCH).sum().backward()
    tell("training")
    if rank == 0:

        def interrupted(spec, shard):
            raise KeyboardInterrupt

        TensorSpec.all_gather = interrupted
    try:
        flex(BATCH).sum().backward()
    except KeyboardInterrupt:
        tell("left")
        time.sleep(60)


@pytest.mark.parametrize("transport", QUICK)
def test_a_rank_leaves_between_a_header_and_its_payload_at_ctrl_c(transport):
    """The others were told that it makes another transfer."""
    environment = {"FLEX_MODEL_TRANSPORT": transport}
    with Ranks(2, leave_before_a_payload, 2, environment=environment) as ranks:
        ranks.told("training")
        ranks.hears(0, "left", 5)
        other = ranks.outcomes(5, of={1})[1]
    assert other.kind == "HookError" and "rank 0 left" in other.text, other


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", grid_but([2, 4], 2))
def test_ctrl_c_at_any_moment(size, transport):
    """In a forward or a backward, in hooks or outside of them; the process lives on."""
    choose = random.Random(f"{size} {transport}")
    for _ in range(5):
        seconds = [choose.choice([0.0, 0.02]) for _ in range(size)]
        after, victim = choose.random() * 0.3, choose.randrange(size)
        print(interrupt(size, transport, seconds, after, victim, stays=True))

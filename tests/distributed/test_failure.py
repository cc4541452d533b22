"""The failure of a rank: which error is pending, held or replaced."""

import pytest
import torch

from flex_model.distributed.failure import ERROR, FAILED, OK, STOPPED, Failure
from flex_model.integrations.torch_private import current_graph_task


class InBackward(torch.autograd.Function):
    """Calls ``act`` with the number of the running backward."""

    @staticmethod
    def forward(ctx, x, act):
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.act(current_graph_task())
        return grad, None


def in_backward(act):
    InBackward.apply(torch.ones(1, requires_grad=True), act).sum().backward()


@pytest.mark.parametrize("second", [ERROR, FAILED, STOPPED])
def test_the_first_error_is_pending_unless_the_model_fails_after_it(second):
    failure, errors = Failure(), [ValueError("first"), ValueError("second")]
    assert not failure.has_error and failure.state is OK
    failure.set_error("first", errors[0])
    failure.set_error("second", errors[1], second)
    assert failure.has_error and failure.state is second
    kept = int(second is not ERROR)
    assert (failure.text, failure.cause) == (["first", "second"][kept], errors[kept])
    failure.clear()
    assert (failure.state, failure.text, failure.cause) == (OK, "", None)


def test_an_agreed_error_replaces_the_pending_one_and_the_one_held_and_counts():
    failure = Failure()

    def act(task):
        failure.begin_backward(task)
        failure.hold(ValueError())
        failure.set_error("pending", None, FAILED)
        failure.agree()

    in_backward(act)
    assert not failure.has_error and failure.held is None and failure.num_agreed == 1


def test_an_error_is_held_only_inside_a_backward_that_raises_it():
    failure, first, second = Failure(), ValueError("first"), ValueError("second")
    results = []

    def act(task):
        results.append(failure.hold(first))  # the backward has not begun here
        failure.begin_backward(task)
        results.extend([failure.hold(first), failure.hold(second)])
        failure.set_error("meanwhile", None, FAILED)
        results.append(failure.held)
        results.append(failure.end_backward(task))
        results.append(failure.hold(second))  # and has ended

    in_backward(act)
    assert results == [False, True, True, first, first, False]
    assert failure.held is None and failure.text == "meanwhile"
    assert not failure.hold(first)


def test_a_run_forgets_the_backward_before_it():
    failure, results = Failure(), []

    def act(task):
        failure.begin_backward(task)
        results.append(failure.hold(ValueError()))
        failure.begin_run()
        results.append(failure.hold(ValueError()))

    in_backward(act)
    assert results == [True, False] and failure.held is None

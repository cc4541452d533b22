"""A Ctrl-C that comes while an object is deleted is raised outside. Python would ignore it."""

import _thread
import collections
import gc
import operator
import signal
import sys
import threading
from functools import partial

import pytest

import models
import scripts
from flex_model import _C, FlexModel, HookFunction
from flex_model.distributed.communicator import Communicator
from flex_model.runs.graphs import Graphs

BATCH = models.random(4, 6)


def press_ctrl_c():
    signal.raise_signal(signal.SIGINT)


def run(function, *arguments):
    """Call it, and run some code, which raises what waits."""
    function(*arguments)
    for _ in range(10):
        pass


# Each deletes the only finalizer of a list.


def by_count(finalizers):
    finalizers.pop()


def as_garbage(finalizers):
    cycle = [finalizers.pop()]
    cycle.append(cycle)
    del cycle
    # Python ignores what is raised in callbacks of the garbage collector; hypothesis has one.
    callbacks, gc.callbacks[:] = gc.callbacks[:], []
    try:
        gc.collect()
    finally:
        gc.callbacks[:] = callbacks


def while_an_error_is_raised(finalizers):
    with pytest.raises(TypeError, match="ord"):
        ord([finalizers.pop()])  # holds the last reference


def in_a_thread(finalizers):
    thread = threading.Thread(target=finalizers.pop)
    thread.start()
    thread.join()


@pytest.mark.parametrize("delete", [by_count, as_garbage, while_an_error_is_raised, in_a_thread])
def test_it_calls_its_function_once(delete):
    called = []
    delete([_C.Finalizer(partial(called.append, 1))])
    assert called == [1]


@pytest.mark.parametrize("delete", [by_count, as_garbage, while_an_error_is_raised])
def test_ctrl_c_in_the_function_is_raised_in_the_caller(delete):
    with pytest.raises(KeyboardInterrupt) as raised:
        run(delete, [_C.Finalizer(press_ctrl_c)])
    assert "press_ctrl_c" not in [entry.name for entry in raised.traceback]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_exit_in_a_thread_is_raised_in_the_main_thread(error):
    def leave():
        raise error("as asked")

    with pytest.raises(error, match="as asked"):
        run(in_a_thread, [_C.Finalizer(leave)])


def test_a_ctrl_c_that_came_before_does_not_end_the_function():
    """It came during C code, and the first line of the function would raise it."""
    called = []
    finalizers = [_C.Finalizer(lambda: called.append(1))]
    steps = [_thread.interrupt_main, finalizers.clear]
    with pytest.raises(KeyboardInterrupt):
        run(collections.deque, map(operator.methodcaller("__call__"), steps))  # all in C
    assert called == [1]


def test_other_errors_are_reported_as_those_of_del(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: seen.append(str(report.exc_value)))

    def fail():
        raise ValueError("of the function")

    finalizer = _C.Finalizer(fail)
    del finalizer
    assert seen == ["of the function"]


def test_it_is_called_before_it_is_deleted_or_never():
    called = []
    early, never = (_C.Finalizer(partial(called.append, name)) for name in ("early", "never"))
    early.call()
    early.call()
    never.cancel()
    never.call()
    del early, never
    assert called == ["early"]


@pytest.mark.slow
def test_it_is_not_called_while_the_interpreter_exits(tmp_path):
    script = """
import sys
from flex_model import _C
sys.kept = _C.Finalizer(lambda: print("called"))
kept = [_C.Finalizer(lambda: print("called"))]
kept.append(kept)
"""
    assert scripts.run(tmp_path, "python", "-c", script) == ""


def test_ctrl_c_at_the_end_of_a_backward_is_raised(monkeypatch):
    flex = FlexModel(models.mlp(), {})
    flex.register_forward_hook(HookFunction("fc1", editing_function=lambda m, x, s, ms: x * 2))
    loss = flex(BATCH).sum()
    monkeypatch.setattr(Graphs, "ended", lambda graphs: press_ctrl_c())
    with pytest.raises(KeyboardInterrupt):
        run(loss.backward)
    monkeypatch.undo()


def test_ctrl_c_is_raised_where_a_graph_outlives_its_flex_model(monkeypatch):
    flex = FlexModel(models.mlp(), {})
    flex.register_forward_hook(HookFunction("fc1", editing_function=lambda m, x, s, ms: x * 2))
    losses = [flex(BATCH).sum()]
    flex.restore()
    monkeypatch.setattr(Communicator, "close", lambda communicator: press_ctrl_c())
    with pytest.raises(KeyboardInterrupt):
        run(losses.clear)

"""Run tests marked ``ranks(n)`` on n ranks: under plain pytest, and under torchrun.

``pytest`` starts the ranks itself (`rank_pool`), once per world size, and sends them the test
bodies. Under ``torchrun --nproc-per-node n -m pytest`` every process is a rank: rank 0 runs the
single-process tests first, then the world is made and all run the tests marked ``ranks(n)``.
"""

import faulthandler
import inspect
import os
import signal
import sys
import traceback
from collections import Counter
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: ranks share the cores
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch.distributed as dist

from rank_pool import GRACE_S, RankPool, Skipped, seed_everything

TIMEOUT_S = 60
PROCESS = os.getpid()
# The files that take longest. They come first, or one of them may be all that is left to run.
LONGEST = [
    "test_frameworks.py",
    "test_simulation.py",
    "test_cuda_emulated.py",
    "test_cuda_emulated_processes.py",
    "test_transformers_5_17.py",
    "test_memory.py",
    "test_examples.py",
    "test_gpu_run.py",
    "test_other_loops.py",
]
POOLS = {}
STDERR, STATUS = pytest.StashKey(), pytest.StashKey()

# Hidden until the world is made, so that a single-process test sees no launcher.
LAUNCHER = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE") if name in os.environ}
RANK, WORLD_SIZE = int(LAUNCHER.get("RANK", 0)), int(LAUNCHER.get("WORLD_SIZE", 0))


def pytest_configure(config):
    # A shell that starts this in the background has it ignore Ctrl-C, and the tests of it wait.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if WORLD_SIZE:  # fd 2 as it is while pytest captures nothing
        config.stash[STDERR] = os.fdopen(os.dup(2), "w")


def pytest_runtest_logreport():
    if os.getpid() != PROCESS:  # a child that a test forked, and in which it has failed
        os._exit(70)


@pytest.hookimpl(trylast=True)  # after those that the marks deselect are gone
def pytest_collection_modifyitems(config, items):
    if WORLD_SIZE:
        items.sort(key=lambda item: item.get_closest_marker("ranks") is not None)
    if hasattr(config, "workerinput"):  # of xdist, which gives a worker one file after the other
        num_tests = Counter(item.path for item in items)
        places = {name: place for place, name in enumerate(LONGEST)}

        def when(item):
            return places.get(item.path.name, len(LONGEST)), -num_tests[item.path]

        items.sort(key=when)


def pytest_runtest_setup(item):
    marker = item.get_closest_marker("ranks")
    if not WORLD_SIZE:
        return
    if marker is None and RANK > 0:
        pytest.skip("a single-process test: rank 0 runs it")
    if marker is not None and marker.args[0] != WORLD_SIZE:
        pytest.skip(f"needs {marker.args[0]} ranks, torchrun started {WORLD_SIZE}")


@pytest.fixture(autouse=True)
def same_random_state():
    seed_everything()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    timeout_s = marker.kwargs.get("timeout", TIMEOUT_S)
    run = run_on_this_rank if WORLD_SIZE else run_in_pool
    if marker.kwargs.get("alone") and not WORLD_SIZE:
        run = run_alone
    failures = run(pyfuncitem, marker.args[0], arguments, timeout_s)
    real = {rank: text for rank, text in failures.items() if not isinstance(text, Skipped)}
    if real:
        texts = [f"---- rank {rank} ----\n{text}" for rank, text in sorted(real.items())]
        pytest.fail("\n".join(texts), pytrace=False)
    if failures:
        pytest.skip(next(iter(failures.values())))
    return True


def run_in_pool(item, world_size, arguments, timeout_s):
    if world_size not in POOLS:
        POOLS[world_size] = RankPool(world_size, warning_filters(item))
    pool = POOLS[world_size]
    failures = pool.run(item.path, item.function.__name__, arguments, timeout_s)
    if not pool.alive or pool.is_crowded:
        POOLS.pop(world_size).close()
    return failures


def run_alone(item, world_size, arguments, timeout_s):
    """On ranks of its own: what other tests left behind is not there."""
    pool = RankPool(world_size, warning_filters(item))
    try:
        return pool.run(item.path, item.function.__name__, arguments, timeout_s)
    finally:
        pool.close()


def warning_filters(item):
    """What pytest would do about warnings, for the ranks to do the same."""
    config = item.config
    return [*config.getini("filterwarnings"), *(config.getoption("pythonwarnings") or ())]


def run_on_this_rank(item, world_size, arguments, timeout_s):
    if not dist.is_initialized():
        os.environ.update(LAUNCHER)
        dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    for name, value in arguments.items():
        if isinstance(value, Path):  # tmp_path: every process has made its own
            shared = [value]
            dist.broadcast_object_list(shared, src=0)
            arguments[name] = shared[0]
    seed_everything()
    # A rank that waits for ever cannot be helped from here: show where, and end the job.
    stderr = item.config.stash[STDERR]
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=stderr)
    failure = ""
    try:
        inspect.unwrap(item.obj)(**arguments)
    except pytest.skip.Exception as request:
        failure = Skipped(request)
    except BaseException:
        failure = traceback.format_exc()
    try:
        return exchange(item.nodeid, failure, timeout_s)
    except dist.DistStoreError:
        print(f"{item.nodeid}: the other ranks still wait for rank {RANK}", file=stderr)
        print(failure, file=stderr, flush=True)
        os._exit(1)
    finally:
        faulthandler.cancel_dump_traceback_later()


def exchange(name, failure, timeout_s):
    """Tell every rank how it went on the others, so that all report the same."""
    store = dist.distributed_c10d._get_default_store()
    kind = "skip" if isinstance(failure, Skipped) else "text"
    store.set(f"{name}/{RANK}", f"{kind}:{failure}")
    keys = [f"{name}/{rank}" for rank in range(WORLD_SIZE)]
    store.wait(keys, timedelta(seconds=GRACE_S if failure else timeout_s))
    answers = {rank: store.get(key).decode().partition(":") for rank, key in enumerate(keys)}
    return {
        rank: Skipped(text) if kind == "skip" else text
        for rank, (kind, _, text) in answers.items()
        if text
    }


def pytest_sessionfinish(session, exitstatus):
    session.config.stash[STATUS] = int(exitstatus)
    for pool in POOLS.values():
        pool.close()
    POOLS.clear()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    if WORLD_SIZE and dist.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash.get(STATUS, 1))  # gloo's threads abort an orderly exit now and then

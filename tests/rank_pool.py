"""Worker processes that stay up for the session and run test bodies, one process per rank.

One fork server imports torch once (5 s); a rank is then a fork of it (0.05 s), so a pool of any
world size is cheap to start, and cheap to start again after a failure left its ranks out of step.
"""

import ast
import faulthandler
import functools
import importlib.util
import inspect
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import suppress
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from unittest import mock

import psutil

# Torch's store asks for the name of 127.0.0.1 at each connection, which goes to a name server.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch.testing",
    "pytest",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
]
START_S = 60  # the first pool waits for the fork server's imports
MOST_THREADS = 64  # of one rank, two of which each process group has that a test left
GRACE_S = 5  # after one rank has failed, how long the others may take to report theirs


class RankPool:
    """``world_size`` ranks with a gloo world among them.

    Example::

        pool = RankPool(2)
        failures = pool.run("tests/test_x.py", "test_y", {"dim": 0}, timeout_s=60)
        pool.close()

    A failure leaves the ranks in an unknown state: `alive` is false then, and the next test needs a
    new pool. Arguments are pickled, so parametrize over plain values, not over lambdas.
    """

    def __init__(self, world_size, warning_filters=()):
        from torch.distributed import TCPStore

        context = get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        # As under torchrun, the store is not in a rank, so it outlives every rank.
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self.ranks, self.connections, self.logs = [], [], []
        for rank in range(world_size):
            here, there = context.Pipe()
            log = Path(self.folder.name, f"rank{rank}.log")
            settings = (rank, world_size, self.store.port, there, str(log), list(warning_filters))
            process = context.Process(target=work, args=settings, name=f"rank {rank}", daemon=True)
            process.start()
            there.close()
            self.ranks.append(process)
            self.connections.append(here)
            self.logs.append(log)
        self.alive = True
        failures = self._answers(START_S, "start")
        if failures:
            raise RuntimeError("the ranks did not start:\n" + "\n".join(failures.values()))

    def run(self, path, name, arguments, timeout_s):
        """Run one test on every rank; return ``{rank: what went wrong there}``.

        The value is a `Skipped` where the test asked to be skipped. Takes ``timeout_s`` at most,
        and `GRACE_S` after the first failure.
        """
        written = [log.stat().st_size for log in self.logs]
        for here in self.connections:
            here.send((str(path), name, arguments))
        failures = self._answers(timeout_s, f"finish {name}")
        for rank, failure in failures.items():
            if not isinstance(failure, Skipped):
                printed = self.logs[rank].read_text(errors="replace")[written[rank] :].strip()
                if printed:
                    failures[rank] += f"\n---- printed by rank {rank} ----\n{printed[-4000:]}"
        return failures

    @property
    def is_crowded(self):
        """Whether tests left so many process groups that their threads, which poll all the time,
        slow down those that come: a hundred tests cost three times theirs.
        """
        return any(psutil.Process(rank.pid).num_threads() > MOST_THREADS for rank in self.ranks)

    def _answers(self, timeout_s, task):
        deadline = time.monotonic() + timeout_s
        waiting = dict(enumerate(self.connections))
        failures = {}
        while waiting and (left := deadline - time.monotonic()) > 0:
            connection.wait(waiting.values(), left)
            for rank, here in list(waiting.items()):
                if not here.poll():
                    continue
                try:
                    failure = here.recv()
                except (EOFError, ConnectionResetError):
                    self.ranks[rank].join(1)
                    failure = f"the process died, exit code {self.ranks[rank].exitcode}"
                del waiting[rank]
                if failure:
                    failures[rank] = failure
                    if not isinstance(failure, Skipped):
                        deadline = min(deadline, time.monotonic() + GRACE_S)
        first_failure = next(iter(failures), None)
        for rank in waiting:
            os.kill(self.ranks[rank].pid, signal.SIGUSR1)  # its stacks go to its log
            reason = f"no answer in {timeout_s} s" if first_failure is None else "still waiting"
            failures[rank] = f"{reason} to {task}; its stack is below"
        if waiting:
            time.sleep(0.3)
        if any(not isinstance(failure, Skipped) for failure in failures.values()):
            self.alive = False
        return failures

    def close(self):
        """End the ranks: those that listen by themselves, the others by SIGKILL."""
        for here in self.connections:
            with suppress(OSError):
                here.send(None)
        for process in self.ranks:
            process.join(2 if self.alive else 0.1)
            if process.is_alive():
                process.kill()
                process.join()
        for here in self.connections:
            here.close()
        self.alive = False
        self.folder.cleanup()


class Skipped(str):
    """The reason for which a test asked to be skipped."""


def work(rank, world_size, port, there, log, warning_filters):
    """The life of one rank: join the world, run test bodies until told to stop."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR1, sys.stderr, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which then closes us
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(minutes=10)
        )
        there.send(None)
    except BaseException:
        there.send(traceback.format_exc())
        os._exit(1)
    while (task := there.recv()) is not None:
        there.send(outcome(*task, warning_filters))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort an orderly exit now and then


def outcome(path, name, arguments, warning_filters):
    """Run one test body; return None, the traceback, or why it is to be skipped."""
    import torch.distributed as dist
    from _pytest.config import parse_warning_filter
    from _pytest.monkeypatch import MonkeyPatch
    from _pytest.outcomes import Skipped as SkipRequest

    # For each model that it shards transformers makes meshes of six groups with three threads each.
    meshes = functools.cache(dist.init_device_mesh)
    try:
        with warnings.catch_warnings(), mock.patch.object(dist, "init_device_mesh", meshes):
            for warning_filter in warning_filters:
                warnings.filterwarnings(*parse_warning_filter(warning_filter, escape=False))
            body = getattr(load(path), name)
            seed_everything()
            inspect.unwrap(body)(**arguments)
    except SkipRequest as request:
        return Skipped(request)
    except BaseException as error:
        error.__traceback__ = error.__traceback__.tb_next  # without this function's frame
        return "".join(traceback.format_exception(error))
    finally:
        for argument in arguments.values():
            if isinstance(argument, MonkeyPatch):  # this rank's own: pytest undoes another
                argument.undo()
    return None


def seed_everything(seed=0):
    """Every test starts from the same random state, on every rank."""
    import torch

    random.seed(seed)
    torch.manual_seed(seed)


_modules = {}


def load(path):
    """The test module at ``path``, its asserts rewritten to show values, as pytest does."""
    if path not in _modules:
        from _pytest.assertion.rewrite import rewrite_asserts

        source = Path(path).read_bytes()
        tree = ast.parse(source, path)
        rewrite_asserts(tree, source, path)
        spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        exec(compile(tree, path, "exec", dont_inherit=True), module.__dict__)
        _modules[path] = module
    return _modules[path]

"""Ranks that a test may kill, stop and interrupt: a gloo world of processes made for it alone.

They are forks of the fork server of `rank_pool`, which has imported torch, and the store of their
world is in the test's process, so that it outlives every rank.
"""

import faulthandler
import inspect
import os
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path

import rank_pool

START_S = 60  # the first ranks of a session wait for the fork server's imports
LIFE_S = 150  # no rank lives longer, whatever becomes of the test


@dataclass
class Outcome:
    """How a rank ended. ``when``: of the monotonic clock, which all processes of a host share.

    Attributes:
        kind: ``"returned"``, the name of the exception's type, or ``"died"`` without a word.
        text: The exception's, with its notes.
        value: What the body returned.
    """

    kind: str
    text: str = ""
    value: object = None
    when: float = 0.0


class Ranks:
    """``body(rank, tell, *arguments)`` on every rank; ``body`` is a function of a test file.

    What ranks ``tell`` is heard by ``told``, how they end by ``outcomes``. A context manager, which
    leaves no process behind.
    """

    def __init__(self, size, body, *arguments, environment=None):
        from torch.distributed import TCPStore

        context = get_context("forkserver")
        context.set_forkserver_preload(rank_pool.PRELOAD)
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self.processes, self.connections, self.logs = [], [], []
        self.killed = set()
        test = (inspect.getfile(body), body.__name__, arguments)
        for rank in range(size):
            here, there = context.Pipe()
            log = Path(self.folder.name, f"rank{rank}.log")
            world = (rank, size, self.store.port, there, str(log), environment or {})
            process = context.Process(target=work, args=(*world, *test), daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self.connections.append(here)
            self.logs.append(log)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        for process in self.processes:
            process.kill()
            process.join(10)
            assert not process.is_alive()
        for here in self.connections:
            here.close()
        self.folder.cleanup()

    def told(self, word, seconds=START_S):
        """Wait until every rank that is alive has told ``word``; the values they told with it."""
        deadline = time.monotonic() + seconds
        return [
            self.hears(rank, word, deadline - time.monotonic())
            for rank in range(len(self.processes))
            if rank not in self.killed
        ]

    def hears(self, rank, word, seconds):
        """Wait until one rank has told ``word``; the value it told with it."""
        deadline = time.monotonic() + seconds
        while True:
            left = deadline - time.monotonic()
            assert self.connections[rank].poll(max(0, left)), self._silence(rank, word)
            try:
                message = self.connections[rank].recv()
            except (EOFError, ConnectionResetError):
                raise AssertionError(f"rank {rank} died\n{self._log(rank)}") from None
            if message[0] == word:
                return message[1]
            assert message[0] != "ended", f"rank {rank}: {message[1]}\n{self._log(rank)}"

    def outcomes(self, seconds, of=None):
        """How each rank ended that was not killed; all of them within ``seconds`` from now."""
        deadline = time.monotonic() + seconds
        found = {}
        for rank, here in enumerate(self.connections):
            if rank in self.killed or (of is not None and rank not in of):
                continue
            while rank not in found:
                left = deadline - time.monotonic()
                heard = connection.wait([here], max(0, left))
                assert heard, self._silence(rank, "how it ended")
                try:
                    word, value = here.recv()
                except (EOFError, ConnectionResetError):
                    word, value = "ended", Outcome("died", self._log(rank), when=time.monotonic())
                if word == "ended":
                    found[rank] = value
        for rank in found:
            self.processes[rank].join(max(0.5, deadline - time.monotonic()))
            assert not self.processes[rank].is_alive(), f"rank {rank} does not end"
        return found

    def signal(self, rank, number):
        """Send a signal to a rank; when it was sent."""
        assert self.processes[rank].is_alive(), f"rank {rank} has ended\n{self._log(rank)}"
        os.kill(self.processes[rank].pid, number)
        if number == signal.SIGKILL:
            self.killed.add(rank)
        return time.monotonic()

    def _silence(self, rank, awaited):
        if rank not in self.killed and self.processes[rank].is_alive():
            os.kill(self.processes[rank].pid, signal.SIGUSR1)  # its stack goes to its log
            time.sleep(0.3)
        return f"rank {rank} does not tell {awaited!r}\n{self._log(rank)}"

    def _log(self, rank):
        log = self.logs[rank]
        return log.read_text(errors="replace")[-4000:] if log.exists() else ""


def work(rank, size, port, there, log, environment, path, name, arguments):
    """The life of one rank."""
    signal.alarm(LIFE_S)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR1, sys.stderr, all_threads=True)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), **environment}
    outcome = Outcome("returned")
    try:
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        limit = timedelta(seconds=LIFE_S)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
        rank_pool.seed_everything()
        body = getattr(rank_pool.load(path), name)
        outcome.value = body(rank, lambda word, value=None: there.send((word, value)), *arguments)
    except BaseException as error:
        outcome.when = time.monotonic()
        outcome.kind = type(error).__name__
        outcome.text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        traceback.print_exc()
    outcome.when = outcome.when or time.monotonic()
    there.send(("ended", outcome))
    sys.stdout.flush()
    os._exit(0)

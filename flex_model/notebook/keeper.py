"""The process that ends what a notebook started, when the notebook closes it or dies.

Engines and ipyparallel's controller run in sessions of their own, so nothing ends them when the
kernel is killed. This script waits for the end of its parent, then ends every process that has
TOKEN in its environment (never by name), and removes FOLDER. It imports no torch: it is run as a
file, ``python keeper.py TOKEN FOLDER``, with a pipe from the kernel as its stdin.
"""

import os
import select
import shutil
import signal
import sys
import time
from contextlib import suppress

import psutil

VARIABLE = "FLEX_MODEL_NOTEBOOK"
_POLL_S = 1.0


def wait_for_end_of_parent() -> None:
    """Wait until the pipe closes, or another process inherited its end and the parent died."""
    parent = os.getppid()
    while os.getppid() == parent:
        if select.select([0], [], [], _POLL_S)[0] and not os.read(0, 1):
            return


def processes_of(token: str) -> list[psutil.Process]:
    """Return the processes of this user that were started with the token, this one excepted."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(VARIABLE) == token:
                found.append(process)
    return found


def end(token: str) -> None:
    """Kill the processes of the token, and those that they start meanwhile."""
    num_empty = 0
    while num_empty < 2:
        found = processes_of(token)
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        num_empty = 0 if found else num_empty + 1
        time.sleep(0.05)


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    wait_for_end_of_parent()
    end(sys.argv[1])
    shutil.rmtree(sys.argv[2], ignore_errors=True)

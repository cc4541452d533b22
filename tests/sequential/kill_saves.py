"""Kills of processes that write a store: `python kill_saves.py FOLDER NUMBER STRIDE`.

Once at each STRIDEth step that changes a file, then at random moments, NUMBER in all. A process of
its own, and small, so that its forks are quick. Prints what it saw as JSON; an assertion if a store
is torn, has lost a batch that was acknowledged, or keeps what a killed process left behind.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from flex_model.distributed.communicator import Communicator
from flex_model.distributed.mesh import Mesh
from flex_model.records.store import files
from flex_model.records.store.session import Session
from flex_model.sequential import ActivationStore

BATCHES, BATCHES_A_FILE = 6, 2
HOOKS = [["forward", "layers.0", 0, False]]


def record(batch):
    return torch.full((64, 1024), float(batch))  # 256 KiB: written in several steps


def write(folder, acknowledge):
    """What a sequential run does with its store, from where the last one came to."""
    store = ActivationStore(folder)
    session = Session(store, Communicator(Mesh(), 60.0), None, dict)
    session.is_sequential = True
    session.check_hooks(HOOKS)
    listed = {"manifest.json"}
    for first in range(0, store.num_batches, BATCHES_A_FILE):
        group = f"batches-{first:08d}-{first + BATCHES_A_FILE - 1:08d}"
        listed |= {f"{group}.json", *json.loads((folder / f"{group}.json").read_text())["files"]}
    assert {path.name for path in folder.iterdir()} == listed
    for batch in range(store.num_batches, BATCHES):
        session.append({"layers.0": [record(batch)]}, str(batch), {})
        if batch % BATCHES_A_FILE == BATCHES_A_FILE - 1:
            session.flush(is_complete=batch == BATCHES - 1)
            os.write(acknowledge, bytes([batch + 1]))
    session.close()


def count_steps():
    """From now on every call that changes a file is a step; the steps so far."""
    steps = []
    for name in ("replace", "fsync", "mkdir", "rmdir", "unlink", "open", "close"):
        stepping(os, name, steps)
    stepping(files, "write_chunk", steps)
    return steps


def stepping(owner, name, steps):
    original = getattr(owner, name)

    def call(*args, **kwargs):
        step(steps)
        result = original(*args, **kwargs)
        step(steps)
        return result

    setattr(owner, name, call)


def step(steps):
    steps.append(1)
    if len(steps) == DIES_AT[0]:
        os.kill(os.getpid(), signal.SIGKILL)


DIES_AT = [0]


def child(folder, dies_at=None, dies_after=None):
    """Run ``write`` in a fork: whether it was killed, and how many batches it acknowledged."""
    heard, acknowledge = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            if dies_at is not None:
                DIES_AT[0] = dies_at
                count_steps()
            write(folder, acknowledge)
            status = 0
        finally:
            os._exit(status)
    os.close(acknowledge)
    if dies_after is not None:
        time.sleep(dies_after)
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    told = os.read(heard, 1000)
    os.close(heard)
    killed = os.WIFSIGNALED(status)
    assert killed or status == 0, f"the run failed: {status}"
    return killed, told[-1] if told else 0


def check(folder, acknowledged):
    if not (folder / "manifest.json").exists():
        assert not acknowledged
        return 0
    store = ActivationStore(folder)
    assert store.num_batches >= acknowledged, "an acknowledged batch is lost"
    assert store.num_batches == BATCHES or not store.is_complete
    for batch in range(store.num_batches):
        assert torch.equal(store.batch(batch)["layers.0"][0], record(batch)), "torn"
    return store.num_batches


def main(folder, number, stride):
    torch.set_num_threads(1)
    folder, choose, seen = Path(folder) / "store", random.Random(0), Counter()
    start = time.monotonic()
    child(folder)
    whole_s = time.monotonic() - start
    shutil.rmtree(folder)
    dies_at = 1
    while child(folder, dies_at=dies_at)[0]:
        seen["at a step"] += 1
        check(folder, 0)
        assert child(folder) == (False, BATCHES) or check(folder, 0) == BATCHES
        assert ActivationStore(folder).is_complete
        shutil.rmtree(folder)
        dies_at += stride
    shutil.rmtree(folder)
    acknowledged = 0
    while seen["at a step"] + seen["at random"] < number or acknowledged < BATCHES:
        if acknowledged == BATCHES:
            shutil.rmtree(folder)
            acknowledged = 0
        killed, told = child(folder, dies_after=choose.uniform(0, 1.1 * whole_s))
        acknowledged = check(folder, max(acknowledged, told))
        seen["at random"] += killed
        seen["partial"] += 0 < acknowledged < BATCHES
        seen["complete"] += acknowledged == BATCHES
    seen["seconds"] = round(time.monotonic() - start, 1)
    print(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

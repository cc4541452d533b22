"""Starts ranks on this machine, for the demo and the doctor."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

_TIMEOUT_S = 120.0  # includes the import of torch in each rank


class RankError(RuntimeError):
    """A rank failed or sent no result."""


def run_on_ranks(num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return ``function(rank, *args)`` of each rank, a process of its own in a gloo group of all.

    Raises:
        RankError: a rank failed, or sent no result in two minutes.
    """
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks, pipes = [], []
    for rank in range(num_ranks):
        here, there = context.Pipe()
        arguments = (rank, num_ranks, store.port, there, function, args)
        ranks.append(context.Process(target=_run, args=arguments, daemon=True))
        ranks[-1].start()
        there.close()
        pipes.append(here)
    try:
        return [_result(rank, *both) for rank, both in enumerate(zip(ranks, pipes))]
    finally:
        for process in ranks:
            process.join(5)
            process.kill()


def _result(rank: int, process: Any, pipe: Connection) -> Any:
    try:
        no_result = f"sent no result in {_TIMEOUT_S:.0f} s"
        result, failure = pipe.recv() if pipe.poll(_TIMEOUT_S) else (None, no_result)
    except EOFError:
        process.join(1)
        result, failure = None, f"ended with status {process.exitcode}"
    if failure:
        raise RankError(f"rank {rank} {failure}")
    return result


def _run(
    rank: int, num_ranks: int, port: int, pipe: Connection, function: Any, args: tuple[Any, ...]
) -> None:
    try:
        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        timeout = timedelta(seconds=_TIMEOUT_S)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout
        )
        pipe.send((function(rank, *args), ""))
    except BaseException as error:
        text = " ".join(f"failed: {type(error).__name__}: {error}".split())
        pipe.send((None, text[:300]))
    os._exit(0)  # gloo's threads sometimes abort during a normal exit

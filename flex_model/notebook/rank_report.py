"""What each rank's process uses and is made of."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterator

import psutil
import torch
import torch.distributed as dist

import flex_model
from flex_model.inspection import text


def memory() -> dict[str, int]:
    """Return this rank's memory in bytes."""
    found = {"process": psutil.Process().memory_info().rss}
    if torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        found |= {
            "tensors on device": torch.cuda.memory_allocated(),
            "reserved on device": torch.cuda.memory_reserved(),
            "free on device": free,
            "device": total,
        }
    return found


def examine() -> dict[str, str]:
    """Return what should be the same on all ranks, and where this one is. Collective."""
    total = torch.ones(())
    if torch.cuda.is_initialized():
        total = total.cuda()
    dist.all_reduce(total)
    names = [torch.cuda.get_device_name()] if torch.cuda.is_initialized() else ["cpu"]
    return {
        "host": socket.gethostname(),
        "pid": str(os.getpid()),
        "device": names[0],
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "flex_model": f"{flex_model.__version__} ({os.path.dirname(flex_model.__file__)})",
        "threads": str(torch.get_num_threads()),
        "ranks in a collective": str(int(total)),
    }


class MemoryReport(list[dict[str, int]], text.Printed):
    """By rank, its memory in bytes. Prints as a table."""

    def _blocks(self) -> Iterator[text.Table | str]:
        headers = ["rank", *self[0]]
        rows = [[str(rank), *map(text.size, row.values())] for rank, row in enumerate(self)]
        yield text.Table(headers, rows)


class RanksReport(list[dict[str, str]], text.Printed):
    """By rank, its process, device and versions. Prints as a table, with what differs.

    Attributes:
        findings: What is wrong, one line each.
    """

    @property
    def findings(self) -> list[str]:
        found = []
        for name in ("python", "torch", "flex_model"):
            values = list(dict.fromkeys(row[name] for row in self))
            if len(values) > 1:
                found.append(f"ranks have different {name}: {', '.join(values)}; install the same")
        if any(row["ranks in a collective"] != str(len(self)) for row in self):
            found.append(
                "a collective does not reach all ranks; ranks.restart() starts them afresh"
            )
        return found

    def _blocks(self) -> Iterator[text.Table | str]:
        headers = ["rank", *self[0]]
        yield text.Table(headers, [[str(i), *row.values()] for i, row in enumerate(self)])
        yield "\n".join(self.findings) or "all is well"

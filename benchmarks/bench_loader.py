"""How fast shuffled rows of a store are read, against a plain sequential read of the same files.

    python benchmarks/bench_loader.py [--json FILE] [--mib 512]

A store of random rows, read in turns in one process; what the loader yields is compared with the
records. "Cold" rows have the files dropped from the page cache before each turn.

Columns:
    width       numbers of a row, of that dtype
    rows        rows of a record
    cold        whether the files come from the disk
    file_s      time to read the files in order, in pieces of 16 MiB into the same memory; minimum
                over repeats, in seconds
    tensors_s   the same of ``store.tensors``: all records in order, each in memory of its own
    loader_s    the same of the loader: all rows, in batches of 1,024. It is made once, as for
                several epochs, so that its memory is used again
    of_file     file_s over loader_s
    of_tensors  tensors_s over loader_s
    wrong       rows that differ from those of the store
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn

from flex_model import ActivationStore, FlexModel, HookFunction

PIECE_BYTES = 16 * 2**20
BATCH_ROWS, BUFFER_ROWS = 1024, 16384
CASES = [  # width, dtype, rows of a record
    (4096, torch.bfloat16, 2048),
    (2048, torch.float32, 4096),
    (512, torch.float32, 4096),
]


def fill(folder: Path, width: int, dtype: torch.dtype, rows: int, mib: int) -> None:
    row_bytes = width * dtype.itemsize
    store = ActivationStore(folder)
    generator = torch.Generator().manual_seed(0)
    with FlexModel(nn.Sequential(nn.Identity()), store) as flex:
        flex.register_forward_hook(HookFunction("0"))
        for _ in range(max(1, mib * 2**20 // (rows * row_bytes))):
            flex(torch.randn(8, rows // 8, width, generator=generator).to(dtype))


def read_files(folder: Path) -> None:
    piece = bytearray(PIECE_BYTES)
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(piece):
                pass


def drop_from_cache(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        number = os.open(path, os.O_RDONLY)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(number)


def seconds(run: Callable[[], object], before: Callable[[], object]) -> float:
    before()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def drained(items: object) -> None:
    for _ in items:
        pass


def wrong_rows(store: ActivationStore) -> int:
    by_batch = {i: one.flatten(0, -2) for i, one in enumerate(store.tensors("0"))}
    return sum(
        int((by_batch[batch][row] != held).any())
        for rows in store.loader("0", BATCH_ROWS)
        for (batch, _, row), held in list(zip(rows.origins.tolist(), rows.records["0"]))[::97]
    )


def measure(width: int, dtype: torch.dtype, rows: int, cold: bool, mib: int, repeats: int) -> dict:
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name)
        fill(folder, width, dtype, rows, mib)
        before = (lambda: drop_from_cache(folder)) if cold else (lambda: None)
        read_files(folder)
        loader = ActivationStore(folder).loader("0", BATCH_ROWS, buffer_rows=BUFFER_ROWS)
        turns = {
            "file_s": lambda: read_files(folder),
            "tensors_s": lambda: drained(ActivationStore(folder).tensors("0")),
            "loader_s": lambda: drained(loader),
        }
        times = [{n: seconds(turn, before) for n, turn in turns.items()} for _ in range(repeats)]
        row = {"width": width, "dtype": str(dtype).split(".")[1], "rows": rows, "cold": cold}
        row |= {name: round(min(one[name] for one in times), 3) for name in turns}
        row["of_file"] = round(row["file_s"] / row["loader_s"], 2)
        row["of_tensors"] = round(row["tensors_s"] / row["loader_s"], 2)
        return {**row, "wrong": wrong_rows(ActivationStore(folder))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--mib", type=int, default=512, help="size of a store")
    parser.add_argument("--repeats", type=int, default=8)
    options = parser.parse_args()
    rows = []
    for case in CASES:
        for cold in (True, False):
            rows.append(measure(*case, cold, options.mib, options.repeats))
            print(rows[-1], flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

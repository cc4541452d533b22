"""Writes files that exist in whole or not at all, such as the one with a rank's tensors, in a
thread and in order, while the run continues.

A file is written under another name, synced, renamed, and its folder synced. The leftovers of a
killed process have a temporary name, or are in no manifest.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ASIDE = ".part"
_CHUNK_BYTES = 16 * 2**20  # per write
_LOADED_BYTES = 2**19  # per read: they stay in the cache
_LIBC = ctypes.CDLL(None)
_ALIGNMENT = 64  # of the first tensor: operations on complex128 need 16
_MAX_HEADER_BYTES = 100_000_000  # the most that readers of safetensors accept

# The names of dtypes in safetensors; others are stored as bytes, and the index names their dtype.
_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def write_whole(path: Path, chunks: Iterable[bytes | memoryview], syncs: bool = True) -> None:
    """Write a file in whole; when this returns, it has its name, and, if ``syncs``, is on the disk.

    Raises:
        OSError: the file system's error; the file of this name is then unchanged, or absent.
    """
    aside = path.with_name(path.name + ASIDE)
    try:
        with open(aside, "wb") as file:
            for chunk in chunks:
                write_chunk(file, chunk)
            file.flush()
            if syncs:
                os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):  # frees the space on a disk that is full
            aside.unlink()
        raise
    if syncs:
        sync_folder(path.parent)


def write_chunk(file, chunk: bytes | memoryview) -> None:
    """Write one chunk for ``write_whole``."""
    file.write(chunk)


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that files renamed in it are on the disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def safetensors_of(tensors: Mapping[str, Tensor]) -> Iterable[bytes | memoryview]:
    """Yield the bytes of a safetensors file in pieces; tensors are not copied.

    Source: github.com/huggingface/safetensors, README, "Format".
    """
    # The widest elements first, so that all are aligned.
    names = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        tensor = tensors[name]
        kind = _NAMES.get(tensor.dtype)
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": kind or "U8",
            "shape": list(tensor.shape) if kind else [tensor.nbytes],
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    if len(text) > _MAX_HEADER_BYTES:
        raise ValueError(
            f"the names of {len(tensors)} records take {len(text)} bytes, more than a safetensors "
            "file can have; give a smaller shard_bytes"
        )
    yield len(text).to_bytes(8, "little")
    yield text
    for name in names:
        yield from _chunks(tensors[name])


class MappedFile:
    """A safetensors file, mapped once: its tensors are views of one storage.

    Raises:
        ValueError: it is not such a file; also a RuntimeError or OSError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with open(path, "rb") as file:
            self._begin = 8 + int.from_bytes(file.read(8), "little")
            self._header = json.loads(file.read(min(self._begin - 8, _MAX_HEADER_BYTES)))
        size = path.stat().st_size
        self._data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)

    def load(self, name: str) -> None:
        """Read a tensor from the disk, if it is not in memory. A mapped page that is read where it
        is used comes with a few neighbours only, and whoever uses it waits.
        """
        start, end = (self._begin + offset for offset in self._header[name]["data_offsets"])
        pieces = range(start, end, _LOADED_BYTES)
        # All from the first one on that is not: the kernel reads ahead of a plain read.
        first = next((i for i, at in enumerate(pieces) if not self._is_in_memory(at)), len(pieces))
        buffer = memoryview(bytearray(_LOADED_BYTES))
        with open(self._path, "rb", buffering=0) as file:
            for at in pieces[first:]:
                os.preadv(file.fileno(), [buffer[: end - at]], at)

    def _is_in_memory(self, at: int) -> bool:
        """Whether the page of this byte is in memory."""
        page = (self._data.data_ptr() + at) // mmap.PAGESIZE * mmap.PAGESIZE
        found = ctypes.c_ubyte(1)
        _LIBC.mincore(ctypes.c_void_p(page), ctypes.c_size_t(1), ctypes.byref(found))
        return bool(found.value & 1)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors."""
        return {name: self.tensor(name) for name in self._header}

    def tensor(self, name: str) -> Tensor:
        """Return a tensor; KeyError if there is none. A write to it does not change the file."""
        found = self._header[name]
        start, end = (self._begin + offset for offset in found["data_offsets"])
        return self._data[start:end].view(_DTYPES[found["dtype"]]).view(found["shape"])


def _chunks(tensor: Tensor) -> Iterable[memoryview]:
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    if not tensor.nbytes:
        return
    data = memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
    for start in range(0, tensor.nbytes, _CHUNK_BYTES):
        yield data[start : start + _CHUNK_BYTES]


class FolderLock:
    """A lock against other processes that write into a folder. It ends with the process.

    Raises:
        ValueError: another process holds it.
    """

    def __init__(self, folder: Path) -> None:
        self._number: int | None = os.open(folder, os.O_RDONLY)
        _held.add(self)
        try:
            fcntl.flock(self._number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise ValueError(
                f"ActivationStore: {folder} is being written by another FlexModel or process; give "
                "each a folder of its own, or close the other one"
            ) from None
        except OSError:  # a file system without locks
            pass

    def release(self) -> None:
        """Release the lock; repeated calls do nothing."""
        if self._number is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(self._number, fcntl.LOCK_UN)  # a new child may hold it, too, until then
            self.leave()

    def leave(self) -> None:
        """Close the descriptor: a forked child's copy, which must not outlive the parent's lock."""
        if self._number is not None:
            number, self._number = self._number, None
            os.close(number)


_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _leave_in_child() -> None:
    for lock in list(_held):
        lock.leave()


os.register_at_fork(after_in_child=_leave_in_child)


_POLL_S = 0.5  # how often a wait wakes up, so that Ctrl-C is handled within a second


class Writer:
    """Runs tasks one after another. After one that failed, no other is started.

    Pending tasks are bounded in bytes: ``reserve`` blocks until there is room, and nothing is
    dropped. The thread starts with the first task; a forked child has none.

    Args:
        max_bytes: The most bytes that may be held. One batch that is larger is held alone.

    Attributes:
        error: The exception that a task raised.
        held_bytes: The bytes reserved and not released yet.
    """

    def __init__(self, max_bytes: int) -> None:
        self.error: Exception | None = None
        self.held_bytes = 0
        self._max_bytes = max_bytes
        self._tasks: deque[tuple[Callable[[], None], int]] = deque()  # the first one may be running
        self._changed = threading.Condition(threading.RLock())
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    @property
    def is_child(self) -> bool:
        """Whether this process was forked from the writer's."""
        return os.getpid() != self._pid

    def reserve(self, num_bytes: int) -> None:
        """Wait until there is room for so many bytes, or no task left that could free some."""
        with self._changed:
            self._wait_while(lambda: self.held_bytes + num_bytes > self._max_bytes)
            self.held_bytes += num_bytes

    def submit(self, task: Callable[[], None], num_bytes: int = 0) -> None:
        """Run a task after all that were submitted before, and release so many bytes then."""
        with self._changed:
            self._tasks.append((task, num_bytes))
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="flex_model store", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the interpreter exits: run it in this thread
                    self._run_first()
                    return
                self._thread = thread
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until all submitted tasks ended, or were dropped after an error."""
        with self._changed:
            self._wait_while(lambda: True)

    def _wait_while(self, is_wanted: Callable[[], bool]) -> None:
        """Wait while this holds and there are tasks that have not ended."""
        while self._tasks and not self._is_closed and is_wanted():
            self._changed.wait(_POLL_S)

    def close(self) -> None:
        """End the thread and drop the tasks that it has not started. Not for a forked child."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._tasks.clear()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self._is_closed)
                if self._is_closed:
                    return
            self._run_first()

    def _run_first(self) -> None:
        task, num_bytes = self._tasks[0]
        try:
            if self.error is None:
                task()
        except Exception as error:
            self.error = error
        del task  # and, with its place, the tensors that it holds
        with self._changed:
            self._tasks.popleft()
            self.held_bytes -= num_bytes
            self._changed.notify_all()

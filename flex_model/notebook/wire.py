"""How values travel between the driver and the ranks.

A value is pickled by cloudpickle, so that functions of cells travel, too: that happens only between
a user's kernel and the engines that it drives, over ipyparallel's signed channel, which runs code
by design. Tensors are not pickled. Their bytes follow in one block: in a memory file where both
processes are on one host, else in the message.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import mmap
import os
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

Parcel = tuple[bytes, Any]  # what was pickled; the bytes of its tensors, or (pid, fd) of their file
Reference = tuple[Any, ...]

_ALIGNMENT = 64
_IN_MESSAGE = 2**16  # bytes of tensors that are not worth a file


class Packer:
    """Pickles values of one message, with their tensors beside them.

    Args:
        refer: Returns a reference for an object that does not travel; None for others.
    """

    def __init__(self, refer: Callable[[Any], Reference | None]) -> None:
        self._refer = refer
        self._places: dict[int, Reference] = {}
        self._tensors: list[tuple[int, Tensor]] = []  # with their offsets
        self._alive: list[Tensor] = []
        self._size = 0

    def pickle(self, value: Any) -> bytes:
        pickler: Any = cloudpickle.Pickler(file := io.BytesIO())
        pickler.persistent_id = self._reference
        pickler.dump(value)
        return file.getvalue()

    def digest(self, value: Any) -> bytes:
        """Return a hash of a value with its tensors, by a packer that has pickled nothing else."""
        found = hashlib.sha256(self.pickle(value))
        for _, tensor in self._tensors:
            found.update(_bytes_of(tensor))
        return found.digest()

    def _reference(self, value: Any) -> Reference | None:
        if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided:
            return self._refer(value)
        if id(value) not in self._places:
            plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            self._places[id(value)] = (
                "tensor",
                self._size,
                plain.dtype,
                tuple(plain.shape),
                isinstance(value, nn.Parameter),
                value.requires_grad and value.is_leaf,
            )
            self._alive.append(value)
            self._tensors.append((self._size, plain))
            self._size += -(-plain.nbytes // _ALIGNMENT) * _ALIGNMENT
        return self._places[id(value)]

    def payload(self, share: bool) -> Any:
        """Return the bytes of the tensors; with ``share``, a `MemoryFile` if they are many."""
        if share and self._size > _IN_MESSAGE:
            return MemoryFile(self._size, self._tensors)
        block = bytearray(self._size)
        for start, tensor in self._tensors:
            block[start : start + tensor.nbytes] = _bytes_of(tensor)
        return bytes(block)


class MemoryFile:
    """Memory that other processes of this user on this host can map by ``address``, until closed.

    It has no name, so nothing stays behind when a process is killed.
    """

    def __init__(self, size: int, tensors: list[tuple[int, Tensor]]) -> None:
        self._file = open(os.memfd_create("flex_model"), "wb")  # noqa: SIM115
        self.address = (os.getpid(), self._file.fileno())
        try:
            self._file.truncate(size)
            for start, tensor in tensors:
                self._file.seek(start)
                self._file.write(_bytes_of(tensor))
            self._file.flush()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()


def _bytes_of(tensor: Tensor) -> memoryview:
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def map_file(address: tuple[int, int]) -> mmap.mmap:
    """Map the memory file of another process; what is written into it stays in this process.

    Raises:
        OSError: the process is not on this host, or not of this user.
    """
    fd = os.open(f"/proc/{address[0]}/fd/{address[1]}", os.O_RDONLY)
    try:
        return mmap.mmap(fd, os.fstat(fd).st_size, access=mmap.ACCESS_COPY)
    finally:
        os.close(fd)


class Unpacker:
    """The reverse of `Packer`.

    Args:
        payload: The bytes of the tensors, or the address of a memory file.
        resolve: Returns the object of a reference.
        device: Where tensors go; None: they stay on the CPU.
    """

    def __init__(
        self, payload: Any, resolve: Callable[[Reference], Any], device: torch.device | None = None
    ) -> None:
        self._block = map_file(payload) if isinstance(payload, tuple) else bytearray(payload)
        self._resolve, self._device = resolve, device
        self._tensors: dict[Any, Tensor] = {}

    def unpickle(self, pickled: bytes) -> Any:
        class Unpickler(pickle.Unpickler):  # whose own objects are read-only in Python 3.13
            persistent_load = staticmethod(self._object)

        return Unpickler(io.BytesIO(pickled)).load()

    def _object(self, reference: Reference) -> Any:
        if reference[0] != "tensor":
            return self._resolve(reference)
        _, start, dtype, shape, is_parameter, requires_grad = reference
        count = torch.Size(shape).numel()
        if not count:
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
        elif (start, dtype) in self._tensors:
            return self._tensors[start, dtype]
        else:
            tensor = torch.frombuffer(self._block, dtype=dtype, count=count, offset=start)
            tensor = tensor.reshape(shape).to(self._device)
        if is_parameter:
            tensor = nn.Parameter(tensor, requires_grad)
        elif requires_grad:
            tensor.requires_grad_()
        if count:
            self._tensors[start, dtype] = tensor
        return tensor

"""Stands in for torch's symmetric memory, which the driver allocates: on memory of CUDA IPC."""

import os
import socket

import torch
from torch._C import _distributed_c10d as c10d

PAD_BYTES = 9216  # as torch's

_allocated = {}  # by address: the number of bytes in front of the signal pad


def exchange(store, what, rank, num_ranks, text):
    store.set(f"{what}/{rank}", text)
    return [store.get(f"{what}/{other}").decode() for other in range(num_ranks)]


class SymmetricMemory:
    """What torch 2.11 has of it and the package uses."""

    def __init__(self, tensor, group):
        self._like = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        handle = torch.ops.flex_model.ipc_handle(tensor).tolist()
        # Its own number, so that keys of the store are never used twice.
        store, rank, size = group.get_group_store(), group.rank(), group.size()
        number = store.add(f"number/{rank}", 1)
        index = tensor.device.index
        rows = exchange(store, number, rank, size, f"{socket.gethostname()} {index} {handle}")
        places = [row.split()[:2] for row in rows]
        overlap = any(places.count(place) > 1 for place in places)
        if overlap and os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") != "1":
            raise RuntimeError("detected allocations from overlapping devices from different ranks")
        self._opened = []
        self.buffer_ptrs = [tensor.data_ptr()] * size
        for other, row in enumerate(rows):
            if other != rank:
                numbers = [int(n) for n in row.split("[")[1].rstrip("]").split(",")]
                self._opened.append(torch.ops.flex_model.ipc_open(self._like, numbers))
                self.buffer_ptrs[other] = self._opened[-1]
        exchange(store, f"{number}/opened", rank, size, "")
        ends = _allocated[tensor.data_ptr()]
        self.signal_pad_ptrs = [address + ends for address in self.buffer_ptrs]
        self.multicast_ptr = 0
        with torch.cuda.stream(
            torch.cuda.Stream(tensor.device)
        ):  # nobody waits for the pad's zeros
            torch.cuda._sleep(200_000_000)
            pad = tensor.as_strided((PAD_BYTES,), (1,), ends)
            pad.zero_()

    def __del__(self):
        for address in self._opened:
            torch.ops.flex_model.ipc_close(self._like, address)

    @staticmethod
    def get_backend(device):
        return os.environ.get("TORCH_SYMMMEM", "CUDA")

    @staticmethod
    def empty_strided_p2p(size, stride, dtype, device, group_name=None, alloc_id=None):
        assert (stride, dtype) == ((1,), torch.uint8)
        like = torch.empty(0, dtype=dtype, device=device)
        whole = torch.ops.flex_model.ipc_buffer(like, size[0] + PAD_BYTES)
        whole.fill_(0xA5)  # the driver's memory has any values
        torch.cuda.synchronize(device)
        _allocated[whole.data_ptr()] = size[0]
        torch.cuda._sleep(200_000_000)  # what its owner writes there is late, too
        return whole[: size[0]]

    @staticmethod
    def rendezvous(tensor, group_name):
        return SymmetricMemory(tensor, c10d._resolve_process_group(group_name))


def install():
    c10d._SymmetricMemory = SymmetricMemory

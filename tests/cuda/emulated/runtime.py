"""The emulated CUDA runtime from Python, with what torch.cuda has of it. To be imported before
torch, whose CUDA library it precedes.
"""

import ctypes
import sys
import time
from types import SimpleNamespace

from tests.cuda.emulated import build

assert "torch" not in sys.modules
SITE = build.package()
ctypes.CDLL(str(build.torch_folder() / "lib" / "libtorch_cpu.so"), ctypes.RTLD_GLOBAL)
library = ctypes.CDLL(str(SITE / "flex_model" / "_cuda.abi3.so"))
library.emulated_current_stream.restype = ctypes.c_void_p

import torch  # noqa: E402

library.emulated_register_guard()
NOT_READY = 600
is_capturing = False


def call(name, *arguments):
    error = getattr(library, name)(*arguments)
    assert error == 0, f"{name}: CUDA error {error}"


def made(name):
    handle = ctypes.c_void_p()
    call(name, ctypes.byref(handle))
    return handle


def is_done(name, handle):
    error = getattr(library, name)(handle)
    assert error in (0, NOT_READY), f"{name}: CUDA error {error}"
    return error == 0


def refuse_in_capture():
    if is_capturing:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


class Graph:
    """``torch.cuda.CUDAGraph``."""

    def replay(self):
        pass


class Capture:
    """``torch.cuda.graph``: its work is done at once, and a replay does nothing."""

    def __init__(self, graph):
        pass

    def __enter__(self):
        global is_capturing
        is_capturing = True

    def __exit__(self, *_):
        global is_capturing
        is_capturing = False


def current_device():
    device = ctypes.c_int()
    call("cudaGetDevice", ctypes.byref(device))
    return device.value


def set_device(device):
    call("cudaSetDevice", index_of(device))


def device_count():
    count = ctypes.c_int()
    call("cudaGetDeviceCount", ctypes.byref(count))
    return count.value


def index_of(device):
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


class Stream(torch.Stream):
    def __new__(cls, device=None, handle=None):
        device = index_of(device)
        if handle is None:
            before = current_device()
            set_device(device)
            handle = made("cudaStreamCreate").value
            set_device(before)
        cuda = 1  # as torch counts types
        return super().__new__(cls, stream_id=handle, device_index=device, device_type=cuda)

    def __init__(self, *_, **__):
        self._handle = ctypes.c_void_p(self.stream_id)

    def query(self):
        refuse_in_capture()
        return is_done("cudaStreamQuery", self._handle)

    def synchronize(self):
        refuse_in_capture()
        self.settle()

    def settle(self):
        """Wait as the emulation does, which a program would not."""
        call("cudaStreamSynchronize", self._handle)

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        event.wait(self)

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def make_current(self):
        library.emulated_set_current_stream(self.device_index, self._handle)


class Event:
    def __init__(self, **_):
        self._handle = made("cudaEventCreate")

    def __del__(self):
        call("cudaEventDestroy", self._handle)

    def record(self, stream=None):
        call("cudaEventRecord", self._handle, (stream or current_stream())._handle)
        self._recorded_at = time.perf_counter()

    def elapsed_time(self, later):
        """Milliseconds of the host, which mean nothing."""
        return (later._recorded_at - self._recorded_at) * 1e3

    def wait(self, stream=None):
        call("cudaStreamWaitEvent", (stream or current_stream())._handle, self._handle, 0)

    def query(self):
        refuse_in_capture()
        return is_done("cudaEventQuery", self._handle)

    def synchronize(self):
        refuse_in_capture()
        call("cudaEventSynchronize", self._handle)


def current_stream(device=None):
    index = index_of(device)
    return Stream(index, library.emulated_current_stream(index))


class UseStream:
    """``torch.cuda.stream``: the current stream, and device, inside ``with``."""

    def __init__(self, stream):
        self._stream = stream

    def __enter__(self):
        self._before = current_device(), current_stream(self._stream.device_index)
        set_device(self._stream.device_index)
        self._stream.make_current()

    def __exit__(self, *_):
        device, stream = self._before
        stream.make_current()
        set_device(device)


def set_stream(stream_id, device_index, device_type):
    set_device(device_index)
    Stream(device_index, stream_id).make_current()


def record_stream(tensor, stream):
    """Keep the tensor's memory, once it is freed, until the stream's work so far is done."""
    memory = ctypes.c_void_p(tensor.untyped_storage().data_ptr())
    library.emulated_record_stream(memory, ctypes.c_void_p(stream.stream_id))


def synchronize(device=None):
    before = current_device()
    set_device(device)
    call("cudaDeviceSynchronize")
    set_device(before)


def sleep(cycles):
    """Make the current stream wait for about so many cycles of a GPU."""
    # A function of the C library, which no thread of Python has to run.
    microseconds = ctypes.c_void_p(cycles // 2000)
    call("cudaLaunchHostFunc", current_stream()._handle, library.usleep, microseconds)


def properties(device=None):
    return SimpleNamespace(
        name="emulated GPU",
        uuid=f"{index_of(device) + 1:08x}-1111-2222-3333-444444444444",
        total_memory=1 << 30,
        L2_cache_size=1 << 20,
        major=9,
        minor=0,
    )

"""Makes torch see GPUs where there is none: `install`, before anything of the package is imported.

A tensor of a device is plain memory of this process. torch's own kernels for it are replaced: the
CPU computes the result when the operator is called, but it arrives in the order of the current
stream, so that whoever does not wait for that stream reads nonsense. Copies and the package's own
kernels do all their work on the stream.
"""

import importlib
import sys
import warnings

from tests.cuda.emulated import runtime  # before torch

# isort: split
import torch
from torch.utils._pytree import tree_map_only

# Left as they are: they move no bytes.
WITHOUT_WORK = ("set_", "is_set_to", "resize_")
# Those that take tensors of several devices.
TAKE_INDICES_OF_THE_CPU = ("index", "index_put", "index_put_", "_index_put_impl_")
generators = ()
_library = torch.library.Library("aten", "IMPL")
_sync_debug_mode = "default"


def host(tensor):
    """The tensor as one of the CPU, in the same memory."""
    assert not tensor.is_conj() and not tensor.is_neg()
    return torch.ops.emulated.host(tensor)


def empty_like(tensor, device):
    return empty(tensor.shape, tensor.stride(), tensor.dtype, device)


def empty(sizes, strides, dtype, device):
    make, index = torch.ops.emulated.empty, runtime.index_of(device)
    if 0 in sizes:  # torch would call its allocator
        one = make([1], [1], dtype.itemsize, dtype, index)
        return one.set_(one, 0, sizes, strides)
    return make(sizes, strides, dtype.itemsize, dtype, index)


def queue_copy(to, source, device):
    """Copy between tensors of the CPU in the order of a device's current stream."""
    torch.ops.emulated.copy(to, source, to.dtype.itemsize, runtime.index_of(device))


def wait_for_device(device):
    if _sync_debug_mode == "error":
        raise RuntimeError("called a synchronizing CUDA operation")
    runtime.current_stream(device).synchronize()


def device_among(values):
    found = []
    tree_map_only(torch.Tensor, lambda t: found.append(t.device) if t.is_cuda else None, values)
    tree_map_only(torch.device, lambda d: found.append(d) if d.type == "cuda" else None, values)
    return found[0]


def check_devices(values, device):
    """As torch's own kernels, which take numbers of the CPU beside tensors of one GPU."""

    def check(tensor):
        if tensor.device != device and (tensor.is_cuda or tensor.dim()):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{device} and {tensor.device}!"
            )

    tree_map_only(torch.Tensor, check, values)


def on_cpu(operator):
    """A kernel that computes on the CPU."""
    schema = operator._schema
    written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    names = [argument.name for argument in schema.arguments]
    random = "generator" in names

    def kernel(*args, **kwargs):
        values = dict(zip(names, args)) | kwargs
        device = device_among(list(values.values()))
        if operator._schema.name.partition("::")[2] not in TAKE_INDICES_OF_THE_CPU:
            check_devices(list(values.values()), device)
        if operator is torch.ops.aten._local_scalar_dense.default:
            wait_for_device(device)
        runtime.current_stream(device).settle()
        changed = []

        def argument(value, is_written):
            def tensor(given):
                if not given.is_cuda:
                    return given
                copy = host(given).clone() if is_written else host(given)
                if is_written:
                    changed.append((given, copy))
                return copy

            value = tree_map_only(torch.Tensor, tensor, value)
            return torch.device("cpu") if isinstance(value, torch.device) else value

        values = {n: argument(values[n], w) for n, w in zip(names, written) if n in values}
        values.pop("pin_memory", None)
        if random and values.get("generator") is None:
            values["generator"] = generators[runtime.index_of(device)]
        result = call(operator, values)

        def output(tensor):
            for given, copy in changed:
                if tensor is copy:
                    return given
            arriving = empty_like(tensor, device)
            queue_copy(host(arriving), tensor, device)
            return arriving

        for given, copy in changed:
            if given.shape != copy.shape:  # an `out` that was made larger
                given.set_(empty_like(copy, device))
            queue_copy(host(given), copy, device)
        return tree_map_only(torch.Tensor, output, result)

    return kernel


def call(operator, values):
    arguments = operator._schema.arguments
    positional = [values.pop(a.name) for a in arguments if not a.kwarg_only and a.name in values]
    return operator(*positional, **values)


def copy_(to, source, non_blocking=False):
    source = source.resolve_conj().resolve_neg()
    if to.is_cuda and source.is_cuda and to.device != source.device:
        return copy_between_devices(to, source)
    device = to.device if to.is_cuda else source.device
    crosses = to.device.type != source.device.type
    on_host = [t for t in (to, source) if not t.is_cuda and t.numel()]
    waits = crosses and not (non_blocking and all(t.is_pinned() for t in on_host))
    target, origin = (host(t) if t.is_cuda else t for t in (to, source))
    if to.dtype != source.dtype or waits:
        if waits:
            wait_for_device(device)
        runtime.current_stream(device).settle()
        origin = origin.to(to.dtype, copy=True)
        if to.is_cuda:
            queue_copy(target, origin.expand(to.shape), device)
        else:
            target.copy_(origin)
        return to
    queue_copy(target, origin.expand(to.shape), device)
    return to


def copy_between_devices(to, source):
    """On the source's stream, after the target's, which waits for the copy: as torch does."""
    source = source.to(to.dtype).expand(to.shape)
    sender, receiver = map(runtime.current_stream, (source.device, to.device))
    sender.wait_stream(receiver)
    queue_copy(host(to), host(source), source.device)
    receiver.wait_stream(sender)
    return to


def fill_(tensor, value):
    """As a memory set of CUDA, for which the host waits for nothing."""
    value = torch.full((), value, dtype=tensor.dtype, device="cpu")
    queue_copy(host(tensor), value.expand(tensor.shape), tensor.device)
    return tensor


def make_empty(size, *, dtype=None, device=None, memory_format=None, **_):
    dtype = dtype or torch.get_default_dtype()
    memory_format = memory_format or torch.contiguous_format
    like = torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format)
    return empty(size, like.stride(), dtype, device)


def make_empty_strided(size, stride, *, dtype=None, device=None, **_):
    return empty(size, stride, dtype or torch.get_default_dtype(), device)


def replace_kernels():
    kernels = {
        "copy_": copy_,
        "empty.memory_format": make_empty,
        "empty_strided": make_empty_strided,
        "fill_.Scalar": fill_,
        "record_stream": runtime.record_stream,
        "zero_": lambda tensor: fill_(tensor, 0),
    }
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
        space, _, name = name.partition("::")
        packet, _, overload = name.partition(".")
        if space != "aten" or packet in WITHOUT_WORK:
            continue
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        returned = [r.alias_info for r in operator._schema.returns if r.alias_info is not None]
        if all(alias.is_write for alias in returned):  # no view
            kernels.setdefault(name, on_cpu(operator))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch's kernels are replaced
        for name, kernel in kernels.items():
            _library.impl(name, kernel, "CUDA", allow_override=True)


def set_sync_debug_mode(mode):
    global _sync_debug_mode
    _sync_debug_mode = mode


class Generator(torch.Generator):
    """A GPU's generator, which counts what was drawn."""

    def get_offset(self):
        return hash(self.get_state().numpy().tobytes())


def install():
    """Replace torch's CUDA, and make `flex_model` the package with the emulated `_cuda`."""
    global generators
    sys.path.insert(0, str(runtime.SITE))
    replace_kernels()
    generators = tuple(Generator() for _ in range(runtime.device_count()))
    cuda = torch.cuda
    cuda._lazy_init = cuda.empty_cache = lambda: None
    cuda.is_available = cuda.is_initialized = lambda: True
    cuda.default_generators = generators
    cuda.mem_get_info = lambda *_: (1 << 40, 1 << 41)
    cuda.set_sync_debug_mode = set_sync_debug_mode
    cuda.get_device_properties = runtime.properties
    cuda._sleep = runtime.sleep
    cuda.stream = runtime.UseStream
    torch._C._cuda_setStream = runtime.set_stream
    for name in ("Event", "Stream", "current_device", "current_stream", "device_count"):
        setattr(cuda, name, getattr(runtime, name))
    cuda.is_current_stream_capturing = lambda: runtime.is_capturing
    cuda.CUDAGraph, cuda.graph = runtime.Graph, runtime.Capture
    for name in ("set_device", "synchronize"):
        setattr(cuda, name, getattr(runtime, name))
    importlib.import_module("flex_model")  # now: scripts may put their own folders first

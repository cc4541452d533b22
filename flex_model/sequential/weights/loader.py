"""Finds which weights belong to which step, loads those of each into the model, reads those of the
next one meanwhile, and leaves the model as it was. Loaded are those that a run gives, or those of
an offloaded model.

Weights are copied into a few flat buffers, each large enough for the largest step, which are
reused: memory that is freed and allocated for every step would pile up in the heap.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import itertools
import os
import platform
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flex_model import pytree
from flex_model.distributed.transports.buffer_layout import same_bits
from flex_model.hooks.core import HookCore
from flex_model.integrations import dtensor, fsdp1, fsdp2, offload, quantized, torch_private
from flex_model.runs.interrupts import deferred
from flex_model.sequential.targets import Target
from flex_model.sequential.weights.source import WeightSource, as_source


@contextlib.contextmanager
def loaded(
    module: nn.Module,
    targets: list[Target],
    weights: str | Path | WeightSource | None,
    place: torch.device,
    prefetch: int,
    needed: Iterable[str],
) -> Iterator[WeightLoader]:
    """A context in which weights are loaded and dropped; the model is as it was afterwards."""
    source = None if weights is None else as_source(weights, module)
    if source is not None:
        _check_replaceable(module)
    inventory = take_inventory(module, targets, _finder(module, source), needed)
    _check_complete(inventory, is_given=source is not None)
    loader = WeightLoader(source, inventory, targets, place, prefetch)
    try:
        with small(), rebuilt(module, inventory.rebuilt, place):
            yield loader
    finally:
        loader.close()


def _check_replaceable(model: nn.Module) -> None:
    """ValueError for a model whose forward takes its weights from elsewhere than its modules."""
    by_fsdp = [n for n, one in model.named_modules() if fsdp2.is_fsdp2(one) or fsdp1.is_fsdp1(one)]
    moved = [name for name, _ in model.named_parameters() if offload.is_offloaded(model, name)]
    if by_fsdp or moved:
        what = "FSDP gathers" if by_fsdp else f"accelerate loads ({moved[0]!r}, ...)"
        raise ValueError(
            f"sequential.run: weights= can't replace those that {what}; load them into the model "
            "before, and leave weights= out"
        )


def _finder(module: nn.Module, source: WeightSource | None) -> Callable[[list[str]], str | None]:
    """Return the function from a weight's names to the one that the source has."""
    if source is None:
        return lambda names: None
    tied = offload.tied_groups(module)
    has = getattr(source, "has", None) or set(source.names()).__contains__

    def find(names: list[str]) -> str | None:
        others = [other for name in names for other in sorted(tied.get(name, ()))]
        found = [name for name in dict.fromkeys([*names, *others]) if has(name)]
        for other in found[1:]:
            if not same_bits(source.read(found[0]), source.read(other)):
                raise ValueError(
                    f"sequential.run: {found[0]!r} and {other!r} are one weight of the model, and "
                    "differ in the weights; set tie_word_embeddings=False in the configuration "
                    "that it is built with, or remove one of them from the weights"
                )
        return next(iter(found), None)

    return find


def weights_of_hooks(core: HookCore) -> list[str]:
    """Return the parameters that editing functions use: they may be those of another target."""
    return [
        name
        for registration in core.table.registrations
        if registration.index in core.table.active
        for name in registration.hook_function.parameter_names
    ]


def device_of(module: nn.Module, device: str | torch.device | None) -> torch.device:
    """Return the device that a run with this argument ``device`` takes place on."""
    if device is None:
        devices = dict.fromkeys(tensor.device for tensor in _tensors_of(module))
        own = next((one for one in devices if one.type != "meta"), None)
        if own is not None and own.type == "cpu" and torch.device("meta") in devices:
            own = None
        device = own or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Yield every parameter and buffer; shared ones several times."""
    for part in module.modules():
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None:
                yield tensor


def needs_loading(
    module: nn.Module, device: str | torch.device | None, place: torch.device
) -> bool:
    """Whether the model's own weights must be copied to ``place``, or are on meta. A model on
    several devices, or one whose own hooks load its weights (accelerate), is run as it is.
    """
    if device is not None:
        return any(tensor.device != place for tensor in _tensors_of(module))
    return any(tensor.is_meta for tensor in _tensors_of(module)) and not any(
        hasattr(part, "_hf_hook") for part in module.modules()
    )


def moved(batch: Any, place: torch.device) -> Any:
    """Return a batch with its tensors on ``place``."""
    leaves, spec = pytree.flatten(batch)
    if all(leaf.device == place for leaf in leaves):
        return batch  # itself: a cache in it grows, and what reads the batch may write into it
    return pytree.unflatten([leaf.to(place) for leaf in leaves], spec)


def _check_complete(inventory: Inventory, *, is_given: bool) -> None:
    """Check that all weights have a source, if one is given; buffers in memory may have none: those
    that are not persistent are never stored.
    """
    unknown = [weight for weight in inventory.loaded if weight not in inventory.sources]
    on_meta = [weight.names[0] for weight in unknown if weight.tensor.is_meta]
    own = [weight.names[0] for weight in unknown if weight.is_parameter and is_given]
    missing = on_meta or own
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    if on_meta:
        raise ValueError(
            f"sequential.run: no source for {missing[0]!r}{more}: it is on meta, and the weights "
            "do not have it. If they have it by another name: CheckpointWeights(path, rename=...); "
            "if the model is to be run as it is, build it on a real device"
        )
    if own:
        raise ValueError(
            f"sequential.run: no source for {own[0]!r}{more}: the weights do not have it, and the "
            "model's own value may be that of another checkpoint; add it to weights, or leave "
            "weights= out. If they have it by another name: CheckpointWeights(path, rename=...)"
        )


_M_MMAP_THRESHOLD = -3
_BLOCK_BYTES = 128 * 2**10  # glibc's own default; it grows with the blocks that are freed
_LARGEST_BYTES = 32 * 2**20  # up to here


@contextlib.contextmanager
def small() -> Iterator[None]:
    """A context in which blocks of 128 KiB and more return to the system when they are freed. Else
    the memory of activations is kept for reuse: 210 MiB instead of 162 for 8 batches of a 724 MiB
    model.

    Afterwards blocks up to 32 MiB are kept for reuse, as glibc does in a process that has freed one
    of that size. Does nothing with other allocators, or if the environment tunes glibc.
    """
    is_tuned = "GLIBC_TUNABLES" in os.environ or any(n.startswith("MALLOC_") for n in os.environ)
    libc = ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" and not is_tuned else None
    mallopt = getattr(libc, "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, _BLOCK_BYTES)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES)


@contextlib.contextmanager
def rebuilt(model: nn.Module, buffers: list[Weight], device: torch.device) -> Iterator[None]:
    """A context in which the modules have these buffers, computed; afterwards those on meta again.

    Raises:
        ValueError: the name of a buffer that can't be computed.
    """
    try:
        for weight in buffers:
            initialize = _initializer(model, weight.names[0])
            made = None if initialize is None else _made(weight, initialize)
            if made is None:
                raise ValueError(
                    f"sequential.run: no source for the buffer {weight.names[0]!r}: the weights do "
                    f"not have it, and {type(model).__name__} can't compute it; make it "
                    "persistent, add it to the weights, or build that module on the CPU"
                )
            weight.put(made.to(device))
        yield
    finally:
        for weight in buffers:
            weight.put(weight.tensor)


def _initializer(model: nn.Module, name: str) -> Callable[[nn.Module], Any] | None:
    """Return ``_init_weights`` of the innermost Hugging Face model that holds the buffer."""
    prefixes = list(itertools.accumulate(name.split(".")[:-1], "{}.{}".format))
    for prefix in ["", *prefixes][::-1]:
        module = model.get_submodule(prefix)
        if hasattr(module, "config") and callable(getattr(module, "_init_weights", None)):
            return module._init_weights  # type: ignore[return-value]
    return None


def _made(weight: Weight, initialize: Callable[[nn.Module], Any]) -> Tensor | None:
    """Return the buffer as the model's own initialization writes it; None if that does not."""
    module, name = weight.places[0]
    made = torch.empty_like(weight.tensor, device="cpu")
    version = made._version
    tables = module._parameters, module._buffers
    with torch_private.restored(tables), torch.random.fork_rng(devices=[]):
        for key, buffer in module._buffers.items():  # they are written together
            if buffer is not None:
                is_meta = buffer.is_meta
                module._buffers[key] = (
                    torch.empty_like(buffer, device="cpu") if is_meta else buffer.clone()
                )
        module._buffers[name] = made
        for key, parameter in module._parameters.items():
            if parameter is not None:  # it is drawn, too: on meta, into nothing
                module._parameters[key] = nn.Parameter(parameter.detach().to("meta"), False)
        with torch.no_grad(), contextlib.suppress(NotImplementedError):
            initialize(module)
    return made if made._version != version else None


_ALIGNMENT = 64  # bytes, as torch's own allocator: kernels' results may depend on it


class WeightLoader:
    """The weights of one run. ``close()`` puts back what the modules had.

    Args:
        prefetch: The number of steps that are read ahead; 0: none, and there is no thread.

    Attributes:
        loads: By target name, how often its weights were loaded.
        bytes_read: Bytes read from the source, in its own dtype.
    """

    def __init__(
        self,
        source: WeightSource | None,
        inventory: Inventory,
        targets: list[Target],
        device: torch.device,
        prefetch: int,
    ) -> None:
        self.prefetch = prefetch
        self.loads: Counter[str] = Counter()
        self.bytes_read = 0
        self._source, self._inventory, self._device = source, inventory, device
        self._targets = targets
        sizes = (map(_size_of, weights) for weights in inventory.steps.values())
        self._buffer_bytes = max(map(sum, sizes), default=0)
        self._free: list[_Buffer] = []
        self._loaded: dict[int, _Buffer] = {}
        self._ahead: dict[int, Future[_Buffer]] = {}
        self._reader = ThreadPoolExecutor(1, "flex_model weights") if prefetch else None

    def load_resident(self) -> None:
        """Load what stays for the whole run: embeddings, norms, heads, weights that targets share.
        All others are absent until they are acquired.
        """
        for weights in self._inventory.steps.values():
            for weight in weights:
                weight.put(absent(weight))
        for weight in self._inventory.resident:
            if weight in self._inventory.sources or weight.tensor.device != self._device:
                local = torch.empty_like(local_of(weight.tensor), device=self._device)
                self._read_into(local.detach(), weight)
                weight.put(_as_weight(local, weight))

    def acquire(self, steps: set[int]) -> None:
        """Load the weights of exactly these steps into the model."""
        for step in self._loaded.keys() - steps:
            buffer = self._loaded.pop(step)
            if buffer.release():
                self._free.append(buffer)
        for step in sorted(steps - self._loaded.keys()):
            if self._reader is None:
                buffer = self._fill(step, self._buffer())
            else:
                buffer = (self._ahead.pop(step, None) or self._submit(step)).result()
            self._loaded[step] = buffer
            buffer.put()
            self.loads.update(target.name for target in self._targets if target.step == step)

    def read_ahead(self, steps: Iterable[int]) -> None:
        """Begin to read what will probably be acquired next, and drop what was read in vain."""
        wanted = [step for step in steps if step not in self._loaded][: self.prefetch]
        for step in self._ahead.keys() - set(wanted):
            self._free.append(self._ahead.pop(step).result())
        for step in wanted:
            if step not in self._ahead:
                self._ahead[step] = self._submit(step)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is in the memory of a step's weights, which others will take."""
        local = local_of(tensor)
        if type(local) is not Tensor:  # the result of a collective in progress
            return False
        place = local.untyped_storage().data_ptr()
        return any(buffer.memory.data_ptr() == place for buffer in self._loaded.values())

    def close(self) -> None:
        """Put back what the modules had, and end the reading thread."""
        if self._reader is not None:
            self._reader.shutdown(wait=True, cancel_futures=True)
        for weight in self._inventory.loaded:  # all: loading some may have been interrupted
            weight.put(weight.tensor)
        self._loaded.clear()
        self._ahead.clear()
        self._free.clear()

    def _buffer(self) -> _Buffer:
        return self._free.pop() if self._free else _Buffer(self._buffer_bytes, self._device)

    def _submit(self, step: int) -> Future[_Buffer]:
        assert self._reader is not None
        with deferred():  # the first one starts the thread, which the reader must have noted
            return self._reader.submit(self._fill, step, self._buffer())

    def _fill(self, step: int, buffer: _Buffer) -> _Buffer:
        buffer.fill(self._inventory.steps.get(step, []), self._read_into)
        return buffer

    def _read_into(self, local: Tensor, weight: Weight) -> None:
        """Copy this rank's part from the source, or from the model itself; casts the dtype."""
        name = self._inventory.sources.get(weight)
        if name is None or self._source is None:
            local.copy_(local_of(weight.tensor))
            return
        full = self._source.read(name)
        if not isinstance(full, Tensor):
            raise TypeError(
                f"sequential.run: the weights give a {type(full).__name__} for {name!r}; read() "
                "must return a torch.Tensor"
            )
        if quantized.drops_scales(name, full, weight.tensor, self._source.names):
            raise ValueError(
                f"sequential.run: {weight.names[0]!r} is quantised in the weights ({full.dtype}), "
                f"and {weight.tensor.dtype} in the model: cast, it would lose its scales; save a "
                "dequantised copy, as in docs/sequential.md#quantised-checkpoints, or build the "
                "model of quantised layers"
            )
        if full.shape != weight.tensor.shape:
            raise ValueError(
                f"sequential.run: {weight.names[0]!r} has shape {tuple(weight.tensor.shape)} in "
                f"the model, but {tuple(full.shape)} in the weights; give the weights of this "
                "model, or build it with their configuration"
            )
        self.bytes_read += full.nbytes
        local.copy_(part_of(full, weight.tensor))


class _Buffer:
    """Memory for the weights of one step. For a CUDA device they are read into pinned memory, and
    copied from there on a stream of the buffer's own.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._parts: list[tuple[Weight, Tensor]] = []
        self._is_free_after: torch.cuda.Event | None = None
        self._staging: tuple[Tensor, torch.cuda.Stream] | None = None
        if device.type == "cuda":
            self._record_use()  # what the current stream did there before it was freed

    def fill(self, weights: list[Weight], read_into: Callable[[Tensor, Weight], None]) -> None:
        """Read weights into it."""
        device = self.memory.device
        if device.type == "cuda" and self._staging is None:
            pinned = torch.empty(
                self.memory.shape, dtype=torch.uint8, pin_memory=True, device="cpu"
            )
            self._staging = pinned, torch.cuda.Stream(device)
            self.memory.record_stream(self._staging[1])  # the copy may outlive this object
        parts, start = [], 0
        with torch.no_grad():
            for weight in weights:
                local = local_of(weight.tensor)
                parts.append((weight, _part(self.memory, start, local)))
                memory = self._staging[0] if self._staging else self.memory
                read_into(_part(memory, start, local), weight)
                start += _size_of(weight)
            self._parts = parts
            if self._staging is not None:
                pinned, stream = self._staging
                with torch.cuda.stream(stream):
                    if self._is_free_after is not None:
                        stream.wait_event(self._is_free_after)
                    self.memory.copy_(pinned, non_blocking=True)
                stream.synchronize()

    def _record_use(self) -> None:
        self._is_free_after = torch.cuda.Event()
        self._is_free_after.record(torch.cuda.current_stream(self.memory.device))

    def put(self) -> None:
        """Replace the weights in the modules by the parts of this memory."""
        for weight, local in self._parts:
            weight.put(_as_weight(local, weight))

    def release(self) -> bool:
        """Take the weights out of the modules. Returns whether the memory can be reused: not if
        other tensors are in it, such as a weight that a target kept.
        """
        for weight in [part[0] for part in self._parts]:  # none of them stays referenced here
            weight.put(absent(weight))
        self._parts = []
        if self._is_free_after is not None:
            self._record_use()
        return torch_private.is_held_once(self.memory)


def _part(memory: Tensor, start: int, like: Tensor) -> Tensor:
    flat = memory[start : start + like.nbytes]
    return flat.view(like.dtype).view(like.shape)


def _as_weight(local: Tensor, weight: Weight) -> Tensor:
    tensor = dtensor.like(local, weight.tensor)
    if not weight.is_parameter:
        return tensor
    # Also where gradients are off, torch may choose its kernels by it.
    parameter = nn.Parameter(tensor, weight.tensor.requires_grad)
    vars(parameter).update(vars(weight.tensor))  # what the model keeps on it
    return parameter


def _size_of(weight: Weight) -> int:
    """Return the bytes of this rank's part, aligned."""
    return -(-local_of(weight.tensor).nbytes // _ALIGNMENT) * _ALIGNMENT


# Methods that don't need values, besides attributes.
_HARMLESS = (
    *("dim", "ndimension", "size", "numel", "nelement", "stride", "storage_offset", "element_size"),
    *("get_device", "is_complex", "is_contiguous", "is_floating_point", "is_inference"),
    *("__hash__", "__len__"),
)


class AbsentWeight(Tensor):
    _name: str
    _weight: Tensor
    _is_param: bool  # what torch reads in isinstance(..., nn.Parameter)

    @staticmethod
    def __new__(cls, weight: Weight) -> AbsentWeight:
        own = weight.tensor
        self: AbsentWeight = torch_private.make_subclass(cls, own.detach(), own.requires_grad)
        self._name, self._weight, self._is_param = weight.names[0], own, weight.is_parameter
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__" or name in _HARMLESS:
            with torch_private.DisableSubclassFunction():
                found = func(*args, **(kwargs or {}))
            if not isinstance(found, Tensor):
                return found
        leaves = (*args, *(kwargs or {}).values())
        names = [leaf._name for leaf in leaves if isinstance(leaf, AbsentWeight)]
        raise RuntimeError(
            f"sequential.run: the weight {names[0] if names else '(one of several)'!r} is used "
            "outside of the call of its target, and is not there now; choose targets=[...] without "
            "that target, so that its weights stay, or with one that holds that use"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self._weight, memo)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<the weight {self._name!r}, which is not loaded>"


def absent(weight: Weight) -> Tensor:
    """Return the stand-in for a weight: a DTensor's is on meta, so that no value comes of it. Other
    classes of tensors, as of quantised weights, are their own.
    """
    if dtensor.is_dtensor(weight.tensor):
        return _as_weight(local_of(weight.tensor).to("meta"), weight)
    is_plain = type(weight.tensor) in (Tensor, nn.Parameter)
    return AbsentWeight(weight) if is_plain else weight.tensor


def local_of(tensor: Any) -> Tensor:
    """Return the plain tensor that this rank holds, or would hold, on meta."""
    with torch.no_grad():
        return dtensor.to_local(tensor).detach()


def part_of(full: Tensor, tensor: Any) -> Tensor:
    """Return this rank's part of ``full``, sharded as ``tensor`` is: a view, if it is one."""
    if not dtensor.is_dtensor(tensor):
        return full
    for dim in range(full.dim()):
        taken = dtensor.range_in_dim(tensor, dim)
        if taken is None:
            full = full.index_select(dim, dtensor.indices_in_dim(tensor, dim).to(full.device))
        else:
            start, size = taken
            full = full.narrow(dim, start if size else 0, size)
    return full


@dataclass(eq=False)
class Weight:
    """One parameter or buffer, with all modules and names that share it.

    Attributes:
        names: Its names in the model, the first one first.
        places: ``(module, name in it)``.
        steps: The step of the innermost target around each place; None outside of targets.
        present: What was put at each place; weak, since it may be in memory that is used again.
    """

    tensor: Tensor
    is_parameter: bool
    names: list[str] = field(default_factory=list)
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    steps: set[int | None] = field(default_factory=set)
    present: list[weakref.ref[Tensor]] = field(default_factory=list)

    def put(self, tensor: Tensor) -> None:
        """Replace it by this tensor in the modules. What a forward has put there itself stays, as
        do the attributes that it has set with it, which say how long a table is, say.
        """
        with deferred():  # else what was put would be taken for a forward's
            for i, (module, name) in enumerate(self.places):
                table: dict[str, Any] = module._parameters if self.is_parameter else module._buffers
                if table.get(name) is self.present[i]():
                    table[name], self.present[i] = tensor, weakref.ref(tensor)


@dataclass
class Inventory:
    """The weights of a model by step.

    Attributes:
        sources: The name of each weight in the source; those of the model's own are not there.
        resident: Weights of no target or of several, and those that hooks need.
        steps: The targets' own; those of a target inside a target are the inner one's.
        rebuilt: Buffers on meta that the source does not have.
    """

    sources: dict[Weight, str] = field(default_factory=dict)
    resident: list[Weight] = field(default_factory=list)
    steps: dict[int, list[Weight]] = field(default_factory=dict)
    rebuilt: list[Weight] = field(default_factory=list)

    @property
    def loaded(self) -> list[Weight]:
        """All but the rebuilt ones."""
        return [*self.resident, *(weight for step in self.steps.values() for weight in step)]


def take_inventory(
    model: nn.Module,
    targets: list[Target],
    find: Callable[[list[str]], str | None],
    needed: Iterable[str],
) -> Inventory:
    """Return the model's inventory.

    Args:
        find: From a weight's names to its name in the source; None: the source does not have it.
        needed: Names of parameters that must stay.
    """
    weights: dict[int, Weight] = {}
    step_of = {target.module: target.step for target in targets}
    _collect(weights, model, "", None, step_of)
    inventory, stay = Inventory(), set(needed)
    for weight in weights.values():
        source = find(weight.names)
        step = next(iter(weight.steps)) if len(weight.steps) == 1 else None
        if source is not None:
            inventory.sources[weight] = source
        if source is None and weight.tensor.is_meta and not weight.is_parameter:
            inventory.rebuilt.append(weight)
        elif step is None or not stay.isdisjoint(weight.names):
            inventory.resident.append(weight)
        else:
            inventory.steps.setdefault(step, []).append(weight)
    return inventory


def _collect(
    weights: dict[int, Weight],
    module: nn.Module,
    prefix: str,
    step: int | None,
    step_of: dict[nn.Module, int],
) -> None:
    """Collect every parameter and buffer by identity, under every name that it has."""
    step = step_of.get(module, step)
    for table, is_parameter in ((module._parameters, True), (module._buffers, False)):
        for leaf, tensor in table.items():
            if isinstance(tensor, Tensor):
                weight = weights.setdefault(id(tensor), Weight(tensor, is_parameter))
                weight.names.append(prefix + leaf)
                weight.places.append((module, leaf))
                weight.present.append(weakref.ref(tensor))
                weight.steps.add(step)
    for name, child in module._modules.items():
        if child is not None:
            _collect(weights, child, f"{prefix}{name}.", step, step_of)

"""Describes the memory of tensors, and how tensors that share a storage overlap."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from flex_model.integrations import dtensor
from flex_model.integrations.torch_private import unset_fake_temporarily

Geometry = tuple[Any, ...]  # offset, shape, strides, dtype
Reference = Callable[[], "Tensor | None"]

_MAX_BLANK = 1 << 22  # maximal number of elements of an unwritten tensor that are tracked


def reference_to(tensor: Tensor) -> Reference:
    """Return a weak reference to a tensor, and a strong one to a parameter: while a DTensor has
    weak ones, ``Module.to`` can't cast or move it (``torch.utils.swap_tensors``).
    """
    return (lambda: tensor) if isinstance(tensor, nn.Parameter) else weakref.ref(tensor)


def plain(tensor: Any) -> Tensor:
    """Return the plain tensor inside a DTensor or an AsyncCollectiveTensor."""
    if type(tensor) is Tensor:
        return tensor
    if dtensor.is_dtensor(tensor):
        tensor = tensor._local_tensor
    return getattr(tensor, "elem", tensor)


def storage_of(tensor: Tensor) -> Any:
    """Return the storage; None for tensors that are not plain memory: sparse, nested and wrapper
    ones.
    """
    if tensor.layout != torch.strided or tensor.is_nested:
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape; for a nested tensor, which has several, only the number of its dims is
    kept.
    """
    return (-1,) * tensor.dim() if tensor.is_nested else tuple(tensor.shape)


def geometry(tensor: Tensor) -> Geometry:
    """Return the tensor's position in its storage."""
    return tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def place(tensor: Tensor) -> tuple[Any, Geometry]:
    """Return the storage, and the tensor's place in it; None for one that is not plain memory."""
    local = plain(tensor)
    storage = storage_of(local)
    return (None, ()) if storage is None else (storage, geometry(local))


def elements_of(tensor: Tensor) -> Geometry:
    """Return the tensor's position without strides of dims of size 1: that of its elements."""
    offset, shape, strides, dtype = geometry(plain(tensor))
    return offset, shape, tuple(s for n, s in zip(shape, strides) if n != 1), dtype


def overlap(first: Geometry, second: Geometry) -> bool:
    """Whether they may share memory: their extents overlap, and they are not disjoint boxes of one
    tensor, such as ``x[:, :1]`` and ``x[:, 1:]``.
    """
    (start, stop), (other_start, other_stop) = _extent(first), _extent(second)
    return start < other_stop and other_start < stop and not _side_by_side(first, second)


def _side_by_side(first: Geometry, second: Geometry) -> bool:
    """Whether two boxes of one row-major tensor have no index in common along some dim of it."""
    if first[3] != second[3]:
        return False
    sizes = [_sizes_by_stride(place) for place in (first, second)]
    strides = sorted({*sizes[0], *sizes[1]}, reverse=True)
    if any(
        len(of) != sum(size != 1 for size in place[1]) for of, place in zip(sizes, (first, second))
    ):
        return False  # two dims have one stride, or a stride is 0
    boxes = []
    for (offset, *_), of in zip((first, second), sizes):
        box = []
        for stride in strides:
            at, offset = divmod(offset, stride)
            box.append((at, at + of.get(stride, 1)))
        inner = offset
        for (_, end), stride in zip(reversed(box), reversed(strides)):
            if inner >= stride:
                return False  # another index is at the same memory
            inner += (end - 1) * stride
        boxes.append((box, offset))
    (box, rest), (other, other_rest) = boxes
    return rest != other_rest or any(
        stop <= other_start or other_stop <= start
        for (start, stop), (other_start, other_stop) in zip(box, other)
    )


def _sizes_by_stride(place: Geometry) -> dict[int, int]:
    return {stride: size for size, stride in zip(place[1], place[2]) if size != 1 and stride}


def _extent(place: Geometry) -> tuple[int, int]:
    offset, shape, strides, dtype = place
    if 0 in shape:
        return offset * dtype.itemsize, offset * dtype.itemsize
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides))
    return offset * dtype.itemsize, (last + 1) * dtype.itemsize


def same_dims(written: Geometry, other: Geometry) -> tuple[int | None, ...]:
    """Return, for each dim of ``written``, the dim of ``other`` with the same stride and size; None
    if there is none or are several, or the dtypes differ.
    """
    if written[3] != other[3]:
        return (None,) * len(written[1])
    dims: list[int | None] = []
    for size, stride in zip(written[1], written[2]):
        found = [
            dim
            for dim in range(len(other[1]))
            if other[2][dim] == stride and other[1][dim] == size and size > 1
        ]
        dims.append(found[0] if len(found) == 1 else None)
    return tuple(dims)


@dataclass(frozen=True)
class Blank:
    """Flags of a storage's elements: whether nothing was written to each; and the elements'
    dtype.
    """

    flags: Tensor
    dtype: torch.dtype

    def has(self, place: Geometry) -> bool:
        """Whether nothing was written to any of these elements."""
        offset, shape, strides, dtype = place
        if dtype != self.dtype:
            return False
        with unset_fake_temporarily():
            return bool(self.flags.as_strided(shape, strides, offset).all())

    def write(self, place: Geometry) -> bool:
        """Note a write to these elements; return whether all elements are written now, which is not
        known for a view in another dtype.
        """
        offset, shape, strides, dtype = place
        if dtype != self.dtype:
            return False
        with unset_fake_temporarily():
            if 0 not in shape:
                self.flags.as_strided(shape, strides, offset).fill_(False)
            return not bool(self.flags.any())


def all_blank(tensor: Tensor) -> Blank | None:
    """Return flags for a storage without writes; None for a very large one, which stays unknown."""
    count = tensor.untyped_storage().nbytes() // max(1, tensor.dtype.itemsize)
    if count > _MAX_BLANK:
        return None
    with unset_fake_temporarily():  # flags have values even in a dry run
        flags = torch.zeros(count, dtype=torch.bool, device="cpu")
        flags.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(True)
    return Blank(flags, tensor.dtype)


def version_of(tensor: Tensor) -> int:
    """Return a number that changes with each write; -1 for inference tensors, which have none."""
    return -1 if tensor.is_inference() else tensor._version


# They change their tensor's shape, not its memory.
_VIEWS_IN_PLACE = {
    f"aten::{name}_" for name in ("squeeze", "swapaxes", "swapdims", "t", "transpose", "unsqueeze")
}


_BATCH_NORMS = {
    f"aten::{name}"
    for name in ("batch_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
}


def statistics_written_by(name: str, args: Sequence[Any]) -> list[Tensor]:
    """Return the running statistics that a batch norm writes in training, which its schema
    omits.
    """
    if name not in _BATCH_NORMS or len(args) < 8 or not args[5]:
        return []
    return [one for one in args[3:5] if isinstance(one, Tensor)]


def bytes_of(constant: Tensor) -> bytes | None:
    """Return the memory of a tensor, and of a non-contiguous one all of its storage; None for what
    is not plain memory. It is read without torch's operations, which modes may run on shapes alone.
    """
    is_plain = type(constant) is Tensor and storage_of(constant) is not None
    if not is_plain or constant.is_meta:
        return None
    host = constant if constant.device.type == "cpu" else constant.cpu()
    if host.is_contiguous():
        return ctypes.string_at(host.data_ptr(), host.numel() * host.element_size())
    storage = host.untyped_storage()
    return ctypes.string_at(storage.data_ptr(), storage.nbytes())


_SENDS = {"c10d::send", "c10d::barrier", "c10d::monitored_barrier_"}


def written_by(schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation of this schema writes to."""
    found: list[Tensor] = []
    if schema is not None and schema.name.startswith("c10d::"):  # their schemas omit it
        is_written = schema.name not in _SENDS and bool(args)
        return [one for one in tree_iter(args[0] if is_written else ()) if isinstance(one, Tensor)]
    if schema is None or not schema.is_mutable or schema.name in _VIEWS_IN_PLACE:
        return found
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_iter(value) if isinstance(leaf, Tensor)]
    return found

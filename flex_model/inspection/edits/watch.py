"""What an editing function does with tensors without values: which values its result depends on,
what it writes and where, what it asks that shapes don't tell.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from flex_model.inspection.edits.findings import ERROR, NOT_CHECKED, WARNING, Place, Reports
from flex_model.inspection.edits.lines import refuse_collective
from flex_model.inspection.shapes_only import dtensor_class
from flex_model.layouts.memory_map import written_by

# What asks a tensor for values. (`item`, `bool` and their like ask by an operation.)
_NEEDS_VALUES = {
    getattr(torch.Tensor, name)
    for name in ("tolist", "numpy", "__array__", "data_ptr", "__dlpack__")
}
_AS_NUMPY = (torch.Tensor.numpy, torch.Tensor.__array__)
_VALUE_ERRORS = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
)
_VALUE_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_UNSUPPORTED = (
    fake_tensor.UnsupportedOperatorException,
    fake_tensor.UnsupportedFakeTensorException,
)
# Operations whose result depends on their argument's shape alone.
_OF_SHAPES = {
    name
    for what in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
    for name in (f"{what}_like", f"new_{what}")
} | {"new_empty_strided"}
# What answers from values, and is asked for real where all of these are there.
_ASKS = {"item", "equal", "allclose", "nonzero", "argwhere", "unique", "is_nonzero"}
_ASKS |= {"__bool__", "__int__", "__float__", "__index__", "__complex__", "__format__"}
# What may be asked of a shard of a weight.
_ABOUT = {"size", "dim", "ndimension", "numel", "stride", "is_floating_point", "element_size"}
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
# Properties that give a tensor, not what is about it.
_VIEWS = [getattr(torch.Tensor, name) for name in ("data", "T", "H", "mT", "mH", "real", "imag")]


@dataclass
class StandIns:
    """What all functions of a dry run share.

    Attributes:
        fakes: By the id of a real tensor: itself, and the fake one in its place.
        changed: By storage: tensors that were written to.
    """

    fakes: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    changed: dict[int, Tensor] = field(default_factory=dict)

    def leaves(self) -> list[Tensor]:
        """The fake ones that gradients are for."""
        fakes = [fake for _, fake in self.fakes.values()]
        return [fake for fake in fakes if fake.requires_grad and fake.is_leaf]


class Watch(TorchDispatchMode):
    """Inside, what runs on fake tensors is followed, and reported where it is the user's code.

    Args:
        split: Parameters that this rank has shards of, by their id: name, and whether only FSDP
            splits them.

    Attributes:
        last_write: Where something was last written to.
        unseen_write: Where a given tensor was written to, so that its version did not change.
    """

    def __init__(
        self,
        fake_mode: FakeTensorMode,
        reports: Reports,
        split: Mapping[int, tuple[str, bool]],
        stand_ins: StandIns,
    ) -> None:
        super().__init__()
        self.last_write: Place | None = None
        self.unseen_write: Place | None = None
        self._reports, self._fake_mode, self._split = reports, fake_mode, split
        self._fakes, self._changed = stand_ins.fakes, stand_ins.changed
        self._dependent: dict[int, Tensor] = {}  # by storage: what has the given tensor's values
        self._written: set[int] = set()  # storages, in one call of torch
        self._fulls: Sequence[Tensor] = ()
        self._made: list[weakref.ref[Tensor]] = []
        self._calls = _Calls(self)

    def __enter__(self) -> Watch:
        super().__enter__()
        self._calls.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._calls.__exit__(*exc_info)
        super().__exit__(*exc_info)

    def follow(self, fulls: Sequence[Tensor]) -> None:
        """The tensors that the editing function is given."""
        self._fulls = fulls
        self._dependent.update((_storage(full), full) for full in fulls)

    def depends(self, tensor: Tensor) -> bool:
        """Whether its values are made of those of a given tensor."""
        return _storage(tensor) in self._dependent

    def forget(self) -> list[weakref.ref[Tensor]]:
        """Let all tensors go; those without values that were made."""
        self._dependent.clear()
        self._fulls = ()
        return self._made

    # Calls of torch by name, before autograd.

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for tensor in tensors:
            if id(tensor) in self._split and not _is_about(func):
                self._refuse_shard(*self._split[id(tensor)])
        has_values = not any(map(self._is_without_values, tensors))
        if func in _NEEDS_VALUES and not has_values:
            self._refuse_values(func, args[0])
        if func is torch.Tensor.__format__ and not has_values:
            return f"<{args[0].dtype} of {tuple(args[0].shape)}, without values>"
        is_asked = func in _NEEDS_VALUES or getattr(func, "__name__", "") in _ASKS
        if _is_about(func) or (is_asked and has_values):
            return func(*args, **kwargs)
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            args = (args[0], self._masks_as_numbers(args[1]), *args[2:])
        # In place of real tensors, before autograd sees them: whatever is written to them, and
        # whatever gradients come, they stay as they were.
        args, kwargs = tree_map_only(Tensor, self._faked, (args, kwargs))
        before = [(full, full._version, full.grad_fn) for full in self._fulls]
        self._written.clear()
        result = func(*args, **kwargs)
        for full, version, node in before:
            if func == _SET_DATA and args[0] is full:
                self.unseen_write = self._reports.source.here()
                self._dependent[_storage(full)] = full
            elif _storage(full) in self._written:
                self._note_write(full, version, node)
        return result

    def _note_write(self, full: Tensor, version: int, node: Any) -> None:
        if full._version == version:
            self.unseen_write = self._reports.source.here()
        elif full.requires_grad and full.grad_fn is node:
            self._reports.add(
                WARNING,
                "graph cut",
                "written in place where autograd does not see it (under no_grad, or through "
                "detach()): the values change, and gradients go on as if they had not; write to "
                "the tensor itself, or return a new one",
            )

    def _is_without_values(self, tensor: Tensor) -> bool:
        """Or a real one, to whose stand-in something was written."""
        if isinstance(tensor, FakeTensor):
            return True
        known = self._fakes.get(id(tensor))
        return known is not None and _storage(known[1]) in self._changed

    def _masks_as_numbers(self, index: Any) -> Any:
        """Masks whose values are there, which without them would give results of any size."""
        found: list[Any] = []
        for item in index if isinstance(index, tuple) else (index,):
            is_mask = type(item) is Tensor and item.dtype == torch.bool and item.dim() > 0
            if not is_mask or self._is_without_values(item):
                found.append(item)
                continue
            with fake_tensor.unset_fake_temporarily():
                found += item.nonzero(as_tuple=True)
        return tuple(found)

    def _faked(self, tensor: Tensor) -> Tensor:
        if type(tensor) not in (Tensor, torch.nn.Parameter) or _is_of_functorch(tensor):
            return tensor
        known = self._fakes.get(id(tensor))
        if known is None:
            fake = self._fake_mode.from_tensor(tensor)
            known = self._fakes[id(tensor)] = (tensor, fake)
        return known[1]

    def _refuse_shard(self, name: str, is_fsdp: bool) -> None:
        what = "is a shard of FSDP's whenever its module does not run" if is_fsdp else "is a shard"
        self._reports.stop(
            WARNING if is_fsdp else ERROR,
            "sharded weight",
            f"parameter {name!r} {what}, not the full weight; name it in "
            f"HookFunction(parameters=[{name!r}]), and take it from hook_function.parameters"
            + ("; what follows is not checked" if is_fsdp else ""),
        )

    def _refuse_values(self, func: Any, tensor: Tensor) -> None:
        is_numpy = func in _AS_NUMPY
        if is_numpy and tensor.requires_grad:
            self._reports.stop(
                ERROR,
                "raises",
                "RuntimeError: Can't call numpy() on Tensor that requires grad. Use "
                "tensor.detach().numpy() instead.",
            )
        wants_gradient = any(full.requires_grad for full in self._fulls)
        if is_numpy and wants_gradient and self.depends(tensor):
            self._reports.stop(
                WARNING,
                "graph cut",
                "numpy() leaves the graph: no gradient flows back through what is made of it, and "
                "writes through it are not seen; compute with torch. What follows is not checked",
            )
        also = "; writes through it would not be seen" if is_numpy else ""
        self._needs_values(f"{func.__name__}()", also)

    def _needs_values(self, what: str, also: str = "") -> None:
        self._reports.stop(
            NOT_CHECKED,
            "depends on values",
            f"{what} asks for values, and there are shapes only: from here on it is not "
            f"checked{also}",
        )

    # Operations, below autograd.

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            refuse_collective(self._reports, str(func))
        if any(issubclass(kind, dtensor_class()) for kind in types):
            return NotImplemented  # its own operations come here again, on plain tensors
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if _VALUE_TAGS & set(func.tags) and not any(map(self._is_without_values, read)):
            with fake_tensor.unset_fake_temporarily():
                return func(*args, **kwargs)
        try:
            result = func(*args, **kwargs)
        except _VALUE_ERRORS:
            name = func.overloadpacket.__name__.strip("_")
            self._needs_values("item(), bool() or float()" if "scalar" in name else f"{name}()")
        except _UNSUPPORTED as error:
            self._reports.stop(
                NOT_CHECKED,
                "no fake kernel",
                f"{func} has no version for shapes alone ({str(error)[:200]}): from here on it is "
                "not checked",
            )
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        written = written_by(func._schema, args, kwargs)
        if func.overloadpacket.__name__ not in _OF_SHAPES and any(map(self.depends, read)):
            self._dependent.update((_storage(tensor), tensor) for tensor in (*made, *written))
        if written:
            self._written.update(map(_storage, written))
            self._changed.update((_storage(tensor), tensor) for tensor in written)
            self.last_write = self._reports.source.here()
        self._made += [weakref.ref(tensor) for tensor in made if isinstance(tensor, FakeTensor)]
        return result


class _Calls(TorchFunctionMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return self._watch.call(func, args, kwargs or {})


def _is_of_functorch(tensor: Tensor) -> bool:
    """Whether it is what ``torch.func`` makes of another one."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _is_about(func: Any) -> bool:
    """Whether it tells of a tensor's kind, not of its values."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func, "__self__", None) not in _VIEWS
    return name in _ABOUT


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse, for one
        return id(tensor)

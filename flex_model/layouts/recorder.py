"""Records the operations of a forward: what tensors each read, wrote and made, and which of them
carry gradients.

Nothing is concluded here; `proofs` does that from the logs of all ranks. A tensor is known by its
object, and beside that by its storage and its place in it, since autograd makes new objects for
views; where several values share one place (a transpose of a tensor with one row), the object
tells which is meant, and without it all are named.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce, wraps
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from flex_model.integrations import dtensor
from flex_model.layouts import composites, memory_map
from flex_model.layouts.backward_nodes import BackwardNodes, Unsettled, hands_on
from flex_model.layouts.log import Log, Value, hash_of
from flex_model.layouts.propagation import rules
from flex_model.layouts.sizes import (
    CallSizes,
    Expression,
    Size,
    encoded,
    expression_of,
    is_asked_by_model,
    is_asked_by_torch,
    is_of_a_plan,
    is_run_by_model,
    leaves,
    meaning,
    on_comparison,
    on_conversion,
    operand_of,
    plain,
    tagged,
)

Geometry = tuple[Any, ...]
Placements = tuple[Any, Any] | None  # encoded, along dp and tp
Sizes = tuple[int | None, ...] | None

COLLECTIVES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional"}
_VIEWS = {"aten::view", "aten::reshape", "aten::_unsafe_view", "aten::unflatten"}
_NOT_KNOWN = 0  # no value: a size of it has no known counterpart in the unsharded program
_COPIES = {"aten::_to_copy", "aten::clone", "aten::to"}
_SAME_MEMORY = {"aten::detach", "aten::alias", "aten::detach_"}


def backward_task() -> int:
    """Autograd's number of the backward that goes on in this thread; -1 for none."""
    return torch._C._current_graph_task_id()


def _own(method: Callable[..., Any]) -> Callable[..., Any]:
    """What it asks of tensors the model has not asked: sizes are plain numbers in it."""

    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return method(*args, **kwargs)

    return run


entered: list[Recorder] = []  # that record now, of all FlexModels

# A tensor object: itself, its storage, its place in that, and the value that it had.
_Known = tuple["weakref.ref[Tensor]", int, Geometry, Value]


@dataclass
class _Storage:
    """What is known of one storage: its values by their place, and what of it is not written yet.

    Attributes:
        blank: For ``torch.empty``: which of its elements nothing has been written to.
    """

    reference: StorageWeakRef
    values: dict[Geometry, list[Value]] = field(default_factory=dict)
    blank: memory_map.Blank | None = None


class Recorder(TorchDispatchMode):
    """Records while it is entered, but for what runs inside ``paused``. Local; no collective.

    Args:
        log: Where the entries go.
        source: Of a tensor that no recorded operation made: its name, placements and the full sizes
            that its layer states, if it is a weight or buffer of the model; else None.
        kept: Name and placements of one that was kept from an earlier forward.
        owner: What records by it.
        axes_of: The axes that a collective's group runs along; None if it is none of ours.
        stated: The encoded placements that a DTensor states; None for other tensors.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        owner: Any,
        log: Log,
        source: Callable[[Tensor], tuple[str, Placements, Sizes] | None],
        kept: Callable[[Tensor], tuple[str, Placements] | None],
        axes_of: Callable[[Any, Any], tuple[str, ...] | None],
        stated: Callable[[Tensor], Placements],
    ) -> None:
        super().__init__()
        self.owner, self.log = weakref.ref(owner), log
        self._source, self._kept = source, kept
        self._axes_of, self.stated = axes_of, stated
        self._functions = _FunctionRecorder(self)
        self.pauses = 0
        self._tasks: list[int] = []  # of autograd's, in which it was entered
        self._storages: dict[int, _Storage] = {}
        self._objects: dict[int, _Known] = {}
        self._weights: dict[int, _Known] = {}
        self._by_name: dict[str, Value] = {}  # likewise
        self._replaced: dict[Value, Value] = {}
        self._received: set[Value] = set()  # what collectives wrote
        self._nodes = BackwardNodes(self)
        self._unsettled = Unsettled(log)
        self._carriers: list[Any] = []  # of the operation whose arguments are encoded
        self.comparisons: list[tuple[str, Any, Any]] = []  # of sizes, as they are on this rank
        self.sizes = CallSizes()
        self.reduction = ""  # of the call of torch.distributed that runs
        self.stated_sizes: frozenset[int] = frozenset()  # by the module that runs
        self.has_module_hooks = False  # of the model's own, on gradients of its modules

    def __enter__(self) -> Recorder:
        """Begin to record; nothing if it does already, as in a backward inside of another."""
        self._tasks.append(backward_task())
        if len(self._tasks) == 1:
            super().__enter__()
            self._functions.__enter__()
            entered.append(self)
            on_conversion.append(self._note_conversion)
            on_comparison.append(self._note_comparison)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._tasks.pop()
        if not self._tasks:
            entered.remove(self)
            on_conversion.remove(self._note_conversion)
            on_comparison.remove(self._note_comparison)
            self._functions.__exit__(*exc_info)
            super().__exit__(*exc_info)

    @contextmanager
    def _in_operation(self) -> Iterator[None]:
        """The steps of an operation are seen as well: torch runs it with the mode switched off.
        Without the mode for functions, to which torch would hand the operation once more.
        """
        super().__enter__()
        try:
            with torch._C.DisableTorchFunction():
                yield
        finally:
            super().__exit__(None, None, None)

    @property
    def is_paused(self) -> bool:
        """So it is in a backward that begins inside: its nodes are followed one by one."""
        return self.pauses > 0 or (bool(self._tasks) and backward_task() != self._tasks[-1])

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside is no part of the model."""
        self.pauses += 1
        try:
            yield
        finally:
            self.pauses -= 1

    def _note_conversion(self, number: Any, expression: Expression, name: str) -> None:
        if not self.is_paused:
            self.log.add("number", number, expression, name)

    def _note_comparison(self, by: str, own: Any, other: Any, answer: bool) -> None:
        if self.is_paused:
            return
        expressions = operand_of(own), operand_of(other)
        self.log.add("compared", by, *expressions, answer, is_asked_by_torch())
        if not any(leaf[0] == "read" for leaf in leaves(expressions[0]) | leaves(expressions[1])):
            self.comparisons.append((by, plain(own), plain(other)))

    # Tensors and their values.

    @_own
    def value(self, tensor: Tensor) -> Value | tuple[Value, ...] | None:
        """The value that the tensor has now; several where its object is not known and its place is
        that of several. A source's entry is made for one that was not met before. None for tensors
        that are no plain memory.
        """
        with self.paused():  # what DTensors are asked for is computed by torch
            value = self._value(tensor)
            if tensor.requires_grad and value is not None:
                return self._nodes.meet(tensor, value)
            return value

    def _value(self, tensor: Tensor) -> Value | tuple[Value, ...] | None:
        plain = memory_map.plain(tensor)
        storage = memory_map.storage_of(plain)
        if storage is None:
            return None
        key, geometry = storage._cdata, memory_map.geometry(plain)
        # Weights first: FSDP fills their memory by operations that nothing can be concluded from.
        for table in (self._weights, self._objects):
            for one in (tensor, plain):  # a DTensor may be known by its local tensor
                known = table.get(id(one))
                if known is not None and known[0]() is one and known[1:3] == (key, geometry):
                    return self.latest(known[3])
            if table is self._weights and (found := self._source(tensor)) is not None:
                value = self._by_name[found[0]] = self.add_source(tensor, *found)
                self._weights[id(tensor)] = (weakref.ref(tensor), key, geometry, value)
                return value
        entry = self._storages.get(key)
        values = entry.values.get(geometry, []) if entry is not None else []
        if values:
            return values[0] if len(values) == 1 else tuple(values)
        stated = self.stated(tensor)
        if stated is not None:
            return self.place(tensor, stated)
        kept = self._kept(tensor)
        return None if kept is None else self.add_source(tensor, *kept)

    def one_value(self, tensor: Tensor) -> Value:
        """Its value; that of no tensor if it may have several, or none."""
        value = self.value(tensor)
        return value if isinstance(value, int) else _NOT_KNOWN

    def weight(self, tensor: Tensor, name: str) -> Value | None:
        """The value of a weight that was met: as this object, or in a form that a framework makes
        of it for the forward.
        """
        known = self._weights.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[3]
        return self._by_name.get(name)

    def is_received(self, value: Any) -> bool:
        """Whether a collective has made it."""
        return value in self._received

    def latest(self, value: Value) -> Value:
        while value in self._replaced:
            value = self._replaced[value]
        return value

    @_own
    def add_source(
        self, tensor: Tensor, name: str, placements: Placements, sizes: Sizes = None
    ) -> Value:
        """A weight, buffer or input, with what is known of it."""
        value = self.log.source(name, placements, tuple(memory_map.plain(tensor).shape), sizes)
        value = self.latest(value)
        self._nodes.linked.add(value)
        self.note(tensor, value)
        for hook in (tensor._backward_hooks or {}).values():  # put on before the forward
            if not hands_on(hook):
                self._note_hook(value)
        return value

    @_own
    def place(
        self, tensor: Tensor, placements: Placements, original: Tensor | None = None
    ) -> Value:
        """What a hook put into the model in the place of ``original``, or a DTensor that nobody saw
        being made.
        """
        before = None if original is None else self.value(original)
        value = self.log.new_value()
        self.log.add("placed", value, placements, tuple(memory_map.plain(tensor).shape), before)
        self._link(value)
        self.note(tensor, value)
        return value

    def _link(self, value: Value) -> None:
        """The gradient of a value that was made here is handed on by what made it: not so in the
        forward of an ``autograd.Function``, where no gradients are.
        """
        if torch.is_grad_enabled():
            self._nodes.linked.add(value)

    @_own
    def state(self, tensor: Tensor, placements: Placements, text: str, sizes: Any) -> None:
        """The user states how a tensor is placed, along the axes that are not None.

        Args:
            text: The statement, for messages.
            sizes: Of the full tensor, with None for those that are not stated; None for nothing.
        """
        before, value = self.value(tensor), self.log.new_value()
        plain = memory_map.plain(tensor)
        self.log.add("stated", value, before, placements, tuple(plain.shape), text, sizes)
        self._link(value)
        storage = memory_map.storage_of(plain)
        if storage is not None and isinstance(before, int):
            self._replaced[before] = value
            values = self._entry(storage).values.setdefault(memory_map.geometry(plain), [])
            values[:] = [value if old == before else old for old in values]
        self.note(tensor, value)

    @_own
    def know_object(self, tensor: Tensor) -> None:
        """A call has returned this object: of several values at its place it has the newest."""
        plain = memory_map.plain(tensor)
        storage = memory_map.storage_of(plain)
        entry = None if storage is None else self._storages.get(storage._cdata)
        if entry is None or storage is None:
            return
        geometry = memory_map.geometry(plain)
        known = self._objects.get(id(tensor))
        is_known = (
            known is not None and known[0]() is tensor and known[1:3] == (storage._cdata, geometry)
        )
        values = entry.values.get(geometry)
        if values and not is_known:
            self._remember(tensor, storage._cdata, geometry, values[-1])

    def meet(self, result: Any) -> None:
        """A call has returned tensors with these nodes."""
        for leaf in tree_iter(result):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                self.value(leaf)

    @_own
    def note(self, tensor: Tensor, value: Value) -> None:
        """The tensor has this value from now on, and so has its object."""
        plain = memory_map.plain(tensor)
        storage = memory_map.storage_of(plain)
        if storage is None:
            return
        geometry = memory_map.geometry(plain)
        values = self._entry(storage).values.setdefault(geometry, [])
        if value not in values:
            values.append(value)
        self._remember(tensor, storage._cdata, geometry, value)

    def living(self) -> Iterator[tuple[Tensor, Value]]:
        """The tensors that are still there, with the values that they have, without weights."""
        for reference, _, _, _ in list(self._objects.values()):
            tensor = reference()
            if tensor is None or self._weights.get(id(tensor)) is not None:
                continue
            value = self.value(tensor)
            if isinstance(value, int):
                yield tensor, value

    def _remember(self, tensor: Tensor, key: int, geometry: Geometry, value: Value) -> None:
        self._objects[id(tensor)] = (weakref.ref(tensor), key, geometry, value)

    def _entry(self, storage: Any) -> _Storage:
        entry = self._storages.get(storage._cdata)
        if entry is None:
            entry = self._storages[storage._cdata] = _Storage(StorageWeakRef(storage))
            if len(self._storages) % 4096 == 0:
                self._sweep()
        return entry

    def _sweep(self) -> None:
        gone = [key for key, entry in self._storages.items() if entry.reference.expired()]
        for key in gone:
            del self._storages[key]
        self._objects = {k: known for k, known in self._objects.items() if known[0]() is not None}

    @_own
    def lose(self, tensor: Tensor) -> None:
        """Its memory may be written to unseen from now on."""
        storage = memory_map.storage_of(memory_map.plain(tensor))
        entry = None if storage is None else self._storages.get(storage._cdata)
        if entry is None:
            return
        lost = []
        for values in entry.values.values():
            for i, value in enumerate(values):
                lost.append(value)
                values[i] = self._replaced[value] = hash_of("lost", value)
                self._link(values[i])
        self.log.add("lost", tuple(lost))

    # Operations.

    @_own
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        self.settle()
        if not isinstance(
            func, torch._ops.OpOverload
        ):  # flex_attention and other higher-order ones
            result = func(*args, **kwargs)
            self.record(f"higher_order::{func}", args, kwargs, result, None)
            return result
        if func.namespace in ("profiler", "prim"):
            return func(*args, **kwargs)
        if func.namespace not in COLLECTIVES and self._is_composite(func, args, kwargs):
            with self._in_operation():
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        schema = func._schema
        if func.namespace in COLLECTIVES:
            return self._collective(func, args, kwargs)
        encoded = self._encode(schema, args, kwargs)
        result = func(*args, **kwargs)
        if schema.name in _SAME_MEMORY and self._is_same(args, result):
            return result
        self._add_operation(
            schema.name, schema.overload_name, encoded, args, kwargs, result, schema
        )
        self._note_statistics(schema.name, encoded, args)
        if schema.name == "aten::embedding" and dtensor.is_dtensor(result):
            self._note_masks(args[1], result)
        return result

    def _note_masks(self, ids: Tensor, result: Any) -> None:
        """A mask that was made of the ids, where nobody saw it."""
        ge = torch.ops.aten.ge.Scalar._schema
        for mask in dtensor.masks_of(result):
            encoded = self._encode(ge, (ids, 0), {})
            self._add_operation(ge.name, ge.overload_name, encoded, (), {}, mask, None)

    @staticmethod
    def _is_composite(func: Any, args: Any, kwargs: Any) -> bool:
        """Whether it is made of other operations, as it arrives under ``inference_mode``, and has
        no rule of its own.
        """
        if rules.has_rule(func._schema.name.removeprefix("aten::")):
            return False
        if any(dtensor.is_dtensor(leaf) for leaf in tree_iter((args, kwargs))):
            return False
        return torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), "CompositeImplicitAutograd"
        )

    def _is_same(self, args: Any, result: Any) -> bool:
        """Whether the result is the first argument's memory in the same form; its value is then
        that one's.
        """
        source = args[0]
        if dtensor.is_dtensor(source) or not isinstance(result, Tensor):
            return False
        first, second = memory_map.plain(source), memory_map.plain(result)
        if memory_map.geometry(first) != memory_map.geometry(second):
            return False
        storage, other = memory_map.storage_of(first), memory_map.storage_of(second)
        if storage is None or other is None or storage._cdata != other._cdata:
            return False
        value = self.value(source)
        if isinstance(value, int):
            self._remember(result, storage._cdata, memory_map.geometry(second), value)
        return True

    def record(self, name: str, args: Any, kwargs: Any, result: Any, schema: Any) -> None:
        """An operation that has run; one of a schema's form where it has one."""
        encoded = self._encode(schema, args, kwargs)
        self._add_operation(name, "", encoded, args, kwargs, result, schema)

    def _add_operation(
        self,
        name: str,
        overload: str,
        encoded: tuple[Any, Any, tuple[Any, ...]],
        args: Any,
        kwargs: Any,
        result: Any,
        schema: Any,
    ) -> None:
        written = memory_map.written_by(schema, args, kwargs)
        results = [leaf for leaf in tree_iter(result) if leaf is not None]
        tensors = written or [leaf for leaf in results if isinstance(leaf, Tensor)]
        numbers = tuple(
            leaf
            for leaf in results
            if isinstance(leaf, (int, float)) and not isinstance(leaf, bool)
        )
        if not tensors and not numbers:
            return
        is_of_blank = name in _COPIES and isinstance(args[0], Tensor) and self._is_blank(args[0])
        outputs, writes = self._outputs(tensors, bool(written), name, is_of_blank)
        full_name = f"{name}.{overload}" if overload else name
        *arguments, carriers = encoded
        if carriers and name.startswith("aten::"):
            self._nodes.link(outputs, writes)
        self.log.add("op", full_name, *arguments, outputs, numbers, writes, carriers)
        if carriers and schema is not None:
            self._unsettled.note(schema, tensors, [output[0] for output in outputs])

    def settle(self) -> None:
        """The operation before is over: what it has made for its backward alone."""
        self._unsettled.settle()

    def watched(self, tensor: Tensor, hook: Any) -> Any:
        """A hook that the model puts on a tensor's gradient, which may change that unseen, until it
        has run and left it as it was. (Those that torch calls once a gradient was accumulated come
        after what FlexModel's hooks see.)
        """
        value = None if hands_on(hook) else self.value(tensor)
        if value is None:
            return hook
        number = self._note_hook(value)

        @wraps(hook)
        def watching(grad: Tensor) -> Any:
            version = grad._version
            made = hook(grad)
            if (made is None or made is grad) and grad._version == version:
                self.log.add("looked", number)
            else:  # also where it has only looked in a backward before
                self._note_hook(value, number)
            return made

        return watching

    def note_module_hook(self, value: Any) -> None:
        """Torch calls hooks on a module's gradients before it hands this value its gradient."""
        if self.has_module_hooks:
            self._note_hook(value)

    def _note_hook(self, value: Any, number: Value | None = None) -> Value:
        """A hook may change the gradient of a value; its number."""
        number = self.log.new_value() if number is None else number
        self.log.add("hooked", value, "a hook of the model's own on gradients", number)
        return number

    def _note_statistics(self, name: str, encoded: tuple[Any, ...], args: Sequence[Any]) -> None:
        """What a batch norm wrote beside its result, as the operation does that returns it."""
        statistics = memory_map.statistics_written_by(name, args)
        if len(statistics) < 2:
            return
        written, writes = self._outputs(statistics, True, name)
        beside = [  # the result, and the statistics of the batch
            (self.log.new_value(), memory_map.shape_of(one), str(one.dtype), None)
            + (memory_map.shape_of(memory_map.plain(one)),)
            for one in (args[0], *statistics)
        ]
        nothing = ((None, (), False),) * len(beside)
        functional = "aten::_native_batch_norm_legit_functional"
        outputs = (*beside, *written)
        self.log.add("op", functional, encoded[0][:8], (), outputs, (), (*nothing, *writes), ())

    def _outputs(
        self, tensors: Sequence[Tensor], in_place: bool, name: str, is_copy_of_blank: bool = False
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        outputs, writes = [], []
        for tensor in tensors:
            value = self.log.new_value()
            shape, dtype = memory_map.shape_of(tensor), str(tensor.dtype)
            with self.paused():
                stated = self.stated(tensor)
            local = memory_map.shape_of(memory_map.plain(tensor))
            outputs.append((value, shape, dtype, stated, local))
            if in_place:
                writes.append(self._write(tensor, value))
            else:
                self.note(tensor, value)
                if name.startswith(("aten::empty", "aten::new_empty")) or is_copy_of_blank:
                    self._note_blank(tensor)
        return tuple(outputs), tuple(writes)

    def _is_blank(self, tensor: Tensor) -> bool:
        """Whether nothing has been written to any of its elements."""
        plain = memory_map.plain(tensor)
        storage = memory_map.storage_of(plain)
        entry = None if storage is None else self._storages.get(storage._cdata)
        if entry is None or entry.blank is None:
            return False
        return memory_map.is_blank(entry.blank, memory_map.geometry(plain))

    def _note_blank(self, tensor: Tensor) -> None:
        plain = memory_map.plain(tensor)
        storage = memory_map.storage_of(plain)
        if storage is not None:
            self._entry(storage).blank = memory_map.all_blank(plain)

    def _write(self, tensor: Tensor, value: Value) -> tuple[Any, ...]:
        """Values were written to the tensor: what that does to others that show its memory.

        Returns:
            The value written over; for each value that overlaps it: old and new value, and by dim
            of the written tensor the dim that it is there; whether all of the storage is written.
        """
        before = self.value(tensor)
        plain = memory_map.plain(tensor)
        storage = memory_map.storage_of(plain)
        if storage is None or not isinstance(before, int):
            self.lose(tensor)
            self.note(tensor, value)
            return None, (), False
        entry, geometry = self._entry(storage), memory_map.geometry(plain)
        others = []
        for other, values in entry.values.items():
            if not memory_map.overlap(geometry, other):
                continue
            dims = memory_map.same_dims(geometry, other)
            for i, old in enumerate(values):
                if old == before:
                    continue
                values[i] = self._replaced[old] = hash_of("written", old, value)
                others.append((old, values[i], dims))
        values = entry.values.setdefault(geometry, [])
        self._replaced[before] = value
        entry.values[geometry] = [value if old == before else old for old in values] or [value]
        self._remember(tensor, storage._cdata, geometry, value)
        is_complete = False
        if entry.blank is not None:
            is_complete = memory_map.write(entry.blank, geometry)
            if is_complete:
                entry.blank = None
        return before, tuple(others), is_complete

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name
        axes = self._axes_of(args, kwargs)
        encoded = self._encode(func._schema, args, kwargs)
        given = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        result = func(*args, **kwargs)
        written = memory_map.written_by(func._schema, args, kwargs)
        made = written or [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor)]
        if name.endswith(("::wait_tensor", "::_wrap_tensor_autograd")):
            for tensor in made:
                value = self.value(given[0])
                if isinstance(value, int):
                    self.note(tensor, value)
            return result
        outputs, writes = self._outputs(made, bool(written), name)
        self._received.update(output[0] for output in outputs)
        reduction = self._reduction(func._schema, args)
        by_plan = is_of_a_plan()
        self.log.add("collective", name, reduction, axes, *encoded[:2], outputs, writes, by_plan)
        return result

    def _reduction(self, schema: Any, args: Any) -> str:
        """By name; "" where it is not known. c10d's objects don't tell, their callers do."""
        for argument, value in zip(schema.arguments, args):
            if argument.name == "reduce_op":
                return value.lower() if isinstance(value, str) else self.reduction
        return ""

    # Arguments.

    def _encode(self, schema: Any, args: Any, kwargs: Any) -> tuple[Any, Any, tuple[Any, ...]]:
        """The arguments, and of those that are tensors what carries gradients here."""
        carriers: list[Any] = []
        self._carriers = carriers
        arguments = schema.arguments if schema is not None else ()
        is_called = schema is not None and self.sizes.are_of(schema.name)
        by_place = self.sizes.by_place(args) if is_called else None
        passed = None if by_place is None else iter(by_place)
        positional = tuple(
            self._encoded(
                value,
                self._numbers_of(arguments[i], is_called) if i < len(arguments) else "",
                passed,
            )
            for i, value in enumerate(args)
        )
        if schema is not None and self.stated_sizes and schema.name in _VIEWS:
            shape, kept = memory_map.shape_of(args[0]), 0
            if schema.name == "aten::unflatten":
                dim = args[1] if len(args) > 1 else kwargs["dim"]
                kept = len(shape) - 1 if dim in (-1, len(shape) - 1) else len(shape)
            positional = tuple(self._with_stated(value, shape, kept) for value in positional)
        types = {argument.name: argument for argument in arguments}
        keyword = tuple(
            (name, self._encoded(value, self._numbers_of(types[name], is_called)))
            if name in types
            else (name, self._encoded(value))
            for name, value in sorted(kwargs.items())
        )
        is_constant = schema is not None and schema.name == "aten::lift_fresh"
        if self.sizes.has_any and not is_called and not self.sizes.is_subscript:
            # What is called is made of this operation, and of these numbers.
            keyword += (("numbers", ("l", *self.sizes.in_order(all_of_them=is_constant))),)
        elif is_constant:  # ``x[...] = number``
            number = memory_map.number_of(args[0])
            if number is not None:
                known = self.sizes.encoded(number) if self.sizes.has_any else number
                keyword += (("numbers", ("l", known)),)
        elif self.sizes.has_any and is_called:
            keyword += self._defaults(arguments[len(args) :], kwargs)
        if is_constant:
            keyword += (("content", ("s", _content(args[0]))),)
        return positional, keyword, tuple(carriers)

    def _defaults(self, arguments: Any, passed: Any) -> tuple[Any, ...]:
        """Arguments that were left out, since the numbers that were passed are the defaults, which
        may be so on this rank only.
        """
        found = []
        for argument in arguments:
            number = argument.default_value
            is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
            if is_number and argument.name not in passed:
                encoded = self.sizes.encoded(number)
                if isinstance(encoded, tuple):
                    found.append((argument.name, encoded))
        return tuple(found)

    def _with_stated(self, value: Any, shape: tuple[int, ...], num_kept: int) -> Any:
        """The encoded sizes of a view, behind ``num_kept`` dims that stay; where the last two make
        heads of the last dim, ``(..., -1, size)``, ``(..., heads, size)`` or ``(..., heads, -1)``,
        the last one with an expression if the module states it.
        """
        if not isinstance(value, tuple) or value[:1] != ("l",) or len(value) < 3:
            return value
        heads, size = value[-2:]
        if size == -1 and type(heads) is int and heads > 0 and shape[-1] % heads == 0:
            size = shape[-1] // heads
        if type(heads) is not int or type(size) is not int or size not in self.stated_sizes:
            return value
        is_new_dim = num_kept + len(value) - 1 == len(shape) + 1 > 3
        if heads != -1 and not (is_new_dim and heads * size == shape[-1]):
            return value  # other dims are joined, or made
        return (*value[:-1], ("n", size, ("number", size)))

    def _numbers_of(self, argument: Any, is_called: bool) -> str:
        """What a number means that is passed for the argument, as far as the call tells."""
        meant = meaning(argument)
        if meant == "value":
            return meant  # also of other operations inside of the call
        if not self.sizes.name and is_run_by_model():  # by a script
            return "unseen" if meant and argument.name != "step" else ""
        if not is_called:
            return ""
        return {"count": "value", "": "dim"}.get(meant, meant)

    def _encoded(
        self, value: Any, meaning: str = "", passed: Iterator[Expression | None] | None = None
    ) -> Any:
        """As logs have it.

        Args:
            meaning: Of a number, see `sizes.meaning`.
            passed: The expressions of this and the following numbers, where it is known by their
                places which those are.
        """
        if isinstance(value, Tensor):
            known = self.value(value)
            if value.requires_grad and torch.is_grad_enabled():
                self._carriers.append(known)
            return "t", known, memory_map.shape_of(value), str(value.dtype)
        if isinstance(value, bool) or value is None or isinstance(value, str):
            return value
        if isinstance(value, (int, float)):
            if passed is not None:
                expression = next(passed)
                return encoded(value, expression if meaning else None)
            if meaning == "value" or (meaning == "unseen" and value > 0):
                return self.sizes.encoded_value(value)
            return self.sizes.encoded(value) if meaning else encoded(value)
        if isinstance(value, (list, tuple)):
            numbers = None
            if passed is None and meaning == "size":
                numbers = self.sizes.of_list(value)
            if numbers is not None:
                return "l", *numbers
            return "l", *(self._encoded(item, meaning, passed) for item in value)
        if isinstance(value, torch.device):
            return "s", value.type
        if isinstance(value, complex):
            return "c", value.real, value.imag
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return "s", str(value)
        return "s", type(value).__name__


def _content(constant: Tensor) -> str:
    """What stands for the elements of a tensor that was made of Python's numbers."""
    data = memory_map.bytes_of(constant)
    return "" if data is None else blake2b(data, digest_size=8).hexdigest()


def _slices_by_dim(index: Any, ndim: int) -> Iterator[tuple[int, slice]]:
    """The slices of a subscript, with the dims of the tensor that they are of."""
    items = index if isinstance(index, tuple) else (index,)
    widths = [_num_dims(item) for item in items if item is not Ellipsis]
    dim = 0
    for item in items:
        if item is Ellipsis:
            dim += ndim - sum(widths)
            continue
        if isinstance(item, slice) and dim < ndim:
            yield dim, item
        dim += _num_dims(item)


def _num_dims(item: Any) -> int:
    """How many dims of a tensor an item of a subscript is for."""
    if item is None or isinstance(item, bool):
        return 0
    is_mask = isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8)
    return item.dim() if is_mask else 1


_SIZES = {"__get__", "size", "numel", "nelement"}
# And attributes such as ``nbytes``.
_MADE_OF_SIZES = {"stride", "storage_offset", "untyped_storage", "storage"}
_COUNTS_BYTES = {Tensor.nbytes.__get__}  # type: ignore[attr-defined]
_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_NUMBERS = {"item", "__int__", "__float__", "__index__", "__complex__"}
_UNSEEN = {torch.broadcast_tensors}  # whose steps have sizes of tensors that nothing shows
_QUESTIONS = {"__bool__", "is_nonzero", "equal", "allclose", "__contains__"}
_ASKS = {"__len__", *_NUMBERS, *_QUESTIONS, *_MADE_OF_SIZES}
_READS = {"numpy", "__array__", "__dlpack__", "tolist"}
# Calls that take their sizes from another tensor, as those that are given them.
_AS = {
    "view_as": (torch.Tensor.view, "view"),
    "reshape_as": (torch.Tensor.reshape, "reshape"),
    "expand_as": (torch.Tensor.expand, "expand"),
}


class _FunctionRecorder(TorchFunctionMode):
    """What calls of torch's functions show and the operations below them don't: sizes that are read
    from tensors, products of more than two dims before they are flattened, -1 in ``reshape``.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._running: list[Any] = []  # by steps; parts of some ask once more whether they are to

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        recorder = self._recorder
        if recorder.is_paused:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _ASKS and not is_asked_by_model():
            return func(*args, **kwargs)
        if name == "__len__":
            length = func(*args, **kwargs)
            recorder.log.add("number", length, ("dim", recorder.one_value(args[0]), 0), "__int__")
            return length
        if name in _NUMBERS and isinstance(args[0], Tensor):
            return self._read_number(func, args[0], args, kwargs)
        if name in _QUESTIONS:
            answer = func(*args, **kwargs)
            for tensor in filter(lambda one: isinstance(one, Tensor), args):
                recorder.log.add("asked", recorder.one_value(tensor), answer)
            return answer
        if name in _SIZES:
            return self._read(func, args, kwargs)
        if name in _MADE_OF_SIZES:
            recorder.log.add("read", recorder.value(args[0]))
            return func(*args, **kwargs)
        if name in _READS and isinstance(args[0], Tensor):
            recorder.log.add("read", recorder.value(args[0]))
            if name != "tolist":
                recorder.lose(args[0])
            return func(*args, **kwargs)
        if func in _UNSEEN:
            with recorder.paused():
                result = func(*args, **kwargs)
            for made in result:
                recorder.note(made, recorder.log.new_value())  # of which nothing is known
            return result
        if name == "register_hook" and isinstance(args[0], Tensor):
            hook = recorder.watched(args[0], args[1] if len(args) > 1 else kwargs["hook"])
            return func(args[0], hook)
        if name in _AS and len(args) == 2 and isinstance(args[1], Tensor):
            func, name = _AS[name]
            args = args[0], self._read(torch.Tensor.size, args[1:], {})
        if name in ("__getitem__", "__setitem__") and len(args) > 1 and is_run_by_model():
            self._note_whole_slices(args[0], args[1])
        before, recorder.sizes = recorder.sizes, CallSizes(name, args, kwargs)
        recorder.reduction = composites.reduction_of(func, kwargs)
        steps: Any = None
        try:
            bound = composites.bind(func, types, args, kwargs)
            if bound is not None and rules.has_rule(bound.name):
                encoded = recorder._encode(bound.schema, bound.args, bound.kwargs)
                with recorder.paused():
                    result = func(*args, **kwargs)
                schema = bound.schema
                recorder._add_operation(
                    schema.name, schema.overload_name, encoded, (), {}, result, None
                )
                recorder.meet(result)
                return result
            is_part = func in self._running and func not in composites.RUN_NODES
            steps = None if is_part else composites.steps_of(func, types)
            if steps is None:
                result = func(*args, **kwargs)
            else:
                self._running.append(func)
                with self:
                    result = steps(*args, **kwargs)
        finally:
            recorder.sizes, recorder.reduction = before, ""
            if steps is not None:
                self._running.pop()
        if isinstance(result, Tensor):
            recorder.know_object(result)
        elif isinstance(result, (tuple, list)):
            for item in result:
                if isinstance(item, Tensor):
                    recorder.know_object(item)
        recorder.meet(result)
        return result

    def _note_whole_slices(self, tensor: Any, index: Any) -> None:
        """Slices that torch leaves out, since they take all of a dim: whether they do in the
        unsharded program is for its sizes to tell.
        """
        value, shape = self._recorder.one_value(tensor), memory_map.shape_of(tensor)
        for dim, one in _slices_by_dim(index, len(shape)):
            start, stop, step = one.start, one.stop, one.step
            is_whole = start in (None, 0) and step in (None, 1) and stop in (None, shape[dim])
            if not is_whole:
                continue
            pairs = [(start, ("number", 0)), (step, ("number", 1)), (stop, ("dim", value, dim))]
            for number, other in pairs:
                own = expression_of(number)
                if own is not None or (number is stop is not None and value):
                    own = ("number", plain(number)) if own is None else own
                    self._recorder.log.add("compared", "eq", own, other, True, True)

    def _read_number(self, func: Any, tensor: Tensor, args: Any, kwargs: Any) -> Any:
        """The tensor's only element, that remembers of which tensor."""
        recorder = self._recorder
        of, number = recorder.one_value(tensor), func(*args, **kwargs)
        if isinstance(number, bool):
            recorder.log.add("asked", of, number)
        elif func is Tensor.item:
            return tagged(number, ("read", of, number))
        else:
            recorder.log.add("read", of)
        return number

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A shape, or one size of it, that remembers of what it is; or another attribute."""
        recorder = self._recorder
        before, recorder.sizes = recorder.sizes, CallSizes(getattr(func, "__name__", ""))
        try:
            result = func(*args, **kwargs)
        finally:
            recorder.sizes = before
        tensor = args[0] if args else None
        if func == _DATA:
            self._recorder._is_same(args, result)
        name = getattr(func, "__name__", "")
        is_count = name in ("numel", "nelement")
        is_size = isinstance(result, int) and (name == "size" or is_count)
        if not isinstance(tensor, Tensor) or not (is_size or isinstance(result, torch.Size)):
            if name == "__get__" and type(result) is int and func in _COUNTS_BYTES:
                self._recorder.log.add("read", self._recorder.value(args[0]))
            return result
        dims = dtensor.unsplit_dims(tensor)
        of = self._recorder.one_value(tensor)
        if is_count:
            expressions: list[Expression] = [("dim", of, dim) for dim in range(tensor.dim())]
            is_whole = len(dims) == len(expressions) > 0
            return (
                Size(result, reduce(lambda a, b: ("mul", a, b), expressions))
                if is_whole
                else result
            )
        if not is_size:
            return torch.Size(
                [Size(n, ("dim", of, dim)) if dim in dims else n for dim, n in enumerate(result)]
            )
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        is_whole = isinstance(dim, int) and dim % tensor.dim() in dims
        return Size(result, ("dim", of, dim % tensor.dim())) if is_whole else result

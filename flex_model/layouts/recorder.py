"""Records a followed forward: which tensors each operation read, wrote and made, and which of them
carry gradients.

Nothing is inferred here; `proofs` does that from the logs.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from flex_model.integrations import dtensor
from flex_model.integrations.compiled import DispatchMode
from flex_model.integrations.torch_private import (
    DisableTorchFunction,
    OpOverload,
    decompose,
    is_composite,
    reduction_of,
)
from flex_model.layouts import logged, memory_map
from flex_model.layouts.active import active_recorders, all_paused
from flex_model.layouts.argument_reader import ArgumentEncoder, Encoded
from flex_model.layouts.contracts import logged_calls, opaque_calls
from flex_model.layouts.function_recorder import FOLLOWED_AS_ONE, FunctionRecorder
from flex_model.layouts.graph_nodes import GraphNodes, is_framework_hook
from flex_model.layouts.logged import Value
from flex_model.layouts.operation_log import Source
from flex_model.layouts.propagation import rules
from flex_model.layouts.sizes import (
    CallSizes,
    expression_of,
    leaves,
    on_comparison,
    on_plain,
    plain,
)
from flex_model.layouts.tensor_values import TensorValues, without_function_mode

if TYPE_CHECKING:
    from flex_model.layouts.follow import Follower

Placements = tuple[Any, Any] | None  # encoded, along dp and tp
Sizes = tuple[int | None, ...] | None

COLLECTIVES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional"}
_COPIES = {"aten::_to_copy", "aten::clone", "aten::to"}
_SAME_MEMORY = {"aten::detach", "aten::alias", "aten::detach_"}


_keys = itertools.count(1)


class Recorder(DispatchMode):
    """A dispatch mode that records operations while it is entered, except inside ``paused``. Local.

    Attributes:
        owner: The `Follower` that records with it: whose log gets the entries, and who has what is
            known of tensors that no recorded operation made.
        received: Values that collectives returned.
    """

    supports_higher_order_operators = True

    def __init__(self, owner: Follower) -> None:
        super().__init__()
        self.owner, self.log, self.key = owner, owner.log, next(_keys)
        self._functions = FunctionRecorder(self)
        self.values = TensorValues()
        self.pauses = 0
        self.received: set[Value] = set()
        self.nodes = GraphNodes(self)
        self.comparisons: list[tuple[str, Any, Any]] = []  # of sizes, with this rank's numbers
        self.sizes = CallSizes(self.key)  # of the running call of torch
        self.reduction = ""  # of the running call of torch.distributed
        #: Whether what runs passes gradients although torch records no graph: it is recomputed.
        self.is_recomputed = False
        #: Whether ranks meet in the collectives of what is not recorded: a call with a contract.
        self.meets = False

    def __enter__(self) -> Recorder:
        """Begin to record."""
        super().__enter__()
        self._functions.__enter__()
        active_recorders().append(self)
        on_comparison.append(self._note_comparison)
        on_plain.append(self._note_plain)
        self._calls = logged_calls.being_logged()
        self._calls.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        active_recorders().remove(self)
        on_comparison.remove(self._note_comparison)
        on_plain.remove(self._note_plain)
        self._calls.__exit__(*exc_info)
        self._functions.__exit__(*exc_info)
        super().__exit__(*exc_info)

    @contextmanager
    def _in_operation(self) -> Iterator[None]:
        """Record also the operations inside an operation, for which torch disables the mode. The
        function mode stays disabled: torch would pass the operation to it a second time.
        """
        super().__enter__()
        try:
            with DisableTorchFunction():
                yield
        finally:
            super().__exit__(None, None, None)

    @property
    def is_paused(self) -> bool:
        """Whether nothing is recorded."""
        return self.pauses > 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude from the log what runs inside: it is not part of the model."""
        self.pauses += 1
        try:
            yield
        finally:
            self.pauses -= 1

    def begin_opaque(self) -> None:
        """Exclude from the log what runs until ``end_opaque``: a contract says what it makes."""
        self.pauses += 1

    def end_opaque(self) -> None:
        self.pauses -= 1

    @contextmanager
    def during(self, **state: Any) -> Iterator[None]:
        """Set ``sizes`` and ``reduction``, or others of these, while what is inside runs."""
        before = {name: getattr(self, name) for name in state}
        vars(self).update(state)
        try:
            yield
        finally:
            vars(self).update(before)

    def _note_comparison(self, by: str, own: Any, other: Any) -> None:
        if self.pauses == 0 and any(expression_of(one, self.key) for one in (own, other)):
            self.comparisons.append((by, plain(own), plain(other)))

    def _note_plain(self, size: Any) -> None:
        """Log that Python has a size as a plain number."""
        expression = expression_of(size, self.key) if self.pauses == 0 else None
        for _, value, dim in () if expression is None else sorted(leaves(expression)):
            self.log.add(logged.Read(value or None, dim, plain(size)))

    # Tensors and their values.

    @without_function_mode
    def value(self, tensor: Tensor) -> Value | tuple[Value, ...] | None:
        """Return the tensor's current value, and log an entry for a source that is seen for the
        first time. It is a tuple where the object is not known and several values share its memory;
        None for tensors that are not plain memory.
        """
        with all_paused(self):  # torch computes the properties of DTensors that are read here
            value = self._value(tensor)
            if tensor.requires_grad and value is not None:
                return self.nodes.note_use(tensor, value)
            return value

    def _value(self, tensor: Tensor) -> Value | tuple[Value, ...] | None:
        if not self.values.is_memory(tensor):
            return None
        # Weights come first: FSDP fills their memory by operations from which nothing can be
        # inferred.
        value = self.values.of_weight(tensor)
        if value is not None:
            return value
        found = self.owner.weights.source(tensor)
        if found is not None:
            name, placements, sizes = found
            value = self.add_source(tensor, name, placements, sizes, is_weight=True)
            self.values.note_weight(tensor, name, value)
            return value
        values = self.values.of(tensor)
        if values is not None:
            return values
        stated = self.owner.stated(tensor)
        if stated is not None:
            return self.place(tensor, stated)
        kept = self.owner.kept(tensor)
        if kept is not None:
            return self.add_source(tensor, *kept)
        base, schema = tensor._base, torch.ops.aten.t.default._schema
        if base is None or base.ndim != 2 or not self.values.are_same(base.t(), tensor):
            return None
        # The view of a weight that a layer, which is followed as one operation, keeps for backward.
        self.add_operation(schema.name, self.encode(schema, (base,), {}), tensor)
        return self.values.of(tensor)

    @without_function_mode
    def add_source(
        self,
        tensor: Tensor,
        name: str,
        placements: Placements,
        sizes: Sizes = None,
        is_weight: bool = False,
        open_dims: tuple[int, ...] = (),
    ) -> Value:
        """Log a weight, buffer or input with its known placements and sizes."""
        shape = tuple(memory_map.plain(tensor).shape)
        source = Source(name, placements, shape, sizes, is_weight, open_dims)
        value = self.values.latest(self.log.source(source))
        self.nodes.linked.add(value)
        self.values.note(tensor, value)
        for hook in (tensor._backward_hooks or {}).values():  # registered before the forward
            if not is_framework_hook(hook):
                self.nodes.note_hook(value)
        return value

    @without_function_mode
    def place(
        self, tensor: Tensor, placements: Placements, original: Tensor | None = None
    ) -> Value:
        """Log a tensor that a hook put in place of ``original``, or a DTensor that was made
        unrecorded.
        """
        before = None if original is None else self.value(original)
        value = self.log.new_value()
        shape = tuple(memory_map.plain(tensor).shape)
        self.log.add(logged.Placed(value, placements, shape, before))
        self._link(value)
        self.values.note(tensor, value)
        return value

    def _link(self, value: Value) -> None:
        """Note that the operation that made this value passes its gradient on. This does not hold
        in the forward of an ``autograd.Function``, which runs without gradients, unless it is
        recomputed.
        """
        if torch.is_grad_enabled() or self.is_recomputed:
            self.nodes.linked.add(value)

    @without_function_mode
    def state(self, tensor: Tensor, placements: Placements, text: str, sizes: Any) -> None:
        """Log the user's statement of a tensor's placement, along the axes that are not None.

        Args:
            text: The statement, for messages.
            sizes: Of the full tensor, with None for those that are not stated; None if none is.
        """
        before, value = self.value(tensor), self.log.new_value()
        shape = tuple(memory_map.plain(tensor).shape)
        self.log.add(logged.Stated(value, before, placements, shape, text, sizes))
        self._revalue(tensor, before, value)

    def _revalue(self, tensor: Tensor, before: Any, value: Value) -> None:
        """Give a tensor that had the value ``before`` another one, which passes gradients on."""
        self._link(value)
        if isinstance(before, int):
            self.values.replace(tensor, before, value)
        self.values.note(tensor, value)

    @without_function_mode
    def note_experts(
        self,
        inputs: Sequence[Tensor],
        result: Tensor,
        refusal: str,
        is_opaque: bool,
        returns_own_rows: bool,
    ) -> None:
        """Log a call of experts; see `contracts.experts`. ``is_opaque``: whether nothing inside was
        recorded.
        """
        before, value = None if is_opaque else self.value(result), self.log.new_value()
        shape = tuple(memory_map.plain(result).shape)
        values = tuple(map(self.value, inputs))
        self.log.add(
            logged.Experts(value, before, values, shape, refusal, is_opaque, returns_own_rows)
        )
        self._revalue(result, before, value)
        if is_opaque and (result.requires_grad or self.is_recomputed):
            self.nodes.add_function("experts", "whole", values, result)

    def record_results(self, result: Any) -> None:
        """Record the autograd nodes of the tensors that a call returned."""
        for leaf in tree_iter(result):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                self.value(leaf)

    def live_tensors(self) -> Iterator[tuple[Tensor, Value]]:
        """Yield the tensors that still exist, without weights, with their current values."""
        for tensor in self.values.live_tensors():
            value = self.value(tensor)
            if isinstance(value, int):
                yield tensor, value

    @without_function_mode
    def note_read(self, tensor: Tensor, is_shared: bool) -> None:
        """Log that Python reads the elements of a tensor; ``is_shared``: and may write to them."""
        counts = not (tensor.is_floating_point() or tensor.dtype == torch.bool)
        self.log.add(logged.Read(self.value(tensor), None, int(counts)))
        if is_shared:
            self.invalidate(tensor)

    @without_function_mode
    def invalidate(self, tensor: Tensor) -> None:
        """Invalidate what is known of a tensor whose memory may be written to unrecorded from now
        on.
        """
        lost = self.values.invalidate(tensor)
        if lost is None:
            return
        for _, value in lost:
            self._link(value)
        self.log.add(logged.Invalidated(tuple(old for old, _ in lost)))

    # Operations.

    @without_function_mode
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.is_paused:
            result = func(*args, **kwargs)
            if self.meets and isinstance(func, OpOverload) and func.namespace in COLLECTIVES:
                self._meet(func, args, kwargs, result)
            return result
        if not isinstance(func, OpOverload):  # such as flex_attention
            result = func(*args, **kwargs)
            encoded = self.encode(None, args, kwargs)
            self.add_operation(f"higher_order::{func}", encoded, result)
            return result
        if func.namespace in ("profiler", "prim", "fsdp"):  # FSDP2's fill weights, which are placed
            return func(*args, **kwargs)
        if func.namespace not in COLLECTIVES and self._is_composite(func, args, kwargs):
            with self._in_operation():
                return decompose(func, *args, **kwargs)
        schema = func._schema
        if func.namespace in COLLECTIVES:
            return self._collective(func, args, kwargs)
        if schema.name == "aten::_local_scalar_dense":
            self.note_read(args[0], False)
        encoded = self.encode(schema, args, kwargs)
        is_strided = schema.name == "aten::as_strided_"
        before = memory_map.elements_of(args[0]) if is_strided else ()
        result = func(*args, **kwargs)
        if schema.name == "aten::slice":
            # One that is cut to the tensor, as ``h[:, -4:]``, grows with it until it is not.
            size = args[0].shape[args[1]] if len(args) > 1 else 0
            bounds = [abs(bound) for bound in args[2:4] if bound is not None]
            self.comparisons += [("lt", size, n) for n in bounds if size < n < sys.maxsize]
        if schema.name in _SAME_MEMORY and self.note_same(args[0], result):
            return result
        if is_strided and before == memory_map.elements_of(result):
            # Where torch pools channels-last tensors to one position.
            schema = torch.ops.aten.alias.default._schema
            encoded = encoded[0][:1], (), encoded[2]
        self.add_operation(schema.name, encoded, result, schema, args, kwargs)
        self._note_statistics(schema.name, encoded, args)
        return result

    @staticmethod
    def _is_composite(func: Any, args: Any, kwargs: Any) -> bool:
        """Whether the operation is composed of others, as it arrives under ``inference_mode``, and
        is not followed as one.
        """
        name = func._schema.name
        is_one = name in FOLLOWED_AS_ONE if func.namespace == "aten" else rules.has_rule(name)
        if is_one or any(dtensor.is_dtensor(leaf) for leaf in tree_iter((args, kwargs))):
            return False
        return is_composite(func)

    def note_same(self, source: Tensor, result: Any) -> bool:
        """Whether the result is an alias of the source, with the same memory, shape and strides; it
        then gets the source's value.
        """
        if dtensor.is_dtensor(source) or not isinstance(result, Tensor):
            return False
        if not self.values.are_same(source, result):
            return False
        value = self.value(source)
        if isinstance(value, int):
            self.values.bind(result, value)
        return True

    def encode(self, schema: Any, args: Any, kwargs: Any) -> Encoded:
        """Encode the arguments of an operation for the log; see `ArgumentEncoder`."""
        return ArgumentEncoder(self).encode(schema, args, kwargs)

    def add_operation(
        self,
        name: str,
        encoded: Encoded,
        result: Any,
        schema: Any = None,
        args: Any = (),
        kwargs: Any = None,
    ) -> None:
        """Log an operation that has run.

        Args:
            schema: Its schema, if it has one.
            args, kwargs: What it was passed, where it may have written to it.
        """
        written = memory_map.written_by(schema, args, kwargs or {})
        results = [leaf for leaf in tree_iter(result) if leaf is not None]
        tensors = written or [leaf for leaf in results if isinstance(leaf, Tensor)]
        if not tensors:
            return
        is_copy = name in _COPIES and isinstance(args[0], Tensor)
        is_blank = name.startswith(("aten::empty", "aten::new_empty"))
        is_blank |= is_copy and self.values.is_blank(args[0])
        outputs, writes = self._outputs(tensors, bool(written), is_blank)
        overload = "" if schema is None else schema.overload_name
        full_name = f"{name}.{overload}" if overload else name
        arguments, named, carriers = encoded
        if carriers and name.startswith(("aten::", opaque_calls.PREFIX)):
            self.nodes.link(outputs, writes)
        self.log.add(logged.Op(full_name, arguments, named, outputs, writes, carriers))

    @without_function_mode
    def add_call(
        self, name: str, inputs: Sequence[Any], made: Sequence[Tensor], stated: Placements
    ) -> None:
        """Log a call with a contract; ``stated``: what its first input states, a DTensor."""
        outputs, _ = self._outputs(made, False)
        self.log.add(logged.Call(name, tuple(inputs), outputs, stated))

    def _note_statistics(self, name: str, encoded: tuple[Any, ...], args: Sequence[Any]) -> None:
        """Log the statistics that a batch norm updated, as results of its functional form, which
        returns them.
        """
        statistics = memory_map.statistics_written_by(name, args)
        if len(statistics) < 2:
            return
        written, writes = self._outputs(statistics, True)
        beside = [  # the result, and the statistics of the batch
            self._made(self.log.new_value(), one, None) for one in (args[0], *statistics)
        ]
        functional = "aten::_native_batch_norm_legit_functional"
        outputs, writes = (*beside, *written), (*[logged.Write()] * len(beside), *writes)
        self.log.add(logged.Op(functional, encoded[0][:8], (), outputs, writes, ()))

    def _outputs(
        self, tensors: Sequence[Tensor], in_place: bool, is_blank: bool = False
    ) -> tuple[tuple[logged.Made, ...], tuple[logged.Write, ...]]:
        outputs, writes = [], []
        for tensor in tensors:
            value = self.log.new_value()
            with self.paused():
                stated = self.owner.stated(tensor)
            outputs.append(self._made(value, tensor, stated))
            if in_place:
                writes.append(self._write(tensor, value))
            else:
                self.values.note(tensor, value)
                if is_blank:
                    self.values.note_blank(tensor)
        return tuple(outputs), tuple(writes)

    @staticmethod
    def _made(value: Value, tensor: Tensor, stated: Placements) -> logged.Made:
        shape, local = map(memory_map.shape_of, (tensor, memory_map.plain(tensor)))
        return logged.Made(value, shape, str(tensor.dtype), stated, local)

    def _write(self, tensor: Tensor, value: Value) -> logged.Write:
        """Record a write to the tensor's memory, and its effect on other values in that memory."""
        before = self.value(tensor)
        if not isinstance(before, int) or not self.values.is_memory(tensor):
            self.invalidate(tensor)
            self.values.note(tensor, value)
            return logged.Write()
        return self.values.write(tensor, before, value)

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name
        encoded = self.encode(func._schema, args, kwargs)
        inputs = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        result = func(*args, **kwargs)
        written = memory_map.written_by(func._schema, args, kwargs)
        made = written or [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor)]
        if name.endswith(("::wait_tensor", "::_wrap_tensor_autograd")):
            for tensor in made:
                value = self.value(inputs[0])
                if isinstance(value, int):
                    self.values.note(tensor, value)
            return result
        axes = self._meet(func, args, kwargs, result)
        outputs, writes = self._outputs(made, bool(written))
        self.received.update(output.value for output in outputs)
        reduction = self._reduction(func._schema, args)
        self.log.add(logged.Collective(name, reduction, axes, *encoded[:2], outputs, writes))
        if self.is_recomputed and "autograd" in func.namespace:
            self.nodes.add_function(name, None, [self.value(one) for one in inputs], result)
        return result

    def _meet(self, func: Any, args: Any, kwargs: Any, result: Any) -> tuple[str, ...] | None:
        """Log that tensor-parallel ranks meet in a collective; return the axes of its group. They
        don't in one that returns no tensor: a send of one rank is another's receive.
        """
        axes = self.owner.axes_of(args, kwargs)
        if axes and "tp" in axes and any(isinstance(one, Tensor) for one in tree_iter(result)):
            self.log.meet(func._schema.name, axes)
        return axes

    def _reduction(self, schema: Any, args: Any) -> str:
        """Return the reduction by name; "" where it is not known. For c10d, whose objects don't
        show it, it is read from the caller's arguments.
        """
        for argument, value in zip(schema.arguments, args):
            if argument.name == "reduce_op":
                shown = value.lower() if isinstance(value, str) else reduction_of(value)
                return shown or self.reduction
        return ""

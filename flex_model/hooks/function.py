"""HookFunction: what to record or edit, and at which module."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from flex_model.layouts.expected_shape import check_expected_shape
from flex_model.layouts.statements import placements_of
from flex_model.selection import Select

if TYPE_CHECKING:
    from flex_model.distributed.gather import TensorSpec
    from flex_model.hooks.hook_call import HookCall
    from flex_model.hooks.registration import Registration

# The module is None for parameters' gradients; for several tensors, tuples of them are passed and
# returned. Any: functions are typed for the case that they are for.
EditingFunction = Callable[[Any, Any, Namespace, nn.ModuleDict], Any]

_MAX_TENSORS = 8  # rank 0 describes the results of an edit in 16 bits

_READ_BY_REGISTRATION = frozenset({
    "draws", "editing_function", "expected_shape", "module_name", "output_name",
    "parameter_names", "placements", "record", "select", "unpack_idx",
})  # fmt: skip

#: The kinds of hooks, named as in ``create_hook_group(hook_type=...)``.
KINDS = ("forward", "forward_pre", "full_backward", "full_backward_pre", "tensor")


class HookFunction:
    """Records, and optionally edits, one full tensor of a model that may run sharded.

    Example::

        def halve(current_module, inputs, save_ctx, modules):
            save_ctx.norm = inputs.norm()
            return inputs * 0.5

        flex.register_forward_hook(HookFunction("model.layers.3.mlp", editing_function=halve))

    Args:
        module_name: The module's name in ``named_modules`` of the wrapped model, with or without
            the names that DDP, FSDP and other wrappers insert; ``""`` is the model itself. A
            parameter's name for ``register_hook``.
        expected_shape: Shape of the full tensor, such as ``(None, None, 4096)``; None for sizes
            that may vary. It is checked. Where nothing is proven, it states that tensor-parallel
            ranks hold consecutive parts along the dim whose size is given and is not their own, or
            all of the tensor if there is none; for fused parts use ``placements`` or
            ``FlexModel.annotate_layout``. The size of the batch dim is that of the rows of all
            data-parallel ranks (or of a tensor that they share). A gradient has the shape of its
            tensor, and is split as that is.
        editing_function: ``(current_module, inputs, save_ctx, modules) -> Tensor | None``.
            ``inputs`` is the full tensor, a plain ``torch.Tensor``, the same on every rank. It may
            be edited in place, returned, or replaced by a tensor of its shape, dtype and device;
            None means that only changes made in place count. They are detected by the tensor's
            version counter: writes through ``.data`` or ``.numpy()`` are not. What it keeps of
            ``inputs`` itself is in the graph, as with torch's own hooks (``retain_grad``,
            ``register_hook``, ``torch.autograd.grad`` by it), which takes a scatter; keep
            ``inputs.detach()`` where only values are needed. The function
            runs as single-threaded code on every rank (or on rank 0, ``edit_on="rank0"``), with the
            same random state, and must call no collective. ``current_module`` is None for
            parameters' gradients; its weights may be shards: name those that are needed in
            ``parameters``.
        unpack_idx: Which tensor. Tensors are counted depth first through tuples, lists, dicts,
            named tuples, dataclasses, model outputs and registered types; for pre-hooks through the
            positional, then the keyword arguments; for backward hooks through the tensors of the
            forward whose gradients they get. Several, as ``(0, 2)``: the function gets a tuple of
            these tensors and returns one, with None for what it leaves as it is, or None; records
            are in ``output_ptr["name[0]"]`` and ``output_ptr["name[2]"]``; ``expected_shape`` is a
            list of one shape for each. Gradients of several may be recorded, and edited by one hook
            each. A name, as ``"attention_mask"`` or ``"position_embeddings.0"``, stays with its
            tensor where others come and go: of inputs that of the argument, of outputs that of the
            field or key, with a dot before each further one (``pytree.leaf_names``). A call without
            a tensor of that name is an error that lists the names.
        output_name: Key of the record in ``output_ptr`` (default: ``module_name``).
        select: The part of the tensor that is needed (``flex_model.Select``): only that is moved,
            passed to the function and recorded, and an edit of it is put back in its place. Of
            several tensors: one for all, or a list of one for each.
        placements: How the tensor is placed over the ranks, where that can't be proven: a dict by
            axis, such as ``{"tp": Shard(2)}``, of placements of ``torch.distributed.tensor``. As
            ``FlexModel.annotate_layout``, for this hook's own tensor: the gradient, for a hook on
            gradients. One that contradicts a proof is an error.
        record: Whether tensors are recorded in ``output_ptr``. Without it an edit is faster: no
            copy of the tensor is made or kept.
        draws: Whether the function may draw random numbers in a later call although it drew none in
            its first one. A function that draws in its first call is seeded in every call, the same
            on any sharding; one that does not is not, and a later draw is an error without this.
            Seeding sets torch's global generators for the time of the call, so other threads should
            draw from a ``torch.Generator()`` of their own: else they repeat its numbers, and a draw
            of theirs during the call counts as the function's.
        parameters: Names of parameters of the wrapped model that the function needs in full; they
            are in ``hook_function.parameters[name]`` while it runs, detached.

    Its arguments are attributes, which can't be set while it is registered. ``editing_function``
    can: a function may be replaced, taken off (None) and put back, on every rank.

    Attributes:
        save_ctx, modules: Those of the FlexModel that it is registered with; None before.

    Raises:
        TypeError, ValueError: an argument of the wrong type, a negative ``unpack_idx`` or size, or
            neither an edit nor a record.
    """

    def __init__(
        self,
        module_name: str,
        expected_shape: Sequence[Any] | None = None,
        editing_function: EditingFunction | None = None,
        unpack_idx: int | str | Sequence[int | str] = 0,
        *,
        output_name: str | None = None,
        parameters: Iterable[str] = (),
        select: Select | Sequence[Select | None] | None = None,
        record: bool = True,
        placements: Mapping[str, Any] | None = None,
        draws: bool = False,
    ) -> None:
        if not isinstance(module_name, str):
            raise TypeError(
                f"HookFunction: module_name must be a str, got {type(module_name).__name__}"
            )
        if editing_function is not None and not callable(editing_function):
            raise TypeError(
                "HookFunction: editing_function must be callable or None, got "
                f"{type(editing_function).__name__}"
            )
        if unpack_idx is None:
            unpack_idx = 0
        several = isinstance(unpack_idx, Sequence) and not isinstance(unpack_idx, str)
        indices: tuple[Any, ...] = (unpack_idx,)
        if isinstance(unpack_idx, Sequence) and several:
            indices = tuple(unpack_idx)
        if output_name is not None and not isinstance(output_name, str):
            raise TypeError(
                f"HookFunction: output_name must be a str or None, got {type(output_name).__name__}"
            )
        if not record and editing_function is None:
            raise ValueError(
                f"HookFunction({module_name!r}, record=False) has nothing to do; give an "
                "editing_function, or leave record=True"
            )
        _check_indices(unpack_idx, indices)
        shapes = _for_each(expected_shape, several, indices, "expected_shape")
        selects = _for_each(select, several and isinstance(select, Sequence), indices, "select")
        for one in selects:
            if one is not None and not isinstance(one, Select):
                raise TypeError(
                    "HookFunction: select must be a flex_model.Select or None, got "
                    f"{type(one).__name__}"
                )
        self.module_name = module_name
        self.expected_shape = None if several else check_expected_shape(expected_shape)
        self.editing_function = editing_function
        self.unpack_idx: Any = indices if several else indices[0]
        self.output_name = output_name
        self.select: Any = select
        self.record = bool(record)
        self.placements = placements_of(placements)
        self.draws = bool(draws)
        self.parameter_names = _names_of_parameters(parameters)
        self.parameters: dict[str, Tensor] = {}
        self.save_ctx: Namespace | None = None
        self.modules: nn.ModuleDict | None = None
        self._registrations: Sequence[Registration] = ()
        #: One for each tensor, where there are several.
        self.members: tuple[HookFunction, ...] = ()
        if several:
            self.members = tuple(
                self._of_one(index, shape, one)
                for index, shape, one in zip(indices, shapes, selects)
            )

    def __setattr__(self, name: str, value: Any) -> None:
        """ValueError for what registration has read: dispatchers and other ranks rely on it. An
        editing function may be replaced, taken off and put back.
        """
        registrations = self.__dict__.get("_registrations")
        if registrations and name in _READ_BY_REGISTRATION:
            is_edit = name == "editing_function"
            if not (is_edit and (value is None or registrations[0].had_edit)):
                raise ValueError(
                    f"{self!r}: {name} can't be set while the hook is registered"
                    f"{' without one' * is_edit}; remove it by the handle that register_... "
                    "returned, and register it again"
                )
        super().__setattr__(name, value)

    @property
    def settings_of_module(self) -> tuple[str, ...]:
        """Return what else must be the same on all ranks: settings of its module, edits' values."""
        return ()

    def assign(self, name: str, value: Any) -> None:
        """Set an attribute, as an assignment does. Every rank must do the same."""
        setattr(self, name, value)

    def _of_one(self, index: int | str, shape: Any, select: Select | None) -> HookFunction:
        return HookFunction(
            self.module_name,
            shape,
            self.editing_function,
            index,
            output_name=f"{self.record_name}[{index}]",
            parameters=self.parameter_names,
            select=select,
            record=self.record,
            placements=self.placements,
            draws=self.draws,
        )

    def attach(
        self,
        registrations: Sequence[Registration],
        save_ctx: Namespace | None,
        modules: nn.ModuleDict | None,
    ) -> None:
        """Note where the function is registered; with no registrations: nowhere."""
        self._registrations, self.save_ctx, self.modules = registrations, save_ctx, modules

    def pass_parameters(self, parameters: dict[str, Tensor]) -> None:
        """Set the full parameters that the function reads while it runs."""
        self.parameters = parameters

    @property
    def record_name(self) -> str:
        """Key of the record in ``output_ptr``."""
        return self.module_name if self.output_name is None else self.output_name

    def __getstate__(self) -> dict[str, Any]:
        """A copy is registered nowhere."""
        unused = HookFunction(self.module_name)
        names = ("_registrations", "save_ctx", "modules", "parameters")
        return {**self.__dict__, **{name: getattr(unused, name) for name in names}}

    def __repr__(self) -> str:
        edit = self.editing_function
        arguments = {
            "expected_shape": self.expected_shape,
            "editing_function": None if edit is None else name_of(edit),
            "unpack_idx": repr(self.unpack_idx) if self.unpack_idx else None,
            "output_name": None if self.output_name is None else repr(self.output_name),
            "select": self.select,
            "record": None if self.record else False,
            "placements": self.placements or None,
        }
        parts = [f"{name}={value}" for name, value in arguments.items() if value is not None]
        return f"HookFunction({', '.join([repr(self.module_name), *parts])})"


class PartHook(HookFunction):
    """Reads tensors where they are, on every rank: no payload moves, and nothing is recorded.

    Args:
        read: ``(call, tensor, spec, is_part)``: gets this rank's shard and its spec; where shards
            must be summed or padded, or ``needs_full``, rank 0's full tensor, or None on the other
            ranks; on one process its tensor, without a spec.
        needs_full: Whether tensors are gathered to rank 0 nevertheless.
    """

    def __init__(
        self,
        module_name: str,
        read: Callable[[HookCall, Tensor | None, TensorSpec | None, bool], None],
        needs_full: bool = False,
    ) -> None:
        super().__init__(module_name)
        self.read, self.needs_full, self.record = read, needs_full, False


def _check_indices(value: object, indices: tuple[object, ...]) -> None:
    if not indices or any(isinstance(i, bool) or not isinstance(i, (int, str)) for i in indices):
        raise TypeError(
            f"HookFunction: unpack_idx must be an int or a name, or several of them, got {value!r}"
        )
    if "" in indices:
        raise ValueError("HookFunction: unpack_idx is an empty name; leave it out for tensor 0")
    if any(isinstance(i, int) and i < 0 for i in indices):
        raise ValueError(f"HookFunction: unpack_idx counts from 0, got {value}")
    if len(indices) > _MAX_TENSORS:
        raise ValueError(
            f"HookFunction: unpack_idx names {len(indices)} tensors, and one call can edit "
            f"{_MAX_TENSORS} at most; register several HookFunctions"
        )
    if len(set(indices)) < len(indices):
        raise ValueError(f"HookFunction: unpack_idx names a tensor twice, {value}; name it once")


def _names_of_parameters(value: object) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"HookFunction: parameters must be names of parameters, got {value!r}; example: "
            '("lm_head.weight",)'
        )
    return names


def _for_each(value: Any, several: bool, indices: tuple[object, ...], what: str) -> Sequence[Any]:
    """Return one value per tensor, from a list if there are several tensors, else repeated."""
    if not several or value is None:
        return [value] * len(indices)
    if not isinstance(value, Sequence) or len(value) != len(indices):
        raise ValueError(
            f"HookFunction: {what} must have one entry for each tensor of unpack_idx={indices}, "
            f"{len(indices)}, got {value!r}"
        )
    return list(value)


def name_of(editing_function: object) -> str:
    """Return a name for messages: the qualified name, a custom ``repr``, or the type's name."""
    name = getattr(editing_function, "__qualname__", None)
    has_repr = type(editing_function).__repr__ is not object.__repr__
    return name or (repr(editing_function) if has_repr else type(editing_function).__name__)

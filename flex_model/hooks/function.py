"""HookFunction: what the user wants to see or edit, at one module."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from flex_model.distributed.inference import check_expected_shape
from flex_model.selection import Select

if TYPE_CHECKING:
    from flex_model.hooks.registration import Registration

EditingFunction = Callable[[nn.Module | None, Tensor, Namespace, nn.ModuleDict], Tensor | None]

#: The kinds of hooks, named as in ``create_hook_group(hook_type=...)``.
KINDS = ("forward", "forward_pre", "full_backward", "full_backward_pre", "tensor")


class HookFunction:
    """See, and if you like edit, one full tensor of a model that may run sharded.

    Example::

        def halve(current_module, inputs, save_ctx, modules):
            save_ctx.norm = inputs.norm()
            return inputs * 0.5

        flex.register_forward_hook(HookFunction("model.layers.3.mlp", editing_function=halve))

    Args:
        module_name: The module, as ``named_modules`` of the wrapped model says it, with or without
            the names that DDP, FSDP and their like put in between; ``""`` is the model itself. A
            parameter's name for ``register_hook``.
        expected_shape: Shape of the full tensor; None for sizes that are not known or not sharded.
            Needed only where the layout of a sharded plain tensor can't be inferred; given, it is
            checked. Under data parallelism dim 0 is the global batch; a tensor whose dim 0 is
            something else, shared by all data-parallel ranks (a positional embedding), needs its
            own shape here.
        editing_function: ``(current_module, inputs, save_ctx, modules) -> Tensor | None``.
            ``inputs`` is the full tensor, a plain ``torch.Tensor``, the same on every rank. It may
            be edited in place, returned, or replaced by a tensor of its shape, dtype and device;
            None means "what was done in place, if anything". Changes are seen by the tensor's
            version counter: writes through ``.data`` or ``.numpy()`` are not seen. The function
            runs as single-threaded code on every rank (or on rank 0, ``edit_on="rank0"``), with the
            same random state, and must call no collective. ``current_module`` is None for
            parameters' gradients; its weights may be shards: name those that are needed in
            ``parameters``.
        unpack_idx: Which tensor: they are counted depth first through tuples, lists, dicts, named
            tuples, dataclasses, model outputs and registered types; for pre-hooks through the
            positional, then the keyword arguments; for backward hooks through the tensors of the
            forward whose gradients are meant.
        output_name: Key of the record in ``output_ptr`` (default: ``module_name``).
        select: The part of the tensor that is needed (``flex_model.Select``): only that is moved,
            handed over and recorded, and an edit of it goes back to its place.
        parameters: Names of parameters of the wrapped model that the function needs in full; they
            are in ``hook_function.parameters[name]`` while it runs, detached.

    Attributes:
        save_ctx, modules: Those of the FlexModel it is registered with; None before.

    Raises:
        TypeError, ValueError: an argument of the wrong type, or a negative ``unpack_idx`` or size.
    """

    def __init__(
        self,
        module_name: str,
        expected_shape: Sequence[int | None] | None = None,
        editing_function: EditingFunction | None = None,
        unpack_idx: int = 0,
        *,
        output_name: str | None = None,
        parameters: Iterable[str] = (),
        select: Select | None = None,
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
        if isinstance(unpack_idx, bool) or not isinstance(unpack_idx, int):
            raise TypeError(f"HookFunction: unpack_idx must be an int, got {unpack_idx!r}")
        if unpack_idx < 0:
            raise ValueError(f"HookFunction: unpack_idx counts from 0, got {unpack_idx}")
        if output_name is not None and not isinstance(output_name, str):
            raise TypeError(
                f"HookFunction: output_name must be a str or None, got {type(output_name).__name__}"
            )
        if select is not None and not isinstance(select, Select):
            raise TypeError(
                "HookFunction: select must be a flex_model.Select or None, got "
                f"{type(select).__name__}"
            )
        self.module_name = module_name
        self.expected_shape = check_expected_shape(expected_shape)
        self.editing_function = editing_function
        self.unpack_idx = unpack_idx
        self.output_name = output_name
        self.select = select
        self.parameter_names = (parameters,) if isinstance(parameters, str) else tuple(parameters)
        self.parameters: dict[str, Tensor] = {}
        self.save_ctx: Namespace | None = None
        self.modules: nn.ModuleDict | None = None
        self._registration: Registration | None = None

    @property
    def record_name(self) -> str:
        """Key of the record in ``output_ptr``."""
        return self.module_name if self.output_name is None else self.output_name

    def __repr__(self) -> str:
        edit = self.editing_function
        parts = [repr(self.module_name)]
        if self.expected_shape is not None:
            parts.append(f"expected_shape={self.expected_shape}")
        if edit is not None:
            parts.append(f"editing_function={name_of(edit)}")
        if self.unpack_idx:
            parts.append(f"unpack_idx={self.unpack_idx}")
        if self.output_name is not None:
            parts.append(f"output_name={self.output_name!r}")
        if self.select is not None:
            parts.append(f"select={self.select}")
        return f"HookFunction({', '.join(parts)})"


def name_of(editing_function: object) -> str:
    """For messages: as it shows itself, or what it is."""
    name = getattr(editing_function, "__qualname__", None)
    shows_itself = type(editing_function).__repr__ is not object.__repr__
    return name or (repr(editing_function) if shows_itself else type(editing_function).__name__)

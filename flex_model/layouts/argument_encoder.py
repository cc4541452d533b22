"""Encodes an operation's arguments for the log: tensors as their values, sizes with the expressions
of the sizes that they were computed from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from flex_model.layouts import memory_map
from flex_model.layouts.call_sizes import SIZE_ARGUMENTS, CallSizes
from flex_model.layouts.expressions import Expression
from flex_model.layouts.propagation.views import TO_SIZES
from flex_model.layouts.sizes import encoded

Encoded = tuple[Any, Any, tuple[Any, ...]]

_VIEWS = {f"aten::{name}" for name in (*TO_SIZES, "unflatten")}


class ArgumentEncoder:
    """Encodes the arguments of one operation.

    Args:
        value: Returns the value or values of a tensor.
        sizes: The numbers of the call that runs the operation.
        stated_sizes: The sizes of last dims that the running module states.
        is_recomputed: Whether all floating-point tensors carry gradients.
    """

    def __init__(
        self,
        value: Callable[[Tensor], Any],
        sizes: CallSizes,
        stated_sizes: frozenset[int],
        is_recomputed: bool,
    ) -> None:
        self._value, self._sizes, self._stated_sizes = value, sizes, stated_sizes
        self._is_recomputed = is_recomputed
        self._carriers: list[Any] = []

    def encode(self, schema: Any, args: Any, kwargs: Any) -> Encoded:
        """Return positional and keyword arguments, and the values of those that carry gradients."""
        arguments = schema.arguments if schema is not None else ()
        is_called = schema is not None and self._sizes.are_of(schema.name)
        by_place = self._sizes.by_place(args) if is_called else None
        passed = None if by_place is None else iter(by_place)
        positional = tuple(
            self._encoded(
                value, is_called and i < len(arguments) and _is_size(arguments[i]), passed
            )
            for i, value in enumerate(args)
        )
        if schema is not None and self._stated_sizes and schema.name in _VIEWS:
            shape, kept = memory_map.shape_of(args[0]), 0
            if schema.name == "aten::unflatten":
                dim = args[1] if len(args) > 1 else kwargs["dim"]
                kept = len(shape) - 1 if dim in (-1, len(shape) - 1) else len(shape)
            positional = tuple(self._with_stated(value, shape, kept) for value in positional)
        types = {argument.name: argument for argument in arguments}
        keyword = tuple(
            (name, self._encoded(value, is_called and name in types and _is_size(types[name])))
            for name, value in sorted(kwargs.items())
        )
        if schema is not None and schema.name == "aten::lift_fresh":
            keyword += (("content", ("s", _content(args[0]))),)
        return positional, keyword, tuple(self._carriers)

    def _with_stated(self, value: Any, shape: tuple[int, ...], num_kept: int) -> Any:
        """Return the encoded sizes of a view, after ``num_kept`` dims that stay. Where the last two
        divide the last dim into heads, ``(..., -1, size)``, ``(..., heads, size)`` or ``(...,
        heads, -1)``, the last one gets an expression if the module states it.
        """
        if not isinstance(value, tuple) or value[:1] != ("l",) or len(value) < 3:
            return value
        heads, size = value[-2:]
        if size == -1 and type(heads) is int and heads > 0 and shape[-1] % heads == 0:
            size = shape[-1] // heads
        if type(heads) is not int or type(size) is not int or size not in self._stated_sizes:
            return value
        is_new_dim = num_kept + len(value) - 1 == len(shape) + 1 > 3
        if heads != -1 and not (is_new_dim and heads * size == shape[-1]):
            return value  # other dims are joined or added
        return (*value[:-1], ("n", size, ("number", size)))

    def _encoded(
        self, value: Any, is_size: bool = False, passed: Iterator[Expression | None] | None = None
    ) -> Any:
        """Encode one argument for the log.

        Args:
            is_size: Whether its numbers are sizes that the running call was passed.
            passed: The expressions of this and the following numbers, if they are known by
                position.
        """
        if isinstance(value, Tensor):
            known = self._value(value)
            carries = value.requires_grad and torch.is_grad_enabled()
            if carries or (self._is_recomputed and value.is_floating_point()):
                self._carriers.append(known)
            return "t", known, memory_map.shape_of(value), str(value.dtype)
        if isinstance(value, bool) or value is None or isinstance(value, str):
            return value
        if isinstance(value, (int, float)):
            if passed is not None:
                expression = next(passed)
                return encoded(value, expression if is_size else None)
            return self._sizes.encoded(value) if is_size else encoded(value)
        if isinstance(value, (list, tuple)):
            numbers = self._sizes.of_list(value) if passed is None and is_size else None
            if numbers is not None:
                return "l", *numbers
            return "l", *(self._encoded(item, is_size, passed) for item in value)
        if isinstance(value, torch.device):
            return "s", value.type
        if isinstance(value, complex):
            return "c", value.real, value.imag
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return "s", str(value)
        return "s", type(value).__name__


def _is_size(argument: Any) -> bool:
    return argument.name in SIZE_ARGUMENTS


def _content(constant: Tensor) -> str:
    """Return a hash of the elements of a tensor that was made of Python numbers."""
    data = memory_map.bytes_of(constant)
    return "" if data is None else blake2b(data, digest_size=8).hexdigest()

"""Tensors without values: they stand for those that a pipeline stage, or a run that skips modules,
does not have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from flex_model.integrations import torch_private

_SIZELESS = (Tensor.dim, Tensor.ndim.__get__, Tensor.get_device)  # type: ignore[attr-defined]
_SIZES_ONLY = re.compile(r"new_.*|.*_like")  # `zeros_like(x)` needs no value of x


class AbsentError(RuntimeError):
    """Something needs values that are not here.

    Attributes:
        names: What they are, or depend on.
        is_read: Whether Python reads them, as ``if mask.any()`` does.
    """

    def __init__(self, names: Iterable[str], message: str, is_read: bool = False) -> None:
        super().__init__(message)
        self.names, self.is_read = frozenset(names), is_read


class Absent(Tensor):
    """Stands for a tensor that is not here, or that depends on one.

    The results of operations on it are of this class, too, with the right sizes and dtypes. That
    Python reads a value of it is an error.

    Args:
        elem: The tensor, on meta. (With its values while `Recording` finds what depends on what.)
        names: What it stands for, and what that depends on.
        device: That of the tensor for which it stands.
    """

    @staticmethod
    def __new__(cls, elem: Tensor, names: Iterable[str], device: torch.device) -> Absent:
        return torch_private.wrapper_tensor(cls, elem, device)

    def __init__(self, elem: Tensor, names: Iterable[str], device: torch.device) -> None:
        super().__init__()
        self.elem, self.labels = elem, frozenset(names)  # ``names`` is a Tensor's own

    __torch_function__ = torch_private.no_torch_function  # type: ignore[assignment]

    def read(self) -> Tensor:
        """Return it with values, for Python, where it has some."""
        if self.elem.is_meta:
            raise _read_error(self.labels)
        return self.elem

    def tolist(self) -> Any:
        return self.read().tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return self.read().numpy(*args, **kwargs)

    def __array__(self, *args: Any) -> Any:
        return self.read().__array__(*args)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        kwargs = kwargs or {}
        found = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Absent)]
        names = names_in(found)
        device = kwargs.get("device") or found[0].device
        made = Unsized if any(isinstance(one, Unsized) for one in found) else Absent
        if _SIZES_ONLY.fullmatch(func.overloadpacket.__name__):
            return func(*_pytree.tree_map_only(Absent, _blank, args), **kwargs)
        is_meta = any(one.elem.is_meta for one in found)
        if is_meta:
            arguments = func._schema.arguments
            given = [*zip(arguments, args), *((a, kwargs.get(a.name)) for a in arguments)]
            is_written = any(a.is_write and type(one) is Tensor for a, one in given)
            if torch.Tag.data_dependent_output in func.tags:  # such as ``item()``
                return func(*_pytree.tree_map_only(Absent, Absent.read, args), **kwargs)
            if is_written:
                raise _read_error(names)
            kwargs = {**kwargs, "device": "meta"} if "device" in kwargs else kwargs

        def elem_of(tensor: Tensor) -> Tensor:
            return present(tensor).to("meta") if is_meta else present(tensor)

        try:
            result = func(
                *_pytree.tree_map_only(Tensor, elem_of, args),
                **_pytree.tree_map_only(Tensor, elem_of, kwargs),
            )
        except RuntimeError as error:  # it has no meta kernel, or one that takes less
            raise _read_error(names) from error
        return _pytree.tree_map_only(Tensor, lambda one: made(one, names, device), result)


class Unsized(Absent):
    """One whose sizes are not known either. A call that returns sizes, or what depends on them (a
    number, a plain tensor such as of ``expand_as``, a tuple of so many tensors), is an error.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        result = torch_private.no_torch_function(func, types, args, kwargs or {})
        has_sizes = isinstance(result, int | tuple | list) and not isinstance(result, bool)
        is_known = isinstance(result, Tensor) and not isinstance(result, Unsized)
        if (has_sizes or is_known) and func not in _SIZELESS:
            names = names_in((args, kwargs))
            raise AbsentError(
                names,
                f"the sizes of what depends on {', '.join(sorted(names))} are not known, and are "
                "read; call flex(...), which computes all",
                is_read=True,
            )
        return result


def present(tensor: Tensor) -> Tensor:
    """Return the tensor itself, of which an ``Absent`` has the values or the sizes."""
    return tensor.elem if isinstance(tensor, Absent) else tensor


def _blank(absent: Absent) -> Tensor:
    return torch.empty_like(absent.elem, device=absent.device)


def _read_error(names: Iterable[str]) -> AbsentError:
    listed = ", ".join(sorted(names))
    return AbsentError(
        names,
        f"what it runs depends on values that it does not have ({listed}): .item(), .tolist(), an "
        "if, or sizes that depend on values",
        is_read=True,
    )


def names_in(tree: Any) -> frozenset[str]:
    """Return what the tensors of a tree stand for or depend on, as far as they are not here."""
    leaves = _pytree.tree_leaves(tree)
    return frozenset(name for leaf in leaves if isinstance(leaf, Absent) for name in leaf.labels)


_PLAIN = (bool, int, float, str, torch.dtype, torch.device)


def without_values(tree: Any) -> Any:
    """Return a tree with absent tensors in place of its own, and of its other leaves the plain
    ones.
    """

    def keep(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return Absent(present(leaf).detach().to("meta"), names_in(leaf), leaf.device)
        return leaf if isinstance(leaf, _PLAIN) else None

    return _pytree.tree_map(keep, tree)


class Placeholder:
    """Makes placeholders for a value of the model.

    Their sizes are those of the example. In a stage that receives a hidden state those that the
    hidden state had, too, are those of the one it has received: tokens ``(rows, length)`` for
    ``(rows, length, width)``.

    Args:
        example: The value on the example: `without_values`.
        hidden: The hidden state that the stage received on the example; None: none.
        is_fixed: Whether it has its sizes in any run, as a parameter.
    """

    def __init__(self, example: Any, hidden: Tensor | None, is_fixed: bool = False) -> None:
        self._example, self._hidden, self._is_fixed = example, hidden, is_fixed

    def __deepcopy__(self, memo: dict[int, Any]) -> Placeholder:
        return self  # torch warns about copies of its specs

    def make(self, hidden: Tensor | None, names: Iterable[str]) -> Any:
        """Return one, in a run of the stage that has received ``hidden``."""

        def absent(example: Tensor) -> Absent:
            sizes, dtype = list(example.shape), example.dtype
            if hidden is not None and self._hidden is not None:
                of_example = list(self._hidden.shape)
                for dim, size in enumerate(() if self._is_fixed else example.shape):
                    if of_example[dim : dim + 1] == [size]:  # its own dim first
                        sizes[dim] = hidden.shape[dim]
                    elif size in of_example:
                        sizes[dim] = hidden.shape[of_example.index(size)]
                dtype = hidden.dtype if dtype == self._hidden.dtype else dtype
            elem = torch.zeros(sizes, dtype=dtype, device="meta")
            return Absent(elem, names, (example if hidden is None else hidden).device)

        return _pytree.tree_map_only(Tensor, absent, self._example)

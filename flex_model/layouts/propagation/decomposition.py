"""Follows an operation that has no rule through its decomposition: torch's own, on meta tensors.

It is decomposed twice, for the shapes of a rank and for those of the full tensors, as the unsharded
program does: ``soft_margin_loss(x, y)`` is ``mean(log1p(exp(-x * y)))`` on both. The parts must be
the same, and get the same numbers, except for sizes, which the rule of a part compares. So a number
that is made of a local size, such as a mean's ``1 / n`` along a split dim, makes a result unknown.

Torch's Python code for it imports sympy or the compiler at its first use, 500 or 900 modules: what
many models run has a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from flex_model.distributed.placement import Placement
from flex_model.integrations.compiled import DispatchMode
from flex_model.integrations.torch_private import decomposition_of, disabled_modes
from flex_model.layouts.propagation.operation import REPLICATED, Operand, Operation, Shape, differ
from flex_model.layouts.propagation.text_forms import Placements, words

_FILLS = {"zeros", "ones", "full", "scalar_tensor", "new_zeros", "new_ones", "new_full"}
# Numbers that rules compare with those of the unsharded program.
_SIZES = words("size shape sizes repeats start end length split_size split_sizes")


@dataclass(frozen=True)
class _Tensor:
    """A tensor in one run of a decomposition, by number: the same in each run."""

    number: int
    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True)
class _Part:
    """An operation that a decomposition ran."""

    op: Any
    arguments: dict[str, Any]
    outputs: tuple[_Tensor, ...]


class _Recorder(DispatchMode):
    """Records the operations that run while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[_Part] = []
        self._known: dict[int, _Tensor] = {}  # by id
        self._kept: list[Tensor] = []
        self._num_tensors = 0

    def add(self, tensor: Tensor) -> _Tensor:
        """Give the tensor a number."""
        made = _Tensor(self._num_tensors, tuple(tensor.shape), tensor.dtype)
        self._num_tensors += 1
        self._known[id(tensor)] = made
        self._kept.append(tensor)
        return made

    def numbered(self, tensor: Tensor) -> _Tensor:
        """Return what stands for a tensor; a constant, which no operation has made, is unknown."""
        return self._known.get(id(tensor)) or self.add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prims":
            with self:
                return func.impl_aten(*args, **kwargs)
        schema = func._schema
        given = dict(zip([argument.name for argument in schema.arguments], args)) | kwargs
        arguments = {
            argument.name: tree_map_only(
                Tensor, self.numbered, given.get(argument.name, argument.default_value)
            )
            for argument in schema.arguments
        }
        result = func(*args, **kwargs)
        if schema.is_mutable:
            self._check_writes(schema, given)
        made = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
        self.parts.append(_Part(func, arguments, tuple(map(self.add, made))))
        return result

    def _check_writes(self, schema: Any, given: dict[str, Any]) -> None:
        """Raise ``NotImplementedError`` for a write that other tensors of the run may see."""
        for argument in schema.arguments:
            written = given.get(argument.name)
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            if not isinstance(written, Tensor):
                raise NotImplementedError
            memory = written.untyped_storage()._cdata
            others = [one for one in self._kept if one is not written]
            if any(one.untyped_storage()._cdata == memory for one in others):
                raise NotImplementedError


def follow(
    operation: Operation, overload: Any, propagate: Callable[[Operation], Placements]
) -> Placements:
    """Return the placements of an operation's outputs, which follow from those of its parts;
    ``propagate`` returns those of a part's outputs.
    """
    unknown: Placements = [None] * len(operation.outputs)
    operands = operation.operands
    if any(operand.placement is None for operand in operands):
        return unknown
    given = [
        _frozen(arguments, operands, [o.shapes[rank] for o in operands])
        for rank, arguments in enumerate(operation.arguments)
    ]
    given.append(_frozen(_full(operation), operands, [o.full_shape for o in operands]))
    runs = [_run(overload, arguments, repr(arguments)) for arguments in given]
    *of_ranks, full = runs
    if any(len(run[0]) != len(full[0]) for run in of_ranks):
        return unknown
    placements: dict[int, Placement | None] = {i: o.placement for i, o in enumerate(operands)}
    for parts in zip(*(run[0] for run in runs)):
        found = _placements_of(parts, placements, operands, propagate)
        for made, placement in zip(parts[-1].outputs, found):
            placements[made.number] = placement
    results = []
    for made, *of_runs in zip(operation.outputs, *(run[1] for run in runs)):
        shapes = tuple(one.shape for one in of_runs[:-1])
        is_made = shapes == made.shapes and of_runs[0].dtype == made.dtype
        is_same = is_made and len({one.number for one in of_runs}) == 1
        results.append(placements[of_runs[-1].number] if is_same else None)
    return results


def _full(operation: Operation) -> dict[str, Any]:
    """Return the arguments of the unsharded program. KeyError if they are not known."""
    found = {}
    for name in operation.arguments[0]:
        values = operation.by_rank(name)
        if name in operation.full_sizes:
            found[name] = _like(operation, name)
        elif name == "N":  # the rows of a group norm's input, which are passed beside it
            found[name] = operation["input"].full_shape[0]
        elif differ(values):
            raise KeyError(name)
        else:
            found[name] = values[0]
        if found[name] is None and values[0] is not None:
            raise KeyError(name)
    return found


def _frozen(arguments: Any, operands: Sequence[Operand], shapes: Sequence[Shape]) -> Any:
    """Return hashable arguments, with these shapes of the operands."""
    of = {id(o): _Tensor(i, shapes[i], o.dtype) for i, o in enumerate(operands)}

    def frozen(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return tuple(map(frozen, value))
        if isinstance(value, str) and value.startswith("torch."):
            return getattr(torch, value.removeprefix("torch."))  # a dtype, as the log has it
        return of.get(id(value), value)

    return tuple((name, frozen(value)) for name, value in arguments.items())


@lru_cache(maxsize=256)
def _run(overload: Any, arguments: Any, text: str) -> tuple[list[_Part], list[_Tensor]]:
    """Run the decomposition; return its parts, and what they made of the operation's outputs;
    ``text``: of the arguments, which tells 1 from 1.0.
    """
    recorder = _Recorder()
    tensors: dict[int, Tensor] = {}

    def tensor_of(value: _Tensor) -> Tensor:
        return tensors[value.number]

    leaves = tree_flatten(arguments)[0]
    with disabled_modes(), torch.inference_mode(False), torch.no_grad():
        for leaf in sorted({x for x in leaves if isinstance(x, _Tensor)}, key=lambda x: x.number):
            tensors[leaf.number] = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
            recorder.add(tensors[leaf.number])
        given = {name: tree_map_only(_Tensor, tensor_of, value) for name, value in arguments}
        named = {a.name: given.pop(a.name) for a in overload._schema.arguments if a.kwarg_only}
        named = {name: "meta" if name == "device" else value for name, value in named.items()}
        with recorder:
            result = decomposition_of(overload)(*given.values(), **named)
    made = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
    return recorder.parts, [recorder.numbered(tensor) for tensor in made]


# ---- One part ------------------------------------------------------------------------------------


def _placements_of(
    parts: Sequence[_Part],
    placements: dict[int, Placement | None],
    operands: Sequence[Operand],
    propagate: Callable[[Operation], Placements],
) -> Placements:
    """Return the placements of a part's outputs; ``parts``: as each rank and, last, the unsharded
    program run it.
    """
    full = parts[-1]
    unknown: Placements = [None] * len(full.outputs)
    operation = _operation_of(parts, placements)
    if operation is None:
        return unknown
    if operation.name in _FILLS or not operation.operands:
        return [_made_of_numbers(operation, full.outputs[0], operands)]
    found = propagate(operation)
    return [
        placement if replace(made, placement=placement).full_shape == expected.shape else None
        for placement, made, expected in zip(found, operation.outputs, full.outputs)
    ]


def _operation_of(
    parts: Sequence[_Part], placements: dict[int, Placement | None]
) -> Operation | None:
    """Return the part as rules see it; None if it is not the same operation in all runs."""
    full = parts[-1]
    if any(part.op is not full.op or len(part.outputs) != len(full.outputs) for part in parts):
        return None
    arguments: list[dict[str, Any]] = [{} for _ in parts]
    sizes = {}
    for name, value in full.arguments.items():
        of_runs = [part.arguments[name] for part in parts]
        leaves, spec = tree_flatten(value)
        flat = [tree_flatten(own) for own in of_runs]
        if any(other != spec for _, other in flat):
            return None
        made: list[Any] = []
        is_same = True
        for column in zip(*(own for own, _ in flat)):
            if isinstance(column[-1], _Tensor):
                if len({one.number for one in column if isinstance(one, _Tensor)}) > 1:
                    return None
                shapes = tuple(one.shape for one in column[:-1])
                placement = placements.get(column[-1].number)
                made.append([Operand(shapes, column[-1].dtype, placement)] * len(column))
            else:
                is_same &= not differ(column)
                made.append(column)
        if name in _SIZES and all(isinstance(leaf, int) for leaf in leaves):
            sizes[name] = leaves
        elif not is_same:
            return None
        for i, own in enumerate(arguments):
            own[name] = tree_unflatten([column[i] for column in made], spec)
    outputs = [
        Operand(tuple(one.shape for one in column[:-1]), column[-1].dtype)
        for column in zip(*(part.outputs for part in parts))
    ]
    schema = full.op._schema
    name = schema.name.removeprefix("aten::")
    name = name.removesuffix("_") if schema.is_mutable else name
    return Operation(
        name,
        tuple(arguments[:-1]),
        tuple(outputs),
        schema.overload_name,
        sizes,
        tuple(full.op.tags),
    )


def _made_of_numbers(
    operation: Operation, full: _Tensor, operands: Sequence[Operand]
) -> Placement | None:
    """Return the placement of a tensor that is made of numbers: the same ones in all runs, or one
    number in all places, which may be split as an operand is.
    """
    (made,), name = operation.outputs, operation.name
    if name.removeprefix("new_").startswith("empty"):
        return None
    if torch.Tag.nondeterministic_seeded in operation.tags:
        return None
    if not any(differ([*operation.by_rank(n), _like(operation, n)]) for n in operation.full_sizes):
        return REPLICATED
    for shard in [operand.shard for operand in operands if operand.shard is not None]:
        for dim in range(made.ndim):
            placed = replace(made, placement=replace(shard, dim=dim))
            if name in _FILLS and placed.full_shape == full.shape:
                return placed.placement
    return None


def _like(operation: Operation, name: str) -> Any:
    """Return the sizes that the unsharded program passes, in the form of the ranks' argument."""
    sizes = list(operation.full_sizes[name])
    return sizes if isinstance(operation.by_rank(name)[0], (list, tuple)) else sizes[0]

"""Finds the known placements of tensors before a forward begins: weights, buffers and inputs."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from flex_model import _C
from flex_model.distributed.mesh import Mesh
from flex_model.distributed.placement import Placement, Replicate, Shape, Shard
from flex_model.integrations import dtensor, fsdp1, layers, quantized, refused
from flex_model.integrations.keyword_arguments import positional_names
from flex_model.layouts.memory_map import Reference, reference_to, version_of
from flex_model.layouts.module_buffers import Buffers
from flex_model.layouts.placement_encoding import decode, encode
from flex_model.layouts.statements import Statement, Statements, describe
from flex_model.layouts.tensor_values import TensorValues
from flex_model.names import clean, own_tensor

AXES = ("dp", "tp")
Placements = tuple[Any, Any]  # encoded, along dp and tp
Sizes = tuple[int | None, ...] | None


# A tensor; the weight's name, its module, its name in the module, and the weight itself: for a
# DTensor's shard the DTensor, for a part of a quantised weight the weight.
_Weight = tuple[Reference, str, nn.Module, str, Reference]


class Constants:
    """Tensors that plain attributes of modules held before the first forward, such as the
    frequencies of a rotary embedding: they are treated as buffers until they are written to.
    """

    def __init__(self, root: nn.Module) -> None:
        self._versions = {
            id(tensor): (reference_to(tensor), version_of(tensor))
            for module in root.modules()
            for value in attributes(module).values()
            for tensor in tensors_in(value)
        }

    def __contains__(self, tensor: Tensor) -> bool:
        known = self._versions.get(id(tensor))
        return known is not None and known[0]() is tensor and known[1] == version_of(tensor)


_OF_TORCH = frozenset(vars(nn.Module()))  # such as parameters and buffers


def attributes(module: nn.Module) -> dict[str, Any]:
    """Return the module's plain attributes."""
    return {name: value for name, value in vars(module).items() if name not in _OF_TORCH}


def tensors_in(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """Yield the tensors in an attribute, except for parameters, which DDP lists and which have
    entries of their own.
    """
    if isinstance(value, Tensor):
        if not isinstance(value, nn.Parameter):
            yield value
    elif depth and isinstance(value, (list, tuple, deque, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item, depth - 1)


class Weights:
    """Finds the placements of a model's parameters and buffers, at first use.

    Along dp they are the same on all ranks (DDP, FSDP). Along tp a DTensor states its placement,
    and layers and the user may state what they split; if any weights of a model are stated to be
    split, its other weights are the same on all ranks; else nothing is known of them.
    """

    def __init__(
        self,
        root: nn.Module,
        mesh: Mesh,
        statements: Statements,
        constants: Constants | None = None,
        buffers: Buffers | None = None,
    ) -> None:
        refused.check_adapters(root, mesh)  # they may be added after the model was wrapped
        self._root, self._mesh, self._statements = root, mesh, statements
        self._constants, self._buffers = constants, buffers
        self._is_stated = layers.states_tensor_parallelism(root, mesh)
        self._has_fsdp1 = any(fsdp1.is_fsdp1(module) for module in root.modules())
        self._found: dict[int, _Weight] = {}
        self._dtensors: dict[str, Reference] = {}
        self._scan()

    def _scan(self) -> None:
        """Find the tensors that are weights now: FSDP replaces them between forwards."""
        self._found = {}
        for name, module in self._root.named_modules():
            self.enter(module, clean(self._root, name))

    def enter(self, module: nn.Module, name: str) -> None:
        """Register the module's own weights, as they are now."""
        prefix = f"{name}." if name else ""
        held = {
            leaf if tensor is value else f"{leaf}.{i}": tensor
            for leaf, value in attributes(module).items()
            for i, tensor in enumerate(tensors_in(value))
        }
        tables: list[Mapping[str, Any]] = [module._parameters, module._buffers, held]
        for table in tables:
            for leaf, tensor in table.items():
                if not isinstance(tensor, Tensor) or self._weight(tensor) is not None:
                    continue
                if table is tables[2] and not self._is_weight(tensor):
                    continue
                weight = self._dtensor_of(prefix + leaf, tensor)
                of_weight = (prefix + leaf, module, leaf, reference_to(weight))
                self._found[id(tensor)] = (reference_to(tensor), *of_weight)
                if dtensor.is_dtensor(tensor):  # frameworks compute with its shard itself
                    self._dtensors[prefix + leaf] = reference_to(tensor)
                    local: Any = tensor._local_tensor  # type: ignore[attr-defined]
                    self._found[id(local)] = (reference_to(local), *of_weight)
                elif table is tables[0]:
                    for part_name, part in quantized.parts(module, leaf, tensor):
                        of_part = (f"{prefix}{leaf}.{part_name}", *of_weight[1:])
                        self._found[id(part)] = (reference_to(part), *of_part)

    def _dtensor_of(self, name: str, tensor: Tensor) -> Tensor:
        """Return the weight of this name whose shard a tensor is: transformers computes with the
        shards of DTensors in their place.
        """
        weight = self._dtensors.get(name, lambda: None)()
        if weight is None or dtensor.is_dtensor(tensor):
            return tensor
        local: Any = weight._local_tensor  # type: ignore[attr-defined]
        return weight if TensorValues.are_same(local, tensor) else tensor

    def _weight(self, tensor: Tensor) -> _Weight | None:
        found = self._found.get(id(tensor))
        return found if found is not None and found[0]() is tensor else None

    def _in_place_of(self, parameter: nn.Parameter) -> _Weight | None:
        """Return the weight that has this parameter's memory: PEFT makes a new parameter of it
        whenever a module's submodules are listed.
        """
        for found in self._found.values():
            tensor = found[0]()
            if tensor is not None and TensorValues.are_same(tensor, parameter):
                return found
        return None

    def _is_weight(self, tensor: Tensor) -> bool:
        """Whether a plain attribute is a weight: FSDP1's views of a flattened parameter are."""
        return self._has_fsdp1 or (self._constants is not None and tensor in self._constants)

    def source(self, tensor: Tensor) -> tuple[str, Placements, Sizes] | None:
        """Return the name and the placements of a weight, and the full sizes that its layer states
        if those imply the placement; None for other tensors.
        """
        found = self._weight(tensor)
        if found is None and isinstance(tensor, nn.Parameter):
            found = self._in_place_of(tensor)
            if found is None:
                self._scan()
                found = self._weight(tensor) or self._in_place_of(tensor)
        if found is None:
            return None
        own, name, module, leaf, of_weight = found
        weight = of_weight()
        if weight is None:
            return None
        if own() is not weight and not dtensor.is_dtensor(weight):  # a part: whole if that is
            (dp, tp), _ = self._placements(name, module, leaf, weight)
            whole = encode(Replicate())
            return name, (dp if dp == whole else None, tp if tp == whole else None), None
        if self._buffers is not None and leaf in module._buffers:
            state = self._buffers.state(name, weight)
            if state is None:
                return None  # its placement follows from what made it
            if state.pair is not None:
                return self._written_buffer(name, module, weight, state.pair)
        return name, *self._placements(name, module, leaf, weight)

    def _written_buffer(
        self, name: str, module: nn.Module, buffer: Tensor, pair: Any
    ) -> tuple[str, Placements, Sizes]:
        """Return the source of a buffer that was written to: its proven placements, completed by
        statements.
        """
        statement = self._statements.of_parameter(name, module)
        stated = (None, None) if statement is None else (statement.dp, statement.tp)
        own = stated_by_dtensor(buffer, self._mesh) or (None, None)
        dp, tp = (a or encode(b) or encode(c) for a, b, c in zip(own, pair, stated))
        return f"{name}, as it was written", (dp, tp), None

    def _placements(
        self, name: str, module: nn.Module, leaf: str, tensor: Tensor
    ) -> tuple[Placements, Sizes]:
        statement = self._statements.of_parameter(name, module)
        dp, tp = self._stated_by_model(module, leaf, tensor)
        if dtensor.is_dtensor(tensor) and stated_by_dtensor(tensor, self._mesh) is None:
            return (None, None), None
        if statement is not None:
            dp, tp = dp or encode(statement.dp), tp or encode(statement.tp)
        sizes = None if statement is None else statement.sizes
        if self._mesh.tp_size == 1:
            tp = encode(Replicate())
        elif tp is None and not self._states_along_tp(tensor, leaf):
            if layers.dims_smaller_than_stated(module, leaf, tensor, self._mesh):
                share = layers.share_by_sizes(module, leaf, tensor, self._mesh)
                tp, sizes = (None, None) if share is None else (encode(share[0]), share[1])
            elif self._is_stated:
                tp = encode(layers.placement_without_statement(tensor, "tp"))
        return (dp or encode(layers.placement_without_statement(tensor, "dp")), tp), sizes

    def _stated_by_model(self, module: nn.Module, leaf: str, tensor: Tensor) -> Placements:
        """Return the placements that a DTensor or the layer's marks state."""
        dp, tp = stated_by_dtensor(tensor, self._mesh) or (None, None)
        if tp is not None:
            tp = encode(layers.as_computed_with(module, leaf, tensor, decode(tp)))
        if self._mesh.tp_size > 1 and not self._states_along_tp(tensor, leaf):
            tp = encode(layers.marked_placement(module, leaf, tensor, self._mesh))
        return dp, tp

    def _states_along_tp(self, tensor: Tensor, leaf: str) -> bool:
        """Whether the tensor itself states a placement along tp, even if it is none of ours."""
        try:
            return "tp" in dtensor.axis_names(tensor, self._mesh, leaf)
        except ValueError:  # a mesh of its own, such as one of experts
            return True

    def refuted(self, statement: Statement) -> str:
        """Return how the model contradicts a statement about parameters; empty if it does not."""
        for name, module, leaf in self._statements.targets(statement):
            tensor = own_tensor(module, leaf)
            own = dict(zip(AXES, self._stated_by_model(module, leaf, tensor)))
            for axis, stated in statement.placed.items():
                if own[axis] is not None and encode(stated) != own[axis]:
                    return (
                        f"{statement.describe()}: {name} is {describe(stated)} along {axis} by "
                        f"this statement, but its layer states that it is "
                        f"{describe(decode(own[axis]))}; leave the statement out"  # type: ignore[arg-type]
                    )
        return ""


def stated_by_dtensor(tensor: Any, mesh: Mesh) -> Placements | None:
    """Return the placements that a DTensor states, along the axes of its mesh; None for other
    tensors.
    """
    if not dtensor.is_dtensor(tensor):
        return None
    try:
        layout = dtensor.layout(tensor, mesh, "")
        axes = dtensor.axis_names(tensor, mesh, "")
    except ValueError:
        return None
    placed = zip(AXES, layout.placements_of_proofs(mesh.dp_size, mesh.tp_size))
    dp, tp = (encode(one) if axis in axes else None for axis, one in placed)
    return dp, tp


# ---- Inputs ------------------------------------------------------------------------------------


_LEAVES = (Tensor, int, float, str, bytes, type(None))


class Argument(NamedTuple):
    """A tensor in a forward's arguments.

    Attributes:
        is_state: Whether an object of the user, such as a cache, holds it.
        is_kept: Whether it is of an earlier forward, which has placed it.
        is_listed: Whether the argument is a list.
        placed: Along dp, as an earlier forward has proven it.
    """

    name: str
    tensor: Tensor
    is_state: bool
    is_kept: bool = False
    is_listed: bool = False
    placed: Placement | None = None


def named_inputs(module: nn.Module, args: Any, kwargs: Any) -> list[Argument]:
    """Return every tensor in a forward's arguments, with the name of its argument. First those that
    hooks see, in their order.
    """
    names = _argument_names(module, len(args)) if args else ()
    found, inside = [], []
    for name, value in [*zip(names, args), *kwargs.items()]:
        if isinstance(value, Tensor):
            found.append(Argument(name, value, False))
            continue
        passed = {id(tensor) for tensor in _passed(value)}
        flat = _C.flatten(value)[0]
        is_listed = isinstance(value, list)
        found += [
            Argument(name, tensor, id(tensor) not in passed, is_listed=is_listed) for tensor in flat
        ]
        if states_of(value):
            seen = {id(tensor) for tensor in flat}
            of_value = (one for one in tensors_of(value) if id(one) not in seen)
            inside += [Argument(name, one, True) for one in of_value]
    return found + inside


def check_without_tensors(batch_dim: BatchDim, module: nn.Module, args: Any, kwargs: Any) -> None:
    """Check the arguments of a forward that is passed no tensor with rows, along dp.

    Raises:
        ValueError: a list, a text or an array, which may hold rows that can't be seen.
    """
    names = _argument_names(module, len(args)) if args else ()
    named = batch_dim if isinstance(batch_dim, Mapping) else {}
    for name, value in [*zip(names, args), *kwargs.items()]:
        if _may_hold_rows(value) and named.get(name, 0) is not None:
            raise ValueError(
                f"input {name!r} is a {type(value).__name__}, whose rows can't be followed; pass "
                "tensors, or give each data-parallel rank hooks of its own with "
                f"FlexModel(dp_batch='local'), or state with batch_dim={ {**named, name: None} } "
                "that all rows share it"
            )


def _may_hold_rows(value: Any, is_item: bool = False) -> bool:
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Mapping)):
        return any(
            _may_hold_rows(getattr(value, field.name)) for field in dataclasses.fields(value)
        )
    if isinstance(value, (list, tuple, Mapping)):
        items = value.values() if isinstance(value, Mapping) else value
        return any(_may_hold_rows(item, is_item=True) for item in items)
    if isinstance(value, str) or type(value).__module__ == "numpy":
        return is_item or bool(len(value) if isinstance(value, str) else getattr(value, "ndim", 0))
    return is_item and value is not None and not isinstance(value, Tensor)


def _passed(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in lists, tuples, mappings and dataclasses, which only hold what was
    passed.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Mapping)):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _passed(item)


def leaves(value: Any, depth: int = 8) -> Iterator[Any]:
    """Yield the tensors and plain values in any object, such as a cache, from its attributes and
    their items, to a limited depth: that of a cache of an encoder and a decoder, which has two.
    """
    if isinstance(value, _LEAVES):
        yield value
    elif depth == 0 or isinstance(value, (type, nn.Module)) or callable(value):
        return
    elif isinstance(value, (list, tuple, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from leaves(item, depth - 1)
    else:
        yield from leaves(getattr(value, "__dict__", {}), depth - 1)


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in any object, as ``leaves`` finds them."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def states_of(value: Any) -> list[Any]:
    """Return the objects of the user in arguments, or in an output: those that a forward may
    change, such as caches.
    """
    if isinstance(value, _LEAVES):
        return []
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [state for item in value for state in states_of(item)]
    return [value]


def _argument_names(root: nn.Module, count: int) -> list[str]:
    names = positional_names(_unwrapped(root).forward)[0][:count]
    return [*names, *(f"argument {i}" for i in range(len(names), count))]


def _unwrapped(root: nn.Module) -> nn.Module:
    """Return the module that the user wrote, inside DDP, FSDP1 or a compiled module."""
    inner = next((one for name, one in root._modules.items() if not clean(root, name)), None)
    return root if inner is None else _unwrapped(inner)


BatchDim = int | Mapping[str, int | None]


def batch_dim_of(batch_dim: BatchDim, name: str) -> int | None:
    """Return the dim of an argument that holds rows of the batch; None for none."""
    if isinstance(batch_dim, int):
        return batch_dim
    return batch_dim.get(name, 0)


def check_batch_dim(batch_dim: Any) -> BatchDim:
    """Return ``batch_dim``. TypeError if it is neither an int nor a dict of ints and None by
    argument name.
    """
    values = batch_dim.values() if isinstance(batch_dim, Mapping) else [batch_dim]
    for value in values:
        is_dim = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if not is_dim and not (isinstance(batch_dim, Mapping) and value is None):
            raise TypeError(
                "FlexModel: batch_dim must be an int of at least 0, or a dict of them (None for "
                f"an argument that holds no rows) by argument name; got {batch_dim!r}"
            )
    return batch_dim


#: Arguments of transformers that hold rows, by their number of dims; so do those with "label".
_HOLD_ROWS = {
    **dict.fromkeys(("start_positions", "end_positions"), 1),
    **dict.fromkeys(("input_ids", "attention_mask", "position_ids", "token_type_ids"), 2),
}


def inputs_along_dp(
    batch_dim: BatchDim,
    inputs: Sequence[tuple[str, Sequence[Shape], bool, bool, bool, Placement | None]],
) -> list[Placement | None]:
    """Return the placements of a forward's inputs along dp, as ``batch_dim`` states them.

    Args:
        inputs: By tensor, its name, its shapes on all data-parallel ranks of a line, whether these
            hold the same values, whether its size says what it holds, whether it is in a list, and
            its placement, where it is proven or stated.

    Raises:
        ValueError: it is not known whether a tensor holds rows; with the call that states it.
    """
    found: list[Placement | None] = []
    rows: list[int] | None = None
    named = dict(batch_dim) if isinstance(batch_dim, Mapping) else {}
    doubt, is_sure, has_other_rows = "", False, False
    for name, shapes, is_equal, is_clear, is_listed, placed in inputs:
        is_stated = is_clear or name in named or placed is not None
        dim, shape = batch_dim_of(batch_dim, name), shapes[0]
        if placed is not None:
            dim = placed.dim if isinstance(placed, Shard) else None
        own = None if dim is None or len(shape) <= dim else [other[dim] for other in shapes]
        if rows is None and own and is_listed and not is_stated:
            raise ValueError(_is_list(name, named))
        rows = rows or own  # those of the first input that has some
        if placed is not None:
            found.append(placed)
        elif dim is None or own is None or own != rows:
            found.append(Replicate() if is_equal else None)
            has_other_rows |= own is not None and not (is_equal or is_stated)
        else:
            found.append(Shard(dim))
            if is_equal and not is_stated:
                text = _ambiguous(name, shape, dim, batch_dim, named)
                if _is_ambiguous(name, shape, dim):
                    raise ValueError(text)
                doubt = doubt or text
        is_sure |= isinstance(found[-1], Shard) and (is_stated or not is_equal)
    # What only equal arguments say about the rows, one whose values differ contradicts.
    if doubt and has_other_rows and not is_sure:
        raise ValueError(doubt)
    return found


def dims_like_rows(
    batch_dim: BatchDim, name: str, shape: Shape, num_rows: Sequence[int]
) -> tuple[int, ...]:
    """Return the dims of an input with the same values on all data-parallel ranks that have as many
    elements as each of these has rows, though not that of ``batch_dim``: ``(layers, rows, width)``.
    """
    is_known = isinstance(batch_dim, Mapping) and name in batch_dim
    if is_known or _HOLD_ROWS.get(name) == len(shape):
        return ()
    return tuple(dim for dim, size in enumerate(shape) if {size} == set(num_rows))


def of_own_rows(
    batch_dim: BatchDim, name: str, shape: Shape, num_rows: int | None
) -> Placement | None:
    """Return the placement along dp of an input that only some data-parallel ranks were given, as
    of one whose values differ; None: it is not known.

    Args:
        shape, num_rows: This rank's. None: no input that all ranks were given has rows.
    """
    dim = batch_dim_of(batch_dim, name)
    return None if dim is None or shape[dim : dim + 1] != (num_rows,) else Shard(dim)


def _is_ambiguous(name: str, shape: Shape, dim: int) -> bool:
    if "label" in name or _HOLD_ROWS.get(name) == len(shape):
        return False
    return len(shape) == 1 or shape.count(shape[dim]) > 1


def _is_list(name: str, others: Mapping[str, int | None]) -> str:
    return (
        f"the input {name!r} is a list, and whether each of its tensors holds rows of the batch or "
        "is one row, such as an image, is not known; if each holds rows, say so with "
        f'FlexModel(batch_dim={ {**others, name: 0} }), else FlexModel(dp_batch="local") passes '
        "hooks each data-parallel rank's own"
    )


def _ambiguous(
    name: str, shape: Shape, dim: int, batch_dim: BatchDim, others: Mapping[str, int | None]
) -> str:
    default = "" if batch_dim == 0 or others else f" (others: their names with {batch_dim})"
    rows, shared = ({**others, name: value} for value in (dim, None))
    return (
        f"the input {name!r} has the same values of shape {shape} on all data-parallel ranks, so "
        "it may hold equal rows of the batch or be shared by all rows; say which with "
        f"FlexModel(batch_dim={rows}) or FlexModel(batch_dim={shared}){default}"
    )

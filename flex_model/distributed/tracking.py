"""Follow the layouts of tensors through one forward of a sharded model, operation by operation.

It begins with what is known: the run's inputs (equal on tensor-parallel ranks, rows of the batch on
data-parallel ones), parameters (DTensor placements, what layers say of their own), and what
collectives leave behind. From there each operation passes placements on (``propagation``), so that
a tensor anywhere inside, between a column- and a row-parallel layer or in the midst of attention,
has a layout without any table of a framework's private names.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from flex_model import _C
from flex_model.distributed import propagation
from flex_model.distributed.inference import AXES, UNKNOWN, Splits
from flex_model.distributed.layout import Replicate, Shard, ShardLayout
from flex_model.distributed.mesh import Mesh
from flex_model.distributed.propagation import AxisPlace, Split
from flex_model.integrations import dtensor
from flex_model.layouts import memory_map
from flex_model.layouts.follow import group_of

_REPLICATED: Splits = (Replicate(), Replicate())
_COLLECTIVES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional"}


_entered: list[LayoutTracker] = []  # of all FlexModels of one model


class LayoutTracker(TorchDispatchMode):
    """While it is entered, knows the layouts of the tensors that operations make.

    Local: no collective, but for what ``seeds`` exchanged before. A tensor is known by its storage
    and its place in it, since autograd makes new tensor objects for views.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self._is_paused = False
        self._mesh = mesh
        self._places = [
            AxisPlace(mesh.coordinates["dp"], mesh.dp_size),
            AxisPlace(mesh.coordinates["tp"], mesh.tp_size),
        ]
        self._storages: dict[int, tuple[StorageWeakRef, dict[Any, Splits]]] = {}
        self._parameters: dict[int, tuple[weakref.ref[Tensor], Splits]] = {}
        self._axes_of_groups: dict[Any, tuple[str, ...]] = {}
        self._pieces = _Pieces()
        self._received: set[Any] = set()  # identities of what collectives wrote

    def __enter__(self) -> LayoutTracker:
        _entered.append(self)
        return super().__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        _entered.remove(self)
        super().__exit__(*exc_info)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside is no part of the model, for no tracker."""
        trackers = {self, *_entered}
        were_paused = [(tracker, tracker._is_paused) for tracker in trackers]
        for tracker in trackers:
            tracker._is_paused = True
        try:
            yield
        finally:
            for tracker, was_paused in were_paused:
                tracker._is_paused = was_paused

    # What is known.

    def note(self, tensor: Tensor, splits: Splits) -> None:
        """Remember how a tensor is split; a DTensor tells it itself."""
        tensor, told = self._plain(tensor)
        storage = memory_map.storage_of(tensor)
        if storage is None:
            return
        key = storage._cdata
        entry = self._storages.get(key)
        if entry is None:
            entry = self._storages[key] = (StorageWeakRef(storage), {})
            if len(self._storages) % 4096 == 0:
                self._sweep()
        entry[1][memory_map.geometry(tensor)] = _either(told, splits)

    def note_layout(self, tensor: Tensor, layout: ShardLayout) -> None:
        """Remember a layout that was settled. Of other FlexModels, those with these ranks do, too;
        to the rest nothing is known of it.
        """
        for tracker in {self, *_entered}:
            is_known = tracker._mesh == self._mesh
            tracker.note(tensor, (layout.dp, layout.tp) if is_known else UNKNOWN)

    def note_parameter(self, parameter: Tensor, splits: Splits) -> None:
        """As ``note``, for a parameter or buffer, whose storage may be exchanged (FSDP)."""
        self._parameters[id(parameter)] = (weakref.ref(parameter), splits)
        self.note(parameter, splits)

    def splits(self, tensor: Tensor, is_operand: bool = False) -> Splits:
        """How the tensor is split along dp and tp, as far as it is known; ``is_operand``: for an
        operation on it.
        """
        plain, told = self._plain(tensor)
        parameter, known = self._parameters.get(id(tensor), (None, UNKNOWN))
        if parameter is None or parameter() is not tensor:
            known = UNKNOWN
            memory = memory_map.storage_of(plain)
            storage = None if memory is None else self._storages.get(memory._cdata)
            if isinstance(tensor, nn.Parameter):  # FSDP makes new ones when it unshards
                known = (Replicate(), None if self._mesh.tp_size > 1 else Replicate())
            elif storage is not None:
                known = storage[1].get(memory_map.geometry(plain), UNKNOWN)
            elif memory is not None and plain.dim() == 0:
                known = _REPLICATED
            elif memory is not None and is_operand:
                # Kept from before, as positions are: the same on tensor-parallel ranks, or split
                # like what it is used with. That ranks hold the same is not believed unseen.
                known = (None, Replicate())
        return _either(told, known)

    def _plain(self, tensor: Any) -> tuple[Tensor, Splits]:
        """The plain tensor inside, and what a DTensor tells of the axes that its mesh has."""
        told = UNKNOWN
        if dtensor.is_dtensor(tensor):
            try:
                layout = dtensor.layout(tensor, self._mesh, "", batch_on_dp=False)
                axes = dtensor.axis_names(tensor, self._mesh, "")
            except ValueError:
                axes = set()
            if axes:
                told = (
                    layout.dp if "dp" in axes else None,
                    layout.tp if "tp" in axes else None,
                )
            tensor = tensor._local_tensor
        return getattr(tensor, "elem", tensor), told

    def _sweep(self) -> None:
        gone = {key for key, (ref, _) in self._storages.items() if ref.expired()}
        self._pieces.forget(gone)
        self._received = {key for key in self._received if key[0] not in gone}
        for key in gone:
            del self._storages[key]

    # Following operations.

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if func.namespace == "profiler":
            return result
        if func.namespace in _COLLECTIVES:
            self._collective(func, args, kwargs, result)
            return result
        outputs = written_by(func, args, kwargs)
        in_place = bool(outputs)
        if not in_place:
            outputs = [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor)]
        if outputs:
            self._follow(func, args, kwargs, outputs, in_place)
            self._pieces.follow(func, args, outputs, self)
        return result

    def _follow(
        self, func: Any, args: Any, kwargs: Any, outputs: list[Tensor], in_place: bool
    ) -> None:
        known: dict[int, Splits] = {}

        def splits(tensor: Tensor) -> Splits:
            found = known.get(id(tensor))
            if found is None:
                found = known[id(tensor)] = self.splits(tensor, is_operand=True)
            return found

        by_axis: list[list[Split]] = []
        for i in range(2):
            if self._places[i].size == 1:
                by_axis.append([Replicate()] * len(outputs))
            else:

                def split(tensor: Tensor, i: int = i) -> Split:
                    return splits(tensor)[i]

                place = self._places[i]
                by_axis.append(propagation.after(func, args, kwargs, outputs, split, place))
        for output, dp, tp in zip(outputs, *by_axis):
            if (
                in_place
                and None in (dp, tp)
                and _identity(self._plain(output)[0]) in self._received
            ):
                continue  # gloo's own copy into the result, when it is waited for
            if in_place:
                self._note_in_place(output, (dp, tp))
            else:
                self.note(output, (dp, tp))

    def _note_in_place(self, tensor: Tensor, splits: Splits) -> None:
        """Values were written: what else shows the same memory is split as they are, where it has a
        dim of the same stride, and else no longer known.
        """
        self.note(tensor, splits)
        tensor, _ = self._plain(tensor)
        storage = memory_map.storage_of(tensor)
        if storage is None:
            return
        views = self._storages[storage._cdata][1]
        own = memory_map.geometry(tensor)
        for geometry in [key for key in views if key != own]:
            before = views[geometry]
            views[geometry] = tuple(  # type: ignore[assignment]
                _seen_through(own, geometry, new, old) for new, old in zip(splits, before)
            )

    def _collective(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """What ranks of an axis have after talking: the same, or the parts of a sum."""
        name = func._schema.name.partition("::")[2]
        axes = self._axes_of(args, kwargs)
        given = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor)]
        if name in ("wait_tensor", "_wrap_tensor_autograd"):
            for output in made:
                self.note(output, self.splits(given[0]))
            return
        for output in made:
            source = given[-1] if "gather" in name or "scatter" in name else output
            if not name.endswith("_"):
                source = given[0]
            splits = self._after_collective(name, axes, self.splits(source))
            if "reduce_scatter" in name:
                splits = self._pieces.after_reduce_scatter(source, axes, splits)
            self.note(output, splits)
            self._received.add(_identity(self._plain(output)[0]))

    def _after_collective(self, name: str, axes: tuple[str, ...], source: Splits) -> Splits:
        splits = list(source)
        for i, axis in enumerate(AXES):
            if axis not in axes:
                # Gathered or split along another axis: whole values stay as they are.
                if "reduce_scatter" in name or "gather" in name:
                    splits[i] = splits[i] if splits[i] == Replicate() else self._kept(splits[i])
                continue
            if name == "reduce_scatter_":  # any list of parts
                splits[i] = None
            elif "reduce_scatter" in name:
                splits[i] = Shard(0)
            elif "reduce" in name or "broadcast" in name or "gather" in name:
                splits[i] = Replicate()
            else:
                splits[i] = None
        if not axes:
            return UNKNOWN
        return splits[0], splits[1]

    @staticmethod
    def _kept(split: Split) -> Split:
        """Along an axis that did not talk, with rows from others put before and after: only a split
        of another dim than the first is what it was.
        """
        shard = split if isinstance(split, Shard) else None
        return shard if shard is not None and shard.dim != 0 else None

    def _axes_of(self, args: Any, kwargs: Any) -> tuple[str, ...]:
        """The axes that the collective's group runs along; none if it is no group of ours."""
        for leaf in tree_iter((args, kwargs)):
            if isinstance(leaf, (str, torch.ScriptObject)):
                group = group_of(leaf)
                if group is not None:
                    return self._axes_of_ranks(tuple(dist.get_process_group_ranks(group)))
        return ()

    def _axes_of_ranks(self, ranks: tuple[int, ...]) -> tuple[str, ...]:
        found = self._axes_of_groups.get(ranks)
        if found is None:
            mesh, found = self._mesh, ()
            for axes in (("tp",), ("dp",), ("dp", "tp")):
                if {mesh.grid[place] for place in mesh.members(axes)} == set(ranks):
                    found = axes
                    break
            self._axes_of_groups[ranks] = found
        return found


def _either(told: Splits, known: Splits) -> Splits:
    return known[0] if told[0] is None else told[0], known[1] if told[1] is None else told[1]


class _Pieces:
    """Tensors that were cut along a dim, whose pieces were then joined along the first: what
    reduces and scatters along another dim than the first does so.
    """

    def __init__(self) -> None:
        self._cut: dict[Any, tuple[Any, int, int, int]] = {}  # of which tensor, dim, place, count
        self._joined: dict[Any, tuple[int, Splits] | None] = {}  # dim; None: of other tensors

    def follow(self, func: Any, args: Any, outputs: list[Tensor], tracker: LayoutTracker) -> None:
        name = func._schema.name
        if name in ("aten::split", "aten::split_with_sizes"):
            dim = (args[2] if len(args) > 2 else 0) % args[0].dim()
            source = (_identity(args[0]), tracker.splits(args[0]))
            for i, output in enumerate(outputs):
                self._cut[_identity(output)] = (source, dim, i, len(outputs))
        elif name == "aten::cat":
            found = [self._cut.get(_identity(piece)) for piece in args[0]]
            first = found[0]
            joined = None
            if (
                first is not None
                and found == [(first[0], first[1], i, len(found)) for i in range(len(found))]
                and first[3] == len(found)
            ):
                joined = (first[1], first[0][1])
            self._joined[_identity(outputs[0])] = joined

    def after_reduce_scatter(self, source: Tensor, axes: tuple[str, ...], splits: Splits) -> Splits:
        """``splits`` if the source was no such tensor; else along the dim that had been cut."""
        if _identity(source) not in self._joined:
            return splits
        joined = self._joined[_identity(source)]
        if joined is None:
            return UNKNOWN
        dim, before = joined
        dp, tp = (Shard(dim) if axis in axes else split for axis, split in zip(AXES, before))
        return dp, tp

    def forget(self, storages: set[int]) -> None:
        """These storages are gone."""
        for table in (self._cut, self._joined):
            for key in [key for key in table if key[0] in storages]:
                del table[key]


def _identity(tensor: Tensor) -> Any:
    storage = memory_map.storage_of(tensor)
    return (0, None) if storage is None else (storage._cdata, memory_map.geometry(tensor))


def _seen_through(written: Any, other: Any, new: Split, old: Split) -> Split:
    if new == old:
        return old
    if not isinstance(new, Shard):
        return None
    stride = written[2][new.dim]
    dims = [
        dim
        for dim in range(len(other[1]))
        if other[2][dim] == stride and other[1][dim] == written[1][new.dim]
    ]
    if len(dims) != 1 or new.parts > 1:
        return None
    seen = Shard(dims[0], pieces=new.pieces, stride=new.stride)
    return seen if old in (seen, Replicate()) else None


def written_by(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that the operation writes to."""
    found: list[Tensor] = []
    if not func._schema.is_mutable:
        return found
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_iter(value) if isinstance(leaf, Tensor)]
    return found


def tensors_of(values: Any) -> Iterator[Tensor]:
    """The tensors in a run's arguments, in order."""
    return iter(_C.flatten(values)[0])


def named_weights(root: nn.Module) -> Iterable[tuple[nn.Module, str, Tensor]]:
    """Every parameter, buffer and other tensor of the modules, with the module and its name
    there.
    """
    for module in root.modules():
        for table in (module._parameters, module._buffers, vars(module)):
            for name, value in table.items():
                if isinstance(value, Tensor):
                    yield module, name, value

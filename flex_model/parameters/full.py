"""Reads parameters and their gradients in full, and writes full values to the shards."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flex_model.distributed import values
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.gather import TensorSpec
from flex_model.distributed.header import Header, site_hash
from flex_model.distributed.picked import Pick
from flex_model.distributed.placement import Placement, Replicate, Shape, Shard, ShardLayout
from flex_model.errors import HookError, agreed, check_type
from flex_model.hooks.registration import SPARSE_GRADIENT
from flex_model.integrations import dtensor, fsdp1, fsdp2, layers, offload, quantized
from flex_model.layouts import resolve
from flex_model.layouts.expected_shape import check_expected_shape
from flex_model.layouts.obstacle import Obstacle
from flex_model.layouts.replicas import PendingReplica
from flex_model.layouts.statements import ParameterSources, Site, Statements
from flex_model.names import clean, find_parameter, first_name
from flex_model.records.records import owned_copy
from flex_model.selection import Select
from flex_model.selection.selectors import Selector, numbers, parse, show_exactly

ExpectedShape = Sequence[int | None] | None
_Use = Literal["values", "raw", "write"]  # what for a parameter that may be packed is found
_CPU = torch.device("cpu")
_OF_EXPERTS = Obstacle("experts, of which each rank has others by this name")


@dataclass(frozen=True)
class _Found:
    """A parameter, and the tensor with its values: itself, or where accelerate offloads it."""

    full_name: str
    module: nn.Module
    parameter: Tensor
    kept: Tensor

    @property
    def leaf_name(self) -> str:
        return self.full_name.rpartition(".")[2]

    @property
    def gradient(self) -> Tensor | None:
        if offload.is_zero_3(self.parameter):
            return offload.zero_3_gradient(self.parameter)
        if self.parameter.grad is None:  # Megatron has it in main_grad
            return getattr(self.parameter, "main_grad", None)
        return self.parameter.grad


class Parameters:
    """Full parameters of one wrapped model. All methods are collective over the ranks of the
    stage.
    """

    def __init__(self, root: nn.Module, communicator: Communicator, statements: Statements) -> None:
        self._root = root
        self._communicator = communicator
        self._statements = statements
        self._compared: set[str] = set()  # parameters whose stated parts were compared

    def get(
        self,
        name: str,
        expected_shape: ExpectedShape = None,
        *,
        sharded: bool = False,
        raw: bool = False,
        experts: Selector = None,
    ) -> Tensor:
        """Return the full parameter, or that of some experts: detached, on the CPU, on every rank.

        FSDP's are read in their current state, whole (and cast by its mixed precision) where the
        module is in use; with ``sharded``, in their state between forwards. Of a packed weight the
        values are returned; with ``raw``, what holds them.
        """
        with self._found(name, sharded=sharded) as found:
            use: _Use = "raw" if raw else "values"
            return self._full(name, found, found.kept, expected_shape, use, experts=experts)

    def get_on(
        self, name: str, device: torch.device, later: list[PendingReplica] | None = None
    ) -> Tensor:
        """Do as ``get`` for a hook whose tensor is on the device: what is on a GPU stays there.

        Args:
            later: Where ranks' values would be compared, and are on GPUs: gets the comparison, for
                the caller to make.
        """
        with self._found(name) as found:
            return self._full(name, found, found.kept, None, "values", device, later)

    def full_kind(self, name: str) -> tuple[Shape, torch.dtype]:
        """Return the full parameter's shape and dtype, without moving its values."""
        with self._found(name) as found, torch.no_grad():
            local, spec, _ = self._spec(name, found, dtensor.without_partial(found.kept), None)
            return tuple(local.shape) if spec is None else spec.full_shape, local.dtype

    def gradient(
        self, name: str, expected_shape: ExpectedShape = None, experts: Selector = None
    ) -> Tensor | None:
        """Return the full ``.grad``, on the CPU, on every rank; None where there is none."""
        with self._found(name, sharded=True, with_grads=True) as found:
            offload.check_gradient("get_module_gradient", self._root, found.full_name)
            gradient = found.gradient
            there, waits = (
                gradient is not None,
                fsdp2.waits_for_average(self._root, found.parameter),
            )
            what = f"the gradient of parameter {clean(self._root, name)!r}"
            state = f"which it {'has' if there else 'does not have'}{', not averaged' * waits}"
            self._agree(f"{what}, {state}", name, there, waits)
            if waits:
                raise agreed(
                    ValueError(
                        f"get_module_gradient: {what} waits for FSDP2 to average it, as after a "
                        "backward without gradient synchronization; read it after a backward with "
                        "set_requires_gradient_sync(True)"
                    )
                )
            if gradient is None:
                return None
            if gradient.layout != torch.strided:
                raise agreed(
                    TypeError(
                        f"get_module_gradient: {what} is {gradient.layout}, expected a dense "
                        f"tensor{SPARSE_GRADIENT}"
                    )
                )
            found_name = f"{name}.grad"
            return self._full(found_name, found, gradient, expected_shape, "raw", experts=experts)

    def set(
        self,
        name: str,
        full: Tensor,
        expected_shape: ExpectedShape = None,
        experts: Selector = None,
    ) -> None:
        """Write each rank's shard of ``full`` into the parameter, or into that of some experts."""
        shown = clean(self._root, name)
        is_tensor = isinstance(full, Tensor)
        got = tuple(full.shape) if is_tensor else None
        what = f"a new full value of parameter {shown!r}, of shape {got}"
        is_shard = dtensor.is_dtensor(full)
        self._agree(what, "set", name, got, is_tensor and full.is_complex(), is_shard)
        check_type(
            f"set_module_parameter: expected a full torch.Tensor for {shown!r}", full, Tensor
        )
        if is_shard:
            raise agreed(
                TypeError(
                    f"set_module_parameter: expected a full tensor for {shown!r}, got a DTensor; "
                    "pass its full_tensor()"
                )
            )
        with self._found(name, writeback=True, sharded=True) as found, torch.no_grad():
            local, spec, pick = self._spec(
                name, found, found.kept, expected_shape, use="write", experts=experts
            )
            shape = tuple(pick.take(local).shape) if spec is None else spec.full_shape
            if got != shape:
                raise agreed(
                    ValueError(
                        f"set_module_parameter: {shown!r} has the full shape {shape}"
                        f"{'' if experts is None else ' of these experts'}, got {got}"
                    )
                )
            if full.is_complex() and not local.is_complex():
                raise agreed(
                    TypeError(
                        f"set_module_parameter: {shown!r} is {local.dtype}, got {full.dtype}; give "
                        "real values"
                    )
                )
            full = full.detach().to(local.dtype)
            self._check_equal(shown, full)
            part = full if spec is None else spec.slice(full.to(local.device))
            local.copy_(pick.put(local, part.to(local.device)))
            if offload.is_offloaded(self._root, found.full_name):
                offload.write(self._root, found.full_name, local)

    def iterate(self, *, raw: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield clean names and full parameters, one at a time, tied ones once."""
        names = {name: clean(self._root, name) for name in self._names()}
        last = list(names.values())[-1:]
        self._agree(f"all its {len(names)} parameters, up to {last}", *names.values())
        if not raw:
            names = {
                name: quantized.name_of_values(self._root, name, shown)
                for name, shown in names.items()
            }
        return (
            (name, self.get(full_name, sharded=True, raw=raw)) for full_name, name in names.items()
        )

    def _names(self) -> list[str]:
        """Return the names of all parameters; for FSDP1's flattened ones, of the original ones."""
        found: list[str] = []
        for name in [name for name, _ in self._root.named_parameters()]:  # reading changes them
            if fsdp1.is_flat(name):
                found += fsdp1.names_in_flat(self._root, name)
            elif not (
                offload.is_offloaded(self._root, name)
                and set(offload.tied_names(self._root, name)) & set(found)
            ):
                found.append(name)
        return list(dict.fromkeys(found))

    def _check_equal(self, name: str, full: Tensor) -> None:
        if self._communicator.is_local:
            return
        hashes = values.exchanged(self._communicator, full).hashes
        if len(set(hashes)) > 1:
            differ = [rank for rank, one in enumerate(hashes) if one != hashes[0]]
            raise ValueError(
                f"set_module_parameter: ranks {differ} passed other values for {name!r} than rank "
                "0; pass the same full tensor on every rank"
            )

    def _full(
        self,
        name: str,
        found: _Found,
        tensor: Tensor,
        expected_shape: ExpectedShape,
        use: _Use,
        device: torch.device = _CPU,
        later: list[PendingReplica] | None = None,
        experts: Selector = None,
    ) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            local, spec, pick = self._spec(
                name, found, dtensor.without_partial(tensor), expected_shape, use, later, experts
            )
            local = pick.take(local)
            if spec is not None:
                return spec.all_gather(local).to(device)
            if device.type == "cpu":
                return owned_copy(local)
            return torch.empty(local.shape, dtype=local.dtype, device=device).copy_(local)

    def _spec(
        self,
        name: str,
        found: _Found,
        tensor: Any,
        expected_shape: ExpectedShape,
        use: _Use = "values",
        later: list[PendingReplica] | None = None,
        experts: Selector = None,
    ) -> tuple[Tensor, TensorSpec | None, Pick]:
        """Return this rank's shard, the plan for all ranks (None for a full tensor), and which part
        of the shard is of these experts. ``later``: see ``get_on``.
        """
        expected = check_expected_shape(expected_shape)
        shown = f"parameter {clean(self._root, name)!r}"
        local, packed, problem = self._unpacked(shown, found, tensor, use)
        if packed and use == "values":
            found = replace(found, parameter=local)  # sizes are those of its values
        site = Site(
            shown,
            clean(self._root, found.full_name),
            "parameter",
            parameter=self._sources(found, tensor),
        )
        (dp, tp), stated_axes = site.parameter.placements, self._stated_axes(site.name, tensor)
        shapes = [tuple(local.shape)]
        if not self._communicator.is_local:
            of_experts = show_exactly(experts)
            header = Header(
                "parameter",
                site=site_hash(name, expected, packed, problem, use, of_experts),
                dtype=local.dtype,
                shape=shapes[0],
                microbatch=int(later is not None and local.is_cuda),  # where ranks may differ
            )
            what = f"the full value of {site.name}, expected_shape {expected}, experts {of_experts}"
            if packed:
                what += f", packed ({packed}), for its {use}{problem and f': {problem}'}"
            headers = self._communicator.check_consistency(header, what)
            shapes = [other.shape for other in headers]
            later = later if all(other.microbatch for other in headers) else None
        if problem:
            raise agreed(ValueError(problem))
        if not dtensor.is_dtensor(tensor):
            self._check_elements(site.name, found, shapes)
        known = None
        if dtensor.is_dtensor(tensor) and dp is not None and tp is not None:
            whole = self._stated_layout(site.name, found, tensor)
            known = ShardLayout(dp, tp, source=whole.source)
            by_hand = "tp" not in stated_axes  # FSDP2 splits what the layer split by hand before
            known = replace(known, tp_first=known.splits_one_dim if by_hand else whole.tp_first)
        prints = None
        if tp is None and expected is None and len(shapes) > 1:  # for the message
            prints = values.exchanged(self._communicator, local)
        try:
            layout = resolve.resolve(
                site,
                shapes,
                self._communicator.mesh,
                (dp, tp),
                {},
                expected,
                known,
                dict.fromkeys(resolve.AXES, _OF_EXPERTS)
                if layers.is_of_own_experts(found.parameter)
                else None,
                prints=prints,
                statements=self._statements,
            )
        except (HookError, ValueError) as error:
            raise agreed(error) from None
        mesh = self._communicator.mesh
        full_shape = layout.full_shape(shapes, mesh.dp_size, mesh.tp_size)
        is_stored = bool(packed) and use == "raw"
        select = _select(site.name, found, experts, full_shape, is_stored)
        pick = Pick({} if select is None else select.indices(full_shape))
        if self._communicator.is_local:
            return local, None, pick
        is_split = layout.dp != Replicate() or layout.tp != Replicate()
        can_join = use != "raw" or quantized.can_join(found.module, found.leaf_name, tensor)
        if is_split and not can_join:
            raise agreed(ValueError(quantized.not_joined(packed, site.name)))
        if quantized.unpacks_itself(local):  # whole
            self._check_replicas(site.name, local.dequantize(), layout, stated_axes, later)
            return local if select is None else local.dequantize(), None, pick
        self._check_replicas(site.name, local, layout, stated_axes, later)
        self._check_parts(site, local, layout, stated_axes)
        spec = TensorSpec.of(self._communicator, layout, shapes, local.dtype, select)
        return local, spec, spec.pick or pick

    def _unpacked(
        self, site: str, found: _Found, tensor: Any, use: _Use
    ) -> tuple[Tensor, str, str]:
        """Return this rank's tensor, or the values of a packed one; the kind of a packed one, and
        why it can't be used so, for all ranks to compare. Local.
        """
        local = dtensor.to_local(tensor).detach()
        kind = quantized.kind_of(found.module, found.leaf_name, tensor)
        if kind is None:
            return local, "", ""
        if use == "write":
            return local, kind.name, quantized.not_written(kind, site)
        if use == "raw":
            return local, kind.name, ""
        is_part = False
        if dtensor.is_dtensor(tensor):
            is_part = self._stated_layout(site, found, tensor).dp != Replicate()
        try:
            found_here = quantized.values(
                kind, found.module, found.leaf_name, tensor, site, is_part=is_part
            )
        except ValueError as error:
            return local, kind.name, str(error)
        return found_here, kind.name, ""

    def _check_elements(self, site: str, found: _Found, shapes: Sequence[Shape]) -> None:
        """ValueError, on all ranks, where a rank has no elements of a parameter that its layer
        states to be non-empty, unless a split into as many shards leaves that rank's empty.
        """
        sizes = layers.stated_sizes(found.module, found.leaf_name)
        if sizes is None or 0 in sizes:
            return
        tp_size = self._communicator.mesh.tp_size
        for rank, shape in enumerate(shapes):
            is_last_part = len(shape) == len(sizes) and all(
                own == full or (own == 0 and full < tp_size) for own, full in zip(shape, sizes)
            )
            if 0 in shape and not is_last_part:
                raise agreed(
                    ValueError(
                        f"{site}: rank {rank} holds no elements of it (local shape {shape}), and "
                        f"its layer states the sizes {sizes}: its values are elsewhere, offloaded "
                        "or partitioned by something that flex_model does not support; bring them "
                        "back before they are read"
                    )
                )

    def sources_of(self, name: str) -> tuple[ParameterSources, str]:
        """Return the placements stated for a parameter, which its gradient shares, and the first
        name of a tied one. Local.
        """
        if fsdp1.wrapper_of_parameter(self._root, name) is not None:  # without tp
            return ParameterSources((Replicate(), Replicate())), clean(self._root, name)
        full_name, module, parameter = find_parameter(self._root, name)
        sources = self._sources(_Found(full_name, module, parameter, parameter), parameter)
        return sources, first_name(self._root, name)

    @functools.cached_property
    def _states_tensor_parallelism(self) -> bool:
        return layers.states_tensor_parallelism(self._root, self._communicator.mesh)

    def _stated_layout(self, site: str, found: _Found, tensor: Any) -> ShardLayout:
        """Return the layout that a DTensor states, of a parameter or its gradient."""
        by_fsdp2 = tensor.device_mesh.ndim > 1 and fsdp2.is_managed(self._root, found.kept)
        return dtensor.layout(tensor, self._communicator.mesh, site, by_fsdp2=by_fsdp2)

    def _sources(self, found: _Found, tensor: Any) -> ParameterSources:
        """Return what the tensor, its layer, the user or the framework state of a parameter."""
        mesh, name = self._communicator.mesh, clean(self._root, found.full_name)
        leaf_name = found.leaf_name
        statement = self._statements.of_parameter(name, found.module)
        dp = layers.placement_without_statement(found.parameter, "dp")
        tp: Placement | None = Replicate() if mesh.tp_size == 1 else None
        axes = self._stated_axes(name, tensor)
        if dtensor.is_dtensor(tensor):
            layout = self._stated_layout(f"parameter {name!r}", found, tensor)
            dp = layout.dp
            stated_tp = layers.as_computed_with(found.module, leaf_name, tensor, layout.tp)
            tp = stated_tp if "tp" in axes else tp
        if tp is None:
            tp = layers.marked_placement(found.module, leaf_name, found.parameter, mesh)
            is_smaller = layers.dims_smaller_than_stated(
                found.module, leaf_name, found.parameter, mesh
            )
            if tp is None and self._states_tensor_parallelism and not is_smaller:
                tp = layers.placement_without_statement(found.parameter, "tp")
        if statement is not None:
            dp = dp if "dp" in axes else statement.dp or dp
            tp = tp if "tp" in axes else statement.tp or tp
        share = layers.share_by_sizes(found.module, leaf_name, found.parameter, mesh)
        sizes = None if statement is None else statement.sizes
        return ParameterSources((dp, tp), share, sizes)

    def _stated_axes(self, site: str, tensor: Any) -> frozenset[str]:
        """Return the axes along which a DTensor states its placement."""
        return frozenset(dtensor.axis_names(tensor, self._communicator.mesh, site))

    def _check_replicas(
        self,
        site: str,
        local: Tensor,
        layout: ShardLayout,
        stated_axes: frozenset[str],
        later: list[PendingReplica] | None,
    ) -> None:
        """Check that ranks that share the tensor hold equal values, where only the layout of other
        tensors implies that they share it; or append the check to ``later``.
        """
        replicated = resolve.axes_of_replicas(layout, self._communicator.mesh)
        axes = [axis for axis in replicated if axis not in stated_axes]
        if not axes:
            return
        shape = tuple(local.shape)

        def check(prints: values.Fingerprints) -> None:
            for axis in axes:
                words = {"dp": "data-parallel", "tp": "tensor-parallel"}[axis]
                if not prints.equal_along(axis):
                    raise agreed(
                        ValueError(
                            f"{site}: the {words} ranks hold different values of shape {shape} "
                            f"where, by {layout.source}, they should share one; reduce gradients "
                            "over the ranks first (DDP does for a loss that the model's output "
                            "leads to, where hooks or the model leave parameters out only with "
                            "find_unused_parameters=True; Megatron: finalize_model_grads; with its "
                            "distributed optimizer each rank has a part even then: read gradients "
                            "in hooks, flex.register_hook, or set use_distributed_optimizer="
                            "False); state the layout of shards with annotate_layout(..., "
                            "kind='parameter')"
                        )
                    )

        if later is not None:
            later.append(PendingReplica.of(site, local, check))
            return
        check(values.exchanged(self._communicator, local))

    def _check_parts(
        self, site: Site, local: Tensor, layout: ShardLayout, stated_axes: frozenset[str]
    ) -> None:
        """Warn where stated shards are equal on all ranks. Collective, once a parameter, where only
        the user states that they are shards.
        """
        placed = {"dp": layout.dp, "tp": layout.tp}
        stated = self._statements.of_site(site) | {axis: placed[axis] for axis in layout.sized_axes}
        stated = {
            axis: one
            for axis, one in stated.items()
            if axis not in stated_axes and isinstance(one, Shard)
        }
        if stated and site.name not in self._compared:
            self._compared.add(site.name)
            prints = values.exchanged(self._communicator, local)
            self._statements.check_parts(site, stated, prints, local)

    @contextlib.contextmanager
    def _found(
        self, name: str, writeback: bool = False, sharded: bool = False, with_grads: bool = False
    ) -> Iterator[_Found]:
        """A context with the parameter readable, and writable with ``writeback``: FSDP1's and
        ZeRO-3's are gathered.
        """
        with contextlib.ExitStack() as stack:
            wrapper = fsdp1.wrapper_of_parameter(self._root, name)
            running = None
            if wrapper is not None and not (writeback or sharded):
                running = fsdp1.in_use(self._root, wrapper, name)
            if running is not None:
                module, view = running
                yield _Found(name, module, view, view)
                return
            if wrapper is not None:
                self._agree_to_gather(name)
                stack.enter_context(
                    fsdp1.summoned(
                        self._root, wrapper, name, writeback=writeback, with_grads=with_grads
                    )
                )
            stored = quantized.stored_name(self._root, name)
            try:
                full_name, module, parameter = find_parameter(self._root, stored)
            except ValueError:
                self._agree(f"parameter {name!r}, which it does not have", name, "missing")
                raise
            if wrapper is None and sharded:
                parameter = fsdp2.sharded_parameter(self._root, stored, parameter)
            kept: Tensor = parameter
            if offload.is_zero_3(parameter) and not with_grads:
                self._agree_to_gather(name)
                stack.enter_context(offload.gathered(parameter, writeback))
            elif offload.is_offloaded(self._root, full_name):
                kept = offload.read(self._root, full_name)
            elif parameter.is_meta:
                raise ValueError(
                    f"parameter {clean(self._root, name)!r} is on the meta device: its weights are "
                    "not loaded; load or dispatch the model first"
                )
            yield _Found(full_name, module, parameter, kept)

    def _agree_to_gather(self, name: str) -> None:
        """Check that ranks agree before a collective of the framework, in which they would hang."""
        self._agree(f"parameter {clean(self._root, name)!r}", name, "gather")

    def _agree(self, what: str, *of: Any) -> None:
        """Check that all ranks are at the same call: ``what`` it is for messages, and its hash."""
        if not self._communicator.is_local:
            self._communicator.check_consistency(Header("parameter", site=site_hash(*of)), what)


def _select(
    site: str, found: _Found, experts: Selector, full_shape: Shape, is_stored: bool
) -> Select | None:
    """Return the selection of some experts, which are dim 0; None for all. Raises on all ranks.

    Args:
        is_stored: Whether it is of a packed tensor as it is stored, whose dims are not known.
    """
    if experts is None:
        return None
    try:
        if is_stored or not hasattr(found.module, "num_experts"):
            what = "it is packed" if is_stored else "its module has no num_experts"
            raise ValueError(
                f"{site}: experts= is for a parameter whose dim 0 is experts, such as "
                f"'model.layers.3.mlp.experts.down_proj', and {what}"
            )
        return Select(rows=list(numbers("experts", parse("experts", experts), full_shape[0], site)))
    except (IndexError, TypeError, ValueError) as error:
        raise agreed(error) from None

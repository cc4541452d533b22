"""Finds the layout of a hook's tensor: from a cache keyed by what all ranks hold, or by resolving
what is proven or stated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from flex_model.distributed import values
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.gather import TensorSpec
from flex_model.distributed.header import site_hash
from flex_model.distributed.padding import Padding, paddings
from flex_model.distributed.picked import Pick
from flex_model.distributed.placement import Placement, Replicate, Shape, Shard, ShardLayout
from flex_model.distributed.plain import plain
from flex_model.errors import HookError, LayoutMismatchError, agreed, is_agreed
from flex_model.hooks.call_check import check_call
from flex_model.hooks.hook_call import HookCall
from flex_model.hooks.tracking import Tracking
from flex_model.integrations import dtensor
from flex_model.layouts import replicas, resolve
from flex_model.layouts.expected_shape import rows_dim
from flex_model.layouts.follow import Pair
from flex_model.layouts.inputs import refusal_of_stand_in
from flex_model.layouts.placement_encoding import common, encode
from flex_model.layouts.refusal import ONE_ORDER
from flex_model.layouts.sources import AXES

_REMEMBERED_SPECS = 128  # per hook: generation may bring a new shape with every step


class LayoutFinder:
    """Finds the layouts of hooks' tensors and of their gradients, for one FlexModel.

    Args:
        pad_value: The value by which tensors of different lengths are padded to one.
    """

    def __init__(
        self, communicator: Communicator, tracking: Tracking, pad_value: float = 0
    ) -> None:
        self._pad_value = pad_value
        self._communicator, self._mesh, self._tracking = communicator, communicator.mesh, tracking
        #: How the last hook on a module's output found it along tp, also if the hook is gone.
        self.of_outputs: WeakKeyDictionary[nn.Module, Placement] = WeakKeyDictionary()

    def shard_of(self, call: HookCall, leaf: Any) -> tuple[HookCall, Tensor, ShardLayout | None]:
        """Return this rank's plain tensor, in the graph, and the layout that a DTensor states: the
        whole one (the third value), or along the axes of its mesh (in the call).
        """
        by_fsdp2 = call.registration.moment == "accumulated"
        leaf, stated, known = dtensor.plain_and_stated(
            leaf, self._mesh, call.describe(), by_fsdp2=by_fsdp2
        )
        if stated != call.stated:
            call = replace(call, stated=stated)
        return call, leaf, known

    def pick_of_full(self, call: HookCall, leaf: Tensor) -> Pick | None:
        """With one rank: check the full tensor's ``expected_shape``; return its selection."""
        registration = call.registration
        if registration.expected_shape is None and registration.select is None:
            return None
        return self.lookup(call, [tuple(leaf.shape)], leaf.dtype, None, leaf)[0].pick

    def pick_of_shard(
        self, call: HookCall, shard: Tensor, known: ShardLayout | None
    ) -> Pick | None:
        """Return what a read-only hook selects of this rank's shard, so that only that is copied;
        None where the end of the run finds it. Collective at the first call in forwards of a key,
        which decides the shapes on all ranks in later ones.
        """
        registration = call.registration
        select = registration.select
        if select is None or select.experts is not None or call.evidence.key is None:
            return None
        found = self._earlier(call, shard, known)
        if not found and len(registration.specs) < _REMEMBERED_SPECS:
            shapes, _ = check_call(self._communicator, call, shard, registration.kind)
            try:
                found = [self.lookup(call, shapes, shard.dtype, known, shard)[0]]
            except (IndexError, TypeError, ValueError):  # the end of the run raises it
                return None
        return found[0].pick if len(found) == 1 and found[0].padding is None else None

    def settled_of(self, call: HookCall) -> dict[tuple[int, int | None], Any] | None:
        """Return ``ForwardLayouts.settled`` of the call's forward; None if that is followed."""
        layouts = self._tracking.forward.layouts
        return None if layouts is None or call.is_replay else layouts.settled

    def spec_of_shard(
        self, call: HookCall, shard: Tensor, known: ShardLayout | None, moves: bool
    ) -> TensorSpec:
        """Return how this rank's shard is placed. Collective at the first call in forwards of a
        key, as in ``pick_of_shard``, and where it has to be gathered (``moves``, for one).
        """
        found = [] if moves or call.evidence.key is None else self._earlier(call, shard, known)
        if len(found) == 1 and found[0].is_in_parts:
            return found[0]
        shapes, _ = check_call(self._communicator, call, shard, call.registration.kind)
        return self.lookup(call, shapes, shard.dtype, known, shard)[0]

    @staticmethod
    def _earlier(call: HookCall, shard: Tensor, known: ShardLayout | None) -> list[TensorSpec]:
        """Return the specs of this call of the hook in earlier forwards of the key."""
        place = call.registration.split_dim, call.positions
        of_key = (shard.dtype, known, place, call.evidence.key)
        return [
            spec
            for (of_forward, _, *others), spec in call.registration.specs.items()
            if of_forward == call.of_forward and tuple(others) == of_key
        ]

    def lookup(
        self,
        call: HookCall,
        shapes: Sequence[Shape],
        dtype: torch.dtype,
        known: ShardLayout | None,
        shard: Tensor,
    ) -> tuple[TensorSpec, Tensor]:
        """Return the tensor's spec for these shapes, cached, and the shard: where the layout is
        new, with the first rank's values of replicas. Collective there.
        """
        registration, forward = call.registration, call.evidence.key
        split_dim = registration.split_dim
        place = split_dim, call.positions
        key = (call.of_forward, tuple(shapes), dtype, known, place, forward)
        spec = registration.specs.get(key)
        if spec is None and call.number is None:
            spec = self._of_recomputed(call, key[1:-1])
        call.run.keys.add(forward)
        if spec is not None:
            return spec, shard
        try:
            layout, all_padded, shard = self._layout(call, shapes, known, shard)
            padded = list(shapes) if all_padded is None else [one.padded for one in all_padded]
            select = registration.select and registration.select.at(call.positions)
            spec = TensorSpec.of(self._communicator, layout, padded, dtype, select, split_dim)
            if all_padded is not None:
                spec = replace(spec, padding=all_padded[self._mesh.group_rank])
        except (HookError, IndexError, TypeError, ValueError) as error:
            if is_agreed(error):
                raise
            text = str(error)
            if registration.describe() not in text:
                text = f"{registration.describe()}: {text}"
            raise agreed(error.__class__(text)) from None
        while len(registration.specs) >= _REMEMBERED_SPECS:
            oldest = next(iter(registration.specs))  # the same one on every rank
            del registration.specs[oldest]
        registration.specs[key] = spec
        module = registration.living_module
        if module is not None and registration.kind == "forward":
            self.of_outputs[module] = layout.tp
        return spec, shard

    def _layout(
        self, call: HookCall, shapes: Sequence[Shape], known: ShardLayout | None, shard: Tensor
    ) -> tuple[ShardLayout, list[Padding] | None, Tensor]:
        """Resolve the placements from what all ranks have proven or stated; and the padding of all
        ranks' tensors, where lengths differ; and the shard, of replicas the first rank's.
        Collective.
        """
        registration, mesh = call.registration, self._mesh
        site = registration.layout_site
        proven = call.evidence.placements
        prints = None
        if not self._communicator.is_local and known is None:
            proven = self._tracking.prove(call.evidence)
            if registration.kind == "tensor":
                proven = registration.parameter.placements
            proven = _first_known(call.stated, proven)
            words = call.evidence.words
            hashes = [site_hash(*words), *(site_hash(encode(one)) for one in proven)]
            row = torch.tensor([values.fingerprint(shard), *hashes], device="cpu")
            table = self._communicator.exchange(row).tolist()
            prints = values.Fingerprints(mesh, tuple(rank[0] for rank in table))
            if len({rank[1] for rank in table}) > 1:
                raise ValueError(
                    f"{site.name}: the ranks call the module with different arguments ({words} on "
                    "this one), so their tensors are not parts of one; where the model goes "
                    f"through a set, {ONE_ORDER}"
                )
            proven = common(proven, [rank[2:4] for rank in table])
        stated = registration.hook_function.placements
        of_gradient: Mapping[str, Placement] = {}
        is_gradient = registration.is_backward or registration.kind == "tensor"
        if is_gradient:
            of_gradient, stated = stated, _of_activation(stated, proven)
        padded = self._padded(call, shapes, stated, proven, known)
        layout = resolve.resolve(
            site,
            shapes if padded is None else [one.padded for one in padded],
            mesh,
            proven,
            stated,
            registration.expected_shape,
            known,
            call.evidence.obstacles,
            rows_dim=rows_dim(self._tracking.batch_dim),
            prints=prints,
            statements=self._tracking.statements,
        )
        if known is not None or prints is None:
            return layout, padded, shard
        by_user = {axis: getattr(layout, axis) for axis in layout.sized_axes}
        by_user.update(of_gradient if is_gradient else stated)
        self._tracking.statements.check_parts(site, by_user, prints, shard)
        if is_gradient:
            own = {axis: p for axis, p in zip(AXES, call.stated) if p is not None}
            of_gradient = {**of_gradient, **own}
            return self._of_gradient(call, layout, of_gradient, shard, prints), padded, shard
        for axis in resolve.differing_axes(layout, prints):
            shard = replicas.reconciled(self._communicator, site, shard, [axis], layout.source)
        return layout, padded, shard

    def _padded(
        self,
        call: HookCall,
        shapes: Sequence[Shape],
        stated: Mapping[str, Placement],
        proven: Pair,
        known: ShardLayout | None,
    ) -> list[Padding] | None:
        """Return the padding of all ranks' tensors, in a forward of batches of different lengths;
        None elsewhere, and where the layout along dp is not known.
        """
        batch, registration = call.evidence.rows, call.registration
        if batch is None or not batch.is_ragged or registration.kind == "tensor":
            return None
        rows = batch.counts
        if not registration.pads:
            per_rank = zip(rows, shapes[:: self._mesh.tp_size])
            if any(not own and math.prod(shape) for own, shape in per_rank):
                raise ValueError(refusal_of_stand_in(registration.layout_site.name))
            return None
        placed = {**dict(zip(AXES, proven)), **stated}
        dp, tp = (placed[axis] for axis in AXES)
        layout = known or ShardLayout(dp or Replicate(), tp or Replicate())
        if known is None and dp is None:
            return None
        value = 0 if registration.is_backward else self._pad_value
        try:
            return paddings(layout, shapes, rows, self._mesh, value)
        except LayoutMismatchError as error:
            raise LayoutMismatchError(
                f"{registration.layout_site.name}: {error}; see each rank's own tensor with "
                'FlexModel(dp_batch="local")'
            ) from None

    def _of_gradient(
        self,
        call: HookCall,
        layout: ShardLayout,
        own: Mapping[str, Placement],
        grad: Tensor,
        prints: values.Fingerprints,
    ) -> ShardLayout:
        """Infer how the gradient of a tensor of this layout is placed. Collective.

        Args:
            own: By axis, the placements that a DTensor or the user states for the gradient itself.
        """
        is_parameter = call.registration.kind == "tensor"
        if is_parameter:
            call = replace(call, evidence=self._tracking.evidence_of_parameter(call.registration))
        proven = dict(zip(AXES, self._tracking.prove_gradient(call.evidence)))
        sized = resolve.gradient_by_sizes(layout, call.registration.expected_shape)
        placed: dict[str, Placement] = {}
        for axis, placement in (("dp", layout.dp), ("tp", layout.tp)):
            placed[axis] = placement
            if self._mesh.size(axis) == 1:
                continue
            if axis == "dp" and is_parameter:
                continue  # the ranks' mean
            if axis in own:
                placed[axis] = own[axis]
            elif isinstance(placement, Replicate):
                if is_parameter:
                    self._check_replicas(call, axis)
                placed[axis] = self._of_replicas(
                    call, axis, proven[axis], grad, prints.equal_along(axis)
                )
            else:
                shard = proven[axis] or sized.get(axis)
                if isinstance(shard, Shard) and shard.pieces is not None:
                    raise agreed(
                        ValueError(
                            f"{call.registration.layout_site.name}: some ranks along {axis} hold "
                            "the same piece of the tensor, and each has a summand of its "
                            "gradient; hook the tensor before the ranks take their pieces of it"
                        )
                    )
                placed[axis] = self._known(call, axis, shard)
        found = ShardLayout(placed["dp"], placed["tp"], source=f"its tensor's: {layout.source}")
        site = call.registration.layout_site
        return resolve.order_axes(site, found, self._mesh, are_both_stated=len(own) == len(AXES))

    def _check_replicas(self, call: HookCall, axis: str) -> None:
        """Check that ranks that share a parameter hold the same values. Collective.

        Raises:
            ValueError: they don't. On every rank.
        """
        for parameter in call.registration.living_targets[:1]:
            _, is_close = replicas.compared(self._communicator, plain(parameter.detach()), [axis])
            if not is_close:
                raise agreed(
                    ValueError(
                        f"{call.describe()}: the ranks along {axis} hold different values of the "
                        f"parameter, of shape {tuple(parameter.shape)}, which no layer states to "
                        "be split; state the layout of shards with "
                        "annotate_layout(..., kind='parameter')"
                    )
                )

    def _of_replicas(
        self,
        call: HookCall,
        axis: str,
        proven: Placement | None,
        grad: Tensor | None,
        is_equal: bool,
    ) -> Placement:
        """Return how ranks along ``axis`` that hold one tensor hold its gradient: each in full, or
        as partial sums. Collective.

        Raises:
            ValueError: it is not known, or full gradients differ between ranks. On every rank.
        """
        placement = self._known(call, axis, proven)
        if placement == Replicate() and grad is not None and not is_equal:
            replicas.reconciled(self._communicator, call.registration.layout_site, grad, [axis])
        return placement

    def _known(self, call: HookCall, axis: str, proven: Placement | None) -> Placement:
        """Return a gradient's placement, which all ranks have proven alike, or none has.

        Raises:
            ValueError: none has. On every rank.
        """
        if proven is not None:
            return proven
        why = call.evidence.gradient_obstacles.get(axis, "")
        raise agreed(
            ValueError(
                f"{call.registration.layout_site.name}: how the ranks along {axis} hold the "
                "gradient (Replicate, Shard or Partial) is not known"
                f"{f' ({why})' if why else ''}; state the layout of what is made there with "
                "annotate_layout, or that of the gradient, for a hook on it, with "
                f'HookFunction(placements={{"{axis}": Replicate()}}), Partial() or Shard(dim)'
            )
        )

    def of_edit_gradient(
        self, call: HookCall, grad: Tensor | None, layout: ShardLayout
    ) -> Placement:
        """Return how the ranks along tp hold the gradient of an edit's input and output, whose
        tensor has this ``layout``. The gradient of a DTensor's local part is placed as the DTensor
        is. Collective.

        Raises:
            ValueError: it is not known along an axis. On every rank.
        """
        if call.registration.is_backward:  # the tensor is a gradient itself
            return self._of_second_gradient(call, layout)
        sized = resolve.gradient_by_sizes(layout, call.registration.expected_shape)
        inferred = [axis for axis, own in zip(AXES, call.stated) if own is None]
        proven = dict(zip(AXES, self._tracking.prove_gradient(call.evidence) if inferred else ()))
        for axis in inferred:
            if self._mesh.size(axis) > 1 and (axis == "dp" or not isinstance(layout.tp, Replicate)):
                self._known(call, axis, proven[axis] or sized.get(axis))
        if "tp" not in inferred or self._mesh.tp_size == 1 or not isinstance(layout.tp, Replicate):
            return Replicate()
        is_equal = True
        if grad is not None:
            check_call(self._communicator, call, grad, "gradient of an edit")
            is_equal = values.exchanged(self._communicator, grad).equal_along("tp")
        return self._of_replicas(call, "tp", proven["tp"], grad, is_equal)

    def _of_second_gradient(self, call: HookCall, layout: ShardLayout) -> Placement:
        """Return how the ranks along tp hold the gradient of a gradient: as the activation."""
        tp = self._tracking.prove(call.evidence)[1]
        is_known = self._mesh.tp_size == 1 or not isinstance(layout.tp, Replicate)
        if is_known or isinstance(tp, Replicate):
            return Replicate()
        raise agreed(
            ValueError(
                f"{call.describe()}: a second derivative reaches this edit of a gradient, and that "
                "the ranks along tp hold the same activation there is not proven; edit the "
                "activation instead"
            )
        )

    def why_once(self) -> str:
        """Return why gradients of the model's gradients would be wrong; empty if they are right."""
        return self._tracking.why_once()

    def _of_recomputed(self, call: HookCall, key: tuple[object, ...]) -> TensorSpec | None:
        """Return the spec that the recomputed forward used, whichever of its calls this is."""
        registration = call.registration
        found = [
            spec
            for other, spec in registration.specs.items()
            if other[1:-1] == key and other[-1] in call.run.keys
        ]
        is_ambiguous = any(spec.layout != found[0].layout for spec in found)
        if registration.is_backward:  # its calls that had no gradient yet have no specs
            found, is_ambiguous = [], call.evidence.is_ambiguous
        if is_ambiguous:
            raise agreed(
                HookError(
                    f"{call.describe()}: the module was called with tensors of different layouts, "
                    "and which of its calls is recomputed in backward is not known; do without "
                    "checkpointing there, or hook another module"
                )
            )
        return found[0] if found else None


def _first_known(first: Pair, second: Pair) -> Pair:
    dp, tp = (one if one is not None else other for one, other in zip(first, second))
    return dp, tp


def _of_activation(stated: Mapping[str, Placement], proven: Pair) -> dict[str, Placement]:
    """Return the placements of a tensor that follow from those stated for its gradient."""
    known = dict(zip(AXES, proven))
    return {
        axis: placement if isinstance(placement, Shard) else Replicate()
        for axis, placement in stated.items()
        if isinstance(placement, Shard) or known[axis] is None or isinstance(known[axis], Shard)
    }

"""Gathers the tensor of an edit whose layout is known, in one round with the header of its call.

``ReplicatedPath`` makes the object at a call of a hook, for the same call in later forwards of the
same key. Whatever is unusual there is left to it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from flex_model.distributed import memory, values
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.gather import TensorSpec
from flex_model.distributed.header import Header
from flex_model.hooks.hook_call import HookCall
from flex_model.records.records import Records
from flex_model.runs.run import Run

# For the dispatcher: the full tensor, one that has its shape, dtype and device, and a function from
# the edited full tensor to the one that the model continues with.
Gathered = tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]

_MAX_SHARD_BYTES = 48 << 10  # a message of shared memory has 64 KiB


class SettledGather:
    """The gather and scatter of one call of a hook, in forwards without gradients.

    Args:
        call, leaf, spec: Of the call that it is made after.
        is_compared: Whether headers have a hash of the tensor, which ranks should share.
    """

    def __init__(
        self,
        communicator: Communicator,
        records: Records,
        call: HookCall,
        leaf: Tensor,
        spec: TensorSpec,
        is_compared: bool,
    ) -> None:
        self._communicator, self._records, self._spec = communicator, records, spec
        self._is_compared, self._registration = is_compared, call.registration
        self._shape, self._dtype = leaf.shape, leaf.dtype
        self._header = Header(
            call.registration.kind, call.registration.site, dtype=leaf.dtype, shape=(*leaf.shape,)
        )
        self._places = communicator.mesh.ranks_along(spec.axes) if spec.axes else []
        pick = spec.pick
        dtype = leaf.dtype if pick is None else pick.dtype or leaf.dtype
        with torch.inference_mode(False):
            self._like = torch.empty((), dtype=dtype, device="cpu").expand(spec.full_shape)

    @staticmethod
    def serves(call: HookCall, leaf: Tensor, spec: TensorSpec) -> bool:
        """Whether a call like this one can be served in later forwards."""
        registration, select = call.registration, call.registration.select
        return (
            leaf.is_cpu
            and not leaf.is_complex()
            and leaf.layout is torch.strided
            and not call.is_replay
            and call.run.save_ctx is None
            and registration.kind in ("forward", "forward_pre")
            and registration.joint is None
            and not registration.pads
            and not registration.hook_function.parameter_names
            and (select is None or (select.experts is None and not select.counts_sequence))
            and not spec.layout.partial_axes
            and max(spec.plan.shard_bytes) <= _MAX_SHARD_BYTES
        )

    def gather(self, run: Run, leaf: Tensor) -> Gathered | None:
        """Gather and record the full tensor; None where the call must be made in full. Collective,
        but where it is None on this rank: the others then have the header of the call in full.
        """
        communicator, records, spec, pick = (
            self._communicator, self._records, self._spec, self._spec.pick,
        )  # fmt: skip
        if leaf.shape != self._shape or leaf.dtype is not self._dtype or records.keeps_parts:
            return None
        if leaf.is_neg() or leaf._is_zerotensor():
            return None
        registration = self._registration
        value_hash = values.fingerprint(leaf) if self._is_compared else None
        header = self._header.of_call(run.seed or 0, value_hash)
        keeps_record = records.keeps_full and registration.hook_function.record
        part = leaf if pick is None else pick.take(leaf)
        if torch.is_inference_mode_enabled():  # the function's tensor and records are plain ones
            with torch.inference_mode(False):
                fulls = self._targets(part, 1 + keeps_record)
        else:
            fulls = self._targets(part, 1 + keeps_record)
        description, shard = registration.description, part.contiguous()
        if not communicator.gather_at_once(
            header, description, spec.axes, shard, spec.plan, self._places, fulls
        ):
            return None
        if keeps_record:
            records.add(registration, fulls.pop())
        return fulls[0], self._like, functools.partial(self._scatter, leaf)

    def _targets(self, part: Tensor, number: int) -> list[Tensor]:
        """Return tensors for the full one: copies of it where every rank has it."""
        if not self._places:
            return [part.clone(), *(memory.copy(part) for _ in range(number - 1))]
        sizes, dtype = self._like.shape, self._like.dtype
        return [memory.empty(sizes, dtype) for _ in range(number)]

    def _scatter(self, leaf: Tensor, full: Tensor) -> Tensor:
        """Return the tensor that the model continues with, of the edited full one. Local."""
        self._communicator.note_edit(self._registration.description)
        spec = self._spec
        shard = spec.slice(full) if self._places else full.clone()
        if spec.pick is not None:
            shard = spec.pick.put(leaf, shard)
        return shard.contiguous() if leaf.is_contiguous() else shard

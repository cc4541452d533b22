"""Parameters and their gradients in full, whatever holds the shards, and full values written back
to the shards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flex_model.distributed import inference, values
from flex_model.distributed.channel import Channel
from flex_model.distributed.gather import Move
from flex_model.distributed.header import Header, site_hash
from flex_model.integrations import dtensor, fsdp
from flex_model.names import find_parameter
from flex_model.outputs import owned_copy


class Parameters:
    """Full parameters of one wrapped model. All methods are collective over the ranks of the wrap's
    stage.
    """

    def __init__(self, root: nn.Module, channel: Channel) -> None:
        self._root = root
        self._channel = channel

    def get(self, name: str, expected_shape: Sequence[int | None] | None = None) -> Tensor:
        """The full parameter: detached, on the CPU, on every rank."""
        with self._found(name) as (parameter, _):
            return self._full(name, parameter, expected_shape)

    def gradient(
        self, name: str, expected_shape: Sequence[int | None] | None = None
    ) -> Tensor | None:
        """The full gradient as ``.grad`` has it, on the CPU, on every rank; None where there is
        none.
        """
        if fsdp.wrapper_of_parameter(self._root, name) is not None:
            raise ValueError(
                f"get_module_gradient: parameter {name!r} belongs to a FullyShardedDataParallel "
                "(FSDP1) module, whose "
                "gradients are flattened; use torch.distributed.fsdp.fully_shard, or "
                "FullyShardedDataParallel.summon_full_params(..., with_grads=True)"
            )
        with self._found(name, sharded=True) as (parameter, _):
            has_gradient = parameter.grad is not None
            if not self._channel.is_local:
                what = (
                    f"the gradient of parameter {name!r}, which is {'there' * has_gradient or None}"
                )
                self._channel.agree(Header("parameter", site=site_hash(name, has_gradient)), what)
            if parameter.grad is None:
                return None
            return self._full(f"{name}.grad", parameter.grad, expected_shape)

    def set(self, name: str, full: Tensor) -> None:
        """Write each rank's shard of ``full`` into the parameter; its shape tells how plain shards
        are split.
        """
        if not isinstance(full, Tensor):
            raise TypeError(
                f"set_module_parameter: expected a full torch.Tensor for {name!r}, got "
                f"{type(full).__name__}"
            )
        with self._found(name, writeback=True, sharded=True) as (parameter, _), torch.no_grad():
            plain = not (self._channel.is_local or dtensor.is_dtensor(parameter))
            local, move = self._move(name, parameter, full.shape if plain else None)
            shape = tuple(local.shape) if move is None else move.full_shape
            if tuple(full.shape) != shape:
                raise ValueError(
                    f"set_module_parameter: {name!r} has the full shape {shape}, got "
                    f"{tuple(full.shape)}"
                )
            full = full.detach().to(local.dtype)
            self._check_equal(name, full)
            local.copy_(full if move is None else move.slice(full.to(local.device)))

    def _check_equal(self, name: str, full: Tensor) -> None:
        if self._channel.is_local:
            return
        told = self._channel.exchange(values.fingerprint(full)).tolist()
        if any(row != told[0] for row in told):
            differ = [rank for rank, row in enumerate(told) if row != told[0]]
            raise ValueError(
                f"set_module_parameter: ranks {differ} were given other values for {name!r} than "
                "rank 0; "
                "give the same full tensor on every rank"
            )

    def _full(
        self, name: str, tensor: Tensor, expected_shape: Sequence[int | None] | None
    ) -> Tensor:
        with torch.no_grad():
            local, move = self._move(name, tensor, expected_shape)
            return owned_copy(local if move is None else move.all_gather(local))

    def _move(
        self, name: str, tensor: Any, expected_shape: Sequence[int | None] | None
    ) -> tuple[Tensor, Move | None]:
        """This rank's part, and the plan for all; None if it is the whole."""
        expected = inference.check_expected_shape(expected_shape)
        site = f"parameter {name!r}"
        known = None
        if dtensor.is_dtensor(tensor):
            tensor = dtensor.without_partial(tensor)
            known = dtensor.layout(tensor, self._channel.mesh, site, batch_on_dp=False)
            tensor = tensor.to_local()
        local = tensor.detach()
        shapes = [tuple(local.shape)]
        if not self._channel.is_local:
            header = Header(
                "parameter", site=site_hash(name, expected), dtype=local.dtype, shape=shapes[0]
            )
            shapes = [
                other.shape
                for other in self._channel.agree(
                    header, f"the full value of {site}, expected_shape {expected}"
                )
            ]
        layout, _ = inference.settle(
            self._channel, site, local, shapes, expected, known, batch_on_dp=False
        )
        if self._channel.is_local:
            return local, None
        return local, Move.of(self._channel, layout, shapes, local.dtype)

    @contextlib.contextmanager
    def _found(
        self, name: str, writeback: bool = False, sharded: bool = False
    ) -> Iterator[tuple[nn.Parameter, nn.Module]]:
        """The parameter, made readable: FSDP1's are gathered. FSDP2's are as they are now, whole
        where the module is in use; with ``sharded``, as they are kept between forwards.
        """
        wrapper = fsdp.wrapper_of_parameter(self._root, name)
        if wrapper is not None:
            with fsdp.summoned(wrapper, writeback):
                _, module, parameter = find_parameter(self._root, name)
                yield parameter, module
            return
        _, module, parameter = find_parameter(self._root, name)
        if sharded:
            parameter = fsdp.sharded_parameter(self._root, name, parameter)
        if parameter.is_meta:
            raise ValueError(
                f"parameter {name!r} is on the meta device: its weights are not loaded; load or "
                "dispatch the model first"
            )
        yield parameter, module


def send_from_rank_0(channel: Channel, name: str, module: nn.Module) -> None:
    """Give every rank rank 0's parameters and buffers of ``module``. Collective over the grid.

    Raises:
        HookMismatchError: the ranks' modules have different parameters.
    """
    if channel.is_local:
        return
    tensors = [
        (key, value)
        for key, value in module.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor)
    ]
    described = ", ".join(f"{key} {tuple(value.shape)} {value.dtype}" for key, value in tensors)
    digest = site_hash(name, described)
    channel.agree(
        Header("trainable module", site=digest),
        f"register_trainable_module({name!r}) with {described or 'no tensors'}",
    )
    with torch.no_grad():
        for _, value in tensors:
            value.copy_(channel.broadcast(value.detach(), value.detach()))

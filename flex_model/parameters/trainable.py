"""Keeps trainable modules equal on all ranks that run editing functions.

They are replicated: rank 0's values are sent when a module is registered, each rank's optimizer
makes the same step from the same gradients, and runs raise at their start where ranks differ.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flex_model.distributed import values
from flex_model.distributed.agreement import gather_checked
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.header import Header, site_hash
from flex_model.distributed.tensor_dicts import exchange_json
from flex_model.errors import HookMismatchError, agreed, check_type, see

_HALF = (1 << 31) - 1


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers, by name: all that is sent and compared."""
    return dict((*module.named_parameters(), *module.named_buffers()))


def check_name(modules: nn.ModuleDict, name: str) -> None:
    """Check that a trainable module can have this name. Local."""
    check_type("register_trainable_module: the name must be a str", name, str)
    if not name or "." in name or (hasattr(modules, name) and name not in modules):
        raise ValueError(
            f"register_trainable_module: {name!r} can't be the name of a trainable module; give "
            "one without dots that is not an attribute of nn.ModuleDict"
        )


def send_from_rank_0(
    communicator: Communicator, what: str, module: nn.Module, model: nn.Module | None = None
) -> None:
    """Send rank 0's parameters and buffers of ``module`` to every rank. Collective over the grid.

    Args:
        what: The call, for messages.
        model: The wrapped model, whose own tensors are refused: a rank may have a part of them.

    Raises:
        TypeError: one that is not a plain tensor with values, or that is the wrapped model's.
        HookMismatchError: the ranks' modules have different parameters.
    """
    if communicator.is_local:
        return
    tensors = _tensors_of(module)

    def check() -> None:
        # By memory: what is written to a view of it, or to its ``.data``, is the model's, too.
        own = {_memory(tensor) for tensor in _tensors_of(model or nn.Module()).values()} - {0}
        for key, value in tensors.items():
            if not _has_values(value):
                raise TypeError(
                    f"{what}: {key!r} is a {type(value.detach()).__name__} on {value.device}; "
                    "trainable modules are whole on every rank, give them plain dense tensors with "
                    "values"
                )
            if _memory(value) in own:
                raise TypeError(
                    f"{what}: {key!r} is the wrapped model's own, of which each rank may have a "
                    "part; give the editing function the whole with HookFunction(parameters=...), "
                    "or register a copy of a module that is whole on every rank"
                )

    listed = ", ".join(f"{key} {tuple(t.shape)} {t.dtype}" for key, t in tensors.items())
    gather_checked(communicator, what, check, {f"the tensors of {what}": listed})
    with torch.no_grad():
        for value in tensors.values():
            value.copy_(communicator.broadcast(value.detach(), value.detach()))


class Replicas:
    """This rank's trainable modules, as hashes of their values, which are read each time: fused
    optimizers and writes to ``.data`` don't raise a tensor's version.
    """

    def __init__(self, communicator: Communicator, modules: nn.ModuleDict) -> None:
        self._communicator, self._modules = communicator, modules

    def digests(self) -> dict[str, int]:
        """Return by name a hash of the tensor's dtype, shape and values. Local."""
        tensors = _tensors_of(self._modules)
        hashes = {key: values.hashed(t, t.is_cuda) for key, t in tensors.items() if _has_values(t)}
        read = values.on_host(list(hashes.values())).tolist() if hashes else ()  # waits once
        by_name = dict(zip(hashes, read, strict=True))
        return {
            key: site_hash(t.dtype, tuple(t.shape), by_name.get(key)) for key, t in tensors.items()
        }

    def digest(self) -> int:
        """Return one hash of all of them. Local."""
        return site_hash(sorted(self.digests().items()))

    def __len__(self) -> int:
        """The number of trainable modules."""
        return len(self._modules)

    def check(self) -> None:
        """HookMismatchError, on every rank, where ranks differ. Collective over the grid."""
        with self._communicator.uncounted():
            digest = self.digest()
            header = Header("trainable module", shape=(digest & _HALF, digest >> 31 & _HALF))
            headers = self._communicator.check_consistency(
                header, "the start of a run with trainable modules"
            )
            if any(other.shape != headers[0].shape for other in headers):
                where = "the values of trainable modules"
                refuse_different(exchange_json(self._communicator, self.digests(), where))


def refuse_different(per_rank: list[dict[str, int] | None]) -> None:
    """HookMismatchError where ranks have different digests; None: a rank that runs no function."""
    compared = {rank: digests for rank, digests in enumerate(per_rank) if digests is not None}
    first = next(iter(compared.values()), {})
    differ: dict[str, list[int]] = {}
    for rank, digests in compared.items():
        for name in {**first, **digests}:
            if first.get(name) != digests.get(name):
                differ.setdefault(name, []).append(rank)
    if not differ:
        return
    listed = [f"{name!r} on ranks {ranks}" for name, ranks in differ.items()]
    more = f" and {len(listed) - 4} more" if len(listed) > 4 else ""
    raise agreed(
        HookMismatchError(
            f"the trainable modules differ from rank 0's: {', '.join(listed[:4])}{more}; make the "
            "same optimizer steps on every rank, or step on rank 0 only and call "
            f"flex.sync_trainable_modules() after it ({see('trainable-modules-differ')})"
        )
    )


def _memory(tensor: Tensor) -> int:
    """Return the address of the tensor's memory; 0 if it has none of its own."""
    return tensor.untyped_storage().data_ptr() if _has_values(tensor) else 0


def _has_values(tensor: Tensor) -> bool:
    """Return whether it is a plain tensor with values; others (meta, quantized, DTensors) are
    compared by their shape.
    """
    is_dense = tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_nested)
    return type(tensor.detach()) is Tensor and is_dense and not tensor.is_meta

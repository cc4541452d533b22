"""Keeps trainable modules equal on all ranks that run editing functions.

They are replicated: rank 0's values are sent when a module is registered, each rank's optimizer
makes the same step from the same gradients, and runs raise at their start where ranks differ.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flex_model.distributed.communicator import Communicator
from flex_model.distributed.header import Header, site_hash
from flex_model.distributed.tensor_dicts import exchange_json
from flex_model.errors import HookMismatchError, agreed, check_type, see

_HALF = (1 << 31) - 1


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers in the module's state, by name."""
    state = module.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def check_name(modules: nn.ModuleDict, name: str) -> None:
    """Check that a trainable module can have this name. Local."""
    check_type("register_trainable_module: the name must be a str", name, str)
    if not name or "." in name or (hasattr(modules, name) and name not in modules):
        raise ValueError(
            f"register_trainable_module: {name!r} can't be the name of a trainable module; give "
            "one without dots that is not an attribute of nn.ModuleDict"
        )


def send_from_rank_0(communicator: Communicator, name: str, module: nn.Module) -> None:
    """Send rank 0's parameters and buffers of ``module`` to every rank. Collective over the grid.

    Raises:
        TypeError: one that is not a plain tensor with values.
        HookMismatchError: the ranks' modules have different parameters.
    """
    if communicator.is_local:
        return
    tensors = tensors_of(module)
    for key, value in tensors.items():
        if not _has_values(value):
            raise TypeError(
                f"register_trainable_module: {key!r} of {name!r} is a "
                f"{type(value.detach()).__name__} on {value.device}; trainable modules are whole "
                "on every rank, give them plain dense tensors with values"
            )
    described = ", ".join(f"{key} {tuple(t.shape)} {t.dtype}" for key, t in tensors.items())
    digest = site_hash(name, described)
    communicator.check_consistency(
        Header("trainable module", site=digest),
        f"register_trainable_module({name!r}) with {described or 'no tensors'}",
    )
    with torch.no_grad():
        for value in tensors.values():
            value.copy_(communicator.broadcast(value.detach(), value.detach()))


class Replicas:
    """This rank's trainable modules, as hashes of their values, recomputed only where a tensor was
    changed.
    """

    def __init__(self, communicator: Communicator, modules: nn.ModuleDict) -> None:
        self._communicator, self._modules = communicator, modules
        # By name: the tensor, its version and address, and its hash at that version.
        self._hashes: dict[str, tuple[Tensor, tuple[int, int], int]] = {}

    def digests(self) -> dict[str, int]:
        """Return by name a hash of the tensor's dtype, shape and values. Local."""
        found = {}
        for name, tensor in (*self._modules.named_parameters(), *self._modules.named_buffers()):
            version = 0 if tensor.is_inference() else tensor._version
            state = version, tensor.data_ptr() if _has_values(tensor) else 0
            known = self._hashes.get(name)
            if known is None or known[0] is not tensor or known[1] != state:
                known = tensor, state, _digest(tensor)
            found[name] = known
        self._hashes = found
        return {name: digest for name, (_, _, digest) in found.items()}

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


def _digest(tensor: Tensor) -> int:
    """Return a hash of the sum of the tensor's bytes as integers: read once, on its device, and the
    same on all kinds of devices.
    """
    kind = tensor.dtype, tuple(tensor.shape)
    if not _has_values(tensor):
        return site_hash(*kind)
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    words = flat.numel() // 8 * 8
    aligned = flat[:words] if flat.storage_offset() % 8 == 0 else flat[:words].clone()
    total = aligned.view(torch.int64).sum() + flat[words:].sum(dtype=torch.int64)
    return site_hash(*kind, int(total))


def _has_values(tensor: Tensor) -> bool:
    """Return whether it is a plain tensor with values; others (meta, quantized, DTensors) are
    compared by their shape.
    """
    is_dense = tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_nested)
    return type(tensor.detach()) is Tensor and is_dense and not tensor.is_meta

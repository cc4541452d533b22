"""Parameters that are not in the module between forwards: offloaded to CPU or disk by Hugging Face
accelerate, or sharded by DeepSpeed's ZeRO-3.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from flex_model.names import clean

# accelerate.


def is_offloaded(root: nn.Module, full_name: str) -> bool:
    """Whether accelerate keeps this parameter's weights on CPU or disk. Local."""
    return _place(root, full_name) is not None


def read(root: nn.Module, full_name: str) -> Tensor:
    """Return the weights of an offloaded parameter: the tensor that is kept on the CPU itself, or a
    copy of the one on disk. Local.
    """
    place = _place(root, full_name)
    assert place is not None
    weights, key = place
    return weights[key]


def check_gradient(what: str, root: nn.Module, full_name: str) -> None:
    """ValueError for a parameter that gets no gradient because it is offloaded. Local."""
    if is_offloaded(root, full_name) and root.get_parameter(full_name).requires_grad:
        raise ValueError(
            f"{what}: accelerate offloads {clean(root, full_name)!r}: each forward uses a copy of "
            "it on the device, and the copy's gradient is dropped; keep its layer on a device in "
            "device_map, or hook the gradients of the module"
        )


def write(root: nn.Module, full_name: str, value: Tensor) -> None:
    """Set the weights of an offloaded parameter, under all its names. Local.

    Raises:
        ValueError: they are in a checkpoint's own files, or in an unknown kind of map.
    """
    for name in [full_name, *tied_names(root, full_name)]:
        place = _place(root, name)
        if place is not None:
            _write(clean(root, name), *place, value)
        elif name != full_name:
            root.get_parameter(name).data.copy_(value)


def _write(full_name: str, weights: Any, key: str, value: Tensor) -> None:
    in_memory = getattr(weights, "state_dict", weights)
    if isinstance(in_memory, Mapping) and key in in_memory:
        in_memory[key].copy_(value)
    elif key in getattr(weights, "index", ()):
        info = weights.index[key]
        if info.get("safetensors_file") is not None:
            raise ValueError(
                f"set_module_parameter: {full_name!r} is offloaded to {info['safetensors_file']}, "
                "a file of the checkpoint itself, which is not written to; load the model without "
                "offloading to disk, or offload it with accelerate.disk_offload"
            )
        accelerate: Any = sys.modules["accelerate.utils"]
        accelerate.offload_weight(value, key, weights.save_folder)
    else:
        raise ValueError(
            f"set_module_parameter: {full_name!r} is offloaded to a {type(weights).__name__}, "
            "where it can't be written; set it before the model is dispatched"
        )


def tied_groups(root: nn.Module) -> dict[str, set[str]]:
    """Return, by name, the names of one parameter that Hugging Face models state to be tied: also
    those of several tensors, as offloading and the meta device separate them. Local.
    """
    groups: dict[str, set[str]] = {}
    for prefix, module in root.named_modules():
        stated = getattr(module, "all_tied_weights_keys", None)
        for target, source in (stated if isinstance(stated, Mapping) else {}).items():
            dot = prefix and f"{prefix}."
            names = {dot + source, dot + target}
            group = names.union(*(groups.get(name, ()) for name in names))
            groups.update(dict.fromkeys(group, group))
    return groups


def tied_names(root: nn.Module, full_name: str) -> list[str]:
    """Return other names of this parameter, as Hugging Face models state them. Local."""
    return sorted(tied_groups(root).get(full_name, set()) - {full_name})


def _place(root: nn.Module, full_name: str) -> tuple[Any, str] | None:
    """Return the innermost hook's map that holds the weights, and the key in it: the map inside of
    a prefixed one, which iterates over keys without the prefix.
    """
    parts = full_name.split(".")
    for depth in range(len(parts) - 1, -1, -1):
        hook = getattr(root.get_submodule(".".join(parts[:depth])), "_hf_hook", None)
        for one in getattr(hook, "hooks", (hook,)):
            key = ".".join(parts[depth:])
            weights: Any = getattr(one, "weights_map", None)
            while hasattr(weights, "dataset") and hasattr(weights, "prefix"):
                weights, key = weights.dataset, weights.prefix + key
            if getattr(one, "offload", False) and weights is not None and key in weights:
                return weights, key
    return None


# DeepSpeed ZeRO-3.


def is_zero_3(parameter: Tensor) -> bool:
    """Whether DeepSpeed's ZeRO-3 keeps a part of this parameter on each rank. Local."""
    return hasattr(parameter, "ds_shape") and "deepspeed" in sys.modules


@contextlib.contextmanager
def gathered(parameter: Any, writeback: bool) -> Iterator[None]:
    """Gather a ZeRO-3 parameter in full, inside; ``writeback`` keeps what is written to it.
    Collective over its data-parallel ranks.
    """
    if not writeback and tuple(parameter.shape) == tuple(parameter.ds_shape):
        yield  # in use: leaving GatheredParameters would release it
        return
    deepspeed: Any = sys.modules["deepspeed"]
    first = dist.get_process_group_ranks(parameter.ds_process_group)[0] if writeback else None
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=first):
        yield


def zero_3_gradient(parameter: Any) -> Tensor | None:
    """Return the full gradient of a ZeRO-3 parameter, or None. Collective over its ranks."""
    deepspeed: Any = sys.modules["deepspeed"]
    gradient: Tensor | None = deepspeed.utils.safe_get_full_grad(parameter)
    return gradient

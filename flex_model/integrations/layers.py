"""Layouts of plain parameters in layers that shard themselves, read from public attributes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from flex_model.distributed.mesh import Mesh
from flex_model.distributed.placement import Placement, Replicate, Shard
from flex_model.integrations import quantized, transformers_private
from flex_model.integrations.dtensor import axis_names
from flex_model.names import own_tensor

# Attributes in which layers state the full sizes of the dims of ``weight``. The first one is the
# size of ``bias`` too.
_STATED_SIZES = (
    ("out_features", "in_features"),  # fairscale
    ("output_size", "input_size"),  # Megatron
    ("num_embeddings", "embedding_dim"),  # both
)


def marked_placement(
    module: nn.Module, leaf_name: str, parameter: Tensor, mesh: Mesh
) -> Placement | None:
    """Return the placement of a plain parameter along tp by the marks of Megatron's layers:
    ``tensor_model_parallel``, ``partition_dim``, and ``partition_stride``, two for a gated
    ``linear_fc1``, whose shards have a part of the gate and one of the other half. None without
    marks. Local.
    """
    if mesh.tp_size == 1 or leaf_name not in ("weight", "bias") or _is_along_tp(parameter, mesh):
        return None
    weight = own_tensor(module, "weight")  # None in an output layer that is tied
    if not (_is_marked(parameter) or _is_marked(weight)):
        return None
    if is_of_own_experts(parameter) or not _is_split_over(module, mesh):
        return None
    if not _is_marked(parameter):
        return Replicate()
    dim: int = parameter.partition_dim  # type: ignore[attr-defined]
    return Shard(dim % parameter.ndim, getattr(parameter, "partition_stride", 1))


def placement_without_statement(parameter: Tensor, axis: str) -> Placement | None:
    """Return the placement of a parameter where nothing states it (along tp: beside others that are
    stated): replicated, but None for what Megatron marks as a shard or as an expert's. Local.
    """
    is_other = is_of_own_experts(parameter) or (axis == "tp" and _is_marked(parameter))
    return None if is_other else Replicate()


def _is_marked(parameter: Any) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))


def is_of_own_experts(parameter: Any) -> bool:
    """Whether, under Megatron's expert parallelism, ranks have other experts by the same name.
    Local.
    """
    return getattr(parameter, "allreduce", True) is False


def _is_split_over(module: nn.Module, mesh: Mesh) -> bool:
    """Whether the group that a marked layer splits its parameters over may be that of tp: experts
    have one of their own.
    """
    group = getattr(module, "tp_group", None)
    return not isinstance(group, dist.ProcessGroup) or group.size() == mesh.tp_size


def as_computed_with(
    module: nn.Module, leaf_name: str, tensor: Tensor, tp: Placement | None
) -> Placement | None:
    """Return the placement along tp of a DTensor, as its layer computes with it. Local.

    Experts of transformers take halves of what a rank's part of ``gate_up_proj`` gives, so the part
    has a part of the gate and one of the other half. A plan that shards what is stored interleaved
    (of Inkling 2) states consecutive shards, and the loader then sorts each by halves.
    """
    is_last = leaf_name.endswith("_bias") or getattr(module, "is_transposed", False)
    halves = Shard(tensor.ndim - 1 if is_last else tensor.ndim - 2)
    if tp != halves or not leaf_name.startswith("gate_up_proj"):
        return tp
    is_sorted = transformers_private.is_experts(module) and module.is_concatenated
    return replace(halves, parts=2) if is_sorted else tp


def gives_the_same_to_all(module: nn.Module) -> bool:
    """Whether the module's outputs are replicated along tp by its framework's contract: Megatron's
    rotary embeddings. (A sequence-parallel rank computes their length from its local length times
    the number of ranks, which propagation can't distinguish from other integers.) Local.
    """
    return _is_megatrons(module, "RotaryEmbedding")


def _is_megatrons(module: nn.Module, name: str = "") -> bool:
    kinds = type(module).__mro__
    return any(k.__module__.startswith("megatron.") and name in k.__name__ for k in kinds)


def stated_sizes(module: nn.Module, leaf_name: str) -> tuple[int, ...] | None:
    """Return the full sizes of a weight or bias that its layer states in attributes: fairscale's,
    and all that have one of the pairs. Local.
    """
    number = {"weight": 2, "bias": 1}.get(leaf_name)
    pairs: list[Any] = [[getattr(module, one, None) for one in names] for names in _STATED_SIZES]
    found = [pair for pair in pairs if all(isinstance(size, int) for size in pair)]
    if number is None or not found:
        return None
    return tuple(map(max, *found, (0, 0)))[:number]  # a subclass of nn.Linear has local ones too


def dims_smaller_than_stated(
    module: nn.Module, leaf_name: str, parameter: Tensor, mesh: Mesh
) -> list[int]:
    """Return the dims of a weight or bias that are smaller than its layer states, or may be: all of
    one that is packed in an unknown format. If there are any it is not replicated by what others
    state, but it need not be an even shard. Local.
    """
    sizes = stated_sizes(module, leaf_name)
    if sizes is None or parameter.ndim != len(sizes) or _is_along_tp(parameter, mesh):
        return []
    if not quantized.has_one_value_each(module, leaf_name, parameter):
        return list(range(parameter.ndim))
    if any(own > full for own, full in zip(parameter.shape, sizes)):
        return []  # packed
    return [dim for dim, own in enumerate(parameter.shape) if own < sizes[dim]]


def share_by_sizes(
    module: nn.Module, leaf_name: str, parameter: Tensor, mesh: Mesh
) -> tuple[Shard, tuple[int, ...]] | None:
    """Return the placement of a weight or bias that is smaller than its layer states along one dim,
    also if its shard is uneven (whole heads), and the stated sizes, which the ranks' shards must
    add up to: a padded one is none. Local.
    """
    sizes = stated_sizes(module, leaf_name)
    dims = dims_smaller_than_stated(module, leaf_name, parameter, mesh)
    if sizes is None or len(dims) != 1:
        return None
    if _is_megatrons(module):
        return None  # without its marks, a partition_stride above 1 could not be seen from sizes
    if not quantized.has_one_value_each(module, leaf_name, parameter):
        return None
    return Shard(dims[0]), sizes


# Attributes of attention modules with the size of one head, which tensor parallelism never splits.
_HEAD_SIZES = (
    "head_dim", "head_size", "attention_head_size", "key_value_proj_dim", "d_head", "d_kv",
    "hidden_size_per_attention_head", "dim_head", "dim_per_head", "qk_head_dim", "v_head_dim",
)  # fmt: skip
# DeepSeek's latent attention makes keys and values of a head by one projection.
_KEY_AND_VALUE_SIZES = ("qk_nope_head_dim", "v_head_dim")


def stated_last_sizes(module: nn.Module) -> frozenset[int]:
    """Return full sizes that a module's attributes state for the last dim of its views: sizes of
    heads, and the number of experts of Megatron's routers. Local.
    """
    found = [module.__dict__.get(name) for name in _HEAD_SIZES]
    joined: list[Any] = [module.__dict__.get(name) for name in _KEY_AND_VALUE_SIZES]
    if all(type(size) is int for size in joined):
        found.append(sum(joined))
    if _is_megatrons(module, "Router"):
        found.append(module.__dict__.get("num_experts"))
    return frozenset(size for size in found if type(size) is int)


def states_tensor_parallelism(root: nn.Module, mesh: Mesh) -> bool:
    """Whether some parameters state that tensor parallelism shards them, so that the others are
    replicated: DTensors, marked parameters, and this rank's share of the stated sizes. Local.
    """
    if mesh.tp_size == 1:
        return False
    for module in root.modules():
        for name, parameter in module.named_parameters(recurse=False):
            marked = marked_placement(module, name, parameter, mesh)
            if marked is not None or _is_along_tp(parameter, mesh):
                return True
            share = share_by_sizes(module, name, parameter, mesh)
            if share is not None:
                dim = share[0].dim
                if _is_share_of_units(parameter.shape[dim], share[1][dim], mesh):
                    return True
    return False


def _is_share_of_units(own: int, full: int, mesh: Mesh) -> bool:
    """Whether ``own`` is this tensor-parallel rank's share of a dim, if units of some size (heads)
    are distributed as by ``torch.chunk`` or ``torch.tensor_split``.
    """
    place = mesh.coordinates["tp"]
    most_in_unit = math.gcd(own, full)
    for unit in (unit for unit in range(1, most_in_unit + 1) if most_in_unit % unit == 0):
        num_units = full // unit
        each, rest = divmod(num_units, mesh.tp_size)
        most = -(-num_units // mesh.tp_size)
        shares = each + (place < rest), min(most, max(0, num_units - place * most))
        if own // unit in shares:
            return True
    return False


def _is_along_tp(tensor: Any, mesh: Mesh) -> bool:
    return "tp" in axis_names(tensor, mesh, "a parameter")

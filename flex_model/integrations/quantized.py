"""Full values of packed weights: quantised or compressed ones, as their packages keep them.

Each kind has one entry in ``_KINDS``: how it is recognised, the shape of the values of what this
rank holds, and the values themselves, by the package's own public means. What looks packed and has
no entry is refused: bytes are never returned as values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flex_model.distributed.placement import Shape
from flex_model.integrations.dtensor import is_dtensor, to_local

# Floating dtypes with several values in one element.
_SEVERAL_VALUES = {torch.float4_e2m1fn_x2}
_NARROW = {getattr(torch, n) for n in dir(torch) if n.startswith("float8_")} | _SEVERAL_VALUES
# What the tensors beside a packed weight are called: each has some of its values' factors.
_FACTORS = ("scale", "absmax", "zero_point", "qzeros")


@dataclass(frozen=True)
class Kind:
    """A packed format of a weight.

    Attributes:
        name: For messages.
        shape: Returns the shape of the values of a rank's packed tensor; None where it can't be
            known. ``(module, leaf name, packed tensor) -> shape``.
        values: Returns those values, dense; None where that is not possible.
        in_tensor: Whether the packed tensor itself holds all that its values need, so that a slice
            of it does, too.
    """

    name: str
    shape: Callable[[nn.Module, str, Any], Shape | None]
    values: Callable[[nn.Module, str, Any], Tensor] | None
    in_tensor: bool = False


def kind_of(module: nn.Module, leaf_name: str, tensor: Tensor) -> Kind | None:
    """Return how a parameter of ``module`` is packed; None for one whose elements are its values.
    Local.
    """
    local = to_local(tensor)
    return next((kind for find in _KINDS if (kind := find(module, leaf_name, local))), None)


def has_one_value_each(module: nn.Module, leaf_name: str, tensor: Tensor) -> bool:
    """Whether it is known that each element of a tensor holds one value, so that its sizes can be
    compared with those that its layer states. Local.
    """
    kind = kind_of(module, leaf_name, tensor)
    if kind is not None:
        own = to_local(tensor)
        return kind.shape(module, leaf_name, own) == tuple(own.shape)
    return tensor.is_floating_point() and tensor.dtype not in _SEVERAL_VALUES


def values(
    kind: Kind, module: nn.Module, leaf_name: str, tensor: Tensor, site: str, *, is_part: bool
) -> Tensor:
    """Return the values of this rank's packed tensor, dense. Local.

    Args:
        is_part: Whether it is a shard that its layer never computes with: FSDP2 gathers it first.

    Raises:
        ValueError: this kind can't be read, or a part that it needs is not here.
    """
    if kind.values is None:
        raise ValueError(_refusal(site, kind, "no way to unpack it is known"))
    if is_part and not kind.in_tensor:
        why = "FSDP shards it, and its scales are kept apart"
        raise ValueError(_refusal(site, kind, why))
    local = to_local(tensor).detach()
    try:
        with torch.no_grad():
            found = kind.values(module, leaf_name, local)
    except Exception as error:  # of the package that unpacks, of any type
        text = f"{type(error).__name__}: {error}"
        raise ValueError(_refusal(site, kind, f"unpacking it failed ({text})")) from error
    expected = kind.shape(module, leaf_name, local)
    if type(found) is not Tensor or tuple(found.shape) != expected:
        got = f"a {type(found).__name__} of shape {tuple(found.shape)}, not {expected}"
        raise ValueError(_refusal(site, kind, f"unpacking it gave {got}"))
    return found


def _refusal(site: str, kind: Kind, why: str) -> str:
    return (
        f"{site} is packed ({kind.name}) and can't be read as full values: {why}; "
        "read the packed tensor with get_module_parameter(..., raw=True)"
    )


def parts(module: nn.Module, leaf_name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain tensors that hold a packed weight and are not the module's own, by name: each
    is whole where the weight is. Local.
    """
    if unpacks_itself(tensor):
        names: list[str] = getattr(tensor, "__tensor_flatten__", lambda: ([], None))()[0]
        held = [(name, getattr(tensor, name)) for name in names]
    else:
        is_4_bit = _bitsandbytes(module, leaf_name, tensor) is not None
        held = _parts_4bit(_state_4bit(module)) if is_4_bit else []
    yield from ((name, part) for name, part in held if type(part) is Tensor)


def drops_scales(
    name: str, stored: Tensor, own: Tensor, names: Callable[[], Iterable[str]]
) -> bool:
    """Whether a stored weight, cast to the dtype of the model's own, would lose its scales:
    integers, and float8 with scales beside it. Local.

    Args:
        names: Returns the names of all stored tensors.
    """
    if not own.is_floating_point() or own.dtype in _NARROW or not is_narrow(stored):
        return False
    if not stored.is_floating_point():
        return True
    beside = (one.rpartition(".") for one in names())
    return any(own == name.rpartition(".")[0] and "scale" in leaf for own, _, leaf in beside)


def not_written(kind: Kind, site: str) -> str:
    """Return why full values can't be written to a packed weight."""
    return (
        f"set_module_parameter: {site} is packed ({kind.name}), and full values can't be written "
        "to it; load the model without quantisation, or replace its layer by one that is not "
        "quantised before the model is wrapped"
    )


def can_join(module: nn.Module, leaf_name: str, tensor: Tensor) -> bool:
    """Whether shards of a packed tensor, joined by the layout of its values, are the whole packed
    tensor. Local.
    """
    kind, local = kind_of(module, leaf_name, tensor), to_local(tensor)
    if unpacks_itself(local):
        return False
    if kind is None or kind.values is None:
        return True  # a layout that was stated is one of these bytes
    return is_dtensor(tensor) or kind.shape(module, leaf_name, local) == tuple(local.shape)


def not_joined(packed: str, site: str) -> str:
    """Return why shards can't be joined packed."""
    return (
        f"{site}: each rank holds a part of it, packed ({packed}), and such parts can't be joined "
        "packed; read its values (without raw=True), or this rank's part from "
        "flex.module.get_parameter(...)"
    )


def stored_name(root: nn.Module, name: str) -> str:
    """Return the name under which compressed-tensors keeps the weight called ``name`` packed; the
    name itself for others. Local.
    """
    owner, _, leaf = str(name).rpartition(".")
    try:
        module = root.get_submodule(owner)
    except AttributeError:
        return name
    is_packed = leaf == "weight" and _is_compressed(module) and leaf not in module._parameters
    return f"{name}_packed" if is_packed and "weight_packed" in module._parameters else name


def name_of_values(root: nn.Module, full_name: str, shown: str) -> str:
    """Return the name to show for the values of a parameter: the inverse of ``stored_name``.
    Local.
    """
    owner, _, leaf = full_name.rpartition(".")
    is_packed = leaf == "weight_packed" and _is_compressed(root.get_submodule(owner))
    return shown.removesuffix("_packed") if is_packed else shown


def _own_shape(module: nn.Module, leaf_name: str, packed: Tensor) -> Shape:
    return tuple(packed.shape)


def is_narrow(tensor: Tensor) -> bool:
    """Whether a tensor's dtype is one that models don't compute in. Local."""
    return tensor.dtype in _NARROW or not (tensor.is_floating_point() or tensor.is_complex())


def _is_from(package: str, value: object, *names: str) -> bool:
    """Whether a class of ``value`` has one of these names, in this package."""
    classes = [kind for kind in type(value).__mro__ if kind.__module__.startswith(package)]
    return any(kind.__name__ in names for kind in classes)


# ---- Tensors that unpack themselves: torchao, optimum-quanto, torch's own ----


def unpacks_itself(tensor: Tensor) -> bool:
    """Whether a tensor has a ``dequantize`` that gives its values: torch's own returns others as
    they are.
    """
    return type(tensor).dequantize is not Tensor.dequantize or tensor.is_quantized


def _self_unpacking(module: nn.Module, leaf_name: str, tensor: Tensor) -> Kind | None:
    if not unpacks_itself(tensor):
        return None
    name = str(tensor.dtype) if tensor.is_quantized else type(tensor).__name__
    return Kind(name, _own_shape, lambda module, leaf, own: own.dequantize(), in_tensor=True)


# ---- bitsandbytes ----


def _bitsandbytes(module: nn.Module, leaf_name: str, tensor: Tensor) -> Kind | None:
    if "bitsandbytes" not in sys.modules or leaf_name != "weight":
        return None
    if _is_from("bitsandbytes", module, "Linear4bit", "Embedding4bit"):
        state = _state_4bit(module)
        if state is not None and tuple(tensor.shape) != tuple(state.shape):
            return Kind("bitsandbytes, 4 bits", _shape_4bit, _values_4bit)
    of_8_bit = _is_from("bitsandbytes", module, "Linear8bitLt", "Embedding8bit")
    if of_8_bit and tensor.dtype == torch.int8:
        return Kind("bitsandbytes, 8 bits", _own_shape, _values_8bit)
    return None


def _state_4bit(module: nn.Module) -> Any:
    """Return bitsandbytes' state of a weight; None before the weight is quantised."""
    weight = module._parameters.get("weight")
    return getattr(weight, "quant_state", None) or getattr(module, "quant_state", None)


def _parts_4bit(state: Any) -> list[tuple[str, Any]]:
    """Return the scales of a weight, and the scales of those, by name."""
    if state is None:
        return []
    held = [(name, getattr(state, name, None)) for name in ("absmax", "code", "offset")]
    nested = _parts_4bit(getattr(state, "state2", None))
    return held + [(f"state2.{name}", part) for name, part in nested]


def _shape_4bit(module: nn.Module, leaf_name: str, packed: Tensor) -> Shape | None:
    shape = tuple(_state_4bit(module).shape)
    is_whole = packed.numel() * packed.element_size() * 2 == shape[0] * shape[1]
    return shape if is_whole else None


def _values_4bit(module: nn.Module, leaf_name: str, packed: Tensor) -> Tensor:
    if _shape_4bit(module, leaf_name, packed) is None:
        raise ValueError("this rank holds a part of its bytes, and the state of all of them")
    functional: Any = sys.modules["bitsandbytes"].functional
    found: Tensor = functional.dequantize_4bit(packed.data, _state_4bit(module))
    return found


def _values_8bit(module: nn.Module, leaf_name: str, packed: Tensor) -> Tensor:
    scales = getattr(module._parameters.get("weight"), "SCB", None)
    if scales is None:  # the first forward moves them
        scales = getattr(getattr(module, "state", None), "SCB", None)
    if scales is None or scales.numel() != packed.shape[0]:
        raise ValueError("its rows' scales (SCB) are not here")
    functional: Any = sys.modules["bitsandbytes"].functional
    found: Tensor = functional.int8_vectorwise_dequant(packed.data, scales)
    return found


# ---- compressed-tensors ----


def _is_compressed(module: nn.Module) -> bool:
    status = getattr(module, "quantization_status", None)
    return hasattr(module, "quantization_scheme") and getattr(status, "value", "") == "compressed"


def _compressed(module: nn.Module, leaf_name: str, tensor: Tensor) -> Kind | None:
    is_packed = leaf_name == "weight_packed" or (leaf_name == "weight" and is_narrow(tensor))
    if not is_packed or not _is_compressed(module):
        return None
    scheme: Any = module.quantization_scheme
    name = getattr(scheme.format, "value", "unknown format")
    return Kind(f"compressed-tensors, {name}", _shape_compressed, _values_compressed)


def _shape_compressed(module: nn.Module, leaf_name: str, packed: Tensor) -> Shape | None:
    if leaf_name == "weight":
        return tuple(packed.shape)
    stated = getattr(module, "weight_shape", None)
    if not isinstance(stated, Tensor) or stated.numel() != packed.ndim:
        return None
    scheme: Any = module.quantization_scheme
    shape, bits = tuple(stated.tolist()), scheme.weights.num_bits
    words = -(-shape[-1] * bits // (8 * packed.element_size()))
    return shape if (*shape[:-1], words) == tuple(packed.shape) else None


def _values_compressed(module: nn.Module, leaf_name: str, packed: Tensor) -> Tensor:
    compressors: Any = sys.modules["compressed_tensors.compressors"]
    scheme: Any = module.quantization_scheme
    compressor = compressors.BaseCompressor.get_value_from_registry(scheme.format.value)
    own = {**module._parameters, **module._buffers}
    parts = {name: to_local(tensor) for name, tensor in own.items() if tensor is not None}
    found: Tensor = compressor.decompress({**parts, leaf_name: packed}, scheme)["weight"]
    return found.detach()


# ---- Hugging Face's own layer: float8 in blocks ----


def _float8_layer(module: nn.Module, leaf_name: str, tensor: Tensor) -> Kind | None:
    is_float8 = tensor.dtype in _NARROW and tensor.dtype not in _SEVERAL_VALUES
    if is_float8 and tensor.ndim == 2 and _is_from("transformers.", module, "FP8Linear"):
        return Kind("float8 in blocks", _own_shape, _values_of_blocks)
    return None


def _values_of_blocks(module: nn.Module, leaf_name: str, packed: Tensor) -> Tensor:
    scales = to_local(getattr(module, f"{leaf_name}_scale_inv"))
    if not scales.is_floating_point():
        raise ValueError(f"its scales are {scales.dtype}")
    scales = scales.float()
    block_size: Any = module.block_size
    if block_size is None:
        if scales.numel() != 1:
            raise ValueError(f"its scales have the shape {tuple(scales.shape)}")
        return packed.float() * scales
    blocks = tuple(-(-size // block) for size, block in zip(packed.shape, block_size))
    if blocks != tuple(scales.shape):
        raise ValueError(
            f"it has {blocks} blocks of {tuple(block_size)} here, and its scales the shape "
            f"{tuple(scales.shape)}"
        )
    for dim in (0, 1):
        of_elements = scales.repeat_interleave(block_size[dim], dim)
        scales = of_elements.narrow(dim, 0, packed.shape[dim])
    return packed.float() * scales


# ---- What looks packed ----


def _unknown(module: nn.Module, leaf_name: str, tensor: Tensor) -> Kind | None:
    """Return a kind without values for a narrow or integer weight with factors beside it, and for
    the weights of Hugging Face's mxfp4 experts.
    """
    is_factor = any(part in leaf_name for part in _FACTORS)
    if is_factor or not is_narrow(tensor) or tensor.ndim < 2:
        return None
    beside = [*module._parameters, *module._buffers]
    has_factors = any(part in name for name in beside for part in _FACTORS)
    if not has_factors and not _is_from("transformers.", module, "Mxfp4GptOssExperts"):
        return None
    name = f"{tensor.dtype} in a {type(module).__name__}, a kind that flex_model does not know"
    return Kind(name, lambda module, leaf, packed: None, None)


_KINDS: tuple[Callable[[nn.Module, str, Tensor], Kind | None], ...] = (
    _self_unpacking, _bitsandbytes, _compressed, _float8_layer, _unknown,
)  # fmt: skip

"""Reads checkpoints of Hugging Face models whose names or tensors differ from the model's: one
tensor per expert instead of one for all, names of older versions, names of a base model. Quantised
ones are dequantised tensor by tensor, by transformers' own operations, or refused.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flex_model.integrations import quantized, transformers_private

# Methods whose dequantised weights compute bit for bit what `from_pretrained` computes on a CPU.
_METHODS = ("fp8", "mxfp4", "compressed-tensors")
_FORMATS = ("pack-quantized", "naive-quantized", "float-quantized", "int-quantized")

# Stored beside a packed weight and its scales, and read with them, or not needed for values.
_OTHERS = ("activation", "shape", "zero_point")
_ENDS = ("_scale_inv", "_scale", "_scales", "_blocks", "_packed")


def model_on_meta(folder: Path, otherwise: str, dtype: torch.dtype | None = None) -> Any:
    """Return the model of a folder or a ``config.json``, without weights.

    Args:
        otherwise: The class of transformers that makes it where the file names none of its own.
        dtype: Default: the file's, or float32.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    dtype = dtype or getattr(config, "dtype", None) or torch.float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            made: Any = kind or getattr(transformers, otherwise).from_config
            model = made(config)
    finally:
        torch.set_default_dtype(before)
    transformers_private.set_dtypes(model, dtype)
    return model.eval()


class QuantizedCheckpoint:
    """A checkpoint whose configuration states that its weights are quantised.

    Args:
        config: Its ``quantization_config``.
        path: For messages.
    """

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        self._config, self._path = dict(config), path
        self._method = str(config.get("quant_method", "an unknown method"))

    def refusal(self, why: str) -> ValueError:
        """Return the error that says why it is not run."""
        return ValueError(
            f"sequential.run: the weights in {self._path} are quantised ({self._method}), and not "
            f"dequantised while they are read: {why}; save a dequantised copy once, as in "
            "docs/sequential.md#quantised-checkpoints, and give its folder"
        )

    def quantizer(self) -> Any:
        """Return transformers' object that dequantises its weights.

        Raises:
            ValueError: a method, or a setting of it, whose dequantised weights would give other
                numbers than the model that ``from_pretrained`` makes.
            ImportError: the method's package is missing.
        """
        if self._method not in _METHODS:
            raise self.refusal(f"that is done for {', '.join(_METHODS)}")
        why = _unlike_its_weights(self._config) if self._method == _METHODS[-1] else None
        if why is not None:
            raise self.refusal(why)
        from transformers.quantizers import AutoHfQuantizer, AutoQuantizationConfig

        settings = AutoQuantizationConfig.from_dict({**self._config, "dequantize": True})
        quantizer = AutoHfQuantizer.from_config(settings, pre_quantized=True)
        if "dequantize" not in getattr(quantizer, "get_load_operations", dict)():
            raise self.refusal("this version of transformers has no operation for it")
        quantizer.validate_environment()
        return quantizer

    def check(
        self,
        made: Mapping[str, list[str]],
        known: Mapping[str, Tensor],
        read: Callable[[str], Tensor],
    ) -> None:
        """Check that each quantised tensor has the scales of its own, and that nothing else beside
        it is left out.

        Args:
            made: The names of the stored tensors, by the name that they get in the model.
            known: The model's own tensors, by name.
            read: Returns a stored tensor, whose values are not used.
        """
        owners = set()
        for name in known.keys() & made.keys():  # integers have no scales: positions, counts
            is_float = known[name].is_floating_point()
            if is_float and self._is_quantised(name, made[name], read):
                owners.add(name.rpartition(".")[0])
        for name in made.keys() - known.keys():
            if name.rpartition(".")[0] in owners:
                stored = made[name][0]
                raise self.refusal(f"{stored!r} is beside a quantised weight, and has no use known")

    def _is_quantised(self, name: str, stored: list[str], read: Callable[[str], Tensor]) -> bool:
        """Whether a tensor of the model is made of quantised ones; ValueError if scales of some are
        missing.
        """
        weights: dict[str, Tensor] = {}
        scales: dict[str, Tensor] = {}
        for one in stored:
            owner, _, leaf = one.rpartition(".")
            if any(part in leaf for part in _OTHERS):
                continue
            own = f"{owner}.{_leaf_of_values(leaf)}"
            if "scale" in leaf:
                scales[own] = read(one)
            elif quantized.is_narrow(tensor := read(one)):
                weights[own] = tensor
        for own in sorted(weights.keys() ^ scales.keys()):
            lacks = "scales" if own in weights else "quantised tensor"
            raise self.refusal(f"{own!r} has no {lacks} (for {name!r})")
        for own, weight in weights.items():
            self._check_blocks(own, weight, scales[own])
        return bool(weights)

    def _check_blocks(self, name: str, weight: Tensor, scales: Tensor) -> None:
        """ValueError for smaller blocks at an edge: transformers divides a weight into equal ones,
        as many as there are scales.
        """
        blocks = self._config.get("weight_block_size")
        if not blocks or scales.ndim != 2 or not weight.is_floating_point():
            return
        for size, block, number in zip(weight.shape, blocks, scales.shape):
            if number > 1 and size % block and number == -(-size // block):
                raise self.refusal(
                    f"{name!r} of shape {tuple(weight.shape)} has smaller blocks than "
                    f"{tuple(blocks)} at an edge"
                )


def _leaf_of_values(leaf: str) -> str:
    """Return what a packed tensor and its scales have in common."""
    if leaf in ("scale", "qscale_weight"):  # transformers renames them
        return "weight"
    return next((leaf.removesuffix(end) for end in _ENDS if leaf.endswith(end)), leaf)


def stated(path: Path, model: nn.Module) -> QuantizedCheckpoint | None:
    """Return what the configuration in a checkpoint's folder, or that of the model where there is
    none, states of quantisation; None for plain weights. Local.
    """
    file = (path if path.is_dir() else path.parent) / "config.json"
    if file.is_file():
        try:
            config = json.loads(file.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"sequential.run: {file} is no JSON ({error}); download the checkpoint again"
            ) from error
    else:
        own: Any = getattr(model, "config", None)
        config = own.to_dict() if hasattr(own, "to_dict") else {}
    found = _find(config)
    return None if found is None else QuantizedCheckpoint(found, path)


def _find(config: Any) -> Mapping[str, Any] | None:
    """Return the ``quantization_config`` of a configuration or of one inside it."""
    if not isinstance(config, Mapping):
        return None
    own = config.get("quantization_config")
    if isinstance(own, Mapping) and own:
        return own
    return next((found for value in config.values() if (found := _find(value))), None)


def _unlike_its_weights(config: Mapping[str, Any]) -> str | None:
    """Return why a model of compressed-tensors computes otherwise than its dequantised weights, or
    can't be dequantised by one scheme; None if it can.
    """
    groups = list((config.get("config_groups") or {}).values())
    if any(not isinstance(group, Mapping) or not group.get("weights") for group in groups):
        return "a group of its layers states no quantisation of weights"
    if any(group.get("input_activations") or group.get("output_activations") for group in groups):
        return "it quantises activations, too, and its weights alone would give other numbers"
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        return "its weights are sparse"
    for name in ("kv_cache_scheme", "transform_config"):
        if config.get(name):
            return f"it states a {name}, so it computes with more than its weights"
    if config.get("quantization_status") != "compressed":
        return f"its quantization_status is {config.get('quantization_status')!r}"
    forms = [group.get("format") or config.get("format") for group in groups]
    schemes = zip(forms, (group["weights"] for group in groups))
    num = len({json.dumps(scheme, sort_keys=True, default=str) for scheme in schemes})
    if num != 1:
        return f"its layers have {num} schemes, of which transformers applies one to all"
    known = ", ".join(_FORMATS)
    return None if forms[0] in _FORMATS else f"its format is {forms[0]!r}, not one of {known}"


# ---- Names and tensors that differ ---------------------------------------------------------------


class _Source(Protocol):
    def names(self) -> Iterable[str]: ...
    def read(self, name: str) -> Tensor: ...


def for_model(model: nn.Module, source: _Source, path: Path, *, is_renamed: bool) -> _Source:
    """Return a source with the model's names and tensors; ``source`` itself for models that are not
    from transformers. Quantised weights are dequantised for a model of plain layers. Local.

    Args:
        path: The checkpoint's folder, or a file in it.
        is_renamed: Whether the source has the model's names already.

    Raises:
        ValueError: quantised weights that are not read as plain ones.
    """
    checkpoint = None if _is_quantised(model) else stated(path, model)
    if is_renamed:
        if checkpoint is not None:
            raise checkpoint.refusal("rename=... reads each tensor as it is stored")
        return source
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        if checkpoint is not None:
            raise checkpoint.refusal(f"{type(model).__name__} is not a model of transformers")
        return source
    return ConvertedWeights(model, source, checkpoint)


def _is_quantised(model: nn.Module) -> bool:
    """Whether a model has layers of quantised weights. Local."""
    return any(
        quantized.kind_of(module, name, parameter) is not None
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    )


class ConvertedWeights:
    """Weights as ``from_pretrained`` loads them: renamed, merged and split by transformers' own
    conversion table for the model.

    Args:
        checkpoint: Of quantised weights, which are dequantised; None: plain ones.

    Raises:
        ValueError: quantised weights that can't be dequantised one by one.
    """

    def __init__(
        self, model: Any, source: _Source, checkpoint: QuantizedCheckpoint | None = None
    ) -> None:
        from transformers import conversion_mapping, core_model_loading

        quantizer = None if checkpoint is None else checkpoint.quantizer()
        table = conversion_mapping.get_model_conversion_mapping(model, hf_quantizer=quantizer)
        renamings = [e for e in table if isinstance(e, core_model_loading.WeightRenaming)]
        converters = [e for e in table if isinstance(e, core_model_loading.WeightConverter)]
        by_pattern = {pattern: e for e in converters for pattern in e.source_patterns}
        self._model, self._source = model, source
        self._renamed: dict[str, str] = {}
        self._groups: dict[str, _Group] = {}  # by the name of each tensor that it makes
        self._made: Mapping[str, Tensor] = {}
        known = model.state_dict()
        for name in sorted(source.names(), key=core_model_loading.dot_natural_key):
            new_name, pattern = core_model_loading.rename_source_key(
                name, renamings, converters, model.base_model_prefix, known
            )
            if new_name not in known and name in known:
                new_name, pattern = name, None
            if pattern is None:
                self._renamed[new_name] = name
                continue
            converter = by_pattern[pattern]
            group = self._groups.get(new_name) or _Group(new_name, converter)
            group.parts.append((pattern, name))
            first = converter.target_patterns[0]
            for target in converter.target_patterns:
                self._groups[new_name.replace(first, target)] = group
        if checkpoint is not None:
            made = {name: [stored] for name, stored in self._renamed.items()}
            made |= {name: group.names for name, group in self._groups.items()}
            checkpoint.check(made, known, source.read)

    def names(self) -> Iterable[str]:
        """Return the names in the model."""
        return [*self._renamed, *self._groups]

    def read(self, name: str) -> Tensor:
        """Return one tensor of the model. If one conversion makes several tensors, the others are
        kept until they are read, or another conversion runs.
        """
        if name in self._renamed:
            return self._source.read(self._renamed[name])
        if name not in self._made:
            self._made = {}
            self._made = self._groups[name].make(self._model, self._source)
        made = dict(self._made)
        tensor = made.pop(name)
        self._made = made
        return tensor


class _Group:
    """A group of tensors in the files that are converted to one or more tensors of the model."""

    def __init__(self, name: str, converter: Any) -> None:
        self.parts: list[tuple[str, str]] = []  # pattern, name in the files
        self._name, self._converter = name, converter

    @property
    def names(self) -> list[str]:
        """The names in the files."""
        return [name for _, name in self.parts]

    def make(self, model: Any, source: _Source) -> dict[str, Tensor]:
        converter = copy.deepcopy(self._converter)
        for pattern, name in self.parts:
            converter.add_tensor(self._name, name, pattern, source.read(name))
        with torch.no_grad():
            made = converter.convert(self._name, model=model, config=model.config)
        return {
            name: value[0] if isinstance(value, list) else value for name, value in made.items()
        }

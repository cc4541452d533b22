"""Quantised checkpoints of Hugging Face models: which ones are dequantised tensor by tensor while
they are read, by transformers' own operations, and why others are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from flex_model.integrations import quantized

# Methods whose dequantised weights compute bit for bit what `from_pretrained` computes on a CPU.
_METHODS = ("fp8", "mxfp4", "compressed-tensors")
_FORMATS = ("pack-quantized", "naive-quantized", "float-quantized", "int-quantized")

# Stored beside a packed weight and its scales, and read with them, or not needed for values.
_OTHERS = ("activation", "shape", "zero_point")
_ENDS = ("_scale_inv", "_scale", "_scales", "_blocks", "_packed")


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

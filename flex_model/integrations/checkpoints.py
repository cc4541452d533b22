"""Reads checkpoints of Hugging Face models whose names or tensors differ from the model's: one
tensor per expert instead of one for all, names of older versions, names of a base model.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flex_model.integrations import quantized
from flex_model.integrations.quantized_checkpoints import QuantizedCheckpoint, stated


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

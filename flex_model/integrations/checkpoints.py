"""Reads checkpoints of Hugging Face models whose names or tensors differ from the model's: one
tensor per expert instead of one for all, names of older versions, names of a base model.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class _Source(Protocol):
    def names(self) -> Iterable[str]: ...
    def read(self, name: str) -> Tensor: ...


def for_model(model: nn.Module, source: _Source) -> _Source:
    """Return a source with the model's names and tensors; ``source`` itself for models that are not
    from transformers. Local.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return source
    try:
        return ConvertedWeights(model, source)
    except ImportError:  # before transformers 5, the names are the same
        return source


class ConvertedWeights:
    """Weights as ``from_pretrained`` loads them: renamed, merged and split by transformers' own
    conversion table for the model.

    Raises:
        ImportError: this version of transformers has no such tables.
    """

    def __init__(self, model: Any, source: _Source) -> None:
        from transformers import conversion_mapping, core_model_loading

        table = conversion_mapping.get_model_conversion_mapping(model)
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

    def make(self, model: Any, source: _Source) -> dict[str, Tensor]:
        converter = copy.deepcopy(self._converter)
        for pattern, name in self.parts:
            converter.add_tensor(self._name, name, pattern, source.read(name))
        with torch.no_grad():
            made = converter.convert(self._name, model=model, config=model.config)
        return {
            name: value[0] if isinstance(value, list) else value for name, value in made.items()
        }

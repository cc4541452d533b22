"""Checkpoints of Hugging Face models whose files have other names or other tensors than the model:
one tensor per expert for what the model keeps in one, names of older versions, a base model's.
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
    """``source`` by the names and tensors of the model; itself where it has these already, and for
    models that transformers does not know. Local.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return source
    try:
        return ConvertedWeights(model, source)
    except ImportError:  # before transformers 5: names are as they are
        return source


class ConvertedWeights:
    """As ``from_pretrained`` would load them: renamed, merged and split by transformers' own table
    for the model.

    Raises:
        ImportError: a transformers without such tables.
    """

    def __init__(self, model: Any, source: _Source) -> None:
        from transformers import conversion_mapping, core_model_loading

        table = conversion_mapping.get_model_conversion_mapping(model)
        renamings = [e for e in table if isinstance(e, core_model_loading.WeightRenaming)]
        converters = [e for e in table if isinstance(e, core_model_loading.WeightConverter)]
        by_pattern = {pattern: e for e in converters for pattern in e.source_patterns}
        self._model, self._source = model, source
        self._renamed: dict[str, str] = {}
        self._groups: dict[str, _Group] = {}  # by the names of all that it makes
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
        """Names in the model."""
        return [*self._renamed, *self._groups]

    def read(self, name: str) -> Tensor:
        """One tensor of the model. Of several that are made from the same ones in the files, the
        others are kept until they or something else is read.
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
    """Tensors in the files that become one or more of the model's."""

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

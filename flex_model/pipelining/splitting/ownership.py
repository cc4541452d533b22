"""Which stages use which modules and parameters around the blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from flex_model.pipelining.splitting.learning import Learnt


class _Ownership:
    """Which stages hold which modules and parameters."""

    def __init__(self, model: nn.Module, learnt: Learnt) -> None:
        self._model, self._blocks = model, learnt.blocks
        self._recording = learnt.recordings[0]
        names = [name for name, _ in model.named_modules(remove_duplicate=False)]
        first = names.index(learnt.blocks.blocks[0])
        self._is_before = {name: index < first for index, name in enumerate(names)}

    def _stage_at(self, time: int) -> int:
        begins = [self._recording.begins[name][0] for name in self._blocks.blocks]
        if time >= self._recording.ends[self._blocks.blocks[-1]][0]:
            return self._blocks.stage_of(len(begins))
        return self._blocks.stage_of(sum(begin <= time for begin in begins) - 1)

    def of_module(self, name: str) -> set[int]:
        """The stages that call it or a module in it, or use a parameter of it."""
        module = self._model.get_submodule(name)
        prefix = f"{name}." if name else ""
        stages = {
            self._stage_at(time)
            for child, _ in module.named_modules()
            for time in self._recording.begins.get((prefix + child).rstrip("."), ())
        }
        for parameter in module.parameters():
            stages |= self._at(self._recording.outer_uses.get(id(parameter), ()))
        return stages or {0 if self._is_before[name] else self._blocks.num_stages - 1}

    def of_parameter(self, parameter: nn.Parameter) -> set[int]:
        """The stages that use a parameter of a module that is not called as one."""
        return self._at(self._recording.parameter_uses.get(id(parameter), ())) or {0}

    def _at(self, times: Iterable[int]) -> set[int]:
        return {self._stage_at(time) for time in times}

    def is_called(self, name: str) -> bool:
        return name in self._recording.begins


def parts(
    model: nn.Module, learnt: Learnt
) -> Iterator[tuple[str, nn.Module | nn.Parameter, set[int]]]:
    """What stages hold or do not hold as a whole, blocks left out: names, modules or parameters,
    and the stages that use them.
    """
    ownership = _Ownership(model, learnt)
    blocks = learnt.blocks
    seen: set[int] = set()

    def visit(name: str, module: nn.Module) -> Iterator[Any]:
        if id(module) in seen:
            return
        seen.add(id(module))
        if name in blocks.blocks:
            return
        if not blocks.is_in(name):
            if not any(True for _ in module.parameters()):
                return  # it costs nothing, and other stages may need what it computes
            is_empty = not any(
                ownership.is_called(f"{name}.{child}".rstrip("."))
                for child, _ in module.named_modules()
            )
            if ownership.is_called(name) or is_empty:
                yield name, module, ownership.of_module(name)
                return
        for key, parameter in module._parameters.items():
            if parameter is not None:
                path = f"{name}.{key}" if name else key
                yield path, parameter, ownership.of_parameter(parameter)
        for key, child in module._modules.items():
            if child is not None:
                yield from visit(f"{name}.{key}" if name else key, child)

    yield from visit("", model)

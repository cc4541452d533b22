"""This rank's stages, with the parameter and module names of the unsplit model."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from flex_model.integrations.torch_pipelining import is_traced
from flex_model.names import clean, find_module
from flex_model.pipelining.pass_through import is_stand_in

#: The name that torch's tracer gives to a further call of a module: ``name@1``.
REPEATED_CALL = re.compile(r"(.*)@\d+")
_TIED = "_flex_model_tied"  # an attribute of stages that `pipeline` made


class LocalStages(nn.Module):
    """This rank's stages as one module, whose parameters have the original names.

    Attributes:
        by_index: The module of each stage, by the index of the stage.
    """

    def __init__(self, stages: Sequence[Any]) -> None:
        super().__init__()
        self.by_index = {stage.stage_index: stage.submod for stage in stages}
        for index, module in self.by_index.items():
            self.add_module(f"stage{index}", module)
        self.register_load_state_dict_pre_hook(_add_stage_prefix)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        return self._named("named_parameters", prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        return self._named("named_buffers", prefix, recurse, remove_duplicate)

    def _named(
        self, method: str, prefix: str, recurse: bool, remove_duplicate: bool
    ) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        for stage in self.children() if recurse else ():
            for name, value in getattr(stage, method)(prefix, recurse, remove_duplicate):
                if not (remove_duplicate and id(value) in seen):
                    seen.add(id(value))
                    yield name, value

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        found: dict[str, Any] = {}
        for stage in self.children():
            found.update(stage.state_dict(*args, prefix=prefix, **kwargs))
        return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("stages are run by their schedule; call the FlexModel")


def _add_stage_prefix(root: LocalStages, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename the entries of each stage, which have the original names, to those that torch loads
    its children from.
    """
    found = {
        f"{prefix}{child}.{name}": f"{prefix}{name}"
        for child, stage in root.named_children()
        for name in stage.state_dict()
    }
    values = {name: state_dict[old] for name, old in found.items() if old in state_dict}
    for old in found.values():
        state_dict.pop(old, None)
    state_dict.update(values)


def describe_stage(stage: Any) -> dict[str, Any]:
    """Describe a stage for the ``StageIndex`` of all ranks, as JSON."""
    root = stage.submod
    called: list[str] = []
    held: list[str] = []
    types: dict[str, list[str]] = {}
    in_graph = set(_called_in_graph(root, "")) if hasattr(root, "graph") else None
    for name, module in root.named_modules(remove_duplicate=False):
        if is_stand_in(module):
            continue
        has_forward = type(module).forward is not nn.Module.forward
        is_called = has_forward if in_graph is None else name in in_graph
        is_called &= all(module is not other for other in getattr(stage, "uncalled", ()))
        name = clean(root, name)
        (called if is_called else held).append(name)
        types.setdefault(name, [type_name(kind) for kind in type(module).__mro__[:-1]])
    return {
        "index": stage.stage_index,
        "called": list(dict.fromkeys(called)),
        "held": list(dict.fromkeys(held)),
        "types": types,
        "parameters": _parameter_names(root),
        "tied": tied_parameters(root),
        "kwargs": accepted_kwargs(root),
        "is_traced": is_traced(stage),
    }


def type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def note_tied(names: dict[int, str], stages: Sequence[nn.Module]) -> None:
    """Note on stages that they hold one parameter of the unsplit model, under these names."""
    for index, name in names.items():
        vars(stages[index]).setdefault(_TIED, {})[name] = dict(names)


def tied_parameters(root: nn.Module) -> dict[str, dict[int, str]]:
    """Return the parameters of a stage that others hold, too, with their names by stage."""
    found = (vars(module)[_TIED] for module in root.modules() if _TIED in vars(module))
    return next(found, {})


def _parameter_names(root: nn.Module) -> list[list[str]]:
    """Return the names of each parameter of a stage; a tied one has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(clean(root, name))
    return list(names.values())


def _called_in_graph(module: Any, prefix: str) -> Iterator[str]:
    yield prefix
    for node in module.graph.nodes if hasattr(module, "graph") else ():
        if node.op == "call_module":
            name = f"{prefix}.{node.target}" if prefix else node.target
            yield from _called_in_graph(module.get_submodule(node.target), name)


def accepted_kwargs(root: nn.Module) -> list[str] | None:
    """Return the keyword arguments that a stage's forward takes; None for any."""
    while type(root).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
        root = root.module  # type: ignore[assignment]
    if hasattr(root, "graph"):
        return [node.name for node in root.graph.nodes if node.op == "placeholder"]  # type: ignore[union-attr]
    found = inspect.signature(root.forward).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in found):
        return None
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [parameter.name for parameter in found if parameter.kind in kinds]


def find_targets(root: nn.Module, name: str) -> list[nn.Module]:
    """Return the modules of a stage at which a hook on ``name`` is registered: torch's tracer makes
    one for each call.
    """
    try:
        first = find_module(root, name)
    except ValueError:
        return []
    again = [
        module
        for other, module in root.named_modules(remove_duplicate=False)
        if (repeated := REPEATED_CALL.fullmatch(other)) and repeated[1] == name
    ]
    return [first, *again]

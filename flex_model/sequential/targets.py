"""The targets of a sequential run: the modules that are loaded and run one step at a time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from flex_model.errors import nearest
from flex_model.names import clean


def match_modules(model: nn.Module, target_names: list[str]) -> set[nn.Module]:
    """Return the modules whose name or class name is among ``target_names``, or whose name (from
    its start) or class name matches a pattern there that starts with ``re:``.

    Example::

        match_modules(model, ["LlamaDecoderLayer"])
        match_modules(model, ["lm_head", r"re:.*layers\\.[02]$"])
    """
    names = _names(target_names)
    return {
        module
        for name, module in model.named_modules()
        if any(_fits(target, model, name, module) for target in names)
    }


def _names(targets: str | Iterable[str]) -> list[str]:
    """Return one name or several as a list."""
    is_one = isinstance(targets, str) or not isinstance(targets, Iterable)
    names: list[Any] = [targets] if is_one else list(targets)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(
                "targets must be names, class names or 're:...' patterns, got "
                f"{name!r}, a {type(name).__name__}"
            )
        if name.startswith("re:"):
            _compiled(name)
    return names


def _compiled(target: str) -> re.Pattern[str]:
    try:
        return re.compile(target[len("re:") :])
    except re.error as error:
        raise ValueError(f"the target {target!r} is not a regular expression: {error}") from error


def _fits(target: str, model: nn.Module, name: str, module: nn.Module) -> bool:
    names = {name, clean(model, name)}
    kinds = {kind.__name__ for kind in type(module).__mro__ if kind not in (nn.Module, object)}
    if not target.startswith("re:"):
        return target in names or target in kinds
    pattern = _compiled(target)
    return any(pattern.match(text) for text in names | {type(module).__name__})


@dataclass(frozen=True, eq=False)
class Target:
    """A module at whose entry batches are suspended.

    Attributes:
        step: The number of the step that runs it, with its neighbours.
    """

    name: str
    module: nn.Module
    step: int


def choose(model: nn.Module, targets: str | Sequence[str], per_step: int) -> list[Target]:
    """Return the targets of a run, in the order of the model's modules.

    Raises:
        ValueError: a name matches nothing, or "auto" finds nothing.
        TypeError: a target is not a name.
    """
    if isinstance(targets, str) and targets == "auto":
        modules = set(_automatic(model))
        if not modules:
            raise ValueError(
                f"sequential.run: targets='auto' found neither _no_split_modules nor a ModuleList "
                f"in {type(model).__name__}; name the modules, targets=['encoder', ...]"
            )
        found = [(name, module) for name, module in model.named_modules() if module in modules]
    else:
        found = find_modules(model, targets, "sequential.run: the target")
        if not found:
            raise ValueError(
                "sequential.run: targets is empty; name some modules, or leave it at 'auto'"
            )
    return [Target(name, module, i // per_step) for i, (name, module) in enumerate(found)]


def find_modules(
    model: nn.Module, targets: str | Sequence[str], what: str
) -> list[tuple[str, nn.Module]]:
    """Return the modules that ``match_modules`` finds, with their names, in the model's order.

    Args:
        what: Begins the error about a target.

    Raises:
        ValueError: a target matches nothing.
        TypeError: a target is not a name.
    """
    modules: set[nn.Module] = set()
    for target in _names(targets):
        matched = match_modules(model, [target])
        if not matched:
            choices = [name for name, _ in model.named_modules() if name]
            choices += sorted({type(module).__name__ for module in model.modules()})
            raise ValueError(
                f"{what} {target!r} matches no module of {type(model).__name__}; "
                f"{nearest(target, choices, 'name')}"
            )
        modules |= matched
    return [(name, module) for name, module in model.named_modules() if module in modules]


def _automatic(model: nn.Module) -> Iterable[nn.Module]:
    """Return the modules that the model's ``_no_split_modules`` name, else the members of its
    largest ModuleList; the outermost ones: a block rather than the blocks in it.
    """
    modules = list(model.modules())
    stated = {
        kind for module in modules for kind in (getattr(module, "_no_split_modules", None) or ())
    }
    found = [m for m in modules if type(m).__name__ in stated and m is not model]
    if found:
        inner = {child for m in found for child in m.modules() if child is not m}
        lists = [m for m in modules if isinstance(m, (nn.ModuleList, nn.Sequential))]
        blocks = {child for one in lists for child in one}
        # An embedding may be named too: it isn't one of many, and stays with the rest.
        outer = [m for m in found if m not in inner]
        return [m for m in outer if m in blocks] or outer
    lists = [m for m in modules if isinstance(m, nn.ModuleList) and len(m)]
    return max(lists, key=len, default=nn.ModuleList())


# Names and arguments of the traced helpers.


def get_sequential_ancestors(model: nn.Module, targets: set[nn.Module]) -> set[nn.Module]:
    """Return the modules that hold a target, at any depth, without the targets themselves."""
    return {
        module
        for module in model.modules()
        if module not in targets and not targets.isdisjoint(module.modules())
    }


def get_sequential_targets(modifiers: Sequence[Any], model: nn.Module, args: Any) -> list[str]:
    """Return the targets: ``sequential_targets`` of the one modifier that has them, else of
    ``args``, else the class names of the modules that "auto" finds.

    Raises:
        ValueError: several modifiers have them, or both a modifier and ``args``.
    """
    stated = [m for m in modifiers if getattr(m, "sequential_targets", None) is not None]
    given = getattr(args, "sequential_targets", None)
    if len(stated) > 1 or (stated and given is not None):
        names = [type(modifier).__name__ for modifier in stated]
        names += ["args"] * (given is not None)
        raise ValueError(
            f"get_sequential_targets: {' and '.join(names)} all have sequential_targets; give them "
            "in one place"
        )
    found = stated[0].sequential_targets if stated else given
    if found is None:
        return sorted({type(module).__name__ for module in _automatic(model)})
    return [found] if isinstance(found, str) else list(found)

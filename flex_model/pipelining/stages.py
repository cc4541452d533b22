"""The stages of a pipeline by the names of the unsplit model: this rank's, and where all are."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from flex_model.distributed.communicator import Communicator
from flex_model.errors import nearest
from flex_model.hooks.groups import matches
from flex_model.layouts.resolve import ParameterSources
from flex_model.layouts.statements import Statement, Statements
from flex_model.names import check_name, clean, find_module, find_parameter
from flex_model.parameters.full import Parameters
from flex_model.pipelining.pass_through import PassThrough

_REPEATED_CALL = re.compile(r"(.*)@\d+")  # torch's tracer: of one module that is called again


class LocalStages(nn.Module):
    """This rank's stages as one module, whose parameters have the original names."""

    def __init__(self, stages: Sequence[Any]) -> None:
        super().__init__()
        for stage in stages:
            self.add_module(f"stage{stage.stage_index}", stage.submod)
        self.register_load_state_dict_pre_hook(_with_stage_prefix)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._named("named_parameters", prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        yield from self._named("named_buffers", prefix, recurse, remove_duplicate)

    def _named(
        self, method: str, prefix: str, recurse: bool, remove_duplicate: bool
    ) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        for stage in self.children() if recurse else ():
            named = getattr(stage, method)(prefix, recurse, remove_duplicate)
            for name, value in named:
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


def _with_stage_prefix(root: LocalStages, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
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


class StageParameters:
    """As ``parameters.Parameters``, of the stages of this rank. By index: the stage's own.

    All methods are collective over the ranks of the stage.
    """

    def __init__(
        self, stages: Sequence[Any], communicator: Communicator, statements: Statements
    ) -> None:
        self.of_stage = {
            stage.stage_index: Parameters(stage.submod, communicator, statements)
            for stage in stages
        }
        self._roots = {stage.stage_index: stage.submod for stage in stages}

    def sources_of(self, name: str) -> ParameterSources:
        """As of ``Parameters``, for the first stage that has it."""
        for index, root in self._roots.items():
            with contextlib.suppress(ValueError):
                find_parameter(root, name)
                return self.of_stage[index].sources_of(name)
        raise ValueError(f"no stage of this rank has a parameter {name!r}")


def is_traced(stage: Any) -> bool:
    """Whether torch's tracer made the stage, so that its shapes are fixed."""
    return hasattr(stage, "pipe_info")


def describe(stage: Any) -> dict[str, Any]:
    """What the other ranks must know of a stage. JSON can hold it."""
    root = stage.submod
    called: list[str] = []
    held: list[str] = []
    types: dict[str, list[str]] = {}
    in_graph = set(_called_in_graph(root, "")) if hasattr(root, "graph") else None
    for name, module in root.named_modules(remove_duplicate=False):
        if isinstance(module, PassThrough):
            continue
        is_called = _has_forward(module) if in_graph is None else name in in_graph
        name = clean(root, name)
        (called if is_called else held).append(name)
        types.setdefault(name, [type_name(kind) for kind in type(module).__mro__[:-1]])
    return {
        "index": stage.stage_index,
        "called": list(dict.fromkeys(called)),
        "held": list(dict.fromkeys(held)),
        "types": types,
        "parameters": [
            clean(root, name) for name, _ in root.named_parameters(remove_duplicate=False)
        ],
        "kwargs": accepted_kwargs(root),
        "is_traced": is_traced(stage),
    }


def type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _called_in_graph(module: Any, prefix: str) -> Iterator[str]:
    yield prefix
    for node in module.graph.nodes if hasattr(module, "graph") else ():
        if node.op == "call_module":
            name = f"{prefix}.{node.target}" if prefix else node.target
            yield from _called_in_graph(module.get_submodule(node.target), name)


def accepted_kwargs(root: nn.Module) -> list[str] | None:
    """Keyword arguments that a stage's forward takes; None: any."""
    while type(root).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
        root = root.module  # type: ignore[assignment]
    if hasattr(root, "graph"):
        return [node.name for node in root.graph.nodes if node.op == "placeholder"]  # type: ignore[union-attr]
    found = inspect.signature(root.forward).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in found):
        return None
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [parameter.name for parameter in found if parameter.kind in kinds]


class Directory:
    """Which stage has which module and parameter. The same on every rank; all methods are local.

    Args:
        described: What ``describe`` said of every stage, in the order of the stages.
        places: By stage: the place of its rank along the pipeline.
    """

    def __init__(self, described: Sequence[dict[str, Any]], places: Sequence[int]) -> None:
        self._described = described
        self.places = places
        self._called = _by_name(stage["called"] for stage in described)
        self._held = _by_name(stage["held"] for stage in described)
        self._parameters = _by_name(stage["parameters"] for stage in described)

    @property
    def num_stages(self) -> int:
        return len(self._described)

    @property
    def module_names(self) -> list[str]:
        """Of all stages, in the order of the stages."""
        names = {
            name: None
            for stage in self._described
            for name in stage["types"]
            if name and not _REPEATED_CALL.fullmatch(name)
        }
        return list(names)

    @property
    def class_names(self) -> dict[str, str]:
        """By module, also the stages' roots (``""``), its class."""
        found: dict[str, str] = {}
        for stage in self._described:
            for name, kinds in stage["types"].items():
                if not _REPEATED_CALL.fullmatch(name):
                    found.setdefault(name, kinds[0].rpartition(".")[2])
        return found

    @property
    def called_names(self) -> list[str]:
        """Of modules that can be hooked, and of those spread over several stages."""
        return [name for name in self.module_names if name in self._called]

    def hookable_names(self, kind: str) -> list[str]:
        """The names that a group's substring or regex is matched against."""
        return self.parameter_names if kind == "tensor" else self.called_names

    def names_of_statement(self, statement: Statement) -> list[str]:
        """The modules or parameters that a statement matches."""
        if isinstance(statement.pattern, type):
            return self.names_of_type(statement.pattern)[0]
        is_parameter = statement.kind == "parameter"
        names = self.parameter_names if is_parameter else self.module_names
        return [name for name in names if matches(statement.pattern, name)]

    def names_of_type(self, kind: type) -> tuple[list[str], list[str]]:
        """The modules of a type; and the names of all types."""
        found: dict[str, None] = {}
        names = set()
        for stage in self._described:
            for name, kinds in stage["types"].items():
                names.add(kinds[0].rpartition(".")[2])
                if name and type_name(kind) in kinds and name in self._called:
                    found[name] = None
        return list(found), sorted(names)

    @property
    def parameter_names(self) -> list[str]:
        return list(self._parameters)

    def stages_of(self, name: str) -> tuple[int, ...]:
        """The stages that call a module of this name, or else hold one.

        Raises:
            ValueError: there is none.
        """
        check_name(name, "module")
        found = self._called.get(name) or self._held.get(name)
        if found:
            return tuple(found)
        self._check_is_no_further_call(name)
        lost = (
            "; torch's tracer leaves out modules that do nothing, as nn.Identity and dropout in "
            "eval()"
            if any(stage["is_traced"] for stage in self._described)
            else ""
        )
        raise ValueError(
            f"the pipeline's {self.num_stages} stages have no module {name!r}; "
            f"{nearest(name, self.module_names, 'module')}{lost}"
        )

    def stage_of(self, name: str) -> int:
        """The one stage in which a hook on this module fires.

        Raises:
            ValueError: there is no such module, or it is spread over several stages.
        """
        self._check_is_no_further_call(name)
        found = self.stages_of(name)
        if len(found) > 1:
            below = [other for other in self._called if not name or other.startswith(f"{name}.")]
            hint = f", as {below[1]!r}" if len(below) > 1 else ""
            raise ValueError(
                f"module {name!r} is spread over the stages {list(found)} of the pipeline, and "
                "none of them sees the whole of its input and output; hook a module that one "
                f"stage has{hint}"
            )
        return found[0]

    def _check_is_no_further_call(self, name: str) -> None:
        repeated = _REPEATED_CALL.fullmatch(name)
        if repeated and repeated[1] in self._called:
            raise ValueError(
                f"{name!r} is how torch's tracer calls a further use of {repeated[1]!r}; hook "
                f"{repeated[1]!r}, whose records hold every call, in call order"
            )

    def holders_of_parameter(self, name: str) -> list[int]:
        """The stages that have a parameter.

        Raises:
            ValueError: there is none.
        """
        check_name(name, "parameter")
        if name not in self._parameters:
            raise ValueError(
                f"the pipeline's {self.num_stages} stages have no parameter {name!r}; "
                f"{nearest(name, self.parameter_names, 'parameter')}"
            )
        return self._parameters[name]

    def check_kwargs(self, names: Iterable[str]) -> None:
        """ValueError for a keyword argument that no stage's forward takes."""
        accepted = [stage["kwargs"] for stage in self._described]
        if any(one is None for one in accepted):
            return
        known = sorted({name for one in accepted for name in one})
        for name in names:
            if name not in known:
                raise ValueError(
                    f"no stage's forward takes a keyword argument {name!r}; "
                    f"{nearest(name, known, 'keyword')}"
                )


def _by_name(names_of_stages: Iterable[Iterable[str]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for stage, names in enumerate(names_of_stages):
        for name in names:
            found.setdefault(name, []).append(stage)
    return found


def targets(root: nn.Module, name: str) -> list[nn.Module]:
    """The modules of a stage that a hook on ``name`` is put at: torch's tracer makes one for each
    call.
    """
    try:
        first = find_module(root, name)
    except ValueError:
        return []
    again = [
        module
        for other, module in root.named_modules(remove_duplicate=False)
        if (repeated := _REPEATED_CALL.fullmatch(other)) and repeated[1] == name
    ]
    return [first, *again]

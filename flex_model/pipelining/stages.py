"""The modules and parameters of this rank's stages, and of all stages, by the unsplit model's
names.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flex_model.distributed import values
from flex_model.distributed.agreement import gather_checked
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.tensor_dicts import describe, from_rank
from flex_model.distributed.transports.buffer_layout import same_bits
from flex_model.errors import agreed, nearest
from flex_model.hooks.groups import matches
from flex_model.integrations import dtensor
from flex_model.integrations.torch_pipelining import is_traced
from flex_model.layouts.statements import ParameterSources, Statement, Statements
from flex_model.names import check_name, clean, find_module, find_parameter
from flex_model.parameters.full import ExpectedShape, Parameters
from flex_model.pipelining.stand_ins import is_stand_in
from flex_model.selection.selectors import Selector

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

    def _named(
        self, method: str, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        for stage in self.children() if recurse else ():
            for name, value in getattr(stage, method)(prefix, recurse, remove_duplicate):
                if not (remove_duplicate and id(value) in seen):
                    seen.add(id(value))
                    yield name, value

    named_parameters = functools.partialmethod(_named, "named_parameters")
    named_buffers = functools.partialmethod(_named, "named_buffers")

    def state_dict(  # type: ignore[override]
        self, *args: Any, destination: Any = None, prefix: str = "", **kwargs: Any
    ) -> dict[str, Any]:
        found: dict[str, Any] = {} if destination is None else destination
        seen: set[str] = set()
        for stage in self.children():
            own = stage.state_dict(*args, prefix=prefix, **kwargs)
            for name in seen & own.keys():
                one, other = (dtensor.to_local(held[name]) for held in (found, own))
                if isinstance(one, Tensor) and not same_bits(one, other):
                    raise ValueError(_several_values(name, "stages of this rank"))
            seen |= own.keys()
            found.update(own)
            getattr(found, "_metadata", {}).update(getattr(own, "_metadata", {}))
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


_NAMES = (
    "; give each stage's modules the names that the unsplit model has, with PassThrough() in place "
    "of those that other stages have"
)


def _several_values(name: str, where: str) -> str:
    return (
        f"{name!r} has different values in {where}, so it does not name one parameter of an "
        f"unsplit model{_NAMES}, or, of a parameter that is tied, keep its copies equal"
    )


def describe_stage(stage: Any) -> dict[str, Any]:
    """Describe a stage for the ``StageIndex`` of all ranks, as JSON."""
    root = stage.submod
    called: dict[str, None] = {}
    types: dict[str, list[str]] = {}
    in_graph = set(_called_in_graph(root, "")) if hasattr(root, "graph") else None
    for name, module in root.named_modules(remove_duplicate=False):
        if is_stand_in(module):
            continue
        has_forward = type(module).forward is not nn.Module.forward
        is_called = has_forward if in_graph is None else name in in_graph
        is_called &= all(module is not other for other in getattr(stage, "uncalled", ()))
        name = clean(root, name)
        if is_called:
            called[name] = None
        kinds = types.setdefault(name, [])  # of a wrapper, then those of the module in it
        kinds += [type_name(kind) for kind in type(module).__mro__[:-1]]
    return {
        "index": stage.stage_index,
        "called": list(called),
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


class StageIndex:
    """The modules and parameters of each stage, the same on every rank. All methods are local.

    Args:
        described: The result of ``describe_stage`` for every stage, in their order.
        pp_ranks: By stage: the place of its rank along the pipeline.
        calls_roots: Whether a step calls each stage's module, so that the first one gets the
            model's inputs, and the last one returns its outputs.

    Attributes:
        module_names: The modules of all stages, in their order.
        class_names: The class of each module, the stages' roots (``""``) included.
        called_names: The modules that can be hooked, and those spread over several stages.
        parameter_names: The parameters of all stages, in their order.
    """

    def __init__(
        self, described: Sequence[dict[str, Any]], pp_ranks: Sequence[int], calls_roots: bool
    ) -> None:
        self._described, self.pp_ranks = described, pp_ranks
        self._calls_roots = calls_roots
        self._called = _by_name(stage["called"] for stage in described)
        self._held = _by_name(stage["types"] for stage in described)
        self._parameters = _by_name(
            itertools.chain.from_iterable(stage["parameters"]) for stage in described
        )
        self._tied: dict[str, set[str]] = {}
        for stage in described:
            for names in (*stage["parameters"], *(of.values() for of in stage["tied"].values())):
                tied = set(names).union(*(self._tied.get(name, ()) for name in names))
                self._tied.update(dict.fromkeys(tied, tied))
        self.class_names: dict[str, str] = {}
        for stage in described:
            for name, kinds in stage["types"].items():
                if not REPEATED_CALL.fullmatch(name):
                    self.class_names.setdefault(name, kinds[0].rpartition(".")[2])
        self.module_names = [name for name in self.class_names if name]
        self.called_names = [name for name in self.module_names if name in self._called]
        self.parameter_names = list(self._parameters)

    @property
    def num_stages(self) -> int:
        return len(self._described)

    def hookable_names(self, kind: str) -> list[str]:
        """Return the names that a group's substring or regex is matched against."""
        return self.parameter_names if kind == "tensor" else self.called_names

    def names_of_statement(self, statement: Statement) -> list[str]:
        """Return the names of the modules or parameters that a statement matches."""
        if isinstance(statement.pattern, type):
            return self.names_of_type(statement.pattern)[0]
        is_parameter = statement.kind == "parameter"
        names = self.parameter_names if is_parameter else self.module_names
        return [name for name in names if matches(statement.pattern, name)]

    def names_of_type(self, kind: type) -> tuple[list[str], list[str]]:
        """Return the names of the modules of a type, and of all types."""
        found: dict[str, None] = {}
        names = set()
        for stage in self._described:
            for name, kinds in stage["types"].items():
                names.add(kinds[0].rpartition(".")[2])
                if name and type_name(kind) in kinds and name in self._called:
                    found[name] = None
        return list(found), sorted(names)

    def stages_of(self, name: str) -> tuple[int, ...]:
        """Return the stages that call a module of this name, or else hold one.

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

    def stage_of(self, name: str, kind: str = "forward") -> int:
        """Return the one stage in which a hook of this kind on this module is called. The model
        itself, ``""``, gets its inputs in the first stage, and returns what the last one does.

        Raises:
            ValueError: there is no such module, or it is spread over several stages.
        """
        if not name and self._calls_roots:
            return 0 if kind in ("forward_pre", "full_backward") else self.num_stages - 1
        self._check_is_no_further_call(name)
        found = self.stages_of(name)
        if len(found) > 1:
            below = [other for other in self._called if not name or other.startswith(f"{name}.")]
            single = [other for other in reversed(below) if len(self._called[other]) == 1]
            hint = f", as {min(single, key=lambda one: one.count('.'))!r}" if single else _NAMES
            raise ValueError(
                f"module {name!r} is spread over the stages {list(found)} of the pipeline, and "
                "none of them sees the whole of its input and output; hook a module that one "
                f"stage has{hint}"
            )
        return found[0]

    def _check_is_no_further_call(self, name: str) -> None:
        repeated = REPEATED_CALL.fullmatch(name)
        if repeated and repeated[1] in self._called:
            raise ValueError(
                f"{name!r} is how torch's tracer names a further use of {repeated[1]!r}; hook "
                f"{repeated[1]!r}, whose records hold every call, in call order"
            )

    def holders_of_parameter(self, name: str) -> list[int]:
        """Return the stages that have a parameter.

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

    def names_of_parameter(self, name: str) -> list[str]:
        """Return all names under which stages hold a parameter: several, if it is tied.

        Raises:
            ValueError: there is none.
        """
        self.holders_of_parameter(name)
        return sorted(self._tied[name])

    def holder_of_gradient(self, name: str, asked_by: str) -> int:
        """Return the stage that has a parameter's whole gradient.

        Raises:
            ValueError: there is no such parameter, or several stages have it.
        """
        holders = self.holders_of_parameter(name)
        where = f"stages {holders}" if len(holders) > 1 else ""
        tied = self._described[holders[0]]["tied"].get(name)
        if tied:
            where = ", ".join(f"{other!r} on stage {stage}" for stage, other in tied.items())
        if where:
            raise ValueError(
                f"{asked_by}: parameter {name!r} is held by several stages ({where}), each of "
                "which has a part of its gradient only; add up its .grad on them after the step"
            )
        return holders[0]

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


# ---- Their parameters ----------------------------------------------------------------------------


class StageParameters:
    """The parameters of this rank's stages, as hooks need them.

    Attributes:
        by_stage: By index of the stage: its parameters, collective over the ranks of the stage.
    """

    def __init__(
        self, root: LocalStages, communicator: Communicator, statements: Statements
    ) -> None:
        self._modules = root.by_index
        self.by_stage = {
            index: Parameters(module, communicator, statements)
            for index, module in root.by_index.items()
        }
        self._full: dict[str, Tensor] = {}

    def keep(self, full: dict[str, Tensor]) -> None:
        """Keep the full parameters that the hooks of the next step named."""
        self._full = full

    def get_on(self, name: str, device: torch.device, later: object = None) -> Tensor:
        """Return a full parameter that was kept for this step, on a device. Local."""
        return self._full[name].to(device)

    def sources_of(self, name: str) -> tuple[ParameterSources, str]:
        """Return the placements stated for a parameter, by the first stage that has it, and its
        first name there. Local.
        """
        for index, module in self._modules.items():
            with contextlib.suppress(ValueError):
                find_parameter(module, name)
                return self.by_stage[index].sources_of(name)
        raise ValueError(f"no stage of this rank has a parameter {name!r}")


class PipelineParameters:
    """The parameters of all stages of a pipeline. All methods are collective.

    Args:
        local: Those of this rank's stages.
        world, line: Communicators to all ranks, and to those of this rank's pipeline.
    """

    def __init__(
        self, local: StageParameters, index: StageIndex, world: Communicator, line: Communicator
    ) -> None:
        self._local, self._index = local, index
        self._world, self._line = world, line

    def get(
        self,
        name: str,
        expected_shape: ExpectedShape = None,
        *,
        sharded: bool = False,
        raw: bool = False,
        experts: Selector = None,
    ) -> Tensor:
        """Return the full parameter, from the first stage that has it.

        Raises:
            ValueError: stages have other values under this name; on every rank.
        """
        how: Any = {"sharded": sharded, "raw": raw, "experts": experts}
        self._check_is_one(name, expected_shape)
        return self._read(name, lambda p: p.get(name, expected_shape, **how))

    def gradient(
        self, name: str, expected_shape: ExpectedShape = None, experts: Selector = None
    ) -> Tensor | None:
        """Return the full gradient, from the stage that has the parameter; ValueError where there
        are several.
        """
        self._index.holder_of_gradient(name, "get_module_gradient")
        return self._read(name, lambda p: p.gradient(name, expected_shape, experts))

    def iterate(self, *, raw: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield names and full parameters, one at a time."""
        names = self._index.parameter_names
        return ((name, self.get(name, sharded=True, raw=raw)) for name in names)

    def read_for_hooks(self, names: Iterable[str]) -> None:
        """Keep the full parameters that hooks of the next step named, whichever stage has them."""
        self._local.keep({name: self.get(name) for name in dict.fromkeys(names)})

    def set(
        self,
        name: str,
        full: Tensor,
        expected_shape: ExpectedShape = None,
        experts: Selector = None,
    ) -> None:
        """Write the full parameter on all stages that have it, under whatever name."""
        held = [
            (stage, other)
            for other in self._index.names_of_parameter(name)
            for stage in self._index.holders_of_parameter(other)
        ]
        self._check_is_one(name, expected_shape)

        def write() -> None:
            for stage, other in held:
                if stage in self._local.by_stage:
                    self._local.by_stage[stage].set(other, full, expected_shape, experts)

        gather_checked(self._world, f"a new value of parameter {name!r}", write)

    def _check_is_one(self, name: str, expected_shape: ExpectedShape) -> None:
        stages = self._index.holders_of_parameter(name)
        if len(stages) == 1:
            return

        def hashes() -> dict[int, int]:
            own = {i: self._local.by_stage[i] for i in stages if i in self._local.by_stage}
            # Whole: stages may shard it differently.
            return {i: values.fingerprint(one.get(name, expected_shape)) for i, one in own.items()}

        gathered = gather_checked(self._line, f"the values of parameter {name!r}", hashes)
        if len({found for of_rank in gathered for found in of_rank.values()}) > 1:
            raise agreed(ValueError(_several_values(name, f"the stages {stages}")))

    def _read(self, name: str, read: Callable[[Parameters], Tensor | None]) -> Any:
        stage = self._index.holders_of_parameter(name)[0]
        pp_rank, found = self._index.pp_ranks[stage], []

        def read_here() -> Any:
            if stage in self._local.by_stage:
                value = read(self._local.by_stage[stage])
                found.extend([] if value is None else [value])
            return describe(found)

        described = gather_checked(self._line, f"parameter {name!r}", read_here)[pp_rank]
        received = from_rank(self._line, pp_rank, found, described)
        return received[0] if received else None

"""The model map of ``flex.show``: the modules of a wrapped model with their hooks, the hooks' costs
and the timeline.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from flex_model.diagnostics.timeline import Timeline
from flex_model.inspection import hook_tables, text
from flex_model.inspection.hook_tables import NOT_RUN, HookCost, SiteLayout
from flex_model.inspection.tree import ModelTree, Node, is_called, named

if TYPE_CHECKING:
    from flex_model.hooks.core import HookCore
    from flex_model.hooks.registration import Registration

_REPR_CHARACTERS = 200


@dataclass(frozen=True)
class HookMark:
    """One registered hook, as it is shown at its module.

    Attributes:
        module: The module's clean name (without wrappers); for a hook on a parameter's gradient,
            the name of the module that owns the parameter.
        parameter: The parameter's own name for such a hook, else empty.
        edit: The editing function in a line; empty for a read-only hook.
        select: The repr of the selected part of the tensor; empty for the whole tensor.
        groups: The hook's groups besides "all".
        record: The key of its records.
        layout, cost: The rows of ``flex.layouts()`` and ``flex.explain()`` on this rank.
        where: The pipeline stage of the hook, in words; empty without a pipeline.
    """

    module: str
    parameter: str
    kind: str
    edit: str
    select: str
    groups: tuple[str, ...]
    record: str
    layout: SiteLayout
    cost: HookCost
    where: str = ""

    @property
    def tensor(self) -> str:
        """The full tensor that the hook sees, and its layout."""
        site = self.layout
        if site.full_shape is None:
            return "" if self.where else site.source
        dtype = str(site.dtype).removeprefix("torch.")
        is_split = site.layout is not None and len(site.local_shapes) > 1
        return f"{dtype} {text.shape(site.full_shape)}" + f" [{site.layout}]" * is_split

    @property
    def spent(self) -> str:
        """The hook's cost on this rank in the last run."""
        cost = self.cost
        if not cost.headers and not cost.bytes_moved:
            return "" if self.layout.source == NOT_RUN or self.where else "moved nothing"
        return ", ".join(filter(None, [cost.transport, _counts(cost)]))

    def __str__(self) -> str:
        what = self.kind.replace("_", "-")
        if self.parameter:
            what = f"gradient of {self.parameter}"
        parts = [
            what + (f", tensor {self.layout.unpack_idx}" if self.layout.unpack_idx else ""),
            f"edits: {self.edit}" if self.edit else "read-only",
            self.select,
            f"groups: {', '.join(self.groups)}" if self.groups else "",
            self.tensor,
            self.spent,
            self.where,
        ]
        return "; ".join(filter(None, parts))


def _counts(cost: HookCost) -> str:
    """Return ``2 headers, 1 collective, 1.5 KiB``."""
    counts = [
        f"{count} {name}{'s' * (count != 1)}"
        for count, name in ((cost.headers, "header"), (cost.collectives, "collective"))
        if count
    ]
    return ", ".join([*counts, text.size(cost.bytes_moved)])


@dataclass
class ModelMap:
    """The modules and hooks of a FlexModel on this rank. ``print`` it, or write it as a page.

    Attributes:
        tree: The modules, with the hooks as notes.
        hooks: The hooks, in the order of registration.
        transports: As in ``Explanation``.
        timeline: The last recorded timeline; None without one.
        rank: The global rank whose costs are shown.
    """

    tree: ModelTree
    hooks: list[HookMark]
    transports: dict[str, tuple[str, str]]
    timeline: Timeline | None
    rank: int

    def print(self, show_all: bool = False) -> None:
        """Print the map."""
        self.tree.print(show_all)
        if any(mark.spent for mark in self.hooks):
            print(f"costs are those of rank {self.rank} in the last run")
        for axes, (name, why) in self.transports.items():
            print(f"ranks along {axes}: {name}, because {why}")
        if self.timeline:
            print(self.timeline)


@dataclass(frozen=True)
class Modules:
    """The modules of a wrapped model, and the places of their hooks.

    Attributes:
        nodes: The modules by name, parents before their children, without observed tensors.
        stages: The pipeline stages that have a module, in words, by module.
        where_of: Returns the stage of a hook, in words, if it isn't on this rank.
    """

    nodes: dict[str, Node]
    stages: dict[str, str] = field(default_factory=dict)
    where_of: Callable[[Registration], str] = lambda registration: ""


def modules_of(core: HookCore) -> Modules:
    """Return the modules of a model without a pipeline. Local."""
    nodes = {
        name: Node(name, type(module).__name__, is_called(module), was_run=False)
        for name, module in named(core.module).items()
    }
    return Modules(nodes)


def model_map(
    core: HookCore, records: Mapping[str, list[Tensor]], modules: Modules, timeline: Timeline | None
) -> ModelMap:
    """Return the map of a FlexModel. Local."""
    registrations = core.table.registrations
    costs, rows = hook_tables.explain(core), hook_tables.layouts(core, records)
    hooks = [
        _mark(registration, modules, core, layout, cost)
        for registration, layout, cost in zip(registrations, rows, costs)
    ]
    notes: dict[str, list[str]] = {}
    for mark in hooks:
        notes.setdefault(mark.module, []).append(str(mark))
    for row in costs[len(hooks) :]:
        if row.headers or row.bytes_moved:
            notes.setdefault("", []).append(f"all hooks share: {_counts(row)}")
    shown = [
        replace(
            node,
            kind=node.kind + (f"  ({modules.stages[name]})" if name in modules.stages else ""),
            notes=tuple(notes.get(name, ())),
        )
        for name, node in modules.nodes.items()
    ]
    ranks = core.mesh.describe() if core.mesh.num_ranks > 1 else "1 process"
    rank = core.mesh.ranks[core.mesh.rank]
    return ModelMap(ModelTree(shown, ranks), hooks, costs.transports, timeline, rank)


def _mark(
    registration: Registration, modules: Modules, core: HookCore, layout: SiteLayout, cost: HookCost
) -> HookMark:
    function = registration.hook_function
    module = registration.clean_name
    while module not in modules.nodes:  # a parameter, or another name of a module
        module = module.rpartition(".")[0]
    return HookMark(
        module,
        registration.name.rpartition(".")[2] if registration.kind == "tensor" else "",
        registration.kind,
        describe_function(registration.given.editing_function) if registration.edits else "",
        "" if function.select is None else repr(function.select),
        tuple(sorted(core.table.groups.of(registration.given) - {"all"})),
        function.record_name,
        layout,
        cost,
        modules.where_of(registration),
    )


def describe_function(function: Any) -> str:
    """Return an editing function in a line: its name and source line, or its own repr.

    Example::

        describe_function(lambda module, x, ctx, modules: x)   # "<lambda> (script.py:12)"
    """
    written = getattr(inspect.unwrap(function), "__code__", None)
    if written is not None:
        place = f"{Path(written.co_filename).name}:{written.co_firstlineno}"
        return f"{function.__qualname__} ({place})"
    name = str(getattr(function, "__qualname__", type(function).__qualname__))
    if type(function).__repr__ is object.__repr__:
        return name
    try:
        shown = re.sub(r" at 0x[0-9a-f]+", "", " ".join(repr(function).split()))
    except Exception:  # a user's failing __repr__ must not fail flex.show
        return name
    return shown if len(shown) <= _REPR_CHARACTERS else shown[: _REPR_CHARACTERS - 3] + "..."

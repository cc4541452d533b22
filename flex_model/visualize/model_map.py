"""What ``flex.show`` shows: the modules of a wrapped model, the hooks that sit there, what they
cost, and when they ran.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from flex_model.diagnostics.timeline import Timeline
from flex_model.inspection import explain, layouts, text
from flex_model.inspection.explain import HookCost
from flex_model.inspection.layouts import NOT_RUN, SiteLayout
from flex_model.inspection.tree import ModelTree, Node, is_called, named
from flex_model.names import clean

if TYPE_CHECKING:
    from flex_model.hooks.core import HookCore
    from flex_model.hooks.registration import Registration

_REPR_CHARACTERS = 200


@dataclass(frozen=True)
class HookMark:
    """One registered hook, as it is shown at its module.

    Attributes:
        module: The module's name, clean of what wrappers put in between; the owner's for a hook on
            a parameter's gradient.
        parameter: The parameter's own name for such a hook, else empty.
        edit: The editing function in a line; empty for a hook that only looks.
        select: The part of the tensor that it asks for, as it is written; empty for all of it.
        groups: That it is in, besides "all".
        record: The key of its records.
        layout, cost: As ``flex.layouts()`` and ``flex.explain()`` tell them on this rank.
        where: In words, the stage of a pipeline that it is on; empty without one.
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
        """The full tensor that it sees, and how it is split."""
        seen = self.layout
        if seen.full_shape is None:
            return "" if self.where else seen.source
        dtype = str(seen.dtype).removeprefix("torch.")
        is_split = seen.layout is not None and len(seen.local_shapes) > 1
        return f"{dtype} {text.shape(seen.full_shape)}" + f" [{seen.layout}]" * is_split

    @property
    def spent(self) -> str:
        """What it cost this rank in the last run."""
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
            f"edits: {self.edit}" if self.edit else "looks",
            self.select,
            f"groups: {', '.join(self.groups)}" if self.groups else "",
            self.tensor,
            self.spent,
            self.where,
        ]
        return "; ".join(filter(None, parts))


def _counts(cost: HookCost) -> str:
    """``2 headers, 1 collective, 1.5 KiB``."""
    counts = [
        f"{count} {name}{'s' * (count != 1)}"
        for count, name in ((cost.headers, "header"), (cost.collectives, "collective"))
        if count
    ]
    return ", ".join([*counts, text.size(cost.bytes_moved)])


@dataclass
class ModelMap:
    """The picture of a wrap on this rank. ``print`` it, or write it as a page.

    Attributes:
        tree: The modules; the hooks are notes there.
        hooks: In the order of registration.
        transports: As of ``Explanation``.
        timeline: The last that was recorded; None without one.
        rank: The global rank whose costs are shown.
    """

    tree: ModelTree
    hooks: list[HookMark]
    transports: dict[str, tuple[str, str]]
    timeline: Timeline | None
    rank: int

    def print(self, show_all: bool = False) -> None:
        """Print it; to a terminal with rich, where that is installed."""
        self.tree.print(show_all)
        if any(mark.spent for mark in self.hooks):
            print(f"costs are those of rank {self.rank} in the last run")
        for axes, (name, why) in self.transports.items():
            print(f"ranks along {axes}: {name}, because {why}")
        if self.timeline:
            print(self.timeline)


@dataclass(frozen=True)
class Modules:
    """The modules of a wrapped model, and what belongs to which.

    Attributes:
        nodes: By name, parents before their children, none of which is seen running.
        owner_of: The name of a hook's module; of the owner for a parameter's hook.
        stages: In words, by module, the stages of a pipeline that have it.
        where_of: In words, the stage that a hook is on, where it isn't one of this rank's.
    """

    nodes: dict[str, Node]
    owner_of: Callable[[Registration], str]
    stages: dict[str, str] = field(default_factory=dict)
    where_of: Callable[[Registration], str] = lambda registration: ""


def modules_of(core: HookCore) -> Modules:
    """Those of a model that is whole on each rank, or split within modules. Local."""
    nodes = {
        name: Node(name, type(module).__name__, is_called(module), was_run=False)
        for name, module in named(core.module).items()
    }
    # Also of what a wrapper wraps.
    names = {id(module): clean(core.module, name) for name, module in core.module.named_modules()}

    def owner_of(registration: Registration) -> str:
        if registration.module is None:
            return clean(core.module, registration.name).rpartition(".")[0]
        return names.get(id(registration.module()), registration.name)

    return Modules(nodes, owner_of)


def model_map(
    core: HookCore,
    records: Mapping[str, list[Tensor]],
    modules: Modules,
    timeline: Timeline | None,
) -> ModelMap:
    """The picture of a wrap. Local."""
    registrations = core.table.registrations
    told = explain.explain(core)
    hooks = [
        _mark(registration, modules, core, layout, cost)
        for registration, layout, cost in zip(registrations, layouts.layouts(core, records), told)
    ]
    notes: dict[str, list[str]] = {}
    for mark in hooks:
        notes.setdefault(mark.module, []).append(str(mark))
    for row in told[len(hooks) :]:
        if row.headers or row.bytes_moved:
            notes.setdefault("", []).append(f"all hooks share: {_counts(row)}")
    shown = list(modules.nodes.values())
    for node in shown:
        node.kind += f"  ({modules.stages[node.name]})" if node.name in modules.stages else ""
        node.notes = tuple(notes.get(node.name, ()))
    ranks = core.mesh.describe() if core.mesh.num_ranks > 1 else "1 process"
    rank = core.mesh.ranks[core.mesh.rank]
    return ModelMap(ModelTree(shown, ranks), hooks, told.transports, timeline, rank)


def _mark(
    registration: Registration,
    modules: Modules,
    core: HookCore,
    layout: SiteLayout,
    cost: HookCost,
) -> HookMark:
    function = registration.hook_function
    module = modules.owner_of(registration)
    while module not in modules.nodes:  # of one that has two names
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
    """An editing function in a line: what it says of itself, or its name and where it is written.

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
        told = re.sub(r" at 0x[0-9a-f]+", "", " ".join(repr(function).split()))
    except Exception:  # a picture is shown of what can be shown
        return name
    return told if len(told) <= _REPR_CHARACTERS else told[: _REPR_CHARACTERS - 3] + "..."

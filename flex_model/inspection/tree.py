"""A model's modules as a tree, with their input and output tensors in a run on shapes alone."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from flex_model import _C
from flex_model.distributed.mesh import Mesh
from flex_model.distributed.placement import Placement, Shape, ShardLayout
from flex_model.errors import HookError
from flex_model.inspection import text
from flex_model.inspection.shapes_only import Look, Seen, layout_from_shapes, on_shapes, run_watched
from flex_model.integrations import dtensor
from flex_model.layouts.follow import Follower
from flex_model.layouts.statements import Site
from flex_model.names import clean

if TYPE_CHECKING:
    from flex_model.hooks.core import HookCore


@dataclass(frozen=True)
class TensorSeen:
    """The first tensor of a module's input or output, at its first call.

    Attributes:
        full_shape, layout: None if a run on shapes does not prove the placements.
        local_shapes: The local shapes of all ranks, in the order (dp, tp), tp fastest.
    """

    full_shape: Shape | None
    local_shapes: tuple[Shape, ...]
    dtype: torch.dtype
    layout: ShardLayout | None

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        if self.layout is None:
            local = text.shapes(self.local_shapes)
            return f"{dtype} {local} per rank, layout known after a run"
        if len(self.local_shapes) == 1:
            return f"{dtype} {text.shape(self.full_shape)}"
        return f"{dtype} {text.shape(self.full_shape)} [{self.layout}]"

    def json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "full_shape": self.full_shape,
            "local_shapes": self.local_shapes,
            "dtype": str(self.dtype).removeprefix("torch."),
            "layout": None if self.layout is None else str(self.layout),
        }


@dataclass(frozen=True)
class Node:
    """A module of the tree.

    Attributes:
        name: The module's name in the model.
        kind: The name of its class.
        has_forward: Whether it can be hooked (a ``ModuleList`` can't).
        was_run: Whether the model was run; a module without tensors was not called then.
        notes: The lines that are shown below it.
    """

    name: str
    kind: str
    has_forward: bool = True
    input: TensorSeen | None = None
    output: TensorSeen | None = None
    was_run: bool = True
    notes: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """The class and tensors in a line."""
        if not self.has_forward or not self.was_run:
            return self.kind
        if self.output is None and self.input is None:
            return f"{self.kind}  (not run, or without tensors)"
        if self.input is None or str(self.input) == str(self.output):
            return f"{self.kind}  {self.output}"
        return f"{self.kind}  {self.input} -> {self.output or 'no tensor'}"


def named(root: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model by clean name; a wrapper in place of the module inside it."""
    found: dict[str, nn.Module] = {}
    for name, module in root.named_modules():
        found.setdefault(clean(root, name), module)
    return found


def is_called(module: nn.Module) -> bool:
    """Whether a module can be hooked: containers are not called."""
    return not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList))


class ModelTree:
    """The modules of a model, parents before their children. ``print`` or ``str`` it.

    Args:
        ranks: The ranks of the model, in words.

    Attributes:
        nodes: The modules in the order of ``named_modules``; the first is the model itself.
        title: The model's own line, with its ranks.
    """

    def __init__(self, nodes: Sequence[Node], ranks: str) -> None:
        self.nodes = list(nodes)
        self.title = f"{self.nodes[0].summary}   ({ranks})"
        self._by_name = {node.name: node for node in self.nodes}
        self._children: dict[str, list[str]] = {node.name: [] for node in self.nodes}
        for node in self.nodes[1:]:
            parent = node.name.rpartition(".")[0]
            self._children[parent].append(node.name)

    def __getitem__(self, name: str) -> Node:
        return self._by_name[name]

    def __str__(self) -> str:
        return "\n".join([self.title, *self._lines("", "", show_all=False)])

    def json(self) -> dict[str, Any]:
        """Return all modules as plain values for JSON."""
        return {
            "title": self.title,
            "modules": [
                {
                    "name": node.name,
                    "class": node.kind,
                    "can_be_hooked": node.has_forward,
                    "input": node.input and node.input.json(),
                    "output": node.output and node.output.json(),
                }
                for node in self.nodes
            ],
        }

    def print(self, show_all: bool = False) -> None:
        """Print the tree.

        Args:
            show_all: Print equal numbered modules (``layers.0`` to ``layers.31``) one by one.
        """
        print("\n".join([self.title, *self._lines("", "", show_all)]))

    def _lines(self, name: str, indent: str, show_all: bool) -> Iterator[str]:
        shown = self.children(name, show_all)
        for note in self._by_name[name].notes:
            yield f"{indent}{'|' if shown else ' '}   * {note}"
        for i, group in enumerate(shown):
            is_last = i + 1 == len(shown)
            summary = self._by_name[group[0]].summary
            yield f"{indent}{'`-- ' if is_last else '|-- '}{_label(group)}  {summary}"
            yield from self._lines(group[0], indent + ("    " if is_last else "|   "), show_all)

    def children(self, name: str, show_all: bool = False) -> list[list[str]]:
        """Return the names of a module's children, with consecutive numbered children grouped if
        their subtrees are equal.
        """
        groups: list[list[str]] = []
        before: tuple[object, ...] | None = None  # the subtree of the child before
        for child in self._children[name]:
            is_numbered = not show_all and re.search(r"(^|\.)\d+$", child)
            subtree = self._subtree(child) if is_numbered else None
            if subtree is not None and subtree == before:
                groups[-1].append(child)
            else:
                groups.append([child])
            before = subtree
        return groups

    def _subtree(self, name: str) -> tuple[object, ...]:
        """Return the summaries and notes of a module and its descendants, without its own name."""
        node = self._by_name[name]
        below = ((child.rpartition(".")[2], self._subtree(child)) for child in self._children[name])
        return (node.summary, node.notes, *below)


def _label(group: Sequence[str]) -> str:
    """Return ``mlp``, or ``0 to 31`` for a group."""
    first, last = (name.rpartition(".")[2] for name in (group[0], group[-1]))
    return first if first == last else f"{first} to {last}"


def looks(root: nn.Module, mesh: Mesh, follower: Follower) -> list[Look]:
    """Return what ``run_watched`` needs to observe the first input and output tensor of each module
    call on this rank.
    """

    def look(name: str, kind: str, tree: Any) -> Seen | None:
        if _C.num_leaves(tree) == 0:
            return None
        leaf = _C.leaf_at(tree, 0)
        value = follower.joint_value(leaf)
        plain, stated, known = dtensor.plain_and_stated(leaf, mesh, name)
        site, shape = (name, kind), tuple(plain.shape)
        return Seen(site, shape, plain.dtype, stated, known=known, value=value)

    return [
        (module, kind == "input", functools.partial(look, name, kind))
        for name, module in named(root).items()
        for kind in ("input", "output")
    ]


def set_tensors(nodes: dict[str, Node], calls: Iterable[Sequence[Seen]], mesh: Mesh) -> None:
    """Set the nodes' input and output tensors, from the first call of each module."""
    for seen in calls:
        name, kind = seen[0].hook
        if name in nodes and getattr(nodes[name], kind) is None:
            tensor: Any = {kind: _full_tensor(name, kind, seen, mesh)}
            nodes[name] = replace(nodes[name], **tensor)


def _full_tensor(name: str, kind: str, ranks: Sequence[Seen], mesh: Mesh) -> TensorSeen:
    site = Site(name, name, "forward" if kind == "output" else "forward_pre")
    shapes = [one.shape for one in ranks]
    try:
        layout: Any = layout_from_shapes(site, ranks, mesh)
        full = layout.full_shape(shapes, mesh.dp_size, mesh.tp_size)
    except (HookError, ValueError):
        layout, full = None, None
    return TensorSeen(full, tuple(shapes), ranks[0].dtype, layout)


def fill(core: HookCore, nodes: dict[str, Node], args: Any) -> None:
    """Set the input and output tensors of a wrapped model's nodes, from a run on the shapes of
    these inputs. Collective over the mesh.

    Raises:
        HookError: the model can't be run on shapes.
        RuntimeError: called during a run.
    """

    def look(follower: Follower, given: Any) -> list[Seen]:
        return run_watched(core.module, follower, looks(core.module, core.mesh, follower), *given)

    calls = on_shapes(core, "show", args, {}, look)
    set_tensors(nodes, calls, core.mesh)
    for name, node in nodes.items():
        nodes[name] = replace(node, was_run=True)


def output_placement(core: HookCore, args: Any, kwargs: Any, name: str) -> Placement | None:
    """Return how the first tensor that a module returns is placed along tp, by a run on the shapes
    of these inputs; None: not known, or the module was not called. Collective. Raises as ``fill``.
    """

    def look(follower: Follower, given: Any) -> list[Seen]:
        module = named(core.module)[name]
        watched = [one for one in looks(core.module, core.mesh, follower) if one[0] is module]
        return run_watched(core.module, follower, watched, *given)

    calls = on_shapes(core, "run_from", args, kwargs, look)
    outputs = [ranks for ranks in calls if ranks[0].hook == (name, "output")]
    found = {one.known.tp if one.known else one.pair[1] for ranks in outputs[:1] for one in ranks}
    return found.pop() if len(found) == 1 else None

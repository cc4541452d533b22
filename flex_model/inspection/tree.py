"""A model's modules as a tree, with what they take and give."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from flex_model.distributed.layout import Shape, ShardLayout
from flex_model.inspection import text


@dataclass(frozen=True)
class TensorSeen:
    """The first tensor that a module takes or gives, at its first call.

    Attributes:
        full_shape, layout: None where shapes do not tell how it is split.
        local_shapes: Of all ranks, in the order (dp, tp), tp fastest.
    """

    full_shape: Shape | None
    local_shapes: tuple[Shape, ...]
    dtype: torch.dtype
    layout: ShardLayout | None

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        if self.layout is None:
            local = text.shapes(self.local_shapes)
            return f"{dtype} {local} a rank, a run tells how it is split"
        if len(self.local_shapes) == 1:
            return f"{dtype} {text.shape(self.full_shape)}"
        return f"{dtype} {text.shape(self.full_shape)} [{self.layout}]"


@dataclass
class Node:
    """A module, by its name in the model.

    Attributes:
        kind: Its class.
        has_forward: Whether a hook can sit here (not at a ``ModuleList``).
    """

    name: str
    kind: str
    has_forward: bool = True
    input: TensorSeen | None = None
    output: TensorSeen | None = None

    @property
    def what(self) -> str:
        """Its class and tensors, in a line."""
        if not self.has_forward:
            return self.kind
        if self.output is None and self.input is None:
            return f"{self.kind}  (not run, or without tensors)"
        if self.input is None or str(self.input) == str(self.output):
            return f"{self.kind}  {self.output}"
        return f"{self.kind}  {self.input} -> {self.output or 'no tensor'}"


class ModelTree:
    """All modules of a model, parents before their children. ``print`` or ``str`` it.

    Attributes:
        nodes: By ``named_modules``; the first is the model itself.
    """

    def __init__(self, nodes: Sequence[Node], tp: int, dp: int) -> None:
        self.nodes = list(nodes)
        self._title = f"{self.nodes[0].what}   ({tp} tensor-parallel x {dp} data-parallel ranks)"
        self._by_name = {node.name: node for node in self.nodes}
        self._children: dict[str, list[str]] = {node.name: [] for node in self.nodes}
        for node in self.nodes[1:]:
            parent = node.name.rpartition(".")[0]
            self._children[parent].append(node.name)

    def __getitem__(self, name: str) -> Node:
        return self._by_name[name]

    def __str__(self) -> str:
        return "\n".join([self._title, *self._lines("", "", show_all=False)])

    def print(self, show_all: bool = False) -> None:
        """Print the tree; to a terminal with rich, where that is installed.

        Args:
            show_all: Numbered modules that are alike (``layers.0`` to ``layers.31``) one by one.
        """
        if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
            print("\n".join([self._title, *self._lines("", "", show_all)]))
            return
        from rich.console import Console
        from rich.text import Text
        from rich.tree import Tree

        def add(branch: Tree, name: str) -> None:
            for label, what, child in self._shown(name, show_all):
                line = Text.assemble((label, "bold"), "  ", what)
                add(branch.add(line), child)

        tree = Tree(Text(self._title))
        add(tree, "")
        Console().print(tree)

    def _lines(self, name: str, indent: str, show_all: bool) -> Iterator[str]:
        shown = list(self._shown(name, show_all))
        for i, (label, what, child) in enumerate(shown):
            is_last = i + 1 == len(shown)
            yield f"{indent}{'`-- ' if is_last else '|-- '}{label}  {what}"
            yield from self._lines(child, indent + ("    " if is_last else "|   "), show_all)

    def _shown(self, name: str, show_all: bool) -> Iterator[tuple[str, str, str]]:
        """Label, text and name of the children; numbered ones that are alike are one."""
        children = self._children[name]
        start = 0
        while start < len(children):
            end = start + 1
            if not show_all and re.search(r"(^|\.)\d+$", children[start]):
                alike = self._picture(children[start])
                while end < len(children) and self._picture(children[end]) == alike:
                    end += 1
            label = children[start].rpartition(".")[2]
            if end - start > 1:
                label += f" to {children[end - 1].rpartition('.')[2]}"
            yield label, self._by_name[children[start]].what, children[start]
            start = end

    def _picture(self, name: str) -> tuple[object, ...]:
        """What a module and all below it look like, without its own name."""
        below = ((child.rpartition(".")[2], self._picture(child)) for child in self._children[name])
        return (self._by_name[name].what, *below)

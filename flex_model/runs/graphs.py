"""The autograd graphs that a FlexModel's runs made. The backward of a graph calls the hooks of the
forward that built it, even if they were removed or deselected since, or the FlexModel is gone.

A graph reports itself when its backward begins: nodes of the model's outputs, and the edges of
backward hooks, hold its ``Graph``, which lives as long as they do. So do all nodes of a forward
that may be recomputed (activation checkpointing): a backward may begin at any tensor of it.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from flex_model import _C
from flex_model.integrations import torch_private
from flex_model.layouts.sources import tensors_of
from flex_model.runs.remembered_runs import RememberedRuns, backward_task

if TYPE_CHECKING:
    from flex_model.hooks.registration import Registration
    from flex_model.hooks.table import HookTable
    from flex_model.runs.run import Run


class Graph:
    """A part of the graph of one run.

    It refers to the ``Graphs`` weakly while the FlexModel lives, and to hooks only if they were
    removed: an editing function may keep a part of the graph itself, and no garbage collector sees
    a cycle that goes through autograd's nodes.

    Attributes:
        run: The run that made it.
        removed: Its hooks that were removed since.
        is_used: Whether its backward has run, and freed its memory.
        outputs: Of a graph whose nodes all hold it: the numbers of the outputs that no backward has
            reached yet; a pass that began inside the model has not freed all of its memory.
        entered: The outputs that the running pass has reached.
    """

    __slots__ = (
        "__weakref__", "_end", "_graphs", "entered", "is_used", "outputs", "removed", "run",
    )  # fmt: skip

    def __init__(self, run: Run, graphs: Graphs) -> None:
        self.run = run
        self.removed: list[Registration] = []
        self.is_used = False
        self.outputs: set[int] = set()
        self.entered: set[int] = set()
        self._graphs = weakref.ref(graphs)
        self._end: _C.Finalizer | None = None

    def enter(self, *grads: object) -> None:
        """Report that a backward reaches this graph; autograd calls it, any number of times."""
        graphs = self._graphs()
        if graphs is not None:
            graphs.enter(self)

    def enter_at(self, output: int, *grads: object) -> None:
        """Report that a backward reaches this graph at an output."""
        self.entered.add(output)
        self.enter()

    def passed(self, frees: bool) -> None:
        """Update the state after a backward pass that reached this graph and ended well.

        Args:
            frees: Whether the pass freed the memory of the graph.
        """
        if frees:
            self.outputs -= self.entered
            self.is_used |= not self.outputs
        self.entered.clear()

    def keep_alive(self, graphs: Graphs) -> None:
        """Hold the core, which ``graphs`` refers to, since the FlexModel is gone."""
        self._end = _C.Finalizer(graphs.ended)


class Graphs:
    """The graphs of a FlexModel.

    Args:
        on_end: A method of the core, called when the FlexModel is gone and no graph needs the core
            any more. Local.
    """

    def __init__(self, table: HookTable, runs: RememberedRuns, on_end: Callable[[], None]) -> None:
        self._table = table
        self._runs = runs
        self._on_end = on_end
        # Plain references: in the callbacks of a WeakSet, too, Python would ignore a Ctrl-C.
        self._graphs: list[weakref.ref[Graph]] = []
        self._most_graphs = 0  # at which those that are gone are dropped from the list
        self._served: dict[int, weakref.ref[_Served]] = {}  # by backward pass
        self._is_left = False  # the FlexModel is gone

    def add(self, run: Run) -> Graph:
        """Make a graph, which lives as long as an autograd node holds it."""
        graph = Graph(run, self)
        if len(self._graphs) >= self._most_graphs:
            self._graphs = [ref for ref in self._graphs if ref() is not None]
            self._most_graphs = 2 * len(self._graphs) + 64
        self._graphs.append(weakref.ref(graph))
        return graph

    def _unused(self) -> list[Graph]:
        """Return the graphs whose backward may still run."""
        graphs = [graph for ref in self._graphs if (graph := ref()) is not None]
        return [graph for graph in graphs if not graph.is_used]

    def watch(self, run: Run, output: Any) -> None:
        """Watch for backward passes that begin at an output, or reach it from behind. Local."""
        nodes: list[Any] = [tensor.grad_fn for tensor in tensors_with_graph(output)]
        if not nodes:
            return
        graph = self.add(run)
        for i, node in enumerate(nodes):
            node.register_prehook(partial(graph.enter_at, i))
        if run.is_recomputed:
            graph.outputs.update(range(len(nodes)))
            for node in nodes_behind(nodes, run.holds):
                node.register_prehook(graph.enter)

    def keep(self, registrations: Sequence[Registration]) -> None:
        """Make graphs keep hooks of theirs that are about to be removed."""
        for graph in self._unused():
            graph.removed.extend(r for r in registrations if r.index in graph.run.active)

    def leave(self) -> None:
        """The FlexModel is gone: its unused graphs keep the core alive from now on."""
        self._is_left = True
        for graph in self._unused():
            graph.keep_alive(self)
        _left.add(self)
        self.ended()

    def ended(self) -> None:
        """Call ``on_end`` if the FlexModel is gone and no graph needs the core."""
        if not self._is_left or self._served:
            return
        if _is_exiting or not self._unused():
            self._is_left = False
            _left.discard(self)
            self._on_end()

    def enter(self, graph: Graph) -> None:
        """Install the missing hooks of a graph that a backward reaches, until the pass ends."""
        task = backward_task()
        if task == -1:
            return
        known_pass = self._served.get(task)
        served = None if known_pass is None else known_pass()
        if served is None:
            served = _Served(self, task)
            self._served[task] = weakref.ref(served)
            torch.autograd.Variable._execution_engine.queue_callback(served.ended)
        if graph in served.graphs:
            return
        served.graphs.append(graph)
        self._runs.serve(graph.run)
        present = self._table.called.union(r.index for r in served.put_back)
        missing = graph.run.active - present
        if not missing:
            return
        known = {registration.index: registration for registration in self._table.registrations}
        known.update((registration.index, registration) for registration in graph.removed)
        found = [known[index] for index in sorted(missing & known.keys())]
        acts = [
            r
            for r in found
            if (
                r.is_registered or self._is_left if r.kind == "tensor" else r.edits or r.is_backward
            )
        ]
        self._table.put_back(acts)
        served.put_back.extend(acts)

    def left(self, task: int, reached: list[Graph], put_back: list[Registration]) -> None:
        """Remove what was installed for a pass that ended or was aborted."""
        self._served.pop(task, None)
        self._table.take_off(put_back)
        for graph in reached:
            self._runs.unserve(graph.run)
        self.ended()


class _Served:
    """One backward pass; it lives as long as autograd's task of the pass.

    Attributes:
        graphs: The graphs that it has reached.
        put_back: The hooks that are installed for it.
    """

    def __init__(self, graphs: Graphs, task: int) -> None:
        self.graphs: list[Graph] = []
        self.put_back: list[Registration] = []
        self._frees = not torch_private.keeps_graph()
        self._end = _C.Finalizer(partial(graphs.left, task, self.graphs, self.put_back))

    def ended(self) -> None:
        """Mark the graphs of a pass that ended well as used, if their memory was freed."""
        for graph in self.graphs:
            graph.passed(self._frees)


def tensors_with_graph(output: Any) -> list[Tensor]:
    """Return the tensors in an output, also in objects of the user's classes, that have a graph."""
    found = *_C.flatten(output)[0], *tensors_of(output)
    return list({id(one): one for one in found if one.grad_fn is not None}.values())


def is_in_checkpoint() -> bool:
    """Return whether the running code may be recomputed in backward, if its graph is built at all:
    a checkpoint runs it without a graph, or recomputes the tensors saved for it.
    """
    saved_by = torch_private.top_saved_hooks()
    return not torch.is_grad_enabled() or saved_by is not None


def nodes_behind(
    outputs: Sequence[Any], is_inside: Callable[[Any], bool] = lambda node: True
) -> Iterator[Any]:
    """Yield the nodes of the graph that lead to these, through such as are inside."""
    seen, pending = set(outputs), list(outputs)
    while pending:
        for node, _ in pending.pop().next_functions:
            if node is not None and node not in seen and is_inside(node):
                seen.add(node)
                pending.append(node)
                yield node


def leaves_between(inputs: Sequence[Any], outputs: Any) -> Iterator[Tensor]:
    """Yield the tensors whose ``.grad`` a backward of these outputs adds to, but for the inputs and
    what they were computed from.
    """
    given = [one for one in inputs if isinstance(one, Tensor)]
    nodes = [one.grad_fn for one in pytree.tree_leaves(outputs) if isinstance(one, Tensor)]
    ends = {one.grad_fn for one in given}
    for node in nodes_behind([node for node in nodes if node is not None], lambda n: n not in ends):
        is_leaf = node.name() == "torch::autograd::AccumulateGrad"
        if is_leaf and not any(node.variable is one for one in given):
            yield node.variable


_left: weakref.WeakSet[Graphs] = weakref.WeakSet()  # those whose FlexModel is gone
_is_exiting = False


def _exit() -> None:
    """End all graphs: the interpreter exits, and no backward will run."""
    global _is_exiting
    _is_exiting = True
    for graphs in list(_left):
        graphs.ended()


atexit.register(_exit)

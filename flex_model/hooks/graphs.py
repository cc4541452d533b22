"""The graphs that a wrap's runs made. The backward of a graph has the hooks of the forward that
built it, whatever became of them since: removed, not chosen any more, or the wrapper is gone.

A graph says itself that its backward begins: nodes of the model's outputs, and the edges of
backward hooks, hold its ``Graph``, which lives as long as they do. So do all nodes of a forward
that may be computed once more (activation checkpointing): a backward may begin at any tensor of it.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from flex_model import _C
from flex_model.hooks.remembered_runs import RememberedRuns, backward_task

if TYPE_CHECKING:
    from flex_model.hooks.context import RunContext
    from flex_model.hooks.registration import Registration
    from flex_model.hooks.table import HookTable


class Graph:
    """A part of the graph of one run.

    It refers to the wrap weakly as long as the wrapper lives, and to hooks as long as they are
    registered: what an editing function keeps may be a part of the graph itself, and no garbage
    collector sees a cycle that goes through autograd's nodes.

    Attributes:
        run: Whose graph it is.
        removed: Its hooks that were removed since.
        owner: The core, when the wrapper is gone.
        is_used: Whether its backward has been, and its memory been given back.
        outputs: Of a graph whose nodes all hold it: the outputs that no backward came to yet, by
            number; a pass that began inside has not given back all of its memory.
        entered: Those that the pass came to that goes on.
    """

    __slots__ = (
        "__weakref__", "_graphs", "entered", "is_used", "outputs", "owner", "removed", "run",
    )  # fmt: skip

    def __init__(self, run: RunContext, graphs: Graphs) -> None:
        self.run = run
        self.removed: list[Registration] = []
        self.owner: object = None
        self.is_used = False
        self.outputs: set[int] = set()
        self.entered: set[int] = set()
        self._graphs = weakref.ref(graphs)

    def enter(self, *grads: object) -> None:
        """A backward comes to this graph; as often as one likes. What autograd calls."""
        graphs = self._graphs()
        if graphs is not None:
            graphs.enter(self)

    def enter_at(self, output: int, *grads: object) -> None:
        """As ``enter``, at an output."""
        self.entered.add(output)
        self.enter()

    def passed(self, frees: bool) -> None:
        """A backward pass that came to this graph ended well.

        Args:
            frees: Whether it gave the memory back.
        """
        if frees:
            self.outputs -= self.entered
            self.is_used |= not self.outputs
        self.entered.clear()

    def __del__(self) -> None:
        owner, self.owner, self.is_used = self.owner, None, True
        graphs = self._graphs()
        if owner is not None and graphs is not None:
            graphs.ended()


class Graphs:
    """Of one wrap.

    Args:
        on_end: Called, when the wrapper is gone, as soon as no graph needs anything of it. Local.
    """

    def __init__(self, table: HookTable, runs: RememberedRuns, on_end: Callable[[], None]) -> None:
        self._table = table
        self._runs = runs
        self._on_end = on_end
        self._graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self._served: weakref.WeakValueDictionary[int, _Served] = weakref.WeakValueDictionary()
        self._is_left = False  # the wrapper is gone

    def add(self, run: RunContext) -> Graph:
        """One more, as long as somebody holds it."""
        graph = Graph(run, self)
        self._graphs.add(graph)
        return graph

    def watch(self, run: RunContext, output: Any) -> None:
        """The backward passes that begin at an output, or come to it from behind it. Local."""
        if not torch.is_grad_enabled():
            return
        nodes = [leaf.grad_fn for leaf in _C.flatten(output)[0] if leaf.grad_fn is not None]
        if not nodes:
            return
        graph = self.add(run)
        for i, node in enumerate(nodes):
            node.register_prehook(partial(graph.enter_at, i))
        if run.is_recomputed:
            graph.outputs.update(range(len(nodes)))
            for node in _nodes_inside(run, nodes):
                node.register_prehook(graph.enter)

    def keep(self, registrations: Sequence[Registration]) -> None:
        """Hooks are about to be removed; graphs that were made with them hold them from now on."""
        for graph in list(self._graphs):
            if not graph.is_used:
                own = [r for r in registrations if r.index in graph.run.active]
                graph.removed.extend(own)

    def leave(self, core: object) -> None:
        """The wrapper is gone: its graphs hold the core from now on, which ends with them."""
        self._is_left = True
        for graph in list(self._graphs):
            if not graph.is_used:
                graph.owner = core
        _left.add(self)
        self.ended()

    def ended(self) -> None:
        """Call ``on_end`` if nothing is served any more."""
        if not self._is_left or self._served:
            return
        if _is_exiting or all(graph.is_used for graph in list(self._graphs)):
            self._is_left = False
            _left.discard(self)
            self._on_end()

    # Backward.

    def enter(self, graph: Graph) -> None:
        """A backward comes to a graph: its hooks that are gone are there until the pass ends."""
        task = backward_task()
        if task == -1:
            return
        served = self._served.get(task)
        if served is None:
            self._served[task] = served = _Served(self, task)
            torch.autograd.Variable._execution_engine.queue_callback(served.ended)
        if graph in served.graphs:
            return
        served.graphs.append(graph)
        self._runs.serve(graph.run)
        there = self._table.active.union(r.index for r in served.put_back)
        missing = graph.run.active - there
        if not missing:
            return
        known = {registration.index: registration for registration in self._table.registrations}
        known.update((registration.index, registration) for registration in graph.removed)
        found = [known[index] for index in sorted(missing & known.keys())]
        # Of parameters, the hooks of the last run are chosen, until the wrapper is gone.
        acts = [
            r for r in found if (self._is_left if r.kind == "tensor" else r.edits or r.is_backward)
        ]
        self._table.put_back(acts)
        served.put_back += acts

    def left(self, served: _Served) -> None:
        """A pass is over, or was left in its middle."""
        del self._served[served.task]
        self._table.take_off(served.put_back)
        for graph in served.graphs:
            self._runs.unserve(graph.run)
        self.ended()


class _Served:
    """One backward pass, alive as long as autograd's task of it.

    Attributes:
        graphs: That it came to.
        put_back: Hooks that are there for it.
    """

    def __init__(self, graphs: Graphs, task: int) -> None:
        self._of = graphs
        self.task = task
        self.graphs: list[Graph] = []
        self.put_back: list[Registration] = []
        self._frees = not torch._C._autograd._get_current_graph_task_keep_graph()

    def ended(self) -> None:
        """The pass ended well: what it came to is used up, if its memory was not kept."""
        for graph in self.graphs:
            graph.passed(self._frees)

    def __del__(self) -> None:
        self._of.left(self)


def is_in_checkpoint() -> bool:
    """Whether what runs may be computed once more in backward, if its graph is built at all: a
    checkpoint runs without one, or has what is saved for it made again.
    """
    saved_by = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return not torch.is_grad_enabled() or saved_by is not None


def _nodes_inside(run: RunContext, outputs: Sequence[Any]) -> Iterator[Any]:
    """The nodes behind these that were made during the run."""
    seen, pending = set(outputs), list(outputs)
    while pending:
        for node, _ in pending.pop().next_functions:
            if node is not None and node not in seen and run.holds(node):
                seen.add(node)
                pending.append(node)
                yield node


_left: weakref.WeakSet[Graphs] = weakref.WeakSet()  # whose wrappers are gone
_is_exiting = False


def _exit() -> None:
    """No backward comes any more."""
    global _is_exiting
    _is_exiting = True
    for graphs in list(_left):
        graphs.ended()


atexit.register(_exit)

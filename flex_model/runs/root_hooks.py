"""Torch's hooks of the wrapped module itself: begin and end of its forwards. Where it is a wrapper
(DDP, FSDP1), the module inside has them, too: its own methods, such as ``generate``, call that.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from flex_model.hooks.own_batch import OwnBatch
from flex_model.hooks.table import HookTable
from flex_model.hooks.tracking import Tracking
from flex_model.integrations import compiled, continuous_batching
from flex_model.names import wrapped_chain
from flex_model.runs.backward_watch import BackwardWatch
from flex_model.runs.graphs import Graphs
from flex_model.runs.lifecycle import Runs
from flex_model.runs.remembered_runs import in_backward


class RootHooks:
    """Begins and ends the runs of direct calls of the wrapped module, and follows its forwards.

    Args:
        watches: Whether backward passes are watched here; a pipeline's schedule runs its own.

    Attributes:
        runs: The runs that a call of the module begins.
    """

    def __init__(
        self,
        module: nn.Module,
        runs: Runs,
        table: HookTable,
        tracking: Tracking,
        own_batch: OwnBatch,
        graphs: Graphs,
        watch: BackwardWatch,
        watches: bool,
    ) -> None:
        self._root, self.runs, self._table, self._tracking = module, runs, table, tracking
        self._own_batch = own_batch
        self._graphs, self._watch, self._watches = graphs, watch, watches
        self._hooked: dict[nn.Module, tuple[Any, Any]] = {}

    def install(self) -> None:
        """Register the hooks, outside of all others on the module; do nothing if they are there."""
        if self._are_outermost():
            return
        self.remove()
        # `begin` runs before all other hooks of the root, `end` after them: hooks on the root
        # itself run inside
        for module in wrapped_chain(self._root):
            self._hooked[module] = (
                module.register_forward_pre_hook(self.begin, prepend=True, with_kwargs=True),
                module.register_forward_hook(self.end, always_call=True),
            )

    def _are_outermost(self) -> bool:
        return bool(self._hooked) and all(
            next(iter(module._forward_pre_hooks), None) == begin.id
            and next(reversed(module._forward_hooks), None) == end.id
            for module, (begin, end) in self._hooked.items()
        )

    def remove(self) -> None:
        """Remove the hooks; do nothing if there are none."""
        for begin, end in self._hooked.values():
            begin.remove()
            end.remove()
        self._hooked.clear()

    @compiled.outside_graphs
    def begin(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        """Begin a forward: torch's hook."""
        if module not in self._hooked:  # a copy, which was copied with its hooks
            return
        if kwargs is None:  # removed since torch has listed the hooks of this call
            return
        self.runs.check_entry()
        continuous_batching.check_arguments(kwargs, bool(self._table.active))
        if not in_backward():
            self.runs.begin_direct()
            hooks = self._table.active_hooks
            run = self.runs.current
            later = None if run is None else run.pending_replicas
            self._tracking.begin(args, kwargs, hooks.stage or hooks, later=later)
            self._own_batch.begin_forward(args, kwargs, hooks)

    @compiled.outside_graphs
    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """End a forward, also one that failed: torch's hook."""
        if module not in self._hooked:
            return
        run = self.runs.current
        if run is None or in_backward() or self.runs.refusal():
            return
        error = sys.exc_info()[1]
        error = None if error is run.outer_error else error
        self._tracking.end(output, failed=error is not None)
        self._own_batch.end_forward(output, failed=error is not None)
        if self._table.active_hooks.acts_in_backward and self._watches:
            self._graphs.watch(run, output)
            self._watch.watch_from(output)
        self.runs.end_direct(error)

    # The hooks are methods of this object, which is copied and pickled with the module.

    def __deepcopy__(self, memo: dict[int, Any]) -> RootHooks:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a {type(self._root).__name__} with hooks of a FlexModel can't be pickled; save its "
            "state_dict(), or the model after flex.restore()"
        )

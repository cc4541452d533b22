"""Torch's hooks of the wrapped module itself: begin and end of its forwards. Where it is a wrapper
(DDP, FSDP1), the module inside has them, too: its own methods, such as ``generate``, call that. So
do the modules of hooks and those around them, which may be called on their own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from flex_model.hooks.evidence import Part
from flex_model.hooks.registration import Registration
from flex_model.hooks.table import HookTable
from flex_model.hooks.tracking import Tracking
from flex_model.integrations import compiled, past_positions, refused, torch_private
from flex_model.names import find_module, wrapped_chain
from flex_model.runs.graphs import Graphs
from flex_model.runs.lifecycle import Runs
from flex_model.runs.remembered_runs import backward_task
from flex_model.runs.run import Run
from flex_model.runs.until import CutError


class RootHooks:
    """Begins and ends the runs of direct calls of the wrapped module, and follows its forwards.

    Args:
        watches: Whether backward passes are watched here, and positions counted; a pipeline's
            schedule runs its own backward passes, and a stage's cache lacks layers.
        has_parts: Whether parts of the model may be called on their own.

    Attributes:
        runs: The runs that a call of the module begins.
    """

    def __init__(
        self,
        module: nn.Module,
        runs: Runs,
        table: HookTable,
        tracking: Tracking,
        graphs: Graphs,
        watches: bool,
        has_parts: bool,
    ) -> None:
        self._root, self.runs, self._table, self._tracking = module, runs, table, tracking
        self._graphs, self._watches = graphs, watches
        self._has_parts = has_parts
        self._hooked: dict[nn.Module, tuple[Any, Any]] = {}
        self._parts: dict[nn.Module, Part] = {}  # of those, the parts of the model
        self._installed: set[int] = set()  # the hooks whose modules are among them
        self._called: nn.Module | None = None  # the part that was called on its own

    def install(self, changed: Sequence[Registration]) -> None:
        """Register the hooks, outside of all others on their modules.

        Args:
            changed: The hooks that may have become active.
        """
        chain = wrapped_chain(self._root)
        for module in chain:
            self._install(module, self.begin, self.end)
        names: dict[str, None] = {}  # of the modules with hooks, and of those around them
        for registration in changed if self._has_parts else ():
            is_parameter = registration.kind == "tensor"
            if registration.index in self._installed:
                continue
            if not (is_parameter or registration.is_active):
                continue
            self._installed.add(registration.index)
            path = registration.name.split(".")
            num_parts = len(path) - (is_parameter or self._is_a_run(registration))
            names |= dict.fromkeys(".".join(path[: i + 1]) for i in range(num_parts))
        for name in names:
            module = find_module(self._root, name)
            if module not in chain and not isinstance(module, torch.jit.ScriptModule):
                self._parts.setdefault(module, Part(name, module))
                self._install(module, self.begin_part, self.end_part)

    def _is_a_run(self, registration: Registration) -> bool:
        """Return whether a call of its module alone needs no run but that of its hook: most hooks
        cost one torch hook, not three.
        """
        if not self._tracking.is_local or registration.kind != "forward":
            return False
        num_hooks = sum(len(one.hooks) for place in registration.places for one in place.all_sites)
        return num_hooks == 1 and registration.living_module not in self._parts

    def _install(self, module: nn.Module, begin: Any, end: Any) -> None:
        before, after = self._hooked.get(module, (None, None))
        if before is not None and after is not None:
            is_first = next(iter(module._forward_pre_hooks), None) == before.id
            if is_first and next(reversed(module._forward_hooks), None) == after.id:
                return
            before.remove()
            after.remove()
        # `begin` runs before all other hooks of the module, `end` after them: those run inside.
        self._hooked[module] = (
            module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True),
            module.register_forward_hook(end, always_call=True),
        )

    def remove(self) -> None:
        """Remove the hooks; do nothing if there are none."""
        for begin, end in self._hooked.values():
            begin.remove()
            end.remove()
        self._hooked.clear()
        self._parts.clear()
        self._installed.clear()

    @compiled.outside_graphs
    def begin_part(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        """Begin a forward of a part, unless it is in one of another module: torch's hook."""
        self.runs.end_left()
        if not self._tracking.forward.depth:
            self._called = module
        if module is self._called:
            self.begin(module, args, kwargs)

    @compiled.outside_graphs
    def end_part(self, module: nn.Module, args: Any, output: Any) -> None:
        """End a forward of a part that was called on its own: torch's hook."""
        if module is self._called:
            self.end(module, args, output)
            if not self._tracking.forward.depth:
                self._called = None

    @compiled.outside_graphs
    def begin(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        """Begin a forward: torch's hook."""
        # A copy, which was copied with its hooks, or removed since torch has listed the hooks.
        if module not in self._hooked or kwargs is None:
            return
        self.runs.check_entry()
        if self._table.active_hooks.indices:
            refused.check_batching_arguments(kwargs)
        if backward_task() != -1:
            return
        self.runs.end_left()
        if self._table.active_hooks.indices and self._watches:
            past_positions.begin(module, args, kwargs)
        with torch_private.uncounted():
            self._begin(self._parts.get(module), args, kwargs)

    def _begin(self, part: Part | None, args: Any, kwargs: Any) -> None:
        self.runs.begin_direct(self._beside(part) if part and not self.runs.current else ())
        run = self.runs.current
        later = None if run is None else run.pending_replicas
        self._tracking.begin(args, kwargs, self._table.active_hooks, part=part, later=later)
        if run is not None:
            run.note_rows(self._tracking.forward.rows)

    def _beside(self, part: Part) -> list[int]:
        """Return the hooks outside of a part of the model, which may have several names."""
        name, inside = f"{part.name}.", {*part.module.modules(), *part.module.parameters()}
        return [
            r.index
            for r in self._table.registrations
            if not f"{r.name}.".startswith(name) and inside.isdisjoint(r.living_targets)
        ]

    @compiled.outside_graphs
    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """End a forward, also one that failed: torch's hook."""
        past_positions.end(module)
        run = self.runs.current
        if module not in self._hooked or run is None or backward_task() != -1:
            return
        if self.runs.refusal():
            return
        error = sys.exc_info()[1]
        error = None if error is run.outer_error else error
        if isinstance(error, CutError):
            run.cut()
            error = None
        with torch_private.uncounted():
            self._end(run, output, error, module in self._parts)

    def _end(self, run: Run, output: Any, error: BaseException | None, is_part: bool) -> None:
        try:
            self._tracking.end(output, failed=error is not None)
            acts_in_backward = self._watches and self._table.active_hooks.acts_in_backward
            if acts_in_backward and torch.is_grad_enabled():
                self._graphs.watch(run, output)
                self.runs.watch.watch_from(output)
        except BaseException as failure:  # of a rank's hook, which all ranks raise here
            self.runs.end_direct(failure, is_part)
            raise
        self.runs.end_direct(error, is_part)

    # The hooks are methods of this object, which is copied and pickled with the module.

    def __deepcopy__(self, memo: dict[int, Any]) -> RootHooks:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a {type(self._root).__name__} with hooks of a FlexModel can't be pickled; save its "
            "state_dict(), or the model after flex.restore()"
        )

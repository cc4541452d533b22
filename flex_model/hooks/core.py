"""The hook core of one wrapped model: makes the objects that its hooks and runs need.

It never refers to the FlexModel, so that dropping the last reference to that removes all hooks
from the model.
"""

from __future__ import annotations

import contextlib
import itertools
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flex_model.distributed.communicator import Communicator
from flex_model.distributed.mesh import Mesh
from flex_model.errors import HookError
from flex_model.hooks.digests import HookDigests
from flex_model.hooks.function import HookFunction
from flex_model.hooks.handlers import HookHandlers
from flex_model.hooks.hook_executor import HookExecutor
from flex_model.hooks.layout_finder import LayoutFinder
from flex_model.hooks.registration import Registration, describe_hook
from flex_model.hooks.save_ctx import SentToAll
from flex_model.hooks.table import HookTable
from flex_model.hooks.tracking import Tracking
from flex_model.integrations import refused
from flex_model.integrations.made_sites import MadeSites
from flex_model.layouts.statements import Statements
from flex_model.names import clean
from flex_model.parameters.full import Parameters
from flex_model.parameters.trainable import Replicas
from flex_model.records.records import Records
from flex_model.runs.backward_passes import BackwardPasses
from flex_model.runs.graphs import Graphs
from flex_model.runs.lifecycle import Runs
from flex_model.runs.root_hooks import RootHooks
from flex_model.runs.step import MicrobatchState

if TYPE_CHECKING:
    from flex_model.runs.settings import Settings

# These settings must be equal on all ranks.
_EQUAL = ("edit_on", "output_ranks", "save_ctx_on", "batch_dim", "follow", "dp_batch", "pad_value")


class HookCore:
    """The engine of one FlexModel. ``module`` is the wrapped model; the other arguments are shared
    with the FlexModel that made it.

    Args:
        mesh: All ranks of the model, whose shards make a full parameter.
        settings: With ``dp_batch="local"``, runs are those of the ranks that share this rank's
            batch.
        make_parameters: Makes what reads and writes full parameters; a pipeline has them by stage.
        on_failure: Called with a hook that failed, and its error, instead of raising that.
        only_whole: Whether all runs are of the whole model: then no part is called on its own, and
            hooks whose module is not called are not reported.

    Attributes:
        mesh, communicator: The ranks of a run, and the communicator to those of this stage.
        of_parameters: The communicator to all ranks of this stage.
        runs: Begins and ends runs.
        table: The registered hooks.
        executor: Executes their calls on this rank's tensors.
        records, tracking, parameters, replicas: See their classes.
        on_close: Undoes what was changed in the model for hooks.
        recorder: What fingerprints are recorded with; kept from the first one on.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        output_ptr: dict[str, list[Tensor]],
        save_ctx: Namespace,
        modules: nn.ModuleDict,
        settings: Settings,
        step: MicrobatchState | None = None,
        make_parameters: Callable[[Any, Communicator, Statements], Any] = Parameters,
        on_failure: Callable[[Registration, Exception], None] | None = None,
        only_whole: bool = False,
    ) -> None:
        of_runs = mesh.of_own_batch() if settings.dp_batch == "local" else mesh
        self.module, self.mesh, self.step, self.settings = module, of_runs, step, settings
        self.save_ctx, self.modules = save_ctx, modules
        edit_on, timeout_s, device = settings.edit_on, float(settings.timeout), _device_of(module)
        self.communicator = communicator = Communicator(of_runs, timeout_s, device)
        self.of_parameters = (
            communicator if of_runs is mesh else Communicator(mesh, timeout_s, device)
        )
        self.records = records = Records(
            output_ptr, communicator, settings.output_ranks, step, on_failure
        )
        self.tracking = tracking = Tracking(
            module, communicator, settings.batch_dim, settings.follow
        )
        self.parameters = make_parameters(module, self.of_parameters, tracking.statements)
        self.replicas = Replicas(communicator, modules)
        is_sent = settings.save_ctx_on == "all" and edit_on == "rank0" and step is None
        sent = SentToAll(communicator, device) if is_sent and not communicator.is_local else None
        self.executor = executor = HookExecutor(
            communicator,
            records,
            save_ctx,
            modules,
            edit_on,
            self.parameters.get_on,
            tracking,
            checks_edits=step is not None,
            sent_to_all=sent,
            layouts=LayoutFinder(communicator, tracking, settings.pad_value),
        )
        serves_hooks, pads = communicator.is_local and step is None, settings.dp_batch == "global"
        self.table = table = HookTable(output_ptr, serves_hooks, partial(clean, module), pads)
        equal = {name: getattr(settings, name) for name in _EQUAL} | {"mesh": of_runs.describe()}
        self.digests = HookDigests(communicator, table, tracking.statements, equal)
        self.runs = Runs(
            module,
            communicator,
            table,
            records,
            tracking,
            self.digests,
            executor,
            self.replicas,
            step,
            not only_whole,
        )
        backwards = BackwardPasses(self.runs, communicator, records, tracking, step)
        self._graphs = Graphs(table, self.runs.remembered, self._free)
        self._root = RootHooks(
            module,
            self.runs,
            table,
            tracking,
            self._graphs,
            watches=step is None,
            has_parts=not only_whole and step is None,
        )
        handlers = HookHandlers(
            module,
            self.runs,
            backwards,
            self._graphs,
            communicator,
            tracking,
            executor,
            step,
            on_failure,
        )
        self.run_parameter_hooks = handlers.run_parameter_hooks
        table.connect(handlers, self._hooks_changed, self._graphs.keep)
        self.on_close = contextlib.ExitStack()
        self.recorder: Any = None
        self.is_closed = False

    def keep_recorder(self, recorder: Any) -> None:
        """Record fingerprints with this from now on."""
        self.recorder = recorder

    @property
    def runs_edits(self) -> bool:
        """Whether this rank runs editing functions, and so uses trainable modules."""
        return self.executor.edits_on_all or self.mesh.group_rank == 0

    def register(
        self, function: HookFunction, kind: str, targets: Sequence[Any], *args: Any, **kwargs: Any
    ) -> Sequence[Registration]:
        """Register as ``HookTable.register`` does; set the function's ``save_ctx``, ``modules``."""
        edit_of = self.communicator.edit_of
        if edit_of and not self.communicator.is_local:
            site = describe_hook(function.module_name, kind, function.unpack_idx)
            raise HookError(
                f"{edit_of}: its editing function registers a {site}, and ranks must agree on "
                "hooks while no function runs; register it before the run, and choose the runs "
                "that it is active in with groups="
            )
        if self.of_parameters is not self.communicator:
            self._check_own_batch(function, kind)
        for target in targets:
            refused.check_scripted(self.module, function.module_name, target)
            if isinstance(target, MadeSites):
                target.admit(function)
        registrations = self.table.register(function, kind, targets, *args, **kwargs)
        self.runs.hooks_registered(registrations)
        if kind == "tensor" and targets:
            registrations[0].state(*self.parameters.sources_of(function.module_name))
        function.attach(registrations, self.save_ctx, self.modules)
        return registrations

    def _check_own_batch(self, function: HookFunction, kind: str) -> None:
        """ValueError for a hook that needs all data-parallel ranks, whose runs are their own."""
        site = describe_hook(clean(self.module, function.module_name), kind, function.unpack_idx)
        if kind == "tensor":
            raise ValueError(
                f"{site}: it gets the mean over all data-parallel ranks, and with "
                "FlexModel(dp_batch='local') each of them has runs of its own; register it with "
                "another FlexModel of this model, without dp_batch, or read the gradient after the "
                "backward with flex.get_module_gradient"
            )
        if function.parameter_names:
            raise ValueError(
                f"{site}: parameters= are gathered from all ranks at each call, and with "
                "FlexModel(dp_batch='local') data-parallel ranks may call it at different times; "
                "read them before the run with flex.get_module_parameter"
            )

    def _hooks_changed(self, changed: Sequence[Registration]) -> None:
        if self.is_closed:
            self._root.remove()
            return
        self.digests.hooks_changed()
        if self.table.has_active:
            self._root.install(changed)
        else:
            self._root.remove()
        self.runs.hooks_changed()

    def close(self) -> None:
        """Remove all hooks; free process groups and lists when no graph needs them. Local; repeated
        calls do nothing.
        """
        if self.is_closed:
            return
        self.is_closed = True
        self.runs.close()
        self.table.close()
        self._root.remove()
        self.on_close.close()
        if self.recorder is not None:
            self.recorder.core.close()
        self._graphs.leave()

    def _free(self) -> None:
        """Free what the backward of a graph may have needed. Local."""
        self.runs.watch.close()
        self.runs.remembered.forget()
        self.of_parameters.close()
        self.communicator.close()


def _device_of(module: nn.Module) -> torch.device:
    """Return the device of a model's first parameter or buffer."""
    # Megatron's DDP has a list `buffers` in front of the method.
    first = next(itertools.chain(module.parameters(), nn.Module.buffers(module)), None)
    return torch.device("cpu") if first is None else first.device

"""Runs a wrapped module with hooks, and finds its modules and parameters by name."""

from __future__ import annotations

import contextlib
import functools
from argparse import Namespace
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from flex_model import inspection, visualize
from flex_model.hooks.core import HookCore
from flex_model.hooks.function import HookFunction
from flex_model.hooks.site import Moment
from flex_model.hooks.table import EVERYTHING
from flex_model.integrations import cut, fsdp1, fsdp2, model_mesh, offload, refused
from flex_model.integrations.compiled import between_graphs
from flex_model.layouts.statements import Statement
from flex_model.names import clean, find_module, module_names
from flex_model.records.store.session import Session, config_hash
from flex_model.runs import later_body
from flex_model.runs.settings import Groups, Settings, refuse_of_steps
from flex_model.runs.skipping import Skip
from flex_model.runs.until import Site, averaged_gradients, ended_at


class ModuleIndex:
    """The names of the modules and parameters of a wrapped model."""

    def __init__(self, core: HookCore) -> None:
        self._root, self._statements = core.module, core.tracking.statements

    @property
    def module_names(self) -> list[str]:
        return module_names(self._root)

    def hookable_names(self, kind: str) -> list[str]:
        """Return the clean names that a group's substring or regex is matched against."""
        parameters = self._root.named_parameters()
        return self._clean(self.module_names if kind != "tensor" else [n for n, _ in parameters])

    def names_of_type(self, kind: type) -> tuple[list[str], list[str]]:
        """Return the clean names of the modules of a type, and the names of all types."""
        named = [(name, module) for name, module in self._root.named_modules() if name]
        found = [name for name, module in named if isinstance(module, kind)]
        return self._clean(found), sorted({type(module).__name__ for _, module in named})

    def _clean(self, names: Iterable[str]) -> list[str]:
        """Return clean names, each once: a wrapper has that of the module in it."""
        return list(dict.fromkeys(filter(None, (clean(self._root, name) for name in names))))

    def names_of_statement(self, statement: Statement) -> list[str]:
        """Return the names of the modules or parameters that a statement matches."""
        return self._statements.names(statement)


class ModuleRunner:
    """Runs a wrapped module with hooks.

    Attributes:
        core: The engine of its hooks.
        index: The names of its modules and parameters.
        parameters: Reads and writes them in full.
        run_idle: Runs it while no hook is active: the module itself.
    """

    def __init__(self, module: nn.Module, settings: Settings) -> None:
        settings.check_no_steps()
        mesh, output_ptr = settings.find_mesh(module), settings.output_ptr
        if mesh.pp_size > 1:
            raise ValueError(model_mesh.pipeline_refusal(module, mesh.pp_size))
        refused.check_adapters(module, mesh)
        refused.check_copies(module)
        records = output_ptr if isinstance(output_ptr, dict) else {}
        core = HookCore(module, mesh, records, Namespace(), nn.ModuleDict(), settings)
        self.core = core
        self._gathered: dict[str, Any] = {}  # hooks have weak references
        if not isinstance(output_ptr, dict):
            try:
                core.runs.open_store(output_ptr, config_hash(module))
            except BaseException:
                core.close()
                raise
        self.close, self.run_idle = core.close, module
        self.one_run_at_most, self.interrupted = core.runs.one_run_at_most, core.runs.interrupted
        self.communicators, self.everyone = {"ranks": core.communicator}, core.of_parameters
        self.index, self.parameters = ModuleIndex(core), core.parameters

    @property
    def session(self) -> Session | None:
        """The session of the store that records go to, if any."""
        return self.core.runs.session

    @property
    def is_running(self) -> bool:
        self.core.runs.end_left()
        return self.core.runs.current is not None

    # Running.

    @between_graphs
    def run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], groups: Groups, complement: bool
    ) -> Any:
        """Run the module with the hooks of ``groups``. Collective while hooks are active."""
        core = self.core
        choice = (
            EVERYTHING
            if groups == "all" and not complement
            else core.table.choice(groups, complement)
        )
        has_choice = core.runs.is_inside and choice in (EVERYTHING, core.table.choices[0])
        with core.runs.active(choice):
            result = core.module(*args, **kwargs)
            if core.table.registrations and not has_choice:
                later_body.check_result(result, "forward")
            return result

    def active(self, groups: Groups, complement: bool) -> contextlib.AbstractContextManager[object]:
        """Return a context in which all calls of the module are one run."""
        return self.core.runs.active(self.core.table.choice(groups, complement))

    def run_until(
        self,
        module_name: str | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        groups: Groups,
        complement: bool,
    ) -> None:
        """Run the forward until this module, or the last of the hooked ones, was called."""
        core = self.core
        cut.check(core.module)
        with self.active(groups, complement):
            sites = self._sites_until(module_name)
            with averaged_gradients(core.module), ended_at(sites, core.module, module_name):
                core.module(*args, **kwargs)
            if core.runs.current is not None:
                core.runs.current.cut()

    def run_from(
        self,
        module_name: str,
        value: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        groups: Groups,
        complement: bool,
    ) -> Any:
        """Run the forward from the output of this module on."""
        core = self.core
        core.table.choice(groups, complement)
        cut.check(core.module, "run_from")
        skip = Skip(core.module, module_name, value)
        if core.mesh.tp_size > 1:
            find = functools.partial(inspection.tree.output_placement, core, args, kwargs)
            skip.check_layout(core.executor.layouts.of_outputs, find)
        with self.active(groups, complement):
            skip.check_arguments(kwargs)
            skip.check_hooks(core.table.active_hooks.registrations)
            with skip.installed():
                output = core.module(*args, **kwargs, **skip.arguments)
            later_body.check_result(output, "forward")
        skip.check_output(output)
        return output

    def _sites_until(self, module_name: str | None) -> list[Site]:
        if module_name is not None:
            return [([find_module(self.core.module, module_name)], "forward")]
        sites: list[Site] = [
            ([module], registration.kind)
            for registration in self.core.table.active_hooks.registrations
            if registration.kind in ("forward", "forward_pre")
            and (module := registration.living_module) is not None
        ]
        if not sites:
            raise ValueError(cut.NO_HOOK)
        return sites

    # What belongs to pipelines.

    def change(self, name: str, value: object) -> None:
        """TypeError: there are no steps here whose setting could change."""
        refuse_of_steps(name)

    def check_runs_whole_model(self, operation: str) -> None:
        """Do nothing: the ranks run the whole model."""

    def stages_of(self, name: str) -> tuple[int, ...]:
        """TypeError: there are no stages."""
        raise TypeError(
            f"stages_of({name!r}): this FlexModel wraps a {type(self.core.module).__name__}, which "
            "has no stages; wrap the schedule of a pipeline"
        )

    # Hooks.

    def targets_of(
        self, function: HookFunction, kind: str
    ) -> tuple[Sequence[nn.Module | nn.Parameter], Moment]:
        """Return the module, or parameter, of a hook, and when it gets a parameter's gradient."""
        root, name = self.core.module, function.module_name
        for parameter_name in function.parameter_names:
            fsdp1.find_parameter(root, parameter_name)
        if kind != "tensor":
            return [find_module(root, name)], "computed"
        full_name, parameter, wrapper = fsdp1.find_parameter(root, name)
        if wrapper is not None and self.core.mesh.tp_size > 1:
            raise ValueError(
                f"register_hook: parameter {clean(root, name)!r} belongs to a "
                "FullyShardedDataParallel (FSDP1) module over tensor-parallel ranks, whose layout "
                "it hides; use torch.distributed.fsdp.fully_shard, or hook the module's gradients"
            )
        offload.check_gradient("register_hook", root, full_name)
        if not parameter.requires_grad:
            raise ValueError(
                f"register_hook: parameter {clean(root, name)!r} does not require a "
                "gradient; call requires_grad_(True) first"
            )
        if wrapper is not None:
            made: Any = fsdp1.GatheredParameter(root, wrapper, full_name)
            return [self._gathered.setdefault(full_name, made)], "gathered"
        target = fsdp2.sharded_parameter(root, name, parameter)
        return [target], "accumulated" if fsdp2.is_managed(root, target) else "computed"

    # Inspection.

    def modules_to_show(self, args: tuple[Any, ...]) -> visualize.model_map.Modules:
        """Return the modules for ``show``; with inputs, with the tensors of a run on shapes."""
        modules = visualize.model_map.modules_of(self.core)
        if args:
            inspection.tree.fill(self.core, modules.nodes, args)
        return modules


def check_open(core: HookCore) -> None:
    """RuntimeError after ``restore()``."""
    if core.is_closed:
        raise RuntimeError("this FlexModel was restored; wrap the model again")

"""Hooks with ``dp_batch="local"``: each data-parallel rank runs them on its own rows, with its
tensor-parallel group alone. Nothing is gathered over the data-parallel ranks but the records, when
a run ends.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flex_model.distributed import tensor_dicts
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.mesh import Mesh
from flex_model.hooks.hook_executor import HookExecutor
from flex_model.hooks.layout_finder import LayoutFinder
from flex_model.hooks.registration import Registration
from flex_model.hooks.table import ActiveHooks
from flex_model.hooks.tracking import Follow, Tracking
from flex_model.layouts.sources import BatchDim
from flex_model.records.records import Records
from flex_model.runs.run import Run

_WHERE = "the records of hooks with dp_batch='local'"


@dataclass(frozen=True)
class Engine:
    """What runs hooks over the ranks of one communicator."""

    communicator: Communicator
    tracking: Tracking
    records: Records
    executor: HookExecutor


class TrainableModules(Mapping[str, nn.Module]):
    """The trainable modules, as editing functions see them that run on one rank's rows.

    Their gradients would be of these rows alone, so a module that may get one is refused.
    """

    def __init__(self, modules: nn.ModuleDict) -> None:
        self._modules = modules

    def __getitem__(self, name: str) -> nn.Module:
        module = self._modules[name]
        if torch.is_grad_enabled() and any(one.requires_grad for one in module.parameters()):
            raise ValueError(
                f"the trainable module {name!r} is used in a hook with dp_batch='local', where its "
                "gradient would be that of one data-parallel rank's rows; train it in a hook with "
                "dp_batch='global', or use it here with requires_grad_(False)"
            )
        return module

    def __getattr__(self, name: str) -> Any:
        if name in vars(self).get("_modules", ()):
            return self[name]
        raise AttributeError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


class OwnBatch:
    """The engine of the hooks on a rank's own batch, made when a run first has one.

    Args:
        stage: The engine of all other hooks.
        make: Makes the engine over the ranks of a mesh.
        on_all_ranks: Whether every rank keeps records.
    """

    def __init__(self, stage: Engine, make: Callable[[Mesh], Engine], on_all_ranks: bool) -> None:
        self._stage, self._make, self._on_all_ranks = stage, make, on_all_ranks
        self._engine: Engine | None = None

    def of(self, registration: Registration) -> Engine:
        """Return the engine that runs a hook."""
        return self.engine if registration.is_local_batch else self._stage

    @property
    def engine(self) -> Engine:
        """The engine. Collective over the tensor-parallel group where it is made."""
        if self._engine is None:
            self._engine = self._make(self._stage.communicator.mesh.of_own_batch())
        return self._engine

    def include(self, run: Run, hooks: ActiveHooks) -> None:
        """Note which of these hooks a run has. Collective over the tensor-parallel group, the first
        time that there are some.
        """
        local = () if hooks.local is None else hooks.local.registrations
        records = any(r.hook_function.record for r in local)
        run.note_batches(len(local) == len(hooks.registrations) and not records, records)
        if local:
            self.engine.communicator.begin_run()

    def begin_forward(self, args: Any, kwargs: Any, hooks: ActiveHooks) -> None:
        """Begin a forward of the wrapped module."""
        if hooks.local is not None:
            self.engine.tracking.begin(args, kwargs, hooks.local)

    def end_forward(self, output: Any, failed: bool) -> None:
        """End the forward that began last."""
        if self._engine is not None:
            self._engine.tracking.end(output, failed)

    def reset(self) -> None:
        """Drop the running forward."""
        if self._engine is not None:
            self._engine.tracking.reset()

    def forget(self) -> None:
        """Follow forwards anew, after a failed run. Local."""
        if self._engine is not None:
            self._engine.tracking.forget()

    def drop(self, run: Run) -> None:
        """Drop the records that were not delivered. Local."""
        if self._engine is not None and run.own_batch is not None:
            self._engine.records.forget(run.own_batch)
            self._engine.records.take()

    def finish(self, run: Run, kind: str) -> None:
        """Gather the records of the tensor-parallel group. Collective over it. An error is held, to
        be raised on all ranks.
        """
        engine, own = self._engine, run.own_batch
        if engine is None or own is None:
            return
        if own.take_draws():
            run.note_draws()
        try:
            if engine.communicator.is_local:
                engine.records.finish(own)
                return
            engine.communicator.finish_transfers()
            engine.tracking.finish()
            engine.records.join(own, kind, engine.executor.layouts.lookup)
        except Exception as error:
            self._stage.communicator.fail(str(error), error)

    def deliver(self, run: Run) -> None:
        """Deliver the records of all data-parallel ranks, as lists by rank. Collective over the
        stage where hooks record their own batch.
        """
        if not run.records_own_batch:
            return
        own = {} if self._engine is None else self._engine.records.take()
        communicator = self._stage.communicator
        names = sorted(own)
        tensors = [tensor for name in names for tensor in own[name]]
        described = [(name, len(own[name])) for name in names], tensor_dicts.describe(tensors)
        per_rank = tensor_dicts.exchange_json(communicator, described, _WHERE)
        descriptions = [tensors for _, tensors in per_rank]
        if self._on_all_ranks and not communicator.is_local:
            received: Any = [
                tensor_dicts.from_rank(communicator, rank, tensors, of_rank)
                for rank, of_rank in enumerate(descriptions)
            ]
        else:
            received = tensor_dicts.gather_to_first(communicator, tensors, descriptions)
        if received is not None:
            firsts = slice(None, None, communicator.mesh.tp_size)
            counts = [dict(counts) for counts, _ in per_rank]
            self._stage.records.extend(_by_rank(counts[firsts], received[firsts]))

    def close(self) -> None:
        """Free its groups. Local."""
        if self._engine is not None:
            self._engine.communicator.close()


def refuse_local(registrations: Iterable[Registration], what: str) -> None:
    """ValueError where one of the hooks is on a rank's own batch."""
    local = next((r for r in registrations if r.is_local_batch), None)
    if local is not None:
        raise ValueError(
            f"{what}: the {local.describe()} has dp_batch='local', which this "
            "does not know; leave such hooks out, or use dp_batch='global'"
        )


def make_engine(
    mesh: Mesh,
    stage: Engine,
    module: nn.Module,
    save_ctx: Namespace,
    modules: nn.ModuleDict,
    edit_on: str,
    batch_dim: BatchDim,
    follow: Follow,
    device: torch.device,
) -> Engine:
    """Make the engine over the ranks that share this rank's batch. Collective over them."""
    shared = stage.communicator
    communicator = Communicator(mesh, shared.timeout_s, device, shared.meter)
    tracking = Tracking(module, communicator, batch_dim, follow, stage.tracking.statements)
    records = Records({}, communicator, "rank0")
    executor = HookExecutor(
        communicator,
        records,
        save_ctx,
        TrainableModules(modules),
        edit_on,
        stage.executor.full_parameter,
        tracking,
        checks_edits=False,
        sent_to_all=None,
        layouts=LayoutFinder(communicator, tracking),
        stage=stage.executor,
    )
    return Engine(communicator, tracking, records, executor)


def _by_rank(
    counts: list[dict[str, int]], tensors: list[list[Tensor]]
) -> dict[str, list[list[Tensor | None]]]:
    """Return, by name, a list by data-parallel rank for each call; None where a rank had fewer."""
    rest = [iter(of_rank) for of_rank in tensors]
    by_name: dict[str, list[list[Tensor | None]]] = {}
    for name in sorted({name for of_rank in counts for name in of_rank}):
        of_ranks = [
            [next(it) for _ in range(count.get(name, 0))] for it, count in zip(rest, counts)
        ]
        calls = max(map(len, of_ranks))
        by_name[name] = [
            [of_rank[i] if i < len(of_rank) else None for of_rank in of_ranks] for i in range(calls)
        ]
    return by_name


def check_local(registration: Registration, has_store: bool, keeps_save_ctx: bool) -> None:
    """ValueError for a hook that can't run on a rank's own batch."""
    if has_store and registration.hook_function.record:
        raise ValueError(
            f"{registration.describe()}: an ActivationStore keeps records of the whole batch, and "
            "dp_batch='local' makes one for each data-parallel rank; use dp_batch='global', or "
            "record=False"
        )
    if not keeps_save_ctx:
        raise ValueError(
            f"{registration.describe()}: save_ctx_on='all' sends rank 0's save_ctx to all ranks, "
            "and with dp_batch='local' each data-parallel rank has its own; use "
            "save_ctx_on='rank0'"
        )
    if registration.hook_function.parameter_names:
        raise ValueError(
            f"{registration.describe()}: parameters= are gathered from all ranks at each call, and "
            "with dp_batch='local' data-parallel ranks may call it at different times; read them "
            "before the run with flex.get_module_parameter"
        )

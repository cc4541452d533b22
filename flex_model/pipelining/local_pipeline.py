"""This rank's part of a pipeline with hooks: how it reaches the other ranks, and what the path of
its micro-batches depends on.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch.distributed as dist
from torch import nn

from flex_model.distributed.agreement import gather_checked
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.header import site_hash
from flex_model.distributed.mesh import Mesh, group_ranks
from flex_model.errors import agreed
from flex_model.hooks.save_ctx import StageContext
from flex_model.integrations.mesh_sources import Source
from flex_model.layouts.arguments import describe
from flex_model.layouts.cache import Conditions
from flex_model.layouts.kept import Attributes, KeptTensors
from flex_model.layouts.sources import Constants
from flex_model.pipelining.instrumented_stage import LocalSchedule, stages_of
from flex_model.pipelining.stage_parameters import PipelineParameters, StageParameters
from flex_model.pipelining.stages import LocalStages, StageIndex, describe_stage
from flex_model.runs.settings import Settings
from flex_model.runs.step import MicrobatchState


class LocalPipeline:
    """This rank's part of a pipeline. The constructor is collective over all ranks.

    Attributes:
        core: The engine of the hooks on this rank's stages.
        root: This rank's stages as one module.
        state: The state of the step that runs.
        conditions: Describes what the path of a step depends on.
        mesh: The ranks of a step.
        world, line: Communicators to all ranks of a step, and to those of this rank's pipeline.
        everyone: The communicator to all ranks of the model.
        local: This rank's part of the schedule.
        index: The modules and parameters of all stages, by name.
        parameters: Reads and writes the parameters of all stages in full.
    """

    def __init__(self, schedule: Any, settings: Settings, local_class: Any = LocalSchedule) -> None:
        stages = stages_of(schedule)
        if settings.dp_batch == "global":
            raise ValueError(
                'FlexModel: dp_batch="global" is not for a pipeline, whose micro-batches are '
                'joined to one batch; leave it out and pad the inputs, or use dp_batch="local"'
            )
        if "step" in vars(schedule):
            raise TypeError("the schedule is that of a FlexModel already; restore() it first")
        self.schedule, self.settings, self.state = schedule, settings, MicrobatchState()
        self.root, ranks = LocalStages(stages), group_ranks(stages[0].group)
        stages_mesh = Mesh(ranks, ranks.index(dist.get_rank()), pp_size=len(ranks))
        source = Source("the stages' process group", stages_mesh, is_exact=False)
        whole = settings.find_mesh(self.root, [source])
        core = settings.make_core(
            self.root, whole, {}, StageContext(), "rank0", self.state, StageParameters
        )
        self.core, self.mesh = core, core.mesh
        mesh = core.mesh
        self.conditions = StepConditions(self.root)
        with contextlib.ExitStack() as stack:
            stack.callback(core.close)
            timeout_s, along = core.communicator.timeout_s, mesh.axis_ranks("pp")
            self.world = self.line = self.everyone = Communicator(_flat(mesh), timeout_s)
            stack.callback(self.world.close)
            if whole is not mesh:
                self.everyone = Communicator(_flat(whole), timeout_s)
                stack.callback(self.everyone.close)
            if len(along) < mesh.num_ranks:
                line = Mesh(along, mesh.coordinates["pp"], tp_size=len(along))
                self.line = Communicator(line, timeout_s)
                stack.callback(self.line.close)
            self.local = local_class(schedule, self.state, core)
            stack.callback(self.local.close)
            self.index = self._index_stages()
            self.parameters = PipelineParameters(core.parameters, self.index, self.world, self.line)
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Leave the stages as they were, and free groups. Local."""
        self._stack.close()

    def pp_rank_of(self, rank: int) -> int:
        """Return the place of a rank's stages along the pipeline."""
        return rank // len(self.mesh.stage_ranks)

    def _index_stages(self) -> StageIndex:
        schedule, settings = self.schedule, self.settings
        equal = {
            "the schedule of a pipeline": [
                type(schedule).__name__,
                schedule._n_microbatches,
                schedule._loss_fn is not None,
                schedule.scale_grads,
                schedule._num_stages,
            ],
            "the settings of a pipeline": [
                settings.edit_on,
                settings.output_ranks,
                self.mesh.describe(),
                settings.save_ctx_on,
            ],
        }
        gathered = gather_checked(
            self.world,
            "FlexModel over a schedule: its stages",
            lambda: [describe_stage(stage) for stage in self.local.stages],
            equal,
        )
        described: dict[int, Any] = {}
        pp_ranks: dict[int, int] = {}
        for rank, stages in enumerate(gathered):
            for stage in stages:
                index, pp_rank = stage["index"], self.pp_rank_of(rank)
                if pp_ranks.setdefault(index, pp_rank) != pp_rank:
                    raise agreed(
                        ValueError(
                            f"FlexModel: stage {index} is at the places {pp_ranks[index]} and "
                            f"{pp_rank} of the pipeline; give each stage to one rank of a "
                            "pipeline, and data_parallel_size or tensor_parallel_size where "
                            "several ranks hold it"
                        )
                    )
                described[index] = stage
        order = range(schedule._num_stages)
        missing = [index for index in order if index not in described]
        if missing:
            raise agreed(ValueError(f"FlexModel: no rank of the pipeline has the stages {missing}"))
        return StageIndex(
            [described[i] for i in order], [pp_ranks[i] for i in order], self.local.calls_roots
        )


def _flat(mesh: Mesh) -> Mesh:
    """Return the mesh of the same ranks as one stage."""
    return Mesh(mesh.ranks, mesh.rank, tp_size=mesh.num_ranks, left_out=mesh.left_out)


class StepConditions:
    """Describes it for one rank's stages. Local: ranks describe it differently."""

    def __init__(self, root: nn.Module) -> None:
        self._conditions = Conditions(root)
        self._attributes = Attributes(root, Constants(root), KeptTensors())

    def digest(self) -> int:
        """Return a hash of the modules, their hooks and attributes, and of torch's modes."""
        form, sizes = self._conditions.form((), {}, 0, self._attributes)
        return site_hash(form, *sizes)

    def note_attributes(self) -> None:
        """Find the attributes in which the modules have kept tensors, after a step."""
        self._attributes.scan()


def digest_of_inputs(args: Any, kwargs: dict[str, Any]) -> int:
    """Return a hash of the inputs, except for the values of tensors."""
    parts: list[Any] = []
    sizes: list[int] = []
    describe((args, kwargs), parts, sizes)
    return site_hash(*parts, *sizes)

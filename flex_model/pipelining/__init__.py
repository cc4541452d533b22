"""Pipelines: models split into stages, with the names of ``torch.distributed.pipelining``.

Hooks over a schedule: ``schedule_runner`` (the calls of a FlexModel), ``step_runner`` (one step:
``local_pipeline`` before it, ``instrumented_stage`` during it), ``stages`` (names). ``splitting``
makes stages of a model. A model that transformers has split has the same calls: its ``forward`` is
a step.
"""

from torch.distributed.pipelining import (
    Pipe,
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    SplitPoint,
    build_stage,
    pipe_split,
)
from torch.distributed.pipelining._IR import (
    LossWrapper,
    MultiUseParameterConfig,
    PipeSequential,
    TrivialLossWrapper,
    annotate_split_points,
)
from torch.distributed.pipelining._utils import PipeInfo

from flex_model.pipelining.splitting.pipeline import ModulePipe, pipeline
from flex_model.pipelining.stand_ins import PassThrough
from flex_model.runs.step import current_microbatch, current_rows

__all__ = [
    "LossWrapper",
    "ModulePipe",
    "MultiUseParameterConfig",
    "PassThrough",
    "Pipe",
    "PipeInfo",
    "PipeSequential",
    "PipelineStage",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "SplitPoint",
    "TrivialLossWrapper",
    "annotate_split_points",
    "build_stage",
    "current_microbatch",
    "current_rows",
    "pipe_split",
    "pipeline",
]

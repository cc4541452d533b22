"""Models, stages and schedules that tests of pipelines share."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from flex_model import FlexModel
from flex_model.pipelining.stand_ins import PassThrough

SINGLE = (ScheduleGPipe, Schedule1F1B)
LOOPED = (ScheduleInterleaved1F1B, ScheduleLoopedBFS, ScheduleInterleavedZeroBubble)
V_SHAPED = (ScheduleZBVZeroBubble, ScheduleDualPipeV)
ALL = (*SINGLE, *LOOPED, *V_SHAPED)
WIDTH, LAYERS = 8, 8


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1, self.act = nn.Linear(width, 2 * width), nn.ReLU()
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.fc2(self.act(self.fc1(x)))


class Twice(nn.Module):
    """Calls a block twice."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return self.block(self.block(x))


class MLP(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, width=WIDTH, layers=LAYERS):
        super().__init__()
        self.emb = nn.Linear(width, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = self.emb(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_mlp(**kwargs):
    torch.manual_seed(0)
    return MLP(**kwargs).eval()


def part(model, index, num_stages):
    """A stage made by hand: what other stages have passes through."""
    model = copy.deepcopy(model)
    per_stage = len(model.layers) // num_stages
    for i in range(len(model.layers)):
        if i // per_stage != index:
            model.layers[i] = PassThrough()
    if index > 0:
        model.emb = PassThrough()
    if index < num_stages - 1:
        model.head = PassThrough()
    return model


class Scaled(nn.Module):
    """A stage that scales what it gives, by a keyword argument."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, scale=None):
        return self.model(x) * (1 if scale is None else scale)


class Transposed(nn.Module):
    """The rows are along dim 1 inside."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x):
        return self.inner(x.t()).t()


def my_indices(kind, place, size):
    """The stages of one rank."""
    if kind in SINGLE:
        return [place]
    last = 2 * size - 1
    return [place, last - place] if kind in V_SHAPED else [place, place + size]


def stages_in_all(kind, size):
    return size if kind in SINGLE else 2 * size


def schedule_of(kind, make_stage, num_microbatches, group=None, **kwargs):
    """A schedule over the ranks of a group, with one or two stages a rank."""
    indices = my_indices(kind, dist.get_rank(group), dist.get_world_size(group))
    stages = [make_stage(index) for index in indices]
    return kind(stages[0] if kind in SINGLE else stages, num_microbatches, **kwargs)


def make_schedule(kind, model, num_microbatches=4, group=None, cut=part, **kwargs):
    """The same of stages that are made by hand."""
    number, device = stages_in_all(kind, dist.get_world_size(group)), torch.device("cpu")

    def make_stage(index):
        return PipelineStage(cut(model, index, number), index, number, device, group=group)

    return schedule_of(kind, make_stage, num_microbatches, group, **kwargs)


def unsplit(model, script, x, y, loss_fn):
    """What the script's hooks on the whole model give, in one backward."""
    model = copy.deepcopy(model)
    records = {}
    with FlexModel(model, records, process_group=alone_group()) as flex:
        script(flex)
        output = flex(x)
        loss = loss_fn(output, y)
        loss.backward()
        trainable = {
            name: parameter.grad for name, parameter in flex.trainable_modules.named_parameters()
        }
        context = dict(vars(flex.save_ctx))
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = {"records": records, "output": output, "loss": loss, "grads": grads}
    return found | {"trainable": trainable, "ctx": context}


_groups = {}


def alone_group():
    """A group of this rank only, made once: each has threads that poll until its end. Collective
    the first time.
    """
    world = dist.group.WORLD
    if world not in _groups:
        _groups.clear()
        _groups[world] = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return _groups[world][dist.get_rank()]


SHARED_ROWS = {"one shared row": 1, "two shared rows": 2}


class Summary(nn.Module):
    """Computes tensors whose rows can't be told by their sizes or values."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.inner = kind, nn.Linear(8, 8)

    def forward(self, x):
        if self.kind in SHARED_ROWS:
            return x + self.inner(torch.ones(SHARED_ROWS[self.kind], 8)).mean(0)
        if self.kind == "two rows for each of the batch":
            return self.inner(x.repeat_interleave(2, 0))[::2]
        if self.kind == "rows along another dim":
            return self.inner(x.T.reshape(8, -1, 1).expand(-1, -1, 8))[:, :, 0].T
        if self.kind == "all rows twice":
            return self.inner(torch.cat([x, 2 * x]))[: len(x)]
        if self.kind == "rows in reverse order":
            return self.inner(x.flip(0)).flip(0)
        if self.kind == "sums of the rows so far":
            return self.inner(x.cumsum(0))
        return x + self.inner(x.sum(0))  # a sum over rows

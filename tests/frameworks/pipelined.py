"""Models split into the stages of ``torch.distributed.pipelining``."""

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import pipelines
from frameworks.decoder_model import (
    DECODER_INPUTS,
    DECODER_PARAMETERS,
    DECODER_SITES,
    Decoder,
    decoder_plan,
)
from frameworks.hugging_face import HF_PARAMETERS, HF_SITES, huggingface_model
from frameworks.pair import Pair, gradients, randomise, tokens


@contextlib.contextmanager
def pipelined(
    tmp_path: Path,
    schedule: str,
    family: str = "decoder",
    mode: str = "full",
    tp: int = 1,
    dtype: torch.dtype = torch.float64,
) -> Iterator[Pair]:
    """A model in stages, one or two a rank. In "micro" mode edits see micro-batches."""
    from torch.distributed import pipelining

    from flex_model.pipelining import PassThrough, SplitPoint, pipeline

    kind = getattr(pipelining, schedule)
    ranks = dist.get_world_size() // tp
    num_stages = pipelines.stages_in_all(kind, ranks)
    mesh = init_device_mesh("cpu", (ranks, tp), mesh_dim_names=("pp", "tp"))
    group, number = mesh["pp"].get_group(), 2 * num_stages
    ids = tokens(number, length=8)
    if family == "llama":
        model, sites, parameters = huggingface_model("llama").to(dtype), HF_SITES, HF_PARAMETERS
        model.config.use_cache = False
        blocks, block_of = "model.layers", num_stages // 2
    else:
        model = randomise(Decoder(num_layers=max(2, num_stages)).double()).to(dtype)
        sites, parameters = DECODER_SITES, DECODER_PARAMETERS

    def stage_of(index):
        if family == "llama":
            splits = {
                f"{blocks}.{i * block_of}": SplitPoint.BEGINNING for i in range(1, num_stages)
            }
            pipe = pipeline(copy.deepcopy(model), (ids[:2],), split_spec=splits)
            return pipe.build_stage(index, torch.device("cpu"), group)
        part = copy.deepcopy(model)
        for i in range(len(part.layers)):
            if i * num_stages // len(part.layers) != index:
                part.layers[i] = PassThrough()
        if index > 0:
            part.tok = PassThrough()
        if index < num_stages - 1:
            part.norm, part.output = PassThrough(), PassThrough()
        if tp > 1:
            of_model, of_layer = decoder_plan("tp")
            present = {
                n: plan for n, plan in of_model.items() if list(part.get_submodule(n).parameters())
            }
            parallelize_module(part, mesh["tp"], present)
            for layer in part.layers:
                if not isinstance(layer, PassThrough):
                    parallelize_module(layer, mesh["tp"], of_layer)
        return pipelining.PipelineStage(part, index, num_stages, torch.device("cpu"), group=group)

    def shard():
        return pipelines.schedule_of(
            kind,
            stage_of,
            number,
            group,
            loss_fn=lambda output, target: (output * target).sum(),
            scale_grads=False,
        )

    def of_all_ranks(module):
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, gradients(module))
        return {name: grad for of_rank in found for name, grad in of_rank.items()}

    yield Pair(
        model,
        shard,
        (ids,),
        sites,
        parameters,
        of_all_ranks,
        inputs_of=DECODER_INPUTS if family == "decoder" else {},
        sizes={"batch_mode": mode, "return_on": "all"},
        mixes_rows=mode == "full",
        run=lambda flex, inputs, keywords, targets: flex(*inputs, target=targets, **keywords),
    )

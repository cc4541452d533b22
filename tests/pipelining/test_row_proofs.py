"""Random programs, whole and in micro-batches: a record is right, or an error."""

import random as python_random
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

from flex_model import FlexModel, HookError, HookFunction
from pipelines import alone_group

sys.path.append(str(Path(__file__).parents[1] / "fuzz"))


def programs(seeds):
    """Programs that are right on parts of the rows, unsharded, with their inputs of two rows or
    more; and by input the dim of the rows, None for none.
    """
    from execution import Maker, data_of
    from generate import generate
    from program import Place, write

    for seed in seeds:
        program = generate(seed, "dp", 2)
        written = write(program)
        of_inputs = [[of_dim[0].size for of_dim in one.dims] for one in written.code.arguments]
        dims = [sizes.index("B") if "B" in sizes else None for sizes in of_inputs]
        data = data_of(program, written, Place(1, 0, 1, 0))[0]
        rows = {one.shape[dim] for one, dim in zip(data.full, dims) if dim is not None}
        if rows and not any(size % 2 for size in rows):
            yield seed, Maker(program, written), data, dims


def seen_by_torch(model, name, inputs):
    seen = []

    def note(module, args, output):
        leaf = next(one for one in torch.utils._pytree.tree_leaves(output))
        seen.append(leaf.clone())

    handle = model.get_submodule(name).register_forward_hook(note)
    model(*inputs)
    handle.remove()
    return seen


@pytest.mark.slow
@pytest.mark.ranks(2)
@torch.no_grad()
def test_random_programs_in_micro_batches():
    group, verdicts = alone_group(), Counter()  # each rank runs programs of its own
    first = 1000 * torch.distributed.get_rank()
    for seed, maker, data, dims in programs(range(first, first + 60)):
        names = [name for name, _ in maker.make(False).named_modules()]
        specs = tuple(_Replicate() if dim is None else TensorChunkSpec(dim) for dim in dims)
        for name in python_random.Random(seed).sample(names, min(len(names), 4)):
            expected = seen_by_torch(maker.make(False).eval(), name, data.full)
            stage = PipelineStage(maker.make(False).eval(), 0, 1, torch.device("cpu"), group=group)
            schedule = ScheduleGPipe(stage, 2, args_chunk_spec=specs)
            with FlexModel(schedule, records := {}, process_group=group) as flex:
                flex.register_forward_hook(HookFunction(name, output_name="record"))
                try:
                    flex(*data.full)
                except HookError as error:
                    if "rows of the batch" not in str(error):
                        raise
                    verdicts["refused"] += 1
                    continue
            torch.testing.assert_close(
                records.get("record", []), expected, rtol=1e-9, atol=1e-9, msg=f"{seed} {name}"
            )
            verdicts["right"] += 1
    assert verdicts["right"] > 4 * verdicts["refused"], verdicts

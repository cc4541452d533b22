"""A pipeline's step on a GPU: the records and gradients of the model that is not split."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import mse_loss
from torch.testing import assert_close

from flex_model import FlexModel, HookFunction
from tests import models

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


class Scaled(nn.Module):
    """Its table has no rows of the batch: each micro-batch makes the same one."""

    def __init__(self):
        super().__init__()
        self.table, self.inner = nn.Identity(), models.seeded(nn.Linear, 6, 6)

    def forward(self, x):
        table = self.table(torch.arange(6, device=x.device, dtype=x.dtype).cos())
        return self.inner(x * table)


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def flipped(module, full, save_ctx, modules):
    return full.flip(-1)


def test_micro_batches_on_a_gpu(one_rank):
    x, y = models.random(4, 6).cuda(), models.random(4, 6, seed=1).cuda()
    whole = Scaled().double().cuda()
    stage = PipelineStage(copy.deepcopy(whole), 0, 1, torch.device("cuda", 0))
    wrapped = whole, ScheduleGPipe(stage, 2, loss_fn=mse_loss)
    records = {}, {}
    one, split = (FlexModel(model, found) for model, found in zip(wrapped, records))
    for flex in (one, split):
        for name in ("table", "inner"):
            flex.register_forward_hook(HookFunction(name, editing_function=flipped))
        flex.register_full_backward_hook(HookFunction("inner", output_name="gradient"))
    mse_loss(one(x), y).backward()
    split(x, target=y, losses=[])
    assert_close(*records)
    assert_close(split.get_module_gradient("inner.weight").cuda(), whole.inner.weight.grad)

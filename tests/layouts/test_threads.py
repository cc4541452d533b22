"""While a forward is followed, calls that other threads make are not: they load weights."""

import copy
import threading

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing import assert_close

import models
from flex_model import FlexModel, HookFunction


def flip(module, full, save_ctx, modules):
    return full.flip(-1)


class LoadedBeside(nn.Module):
    """On rank 0 a thread reads shards while the model runs, as one that loads weights does."""

    def __init__(self):
        super().__init__()
        self.fc, self.ended = nn.Linear(8, 8), threading.Event()

    def forward(self, x):
        thread = threading.Thread(target=self.load)
        if dist.get_rank() == 0:
            thread.start()
        for _ in range(300):
            x = x + 1.0
        x = self.fc(x)
        self.ended.set()
        return x

    def load(self):
        while not self.ended.is_set():
            self.fc.weight.to_local()


@pytest.mark.ranks(2)
def test_calls_of_other_threads_are_not_followed():
    whole = models.seeded(nn.Linear, 8, 8).double()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = LoadedBeside()
    model.fc = parallelize_module(copy.deepcopy(whole), mesh, ColwiseParallel())
    x = models.random(3, 8)
    with FlexModel(model, records := {}) as flex:
        flex.register_forward_hook(HookFunction("fc", editing_function=flip))
        assert_close(flex(x), whole(x + 300).flip(-1).chunk(2, -1)[dist.get_rank()])
    if dist.get_rank() == 0:
        assert_close(records["fc"][0], whole(x + 300))

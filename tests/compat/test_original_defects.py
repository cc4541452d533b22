"""The 32 defects of release 0.1.0, by their number: those that no other test shows to be gone.

Shown elsewhere:
1, 2    parity/test_table.py: upstream gradients, edits that mix shards
4       parity/test_meshes.py: groups whose ranks are not the world's
5, 7, 17 hooks/test_hooks.py, test_errors.py: groups
6, 27   test_model.py, faults/test_long_run.py: restore, process groups
8       parameters/test_parameters.py
9, 10   hooks/test_hooks.py: records on rank 0 or on all, and of before an edit
12      parity/test_table.py, parity/test_batches.py: uneven shards
14      test_model.py: one process needs no process group (13: all runs here are on gloo)
15, 16  parity/test_values.py, parity/test_attention.py: containers, keyword arguments
18, 19  test_errors.py: expected_shape, two kinds on one name
20, 21  hooks/test_hooks.py: lists begin afresh
22, 24  test_model.py: names; hooks/test_hooks.py: a hook function can be used again
23      test_original_api.py: an offloaded tensor is a copy
25, 26  hooks/test_hooks.py, test_errors.py: None, unpack_idx, names, attributes
30, 32  test_model.py: requires_grad, trainable modules; hooks/test_random.py
3       pipelines: not part of these tests
"""

import logging

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard
from torch.testing import assert_close

import models
import scripts
from flex_model import FlexModel, HookFunction


@pytest.mark.ranks(2)
def test_11_a_first_call_without_a_gradient_decides_nothing_for_the_later_ones():
    records = {}
    flex = FlexModel(nn.Sequential(nn.Identity()), records, tensor_parallel_size=2)
    full = models.random(2, 8)
    shard = full.chunk(2, 1)[dist.get_rank()].clone()
    flex.annotate_layout(models.INPUT, kind="forward_pre", tp=Shard(1))
    flex.register_full_backward_hook(HookFunction("0", (None, 8)))
    flex(shard)
    flex(shard.requires_grad_()).backward(shard)
    if dist.get_rank() == 0:
        assert_close(records["0"], [full])


class WholeOrParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.site = nn.Identity()

    def forward(self, value, is_whole):
        return self.site(value if is_whole else value.chunk(2, 1)[dist.get_rank()])


@pytest.mark.ranks(2)
def test_11_a_first_call_with_a_whole_tensor_decides_nothing_for_the_later_ones():
    records, full = {}, models.random(2, 8)
    flex = FlexModel(WholeOrParts(), records, tensor_parallel_size=2)
    flex.register_forward_hook(HookFunction("site", (None, 8)))
    for is_whole in (True, False):
        flex(full, is_whole)
        if dist.get_rank() == 0:
            assert_close(records["site"], [full])


@pytest.mark.slow
def test_28_and_31_import_needs_torch_only_and_arguments_are_checked_when_optimized():
    code = """
        import sys
        sys.modules.update(dict.fromkeys(  # None is an ImportError
            ["transformers", "fairscale", "megatron", "deepspeed", "accelerate", "safetensors",
             "matplotlib"]
        ))
        import torch
        from flex_model import DummyModule, FlexModel, HookFunction
        flex = FlexModel(torch.nn.Sequential(DummyModule()), {})
        flex.register_forward_hook(HookFunction("0"))
        flex(torch.ones(2))
        print(flex.output_ptr["0"][0].tolist())
        try:
            FlexModel(torch.nn.Linear(2, 2), {}, tensor_parallel_size=2)
        except ValueError:
            print("refused")
    """
    assert scripts.run_code(code, options=["-O"]).stdout == "[1.0, 1.0]\nrefused\n"


def test_29_wrapping_leaves_the_root_logger_alone():
    root = logging.getLogger()
    before = (list(root.handlers), root.level)
    FlexModel(models.mlp(), {})
    assert (list(root.handlers), root.level) == before

"""Mixtures of experts under data parallelism: rows inside of the experts are sorted by expert, so
each rank's are no rows of the batch. They were joined as such, without a word.
"""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import frameworks
from flex_model import FlexModel, HookFunction


def mixed_rows(module, full, save_ctx, modules):
    return full + 0.5 * full.flip(0)


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_layers_of_experts_on_halves_of_a_batch(name):
    model, tokens = frameworks.huggingface_model(name).float(), frameworks.tokens(4, length=6)
    half = tokens.chunk(2)[dist.get_rank()]
    layer, settings = "model.layers.0.mlp", {"data_parallel_size": 2, "timeout": 30}
    whole = copy.deepcopy(model)
    hook = whole.get_submodule(layer).register_forward_hook(
        lambda module, args, output: mixed_rows(module, output, None, None)
    )
    with torch.no_grad():
        expected = whole(tokens, use_cache=False).logits
    hook.remove()

    wrapped = DistributedDataParallel(copy.deepcopy(model))
    with FlexModel(wrapped, {}, **settings) as flex, torch.no_grad():
        flex.register_forward_hook(HookFunction(f"{layer}.experts"))
        with pytest.raises(ValueError, match=r"experts'.*data-parallel ranks is not known"):
            flex(half, use_cache=False)
    with FlexModel(wrapped, {}, **settings) as flex, torch.no_grad():
        flex.annotate_layout(re.compile(rf"{layer}$"), kind="forward", dp=Shard(0))
        flex.register_forward_hook(HookFunction(layer, None, mixed_rows))
        logits = flex(half, use_cache=False).logits
    assert_close(logits, expected.chunk(2)[dist.get_rank()])

"""One row of the batch a rank, in models of Hugging Face's: where their code asks whether two sizes
are the same, a rank's answer is another one than that of the whole batch.
"""

import copy

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import frameworks
from flex_model import FlexModel, HookFunction


def mixed_rows(module, full, save_ctx, modules):
    return full + 0.5 * full.flip(0)


@pytest.mark.ranks(2, timeout=120)
def test_one_row_a_rank():
    """Was refused: ``masking_utils`` expands the positions to the rows, if there are several."""
    model, tokens = frameworks.huggingface_model("llama").double(), frameworks.tokens(2, length=6)
    layer, row = "model.layers.0", tokens.chunk(2)[dist.get_rank()]
    whole = copy.deepcopy(model)
    whole.get_submodule(layer).register_forward_hook(
        lambda module, args, output: mixed_rows(module, output, None, None)
    )
    expected = whole(tokens, use_cache=False).logits
    expected.square().mean().backward()
    wrapped = DistributedDataParallel(copy.deepcopy(model))
    with FlexModel(wrapped, {}, data_parallel_size=2, timeout=30) as flex:
        flex.register_forward_hook(HookFunction(layer, None, mixed_rows))
        logits = flex(row, use_cache=False).logits
        logits.square().mean().backward()
    assert_close(logits, expected.chunk(2)[dist.get_rank()])
    for ours, theirs in zip(wrapped.module.parameters(), whole.parameters()):
        assert_close(ours.grad, theirs.grad)

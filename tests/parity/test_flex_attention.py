"""torch's ``flex_attention``, a higher-order operator, under hooks on several ranks. On the CPU it
has no backward.
"""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.testing import assert_close

import models
import pipelines
from flex_model import FlexModel, HookFunction
from tiers import grid_but

HEADS, WIDTH, LENGTH = 4, 16, 6


class Scores(nn.Module):
    """Causal attention of some heads with a bias by distance, as torchtitan's inner attention."""

    def forward(self, q, k, v):
        mask = create_block_mask(
            lambda batch, head, query, key: query >= key, None, None, LENGTH, LENGTH, device="cpu"
        )

        def nearer(score, batch, head, query, key):
            return score + 0.5 * (key - query)

        with warnings.catch_warnings():  # torch's, that it is not compiled
            warnings.simplefilter("ignore")
            return flex_attention(q, k, v, score_mod=nearer, block_mask=mask)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.inner = Scores()

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        return self.o(self.inner(q, k, v).transpose(1, 2).flatten(2))


def mix(module, full, save_ctx, modules):
    """Every head depends on all."""
    return full + full.flip(1)


def run(flex, x, *sites):
    for site in sites:
        flex.register_forward_hook(HookFunction(site, editing_function=mix))
    flex.register_forward_pre_hook(HookFunction("o", output_name="to o"))
    with torch.no_grad():
        return flex(x)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", grid_but(["tp", "dp"], "tp"))
@pytest.mark.parametrize("sites", [("q",), ("inner",), ("inner", "o")])
def test_flex_attention_under_hooks(kind, sites):
    """No rule says that the operator keeps rows and heads apart: refused, but where the layer after
    it states what it is given, and right once stated, in every run.
    """
    model, x = models.seeded(Attention).double(), models.random(2, LENGTH, WIDTH)
    seen, records = {}, {}
    rank = dist.get_rank()
    whole = FlexModel(copy.deepcopy(model), seen, process_group=pipelines.alone_group())
    expected = run(whole, x, *sites)
    if kind == "tp":
        plan = dict.fromkeys("qkv", ColwiseParallel()) | {"o": RowwiseParallel()}
        model = parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
        sizes, statement = {}, {"tp": Shard(1)}
    else:
        sizes, statement = {"data_parallel_size": 2}, {"dp": Shard(0)}
        x, expected = x.chunk(2)[rank], expected.chunk(2)[rank]
    lost = r"(?s)not known \(lost at higher_order::flex_attention in 'inner'\).*annotate_layout"
    if (kind, sites) != ("tp", ("q",)):
        with FlexModel(model, **sizes) as flex, pytest.raises(ValueError, match=lost):
            run(flex, x, *sites)
    flex = FlexModel(model, records, **sizes)
    flex.annotate_layout("inner", **statement)
    for forward in (lambda: run(flex, x, *sites), lambda: flex(x)):  # the second is not followed
        with torch.no_grad():
            assert_close(forward(), expected)
        if rank == 0:
            assert_close(records, seen)


def test_a_dry_run_of_flex_attention():
    flex = FlexModel(models.seeded(Attention).double())
    flex.register_forward_hook(HookFunction("inner"))
    flex.register_forward_hook(HookFunction("o", editing_function=mix))
    with torch.no_grad():
        report = flex.dry_run(models.random(2, LENGTH, WIDTH))
    assert [call.full_shape for call in report] == [
        (2, HEADS, LENGTH, WIDTH // HEADS),
        (2, LENGTH, WIDTH),
    ]

"""What ranks sum up of their own parts is, joined, what one process sums up of the full tensor."""

import pytest
import torch
import torch.distributed as dist

import models
from flex_model import FlexModel
from flex_model.distributed.gather import TensorSpec
from flex_model.distributed.placement import Replicate, Shard, ShardLayout
from flex_model.errors import ReplicasDifferError
from flex_model.fingerprints.summary import Summary, finished, summed
from flex_model.fingerprints.summed_parts import Held, Part, joined
from flex_model.layouts.statements import Site

TP = models.TWO_RANKS["tp"]
LAYOUTS = {
    "replicated": Replicate(),
    "rows": Shard(0),
    "columns": Shard(2),
    "fused": Shard(2, parts=2),
    "unequal parts": Shard(2, part_sizes=(32, 8, 8)),
}


def shards_of(full, placement):
    if isinstance(placement, Replicate):
        return [full, full]
    sizes = placement.part_sizes or [full.shape[placement.dim] // placement.parts] * placement.parts
    parts = [part.chunk(2, placement.dim) for part in full.split(sizes, placement.dim)]
    return [torch.cat([part[rank] for part in parts], placement.dim) for rank in range(2)]


def part_of(flex, shard, shards, placement):
    layout, shapes = ShardLayout(tp=placement), [tuple(one.shape) for one in shards]
    spec = TensorSpec.of(flex._communicator, layout, shapes, shard.dtype)
    held = Held.of(spec, shard)
    summary = Summary("one", "forward", 0, shard.dtype, spec.full_shape, *held.summed(shard))
    return Part(summary, held, Site("hook on one", "one", "forward", 0))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", LAYOUTS)
def test_parts_joined_are_the_full_tensors_summary(name):
    flex, placement = FlexModel(torch.nn.Identity(), **TP.sizes), LAYOUTS[name]
    torch.manual_seed(3)
    fulls = [torch.randn(6, 32, 48, dtype=dtype) for dtype in (torch.float64, torch.bfloat16)]
    fulls += [torch.randn(6, 32, 48, dtype=torch.complex64), torch.randint(9, (6, 8, 48)) * 10**6]
    fulls += [torch.randn(6, 32, 48, dtype=torch.complex64).conj()]
    fulls += [torch.randn(6, 32, 48) > 0, torch.randn(6, 0, 48), fulls[0].half()]
    fulls[0][5, 31, 47], fulls[-1][0, 0, 0] = torch.nan, torch.inf
    parts = []
    for full in fulls:
        shards = shards_of(full, placement)
        parts.append(part_of(flex, shards[dist.get_rank()], shards, placement))
    for full, found in zip(fulls, joined(flex._communicator, parts), strict=True):
        (alone,) = finished([summed(full, "one", "forward", 0)])
        assert found.shape == alone.shape and torch.equal(found.sample, alone.sample)
        exact = {} if full.is_floating_point() or full.is_complex() else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(found.moments, alone.moments, equal_nan=True, **exact)


@pytest.mark.ranks(2)
def test_replicas_that_differ_are_an_error_on_every_rank():
    flex, full = FlexModel(torch.nn.Identity(), **TP.sizes), torch.arange(6000.0)
    own = full + dist.get_rank()
    part = part_of(flex, own, [full, full], Replicate())
    with pytest.raises(ReplicasDifferError, match="hook on one"):
        joined(flex._communicator, [part])

"""Every kind of tensor that a site can give."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard
from torch.testing import assert_close

import models
from flex_model import FlexModel, HookFunction

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.complex64,
    torch.float8_e4m3fn,
]


def clone(module, full, save_ctx, modules):
    return full.clone()


class Site(nn.Module):
    """Gives what it is given, at a module named ``site``."""

    def __init__(self):
        super().__init__()
        self.site = nn.Identity()

    def forward(self, value):
        return self.site(value)


def run(value, expected_shape, edit=None, unpack_idx=0, dims=()):
    """Pass ``value`` through a hooked site; return what comes out, and the record on rank 0.

    ``dims``: by tensor of ``value``, the dim along which it is split over the ranks.
    """
    records = {}
    with FlexModel(Site(), records, tensor_parallel_size=2) as flex:
        for index, dim in enumerate(dims):
            flex.annotate_layout(models.INPUT, kind="forward_pre", index=index, tp=Shard(dim))
        flex.register_forward_hook(HookFunction("site", expected_shape, edit, unpack_idx))
        result = flex(value)
    return result, records.get("site", [None])[0]


def assert_same(got, expected):
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    bits = [t.contiguous().flatten().view(torch.uint8) for t in (got, expected)]
    assert torch.equal(*bits)


def part(full, dim=-1):
    return full.tensor_split(2, dim)[dist.get_rank()]


def of_dtype(dtype):
    bits = torch.arange(4 * 7 * dtype.itemsize).to(torch.uint8)
    return ((bits % 2).bool() if dtype is torch.bool else bits.view(dtype)).view(4, 7)


FULL = models.random(4, 6)
SPLIT = {  # the full tensor, the split dim, and how a rank's part lies in memory
    **{str(dtype): (of_dtype(dtype), 1, lambda t: t) for dtype in DTYPES},
    "dim 0": (models.random(3, 4, 5), 0, lambda t: t),
    "dim 1": (models.random(3, 4, 5), 1, lambda t: t),
    "transposed": (FULL, 1, lambda t: t.T.contiguous().T),
    "strided": (FULL, 1, lambda t: t.repeat_interleave(2, 1)[:, ::2]),
    "offset": (FULL, 1, lambda t: torch.cat([t, t])[4:]),
    "expanded": (FULL[:1].expand(4, -1), 1, lambda t: t[:1].expand(4, -1)),
    "none on one rank": (models.random(4, 1), 1, lambda t: t),
    "no columns": (models.random(4, 0), 1, lambda t: t),
    "no rows": (models.random(1, 2, 0, 3), 1, lambda t: t),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", SPLIT)
def test_shards_are_gathered_and_scattered_bit_for_bit(name):
    full, dim, lie = SPLIT[name]
    shard = lie(part(full, dim))
    for edit in (None, clone):
        result, record = run(shard, tuple(full.shape), edit, dims=[dim])
        assert_same(result, shard)
        if dist.get_rank() == 0:
            assert_same(record, full)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("expected_shape", [None, (4, 6)])
def test_inputs_that_differ_between_tensor_parallel_ranks(expected_shape):
    """By contract they are the same: in every run, before a hook sees them."""
    full, records, seen = models.random(4, 6), {}, []

    def edit(module, full, save_ctx, modules):
        seen.append(full.shape)
        return full.flip(-1)

    with FlexModel(Site(), records, tensor_parallel_size=2) as flex:
        flex.register_forward_hook(HookFunction("site", expected_shape, edit))
        for wrong in (part(full), full, part(full), full + dist.get_rank()):
            if wrong is full:
                assert_same(flex(full), full.flip(-1))
                seen.clear()
                continue
            with pytest.raises(ValueError, match=r"input .value., tensor 0: .* different values"):
                flex(wrong)
            assert records.get("site", []) == seen == []
        flex.annotate_layout(models.INPUT, kind="forward_pre", tp=Shard(1))
        assert_same(flex(part(full)), part(full.flip(-1)))


@pytest.mark.ranks(2)
def test_each_tensor_of_a_container_can_be_seen_and_edited():
    """All kinds of containers: engine/test_pytree."""
    fulls, extra = [models.random(4, 6), models.random(2, 5, 3)], object()
    shards = [part(fulls[0]), part(fulls[1], 1)]
    for index, full in enumerate(fulls):
        value = {"outer": [(extra, shards[0]), ([shards[1]], "text")]}
        negate = lambda module, full, save_ctx, modules: -full  # noqa: E731
        result, record = run(value, tuple(full.shape), negate, index, dims=[1, 1])
        (kept, first), ((second,), text) = result["outer"]
        assert kept is extra and text == "text"
        found = [first, second]
        assert_close(found[index], -shards[index])
        assert found[1 - index] is shards[1 - index]
        if dist.get_rank() == 0:
            assert_same(record, full)
    result, _ = run(value, (4, 6), dims=[1, 1])
    assert result is value  # it was only read

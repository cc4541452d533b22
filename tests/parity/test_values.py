"""Every kind of tensor and container that a site can give."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

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


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_gathered_and_scattered_bit_for_bit(dtype):
    bits = torch.arange(4 * 7 * dtype.itemsize).to(torch.uint8)
    full = (bits % 2).bool() if dtype is torch.bool else bits.view(dtype)
    full = full.view(4, 7)
    for edit in (None, clone):
        result, record = run(part(full), (4, 7), edit, dims=[1])
        assert_same(result, part(full))
        if dist.get_rank() == 0:
            assert_same(record, full)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_any_dim_may_be_the_split_one(dim):
    full = models.random(3, 4, 5)
    for edit in (None, clone):
        result, record = run(part(full, dim), tuple(full.shape), edit, dims=[dim])
        assert_same(result, part(full, dim))
        if dist.get_rank() == 0:
            assert_same(record, full)


LAYOUTS = {
    "transposed": lambda t: t.T.contiguous().T,
    "strided": lambda t: t.repeat_interleave(2, 1)[:, ::2],
    "offset": lambda t: torch.cat([t, t])[4:],
    "expanded": lambda t: t[:1].expand(4, -1),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", LAYOUTS)
def test_non_contiguous_shards(name):
    full = models.random(4, 6)
    shard = LAYOUTS[name](part(full))
    expected = full[:1].expand(4, -1) if name == "expanded" else full
    for edit in (None, clone):
        result, record = run(shard, (4, 6), edit, dims=[1])
        assert_same(result, shard)
        if dist.get_rank() == 0:
            assert_same(record, expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shape", [(4, 1), (0, 6), (4, 0), (0,), (1, 2, 0, 3)])
def test_shards_of_size_zero(shape):
    full = models.random(*shape)
    shard = part(full, 1) if len(shape) > 1 else full
    for edit in (None, clone):
        result, record = run(shard, shape, edit, dims=[1] if len(shape) > 1 else [])
        assert_same(result, shard)
        if dist.get_rank() == 0:
            assert_same(record, full)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("shape", "expected_shape"), [((4, 6), None), ((4, 6), (None, 6)), ((1,), (1,)), ((), ())]
)
def test_a_tensor_that_is_equal_on_all_ranks_is_whole(shape, expected_shape):
    """One number alone shows nothing about its layout, so there the shape is told."""
    full = models.random(*shape)
    for edit in (None, lambda module, full, save_ctx, modules: full + 1):
        result, record = run(full, expected_shape, edit)
        assert_close(result, full + (edit is not None))
        if dist.get_rank() == 0:
            assert_same(record, full)


class Parts(Site):
    """Gives the site a part that each rank makes of plain numbers."""

    def forward(self, value):
        return self.site(torch.tensor(part(value).tolist(), dtype=value.dtype))


@pytest.mark.ranks(2)
def test_a_shard_of_unknown_layout_is_never_silently_wrong():
    """Unless it is stated, a plain tensor that differs between ranks is an error by name."""
    full, records = models.random(4, 6), {}
    hook = HookFunction("site", None, clone)
    with FlexModel(Parts(), records, tensor_parallel_size=2) as flex:
        flex.register_forward_hook(hook)
        with pytest.raises(ValueError, match=r"'site'.*not known \(lost at") as error:
            flex(full)
        assert "flex.annotate_layout('site', kind='forward', tp=Shard(1))" in str(error.value)
        flex.annotate_layout("site", kind="forward", tp=Shard(1))
        assert_same(flex(full), part(full))
    if dist.get_rank() == 0:
        assert_same(records["site"][0], full)
    with FlexModel(Parts(), records, tensor_parallel_size=2) as flex:
        flex.register_forward_hook(HookFunction("site", (4, 6), clone))
        assert_same(flex(full), part(full))
    if dist.get_rank() == 0:
        assert_same(records["site"][0], full)


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


# ---- Containers ----------------------------------------------------------------------------------

Pair = namedtuple("Pair", "first second")


@dataclass
class Record:
    first: torch.Tensor
    second: torch.Tensor
    note: str = "kept"


def containers(a, b):
    """Each holds ``a``, then ``b``, and things that are no tensors."""
    from transformers.modeling_outputs import BaseModelOutput

    extra = object()
    return {
        "tuple": (a, extra, b),
        "list": [a, None, b],
        "dict": {"z": a, "n": 3, "a": b},
        "ordered dict": OrderedDict(z=a, a=b),
        "namedtuple": Pair(a, b),
        "dataclass": Record(a, b),
        "ModelOutput": BaseModelOutput(last_hidden_state=a, hidden_states=(b,)),
        "nested": {"outer": [(extra, a), Pair([b], "text")]},
    }


NAMES = [
    "tuple",
    "list",
    "dict",
    "ordered dict",
    "namedtuple",
    "dataclass",
    "ModelOutput",
    "nested",
]


def tensors(value):
    """Tensors depth first, written for these containers only."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Record):
        return [value.first, value.second]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in tensors(item)] if isinstance(value, list | tuple) else []


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", NAMES)
def test_each_tensor_of_a_container_can_be_seen_and_edited(name):
    full_a, full_b = models.random(4, 6), models.random(2, 5, 3)
    shards = [part(full_a), part(full_b, 1)]
    for index, full in enumerate([full_a, full_b]):
        value = containers(*shards)[name]
        negate = lambda module, full, save_ctx, modules: -full  # noqa: E731
        result, record = run(value, tuple(full.shape), negate, index, dims=[1, 1])
        assert type(result) is type(value)
        edited, untouched = tensors(result)[index], tensors(result)[1 - index]
        assert_close(edited, -shards[index])
        assert untouched is shards[1 - index]
        if dist.get_rank() == 0:
            assert_same(record, full)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", NAMES)
def test_a_container_that_is_only_read_goes_on_itself(name):
    full = models.random(4, 6)
    value = containers(part(full), full)[name]
    result, _ = run(value, (4, 6), dims=[1])
    assert result is value


def test_what_is_no_tensor_keeps_its_identity():
    extra, other = object(), torch.ones(2)
    value = {"a": (torch.zeros(2), extra), "b": [other, "text"]}
    plus_one = lambda module, full, save_ctx, modules: full + 1  # noqa: E731
    with FlexModel(Site()) as flex:
        flex.register_forward_hook(HookFunction("site", editing_function=plus_one))
        result = flex(value)
    assert result["a"][1] is extra
    assert result["b"][0] is other
    assert result["b"][1] == "text"
    assert_close(result["a"][0], torch.ones(2))
    assert list(result) == ["a", "b"]

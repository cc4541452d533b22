"""Memory that is written to through views."""

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings

import models
from flex_model.distributed.mesh import Mesh
from flex_model.distributed.placement import Replicate, Shard
from flex_model.layouts import memory_map
from flex_model.layouts.tensor_values import TensorValues
from followed import Sites, follow


def parts(x):
    made = torch.empty(x.shape, dtype=torch.complex128)
    made.real = x
    made.imag = x
    return made


def pairs(x):
    made = torch.empty(x.shape, dtype=torch.complex128)
    torch.view_as_real(made).copy_(torch.stack([x, x], -1))
    return made


def bits(x):
    made = torch.empty_like(x)
    made.view(torch.int32).copy_(x.view(torch.int32))
    return made


@pytest.mark.ranks(2)
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("make", [parts, pairs, bits])
def test_views_of_unwritten_memory_in_other_dtypes(make, inference):
    """An error of torch's came out of the follower."""
    model = Sites(lambda m, x: m.site(make(x)), "site")
    mine = models.random(4, 6).chunk(2)[dist.get_rank()]
    mesh = Mesh.from_sizes(dp_size=2)
    with torch.inference_mode(inference):
        found, _, _ = follow(model, mesh, [mine], [(Shard(0), Replicate())])
    assert found["site"] == [None]


@st.composite
def views(draw, of):
    """A part of ``of``, by slices and numbers, steps and repeats."""
    view = of
    for dim in range(view.ndim):
        start = draw(st.integers(0, view.shape[dim] - 1))
        stop = draw(st.integers(start + 1, view.shape[dim]))
        view = view.narrow(dim, start, stop - start)
        view = view[
            (slice(None),) * dim + (slice(None, None, draw(st.sampled_from([1, 1, 1, 2]))),)
        ]
    if draw(st.booleans()):
        view = (
            view.flatten(0, 1) if view.is_contiguous() and view.ndim > 1 else view.transpose(0, -1)
        )
    if draw(st.booleans()):
        view = view.select(0, 0)
    if draw(st.integers(0, 9)) == 0:
        view = view.expand(2, *view.shape)
    return view


@st.composite
def pairs_of_views(draw):
    shape = draw(st.lists(st.integers(1, 4), min_size=2, max_size=3))
    length = torch.Size(shape).numel()
    whole = torch.arange(length + 3)[draw(st.integers(0, 3)) :][:length].view(shape)
    return draw(views(whole)), draw(views(whole))


@settings(max_examples=500, deadline=None)
@given(pairs_of_views())
def test_views_that_share_no_memory(pair):
    first, second = pair
    share = not set(first.flatten().tolist()).isdisjoint(second.flatten().tolist())
    if share:
        assert memory_map.overlap(memory_map.geometry(first), memory_map.geometry(second))


def test_boxes_side_by_side():
    x = torch.zeros(4, 6, 8)
    for one, other in [
        (x[:, :2], x[:, 2:]),
        (x[..., :1], x[..., 1:]),
        (x[..., :1], x[..., 1:2]),
        (x[:, 0], x[:, 1:]),
        (x.transpose(0, 2)[:3], x[..., 3:]),
        (x[:, :2, 4:], x[:, 1:, :4]),
    ]:
        assert not memory_map.overlap(memory_map.geometry(one), memory_map.geometry(other))
    assert memory_map.overlap(memory_map.geometry(x[:, :3]), memory_map.geometry(x[:, 2:]))


def test_a_tensor_at_the_address_of_a_weight_that_is_gone_is_no_weight():
    """The shards of DTensors that transformers computes with live for one call: a cached tensor at
    the address of one was lost, on some rank, in some run.
    """
    values, weight = TensorValues(), torch.ones(2)
    address = id(weight)
    values.note_weight(weight, "weight", 1)
    del weight
    tensors = [torch.ones(2) for _ in range(100)]
    for value, tensor in enumerate(tensors, 2):
        values.note(tensor, value)
    assert address in map(id, tensors)
    assert list(map(id, values.live_tensors())) == list(map(id, tensors))

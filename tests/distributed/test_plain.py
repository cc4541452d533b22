"""What goes to the engine is the memory of a plain tensor: others are refused there once more, and
so are buffers that are not there or too short.
"""

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from flex_model import _C
from flex_model.distributed.plain import plain
from flex_model.distributed.transports.transport import end_to_end

PLAN = end_to_end([8, 24])
FULL, SHARD = torch.arange(32, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
SHORT = torch.zeros(7, dtype=torch.uint8)


def alone():
    """A group of one rank. In a process of its own: what that forks has no shared memory."""
    block = _C.ControlBlock(1)
    return _C.HostGroup.made(block, [_C.arena_table()], 0)


def test_only_plain_tensors_reach_the_engine():
    whole, plan = torch.zeros(8, 4, dtype=torch.uint8), PLAN
    lazy = torch.zeros(2, dtype=torch.complex128).conj()
    others = (whole.t(), whole.to("meta"), TwoTensor(whole, whole), lazy, whole.data_ptr(), (1, 2))
    for tensor in others:
        with pytest.raises(TypeError, match="expected a contiguous CPU tensor of the class Tensor"):
            _C.split_into(plan, 0, tensor, SHARD)
    _C.split_into(plan, 0, torch.nn.Parameter(whole, requires_grad=False), SHARD)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_has_no_memory_is_refused_by_name():
    with pytest.raises(TypeError, match="class TwoTensor"):
        plain(TwoTensor(torch.zeros(2), torch.zeros(2)))
    with pytest.raises(TypeError, match="a meta tensor"):
        plain(torch.zeros(2, device="meta"))
    with pytest.raises(TypeError, match="a quantized tensor"):
        plain(torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8))
    with pytest.raises(TypeError, match=r"a torch\.sparse_coo tensor"):
        plain(torch.eye(2).to_sparse())


WRONG = {"none": [None], "short": [SHORT, SHARD[:0]]}


@pytest.mark.ranks(1)
def test_a_null_or_short_buffer_is_an_error_in_the_engine():
    """Each killed the process before."""
    for tensor in [tensor for tensors in WRONG.values() for tensor in tensors]:
        check_that_it_is_refused(tensor)


def check_that_it_is_refused(tensor):
    """In the place of every buffer, whose bytes are 8, or more."""
    group, one = alone(), end_to_end([8])
    error = pytest.raises(ValueError, match=r"must have \d+ bytes, got (no memory|a tensor of \d)")
    with error:
        _C.split_into(PLAN, 0, tensor, SHARD)
    with error:
        _C.split_into(PLAN, 0, FULL, tensor)
    with error:
        group.exchange(tensor, 8, SHARD)
    with error:
        group.exchange(SHARD, 8, tensor)
    with error:
        group.all_gather(one, tensor, [SHARD])
    with error:
        group.all_gather(one, SHARD, [SHARD, tensor])
    with error:
        group.all_gather_views(one, tensor, [], 1, [8], 1, 8)
    with error:
        group.gather_to_first([(one, [0], tensor, SHARD)])
    with error:
        group.gather_to_first([(one, [0], SHARD, tensor)])
    with error:
        group.open_gather([(one, [0], tensor)])
    with error:
        group.scatter_from_first(one, tensor, SHARD)
    with error:
        group.scatter_from_first(one, SHARD, tensor)
    with error:
        group.broadcast(tensor, 8, None)


def test_a_plan_of_other_ranks_is_an_error_in_the_engine():
    with pytest.raises(IndexError, match="no shard of rank 2"):
        _C.split_into(PLAN, 2, FULL, SHARD)


@pytest.mark.ranks(1)
def test_what_the_engine_is_given_is_moved():
    got = torch.zeros(24, dtype=torch.uint8)
    _C.split_into(PLAN, 1, FULL, got)
    assert torch.equal(got, FULL[8:])
    group, one, got = alone(), end_to_end([8]), torch.zeros(8, dtype=torch.uint8)
    group.all_gather(one, FULL[:8], [got])
    assert torch.equal(got, FULL[:8])


def test_ops_refuse_a_tensor_without_memory():
    empty = torch.zeros(4)
    empty.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="hash_of: the tensor must have 16 bytes, got no memory"):
        _C.hash_of(empty)
    with pytest.raises(RuntimeError, match="no memory at its address"):
        torch.ops.flex_model.pack_tensors([empty], [0], 16)

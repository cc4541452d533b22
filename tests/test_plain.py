"""What goes to the engine is the memory of a plain tensor: others are refused there once more, and
so are buffers that are not there or too short.
"""

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from flex_model import _C
from flex_model.distributed import memory
from flex_model.distributed.plain import plain
from flex_model.distributed.transports.transport import end_to_end

PLAN = end_to_end([8, 24])
FULL, SHARD = torch.arange(32, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
SHORT = torch.zeros(7, dtype=torch.uint8)


def alone():
    """A group of one rank. In a process of its own: what that forks has no shared memory."""
    block = _C.ControlBlock(1)
    return _C.HostGroup.made(block, [_C.arena_table()], 0)


def test_a_span_is_of_a_plain_tensor():
    whole = torch.zeros(4, 6)
    assert memory.span(whole) == (whole.data_ptr(), 96)
    assert memory.span(torch.nn.Parameter(whole)) == (whole.data_ptr(), 96)
    for tensor in (whole.t(), whole.to("meta"), TwoTensor(whole, whole)):
        with pytest.raises(TypeError, match="expected a contiguous CPU tensor"):
            memory.span(tensor)


def test_what_has_no_memory_is_refused_by_name():
    with pytest.raises(TypeError, match="class TwoTensor"):
        plain(TwoTensor(torch.zeros(2), torch.zeros(2)))
    with pytest.raises(TypeError, match="a meta tensor"):
        plain(torch.zeros(2, device="meta"))
    with pytest.raises(TypeError, match="a quantized tensor"):
        plain(torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8))
    with pytest.raises(TypeError, match=r"a torch\.sparse_coo tensor"):
        plain(torch.eye(2).to_sparse())


WRONG = {
    "null": [(0, 0), (0, 8), 0],
    "short": [memory.span(SHORT), memory.span(SHARD[:0])],
}


@pytest.mark.ranks(1)
def test_a_null_or_short_buffer_is_an_error_in_the_engine():
    """Each killed the process before."""
    for span in [span for spans in WRONG.values() for span in spans]:
        check_that_it_is_refused(span)


def check_that_it_is_refused(span):
    """In the place of every buffer, whose bytes are 8, or more."""
    group, one = alone(), end_to_end([8])
    full, shard = memory.span(FULL), memory.span(SHARD)
    error = pytest.raises(ValueError, match=r"must have \d+ bytes, got (address 0|a buffer of \d)")
    with error:
        _C.split_into(PLAN, 0, span, shard)
    with error:
        _C.split_into(PLAN, 0, full, span)
    with error:
        group.exchange(span, 8, shard)
    with error:
        group.exchange(shard, 8, span)
    with error:
        group.all_gather(one, span, [shard])
    with error:
        group.all_gather(one, shard, [shard, span])
    with error:
        group.all_gather_views(one, span, [], 1, [8], 1, 8)
    with error:
        group.gather_to_first([(one, [0], span, shard)])
    with error:
        group.gather_to_first([(one, [0], shard, span)])
    with error:
        group.open_gather([(one, [0], span)])
    with error:
        group.scatter_from_first(one, span, shard)
    with error:
        group.scatter_from_first(one, shard, span)
    with error:
        group.broadcast(span, 8, (0, 0))


def test_a_plan_of_other_ranks_is_an_error_in_the_engine():
    with pytest.raises(IndexError, match="no shard of rank 2"):
        _C.split_into(PLAN, 2, memory.span(FULL), memory.span(SHARD))


@pytest.mark.ranks(1)
def test_what_the_engine_is_given_is_moved():
    got = torch.zeros(24, dtype=torch.uint8)
    _C.split_into(PLAN, 1, memory.span(FULL), memory.span(got))
    assert torch.equal(got, FULL[8:])
    group, one, got = alone(), end_to_end([8]), torch.zeros(8, dtype=torch.uint8)
    group.all_gather(one, memory.span(FULL[:8]), [memory.span(got)])
    assert torch.equal(got, FULL[:8])


def test_ops_refuse_a_tensor_without_memory():
    empty = torch.zeros(4)
    empty.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="no memory at its address"):
        torch.ops.flex_model.fingerprint(empty)
    with pytest.raises(RuntimeError, match="no memory at its address"):
        torch.ops.flex_model.pack_tensors([empty], [0], 16)

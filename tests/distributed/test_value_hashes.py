"""Hashes of tensors that the host does not read."""

import itertools

import pytest
import torch

from flex_model.distributed import values
from flex_model.distributed.values import hash_on_device
from tests.ops.test_ops import random_tensor


def hash_of(tensor):
    return int(hash_on_device(tensor))


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.complex128])
def test_equal_values_have_equal_hashes_whatever_their_memory(dtype):
    for shape in [(0,), (1,), (3, 5), (7, 1, 9), (64, 33)]:
        tensor = random_tensor(shape, dtype)
        inside = torch.cat([tensor.reshape(-1)[:1].new_ones(1), tensor.reshape(-1)])[1:]
        strided = torch.stack([tensor, tensor], -1)[..., 0]
        for other in (tensor.clone(), inside.reshape(shape), strided):
            assert hash_of(other) == hash_of(tensor)


def test_large_tensors_are_hashed_in_parts(monkeypatch):
    tensors = [random_tensor((size,), torch.uint8) for size in (63, 64, 65, 640, 1001)]
    whole = [hash_of(tensor) for tensor in tensors]
    monkeypatch.setattr(values, "_CHUNK_BYTES", 64)
    assert [hash_of(tensor) for tensor in tensors] == whole
    assert [hash_of(torch.cat([tensor[:1], tensor])[1:]) for tensor in tensors] == whole


def test_any_bit_and_the_order_count():
    data = torch.randint(0, 256, (1000,), dtype=torch.uint8)
    hashes = {hash_of(data)}
    for at, bit in itertools.product((0, 1, 7, 8, 500, 999), range(8)):
        other = data.clone()
        other[at] ^= 1 << bit
        hashes.add(hash_of(other))
    words = torch.arange(200)
    for i, j in [(0, 1), (3, 150), (198, 199)]:
        swapped = words.clone()
        swapped[[i, j]] = swapped[[j, i]]
        hashes.add(hash_of(swapped))
    zeros = [torch.zeros(n, dtype=torch.uint8) for n in range(20)]
    hashes |= {hash_of(words), *map(hash_of, zeros)}
    assert len(hashes) == 1 + 6 * 8 + 3 + 1 + 20

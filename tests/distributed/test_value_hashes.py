"""Hashes of tensors: that of bytes on the CPU, and the one that the host does not read."""

import itertools

import pytest
import torch

from flex_model.distributed import values
from flex_model.distributed.values import fingerprint, hash_on_device
from tests.ops.test_ops import random_tensor

BOTH = pytest.mark.parametrize("hash_of", [fingerprint, lambda tensor: int(hash_on_device(tensor))])


@BOTH
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.complex128])
def test_equal_values_have_equal_hashes_whatever_their_memory(hash_of, dtype):
    for shape in [(0,), (1,), (3, 5), (7, 1, 9), (64, 33)]:
        tensor = random_tensor(shape, dtype)
        inside = torch.cat([tensor.reshape(-1)[:1].new_ones(1), tensor.reshape(-1)])[1:]
        strided = torch.stack([tensor, tensor], -1)[..., 0]
        for other in (tensor.clone(), inside.reshape(shape), strided, tensor.reshape(-1)):
            assert hash_of(other) == hash_of(tensor)


def test_large_tensors_are_hashed_in_parts(monkeypatch):
    tensors = [random_tensor((size,), torch.uint8) for size in (63, 64, 65, 640, 1001)]
    whole = [int(hash_on_device(tensor)) for tensor in tensors]
    monkeypatch.setattr(values, "_CHUNK_BYTES", 64)
    shifted = [torch.cat([tensor[:1], tensor])[1:] for tensor in tensors]
    for some in (tensors, shifted):
        assert [int(hash_on_device(tensor)) for tensor in some] == whole


@BOTH
def test_any_bit_the_order_and_the_length_count(hash_of):
    bits = torch.zeros(200, dtype=torch.uint8)
    hashes = [hash_of(torch.zeros(size, dtype=torch.uint8)) for size in range(300)]
    for byte, bit in itertools.product(range(200), range(8)):
        changed = bits.clone()
        changed[byte] = 1 << bit
        hashes.append(hash_of(changed))
    words = torch.arange(64)
    for i, j in [(0, 0), *itertools.combinations(range(64), 2)]:
        swapped = words.clone()
        swapped[[i, j]] = words[[j, i]]
        hashes.append(hash_of(swapped))
    assert len(set(hashes)) == len(hashes)


@BOTH
def test_hashes_spread_over_all_bits(hash_of):
    hashes = [hash_of(torch.tensor([i])) for i in range(4000)]
    for bit in range(63):
        assert 0.45 < sum(value >> bit & 1 for value in hashes) / len(hashes) < 0.55

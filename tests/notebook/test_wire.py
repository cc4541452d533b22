"""Values as they travel: tensors keep values, dtypes, shapes and what they share."""

import os

import pytest
import torch
from torch import nn

pytest.importorskip("cloudpickle")
pytest.importorskip("ipyparallel")

from flex_model.distributed.processes import identity
from flex_model.notebook import rank_process
from flex_model.notebook.wire import MemoryFile, Packer, Unpacker


def sent(value, share=True):
    packer = Packer(lambda value: None)
    pickled = packer.pickle(value)
    payload = packer.payload(share)
    address = payload.address if isinstance(payload, MemoryFile) else payload
    unpacker = Unpacker(address, lambda reference: None)
    if isinstance(payload, MemoryFile):
        payload.close()
    return unpacker.unpickle(pickled)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (5, 7), (300, 301)])
def test_tensors_keep_values(shape, dtype, share):
    tensor = torch.randint(0, 2, shape).to(dtype)
    found, same, text, part = sent([tensor, tensor, "text", tensor[:1] if shape else tensor], share)
    assert torch.equal(found, tensor) and found.dtype == dtype and text == "text"
    assert torch.equal(same, tensor) and torch.equal(part, tensor[:1] if shape else tensor)


def test_strides_conjugates_and_parameters():
    base = torch.randn(400, 300, dtype=torch.complex64)
    turned, conjugate, parameter, frozen, leaf = sent(
        [
            base.T[::2],
            base.conj(),
            nn.Parameter(base),
            nn.Parameter(base, requires_grad=False),
            base.clone().requires_grad_(),
        ]
    )
    assert torch.equal(turned, base.T[::2]) and torch.equal(conjugate, base.conj())
    assert isinstance(parameter, nn.Parameter) and parameter.requires_grad
    assert isinstance(frozen, nn.Parameter) and not frozen.requires_grad
    assert leaf.requires_grad and torch.equal(leaf, base)


def test_a_module_works_after_it_travelled():
    module = nn.Linear(300, 300)
    found = sent(module)
    x = torch.randn(2, 300)
    assert torch.equal(found(x), module(x))
    found(x).sum().backward()
    assert found.weight.grad is not None


def test_what_is_written_here_stays_here():
    packer = Packer(lambda value: None)
    tensor = torch.zeros(2**16)
    pickled, file = packer.pickle(tensor), packer.payload(True)
    first, second = (Unpacker(file.address, None).unpickle(pickled) for _ in range(2))
    first.fill_(1)
    assert second.sum() == 0 and tensor.sum() == 0
    before = len(os.listdir("/proc/self/fd"))
    file.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1
    assert second.sum() == 0


def test_memory_is_shared_only_with_processes_of_this_host():
    """On another host the same number may be a file of another process."""
    probe = MemoryFile(1, [])
    here = identity()[0]
    assert rank_process.introduce(here, probe.address)["shares_memory"]
    assert not rank_process.introduce(f"other {here}", probe.address)["shares_memory"]
    probe.close()


def test_references_and_digests():
    marker = object()
    packer = Packer(lambda value: ("marker",) if value is marker else None)
    pickled = packer.pickle([marker, 1])
    unpacker = Unpacker(packer.payload(True), lambda reference: reference[0])
    assert unpacker.unpickle(pickled) == ["marker", 1]
    tensor = torch.zeros(3)
    before, same = (Packer(lambda value: None).digest([tensor, 1]) for _ in range(2))
    assert before == same != Packer(lambda value: None).digest([tensor.add_(1), 1])

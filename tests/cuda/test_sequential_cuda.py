"""Sequential runs on a GPU: weights through pinned memory, activations that wait on the CPU."""

import copy

import pytest
import torch
from torch import nn

import models
from flex_model import FlexModel, HookFunction, sequential
from flex_model.sequential.weights.loader import Weight, _Buffer

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
BATCHES = [models.random(rows, 256, seed=rows, dtype=torch.float32) for rows in (2, 3, 1, 5)]


def chain():
    return models.seeded(lambda: nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))))


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("window", [None, 2])
def test_weights_are_whole_when_they_are_used(prefetch, window):
    model = chain()
    flex = FlexModel(copy.deepcopy(model).to("meta"), found := {})
    flex.register_forward_hook(HookFunction("3"))
    outputs = sequential.run(
        flex,
        BATCHES,
        ["Linear"],
        weights=model.state_dict(),
        window=window,
        prefetch=prefetch,
        device="cuda",
    )
    model = model.cuda()
    with torch.no_grad():
        for output, record, batch in zip(outputs, found["3"], BATCHES):
            assert output.is_cuda and torch.equal(output, model(batch.cuda()))
            assert torch.equal(record, model[:4](batch.cuda()).cpu())


NUM_BYTES = 1 << 16


def filled(buffer, value):
    weight = Weight(torch.empty(NUM_BYTES, dtype=torch.uint8), False)
    buffer.fill([weight], lambda local, _: local.fill_(value))


def test_memory_for_weights_is_written_after_what_used_it_before():
    """The allocator gives it at once to the stream that freed it; but another one writes."""
    ones = torch.ones(NUM_BYTES, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    late = ones.clone()
    del ones
    buffer = _Buffer(NUM_BYTES, late.device)
    filled(buffer, 7)
    assert bool((late == 1).all())
    assert bool((buffer.memory == 7).all())


def test_memory_for_weights_is_not_freed_while_it_is_written(monkeypatch):
    buffer = _Buffer(NUM_BYTES, torch.device("cuda", 0))
    filled(buffer, 7)
    with torch.cuda.stream(buffer._staging[1]):
        torch.cuda._sleep(200_000_000)
    monkeypatch.setattr(torch.cuda.Stream, "synchronize", interrupt)
    with pytest.raises(KeyboardInterrupt):
        filled(buffer, 7)
    monkeypatch.undo()
    del buffer
    ones = torch.ones(NUM_BYTES, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    assert bool((ones == 1).all())


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_activations_wait_elsewhere(where):
    model = chain().cuda()
    batches = [batch.cuda() for batch in BATCHES]
    with torch.no_grad():
        outputs = sequential.run(model, batches, ["Linear"], offload_activations=where)
        assert all(torch.equal(o, model(batch)) for o, batch in zip(outputs, batches))


def test_streams_and_random_states_are_the_batchs_own():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(256, 256), nn.Dropout(0.5)).cuda()
    ones, runs = torch.ones(4, 256, device="cuda"), []
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which fills `ones`
    for window in (1, None):
        torch.manual_seed(3)
        with torch.cuda.stream(stream):
            seen = []
            model[1].register_forward_hook(
                lambda *_, seen=seen: seen.append(torch.cuda.current_stream())
            )
            runs.append(sequential.run(model, [ones] * 3, ["1", "2"], window=window))
            assert set(seen) == {stream}
    stream.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(*runs))
    assert not torch.equal(runs[0][0], runs[0][1])

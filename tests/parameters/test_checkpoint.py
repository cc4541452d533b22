"""Files of trainable modules: whole or not there; refused on every rank where they don't fit."""

import errno
import random

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

import models
from flex_model import FlexModel, HookMismatchError
from flex_model.records.store import files


def wrapped(*modules, **settings):
    flex = FlexModel(models.mlp(), **settings)
    for name, module in modules or [("probe", linear())]:
        flex.register_trainable_module(name, module)
    return flex


def linear(seed=1, width=3):
    return models.seeded(nn.Linear, width, width, seed=seed)


def stepped(optimizer, parameters):
    for parameter in parameters:
        parameter.grad = models.random(*parameter.shape, seed=parameter.numel()).to(parameter)
    optimizer.step()
    return optimizer


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, amsgrad=True, fused=False),
    "tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_comes_back_bit_for_bit(name, tmp_path):
    flex, other = wrapped(), wrapped(("probe", linear(seed=5)))
    parameters = list(flex.trainable_modules.parameters())
    optimizer = OPTIMIZERS[name](parameters)
    resumed = OPTIMIZERS[name](other.trainable_modules.parameters())

    def step(of, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = of.trainable_modules["probe"](models.random(4, 3).float()).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    for _ in range(2):
        step(flex, optimizer)
    flex.save_trainable_modules(tmp_path / "a", optimizer)
    other.load_trainable_modules(tmp_path / "a", resumed)
    for _ in range(2):
        step(flex, optimizer)
        step(other, resumed)
    state, expected = other.trainable_modules.state_dict(), flex.trainable_modules.state_dict()
    assert_close(dict(state), dict(expected), rtol=0, atol=0)


def test_the_file_can_be_read_with_torch_alone_and_without_its_optimizer(tmp_path):
    flex, other = wrapped(), wrapped(("probe", linear(seed=5)))
    optimizer = stepped(adam(flex), flex.trainable_modules.parameters())
    flex.save_trainable_modules(tmp_path / "a", optimizer, extra=(1, {"b", "c"}))
    assert other.load_trainable_modules(tmp_path / "a") == (1, {"b", "c"})  # no optimizer here
    found = torch.load(tmp_path / "a", weights_only=True)
    state, of_optimizer = dict(flex.trainable_modules.state_dict()), optimizer.state_dict()
    assert_close(found["modules"], state, rtol=0, atol=0)
    assert_close(dict(other.trainable_modules.state_dict()), state, rtol=0, atol=0)
    assert_close(found["optimizer"], of_optimizer, rtol=0, atol=0)
    assert found["extra"] == (1, {"b", "c"})


def test_buffers_ties_odd_dtypes_and_extra_come_back(tmp_path):
    def make(seed):
        module = nn.Sequential(linear(seed), nn.BatchNorm1d(3), linear(seed))
        module[2].weight = module[0].weight
        module.register_buffer("empty", torch.empty(0, 4))
        module.register_buffer("complex", torch.full((2,), seed + 1j))
        module.register_buffer("strided", torch.randn(4, 6).t()[::2])
        module.register_buffer("one", torch.tensor(seed))
        module.half().register_buffer("eighth", torch.randn(5).to(torch.float8_e8m0fnu))
        return module

    flex, other = wrapped(("p", make(1))), wrapped(("p", make(2)))
    generator = torch.get_rng_state()
    schedule = {"last_epoch": 3, "lr": [float("inf"), 1e-3], 7: (None, True), "rng": generator}
    flex.save_trainable_modules(tmp_path / "a", extra=schedule)
    extra = other.load_trainable_modules(tmp_path / "a")
    assert torch.equal(extra.pop("rng"), schedule.pop("rng")) and extra == schedule
    state, expected = other.trainable_modules.state_dict(), flex.trainable_modules.state_dict()
    for name, value in expected.items():
        assert_equal_bits(state[name], value)


def assert_equal_bits(found, expected):
    assert found.dtype == expected.dtype
    found, expected = (t.contiguous().reshape(-1).view(torch.uint8) for t in (found, expected))
    assert torch.equal(found, expected)


# ---- What does not fit ---------------------------------------------------------------------------


def adam(flex, *more):
    return torch.optim.Adam([*flex.trainable_modules.parameters(), *more])


OTHERS = {
    "another name": (
        lambda: wrapped(("sae", linear())),
        r"not in the file: \['sae.weight', 'sae.bias'\]; only in the file: \['probe.weight'",
    ),
    "one more": (
        lambda: wrapped(("probe", linear()), ("sae", linear())),
        r"not in the file: \['sae.weight', 'sae.bias'\]; only in the file: \[\]",
    ),
    "another shape": (
        lambda: wrapped(("probe", linear(width=4))),
        r"'probe.weight' is of torch.float32 and shape \(3, 3\) in the file, and of torch.float32 "
        r"and shape \(4, 4\)",
    ),
    "another dtype": (
        lambda: wrapped(("probe", linear().double())),
        r"'probe.weight' is of torch.float32 and .* torch.float64",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_modules_are_refused_and_left_as_they_are(name, tmp_path):
    flex = wrapped()
    flex.save_trainable_modules(tmp_path / "a", adam(flex))
    make, message = OTHERS[name]
    other = make()
    before = {n: p.clone() for n, p in other.trainable_modules.named_parameters()}
    with pytest.raises(ValueError, match=message):
        other.load_trainable_modules(tmp_path / "a", adam(other))
    for n, parameter in other.trainable_modules.named_parameters():
        assert torch.equal(parameter, before[n])


def test_other_optimizers_are_refused(tmp_path):
    flex = wrapped()
    flex.save_trainable_modules(tmp_path / "none")
    flex.save_trainable_modules(tmp_path / "one", adam(flex))
    with pytest.raises(ValueError, match="there is no optimizer in the file"):
        flex.load_trainable_modules(tmp_path / "none", adam(flex))
    probe = flex.trainable_modules["probe"]
    groups = torch.optim.Adam([{"params": [probe.weight]}, {"params": [probe.bias]}])
    with pytest.raises(ValueError, match="make it of the same ones, in the same order"):
        flex.load_trainable_modules(tmp_path / "one", groups)
    of_model = adam(flex, *flex.parameters())
    for call in (flex.save_trainable_modules, flex.load_trainable_modules):
        with pytest.raises(ValueError, match="has 8 parameters that are not those of trainable"):
            call(tmp_path / "one", of_model)
        with pytest.raises(TypeError, match=r"expected an optimizer of torch.*, got int"):
            call(tmp_path / "one", 3)
    refused = {
        "a builtins.object": object(),
        "numpy._core.multiarray.scalar": numpy.float64(1),  # weights_only=True refuses it
        "a meta": torch.empty(1, device="meta"),
        "a torch.sparse_coo": torch.eye(2).to_sparse(),
    }
    for name, extra in refused.items():
        with pytest.raises(TypeError, match=f"extra.* has .*{name}.*, which can't be saved"):
            flex.save_trainable_modules(tmp_path / "one", extra=[extra])
    with pytest.raises(FileNotFoundError, match="there is no file"):
        flex.load_trainable_modules(tmp_path / "two")


# ---- Files ---------------------------------------------------------------------------------------


def test_a_torn_or_changed_file_is_refused(tmp_path):
    flex = wrapped()
    optimizer = stepped(adam(flex), flex.trainable_modules.parameters())
    flex.save_trainable_modules(tmp_path / "a", optimizer, extra=torch.ones(2))
    data, choose = (tmp_path / "a").read_bytes(), random.Random(0)
    saved = torch.load(tmp_path / "a", weights_only=True)
    broken = [data[:n] for n in (0, 5, 8, len(data) // 2, len(data) - 1)]
    torch.save({"modules": {}, "extra": 1}, tmp_path / "other")
    broken += [(tmp_path / "other").read_bytes(), b"x" * 100]
    before = {n: p.clone() for n, p in flex.trainable_modules.named_parameters()}
    for bytes_of_it in broken:
        (tmp_path / "b").write_bytes(bytes_of_it)
        with pytest.raises(ValueError, match="is not a whole file of save_trainable_modules"):
            flex.load_trainable_modules(tmp_path / "b", optimizer)
    for n, parameter in flex.trainable_modules.named_parameters():
        assert torch.equal(parameter, before[n])
    of_values = data.index(saved["modules"]["probe.weight"].numpy().tobytes())
    places = range(of_values, of_values + 36)
    messages = {}
    for at in [*choose.sample(range(len(data)), 500), *places]:
        changed = bytes([data[at] ^ 1 << choose.randrange(8)])
        (tmp_path / "b").write_bytes(data[:at] + changed + data[at + 1 :])
        try:
            extra = flex.load_trainable_modules(tmp_path / "b", optimizer)
        except ValueError as error:
            messages[at] = str(error)
        else:  # a byte of a zip file without a meaning, such as padding or a date
            assert torch.equal(extra, torch.ones(2))
            assert_close(optimizer.state_dict(), saved["optimizer"], rtol=0, atol=0)
        for n, parameter in flex.trainable_modules.named_parameters():
            assert torch.equal(parameter, before[n])
    assert all("is not a whole file of save_trainable_modules" in m for m in messages.values())
    assert all("its values are not those that were written" in messages[at] for at in places)


@pytest.mark.ranks(2)
def test_a_full_disk_is_an_error_on_every_rank_and_keeps_the_older_file(tmp_path):
    flex = wrapped(tensor_parallel_size=2)
    flex.save_trainable_modules(tmp_path / "a", extra=1)
    written, files.write_chunk = files.write_chunk, full_disk
    try:
        with pytest.raises(OSError, match=r"No space left on device \(on rank 0\)"):
            flex.save_trainable_modules(tmp_path / "a", extra=2)
    finally:
        files.write_chunk = written
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert flex.load_trainable_modules(tmp_path / "a") == 1
    flex.restore()


def full_disk(file, chunk):
    file.write(chunk[:3])
    raise OSError(errno.ENOSPC, "No space left on device")


# ---- Ranks that differ ---------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_ranks_that_differ_are_refused_on_all(tmp_path):
    flex = wrapped(tensor_parallel_size=2)
    rank, parameters = dist.get_rank(), list(flex.trainable_modules.parameters())
    flex.save_trainable_modules(tmp_path / "a", adam(flex) if rank == 0 else None)
    with pytest.raises(ValueError, match=r"ranks \[1\] gave an optimizer and rank 0 did not"):
        flex.save_trainable_modules(tmp_path / "b", adam(flex) if rank == 1 else None)
    with pytest.raises(TypeError, match=r"expected an optimizer of torch.* \(on rank 1\)"):
        flex.save_trainable_modules(tmp_path / "b", adam(flex) if rank == 0 else "adam")
    with pytest.raises(HookMismatchError, match=r"differ.*'the optimizer' on ranks \[1\]"):
        flex.save_trainable_modules(tmp_path / "b", torch.optim.SGD(parameters, lr=rank + 0.5))
    optimizer = stepped(adam(flex), parameters)
    optimizer.state[parameters[0]]["exp_avg"][0] += rank
    with pytest.raises(HookMismatchError, match=r"differ.*'the optimizer' on ranks \[1\]"):
        flex.save_trainable_modules(tmp_path / "b", optimizer)
    with torch.no_grad():
        parameters[1][0] += rank
    with pytest.raises(HookMismatchError, match=r"'probe.bias' on ranks \[1\]"):
        flex.save_trainable_modules(tmp_path / "b")
    if rank == 1:
        flex.trainable_modules["more"] = nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"not in the file: \['more.weight'.* \(on rank 1\)"):
        flex.load_trainable_modules(tmp_path / "a")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
    flex.restore()


@pytest.mark.ranks(2)
def test_only_rank_0_needs_the_file_and_ranks_without_optimizer_get_none(tmp_path):
    rank = dist.get_rank()
    flex = wrapped(tensor_parallel_size=2, edit_on="rank0")
    parameters = list(flex.trainable_modules.parameters())
    optimizer = stepped(adam(flex), parameters) if rank == 0 else None  # rank 1's are older
    folder = tmp_path / str(rank)
    flex.save_trainable_modules(folder / "a", optimizer)
    assert folder.exists() == (rank == 0)
    other = wrapped(("probe", linear(seed=7)), tensor_parallel_size=2, edit_on="rank0")
    resumed = adam(other) if rank == 0 else None
    other.load_trainable_modules(folder / "a", resumed)
    expected = [parameter.detach() for parameter in parameters]
    dist.broadcast(expected[0], 0)
    assert torch.equal(other.trainable_modules["probe"].weight, expected[0])
    if rank == 0:
        assert_close(resumed.state_dict(), optimizer.state_dict(), rtol=0, atol=0)
    flex.restore()
    other.restore()

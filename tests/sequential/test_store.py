"""Records on disk: those of output_ptr, whole, and complete after any number of kills."""

import copy
import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from test_engine import BATCHES, Stack

from flex_model import FlexModel, HookFunction, sequential
from flex_model.sequential import ActivationStore
from flex_model.sequential.store import hash_of
from tiers import grid_but

safetensors = pytest.importorskip("safetensors.torch")
SITES = ("blocks.0", "blocks.2")


def wrapped(model=None, pause_s=0.0):
    """A wrapper with a hook that only looks, and one that edits with random numbers."""

    def edit(module, x, save_ctx, modules):
        time.sleep(pause_s)
        return x * torch.rand(())

    flex = FlexModel(model or Stack(4), {})
    flex.register_forward_hook(HookFunction(SITES[0], editing_function=edit))
    flex.register_forward_hook(HookFunction(SITES[1]))
    return flex


def expected_records():
    flex = wrapped()
    sequential.run(flex, BATCHES)
    return {name: list(flex.output_ptr[name]) for name in SITES}


def assert_holds(store, expected):
    assert store.is_complete and store.num_batches == len(BATCHES)
    assert store.names == sorted(expected)
    for name, records in expected.items():
        found = list(store.tensors(name))
        assert len(found) == len(records)
        assert all(torch.equal(one, other) for one, other in zip(found, records))


@pytest.mark.parametrize("window, files", [(None, 1), (2, 3)])
def test_the_records_of_output_ptr(tmp_path, window, files):
    torch.manual_seed(1)
    expected = expected_records()
    torch.manual_seed(1)
    flex = wrapped()
    outputs = sequential.run(flex, BATCHES, window=window, store=ActivationStore(tmp_path))
    assert flex.output_ptr == {} and len(outputs) == len(BATCHES)
    store = ActivationStore(tmp_path)
    assert_holds(store, expected)
    assert len(list(tmp_path.glob("*.safetensors"))) == files
    assert set(store.batch(3)) == set(SITES)
    with pytest.raises(IndexError, match="no batch 5"):
        store.batch(5)
    with pytest.raises(KeyError, match=r"no record 'blocks.1'"):
        next(store.tensors("blocks.1"))


def test_files_are_bounded(tmp_path):
    flex = wrapped()
    sequential.run(flex, BATCHES, store=ActivationStore(tmp_path, shard_bytes=200))
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert ActivationStore(tmp_path).num_batches == len(BATCHES)


def test_a_run_that_failed_goes_on_where_it_was(tmp_path):
    torch.manual_seed(1)
    expected = expected_records()
    torch.manual_seed(1)
    flex = wrapped()
    ran = []
    flex.module.register_forward_pre_hook(lambda module, args: ran.append(len(args[0])))

    def broken():
        yield from BATCHES[:4]
        raise OSError("the network")

    with pytest.raises(OSError, match="the network"):
        sequential.run(flex, broken(), window=2, store=ActivationStore(tmp_path))
    store = ActivationStore(tmp_path)
    assert (store.num_batches, store.is_complete) == (4, False)
    assert_holds_first(store, expected, 4)
    files = {path.name for path in tmp_path.iterdir()}
    of_killed_run = (
        "batches-00000004-00000005.0123abcd.rank-0000.safetensors",
        "batches-00000004-00000004.0123abcd.rank-0001.safetensors",
        "batches-00000004-00000004.json",
        "batches-00000006-00000006.0123abcd.rank-0000.safetensors.part",
        "manifest.json.part",
    )
    for name in of_killed_run:
        (tmp_path / name).write_bytes(b"of a run that was killed")
    torch.manual_seed(1)
    ran.clear()
    outputs = sequential.run(flex, BATCHES, window=2, store=ActivationStore(tmp_path))
    assert ran == [len(BATCHES[4])]
    assert outputs[:4] == [None] * 4 and outputs[4] is not None and len(outputs.save_ctxs) == 5
    assert_holds(ActivationStore(tmp_path), expected)
    index = "batches-00000004-00000004.json"
    (file,) = json.loads((tmp_path / index).read_text())["files"]
    assert {path.name for path in tmp_path.iterdir()} - files == {index, file}
    ran.clear()
    assert sequential.run(flex, BATCHES, store=ActivationStore(tmp_path)) == [None] * 5
    assert ran == []
    with pytest.raises(ValueError, match="has 5 batches, and 4 are given"):
        sequential.run(flex, BATCHES[:4], store=ActivationStore(tmp_path))


def assert_holds_first(store, expected, num_batches):
    for name, records in expected.items():
        found = list(store.tensors(name))
        assert len(found) == num_batches
        assert all(torch.equal(one, other) for one, other in zip(found, records))


def test_other_inputs_of_any_kind_have_another_hash():
    numpy = pytest.importorskip("numpy")

    @dataclass
    class Tokens:
        ids: torch.Tensor

    for one, other in (
        (numpy.zeros(3), numpy.ones(3)),
        (numpy.float32(1), numpy.float32(2)),
        (numpy.array(["a", None], object), numpy.array(["b", None], object)),
        (Tokens(torch.zeros(3)), Tokens(torch.ones(3))),
        (Namespace(ids=torch.zeros(3)), Namespace(ids=torch.ones(3))),
        (torch.eye(3).to_sparse(), (2 * torch.eye(3)).to_sparse()),
        ({1, 2}, {1, 3}),
        ([1, 23], [12, 3]),
    ):
        assert hash_of([one]) == hash_of([copy.deepcopy(one)]) != hash_of([other])


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(("kills", "stride"), grid_but([(50, 5), (250, 1)], (50, 5)))
def test_kills_during_saves_lose_and_tear_nothing(tmp_path, kills, stride):
    """At every step that changes a file, or every fifth, and at random moments."""
    command = [sys.executable, Path(__file__).parent / "kill_saves.py", tmp_path, kills, stride]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]
    seen = json.loads(result.stdout)
    print(seen)
    assert seen["at a step"] > 100 // stride
    assert seen["at a step"] + seen["at random"] >= kills
    assert seen["partial"] > 0 and seen["complete"] > 0


def test_the_progress_bar(capsys, tmp_path):
    pytest.importorskip("tqdm")
    model = Stack(4)
    weights = model.state_dict()
    sequential.run(model.to("meta"), BATCHES, weights=weights, window=2, progress=True)
    last = capsys.readouterr().err.split("\r")[-1]
    assert "12/12" in last and "batches=5/5" in last and "loads=12" in last and "MiB" in last
    sequential.run(Stack(2), iter(BATCHES))
    assert capsys.readouterr().err == ""

"""Files that are not what was written: cut off, changed, pickles, paths that lead elsewhere.

What is read from them is right, or it is a ValueError; nothing is run, nothing outside of the
folder is opened or written.
"""

import json
import os
import pickle
import random
import sys
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from flex_model import FlexModel, HookFunction, sequential
from flex_model.records.store.manifest import digest_of, signed
from flex_model.sequential import ActivationStore, CheckpointWeights

safetensors = pytest.importorskip("safetensors.torch")
BATCHES = [torch.full((2, 4), float(i)) for i in range(4)]
EVIL_NAMES = ["../outside", "/tmp/outside", "a/../../outside", "..", "\0", "a\nb", "é" * 300]


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def model(*names):
    made = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    flex = FlexModel(made, {})
    for number, name in enumerate(names or ["0"]):
        flex.register_forward_hook(HookFunction(str(number % 3), output_name=name))
    return flex


def filled(folder):
    torch.manual_seed(0)
    with torch.no_grad():
        sequential.run(model(), BATCHES, ["0"], window=2, store=ActivationStore(folder))
    return folder


def read_all(folder):
    store = ActivationStore(folder)
    return {name: list(store.tensors(name)) for name in store.names}


@contextmanager
def only_inside(folder):
    """No file is opened elsewhere, but for those of Python and its packages, and nothing made."""
    opened = []

    def audit(event, args):
        if is_watching and event in ("open", "os.mkdir", "os.remove", "os.rename"):
            opened.append(str(args[0]))

    is_watching = True
    sys.addaudithook(audit)
    try:
        yield
    finally:
        is_watching = False
    inside = (str(folder), "/proc/", "/dev/", sys.prefix, sys.base_prefix, os.getcwd())
    assert [path for path in opened if not path.startswith(inside) and not path.isdigit()] == []
    assert not os.path.exists("executed")


def changed_json(value, choose):
    """The same with one thing in it replaced, doubled, or left out."""
    value = json.loads(json.dumps(value))
    places = []

    def walk(node):
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], (dict, list)):
                walk(node[key])

    walk(value)
    node, key = choose.choice(places)
    evil = [None, True, -1, 3, 2**70, 0.5, "", [], {}, [[]], {"file": 1}, *EVIL_NAMES]
    action = choose.choice(["replace", "replace", "double", "drop"])
    if action == "replace":
        node[key] = choose.choice(evil)
    elif action == "double" and isinstance(node, list):
        node.append(node[key])
    else:
        del node[key]
    return value


def changed_bytes(data, choose):
    data = bytearray(data)
    for _ in range(choose.choice([1, 1, 2, 8])):
        action, at = choose.choice(["flip", "cut", "insert", "length"]), choose.randrange(len(data))
        if action == "flip":
            data[at] ^= 1 << choose.randrange(8)
        elif action == "cut":
            del data[at : at + choose.choice([1, 8, 10**6])]
        elif action == "insert":
            data[at:at] = choose.randbytes(choose.choice([1, 8, 100]))
        else:
            data[:8] = choose.choice([0, 1, 2**63, 2**64 - 1, len(data)]).to_bytes(8, "little")
        if len(data) < 9:
            return bytes(data)
    return bytes(data)


@pytest.mark.parametrize("changed", ["manifest.json", "batches-00000002-00000003.json"])
def test_a_store_reads_changed_manifests_rightly_or_refuses_them(changed, tmp_path):
    expected = read_all(filled(tmp_path / "store"))
    path, choose, refused = tmp_path / "store" / changed, random.Random(0), 0
    safetensors.save_file({"0/0/0": torch.zeros(1)}, tmp_path / "outside")
    text = path.read_text()
    with only_inside(tmp_path / "store"):
        for _ in range(1000):
            if choose.random() < 0.7:
                path.write_text(json.dumps(changed_json(json.loads(text), choose)))
            else:
                path.write_bytes(changed_bytes(text.encode(), choose))
            try:
                found = read_all(tmp_path / "store")
            except (ValueError, KeyError):
                refused += 1
                continue
            for name, records in found.items():  # other names have no tensors
                assert all(torch.equal(a, b) for a, b in zip(records, expected.get(name, [])))
    assert refused > 500


def test_a_store_does_not_follow_evil_indices_whose_hashes_fit(tmp_path):
    """Somebody who knows the format: tensors may be others, but nothing outside is touched, and
    none has elements that no file gave it.
    """
    expected = read_all(filled(tmp_path / "store"))
    choose, seen = random.Random(0), set()
    safetensors.save_file({"0/0/0": torch.zeros(1)}, tmp_path / "outside.safetensors")
    manifest = json.loads((tmp_path / "store" / "manifest.json").read_text())
    path = tmp_path / "store" / "batches-00000000-00000001.json"
    index = json.loads(path.read_text())
    known = {
        value for records in expected.values() for t in records for value in t.ravel().tolist()
    }
    with only_inside(tmp_path / "store"):
        for _ in range(1000):
            evil = {**changed_json(index, choose), "digest": None}
            text = signed({name: value for name, value in evil.items() if name != "digest"})
            path.write_bytes(text)
            manifest["groups"][0][2] = digest_of(text)
            fields = {name: value for name, value in manifest.items() if name != "digest"}
            (tmp_path / "store" / "manifest.json").write_bytes(signed(fields))
            try:
                found = read_all(tmp_path / "store")
                flex = FlexModel(nn.Identity(), ActivationStore(tmp_path / "store"))
                flex.restore()
            except ValueError:
                seen.add("refused")
                continue
            seen.add("read")
            for records in found.values():
                assert all(set(tensor.ravel().tolist()) <= known for tensor in records)
    assert seen == {"read", "refused"}
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"store", "outside.safetensors"}


def test_a_store_refuses_changed_files(tmp_path):
    filled(tmp_path / "store")
    path, choose = next((tmp_path / "store").glob("*.safetensors")), random.Random(0)
    data, seen = path.read_bytes(), set()
    with only_inside(tmp_path / "store"):
        for kind in [*(["changed"] * 500), "pickle", "empty"]:
            evil = {"pickle": pickle.dumps(Bomb()), "empty": b""}.get(kind)
            path.unlink()
            path.write_bytes(changed_bytes(data, choose) if evil is None else evil)
            try:
                read_all(tmp_path / "store")
                seen.add("read")
            except ValueError:
                seen.add("refused")
    assert seen == {"read", "refused"}  # values that were changed are not noticed


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd", "a/../../b", 3, None])
def test_an_index_of_a_checkpoint_does_not_lead_elsewhere(tmp_path, shard):
    (tmp_path / "checkpoint").mkdir()
    safetensors.save_file({"0.weight": torch.zeros(4, 4)}, tmp_path / "secret.safetensors")
    index = tmp_path / "checkpoint" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"0.weight": shard}}))
    with pytest.raises(ValueError, match="not an index of safetensors files beside it"):
        CheckpointWeights(tmp_path / "checkpoint")
    index.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="not an index of safetensors files beside it"):
        CheckpointWeights(tmp_path / "checkpoint")


def test_checkpoints_that_are_changed_are_read_or_refused(tmp_path):
    weights = {"0.weight": torch.ones(4, 4), "0.bias": torch.ones(4)}
    path, choose = tmp_path / "model.safetensors", random.Random(0)
    safetensors.save_file(weights, path)
    data = path.read_bytes()
    for kind in [*(["changed"] * 300), "pickle"]:
        path.unlink()
        path.write_bytes(pickle.dumps(Bomb()) if kind == "pickle" else changed_bytes(data, choose))
        try:
            source = CheckpointWeights(path)
            for name in source.names():
                source.read(name)
        except ValueError:
            assert kind in ("changed", "pickle")
    assert not os.path.exists("executed")


def test_a_file_of_trainable_modules_runs_nothing(tmp_path):
    path, flex = tmp_path / "a", FlexModel(nn.Linear(4, 4))
    flex.register_trainable_module("probe", nn.Linear(4, 4))
    flex.save_trainable_modules(path)
    saved = torch.load(path, weights_only=True)
    for evil in (Bomb(), {**saved, "extra": Bomb()}):
        torch.save(evil, path)
        with only_inside(tmp_path), pytest.raises(ValueError, match="is not a whole file"):
            flex.load_trainable_modules(path)
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match="is not a whole file"):
        flex.load_trainable_modules(path)
    assert not os.path.exists("executed")


def test_names_of_records_do_not_leave_the_folder(tmp_path):
    names = [name for name in EVIL_NAMES if name != "\0"]
    with only_inside(tmp_path / "store"), torch.no_grad():
        flex = model(*names)
        sequential.run(flex, BATCHES, ["0"], store=ActivationStore(tmp_path / "store"))
        found = read_all(tmp_path / "store")
    assert set(found) == set(names) and all(len(kept) == 4 for kept in found.values())
    assert [path.name for path in tmp_path.iterdir()] == ["store"]

"""Runs of one process into a store: what is a batch, what is refused, what is kept."""

import copy
import errno
import gc
import json
import os
import threading
import time
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import scripts
from flex_model import ActivationStore, FlexModel, HookError, HookFunction, Select, editing
from flex_model.records.store import files

pytest.importorskip("safetensors")


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def wrapped(store, module=None, gradients=False):
    flex = FlexModel(module or model(), store)
    flex.register_forward_hook(HookFunction("0"))
    flex.register_forward_hook(
        HookFunction("1", editing_function=lambda m, x, ctx, mods: x.mul_(2))
    )
    if gradients:
        flex.register_full_backward_hook(HookFunction("2"))
    return flex


def batches(number, rows=3):
    return [torch.randn(rows, 4, generator=torch.Generator().manual_seed(i)) for i in range(number)]


def expected(number, run=lambda flex, batch: flex(batch), **settings):
    """By batch, what a dict gets."""
    records, found = {}, []
    with wrapped(records, **settings) as flex:
        for batch in batches(number):
            run(flex, batch)
            found.append({name: list(kept) for name, kept in records.items()})
    return found


def assert_holds(folder, found):
    store = ActivationStore(folder)
    assert store.num_batches == len(found)
    for index, records in enumerate(found):
        stored = store.batch(index)
        assert stored.keys() == records.keys()
        for name, tensors in records.items():
            assert len(stored[name]) == len(tensors)
            for one, other in zip(stored[name], tensors):
                assert one.dtype == other.dtype and torch.equal(one, other), name


# ---- What a batch is ----


@pytest.mark.parametrize("gradients", [False, True])
def test_each_outermost_run_is_a_batch(tmp_path, gradients):
    def run(flex, batch):
        output = flex(batch)
        if gradients:
            output.sum().backward()

    store = ActivationStore(tmp_path / "s")
    with wrapped(store, gradients=gradients) as flex:
        assert "3 x 8" not in str(flex.layouts())
        assert flex.output_ptr is store and store.num_batches == 0
        for batch in batches(3):
            run(flex, batch)
        store.flush()
        assert "3 x 8" in str(flex.layouts())
        assert (store.num_batches, store.is_complete) == (3, False)
    assert store.is_complete
    assert_holds(tmp_path / "s", expected(3, run, gradients=gradients))


def test_several_forwards_inside_active_are_one_batch(tmp_path):
    def run(flex, batch):
        with flex.active():
            (flex(batch) + flex(batch * 2)).sum().backward()

    with wrapped(ActivationStore(tmp_path), gradients=True) as flex:
        for batch in batches(2):
            run(flex, batch)
    assert_holds(tmp_path, expected(2, run, gradients=True))
    assert len(ActivationStore(tmp_path)["2"]) == 4


def test_a_gradient_of_a_parameter_is_not_stored_in_another_batch(tmp_path):
    with wrapped(ActivationStore(tmp_path)) as flex:
        flex.register_hook(HookFunction("0.weight", output_name="weight"))
        first, second = (flex(batch).sum() for batch in batches(2))
        with pytest.raises(HookError, match="its batch in the store was ended"):
            first.backward()
        second.backward()
    assert ["weight" in ActivationStore(tmp_path).batch(i) for i in range(2)] == [False, True]


def test_a_backward_that_comes_too_late_is_an_error(tmp_path):
    store = ActivationStore(tmp_path)
    with wrapped(store, gradients=True) as flex:
        first, second = (flex(batch).sum() for batch in batches(2))
        with pytest.raises(HookError, match=r"its batch in the store was ended.*flex.active\(\)"):
            first.backward()
        second.backward()
        third = flex(batches(1)[0]).sum()
        store.flush()
        with pytest.raises(HookError, match="its batch in the store was ended"):
            third.backward()
    assert [len(ActivationStore(tmp_path).batch(i).get("2", [])) for i in range(3)] == [0, 1, 0]


def test_what_fails_leaves_no_batch(tmp_path):
    module, fails = model(), []

    def fail(when):
        if fails == [when]:
            raise ZeroDivisionError(fails.pop())

    def after(m, args, output):
        output.register_hook(lambda grad: fail("in the backward"))

    module[2].register_forward_pre_hook(lambda m, args: fail("in the forward"))
    module[0].register_forward_hook(after)
    store = ActivationStore(tmp_path)
    flex = wrapped(store, module, gradients=True)
    one, two = batches(2)
    flex(one).sum().backward()
    fails.append("in the forward")
    with pytest.raises(ZeroDivisionError):
        flex(one)
    output = flex(one).sum()
    fails.append("in the backward")
    with pytest.raises(ZeroDivisionError):
        output.backward()
    flex(two).sum().backward()
    flex.restore()
    assert_holds(tmp_path, expected(2, lambda f, x: f(x).sum().backward(), gradients=True))


def test_an_exception_keeps_the_batches_before_it(tmp_path):
    def run():
        with wrapped(ActivationStore(tmp_path)) as flex:
            for batch in batches(2):
                flex(batch)
            raise KeyError("the user's")

    with pytest.raises(KeyError):
        run()
    assert_holds(tmp_path, expected(2))
    assert not ActivationStore(tmp_path).is_complete


def test_a_store_that_is_dropped_is_written(tmp_path):
    flex = wrapped(ActivationStore(tmp_path))
    flex(batches(1)[0])
    del flex
    gc.collect()
    assert_holds(tmp_path, expected(1))


@pytest.mark.slow
def test_a_script_that_just_ends_loses_nothing(tmp_path):
    code = (
        "import sys, threading, torch\n"
        "from torch import nn\n"
        "from flex_model import ActivationStore, FlexModel, HookFunction\n"
        "flex = FlexModel(nn.Sequential(nn.ReLU()), ActivationStore(sys.argv[1]))\n"
        "flex.register_forward_hook(HookFunction('0'))\n"
        "flex(torch.ones(2))\n"
        "def start(thread): raise RuntimeError('as Python 3.12 and later say at exit')\n"
        "if sys.argv[2] == 'True': threading.Thread.start = start\n"
    )
    for refuses in (False, True):
        folder = tmp_path / str(refuses)
        scripts.run_code(code, folder, refuses)
        (record,) = ActivationStore(folder).tensors("0")
        assert record.tolist() == [1, 1]


def test_a_store_as_context_and_a_part_of_the_model_on_its_own(tmp_path):
    module = model()
    with ActivationStore(tmp_path) as store:
        flex = wrapped(store, module)
        flex(batches(1)[0])
        module[0](batches(1)[0])
    with pytest.raises(HookError, match="was closed"):
        flex(batches(1)[0])
    flex.restore()
    store = ActivationStore(tmp_path)
    assert [sorted(store.batch(i)) for i in range(store.num_batches)] == [["0", "1"], ["0"]]


def test_annotations_are_kept_with_the_next_batch(tmp_path):
    store = ActivationStore(tmp_path)
    tokens = torch.arange(6).reshape(2, 3)
    with wrapped(store) as flex:
        store.annotate(token_ids=tokens, text=["a", "b"])
        tokens_then = tokens.clone()
        flex(batches(1)[0])
        tokens.zero_()
        flex(batches(1)[0])
    store = ActivationStore(tmp_path)
    assert torch.equal(store.annotations(0)["token_ids"], tokens_then)
    assert store.annotations(0)["text"] == ["a", "b"] and store.annotations(1) == {}
    for value in (object(), torch.arange(3).numpy()):
        with pytest.raises(TypeError, match=r"annotate\(what=...\): expected a tensor or a JSON"):
            store.annotate(what=value)


def test_reading_while_it_is_written_says_to_flush_first(tmp_path):
    store = ActivationStore(tmp_path)
    with wrapped(store) as flex:
        flex(batches(1)[0])
        with pytest.raises(KeyError, match=r"no record '0'; it has \[\] \(call flush\(\) first"):
            store["0"]
        with pytest.raises(IndexError, match=r"0 batches, no batch 0 \(call flush\(\) first"):
            store.batch(0)
        store.flush()
        assert len(store["0"]) == 1
        with flex.active():
            flex(batches(1)[0])
            with pytest.raises(RuntimeError, match="inside a run"):
                store.flush()
    assert ActivationStore(tmp_path).num_batches == 2
    with pytest.raises(KeyError, match=r"it has \['0', '1'\][^(]*$"):
        store["mlp"]


# ---- Going on, and what is refused ----


def test_another_session_goes_on(tmp_path):
    for _ in range(2):
        store = ActivationStore(tmp_path, key={"data": 1})
        with wrapped(store) as flex:
            assert not ActivationStore(tmp_path).is_complete  # also if it is killed now
            for batch in batches(4)[store.num_batches : store.num_batches + 2]:
                flex(batch)
    assert_holds(tmp_path, expected(4))
    with pytest.raises(ValueError, match=r"records with key \{'data': 1\}, not None"):
        wrapped(ActivationStore(tmp_path))


def test_a_relative_folder_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with wrapped(ActivationStore("a")) as flex:
        monkeypatch.chdir("/")
        flex(batches(1)[0])
    assert ActivationStore(tmp_path / "a").num_batches == 1


@dataclass
class _Rope:
    theta: float


@pytest.mark.parametrize(
    "value, other",
    [
        (torch.float32, torch.bfloat16),
        (_Rope(1e4), _Rope(1e6)),
        ([_Rope(1e4)], [_Rope(1e6)]),
        (torch.relu, torch.tanh),
    ],
)
def test_models_whose_configurations_differ_in_what_json_cannot_hold(tmp_path, value, other):
    for of_model in (value, copy.deepcopy(value), other):
        module = model()
        module.config = {"value": of_model}
        if of_model is other:
            with pytest.raises(ValueError, match="a model with another configuration"):
                wrapped(ActivationStore(tmp_path), module)
        else:
            with wrapped(ActivationStore(tmp_path), module) as flex:
                flex(batches(1)[0])


def test_what_does_not_belong_together_is_refused(tmp_path):
    class Config:
        def __init__(self, width, origin="here"):
            self.fields = {"width": width, "_name_or_path": origin}

        def to_dict(self):
            return self.fields

    def with_config(*args):
        module = model()
        module.config = Config(*args)
        return module

    folder = tmp_path / "a"
    with wrapped(ActivationStore(folder), with_config(4)) as flex:
        flex(batches(1)[0])
    with pytest.raises(ValueError, match="a model with another configuration"):
        wrapped(ActivationStore(folder), with_config(5))
    with wrapped(ActivationStore(folder), with_config(4, "moved")) as flex:
        flex.register_forward_hook(HookFunction("2"))
        with pytest.raises(ValueError, match="records of other hooks"):
            flex(batches(1)[0])
    with FlexModel(with_config(4), ActivationStore(folder)) as flex:
        flex.register_forward_hook(HookFunction("0", select=Select(units=1)))
        flex.register_forward_hook(HookFunction("1", editing_function=lambda m, x, ctx, mods: x))
        with pytest.raises(ValueError, match="records of other hooks"):
            flex(batches(1)[0])
    with FlexModel(model(), ActivationStore(tmp_path / "c")) as flex:
        handle = flex.register_forward_hook(HookFunction("2"))
        with pytest.raises(RuntimeError):
            flex(torch.zeros(1))
        handle.remove()  # as none is stored, the first run's hooks may be replaced
        handle = flex.register_forward_hook(HookFunction("0", output_name="x"))
        flex(batches(1)[0])
        handle.remove()
        flex.register_forward_hook(HookFunction("1", output_name="x"))
        with pytest.raises(ValueError, match=r"other hooks .* choose by groups="):
            flex(batches(1)[0])
    flex = wrapped(ActivationStore(folder), with_config(4))
    with pytest.raises(ValueError, match="is being written by another"):
        wrapped(ActivationStore(folder), with_config(4))
    flex.restore()
    store = ActivationStore(tmp_path / "b")
    with wrapped(store), pytest.raises(ValueError, match="is written by another FlexModel"):
        wrapped(store)
    with pytest.raises(ValueError, match="output_ranks is for records in a dict"):
        FlexModel(model(), store, output_ranks="all")
    with pytest.raises(TypeError, match="a dict, an ActivationStore or None, got str"):
        FlexModel(model(), str(folder))
    with pytest.raises(ValueError, match="must be at least 1"):
        ActivationStore(folder, shard_bytes=0)
    assert ActivationStore(folder).num_batches == 1


# ---- The disk ----


def test_files_are_begun_anew_when_they_are_large_or_old(tmp_path):
    for name, settings, number in (
        ("large", {"shard_bytes": 400}, 2),
        ("old", {"seconds": 0}, 5),
        ("small", {"max_bytes": 1}, 1),  # a batch that is larger than the bound is held alone
    ):
        with wrapped(ActivationStore(tmp_path / name, **settings)) as flex:
            for batch in batches(5):
                flex(batch)
        assert len(list((tmp_path / name).glob("*.safetensors"))) == number
        assert_holds(tmp_path / name, expected(5))


def test_a_run_that_is_faster_than_the_disk_waits(tmp_path, monkeypatch):
    goes_on, most = threading.Event(), []
    write = files.write_chunk

    def slow(file, chunk):
        assert goes_on.wait(30)
        most.append(session._writer.held_bytes)
        time.sleep(0.005)
        write(file, chunk)

    monkeypatch.setattr(files, "_POLL_S", 0.01)
    record_bytes = 2 * 3 * 8 * 4
    store = ActivationStore(tmp_path, shard_bytes=1, max_bytes=4 * record_bytes)
    flex = wrapped(store)
    session, ran = store._session, []
    monkeypatch.setattr(files, "write_chunk", slow)

    def run():
        for batch in batches(12):
            flex(batch)
            ran.append(1)

    thread = threading.Thread(target=run)
    thread.start()
    deadline = time.monotonic() + 20
    while len(ran) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert len(ran) == 4 and thread.is_alive()  # the fifth waits for room
    goes_on.set()
    thread.join(30)
    assert not thread.is_alive()
    flex.restore()
    assert max(most) <= 4 * record_bytes
    assert_holds(tmp_path, expected(12))


def test_a_full_disk_is_an_error_and_what_was_acknowledged_stays(tmp_path, monkeypatch):
    store = ActivationStore(tmp_path, shard_bytes=1)
    flex = wrapped(store)
    for batch in batches(2):
        flex(batch)
    store.flush()

    def full(file, chunk):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_chunk", full)
        flex(batches(3)[2])
        with pytest.raises(HookError, match=r"OSError.*No space left") as caught:
            store.flush()
        assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(HookError, match=r"No space left.*\(before\); restore\(\) and wrap again"):
        flex(batches(3)[2])
    flex.restore()
    assert_holds(tmp_path, expected(2))
    with wrapped(ActivationStore(tmp_path)) as flex:  # there is room again
        flex(batches(3)[2])
    assert_holds(tmp_path, expected(3))
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_leaves_the_store_alone(tmp_path):
    store = ActivationStore(tmp_path, shard_bytes=1)
    flex = wrapped(store)
    flex(batches(1)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads
        child = os.fork()
    if child == 0:
        status = 1
        try:
            with pytest.raises(HookError, match="before this process was forked"):
                flex(batches(1)[0])
            with pytest.raises(HookError, match="before this process was forked"):
                store.flush()
            flex.restore()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    flex(batches(2)[1])
    flex.restore()
    assert_holds(tmp_path, expected(2))


def test_the_lock_does_not_outlive_the_writer_in_a_child(tmp_path):
    flex = wrapped(ActivationStore(tmp_path))
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        os.read(reading, 1)
        os._exit(0)
    flex.restore()
    with wrapped(ActivationStore(tmp_path)) as flex:
        flex(batches(1)[0])
    os.write(writing, b"x")
    os.waitpid(child, 0)
    os.close(reading)
    os.close(writing)
    assert_holds(tmp_path, expected(1))


def test_the_manifest_lists_the_stored_batches(tmp_path):
    with wrapped(ActivationStore(tmp_path, key="mine")) as flex:
        flex(batches(1)[0])
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert [(hook["module"], hook["edits"]) for hook in manifest["hooks"]] == [
        ("0", False),
        ("1", True),
    ]
    assert (manifest["key"], manifest["is_complete"]) == ("mine", True)
    index = json.loads((tmp_path / "batches-00000000-00000000.json").read_text())
    assert [tmp_path / name for name in index["files"]] == list(tmp_path.glob("*.safetensors"))
    assert index["records"] == [[0, "0", 0, 0], [0, "1", 0, 0]]
    assert (index["spreads"][0]["shape"], index["spreads"][0]["dtype"]) == ([3, 8], "torch.float32")


def test_batches_without_their_manifest_are_an_error_and_stay(tmp_path):
    with wrapped(ActivationStore(tmp_path)) as flex:
        flex(batches(1)[0])
    store = ActivationStore(tmp_path)
    manifest = (tmp_path / "manifest.json").read_bytes()
    (tmp_path / "manifest.json").unlink()
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=r"holds batches \('batches-.*gone; put it back"):
        ActivationStore(tmp_path)
    with pytest.raises(ValueError, match=r"holds batches \('batches-.*gone; put it back"):
        wrapped(store)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files
    (tmp_path / "manifest.json").write_bytes(manifest)
    assert_holds(tmp_path, expected(1))


def test_a_folder_with_files_of_others_is_left_alone(tmp_path):
    for name in ("config.json", "model.safetensors", "download.part"):
        (tmp_path / name).write_text("mine")
        with pytest.raises(ValueError, match=rf"holds other files \('{name}'\) and no manifest"):
            ActivationStore(tmp_path)
        with pytest.raises(NotADirectoryError, match="is a file, or below one; give the path of a"):
            ActivationStore(tmp_path / name)
        (tmp_path / name).unlink()
    with wrapped(ActivationStore(tmp_path)) as flex:
        flex(batches(1)[0])
    (tmp_path / "download.part").write_text("mine")
    with wrapped(ActivationStore(tmp_path)) as flex:
        flex(batches(2)[1])
    assert (tmp_path / "download.part").read_text() == "mine"
    assert_holds(tmp_path, expected(2))


def test_experiments_refuse_a_store(tmp_path):
    with wrapped(ActivationStore(tmp_path)) as flex:
        batch = batches(1)[0]
        with pytest.raises(
            TypeError, match=r"those of this FlexModel go to the store .* with a dict"
        ):
            editing.attribution_patching(flex, batch, batch, ["0"], lambda logits: logits.sum())
        flex(batch)
    assert_holds(tmp_path, expected(1))

"""Rows for training: every row once, aligned, in one order for any number of readers."""

import json
import mmap
import signal
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from flex_model import ActivationStore, FlexModel, HookFunction, Select
from flex_model.records.store.reader import RecordRows
from tiers import grid_but

pytest.importorskip("safetensors")
BATCHES, ROWS, LENGTH = 9, 3, 7


def filled(
    folder,
    names=("0", "1"),
    dtype=torch.float32,
    notes=lambda i: {},
    lengths=BATCHES * (LENGTH,),
    shard_bytes=3000,
    **settings,
):
    """A store of rows that are all different, in several files."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 12)).to(dtype)
    store = ActivationStore(folder, shard_bytes=shard_bytes, **settings)
    with FlexModel(model, store) as flex:
        for name in names:
            flex.register_forward_hook(HookFunction(name))
        for i, length in enumerate(lengths):
            tokens = torch.randint(50, (ROWS, length))
            store.annotate(token_ids=tokens, label=torch.arange(ROWS) + ROWS * i, **notes(i))
            flex(tokens)
    return ActivationStore(folder)


def masked(i):
    mask = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    mask[0, : i % 4] = False
    return {"attention_mask": mask}


def stream(store, world=1, workers=0, state=None, **settings):
    """The global batches: the parts of all readers, put together."""
    readers = []
    for rank in range(world):
        loader = store.loader(rank=rank, world=world, **settings)
        if state is not None:
            loader.load_state_dict(state)
        readers.append(DataLoader(loader, batch_size=None, num_workers=workers))
        assert len(readers[-1]) == len(loader)
    found = []
    for parts in zip(*readers, strict=True):
        names = parts[0].records, parts[0].annotations
        records, notes = (
            {n: torch.cat([p[i][n] for p in parts]) for n in names[i]} for i in (0, 1)
        )
        origins = torch.cat([part.origins for part in parts])
        positions = torch.cat([part.positions for part in parts])
        assert all(part.state == parts[0].state for part in parts)
        found.append((records, notes, origins, positions, parts[0].state))
    return found


def assert_equal(one, other):
    assert len(one) == len(other)
    for (a, a_notes, *a_rest, a_state), (b, b_notes, *b_rest, b_state) in zip(one, other):
        torch.testing.assert_close([a, a_notes, a_rest], [b, b_notes, b_rest], rtol=0, atol=0)
        assert a_state == b_state


SETTINGS = {"batch_rows": 8, "buffer_rows": 50, "seed": 3, "epochs": 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_row_that_is_not_masked_comes_once_an_epoch(tmp_path, dtype):
    store = filled(tmp_path, dtype=dtype, notes=masked)
    num_rows = sum(int(masked(i)["attention_mask"].sum()) for i in range(BATCHES))
    batches = stream(store, **SETTINGS)
    assert len(batches) == 2 * num_rows // 8
    seen = []
    for records, notes, origins, positions, _ in batches:
        for j, (batch, call, row) in enumerate(origins.tolist()):
            beside = store.annotations(batch)
            for name in ("0", "1"):
                of_batch = store.batch(batch)[name][call].flatten(0, -2)
                assert torch.equal(records[name][j], of_batch[row])
            assert notes["token_ids"][j] == beside["token_ids"].flatten()[row]
            assert beside["attention_mask"].flatten()[row]
            assert positions[j] == row % LENGTH
            assert notes["label"][j] == ROWS * batch + row // LENGTH  # one for each sequence
            seen.append((batch, row))
    first, second = seen[:num_rows], seen[num_rows:]
    assert len(set(first)) == num_rows and len(set(second)) == len(second)
    assert first[: len(second)] != second  # another order
    in_order = [(i, j) for i in range(BATCHES) for j in range(ROWS * LENGTH)]
    whole = stream(store, batch_rows=9, seed=None, mask=None)
    assert [tuple(o[:2]) for b in whole for o in b[2][:, ::2].tolist()] == in_order
    mixed = [len(set(origins[:, 0].tolist())) for _, _, origins, *_ in batches]
    assert sum(mixed) / len(mixed) > 1.8  # of the two records that a buffer of 50 rows has


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
@pytest.mark.parametrize(
    "world, workers", grid_but([(2, 0), (4, 0), (1, 2), (2, 1)], (4, 0), (2, 1))
)
def test_any_number_of_readers_has_the_same_stream(tmp_path, world, workers):
    store = filled(tmp_path, notes=masked)
    whole = stream(store, **SETTINGS)
    assert_equal(stream(store, world, workers, **SETTINGS), whole)
    for at in (1, len(whole) // 2 + 3):  # within an epoch, and after its end
        state = json.loads(json.dumps(whole[at - 1][-1]))
        assert_equal(stream(store, world, workers, state, **SETTINGS), whole[at:])
    other = stream(store, world, **{**SETTINGS, "seed": 4})
    assert not torch.equal(other[0][2], whole[0][2])


KILLED = """
import json, os, signal, sys
from flex_model import ActivationStore
loader = ActivationStore(sys.argv[1]).loader(rank=1, world=2, **json.loads(sys.argv[2]))
for i, rows in enumerate(loader):
    print(json.dumps([rows.origins.tolist(), rows.state]), flush=True)
    if i == 6:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_reader_that_was_killed_continues_as_one_of_four(tmp_path):
    store = filled(tmp_path)
    whole = stream(store, **SETTINGS)
    command = [sys.executable, "-c", KILLED, str(tmp_path), json.dumps(SETTINGS)]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    seen = [json.loads(line) for line in killed.stdout.splitlines()]
    assert [origins for origins, _ in seen] == [batch[2][4:].tolist() for batch in whole[:7]]
    assert_equal(stream(store, 4, state=seen[-1][1], **SETTINGS), whole[7:])


def test_a_reader_reads_its_own_rows_alone(tmp_path, monkeypatch):
    store, read = filled(tmp_path), []
    plain = RecordRows.read

    def counted(self, numbers, out):
        read.append((len(numbers), self))
        plain(self, numbers, out)

    monkeypatch.setattr(RecordRows, "read", counted)
    list(store.loader("1", 8, rank=2, world=4, buffer_rows=10**6))
    num_rows = BATCHES * ROWS * LENGTH
    assert sum(count for count, _ in read) == num_rows // 8 * 2
    # Of a batch of every record each reader has some: its own, and those at the edges.
    assert len({id(record) for _, record in read}) < BATCHES - 2


def test_memory_is_used_again_when_no_tensor_has_it(tmp_path, monkeypatch):
    loader, made = filled(tmp_path).loader("1", 2, epochs=2), []
    plain = mmap.mmap
    monkeypatch.setattr(mmap, "mmap", lambda *how: made.append(plain(*how)) or made[-1])
    kept = []
    for i, rows in enumerate(loader):
        if i % 9 == 0:
            part = rows.records["1"].T[3:5]  # which has the memory, as any view
            kept.append((part, part.clone()))
    assert len(made) < len(loader) / 2
    assert all(torch.equal(part, before) for part, before in kept)


def test_what_is_not_aligned_is_refused(tmp_path):
    notes = lambda i: {"odd": torch.zeros(4), **(masked(i) if i < 5 else {})}  # noqa: E731
    store = filled(tmp_path, notes=notes)
    with pytest.raises(ValueError, match="'attention_mask' does not have a value"):
        store.loader(batch_rows=8)
    with pytest.raises(ValueError, match=r"'attention_mask' .* \['label', 'token_ids'\] have"):
        store.loader(batch_rows=8, mask=None, annotations=["attention_mask"])
    assert sorted(next(iter(store.loader(batch_rows=8, mask=None))).annotations) == [
        "label",
        "token_ids",
    ]
    loader = store.loader(batch_rows=8, mask=None, annotations=["token_ids"])
    assert list(next(iter(loader)).annotations) == ["token_ids"]
    loader = store.loader(batch_rows=8, mask=None, annotations="token_ids")
    assert list(next(iter(loader)).annotations) == ["token_ids"]
    with pytest.raises(ValueError, match=r"names has no name; give some of \['0', '1'\]"):
        store.loader([])
    for state in ({}, None):
        with pytest.raises(ValueError, match="not of this stream"):
            loader.load_state_dict(state)
    with pytest.raises(ValueError, match="the annotation 'odd' does not have a value"):
        store.loader(batch_rows=8, mask=None, annotations=["odd"])
    with pytest.raises(KeyError, match="no record 'mlp'"):
        store.loader("mlp")
    with pytest.raises(ValueError, match="multiple of 3"):
        store.loader(batch_rows=8, world=3, mask=None, annotations=())
    with pytest.raises(ValueError, match="less than a batch of 500"):
        store.loader(batch_rows=500, mask=None, annotations=())
    with pytest.raises(ValueError, match="not of this stream"):
        store.loader("1", batch_rows=8, mask=None, annotations=()).load_state_dict(
            next(iter(loader)).state
        )


def test_records_that_do_not_fit_together_are_refused(tmp_path):
    store = ActivationStore(tmp_path)
    with FlexModel(nn.Sequential(nn.Identity(), nn.Flatten(0, 1), nn.Identity()), store) as flex:
        for name in ("0", "1"):
            flex.register_forward_hook(HookFunction(name))
        for width in (4, 5):
            flex(torch.zeros(2, 3, width))
    store = ActivationStore(tmp_path)
    with pytest.raises(ValueError, match=r"no rows that fit together.*\(2, 3, 4\).*\(6, 4\)"):
        store.loader(batch_rows=2)
    with pytest.raises(ValueError, match="no common width and dtype"):
        store.loader("0", batch_rows=2)


def test_calls_that_nothing_pairs_are_refused(tmp_path):
    tokens = torch.tensor([[1, 2, 0], [4, 5, 6]])
    with FlexModel(nn.Sequential(nn.Embedding(9, 4)), ActivationStore(tmp_path)) as flex:
        flex.register_forward_hook(HookFunction("0"))
        flex.register_full_backward_pre_hook(HookFunction("0", output_name="grad"))
        flex.output_ptr.annotate(attention_mask=tokens.ne(0), label=torch.arange(2))
        with flex.active():
            (flex(tokens).sum() + flex(tokens.flip(0)).sum()).backward()
    store = ActivationStore(tmp_path)
    with pytest.raises(ValueError, match="several calls, and backward runs them in another order"):
        store.loader(batch_rows=1, mask=None)
    for settings in ({}, {"mask": None, "annotations": "label"}):
        with pytest.raises(ValueError, match=r"one with several calls has none.*\[\] have"):
            store.loader("0", batch_rows=1, **settings)
    for name in ("0", "grad"):
        loader = store.loader(name, batch_rows=1, mask=None)
        assert len(loader) == 12 and not next(iter(loader)).annotations


def test_annotations_are_not_of_what_a_select_reordered(tmp_path):
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(3, 2, 4)
    selects = {
        "rows": Select(rows=[2, 0, 1]),
        "positions": Select(positions=[1, 0]),
        "across": Select(positions=[2, 1, 0], dims={"positions": -3, "rows": 1}),
        "units": Select(units=[1, 0]),
    }
    with FlexModel(model, ActivationStore(tmp_path)) as flex:
        for name, select in selects.items():
            flex.register_forward_hook(HookFunction("0", output_name=name, select=select))
        flex.output_ptr.annotate(label=torch.arange(3), token_ids=torch.arange(6).view(3, 2))
        flex(x)
    store, found = ActivationStore(tmp_path), {}
    for name in selects:
        rows = next(iter(store.loader(name, batch_rows=6, seed=None)))
        found[name] = {n: note.tolist() for n, note in rows.annotations.items()}
    label = {"label": [0, 0, 1, 1, 2, 2]}
    both = {**label, "token_ids": [0, 1, 2, 3, 4, 5]}
    assert found == {"rows": {}, "positions": label, "across": {}, "units": both}
    pytest.importorskip("datasets")
    columns = [store.to_datasets([n], tmp_path / "cache").column_names for n in ("rows", "units")]
    assert columns == [["rows"], ["units", "label", "token_ids"]]


def test_statistics(tmp_path):
    store = filled(tmp_path / "a", dtype=torch.bfloat16)
    rows = torch.cat([one.flatten(0, -2) for one in store.tensors("1")]).double()
    found = store.statistics("1")
    assert found.rows == len(rows)
    torch.testing.assert_close(found.mean, rows.mean(0))
    torch.testing.assert_close(found.variance, rows.var(0, correction=0))
    assert found.norm == pytest.approx(float(rows.square().sum(-1).mean().sqrt()))
    without = filled(tmp_path / "b", statistics=False)
    with pytest.raises(ValueError, match="no statistics of '1'"):
        without.statistics("1")
    with pytest.raises(KeyError, match="no record 'mlp'"):
        store.statistics("mlp")

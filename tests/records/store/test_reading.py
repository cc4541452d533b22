"""Stores as torch, numpy and datasets; every dtype and odd shapes."""

import shutil

import pytest
import torch
from safetensors import safe_open
from torch import nn

import scripts
from flex_model import ActivationStore, FlexModel, HookFunction
from tests.records.store import test_row_loader

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
    torch.complex64,
    torch.complex128,
]
SHAPES = [(3, 4), (), (0, 4), (2, 0), (1,)]


def tensor(dtype, shape, seed=0):
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 4
    return (numbers > 0) if dtype == torch.bool else numbers.abs().to(dtype)


def filled(folder, tensors, name="0", notes=lambda i: {}, **settings):
    store = ActivationStore(folder, **settings)
    with FlexModel(nn.Sequential(nn.Identity()), store) as flex:
        flex.register_forward_hook(HookFunction("0", output_name=name))
        for i, one in enumerate(tensors):
            store.annotate(**notes(i))
            flex(one)
    return ActivationStore(folder)


def bits(one):
    return one.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape(tmp_path, dtype):
    tensors = [tensor(dtype, shape) for shape in SHAPES]
    store = filled(tmp_path, tensors)
    found = list(store.tensors("0"))
    assert [(one.dtype, one.shape) for one in found] == [(one.dtype, one.shape) for one in tensors]
    assert all(torch.equal(bits(one), bits(other)) for one, other in zip(found, tensors))
    for array, one in zip(store.numpy("0"), tensors):
        assert array.shape == tuple(one.shape)
        wide = one.to(torch.float32) if one.dtype.itemsize < 4 and one.is_floating_point() else one
        assert torch.equal(torch.from_numpy(array.copy()).to(wide.dtype), wide)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_complex_halves_keep_their_imaginary_parts_in_numpy(tmp_path):
    one = torch.randn(3, 4, dtype=torch.complex64).to(torch.complex32)
    (array,) = filled(tmp_path, [one]).numpy("0")
    assert torch.equal(torch.from_numpy(array), one.to(torch.complex64))


@pytest.mark.parametrize("num_letters", [1, 9, 17, 25])
def test_every_record_is_aligned(tmp_path, num_letters):
    """Else an operation on complex128 kills the process."""
    name, one = "x" * num_letters, torch.randn(64, 64, dtype=torch.complex128)
    found = filled(tmp_path, [one], name)[name][0]
    assert found.data_ptr() % 16 == 0
    assert torch.equal(found * 2, one * 2)


def test_files_are_ordinary_safetensors(tmp_path):
    tensors = [
        tensor(torch.bfloat16, (3, 5)),
        tensor(torch.float64, (2,)),
        tensor(torch.bool, (7,)),
    ]
    filled(tmp_path, tensors)
    (path,) = tmp_path.glob("*.safetensors")
    with safe_open(path, framework="pt") as file:
        assert sorted(file.keys()) == ["0/0/0", "1/0/0", "2/0/0"]
        for i, one in enumerate(tensors):
            assert torch.equal(file.get_tensor(f"{i}/0/0"), one)


def test_records_of_a_name_are_a_sequence(tmp_path):
    tensors = [tensor(torch.float32, (2, i)) for i in range(5)]
    store = filled(tmp_path, tensors, shard_bytes=1)
    records = store["0"]
    assert len(records) == 5 and records[-1].shape == (2, 4)
    assert [one.shape[1] for one in records[1:4]] == [1, 2, 3]
    assert store.layout("0", 3) == "whole"
    with pytest.raises(KeyError, match=r"no record 'mlp'; it has \['0'\]"):
        store["mlp"]
    with pytest.raises(IndexError):
        records[5]
    with pytest.raises(IndexError, match="no batch 5"):
        store.annotations(5)


def test_what_is_read_may_be_written_to(tmp_path):
    store = filled(tmp_path, [tensor(torch.float32, (2, 3))])
    next(store.tensors("0")).zero_()
    for again in (store["0"][0], store.batch(0)["0"][0]):
        assert torch.equal(again, tensor(torch.float32, (2, 3)))
    assert torch.equal(next(ActivationStore(tmp_path).tensors("0")), tensor(torch.float32, (2, 3)))


@pytest.mark.slow
def test_it_is_read_without_a_process_group(tmp_path):
    filled(tmp_path, [tensor(torch.float32, (2, 3))])
    code = (
        "import sys, flex_model, torch.distributed as dist\n"
        "store = flex_model.ActivationStore(sys.argv[1])\n"
        "assert store.batch(0)['0'][0].shape == (2, 3) and not dist.is_initialized()\n"
    )
    scripts.run_code(code, tmp_path)


def test_as_a_dataset(tmp_path):
    pytest.importorskip("datasets")
    tensors = [tensor(torch.float32, (2, 3), seed) for seed in range(3)]
    store = filled(tmp_path, tensors, notes=lambda i: {"token_ids": torch.full((2, 3), i)})
    rows = list(store.dataset())
    assert [row["batch"] for row in rows] == [0, 1, 2]
    for i, (row, one) in enumerate(zip(rows, tensors)):
        assert torch.equal(torch.as_tensor(row["0"]), one)
        assert (torch.as_tensor(row["token_ids"]) == i).all()
    assert "0" not in next(iter(store.dataset([])))
    assert store.dataset().n_shards == 3
    with pytest.raises(KeyError, match="no record 'mlp'"):
        store.dataset(["mlp"])
    store = filled(tmp_path / "alike", tensors, notes=lambda i: {"0": torch.zeros(2)})
    with pytest.raises(ValueError, match="two columns of the dataset would be named '0'"):
        list(store.dataset())
    with pytest.raises(ValueError, match="two columns of the dataset would be named '0'"):
        store.to_datasets()


def sequences(folder, notes=lambda i: {"text": "t"}, lengths=(7, 7, 7), **settings):
    return test_row_loader.filled(
        folder, dtype=torch.bfloat16, notes=notes, lengths=lengths, shard_bytes=500, **settings
    )


def test_as_a_memory_mapped_dataset(tmp_path):
    datasets = pytest.importorskip("datasets")
    store = sequences(tmp_path / "store")
    found = store.to_datasets(cache_dir=tmp_path / "cache")
    assert found.cache_files and found.column_names == ["0", "1", "token_ids", "label"]
    assert found.features["1"] == datasets.Array2D((7, 12), "float32")
    for i, row in enumerate(found.with_format("torch")):
        for name in ("0", "1"):
            assert torch.equal(row[name], store.batch(i // 3)[name][0][i % 3].float())
        assert torch.equal(row["token_ids"], store.annotations(i // 3)["token_ids"][i % 3])
        assert row["label"] == i
    # Another store in the same folder is not the cached one.
    shutil.rmtree(tmp_path / "store")
    store = sequences(tmp_path / "store", lengths=(7, 5), names=["1"])
    found = store.to_datasets(cache_dir=tmp_path / "cache").with_format("torch")
    assert len(found) == 6 and torch.equal(found[4]["1"], store.batch(1)["1"][0][1].float())


def test_stores_that_are_no_dataset(tmp_path):
    pytest.importorskip("datasets")
    store = sequences(tmp_path / "a", notes=lambda i: {"mask": torch.ones(3)} if i else {})
    with pytest.raises(ValueError, match=r"\['mask'\] are in some"):
        store.to_datasets(cache_dir=tmp_path)
    store = ActivationStore(tmp_path / "b")
    with FlexModel(nn.Sequential(nn.Identity()), store) as flex:
        flex.register_forward_hook(HookFunction("0"))
        with flex.active():
            flex(torch.zeros(2, 3)), flex(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"several calls of \['0'\]"):
        ActivationStore(tmp_path / "b").to_datasets(cache_dir=tmp_path)
    with pytest.raises(KeyError, match="no record 'mlp'"):
        store.to_datasets(["mlp"])


@pytest.mark.filterwarnings("default")  # those of SAELens and what it imports
def test_saelens_reads_it(tmp_path):
    activations_store = pytest.importorskip("sae_lens.training.activations_store")
    store = sequences(tmp_path / "store")
    store.to_datasets(["1"], tmp_path / "cache").save_to_disk(tmp_path / "saelens")
    reader = activations_store.ActivationsStore(
        model=None,
        dataset=None,
        streaming=False,
        hook_name="1",
        hook_head_index=None,
        context_size=7,
        d_in=12,
        n_batches_in_buffer=4,
        total_training_tokens=63,
        store_batch_size_prompts=3,
        train_batch_size_tokens=6,
        prepend_bos=False,
        normalize_activations="none",
        device=torch.device("cpu"),
        dtype="float32",
        cached_activations_path=str(tmp_path / "saelens"),
    )
    for i in range(3):
        rows, tokens = reader.get_raw_llm_batch()
        assert torch.equal(rows, store.batch(i)["1"][0].flatten(0, 1).float())
        assert torch.equal(tokens.long(), store.annotations(i)["token_ids"].flatten())

"""Every layout of four ranks: what the ranks write is put together again, whoever reads it."""

from types import SimpleNamespace

import pytest
import torch

from flex_model import ActivationStore
from flex_model.distributed.gather import TensorSpec
from flex_model.distributed.mesh import Mesh
from flex_model.distributed.placement import Replicate, Shard, ShardLayout
from flex_model.records.store.files import safetensors_of, write_whole
from flex_model.records.store.manifest import (
    Index,
    Manifest,
    RecordLayout,
    digest_of,
    index_name,
    shard_name,
)

pytest.importorskip("safetensors")
R = Replicate()
LAYOUTS = [  # and who writes
    (ShardLayout(), [0]),
    (ShardLayout(tp=Shard(1)), [0, 1]),
    (ShardLayout(dp=Shard(0)), [0, 2]),
    (ShardLayout(dp=Shard(0), tp=Shard(1)), [0, 1, 2, 3]),
    (ShardLayout(dp=Shard(1), tp=Shard(1)), [0, 1, 2, 3]),
    (ShardLayout(dp=Shard(1), tp=Shard(1), tp_first=True), [0, 1, 2, 3]),
    (ShardLayout(tp=Shard(1, parts=3)), [0, 1]),
    (ShardLayout(dp=Shard(0), tp=Shard(1, parts=2)), [0, 1, 2, 3]),
]
SHARED = [
    (ShardLayout(tp=Shard(1, pieces=2, stride=2)), [0, 2]),
    (ShardLayout(tp=Shard(0, pieces=2, stride=1)), [0, 1]),
]


def meshes(dp_size, tp_size):
    return [Mesh(tuple(range(4)), rank, 1, dp_size, tp_size) for rank in range(4)]


@pytest.mark.parametrize(
    "layout, writers, dp_size",
    [(*case, 2) for case in LAYOUTS] + [(*case, 1) for case in SHARED],
    ids=str,
)
def test_what_the_ranks_write_is_the_full_tensor(layout, writers, dp_size, tmp_path):
    full = torch.arange(4 * 12 * 3).reshape(4, 12, 3)
    tp_size = 4 // dp_size
    shape = list(full.shape)
    for axis, size in (("dp", dp_size), ("tp", tp_size)):
        placement = getattr(layout, axis)
        if isinstance(placement, Shard):
            shape[placement.dim] //= placement.pieces or size
    layouts, wrote = set(), []
    for mesh in meshes(dp_size, tp_size):
        communicator = SimpleNamespace(mesh=mesh, is_local=False)
        spec = TensorSpec.of(communicator, layout, [tuple(shape)] * 4, full.dtype)
        record_layout = RecordLayout.of(spec, full.dtype)
        if mesh.rank == 0:
            layouts.add(record_layout)
        if spec.rank_0_gathers:
            wrote.append(mesh.rank)
            shard = {"0/0/x": spec.slice(full)}
            write_whole(tmp_path / shard_name(0, 0, "0123abcd", mesh.rank), safetensors_of(shard))
    (record_layout,) = layouts
    assert wrote == writers == [rank for rank, _ in record_layout.shards]
    assert (record_layout.num_bytes, record_layout.is_whole) == (full.nbytes, writers == [0])
    batches = [{"inputs": None, "notes": {}}]
    index = Index(0, 0, "0123abcd", batches, [record_layout], [(0, "x", 0, 0)])
    text = index.to_json()
    write_whole(tmp_path / index_name(0, 0), [text])
    Manifest("id", None, groups=((0, 0, digest_of(text)),)).write(tmp_path)
    (record,) = ActivationStore(tmp_path).tensors("x")
    assert torch.equal(record, full)

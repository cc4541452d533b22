"""Models of images or sound and text as rows of the table: their towers, projectors and texts."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate

from flex_model import FlexModel
from frameworks import ROUNDED, Pair, gradients, num_ranks, randomise, rank
from modalities import FAMILIES, without_cache

PROJECTORS = {
    "qwen2_vl": "model.visual.merger",
    "qwen2_5_vl": "model.visual.merger",
    "idefics3": "model.connector",
    "whisper": "model.encoder.conv2",  # it has no projector
}


def sites_of(name: str) -> dict[str, str]:
    family = FAMILIES[name]
    act_fn = "activation_fn" if name == "whisper" else "mlp.act_fn"
    return {
        "tower": f"{family.tower}.0",
        "projector": PROJECTORS.get(name, "model.multi_modal_projector"),
        "act_fn": f"{family.layers}.0.{act_fn}",
        "layer": f"{family.layers}.1",
    }


@contextlib.contextmanager
def of_modality(tmp_path: Path, name: str) -> Iterator[Pair]:
    """One of the models: on one process, or as transformers shards its text over the ranks."""
    family, dtype, size = FAMILIES[name], torch.float64, num_ranks()
    model = randomise(family.make())
    if rank() == 0:
        model.save_pretrained(tmp_path / "model")
    if size > 1:
        dist.barrier()

    def load(**settings):
        return type(model).from_pretrained(tmp_path / "model", dtype=dtype, **settings).eval()

    def shard():
        if size == 1:
            return load()
        from transformers.distributed import DistributedConfig

        return load(distributed_config=DistributedConfig(tp_size=size))

    yield Pair(
        load(),
        shard,
        (),
        sites_of(name),
        (f"{family.layers}.0.self_attn.k_proj.weight",),
        gradients,
        keywords=without_cache(family.batch(2, 12, 1, dtype)),
        tolerance=ROUNDED,
        state=state_positions if size > 1 and name.startswith("qwen") else lambda flex: None,
    )


def state_positions(flex: FlexModel) -> None:
    """State that the ranks have the same positions: Qwen makes them of numbers that it reads from
    tensors, which may be a rank's own, for all that can be proven.
    """
    for index in (0, 1):  # cosines and sines
        flex.annotate_layout("language_model.rotary_emb", index=index, tp=Replicate())

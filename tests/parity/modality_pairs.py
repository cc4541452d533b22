"""Models of images or sound and text as rows of the table: their towers, projectors and texts."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate
from torch.nn.parallel import DistributedDataParallel

import modalities
from flex_model import FlexModel
from frameworks import ROUNDED, Pair, apply, gradients, num_ranks, randomise, rank
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
def of_modality(tmp_path: Path, name: str, kind: str) -> Iterator[Pair]:
    """One of the models: on "one" process, its text sharded by transformers ("tp"), or replicated
    by "ddp": then hooks see each rank's own rows, since how many places for images a row has is
    not known of other ranks.
    """
    family, dtype, size = FAMILIES[name], torch.float64, num_ranks()
    dp, tp = (size, 1) if kind == "ddp" else (1, size)
    with contextlib.ExitStack() as stack:
        if tp == 4:  # a head for each rank, and no number of patches that is divided by 4
            stack.enter_context(mock.patch.dict(modalities.TEXT, num_key_value_heads=4))
            stack.enter_context(mock.patch.dict(modalities.QWEN_VISION, spatial_merge_size=3))
        model = randomise(family.make())
        batch = without_cache(family.batch(2 * dp, 13 if tp == 4 else 12, 1, dtype))
    if rank() == 0:
        model.save_pretrained(tmp_path / "model")
    if size > 1:
        dist.barrier()

    def load(**settings):
        return type(model).from_pretrained(tmp_path / "model", dtype=dtype, **settings).eval()

    def shard():
        if kind == "ddp":
            return DistributedDataParallel(load())
        if kind == "one":
            return load()
        from transformers.distributed import DistributedConfig

        return load(distributed_config=DistributedConfig(tp_size=tp))

    local = {"sizes": {"dp_batch": "local"}, "call_hook": partial(own_rows, dp), "backward": False}
    local["has_own_runs"] = True
    yield Pair(
        load(),
        shard,
        (),
        sites_of(name),
        (f"{family.layers}.0.self_attn.k_proj.weight",),
        gradients,
        dp=dp,
        dp_rank=rank() // tp,
        keywords=batch,
        tolerance=ROUNDED,
        state=state_positions if kind == "tp" and name.startswith("qwen") else lambda flex: None,
        **(local if kind == "ddp" else {}),
    )


def own_rows(num_ranks: int, full: torch.Tensor, edit: Callable | None) -> tuple:
    """What the hooks of all ranks record and return, each of its own rows; positions are shared."""
    is_shared = full.shape[0] % (2 * num_ranks) != 0  # each rank has two
    parts = [full] * num_ranks if is_shared else full.chunk(num_ranks)
    records, edited = zip(*(apply(part, edit) for part in parts))
    return list(records), None if edit is None else torch.cat(edited)


def state_positions(flex: FlexModel) -> None:
    """State that the ranks have the same positions: Qwen makes them of numbers that it reads from
    tensors, which may be a rank's own, for all that can be proven.
    """
    for index in (0, 1):  # cosines and sines
        flex.annotate_layout("language_model.rotary_emb", index=index, tp=Replicate())

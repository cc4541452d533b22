"""Refuses adapters of PEFT that were made of a shard's size: the model of such adapters is another
one than the unsharded model, which has adapters of the full size.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from flex_model.distributed.mesh import Mesh
from flex_model.integrations.dtensor import is_dtensor
from flex_model.names import clean

# A LoRA's parts, the dim in which each is as large as the layer, and which dim of its weight it is.
_SIZES_OF_LORA = {
    "lora_A": (1, 1),
    "lora_B": (0, 0),
    "lora_embedding_A": (1, 0),
    "lora_embedding_B": (0, 1),
}


def check_modules(root: nn.Module, mesh: Mesh) -> None:
    """Raise ValueError if an adapter beside a sharded weight has the size of its shard, or is of a
    kind whose sizes are not known. Local.
    """
    if mesh.tp_size == 1 or "peft" not in sys.modules:
        return
    for name, layer in root.named_modules():
        weight = getattr(getattr(layer, "base_layer", None), "weight", None)
        for part, found in _misfits(layer, weight) if is_dtensor(weight) else ():
            raise ValueError(
                f"FlexModel: the adapter {clean(root, f'{name}.{part}')!r} beside a sharded "
                f"weight: expected the layer's full size, or shards like its own, got {found}, "
                "so each rank has an adapter of its own; make LoRA adapters before "
                "parallelize_module, with a plan that splits them as their layer, or load the "
                "model with from_pretrained(distributed_config=...)"
            )


def _misfits(layer: nn.Module, weight: Any) -> Iterator[tuple[str, str]]:
    """Yield the parts of a layer's adapters that do not fit its full weight, and what they are."""
    for kind in getattr(layer, "adapter_layer_names", ()):
        for adapter, part in getattr(layer, kind, {}).items():
            own = getattr(part, "weight", part)
            if is_dtensor(own):
                continue
            if kind not in _SIZES_OF_LORA:
                yield f"{kind}.{adapter}", f"a {type(layer).__name__} that is not known"
                continue
            dim, of_weight = _SIZES_OF_LORA[kind]
            if own.shape[dim] != weight.shape[of_weight]:
                yield (
                    f"{kind}.{adapter}",
                    f"the size {own.shape[dim]} where the layer has {weight.shape[of_weight]}",
                )

"""Refuses what would give other numbers than the unsharded model, or hide errors of hooks:

- adapters of PEFT that were made of a shard's size: the unsharded model's have the full size;
- copies of models that transformers has sharded: it replaces ``forward`` of their modules by
  functions, which ``copy.deepcopy`` does not copy, so a copy computes with the weights of the model
  that it was copied from;
- torch's context parallelism, which splits the sequence over ranks (``distributed/mesh.py`` refuses
  meshes with such a dim);
- continuous batching (``generate_batch``): transformers packs the rows of all requests into one,
  and runs the model in a thread that catches every exception, so that an error of a hook would only
  be logged.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from flex_model.distributed.mesh import Mesh
from flex_model.errors import HookError, agreed
from flex_model.integrations import transformers_private
from flex_model.integrations.dtensor import is_dtensor
from flex_model.integrations.torch_private import CONTEXT_PARALLEL
from flex_model.names import clean, own_tensor

# A LoRA's parts, the dim in which each is as large as the layer, and which dim of its weight it is.
_SIZES_OF_LORA = {
    "lora_A": (1, 1),
    "lora_B": (0, 0),
    "lora_embedding_A": (1, 0),
    "lora_embedding_B": (0, 1),
}


def check_adapters(root: nn.Module, mesh: Mesh) -> None:
    """Raise ValueError if an adapter beside a sharded weight has the size of its shard, or is of a
    kind whose sizes are not known. Local.
    """
    if mesh.tp_size == 1 or "peft" not in sys.modules:
        return
    for name, layer in root.named_modules():
        base = getattr(layer, "base_layer", None)
        weight = own_tensor(base, "weight") if isinstance(base, nn.Module) else None
        for part, found in _misfits(layer, weight) if is_dtensor(weight) else ():
            raise ValueError(
                f"FlexModel: the adapter {clean(root, f'{name}.{part}')!r} beside a sharded "
                f"weight: expected the layer's full size, or shards like its own, got {found}, "
                "so each rank has an adapter of its own; make LoRA adapters before "
                "parallelize_module, with a plan that splits them as their layer, or load the "
                "model with from_pretrained(distributed_config=...)"
            )


def check_scripted(root: nn.Module, name: str, module: object) -> None:
    """Raise TypeError for a hook on a module that torch.jit has compiled. Local."""
    if not isinstance(module, torch.jit.ScriptModule):
        return
    kind, named = torch.jit.ScriptModule, root.named_modules()
    scripts = [clean(root, one) for one, found in named if isinstance(found, kind)]
    around = (one for one in scripts if not one or f"{name}.".startswith(f"{one}."))
    outermost = min(around, key=len, default=name)
    where = f"hook {outermost.rpartition('.')[0]!r}, the module around it, or " * bool(outermost)
    raise TypeError(
        f"a hook on {name!r}: expected a module of Python, got one that torch.jit has compiled, "
        f"which calls no hooks; {where}give the model the module as it was before torch.jit"
    )


def _misfits(layer: nn.Module, weight: Any) -> Iterator[tuple[str, str]]:
    """Yield the parts of a layer's adapters that do not fit its full weight, and what they are."""
    for kind in getattr(layer, "adapter_layer_names", ()):
        for adapter, part in getattr(layer, kind, {}).items():
            own = own_tensor(part, "weight") if isinstance(part, nn.Module) else part
            if is_dtensor(own):
                continue
            if kind not in _SIZES_OF_LORA or own is None:
                yield f"{kind}.{adapter}", f"a {type(layer).__name__} that is not known"
                continue
            dim, of_weight = _SIZES_OF_LORA[kind]
            if own.shape[dim] != weight.shape[of_weight]:
                yield (
                    f"{kind}.{adapter}",
                    f"the size {own.shape[dim]} where the layer has {weight.shape[of_weight]}",
                )


# ---- Copies of models that transformers has sharded ----------------------------------------------

_OF = "transformers."  # the package whose functions replace a forward


def check_copies(root: nn.Module) -> None:
    """Raise ValueError if a module calls the forward of one that it was copied from. Local."""
    for name, module in root.named_modules():
        for called in _called_by(vars(module).get("forward")):
            if called is not module and type(called) is type(module):
                raise ValueError(
                    f"FlexModel: expected a model with weights of its own, got one in which "
                    f"{clean(root, name)!r} computes with those of another: a copy.deepcopy of a "
                    "model that transformers has sharded does not copy its forwards; load the "
                    "model twice with from_pretrained(...)"
                )


def _called_by(forward: Any) -> Iterator[nn.Module]:
    """Yield the modules whose forward is called by a function of transformers that replaces one."""
    functions, seen = [forward], set()
    while functions:
        function = functions.pop()
        if id(function) in seen or not str(getattr(function, "__module__", "")).startswith(_OF):
            continue
        seen.add(id(function))
        for cell in getattr(function, "__closure__", None) or ():
            try:
                value = cell.cell_contents
            except ValueError:  # empty: not assigned yet
                continue
            owner = getattr(value, "__self__", None)
            if isinstance(owner, nn.Module) and value.__name__ == "forward":
                yield owner
            else:
                functions.append(value)


# ---- Context parallelism -------------------------------------------------------------------------

_SEQUENCE_IS_SPLIT = (
    "splits the sequence over {} ranks, and context parallelism is not supported: hooks would see "
    "parts of sequences as rows of the batch; run the model without it"
)


def check_context_parallel(root: nn.Module) -> None:
    """Raise ValueError if the attention of a model is context parallel, as torchtitan makes it."""
    for name, module in root.named_modules():
        for hook in module._forward_pre_hooks.values():
            style = getattr(getattr(hook, "func", None), "__self__", None)
            size = _size(getattr(hook, "keywords", {}).get("mesh"))
            if type(style).__name__ == "_ContextParallel" and size > 1:
                raise ValueError(
                    f"FlexModel: the module {clean(root, name)!r} {_SEQUENCE_IS_SPLIT.format(size)}"
                )


def num_contexts() -> int:
    """Return how often ``context_parallel(...)`` was entered in this process."""
    return len(_entered())


def check_context_parallel_run(since: int) -> None:
    """Raise HookError, the same on every rank, inside
    ``torch.distributed.tensor.experimental.context_parallel(...)``, and where it was entered after
    there had been ``since``: the model's own forward may enter and leave it.
    """
    entered = _entered()
    for patched in (F.scaled_dot_product_attention, *list(entered)[since:]):
        if patched not in entered:
            continue
        cells = dict(zip(patched.__code__.co_freevars, patched.__closure__))
        mesh = cells.get("device_mesh")
        size = _size(None if mesh is None else mesh.cell_contents)
        if size > 1:
            raise agreed(HookError(f"context_parallel(...) {_SEQUENCE_IS_SPLIT.format(size)}"))


def _entered() -> Mapping[Any, Any]:
    """The attention functions that ``context_parallel`` has put in place of torch's, which it keeps
    when it is left.
    """
    return getattr(sys.modules.get(CONTEXT_PARALLEL), "_replaced_functions", {})


def _size(mesh: Any) -> int:
    return 1 if mesh is None else mesh.size()


# ---- Continuous batching -------------------------------------------------------------------------


def check_batching_method(name: str, has_hooks: bool) -> None:
    """HookError for a method of a model that runs it in a thread while hooks are active."""
    if has_hooks and transformers_private.runs_in_a_thread(name):
        raise _batching_refusal(f"{name}()")


def check_batching_arguments(kwargs: Mapping[str, Any]) -> None:
    """HookError for a forward in continuous batching, where hooks are active."""
    if kwargs and transformers_private.is_paged(kwargs):
        raise _batching_refusal("a forward with a paged cache")


def _batching_refusal(what: str) -> HookError:
    return HookError(
        f"{what}: expected no active hook in continuous batching, which packs the rows of all "
        "requests into one and runs the model in a thread that catches the errors of hooks; call "
        "generate() on padded rows, or remove the hooks"
    )

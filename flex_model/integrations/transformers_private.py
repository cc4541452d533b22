"""The names of transformers that its documentation does not promise, each named once.

Those of transformers 5.17 to 5.24. A comment says what happens where one is gone. Nothing is
imported here: transformers is used where it is there.
"""

from __future__ import annotations

import copy
import functools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

# ---- Caches --------------------------------------------------------------------------------------

# The argument of models and `generate` until 5.23, since 5.24, and of state-space models before it.
# Under another name `cache_of` finds it by its class.
_CACHE_ARGUMENTS = ("past_key_values", "cache", "cache_params")
# What continuous batching passes to models and to attention functions; of one, each is None.
_PAGED_ARGUMENTS = ("read_index", "write_index", "block_table")


def cache_of(kwargs: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments of a model; None: it has none."""
    named = map(kwargs.get, _CACHE_ARGUMENTS)
    found = [one for one in (*named, *filter(is_cache, kwargs.values())) if one is not None]
    return found[0] if found else None


def with_cache_of(parameters: Iterable[str], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a forward's arguments with the cache under the name that the forward has: the stages
    of 5.24 leave out one that is passed by the name before.
    """
    own = [name for name in _CACHE_ARGUMENTS if name in parameters]
    given = [name for name in _CACHE_ARGUMENTS if kwargs.get(name) is not None]
    if len(own) != 1 or len(given) != 1:
        return dict(kwargs)
    others = {name: value for name, value in kwargs.items() if name not in _CACHE_ARGUMENTS}
    return {**others, own[0]: kwargs[given[0]]}


def is_cache(value: Any) -> bool:
    """Whether it is a cache of transformers."""
    module = sys.modules.get("transformers.cache_utils")
    return module is not None and isinstance(value, module.Cache)


def is_paged(arguments: Mapping[str, Any]) -> bool:
    """Whether arguments of a model or an attention function are those of continuous batching."""
    is_given = any(arguments.get(name) is not None for name in _PAGED_ARGUMENTS)
    return is_given or "Paged" in type(cache_of(arguments)).__name__


# The methods of a model that run it in a thread; without them, `is_paged` refuses in the thread.
_CONTINUOUS = ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager")


def runs_in_a_thread(method: str) -> bool:
    """Whether this method of a model runs it in a thread, which catches all exceptions."""
    return method in _CONTINUOUS


# ---- Pipelines (pp_size). Without them FlexModel refuses the model: its ranks are on no mesh -----


def pipeline_stage(model: Any) -> Any:
    """Return what transformers keeps of the stage into which it split a model, or None. It has
    ``pp_rank``, ``pp_size``, ``pp_group``, ``pp_is_first_stage``, ``pp_is_last_stage``, and the
    methods ``communicate`` and ``broadcast_from_last``.
    """
    return getattr(model, "__dict__", {}).get("_pp_stage")


def stand_ins() -> tuple[type[nn.Module], ...]:
    """Return the classes of what stands in for the modules of other stages."""
    module: Any = sys.modules.get("transformers.distributed.pipeline_parallel")
    return () if module is None else (module.PipelineIdentityLayer,)


# ---- Sharded models ------------------------------------------------------------------------------


def device_mesh(module: nn.Module) -> dist.DeviceMesh | None:
    """Return the mesh that ``from_pretrained(distributed_config=...)`` keeps on a model. Without
    it, the DTensor parameters provide the mesh.
    """
    mesh = vars(module).get("_device_mesh")
    return mesh if isinstance(mesh, dist.DeviceMesh) else None


def sums_gradient(hook: Any) -> bool:
    """Whether a hook on an accumulated gradient sums it over the tensor-parallel ranks, which have
    parts of it (norms of heads). Without its name, hooks on the gradients of such parameters are
    refused under FSDP2.
    """
    name = f"{getattr(hook, '__module__', '')}.{getattr(hook, '__name__', '')}"
    return name == "transformers.distributed.tensor_parallel._all_reduce_grad"


# ---- Dtypes --------------------------------------------------------------------------------------


def set_dtypes(model: Any, dtype: torch.dtype) -> None:
    """Give a model that was built in a dtype the tensors of ``from_pretrained(dtype=...)``, which
    leaves some in float32, as classes state. Without the name it fails.
    """
    plan = model._get_dtype_plan(dtype)
    for name, tensor in model.state_dict(keep_vars=True).items():
        for pattern, stated in plan.items():
            if re.search(pattern.replace("*", ".*"), name) and tensor.is_floating_point():
                tensor.data = tensor.data.to(stated)


# ---- Tables that the process keeps ---------------------------------------------------------------


def clear_tables(model: nn.Module) -> None:
    """Empty the caches of functions in which modeling files keep tables of positions and anchors,
    so that the next forward computes them. A table in a cache that is not found is refused where an
    earlier forward made it.
    """
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    for file in {kind.__module__ for kind in kinds}:
        if file.startswith("transformers.models."):
            for function in _cached_functions(file):
                function.cache_clear()


@functools.cache
def _cached_functions(file: str) -> list[Any]:
    """Those that a file defines, at its top or in classes; a decorator may stand over the cache."""
    top = vars(sys.modules[file])
    classes = [vars(one) for one in top.values() if isinstance(one, type)]
    found = [getattr(one, "__func__", one) for space in (top, *classes) for one in space.values()]
    for one in found[:]:
        if hasattr(one, "__wrapped__") and getattr(one, "__closure__", None):
            found += [cell.cell_contents for cell in one.__closure__]
    own = [one for one in found if callable(one) and getattr(one, "__module__", None) == file]
    return [one for one in own if hasattr(one, "cache_clear")]


# ---- Experts -------------------------------------------------------------------------------------


def is_experts(module: nn.Module) -> bool:
    """Whether ``use_experts_implementation`` decorates the module's class. Without its module, the
    rows behind experts are not known along dp.
    """
    forward = getattr(type(module), "forward", None)
    names = getattr(forward, "__globals__", {})
    return names.get("__name__") == "transformers.integrations.moe"


def is_expert_parallel(module: nn.Module) -> bool:
    """Whether these are experts, some of which are on other ranks. Without the name, what they do
    with other ranks is followed, and not known.
    """
    return is_experts(module) and bool(getattr(module, "_is_expert_parallel", False))


def experts_implementation(config: Any) -> str | None:
    """Return the name of the function that experts with this configuration look up at each call.
    Without it ``flex.experts`` refuses them.
    """
    return getattr(config, "_experts_implementation", "unknown")


def with_experts_implementation(config: Any, name: str) -> Any:
    """Return a copy of a configuration by which experts look up another function."""
    copied = copy.deepcopy(config)
    copied._experts_implementation = name
    return copied


def register_experts_implementation(name: str, function: Any) -> None:
    """Make a function known to experts, whose module is imported: they are of it."""
    sys.modules["transformers.integrations.moe"].ExpertsInterface.register(name, function)


def gate_of(block: nn.Module) -> tuple[nn.Module, int] | None:
    """Return the module that chooses among the experts of a block, and their number; None: there is
    none. It returns logits, weights and indices. Under another name the block has no routing.
    """
    children = dict(block.named_children())
    experts: list[Any] = [child for child in children.values() if is_experts(child)]
    gate: Any = children.get("gate", children.get("router"))
    if gate is None or len(experts) != 1:
        return None
    return gate, getattr(gate, "num_experts", None) or experts[0].num_experts


def may_be_a_kernel(block: nn.Module) -> bool:
    """Whether a block of experts has the forward of a kernel (of the hub, which puts it on the
    module, or of mxfp4), which reads the weights of its gate and experts and calls neither.
    """
    children = dict(block.named_children())
    if "experts" not in children or not ("gate" in children or "router" in children):
        return False
    return "forward" in vars(block) or type(block).__name__.startswith("Mxfp4")


# ---- Attention -----------------------------------------------------------------------------------


def attention_implementation(config: Any) -> str | None:
    """Return the name of the attention function that layers with this configuration look up.
    Without it the layers are refused.
    """
    return getattr(config, "_attn_implementation", None)


def runs_flash_attention(implementation: str | None) -> bool:
    """Whether the attention function of this name takes the masks of flash attention: its package,
    or a kernel from the hub.
    """
    return (
        implementation is not None and "flash" in implementation and "paged" not in implementation
    )


def set_attention_implementation(config: Any, name: str) -> None:
    """Make layers with this configuration look up another attention function, of any name."""
    config._attn_implementation = name


# ---- Kernels. Without these functions what is behind them is not known ---------------------------

_KERNELS = {
    "flash_attention": ("modeling_flash_attention_utils", "_flash_attention_forward"),
    "fp8_linear": ("integrations.finegrained_fp8", "fp8_linear"),
}


def kernels() -> Iterator[tuple[Any, str, str]]:
    """Yield the functions that run kernels: each module that looks one up, its name there, and
    ours.
    """
    imported = [one for name, one in [*sys.modules.items()] if name.startswith("transformers.")]
    for own, (place, name) in _KERNELS.items():
        function = getattr(sys.modules.get(f"transformers.{place}"), name, None)
        for module in imported if function is not None else ():
            if vars(module).get(name) is function:
                yield module, name, own

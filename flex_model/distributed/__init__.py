"""How the ranks of a model talk to each other, and release 0.1.0's names for it.

``import flex_model.distributed as fm_dist`` gives 0.1.0's functions and classes. They are looked up
when first used, since every part of the package imports this one.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flex_model.distributed.mappings import (
        all_gather_data_parallel,
        all_gather_tensor_parallel,
        broadcast_data_parallel,
        broadcast_tensor_parallel,
        scatter_data_parallel,
        scatter_tensor_parallel,
        unity,
    )
    from flex_model.distributed.stages import (
        batch_isend_irecv_pipeline_parallel,
        gather_pipeline_parallel_tensor_dicts,
    )
    from flex_model.distributed.state import ParallelState, initialize_distributed_state
    from flex_model.distributed.strategies import (
        ActivationTensorAllToAllRoutingStrategy,
        BaseFunctionStrategy,
        BaseOffloadStrategy,
        BaseRoutingStrategy,
        CPUPagedMemoryOffloadStrategy,
        CPUPinnedMemoryOffloadStrategy,
        GPUMemoryOffloadStrategy,
        NonValidatedFunctionStrategy,
        NullMemoryOffloadStrategy,
        ParameterTensorParallelRoutingStrategy,
    )

__all__ = [
    "ActivationTensorAllToAllRoutingStrategy",
    "BaseFunctionStrategy",
    "BaseOffloadStrategy",
    "BaseRoutingStrategy",
    "CPUPagedMemoryOffloadStrategy",
    "CPUPinnedMemoryOffloadStrategy",
    "GPUMemoryOffloadStrategy",
    "NonValidatedFunctionStrategy",
    "NullMemoryOffloadStrategy",
    "ParallelState",
    "ParameterTensorParallelRoutingStrategy",
    "all_gather_data_parallel",
    "all_gather_tensor_parallel",
    "batch_isend_irecv_pipeline_parallel",
    "broadcast_data_parallel",
    "broadcast_tensor_parallel",
    "gather_pipeline_parallel_tensor_dicts",
    "initialize_distributed_state",
    "scatter_data_parallel",
    "scatter_tensor_parallel",
    "unity",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_module_of(name)}"), name)
    globals()[name] = value
    return value


def _module_of(name: str) -> str:
    if name in ("ParallelState", "initialize_distributed_state"):
        return "state"
    if name.endswith("Strategy"):
        return "strategies"
    return "stages" if "pipeline_parallel" in name else "mappings"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if os.environ.get(
    "FLEXMODEL_DEBUG"
):  # here, since whatever is imported of the package imports this
    from flex_model.utils import setup_logger

    setup_logger(os.environ["FLEXMODEL_DEBUG"])

"""Communication between the ranks of a model, and the import path of release 0.1.0's functions.

``import flex_model.distributed as fm_dist`` gives the functions and classes of 0.1.0, which are
written in ``flex_model.compat``.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flex_model.compat.mappings import *  # noqa: F403
    from flex_model.compat.parallel_state import *  # noqa: F403
    from flex_model.compat.stage_transfers import *  # noqa: F403
    from flex_model.compat.strategies import *  # noqa: F403

_MODULES = {
    "ActivationTensorAllToAllRoutingStrategy": "strategies",
    "BaseFunctionStrategy": "strategies",
    "BaseOffloadStrategy": "strategies",
    "BaseRoutingStrategy": "strategies",
    "CPUPagedMemoryOffloadStrategy": "strategies",
    "CPUPinnedMemoryOffloadStrategy": "strategies",
    "GPUMemoryOffloadStrategy": "strategies",
    "NonValidatedFunctionStrategy": "strategies",
    "NullMemoryOffloadStrategy": "strategies",
    "ParallelState": "parallel_state",
    "ParameterTensorParallelRoutingStrategy": "strategies",
    "all_gather_data_parallel": "mappings",
    "all_gather_tensor_parallel": "mappings",
    "batch_isend_irecv_pipeline_parallel": "stage_transfers",
    "broadcast_data_parallel": "mappings",
    "broadcast_tensor_parallel": "mappings",
    "gather_pipeline_parallel_tensor_dicts": "stage_transfers",
    "initialize_distributed_state": "parallel_state",
    "scatter_data_parallel": "mappings",
    "scatter_tensor_parallel": "mappings",
    "unity": "mappings",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    # Not imported above: the modules of `compat` import those of this package.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"flex_model.compat.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

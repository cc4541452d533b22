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

_NAMES = {
    "mappings": (
        "all_gather_data_parallel all_gather_tensor_parallel broadcast_data_parallel "
        "broadcast_tensor_parallel scatter_data_parallel scatter_tensor_parallel unity"
    ),
    "parallel_state": "ParallelState initialize_distributed_state",
    "stage_transfers": "batch_isend_irecv_pipeline_parallel gather_pipeline_parallel_tensor_dicts",
    "strategies": (
        "ActivationTensorAllToAllRoutingStrategy BaseFunctionStrategy BaseOffloadStrategy "
        "BaseRoutingStrategy CPUPagedMemoryOffloadStrategy CPUPinnedMemoryOffloadStrategy "
        "GPUMemoryOffloadStrategy NonValidatedFunctionStrategy NullMemoryOffloadStrategy "
        "ParameterTensorParallelRoutingStrategy"
    ),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    # Not imported above: the modules of `compat` import those of this package.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"flex_model.compat.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""See and edit the full, unsharded activations, gradients and parameters of a model that runs
sharded.
"""

import importlib
import os
from typing import Any

from flex_model._load import build_info, load

load()

from flex_model import pytree
from flex_model.compat.dummy_module import DummyModule
from flex_model.errors import HookError, HookMismatchError, HookNotCalledWarning, TraceError
from flex_model.fingerprints import Comparison, Difference, compare
from flex_model.hooks.function import HookFunction
from flex_model.model import FlexModel
from flex_model.records.store import ActivationStore
from flex_model.selection import Select

__version__ = "1.0.0"

__all__ = [
    "ActivationStore",
    "Comparison",
    "Difference",
    "DummyModule",
    "FlexModel",
    "HookError",
    "HookFunction",
    "HookMismatchError",
    "HookNotCalledWarning",
    "Select",
    "TraceError",
    "build_info",
    "compare",
    "pytree",
]

# Imported at the first use of one as an attribute.
_PACKAGES = {"core", "editing", "notebook", "pipelining", "sequential", "traverse", "utils"}


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"flex_model.{name}")
    raise AttributeError(f"module 'flex_model' has no attribute {name!r}")


if os.environ.get("FLEXMODEL_DEBUG"):  # as in 0.1.0
    from flex_model.utils import setup_logger

    setup_logger(os.environ["FLEXMODEL_DEBUG"])

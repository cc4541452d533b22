"""Release 0.1.0's import path: ``from flex_model.core import FlexModel, HookFunction,
DummyModule``.
"""

from flex_model.compat.dummy_module import DummyModule
from flex_model.hooks.function import HookFunction
from flex_model.model import FlexModel

__all__ = ["DummyModule", "FlexModel", "HookFunction"]

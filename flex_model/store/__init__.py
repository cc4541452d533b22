"""The public import path of ``ActivationStore``."""

from flex_model.records.store import ActivationStore

__all__ = ["ActivationStore"]

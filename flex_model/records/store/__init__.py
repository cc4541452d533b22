"""Records on disk: written as runs go on, by the ranks that hold them; read in full anywhere."""

from flex_model.records.store.activation_store import ActivationStore

__all__ = ["ActivationStore"]

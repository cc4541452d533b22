"""Records on disk: each rank writes its shards during runs; any process reads full tensors."""

from flex_model.records.store.activation_store import ActivationStore

__all__ = ["ActivationStore"]

"""Sequential runs: a model over a data set, target by target, with hooks and edits."""

from flex_model.sequential.runner import RunResult, run
from flex_model.sequential.store import ActivationStore
from flex_model.sequential.targets import match_modules
from flex_model.sequential.weights import CheckpointWeights, DictWeights, WeightSource

__all__ = [
    "ActivationStore",
    "CheckpointWeights",
    "DictWeights",
    "RunResult",
    "WeightSource",
    "match_modules",
    "run",
]

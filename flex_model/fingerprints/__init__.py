"""Fingerprints of runs: where two runs first differ, whatever the sharding of each."""

from flex_model.fingerprints.comparison import Comparison, compare
from flex_model.fingerprints.first_difference import Difference

__all__ = ["Comparison", "Difference", "compare"]

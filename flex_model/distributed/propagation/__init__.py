"""How one operation passes a split on: from the placements of its inputs along one mesh axis to
those of its outputs.

A rule never guesses. What it can't tell is None, "not known", which the ranks' values must settle,
or else the user. Shapes here are local ones (of DTensors: global ones, which their ``view`` sizes
are of); where a rule needs to know which dim of the output a dim of an input becomes, it runs the
operation on the meta device with that dim twice as long.
"""

from flex_model.distributed.propagation.operands import AxisPlace, Cut, Split
from flex_model.distributed.propagation.reshaping import reshaped
from flex_model.distributed.propagation.rules import after

__all__ = ["AxisPlace", "Cut", "Split", "after", "reshaped"]

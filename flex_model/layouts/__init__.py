"""The placements of a model's tensors over the ranks, proven by propagation or stated by the
user.
"""

from flex_model.layouts.contracts.functions import register_function
from flex_model.layouts.propagation.rules import register_rule

__all__ = ["register_function", "register_rule"]

"""Propagates placements through operations, one mesh axis at a time."""

from flex_model.layouts.propagation.rules import has_rule, propagate, register_rule

__all__ = ["has_rule", "propagate", "register_rule"]

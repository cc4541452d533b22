"""Which part of the full tensor each rank holds: proofs by propagation, statements, and memory."""

from flex_model.layouts.propagation.rules import register_rule

__all__ = ["register_rule"]

"""Release 0.1.0's names for :mod:`flex_model.pytree`."""

from flex_model.traverse.nodes import (
    InternalNode,
    InternalObject,
    LeafNode,
    LeafObject,
    ScalarNode,
    ScalarObject,
)
from flex_model.traverse.ops import flatten, unflatten

__all__ = [
    "InternalNode",
    "InternalObject",
    "LeafNode",
    "LeafObject",
    "ScalarNode",
    "ScalarObject",
    "flatten",
    "unflatten",
]

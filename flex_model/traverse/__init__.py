"""Release 0.1.0's import path of its names for :mod:`flex_model.pytree`."""

from flex_model.compat.traverse import (
    InternalNode,
    InternalObject,
    LeafNode,
    LeafObject,
    ScalarNode,
    ScalarObject,
    flatten,
    unflatten,
)

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

"""Release 0.1.0's import path of the node classes and of their registration."""

from flex_model.compat.traverse import (  # noqa: F401
    InternalNode,
    InternalObject,
    LeafNode,
    LeafObject,
    ScalarNode,
    ScalarObject,
    register_internal_node_type,
    register_leaf_node_type,
)

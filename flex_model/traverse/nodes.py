"""Release 0.1.0's import path of the node classes and of their registration."""

from flex_model.traverse import *  # noqa: F403
from flex_model.traverse import register_internal_node_type, register_leaf_node_type  # noqa: F401

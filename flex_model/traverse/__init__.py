"""Release 0.1.0's names for :mod:`flex_model.pytree`; a container is registered by a node class.

Example::

    @register_internal_node_type(Box)
    class BoxNode(InternalNode):
        def flatten(self, instance):
            return (instance.tensor,)

        def unflatten(self, children):
            return Box(*children)
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from flex_model import _C, pytree

__all__ = ["InternalNode", "LeafNode", "flatten", "unflatten"]
__all__ += ["InternalObject", "LeafObject", "ScalarNode", "ScalarObject"]

InternalObject = Any
LeafObject = Any
ScalarObject = Any
ScalarNode = Any

Node = TypeVar("Node", bound=type)

_registered: set[type] = set()  # by a node class


def flatten(root_obj: Any) -> tuple[pytree.TreeSpec, list[Any]]:
    """Return ``(treedef, leaves)``: see :func:`flex_model.pytree.flatten`.

    Treedefs compare with ``==``. More is opened than in 0.1.0, which knew tuple, list and
    ``BaseModelOutputWithPast``, and took parameters for constants.

    Example::

        treedef, leaves = flatten(output)
        output = unflatten(treedef, [leaf * 2 for leaf in leaves])
    """
    leaves, spec = pytree.flatten(root_obj)
    return spec, leaves


def unflatten(root_node: pytree.TreeSpec, leaves: Iterable[Any]) -> Any:
    """Build the object of a treedef: see :func:`flex_model.pytree.unflatten`.

    Raises:
        ValueError: The number of leaves is not the treedef's (0.1.0 ignored extra ones).
        TypeError: ``root_node`` is not a treedef.
    """
    return pytree.unflatten(leaves, root_node)


@dataclass(repr=False)
class InternalNode:
    """How to open a container and build it again. Subclasses define both methods.

    One node is made for each container that is opened, and the same node rebuilds it: what
    ``flatten`` leaves on it is there in ``unflatten``. Nodes are equal when their class is, and
    their ``children``, which only users set.
    """

    children: list[Any] = field(default_factory=list)

    def flatten(self, instance: Any) -> Iterable[Any]:
        """Return the children of a container."""
        raise NotImplementedError(f"{type(self).__name__} must define flatten(self, instance)")

    def unflatten(self, children: Iterable[Any]) -> Any:
        """Return a container with these children."""
        raise NotImplementedError(f"{type(self).__name__} must define unflatten(self, children)")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.children})"


@dataclass(repr=False)
class LeafNode:
    """A node that stands for a leaf; equal to any other of its class with the same ``val``."""

    val: Any = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}<{self.val}>"


def register_internal_node_type(internal_node_type: type) -> Callable[[Node], Node]:
    """Return a class decorator: instances of exactly this type are opened by the node class.

    Registering again replaces the node class, as in 0.1.0. Tuple, list and dict cannot be.

    Raises:
        ValueError: A built-in type, or one registered with :func:`flex_model.pytree.register`.
        TypeError: Not a class.
    """

    def decorate(node_class: Node) -> Node:
        def flatten(instance: Any) -> tuple[Iterable[Any], InternalNode]:
            node = node_class()
            return node.flatten(instance), node

        _unregister(internal_node_type)
        pytree.register(internal_node_type, flatten, lambda leaves, node: node.unflatten(leaves))
        _registered.add(internal_node_type)
        return node_class

    return decorate


def register_leaf_node_type(leaf_node_type: type) -> Callable[[Node], Node]:
    """Return a class decorator: instances of exactly this type are leaves, as tensors are.

    The class only marks the type: a treedef does not hold leaf nodes.

    Raises:
        ValueError: A built-in type, or one registered with :func:`flex_model.pytree.register`.
    """

    def decorate(node_class: Node) -> Node:
        if not issubclass(leaf_node_type, Tensor):
            _unregister(leaf_node_type)
            pytree._check_type("register_leaf_node_type", leaf_node_type)
            _C.register_leaf(leaf_node_type)
            _registered.add(leaf_node_type)
        return node_class

    return decorate


def _unregister(type: type) -> None:
    """Make room for another node class; what others registered stays, and is refused."""
    if type in _registered:
        _registered.remove(type)
        with suppress(ValueError):  # unregistered meanwhile
            pytree.unregister(type)

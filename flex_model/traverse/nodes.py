"""Release 0.1.0's way to register a container: a node class. It ends in the registry of `pytree`.

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
from typing import Any, TypeVar

from torch import Tensor

from flex_model import _C, pytree

InternalObject = Any
LeafObject = Any
ScalarObject = Any
ScalarNode = Any

Node = TypeVar("Node", bound=type)

_registered: dict[type, type] = {}


class InternalNode:
    """How to open a container and build it again. Subclasses define both methods.

    One node is made for each container that is opened, and the same node rebuilds it: what
    ``flatten`` leaves on it is there in ``unflatten``. Nodes are equal when their class is, and
    their ``children``, which only users set.
    """

    def __init__(self, children: list[Any] | None = None) -> None:
        self.children = [] if children is None else children

    def flatten(self, instance: Any) -> Iterable[Any]:
        """Return the children of a container."""
        raise NotImplementedError(f"{type(self).__name__} must define flatten(self, instance)")

    def unflatten(self, children: Iterable[Any]) -> Any:
        """Return a container with these children."""
        raise NotImplementedError(f"{type(self).__name__} must define unflatten(self, children)")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, InternalNode):
            return NotImplemented
        return type(self) is type(other) and self.children == other.children

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.children})"


class LeafNode:
    """Stands for a leaf; equal to any other node of its class with the same ``val``."""

    def __init__(self, val: Any = None) -> None:
        self.val = val

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LeafNode):
            return NotImplemented
        return type(self) is type(other) and self.val == other.val

    __hash__ = None  # type: ignore[assignment]

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

        _forget(internal_node_type)
        pytree.register(internal_node_type, flatten, _rebuild)
        _registered[internal_node_type] = node_class
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
            _forget(leaf_node_type)
            pytree._check_type("register_leaf_node_type", leaf_node_type)
            _C.register_leaf(leaf_node_type)
            _registered[leaf_node_type] = node_class
        return node_class

    return decorate


def _rebuild(children: list[Any], node: InternalNode) -> Any:
    return node.unflatten(children)


def _forget(type: type) -> None:
    if _registered.pop(type, None) is not None:
        with suppress(ValueError):  # unregistered meanwhile
            pytree.unregister(type)

"""Flatten and unflatten with release 0.1.0's argument order."""

from collections.abc import Iterable
from typing import Any

from flex_model import pytree


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

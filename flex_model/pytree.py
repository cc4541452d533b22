"""Pytrees of module outputs: flatten, unflatten, find or replace a tensor, register a container.

Example::

    from flex_model import pytree

    leaves, spec = pytree.flatten(model(**batch))  # any output: tuple, dict, ModelOutput, cache...
    output = pytree.unflatten([leaf * 2 for leaf in leaves], spec)

    hidden = pytree.leaf_at(output, 0)  # tensors are counted depth first
    output = pytree.replace_leaf(output, 0, hidden + 1)  # everything else is the same object

Leaves are tensors, with all subclasses of ``torch.Tensor``. Containers are

- tuple, list, dict, OrderedDict, defaultdict (in insertion order), named tuples,
  ``torch.return_types``, and other subclasses of tuple, list and dict;
- dataclasses (their fields), UserDict and UserList (their data);
- Hugging Face's model outputs, and caches (their public attributes, counters left out);
- types registered with :func:`register`, then types registered with ``torch.utils._pytree``.

A container is rebuilt with its own type, and everything that is not a child (other attributes,
slots, the default factory) is carried over. Its ``__new__``, ``__init__``, ``__post_init__`` and
setters do not run, unless the type is registered. A subclass of a registered type does not inherit
the registration, since the unflatten function would return the base: it is flattened by its
structure. Everything else is a constant, kept by identity.

The traversal works on a snapshot of each container, so user code that changes a container meanwhile
does not affect it. Types are cached weakly; a registration lasts until :func:`unregister`.

The order of lookup is in ``csrc/engine/pytree/registry.h``.
"""

import dataclasses
import inspect
from collections import OrderedDict, UserDict, UserList, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.utils._pytree

from flex_model import _C
from flex_model._C import TreeSpec, flatten, leaf_at, num_leaves, replace_leaf, unflatten

__all__ = [
    "TreeSpec",
    "flatten",
    "leaf_at",
    "leaf_names",
    "num_leaves",
    "register",
    "replace_leaf",
    "unflatten",
    "unregister",
]

_with_counters = ContextVar("whether counters of caches are opened", default=False)
BUILT_IN = (tuple, list, dict, type(None), bool, int, float, str)


def register(
    type: type,
    flatten: Callable[[Any], tuple[Iterable[Any], Any]],
    unflatten: Callable[[list[Any], Any], Any],
) -> None:
    """Flatten and unflatten instances of exactly this type with these functions.

    Takes precedence over everything else, including registrations with ``torch.utils._pytree``.

    Example::

        pytree.register(
            Box,
            flatten=lambda box: ((box.tensor, box.extras), box.name),
            unflatten=lambda children, name: Box(*children, name=name),
        )

    Args:
        type: A class; not a subclass of ``torch.Tensor``, nor a type of literals (list, int...).
        flatten: Returns ``(children, context)``. Children may be containers; the context is
            kept, and compared with ``==`` when specs are.
        unflatten: Takes a list of children, in the same order, and the context.

    Raises:
        TypeError: Not a class, or not functions.
        ValueError: Registered before, or a type that cannot be.
    """
    _check_type("register", type)
    for role, function in (("flatten", flatten), ("unflatten", unflatten)):
        if not callable(function):
            raise TypeError(
                f"register: {role} must be a function, got {function!r}; "
                "pass register(type, flatten, unflatten)"
            )
    _C.register_container(type, flatten, unflatten)


def unregister(type: type) -> None:
    """Remove the registration of a type. Specs made before still work.

    Example::

        pytree.unregister(Box)

    Raises:
        TypeError: Not a class.
        ValueError: Not registered.
    """
    if not inspect.isclass(type):
        raise TypeError(f"unregister: expected a class, got {type!r}; pass the registered type")
    _C.unregister(type)


def leaf_names(tree: Any) -> dict[str, int]:
    """Return the numbers of the tensors by their names, which are what leads to them: keys of
    dicts, fields and attributes, numbers in a tuple or list, with dots between them.

    Example::

        pytree.leaf_names({"x": tensor, "pair": (None, other)})  # {"x": 0, "pair.1": 1}
        pytree.leaf_names(model(**batch))  # {"logits": 0, "cache.layers.0.keys": 1, ...}

    A tensor that is the whole tree has the name ``""``. What a registered type holds has a name
    where its attributes hold it. Of tensors of one name the first counts.
    """
    leaves, spec = flatten(tree)
    # Each leaf is another tensor: one may be there twice.
    marks = [torch.empty(0, device="cpu") for _ in leaves]
    numbers = {id(mark): number for number, mark in enumerate(marks)}
    found: dict[str, int] = {}
    for name, mark in _named("", unflatten(marks, spec)):
        if mark in numbers:
            found.setdefault(name, numbers[mark])
    return found


def _named(name: str, tree: Any) -> Iterator[tuple[str, int]]:
    if isinstance(tree, torch.Tensor):
        yield name, id(tree)
        return
    if num_leaves(tree) == 0:
        return
    items: Iterable[tuple[Any, Any]]
    if isinstance(tree, Mapping):
        items = tree.items()
    elif isinstance(tree, Sequence):
        items = zip(getattr(tree, "_fields", ()) or range(len(tree)), tree)
    elif dataclasses.is_dataclass(tree):
        items = [(one.name, getattr(tree, one.name, None)) for one in dataclasses.fields(tree)]
    else:
        items = getattr(tree, "__dict__", {}).items()
    for key, child in items:
        yield from _named(f"{name}.{key}" if name else str(key), child)


def copied(tree: Any, twin_of: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of a tree with ``twin_of(tensor)`` in place of each tensor, and of each token
    counter of a cache, which a forward changes in place. A tensor that is there twice has one twin.
    """
    token = _with_counters.set(True)
    try:
        leaves, spec = flatten(tree)
    finally:
        _with_counters.reset(token)
    twins = {id(leaf): twin_of(leaf) for leaf in leaves}
    return unflatten([twins[id(leaf)] for leaf in leaves], spec)


def _check_type(operation: str, type: type) -> None:
    if not inspect.isclass(type):
        raise TypeError(f"{operation}: expected a class, got {type!r}; pass the container's type")
    if type in BUILT_IN or issubclass(type, torch.Tensor):
        kind = "a leaf" if issubclass(type, torch.Tensor) else "built in"
        raise ValueError(
            f"{operation}: {type.__name__} is {kind} and cannot be registered; "
            "expected a container's type, register a subclass of your own"
        )


def _describe(type: type) -> tuple[Any, bool] | None:
    """Return (attributes that hold children, whether this precedes torch's registration), or None.

    The attributes are a tuple of names, or a function of the object that returns one; attributes
    that an object lacks are skipped. Items of tuples, lists and dicts are always children. Classes
    of libraries are recognized by name, so that no library is imported.
    """
    if type in (OrderedDict, defaultdict):
        return None, True
    bases = type.__mro__
    names = [base.__name__ for base in bases if _is_from(base, "transformers", "diffusers")]
    if "ModelOutput" in names or "BaseOutput" in names:
        return None, True  # a dict with synchronized attributes; torch's would run __post_init__
    if any(name.endswith(("Cache", "CacheLayer", "CacheLayerMixin")) for name in names):
        return _cache_attributes, True
    if any(isinstance(vars(base).get("__dataclass_fields__"), dict) for base in bases):
        return tuple(field.name for field in dataclasses.fields(type)), False
    if issubclass(type, (UserDict, UserList)):
        return ("data",), False
    return None


def _is_from(type: type, *packages: str) -> bool:
    return str(type.__module__).partition(".")[0] in packages


def _cache_attributes(cache: Any) -> tuple[str, ...]:
    """Return the attributes of a Hugging Face cache or cache layer, except its token counters."""
    suffix = () if _with_counters.get() else "cumulative_length"
    return tuple(
        name for name in vars(cache) if not name.startswith("_") and not name.endswith(suffix)
    )


_C.set_type_sources(_describe, getattr(torch.utils._pytree, "SUPPORTED_NODES", {}))
_C.set_leaf_type(torch.Tensor)

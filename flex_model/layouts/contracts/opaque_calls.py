"""Kernels that are no operations of torch, whose calls are contracts: see `kernel_rules`.

A call of one is followed as one operation of each rank alone, with the arguments of its
signature; nothing inside is seen, and gradients pass as through an operation of torch. Its name is

- ``kernel::package.Class`` for an ``autograd.Function``, in whichever module of the package, or
  ``kernel::module.Class`` for one of the user's;
- ``kernel::package.function`` for functions that `transformers_private.kernels` finds, and for
  ``F.embedding_bag``, which makes the places where a rank's own bags begin.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from flex_model.integrations import transformers_private

PREFIX = "kernel::"


def functions() -> Iterator[tuple[Any, str, str]]:
    """Yield the functions with a contract: a module that looks it up, its name there, and that of
    the contract.
    """
    for module, name, contract in transformers_private.kernels():
        yield module, name, f"{PREFIX}transformers.{contract}"
    yield torch.nn.functional, "embedding_bag", f"{PREFIX}torch.embedding_bag"


def names_of(function: Any, name: str) -> tuple[str, str]:
    """Return the names that the contract of an ``autograd.Function`` of this qualified name may
    have: a user's, ours.
    """
    module = function.__module__
    package = module.partition(".")[0]
    return f"{PREFIX}{name}", f"{PREFIX}{package}{name.removeprefix(module)}"


def arguments_of(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name, without the ``ctx`` of a Function."""
    names = [name for name in inspect.signature(function).parameters if name != "ctx"]
    return {**dict(zip(names, args)), **kwargs}


def schema_of(name: str, entries: Sequence[Any]) -> SimpleNamespace:
    """Return the schema of a logged call, whose arguments all have names."""
    names = sorted({argument for entry in entries for argument, _ in entry.kwargs})
    arguments = [SimpleNamespace(name=one, default_value=None) for one in names]
    return SimpleNamespace(name=name, arguments=arguments, is_mutable=False)

"""Finds hooks whose module, or parameter, was replaced in the model: they would never be called."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

from torch import nn

from flex_model.errors import see
from flex_model.hooks.registration import Registration
from flex_model.integrations import fsdp2

_Place = tuple[dict[str, Any], str, Any]


class Targets:
    """The places in a model of the modules and parameters that have hooks.

    A hook belongs to a module, not to its name: where a module is replaced
    (``resize_token_embeddings``), the hooks stay at the old one. Where it is only wrapped (FSDP1,
    an adapter), they are still called.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._hooks: tuple[int, int] | None = None  # which hooks were looked for
        # The dicts in which the hooked modules, those around them, and the parameters are found;
        # the keys there, and the values.
        self._places: tuple[Sequence[Any], ...] = (), (), ()
        self._gone: list[Registration] = []

    def gone(self, registrations: Sequence[Registration]) -> list[Registration]:
        """Return those of the registered hooks whose module or parameter is not in the model any
        more. Local. Every run calls it, so the model is only searched after a change.
        """
        hooks = len(registrations), registrations[-1].index if registrations else 0
        dicts, keys, values = self._places
        are_there = map(operator.is_, map(dict.get, dicts, keys), values)
        if hooks != self._hooks or not all(are_there):
            self._hooks = hooks
            self._search(registrations)
        return self._gone

    def _search(self, registrations: Sequence[Registration]) -> None:
        paths = _paths(self._root)
        places: dict[tuple[int, str], _Place] = {}
        managed = fsdp2.managed_parameters(self._root)
        self._gone = []
        for registration in registrations:
            # Some are on other ranks; FSDP exchanges the parameters in every forward.
            targets = registration.living_targets
            is_exchanged = not managed.keys().isdisjoint(map(id, targets))
            if not registration.targets or registration.moment == "gathered" or is_exchanged:
                continue
            found = [paths[id(t)] for t in targets if id(t) in paths]
            if not found:
                self._gone.append(registration)
            for place in itertools.chain(*found):
                places[id(place[0]), place[1]] = place
        self._places = tuple(zip(*places.values(), strict=True)) or ((), (), ())


def refusal(registration: Registration) -> str:
    """Return the error text for a hook that ``Targets.gone`` has found."""
    name, is_parameter = registration.clean_name, registration.kind == "tensor"
    what = "parameter" if is_parameter else "module"
    return (
        f"{registration.describe()}: the {what} that it was registered at is not in the model any "
        f"more (resize_token_embeddings, for one, replaces some), so the hook would not be called; "
        f"remove the hook, and register it again at the {what} that is {name!r} now "
        f"({see('a-module-was-replaced')})"
    )


def _paths(root: nn.Module) -> dict[int, tuple[_Place, ...]]:
    """Return the way from the root to each module and parameter, by its id."""
    paths: dict[int, tuple[_Place, ...]] = {id(root): ()}

    def walk(module: nn.Module, path: tuple[_Place, ...]) -> None:
        for held in (module._parameters, module._modules):
            for key, value in held.items():
                if value is not None and id(value) not in paths:
                    is_dict = isinstance(held, dict)  # not in a ScriptModule
                    paths[id(value)] = (*path, (held, key, value)) if is_dict else path
                    if isinstance(value, nn.Module):
                        walk(value, paths[id(value)])

    walk(root, ())
    return paths

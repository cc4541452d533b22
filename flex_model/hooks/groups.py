"""Named groups of hooks. Every registered hook is in "all"."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Sequence

from flex_model._C import Hook
from flex_model.errors import nearest
from flex_model.hooks.function import HookFunction
from flex_model.hooks.registration import Registration

ALL = "all"

Members = Sequence[HookFunction] | HookFunction | str | re.Pattern


class HookGroups:
    """The names of groups and the hooks in them; the dispatcher keeps the sets by number.

    A group that lost its last hook stays, empty: choosing it chooses no hook.
    """

    def __init__(self) -> None:
        self._ids: dict[str, int] = {ALL: 0}
        # A function on several tensors of a site has a registration for each.
        self._registrations: dict[HookFunction, Sequence[Registration]] = {}
        self._alike: dict[object, list[Registration]] = {}

    def add(
        self,
        function: HookFunction,
        registrations: Sequence[Registration],
        groups: Iterable[str] = (),
    ) -> None:
        self._registrations[function] = registrations
        for registration in registrations:
            for key in _keys(registration):
                self._alike.setdefault(key, []).append(registration)
        vars(self).pop("registrations", None)
        for group in (ALL, *groups):
            self._tag(function, self._make(group))

    def _tag(self, function: HookFunction, number: int) -> None:
        for registration in self._registrations[function]:
            registration.hook.tag(number)

    def discard(self, function: HookFunction) -> None:
        for registration in self._registrations.pop(function, ()):
            for key in _keys(registration):
                self._alike[key].remove(registration)
                if not self._alike[key]:
                    del self._alike[key]
        vars(self).pop("registrations", None)

    @functools.cached_property
    def registrations(self) -> Sequence[Registration]:
        """All registrations, in the order in which they were made."""
        return tuple(itertools.chain.from_iterable(self._registrations.values()))

    def alike(self, key: object) -> Sequence[Registration]:
        """Return the registrations at one place (``Registration.place_of``), or those that record
        under one name, in the order in which they were made.
        """
        return self._alike.get(key, ())

    def _make(self, group: str) -> int:
        return self._ids.setdefault(group, len(self._ids))

    def ids(self, groups: str | Iterable[str], strict: bool = True) -> list[int]:
        """Return the numbers of groups. An unknown one is a ValueError with the nearest names, or
        left out if not ``strict``.
        """
        return [self._id(group) for group in as_names(groups) if strict or group in self._ids]

    def _id(self, group: str) -> int:
        check_name(group)
        if group not in self._ids:
            raise ValueError(
                f"there is no hook group {group!r}; {nearest(group, self._ids, 'group')}"
            )
        return self._ids[group]

    def of(self, hook_function: HookFunction) -> set[str]:
        """Return the names of a hook's groups. ValueError if it is not registered here."""
        hook = self._hook(hook_function)
        return {group for group, number in self._ids.items() if hook.has(number)}

    def _hook(self, hook_function: HookFunction) -> Hook:
        if not isinstance(hook_function, HookFunction):
            raise TypeError(f"expected a HookFunction, got {type(hook_function).__name__}")
        if hook_function not in self._registrations:
            raise ValueError(
                f"{hook_function!r} is not registered with this FlexModel; register it first"
            )
        return self._registrations[hook_function][0].hook

    def members(self, group: str) -> list[HookFunction]:
        """Return the hooks of a group, in the order of their registration."""
        number = self._id(group)
        return [function for function in self._registrations if self._hook(function).has(number)]

    def update(self, members: Members, group: str) -> list[HookFunction]:
        """Add registered hooks to a group, new or not; return them."""
        check_name(group)
        functions = self._select(members)
        for function in functions:
            self._tag(function, self._make(group))
        return functions

    def remove(self, members: Members, group: str) -> list[HookFunction]:
        """Remove hooks from a group; return those that were in it."""
        if group == ALL:
            raise ValueError(
                'remove_hook_groups: every registered hook is in "all"; choose other groups for '
                "a run, take off a hook by the handle that register_... returned, or all with "
                "restore()"
            )
        number = self._id(group)
        functions = [f for f in self._select(members) if self._hook(f).has(number)]
        if not functions:
            raise ValueError(f"remove_hook_groups: none of these hooks is in group {group!r}")
        for function in functions:
            for registration in self._registrations[function]:
                registration.hook.untag(number)
        return functions

    def _select(self, members: Members) -> list[HookFunction]:
        if isinstance(members, HookFunction):
            members = [members]
        if isinstance(members, (str, re.Pattern)):
            named = {f: held[0].clean_name for f, held in self._registrations.items()}
            functions = [f for f, name in named.items() if matches(members, name)]
            if not functions:
                raise ValueError(
                    f"no registered hook's module name matches {pattern_text(members)}; "
                    f"{nearest(pattern_text(members), named.values(), 'hooked module')}"
                )
            return functions
        if not isinstance(members, Iterable):
            raise TypeError(
                "expected a HookFunction, a list of them, a str or a compiled regex, got "
                + type(members).__name__
            )
        functions = list(members)
        for function in functions:
            if not isinstance(function, HookFunction):
                raise TypeError(f"expected HookFunctions, got a {type(function).__name__}")
            self._hook(function)
        return functions


def _keys(registration: Registration) -> list[object]:
    """Return under what ``HookGroups.alike`` has a registration."""
    function = registration.hook_function
    names = [function.record_name] if function.record else []
    return [Registration.place_of(function, registration.kind), *names]


def as_names(groups: str | Iterable[str]) -> list[str]:
    """Return one name or several as a list. TypeError for anything else."""
    if isinstance(groups, str):
        return [groups]
    if not isinstance(groups, Iterable):
        raise TypeError(f"groups must be a str or a list of str, got {type(groups).__name__}")
    names = list(groups)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"groups must be a str or a list of str, got {name!r} in it")
    return names


def check_name(group: object) -> None:
    if not isinstance(group, str):
        raise TypeError(f"a group name must be a str, got {type(group).__name__}")
    if not group:
        raise ValueError("a group name must not be empty")


def matches(pattern: str | re.Pattern, name: str) -> bool:
    """Return whether the name contains a substring, or a match of a regex."""
    return pattern in name if isinstance(pattern, str) else pattern.search(name) is not None


def pattern_text(pattern: str | re.Pattern) -> str:
    return repr(pattern) if isinstance(pattern, str) else f"regex {pattern.pattern!r}"

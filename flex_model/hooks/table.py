"""The registered hooks of a model; torch hooks are installed only where one of them is active."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from flex_model import _C
from flex_model.distributed.header import site_hash
from flex_model.hooks.function import KINDS, HookFunction, PartHook
from flex_model.hooks.groups import ALL, HookGroups, as_names
from flex_model.hooks.registration import Joint, Registration
from flex_model.hooks.site import ModuleSite, Moment, ParameterSite
from flex_model.integrations import compiled, torch_private

if TYPE_CHECKING:
    from flex_model.hooks.handlers import HookHandlers

Choice = tuple[tuple[str, ...], bool]  # groups, complement
EVERYTHING: Choice = ((ALL,), False)
NOTHING: Choice = ((), False)
_REMEMBERED_CHOICES = 64


@dataclass(frozen=True)
class ActiveHooks:
    """The hooks that a choice makes active.

    Attributes:
        registrations: In the order in which they were made; ``indices``: their indices;
            ``parameters``: those on gradients of parameters.
        names: Those of their records.
        acts_in_backward: Whether one of them makes ranks communicate in backward.
        digest: A hash of their sites, the same on all ranks.
        choice: A description of the choice for messages.
    """

    registrations: tuple[Registration, ...] = ()
    indices: frozenset[int] = frozenset()
    parameters: tuple[Registration, ...] = ()
    names: frozenset[str] = frozenset()
    acts_in_backward: bool = False
    digest: int = 0
    choice: str = ""

    @property
    def pads(self) -> bool:
        """Whether the data-parallel ranks may have batches of different lengths: a hook pads them
        to one, or is on the gradient of a parameter, which has no rows.
        """
        return any(r.pads or r.kind == "tensor" for r in self.registrations)


def _names(registrations: Iterable[Registration]) -> frozenset[str]:
    """Return the names of the records of these hooks."""
    functions = (registration.hook_function for registration in registrations)
    return frozenset(function.record_name for function in functions if function.record)


def describe_choice(choice: Choice) -> str:
    """Describe a choice for messages."""
    groups, complement = choice
    return f"all groups but {list(groups)}" if complement else f"the groups {list(groups)}"


class HookTable:
    """Registered hooks by site.

    A parameter's gradient is computed after the run that chose hooks, so parameters keep the choice
    of the last run, in a dispatcher of their own.

    Args:
        serves_hooks: Whether the compiled dispatcher may record tensors and pass them to editing
            functions: with one rank, which has full tensors.
        clean: Returns the name of a module or parameter for messages.
        pads: Whether hooks pad the tensors of data-parallel ranks to one length.

    Attributes:
        choices: The current choices, for modules and for parameters.
    """

    def __init__(
        self,
        output_ptr: dict[str, list[Tensor]],
        serves_hooks: bool,
        clean: Callable[[str], str],
        pads: bool = False,
    ) -> None:
        self.groups = HookGroups()
        # What is active, once it is found: each change replaces the list, so that a thread that
        # still looks for what was active before fills in the former one.
        self._active = [ActiveHooks()]
        self._output_ptr = output_ptr
        self._serves_hooks = serves_hooks
        self._clean = clean
        self._pads = pads
        # By weak references: the id of a module that is gone may be another's later.
        self._modules: dict[weakref.ref[nn.Module], ModuleSite] = {}
        self._parameters: dict[weakref.ref[nn.Parameter], ParameterSite] = {}
        self.choices: tuple[Choice, Choice] = EVERYTHING, EVERYTHING
        self._next_index = 0
        self._is_closed = False
        self._replays: Counter[int] = Counter()  # by index: passes that ``put_back`` serves
        self._keeps_installed = False
        self._known: dict[tuple[Choice, Choice], list[ActiveHooks]] = {}

    def connect(
        self,
        handlers: HookHandlers,
        on_change: Callable[[Sequence[Registration]], None],
        on_removal: Callable[[Sequence[Registration]], None],
    ) -> None:
        """Set what is called: the handlers of hooks, by their sites; ``on_change`` after the set of
        active hooks may have changed, with those that may be active now and were not;
        ``on_removal`` with hooks that are about to be removed. Once, before anything else.
        """
        self._handlers, self._on_change, self._on_removal = handlers, on_change, on_removal
        self._make_dispatcher = functools.partial(
            _C.Dispatcher, self._output_ptr, handlers, torch_private.FOR_DISPATCHER
        )
        self._dispatcher = self._make_dispatcher()
        self._parameter_dispatcher = self._make_dispatcher()
        for dispatcher in (self._dispatcher, self._parameter_dispatcher):
            dispatcher.activate(self.groups.ids(ALL), False)  # as `choices` says

    @property
    def registrations(self) -> Sequence[Registration]:
        """All registrations, in the order in which they were made."""
        return self.groups.registrations

    def register(
        self,
        function: HookFunction,
        kind: str,
        targets: Sequence[nn.Module | nn.Parameter],
        groups: Iterable[str] = (),
        moment: Moment = "computed",
    ) -> Sequence[Registration]:
        """Register a hook at a module (at several that stand for it, or at none if it is on another
        rank), or for kind "tensor" at a parameter, whose gradient it gets at this moment. Returns
        one registration for each of its tensors.
        """
        assert kind in KINDS
        if function._registrations:
            raise ValueError(
                f"{function!r} is registered already; make another HookFunction, or take this one "
                "off first, by the handle that register_... returned"
            )
        members = function.members or (function,)
        edits = function.editing_function is not None
        comes_together = kind in ("forward", "forward_pre")
        if function.members and not comes_together and (edits or kind == "tensor"):
            raise ValueError(
                f"{function!r}: a {kind} hook can't edit several tensors in one call, whose "
                "gradients come at different times; register one HookFunction for each"
            )
        for member in members:
            self._check_record_name(member, kind)
            if not comes_together and member.select is not None and member.select.counts_sequence:
                raise ValueError(
                    f"{function!r}: a {kind} hook can't count positions of the sequence: a forward "
                    "with gradients has no cache before it; leave out of='sequence'"
                )
        joint = Joint(function.unpack_idx) if function.members and comes_together else None
        modules = [target for target in targets if isinstance(target, nn.Module)]
        registrations = []
        for member in members:
            registration = Registration(
                member,
                kind,
                self._next_index,
                self._free_number(Registration.place_of(member, kind)),
                weakref.ref(modules[0]) if modules else None,
                function,
                self._clean(member.module_name),
                joint,
                targets=[weakref.ref(target) for target in targets],
                moment=moment,
                pads=self._pads and kind != "tensor",
            )
            self._next_index += 1
            self._make_hook(registration)
            registrations.append(registration)
        function.attach(registrations, None, None)
        self.groups.add(function, registrations, groups)
        self.refresh(registrations)
        return registrations

    def _make_hook(self, registration: Registration) -> None:
        """Make its dispatcher hook, at the sites of its targets."""
        is_served = self._is_served_by_dispatcher(registration)
        registration.make_hook(is_served)
        for target in registration.living_targets:
            self._site(registration, target).add(registration.hook)
            if isinstance(target, nn.Module):
                registration.places.append(self._modules[weakref.ref(target)])

    def _site(self, registration: Registration, target: nn.Module | nn.Parameter) -> _C.Site:
        """Return the target's site for hooks of this kind; make it if there is none."""
        if isinstance(target, nn.Module):
            module = weakref.ref(target)
            if module not in self._modules:
                self._modules[module] = ModuleSite(self._handlers, self._dispatcher, target)
            return self._modules[module].site(registration.kind)
        parameter = weakref.ref(target)
        if parameter not in self._parameters:
            self._parameters[parameter] = ParameterSite(
                self._handlers, self._parameter_dispatcher, target, registration.moment
            )
        return self._parameters[parameter].site

    def _free_number(self, place: tuple[str, str, int | str]) -> int:
        taken = {other.number for other in self.groups.alike(place)}
        return next(number for number in itertools.count() if number not in taken)

    def _is_served_by_dispatcher(self, registration: Registration) -> bool:
        """Return whether one rank runs it on one tensor, with nothing to check or to gather."""
        function = registration.hook_function
        return (
            self._serves_hooks
            and registration.kind in ("forward", "forward_pre")
            and function.select is None
            and not isinstance(function, PartHook)
            and not (registration.had_edit and (registration.joint or function.parameter_names))
        )

    def _check_record_name(self, function: HookFunction, kind: str) -> None:
        others = self.groups.alike(function.record_name) if function.record else ()
        if others and others[0].kind != kind:  # they are all of one kind
            name = self._clean(function.module_name)
            raise ValueError(
                f"a {kind} hook on {name!r} would write its records to "
                f"output_ptr[{function.record_name!r}], as the {others[0].describe()} does; give "
                "one of them an output_name"
            )

    def unregister(self, registrations: Sequence[Registration]) -> None:
        """Remove a function by what ``register`` returned; do nothing if it is removed already."""
        function = registrations[0].given
        if function._registrations is not registrations:
            return
        self._on_removal(registrations)
        function.attach((), None, None)
        self.groups.discard(function)
        self._remove_hooks([r for r in registrations if not self._replays[r.index]])
        if not self._is_closed:
            self.refresh(())

    def _remove_hooks(self, registrations: Sequence[Registration]) -> None:
        for registration in registrations:
            places = self._places(registration)
            for key in places.keys() & registration.targets:
                place = places[key]
                for site in place.all_sites:
                    site.remove(registration.hook)
                    site.refresh()
                if any(site.hooks for site in place.all_sites):
                    place.install(self._keeps_installed)
                else:
                    place.remove()
                    del places[key]
            registration.drop_hook()

    def _places(self, registration: Registration) -> dict[Any, Any]:
        """Return the sites of hooks of its kind, by their targets."""
        return self._parameters if registration.kind == "tensor" else self._modules

    # The backward of a graph may need hooks that are not active now.

    def put_back(self, registrations: Sequence[Registration]) -> None:
        """Install inactive hooks, in their order among those of their site, until ``take_off`` was
        called as often as ``put_back``. They do not count as active.
        """
        _ = self.active_hooks  # is found before it depends on other replays
        if registrations and self._is_closed and not self._replays:
            self._dispatcher = self._make_dispatcher()
            self._parameter_dispatcher = self._make_dispatcher()
        new = [
            registration for registration in registrations if not self._replays[registration.index]
        ]
        self._replays.update(registration.index for registration in registrations)
        for registration in new:
            if registration.is_registered:
                registration.hook.set_replays(True)
                continue
            self._make_hook(registration)
            registration.hook.set_replays(True)
            for target in registration.living_targets:
                site = self._site(registration, target)
                in_order = sorted(site.hooks, key=lambda other: other.index)
                for other in in_order:
                    site.remove(other.hook)
                for other in in_order:
                    site.add(other.hook)
        self._install(new)

    def take_off(self, registrations: Sequence[Registration]) -> None:
        """End one ``put_back``."""
        _ = self.active_hooks
        self._replays.subtract(registration.index for registration in registrations)
        over = [
            registration for registration in registrations if not self._replays[registration.index]
        ]
        self._replays = +self._replays
        for registration in over:
            registration.hook.set_replays(False)
        self._install(over)
        self._remove_hooks([r for r in over if not r.is_registered])
        if registrations and self._is_closed and not self._replays:
            self._close_dispatchers()

    def _install(self, registrations: Sequence[Registration]) -> None:
        """Make torch's hooks at the registrations' sites match the active hooks there."""
        for registration in registrations:
            for target in registration.living_targets:
                self._site(registration, target).refresh()
                self._places(registration)[weakref.ref(target)].install(self._keeps_installed)

    def chosen(self, choice: Choice) -> list[Registration]:
        """Return the hooks that a choice makes active, on any rank."""
        groups, complement = choice
        return [
            registration
            for registration in self.registrations
            if complement == self.groups.of(registration.given).isdisjoint(groups)
        ]

    def parameters(self) -> list[tuple[nn.Parameter, Sequence[Registration]]]:
        """Return this rank's parameters with active hooks on their gradients, in the order of
        their first registration.
        """
        places = self._parameters.values()
        found = [(place.parameter(), place.site.active) for place in places]
        return [
            (parameter, active) for parameter, active in found if parameter is not None and active
        ]

    @compiled.outside_graphs
    def choice(self, groups: str | Iterable[str], complement: bool) -> Choice:
        """Return a choice of hooks. ValueError for an unknown group."""
        names = tuple(as_names(groups))
        self.groups.ids(names)
        return names, bool(complement)

    @property
    @compiled.outside_graphs
    def active_hooks(self) -> ActiveHooks:
        """The active hooks. They are looked for when they are first read after a change."""
        found = self._active
        if not found:
            found.append(self._found_active())
        return found[0]

    @property
    @compiled.outside_graphs
    def active(self) -> frozenset[int]:
        """The indices of the active hooks."""
        return self.active_hooks.indices

    @property
    def has_active(self) -> bool:
        """Whether any hook is active: all need not be found for that."""
        if self._active:
            return bool(self.active)
        return any(r.index not in self._replays for r in self._chosen_now())

    def choose(self, modules: Choice, parameters: Choice, in_run: bool = False) -> None:
        """Choose hooks; do nothing if they are chosen already.

        Args:
            in_run: Whether a run makes the choice. Torch's hooks that it does not need stay where
                they are until the run ends: the choice after it may need them again.
        """
        if self.choices != (modules, parameters):
            self.choices = modules, parameters
            self._activate(keeps=in_run)

    def keep_installed(self, keeps: bool) -> None:
        """Let torch's hooks stay where they are when others are chosen, or no longer."""
        self._keeps_installed = keeps

    @contextlib.contextmanager
    def nothing_chosen(self) -> Iterator[None]:
        """A context in which no hook is active."""
        before = self.choices
        self.choose(NOTHING, NOTHING)
        try:
            yield
        finally:
            self.choose(*before)

    def refresh(self, changed: Sequence[Registration]) -> None:
        """Install the torch hooks that the choice needs, and remove the others, at the sites of
        hooks that are new or in other groups; after any hooks, or groups, have changed.
        """
        self._known.clear()
        self._install(changed)
        self._changed(changed)

    def _activate(self, keeps: bool = False) -> None:
        for dispatcher, places, (groups, complement) in (
            (self._dispatcher, self._modules, self.choices[0]),
            (self._parameter_dispatcher, self._parameters, self.choices[1]),
        ):
            dispatcher.activate(self.groups.ids(groups, strict=False), complement)
            for place in places.values():
                place.install(keeps or self._keeps_installed)
        self._changed(self.registrations)

    def _changed(self, changed: Sequence[Registration]) -> None:
        if len(self._known) >= _REMEMBERED_CHOICES:
            self._known.clear()
        self._active = [] if self._replays else self._known.setdefault(self.choices, [])
        self._on_change(changed)

    def _found_active(self) -> ActiveHooks:
        found = list(self._chosen_now())
        active = frozenset(r.index for r in found if r.index not in self._replays)
        registrations = tuple(r for r in self.registrations if r.index in active)
        acts_in_backward = any(r.had_edit or r.kind == "tensor" or r.is_backward for r in found)
        return ActiveHooks(
            registrations,
            active,
            tuple(r for r in registrations if r.kind == "tensor"),
            _names(registrations),
            acts_in_backward,
            site_hash(*(r.site for r in registrations)),
            describe_choice(self.choices[0]),
        )

    def number_run(self, number: int) -> None:
        """Note the number of a run that begins, for the sites that are called in it."""
        self._dispatcher.number_run(number)

    def set_in_run(self, is_in_run: bool) -> bool:
        """Let the dispatcher run hooks itself, in an outermost run, or no longer; return the former
        value.
        """
        return self._dispatcher.set_in_run(is_in_run)

    def settle_edits(self, is_recomputed: bool) -> None:
        """Let the dispatcher call settled editing functions itself, in the rest of the run.

        Args:
            is_recomputed: Whether the run knows that a checkpoint may recompute what edits made.
        """
        self._dispatcher.settle(is_recomputed)

    def _chosen_now(self) -> Iterator[Registration]:
        """Yield the active hooks of modules, and those of parameters that the choice for modules
        makes active: the other choice may be that of an earlier run, whose graph they serve.
        """
        for module in self._modules.values():
            for site in module.all_sites:
                yield from site.active if site.is_active else ()
        groups, complement = self.choices[0]
        numbers = self.groups.ids(groups, strict=False)
        for parameter in self._parameters.values():
            for hook in parameter.site.hooks:
                if complement != any(map(hook.hook.has, numbers)):
                    yield hook

    @property
    def called(self) -> frozenset[int]:
        """The hooks that torch calls now: those of parameters are active by their own choice."""
        of_modules = (r.index for r in self.active_hooks.registrations if r.kind != "tensor")
        return frozenset(of_modules).union(r.index for _, on in self.parameters() for r in on)

    def record_names(self, indices: Set[int]) -> frozenset[str]:
        """Return the names of the records of these hooks."""
        if indices == self.active_hooks.indices:
            return self.active_hooks.names
        return _names(r for r in self.registrations if r.index in indices)

    def exchange_calls(self, calls: dict[Any, Any]) -> dict[Any, Any]:
        """Replace the calls in progress by those of another batch; return the former."""
        return {
            key: before
            for key, site in self._modules.items()
            if (before := site.exchange_calls(calls.get(key, [])))
        }

    def forget_calls(self) -> None:
        """Drop the state of calls that ended in an exception."""
        for site in self._modules.values():
            site.forget_calls()

    def close(self) -> None:
        """Remove all hooks."""
        self._is_closed = True
        for function in self.groups.members(ALL):
            self.unregister(function._registrations)
        self._active = [ActiveHooks()]
        self._known.clear()
        if not self._replays:
            self._close_dispatchers()

    def _close_dispatchers(self) -> None:
        self._dispatcher.close()
        self._parameter_dispatcher.close()

"""The torch hooks of one module or parameter, registered only while a hook of ours is active.

Gradients are passed to hooks by an identity autograd node of our own at the module's edge.
``register_full_backward_hook`` would refuse modules whose input or output is changed in place, and
runs at the wrong time under split backward passes.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from flex_model import _C
from flex_model.errors import HookError
from flex_model.integrations import compiled, fsdp2

if TYPE_CHECKING:
    from flex_model.hooks.handlers import HookHandlers
    from flex_model.hooks.registration import Registration

_MAX_DEPTH = 64  # of nested calls of one module
_NOT_PASSED = object()

# When a parameter's hooks get its gradient: computed in a backward, before it is accumulated;
# accumulated (FSDP2: averaged and sharded by then); computed for what FSDP1 gathers for a forward;
# or on request, at the end of a pipeline's step.
Moment = Literal["computed", "accumulated", "gathered", "requested"]

# Where hooks of a kind need torch's: before or after the module's forward.
_SIDES = {
    "forward_pre": ("pre",),
    "forward": ("post",),
    "full_backward": ("pre", "post"),
    "full_backward_pre": ("post",),
}

_numbers = itertools.count()


def _put_in_order(hooks: Any, number: int, before: set[int]) -> None:
    """Move a hook that was just registered behind the user's that had their place ``before`` it and
    those of FlexModels that hooked the module earlier: torch's hooks come and go, the order stays.
    """
    *others, _ = hooks
    place = 0
    for i, key in enumerate(others):
        wrap = getattr(hooks[key], "place_among_wraps", None)
        if key in before if wrap is None else wrap < number:
            place = i + 1
    for later in others[place:]:
        hooks[later] = hooks.pop(later)


def _keys_before(hooks: Any, handle: Any) -> set[int]:
    return set(itertools.takewhile(lambda key: key != handle.id, hooks))


class ModuleSite:
    """The hooks of one module: a dispatcher site per kind, and at most one torch hook before and
    one after its forward.
    """

    def __init__(self, owner: HookHandlers, dispatcher: _C.Dispatcher, module: nn.Module) -> None:
        self._owner = owner
        self._dispatcher = dispatcher
        self._module = weakref.ref(module)
        self._number = next(_numbers)
        self.last_run = 0  # the number of the last run in which the module was called
        self._handles: dict[str, Any] = {}
        self._installed: set[str] = set()  # kinds
        self._before: dict[str, set[int]] = {}  # by side: the hooks that are called before ours
        self._entered: list[
            list[tuple[Tensor, Tensor, int]]
        ] = []  # per call in progress: inputs with an edge
        self.sites: dict[str, _C.Site] = {}

    def site(self, kind: str) -> _C.Site:
        if kind not in self.sites:
            self.sites[kind] = self._dispatcher.add_site(self._module)
        return self.sites[kind]

    @property
    def all_sites(self) -> list[_C.Site]:
        return list(self.sites.values())

    def _is_ours(self, module: nn.Module) -> bool:
        """Return False for a copy of the module, which was copied with its torch hooks."""
        return module is self._module()

    def install(self, keeps: bool) -> None:
        """Register or remove torch hooks, to match the active hooks.

        Args:
            keeps: Remove none: torch has listed them for calls that wait at the module's entry.
        """
        module = self._module()
        if module is None:
            return
        tables: dict[str, Any] = {"pre": module._forward_pre_hooks, "post": module._forward_hooks}
        sides = {side for kind, site in self.sites.items() if site.hooks for side in _SIDES[kind]}
        # A place lasts from the first registration to the last, whatever is active meanwhile.
        new = {side: set(tables[side]) for side in sides - self._before.keys()}
        self._before = new | {side: self._before[side] for side in sides & self._before.keys()}
        kinds = {kind for kind, site in self.sites.items() if site.is_active}
        kinds = kinds | self._installed if keeps else kinds
        if kinds == self._installed:
            return
        self._installed = kinds
        required: dict[str, Any] = {}
        inputs, outputs = "full_backward" in kinds, "full_backward_pre" in kinds
        if inputs or "forward_pre" in kinds:
            required["pre+" if inputs else "pre"] = self._pre_hook(inputs)
        if inputs or outputs:
            required[f"post+{inputs:d}{outputs:d}"] = self._edges_hook(inputs, outputs)
        elif "forward" in kinds:
            required["post"] = self._forward_hook()
        for name in [name for name in self._handles if name not in required]:
            handle, side = self._handles.pop(name), name.partition("+")[0]
            self._before[side] = _keys_before(tables[side], handle)
            handle.remove()
        for name, hook in required.items():
            if name in self._handles:
                continue
            hook = compiled.outside_graphs(hook)
            side = name.partition("+")[0]
            if side == "pre":
                self._handles[name] = module.register_forward_pre_hook(hook, with_kwargs=True)
            else:
                self._handles[name] = module.register_forward_hook(
                    hook, with_kwargs=name.startswith("post+")
                )
            _put_in_order(tables[side], self._number, self._before[side])

    @property
    def module(self) -> nn.Module | None:
        """The module; None where it is gone."""
        return self._module()

    def surround(self, is_input: bool, before: Any, after: Any) -> list[Any]:
        """Register two torch hooks, with keyword arguments, that run directly before and after the
        one that is installed here; return their handles. None is registered where none is
        installed.

        Args:
            is_input: Whether around the hook before the module's forward, not the one after it.
        """
        module = self._module()
        own = [h for name, h in self._handles.items() if name.startswith("pre") == is_input]
        if module is None or not own:
            return []
        hooks = module._forward_pre_hooks if is_input else module._forward_hooks
        register = module.register_forward_pre_hook if is_input else module.register_forward_hook
        order = list(hooks)
        added = [register(hook, with_kwargs=True) for hook in (before, after)]
        place = order.index(own[0].id)
        order[place : place + 1] = [added[0].id, own[0].id, added[1].id]
        for key in order:
            hooks[key] = hooks.pop(key)
        return added

    def remove(self) -> None:
        """Remove all torch hooks."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._installed = set()
        for site in self.sites.values():
            self._dispatcher.remove_site(site)

    # torch's hooks have their number beside them: see `_put_in_order`.

    def _forward_hook(self) -> Any:
        call = self.site("forward").call
        runs = self._owner.runs

        def hook(module, args, output):
            self.last_run = runs.number
            return call(module, output)

        hook.place_among_wraps = self._number  # type: ignore[attr-defined]
        return hook

    def _pre_hook(self, puts_edges: bool) -> Any:
        call = self.site("forward_pre").call
        runs = self._owner.runs

        def hook(module, args, kwargs=None):
            self.last_run = runs.number
            if kwargs is None:
                return self._was_taken_off()
            tree = call(module, (args, kwargs))
            if puts_edges and self._is_ours(module):
                tree = self._put_input_edges(module, tree)
            return tree

        hook.place_among_wraps = self._number  # type: ignore[attr-defined]
        return hook

    def _was_taken_off(self) -> None:
        """Handle a hook that torch calls without its arguments: it was removed while the call
        waited between torch's list of hooks and its turn in it.
        """
        if self.sites["forward_pre"].is_active:
            raise HookError(
                f"sequential.run: the hooks of a {type(self._module()).__name__} were changed by "
                "one batch while another one was waiting to enter it; register and remove hooks "
                "before or after the run"
            )

    def _edges_hook(self, inputs: bool, outputs: bool) -> Any:
        call = self.site("forward").call
        runs = self._owner.runs

        def hook(module, args, kwargs, output=_NOT_PASSED):
            if output is _NOT_PASSED:  # removed since torch has listed the hooks of this call
                return None
            self.last_run = runs.number
            if not self._is_ours(module):
                return output
            if inputs:
                self._follow_inputs()
            output = call(module, output)
            if outputs:
                output = self._put_output_edges(module, output, (args, kwargs))
            return output

        hook.place_among_wraps = self._number  # type: ignore[attr-defined]
        return hook

    def _put_input_edges(self, module: nn.Module, tree: Any) -> Any:
        entered: list[tuple[Tensor, Tensor, int]] = []
        self._entered.append(entered)
        if len(self._entered) > _MAX_DEPTH:  # calls that a recomputation aborted
            del self._entered[0]
        if not torch.is_grad_enabled():
            self._note_activations("full_backward", tree)
            return tree
        for index, registrations in self._by_tensor("full_backward", tree):
            leaf = self._leaf(registrations[0], tree)
            if leaf is None or not leaf.requires_grad:
                continue
            edge = self._owner.put_edge(registrations, module, leaf, False)
            entered.append((leaf, edge, edge._version))
            tree = _C.replace_leaf(tree, index, edge)
        return tree

    def _follow_inputs(self) -> None:
        """Copy inputs that the module changed in place, with their autograd history, to the
        caller's tensors.
        """
        for leaf, edge, version in self._entered.pop() if self._entered else ():
            if edge._version != version:
                with torch.autograd._unsafe_preserve_version_counter(
                    leaf
                ):  # its values do not change here
                    leaf.copy_(edge)

    def _put_output_edges(self, module: nn.Module, output: Any, inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            self._note_activations("full_backward_pre", output)
            return output
        input_ids = None
        for index, registrations in self._by_tensor("full_backward_pre", output):
            leaf = self._leaf(registrations[0], output)
            if leaf is None or not leaf.requires_grad:
                continue
            if input_ids is None:
                input_ids = {id(tensor) for tensor in _C.flatten(inputs)[0]}
            edge = self._owner.put_edge(registrations, module, leaf, id(leaf) in input_ids)
            output = _C.replace_leaf(output, index, edge)
        return output

    def _note_activations(self, kind: str, tree: Any) -> None:
        for _, registrations in self._by_tensor(kind, tree):
            self._owner.note_activations(registrations, tree)

    def _leaf(self, registration: Registration, tree: Any) -> Tensor | None:
        try:
            leaf = registration.leaf(tree)
            if leaf.requires_grad:
                registration.check_movable(leaf)
            return leaf
        except Exception as error:
            self._owner.hook_failed(registration, error)
            return None

    def _by_tensor(self, kind: str, tree: Any) -> list[tuple[int, list[Registration]]]:
        """Group active registrations by the number of their tensor, each group in the order of
        registration. A name that no tensor has fails here.
        """
        groups: dict[int, list[Registration]] = {}
        for registration in self._owner.active_in_replay(self.sites[kind].active):
            try:
                number = registration.number_in(tree)
            except HookError as error:
                self._owner.hook_failed(registration, error)
                continue
            groups.setdefault(number, []).append(registration)
        return list(groups.items())

    def exchange_calls(self, calls: list[Any]) -> list[Any]:
        """Replace the calls in progress by those of another batch; return the former."""
        before, self._entered = self._entered, calls
        return before

    def forget_calls(self) -> None:
        """Drop the state of calls that ended in an exception."""
        self._entered.clear()


class ParameterSite:
    """The gradient hooks of one parameter."""

    def __init__(
        self,
        owner: HookHandlers,
        dispatcher: _C.Dispatcher,
        parameter: nn.Parameter,
        moment: Moment,
    ) -> None:
        self._owner = owner
        self._dispatcher = dispatcher
        self.parameter = weakref.ref(parameter)
        self._moment = moment
        self._handle: Any = None
        self._number = next(_numbers)
        self._before = set(parameter._backward_hooks or ())
        self.site = dispatcher.add_site(None)

    @property
    def all_sites(self) -> list[_C.Site]:
        return [self.site]

    def install(self, keeps: bool) -> None:
        """Register or remove the torch hook, to match the active hooks."""
        parameter = self.parameter()
        if not self.site.is_active or parameter is None or self._moment == "requested":
            if self._handle is not None:
                if self._moment == "computed" and parameter is not None:
                    self._before = _keys_before(parameter._backward_hooks or (), self._handle)
                self._handle.remove()
                self._handle = None
        elif self._handle is None:
            if self._moment == "accumulated":
                own = fsdp2.OwnGradient(self._owner.model, parameter)
                self._handle = own.register_hook(self._hook(), self._refuse)
            elif self._moment == "gathered":
                gathered: Any = parameter
                self._handle = gathered.register_hook(self._hook(), self._refuse)
            else:
                self._handle = parameter.register_hook(self._hook())
                _put_in_order(parameter._backward_hooks, self._number, self._before)

    def _hook(self):
        owner, site = self._owner, self.site

        def hook(grad):
            return owner.run_parameter_hooks(site.active, grad)

        hook.place_among_wraps = self._number  # type: ignore[attr-defined]
        return hook

    def _refuse(self, problem: str) -> None:
        registration = self.site.active[0]
        error = ValueError(f"parameter-gradient hook on {registration.name!r}: {problem}")
        self._owner.refuse_parameter_hooks(registration, error)

    def remove(self) -> None:
        """Remove the torch hook and the site."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self._dispatcher.remove_site(self.site)

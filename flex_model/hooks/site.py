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
from torch.autograd import Function

from flex_model import _C
from flex_model.errors import HookError
from flex_model.hooks.container_copies import ContainerCopies, are_copied
from flex_model.integrations import compiled, fsdp2
from flex_model.integrations.torch_private import uncounted
from flex_model.layouts import follow, memory_map

if TYPE_CHECKING:
    from flex_model.hooks.handlers import HookHandlers
    from flex_model.hooks.registration import Registration

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
        self._handles: dict[str, Any] = {}
        self._installed: set[str] = set()  # kinds
        self._before: dict[str, set[int]] = {}  # by side: the hooks that are called before ours
        # Per call in progress: inputs, each with its edge and that one's node; what was copied.
        self._entered: list[tuple[list[tuple[Tensor, Tensor, Any]], ContainerCopies | None]] = []
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
            if side in sides:
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
        name = "pre" if is_input else "post"
        own = [handle for key, handle in self._handles.items() if key.startswith(name)]
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

        def hook(module, args, output):
            return call(module, output)

        hook.place_among_wraps = self._number  # type: ignore[attr-defined]
        return hook

    def _pre_hook(self, puts_edges: bool) -> Any:
        site = self.site("forward_pre")
        call, runs = site.call, self._owner.runs

        def hook(module, args, kwargs=None):
            if site.last_run != runs.number:
                self._entered.clear()  # calls of an earlier run, which a recomputation aborted
            if kwargs is None:
                return self._was_taken_off()
            own = args, kwargs
            tree = call(module, own)
            if puts_edges and self._is_ours(module):
                tree, edges = self._put_edges("full_backward", module, tree)
                self._enter(module, edges, own, tree)
            elif tree is not own or "follow" in self._handles:
                self._enter(module, [], own, tree)
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

    def _enter(self, module: nn.Module, edges: list[Any], own: Any, passed: Any) -> None:
        """Begin a call, whose inputs are followed at its end if something was put into them."""
        copies = None
        if are_copied(own[0], passed[0]) or are_copied(own[1].values(), passed[1].values()):
            copies = ContainerCopies(own, passed)
        if "follow" not in self._handles:
            if not edges and copies is None:
                return
            hook = compiled.outside_graphs(self._follow_hook())
            self._handles["follow"] = module.register_forward_hook(hook, always_call=True)
            _put_in_order(module._forward_hooks, hook.place_among_wraps, set())
        self._entered.append((edges, copies))

    def _follow_hook(self) -> Any:
        def hook(module, args, output):
            return self._follow_inputs(output) if self._is_ours(module) else output

        # Before other hooks, and that of the FlexModel that was the last to enter before the rest.
        hook.place_among_wraps = -1 - self._number  # type: ignore[attr-defined]
        return hook

    def _edges_hook(self, inputs: bool, outputs: bool) -> Any:
        call = self.site("forward").call

        def hook(module, args, kwargs, output=_NOT_PASSED):
            if output is _NOT_PASSED:  # removed since torch has listed the hooks of this call
                return None
            if not self._is_ours(module):
                return output
            output = call(module, output)
            if outputs:
                output, _ = self._put_edges("full_backward_pre", module, output, (args, kwargs))
            return output

        hook.place_among_wraps = self._number  # type: ignore[attr-defined]
        return hook

    def _put_edges(
        self, kind: str, module: nn.Module, tree: Any, inputs: Any = ()
    ) -> tuple[Any, list[Any]]:
        """Return the tree with edges in place of the tensors of gradient hooks; and each of these
        tensors, its edge and that one's node.

        Args:
            inputs: The module's, whose memory the tree of an output may have.
        """
        edges: list[tuple[Tensor, Tensor, Any]] = []
        memories = None
        for index, registrations in self._by_tensor(kind, tree):
            leaf = self._leaf(registrations[0], tree)
            if leaf is None:
                continue
            numbers = self._owner.note_calls(registrations, leaf)
            if not (leaf.requires_grad and torch.is_grad_enabled()):
                continue
            if memories is None:
                memories = {_memory(tensor) for tensor in _C.flatten(inputs)[0]}
            passes_through = _memory(leaf) in memories
            edge = self._owner.put_edge(registrations, numbers, module, leaf, passes_through)
            edges.append((leaf, edge, edge.grad_fn))
            tree = _C.replace_leaf(tree, index, edge)
        return tree, edges

    def _follow_inputs(self, output: Any) -> Any:
        """Give the caller's tensors and containers what the module has written into its inputs.
        Return its output, with the caller's tensors where it has their memory.
        """
        edges, copies = self._entered.pop() if self._entered else ([], None)
        if copies is not None:
            copies.write_back()
        for leaf, edge, node in edges:
            is_written = edge.grad_fn is not node
            if is_written:  # its history is copied; its values are there
                with torch.autograd._unsafe_preserve_version_counter(leaf):
                    leaf.copy_(edge)
            for i, one in enumerate(_C.flatten(output)[0]):
                if one is edge and is_written:
                    output = _C.replace_leaf(output, i, leaf)
                elif one.requires_grad and _memory(one) == _memory(edge):
                    with uncounted(), follow.paused():
                        output = _C.replace_leaf(output, i, _InputsMemory.apply(one, leaf))
        return output

    def _leaf(self, registration: Registration, tree: Any) -> Tensor | None:
        try:
            leaf = registration.leaf(tree)
            if leaf.requires_grad and torch.is_grad_enabled():
                registration.check_movable(leaf)
            return leaf
        except Exception as error:
            if torch.is_grad_enabled():  # else there is no gradient either
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


def _memory(tensor: Tensor) -> int:
    """Return what identifies the memory of a tensor; where that is not known, the tensor."""
    storage = memory_map.storage_of(memory_map.plain(tensor))
    return id(tensor) if storage is None else storage._cdata


class _InputsMemory(Function):
    """Passes on a module's output that has the memory of its input ``leaf``, as a view of that:
    torch refuses a later change of either in place, whose history the other would lack.
    """

    @staticmethod
    def forward(ctx, output, leaf):
        kinds = {(type(t), t.dtype, t.is_conj(), t.is_neg()) for t in (output, leaf)}
        if kinds != {(Tensor, leaf.dtype, False, False)}:  # a DTensor, real numbers of complex ones
            return output
        return leaf.as_strided(output.size(), output.stride(), output.storage_offset())

    @staticmethod
    def backward(ctx, grad):
        return grad, None


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
        # FSDP1's gathered ones have no hooks of torch's.
        self._before = set(parameter._backward_hooks or ()) if moment == "computed" else set()
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

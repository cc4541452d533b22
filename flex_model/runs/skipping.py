"""Runs a forward from a module's output on (``run_from``). The modules before it in its list are
not computed: they return tensors without values or sizes, so that what needs more of them than the
output that is given is an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flex_model import _C
from flex_model.distributed.placement import Placement, Replicate
from flex_model.hooks.registration import Registration
from flex_model.integrations import cut, dtensor
from flex_model.integrations.absent_tensor import Absent, Unsized, names_in
from flex_model.names import clean, find_module

# The argument by which the root module's outermost hook gets the value: as its inputs, along dp in
# rows and along tp the same on all ranks. Another one has the name of the module: layouts depend on
# which modules are skipped.
_VALUE, _MODULE = "value_of_run_from", "module_of_run_from"
_CHANGES_NOTHING = (Tensor, bool, int, float, str, torch.dtype, torch.device, type(None))


class Skip:
    """The modules that one run skips.

    Args:
        name: The module whose output ``value`` is: a tensor, or the tree that it returns.

    Attributes:
        arguments: Those that the root module is called with, besides the user's.
        is_reached: Whether the forward has called the module.

    Raises:
        ValueError: an unknown name, or a module inside one of a list.
    """

    def __init__(self, root: nn.Module, name: str, value: Any) -> None:
        self._root, self.name, self._value = root, name, value
        self.arguments = {_VALUE: value, _MODULE: name}
        target = find_module(root, name)
        full_name = next(name for name, module in root.named_modules() if module is target)
        self._target, self._clean_name = target, clean(root, full_name)
        self._before = dict(_before(root, full_name))
        parent = root.get_submodule(full_name.rpartition(".")[0])
        if self._before and not isinstance(parent, _LISTS):
            raise ValueError(
                f"run_from: {name!r} is inside a module of a list, which computes with the output "
                "of the one before it; give the output of a module of the list itself, such as "
                f"{next(iter(self._before))!r}"
            )
        if not _C.flatten(value)[0]:
            raise ValueError(
                f"run_from: the value must be what {name!r} returns, a tensor or a tree of "
                f"tensors, got {type(value).__name__}"
            )
        self._has_begun = self.is_reached = False

    def check_hooks(self, registrations: Sequence[Registration]) -> None:
        """ValueError for active hooks that would not be called, or not on values."""
        modules = [self._target, *self._before.values()]
        inside = {id(part) for module in modules for part in module.modules()}
        for one in registrations:
            module = one.living_module
            is_output = one.kind in ("forward", "full_backward_pre")
            if id(module) in inside and not (module is self._target and is_output):
                raise ValueError(
                    f"run_from: {one.describe()} is active, and {self.name!r} and the modules "
                    "before it are not computed; choose other hooks with groups="
                )

    def check_layout(
        self, known: MutableMapping[nn.Module, Placement], find: Callable[[str], Placement | None]
    ) -> None:
        """ValueError where the module returns a part on each rank along tp, whose place in the
        model a plain value, of which every rank has the whole, can't take; and where that is not
        known: neither from a hook on it, nor by ``find``, which gets its name. Collective.
        """
        if any(map(dtensor.is_dtensor, _C.flatten(self._value)[0])):
            return
        if self._target not in known:
            found = find(self._clean_name)
            if found is None:
                raise ValueError(
                    f"run_from: how {self.name!r} places its output over the tensor-parallel ranks "
                    "is not known; call flex(...) with a hook on it first, whose error says what "
                    "to state"
                )
            known[self._target] = found
        if known[self._target] != Replicate():
            raise ValueError(
                f"run_from: {self.name!r} returns a part on each tensor-parallel rank "
                f"({known[self._target]}), which the value can't stand for; call flex(...) with a "
                "hook whose editing function returns the value"
            )

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """A context in which the modules are skipped."""
        skipped = {**self._before, self.name: self._target}
        handle = self._root.register_forward_pre_hook(_without_value, with_kwargs=True)
        own = {name: vars(module).get("forward") for name, module in skipped.items()}
        try:
            for name, module in skipped.items():
                module.forward = self._forward_of(name, module is self._target)
            yield
        finally:
            handle.remove()
            for name, module in skipped.items():
                before = own[name]
                if before is not None:
                    module.forward = before
                elif "forward" in vars(module):
                    del module.forward

    def check_arguments(self, kwargs: Mapping[str, Any]) -> None:
        """ValueError where transformers collects something from every layer."""
        configs = (getattr(module, "config", None) for module in self._root.modules())
        config = next(filter(None, configs), None)
        for flag in ("output_attentions", "output_hidden_states", "output_router_logits"):
            if kwargs.get(flag, getattr(config, flag, False)):
                raise ValueError(
                    f"run_from: {flag} collects from every layer, also from those that are "
                    f"skipped; pass {flag}=False, and hook what is needed"
                )

    def _forward_of(self, name: str, is_target: bool) -> Callable[..., Any]:
        def absent(tensor: Tensor) -> Tensor:
            what = f"the output of {name!r}, which run_from skips"
            return Unsized(tensor.detach().to("meta"), [what], tensor.device)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.is_reached:
                raise RuntimeError(
                    f"run_from: {name!r} is called after {self.name!r}, whose value was given for "
                    "its first call, so it can't be skipped; call flex(...)"
                )
            if self._has_begun and not names_in((args, kwargs)):
                raise RuntimeError(
                    f"run_from: {name!r} is not passed what the module before it returns, and may "
                    "need what that does otherwise; call flex(...)"
                )
            for argument in (*args, *kwargs.values()):
                if not _changes_nothing(argument):
                    raise ValueError(
                        f"run_from: {name!r} is skipped, and is passed a "
                        f"{type(argument).__name__}, which it may change (a cache: pass "
                        "use_cache=False)"
                    )
            self._has_begun, self.is_reached = True, is_target
            value = self._value
            for i, leaf in enumerate(_C.flatten(value)[0]):
                value = _C.replace_leaf(value, i, leaf.clone() if is_target else absent(leaf))
            return value

        forward.skips_for_run_from = True  # type: ignore[attr-defined]
        return forward

    def check_output(self, output: Any) -> None:
        """RuntimeError where the forward has not called the module, or needs more of others."""
        if not self.is_reached:
            raise RuntimeError(cut.not_reached(self.name, "run_from"))
        absent = [leaf for leaf in _C.flatten(output)[0] if isinstance(leaf, Absent)]
        if absent:
            names = sorted(set[str]().union(*(leaf.labels for leaf in absent)))
            raise RuntimeError(
                f"run_from: what the model returns depends on {', '.join(names)}, not only on the "
                f"output of {self.name!r}; call flex(...)"
            )


_LISTS = (nn.ModuleList, nn.Sequential)


def _before(root: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules before one in the lists that it is in, by their clean names."""
    path = name.split(".")
    for i, own in enumerate(path):
        parent = root.get_submodule(".".join(path[:i]))
        for key, module in parent.named_children() if isinstance(parent, _LISTS) else ():
            if key == own:
                break
            yield clean(root, ".".join([*path[:i], key])), module


def _changes_nothing(argument: Any) -> bool:
    """Whether a module can't keep anything in an argument, except in a tensor."""
    if isinstance(argument, tuple):
        return all(map(_changes_nothing, argument))
    return isinstance(argument, _CHANGES_NOTHING)


def _without_value(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return args, {k: value for k, value in kwargs.items() if k not in (_VALUE, _MODULE)}

"""FSDP2: the module that manages a parameter, and the gradient of one backward in it."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flex_model import _C, names
from flex_model.integrations.compiled import outside_graphs
from flex_model.integrations.torch_private import accumulation_hooks, call_last, fsdp2_state


def is_fsdp2(module: nn.Module) -> bool:
    """Whether ``fully_shard`` (FSDP2) was applied to a module."""
    return isinstance(module, getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ()))


def sharded_parameter(root: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
    """Return the sharded parameter that FSDP2 keeps between forwards.

    After a forward without backward the root stays unsharded, with other parameters in its place.
    """
    owner = owner_fsdp2(root, name)
    if owner is None:
        return parameter
    owner.reshard()  # does nothing if it is sharded
    return names.find_parameter(root, name)[2]


def earlier_hooks(root: nn.Module, parameter: nn.Parameter) -> list[Any]:
    """Return the hooks that torch calls with the gradient of a parameter once it is accumulated,
    before FSDP2 averages and shards it; hooks on the sharded parameter run after them.
    """
    return accumulation_hooks(getattr(_managed(root, parameter)[2], "_unsharded_param", None))


def _managed(root: nn.Module, parameter: Any) -> tuple[Any, Any, Any]:
    """Return the module with ``fully_shard`` that manages a sharded parameter, the group there, and
    what torch keeps of the parameter, such as the whole one of forwards; Nones if there is none.
    """
    for module in filter(is_fsdp2, root.modules()):
        for group in param_groups(module):
            for kept in getattr(group, "fsdp_params", ()):
                if kept.sharded_param is parameter:
                    return module, group, kept
    return None, None, None


def param_groups(module: nn.Module) -> list[Any]:
    """Return what ``fully_shard`` keeps of the groups of parameters that a module manages."""
    state = fsdp2_state(module)
    if hasattr(state, "_fsdp_param_groups"):  # some releases of torch have one group
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def divide_factors(modules: Mapping[str, nn.Module]) -> dict[float | None, str]:
    """Return the numbers by which FSDP2 divides the ranks' summed gradients, each with the name of
    a module; None: by that of the ranks.
    """
    return {
        getattr(group, "gradient_divide_factor", None): name
        for name, module in modules.items()
        for group in param_groups(module)
    }


def managed_parameters(root: nn.Module) -> dict[int, Any]:
    """Return the meshes that were passed to ``fully_shard``, by the ids of the sharded parameters.
    DTensors may have an equal mesh with another root mesh, from torch's caches. Torch has no public
    attribute for it.
    """
    groups = (one for module in filter(is_fsdp2, root.modules()) for one in param_groups(module))
    return {
        id(kept.sharded_param): group.mesh_info.mesh
        for group in groups
        for kept in group.fsdp_params
    }


def is_managed(root: nn.Module, parameter: Any) -> bool:
    """Whether FSDP2 sharded a parameter: it may be one of ``ignored_params``."""
    return _managed(root, parameter)[0] is not None


def waits_for_average(root: nn.Module, parameter: Any) -> bool:
    """Whether FSDP2 holds gradients of a sharded parameter that are not averaged yet."""
    return _waits(*_managed(root, parameter)[1:])


def _waits(group: Any, kept: Any) -> bool:
    whole = getattr(kept, "_unsharded_param", None)
    sums = [getattr(whole, "grad", None), getattr(kept, "unsharded_accumulated_grad", None)]
    sums.append(getattr(group, "_partial_reduce_output", None))  # HSDP: before the all-reduce
    return any(one is not None for one in sums)


class OwnGradient:
    """The gradient of one backward in a parameter of FSDP2, averaged and sharded.

    FSDP2 would add it to those of earlier backwards, before or after it averages them. So a group
    with a hook averages in every backward, and what ``.grad`` has is set aside and added later.
    """

    def __init__(self, root: nn.Module, parameter: nn.Parameter) -> None:
        self._module, self._group, self._kept = _managed(root, parameter)
        self._earlier: Tensor | None = None
        self._has_begun = False  # a backward has reached it and is not averaged yet

    def register_hook(
        self, hook: Callable[[Any], Any], refuse: Callable[[str], None]
    ) -> OwnGradient:
        """Register the only hook; ``remove`` removes it.

        Args:
            refuse: Gets the reason why a backward can't run the hook.
        """
        self._hook, self._refuse = hook, refuse
        parameter = self._kept.sharded_param
        self._sum = _reference(parameter.grad)  # where FSDP2 would add this backward's
        self._handles = [parameter.register_post_accumulate_grad_hook(self._run)]
        if not self._follow():
            register = self._module.register_forward_pre_hook
            self._handles.append(register(self._begin_forward))
        return self

    @outside_graphs
    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        if self._follow():
            self._handles[1].remove()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _follow(self) -> bool:
        """Register at the whole parameter, which FSDP2 makes in its first forward and keeps."""
        whole = getattr(self._kept, "_unsharded_param", None)
        if whole is not None:
            self._handles.append(whole.register_hook(self._begin))
        return whole is not None

    def _begin(self, grad: Tensor) -> None:
        """Begin a backward, before it adds anything to the whole parameter's gradient."""
        self._module.set_requires_gradient_sync(True, recurse=False)
        if self._has_begun:  # in parts: reentrant checkpointing
            return
        if _waits(self._group, self._kept):
            problem = (
                "gradients of earlier backwards, without gradient synchronization and without the "
                "hook, wait for FSDP2 to average them, and the hook would get their sum; register "
                "it before the first of them, or run their last one without it (groups=()) after "
                "set_requires_gradient_sync(True)"
            )
            self._refuse(problem)
        parameter = self._kept.sharded_param
        self._has_begun = True
        self._earlier, parameter.grad = parameter.grad, None
        self._sum = _reference(self._earlier)
        # After the hooks of all FlexModels; FSDP2 forbids that it is removed while it is called.
        adding = parameter.register_post_accumulate_grad_hook(self._add)

        def restore() -> None:
            adding.remove()
            if self._earlier is not None:
                parameter.grad, self._earlier = self._earlier, None

        def abort() -> None:
            self._has_begun = False
            restore()

        aborted = _C.Finalizer(abort)  # with `end`, which autograd drops

        def end() -> None:
            aborted.cancel()
            restore()

        call_last(end)

    def _run(self, parameter: nn.Parameter) -> None:
        self._has_begun = False
        if self._sum is not None and parameter.grad is self._sum():
            problem = (
                "FSDP2 has added this backward's gradient to an earlier one, and the hook would "
                "get their sum; set gradients to None before each backward "
                "(zero_grad(set_to_none=True)), or hook the module's gradients"
            )
            self._refuse(problem)
            return
        parameter.grad = self._hook(parameter.grad)
        self._sum = _reference(parameter.grad if self._earlier is None else self._earlier)

    def _add(self, parameter: Any) -> None:
        if self._earlier is not None:
            with torch.no_grad():
                parameter.grad, self._earlier = self._earlier.add_(parameter.grad), None


def _reference(tensor: Tensor | None) -> Any:
    return None if tensor is None else weakref.ref(tensor)


def accumulates(root: nn.Module) -> bool:
    """Whether gradients are kept before they are averaged, or would be: by FSDP2 beside ``.grad``,
    by FSDP1 in it, unsharded.
    """
    for module in filter(is_fsdp2, root.modules()):
        for group in param_groups(module):
            waits = any(_waits(group, kept) for kept in group.fsdp_params)
            if waits or not (group.reduce_grads and group.all_reduce_grads):
                return True
    return any(p.grad is not None and p.grad.shape != p.shape for p in root.parameters())


def owner_fsdp2(root: nn.Module, name: str) -> Any:
    """Return the module with ``fully_shard`` that manages the parameter of this name, or None."""
    parts = names.find_parameter(root, name)[0].split(".")[:-1]
    modules = itertools.accumulate(parts, nn.Module.get_submodule, initial=root)
    return next(filter(is_fsdp2, reversed([*modules])), None)


def kept_parameters(root: nn.Module) -> list[nn.Parameter]:
    """Return the parameters whose ``.grad`` a backward sets: under FSDP2 the sharded ones."""
    if not any(is_fsdp2(module) for module in root.modules()):
        return list(root.parameters())
    return [
        sharded_parameter(root, name, parameter)
        for name, parameter in list(root.named_parameters())
    ]

"""FSDP1 and FSDP2: the module that owns a parameter, and access to the full parameter."""

from __future__ import annotations

import contextlib
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flex_model import _C, names
from flex_model.integrations.compiled import outside_graphs
from flex_model.integrations.torch_private import (
    accumulation_hooks,
    call_last,
    current_graph_task,
    fsdp2_state,
)


def _is_a(name: str, module: nn.Module) -> bool:
    return isinstance(module, getattr(sys.modules.get("torch.distributed.fsdp"), name, ()))


def is_fsdp1(module: nn.Module) -> bool:
    """Whether a module is a ``FullyShardedDataParallel`` (FSDP1) wrapper."""
    return _is_a("FullyShardedDataParallel", module)


def is_fsdp2(module: nn.Module) -> bool:
    """Whether ``fully_shard`` (FSDP2) was applied to a module."""
    return _is_a("FSDPModule", module)


def mesh_of_fsdp2(module: Any) -> Any:
    """Return the mesh that was passed to ``fully_shard``; None for a module without own parameters.
    DTensors may have an equal mesh with another root mesh, from torch's caches. Torch has no public
    attribute for it.
    """
    group = getattr(fsdp2_state(module), "_fsdp_param_group", None)
    return getattr(getattr(group, "mesh_info", None), "mesh", None)


def wrappers_of_parameter(root: nn.Module, name: str) -> list[Any]:
    """Return the FSDP1 wrappers around the parameter of this (clean or wrapped) name, the outermost
    first. The last one owns it.
    """
    names.check_name(name, "parameter")
    target, found = name.replace("_fsdp_wrapped_module.", ""), []
    for module_name, module in root.named_modules():
        if is_fsdp1(module):
            prefix = names.clean(root, module_name)
            if not prefix or target.startswith(f"{prefix}."):
                found.append(module)
    return found


def wrapper_of_parameter(root: nn.Module, name: str) -> Any:
    """Return the FSDP1 wrapper that owns the parameter of this (clean or wrapped) name, or None."""
    return next(reversed(wrappers_of_parameter(root, name)), None)


@contextlib.contextmanager
def summoned(
    root: nn.Module, wrapper: Any, name: str, *, writeback: bool, with_grads: bool
) -> Iterator[None]:
    """Gather the parameters of this FSDP1 wrapper in full, inside. Collective over its group.

    Args:
        name: The requested parameter, for messages.

    Raises:
        ValueError: the wrapper is in its forward or backward, or has no gradients by parameter.
    """
    shown = names.clean(root, name)
    _check_idle(wrapper, shown)
    # FSDP1 must initialize the outermost wrapper first, or the model can't run afterwards.
    wrappers_of_parameter(root, name)[0].check_is_root()
    summon = wrapper.summon_full_params  # static
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(
                summon(wrapper, recurse=False, writeback=writeback, with_grads=with_grads)
            )
        except NotImplementedError as error:
            raise ValueError(
                f"get_module_gradient: parameter {shown!r} belongs to a FullyShardedDataParallel "
                "(FSDP1) module that keeps one flattened gradient for all its parameters; give it "
                "use_orig_params=True, or use torch.distributed.fsdp.fully_shard"
            ) from error
        yield


def in_use(root: nn.Module, wrapper: Any, name: str) -> tuple[nn.Module, Tensor] | None:
    """Return the module that owns a parameter of FSDP1, and the gathered parameter that the running
    forward or backward uses; None if the unit does not run, or has freed it. Local.
    """
    if wrapper.training_state.name != "FORWARD_BACKWARD":
        return None
    module, leaf = _owner(root, name)
    value: Any = names.own_tensor(module, leaf)
    # While gathered, the attribute is a view of the flat parameter; otherwise it is a Parameter.
    is_view = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
    if not is_view or not value.untyped_storage().size():
        return None
    return module, value


def find_parameter(root: nn.Module, name: str) -> tuple[str, Any, Any]:
    """Find a parameter, also one that FSDP1 has flattened: its module keeps a view as an attribute.
    Return its full name, itself or the view, and the FSDP1 wrapper that owns it, or None.

    Raises:
        ValueError: there is none.
    """
    wrapper = wrapper_of_parameter(root, name)
    if wrapper is not None and any(is_flat(inner) for inner, _ in wrapper.named_parameters()):
        module, leaf = _owner(root, name)
        view = vars(module).get(leaf)
        if isinstance(view, Tensor):
            return name, view, wrapper
    full_name, _, parameter = names.find_parameter(root, name)
    return full_name, parameter, wrapper


def _owner(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module of a (clean or wrapped) parameter of FSDP1, and its name there."""
    module_name, _, leaf = name.replace("_fsdp_wrapped_module.", "").rpartition(".")
    return names.find_module(root, module_name), leaf


class GatheredParameter:
    """A parameter of an FSDP1 wrapper, as its forwards use it: a view of what the wrapper gathers.
    The view's gradient is the rank's own, in full, before it is averaged and sharded.
    """

    def __init__(self, root: nn.Module, wrapper: Any, name: str) -> None:
        self._root, self._wrapper, self._name = root, wrapper, name
        self._hook: Callable[[Tensor], Tensor | None] | None = None
        self._view: Callable[[], Tensor | None] = lambda: None  # the last one that has the hook
        self._backward = -1  # the last one that has called it

    def register_hook(
        self, hook: Callable[[Tensor], Tensor | None], refuse: Callable[[str], None]
    ) -> GatheredParameter:
        """Register the only hook on the gradients of the views; ``remove`` removes it.

        Args:
            refuse: Gets the reason why a backward can't run the hook.
        """
        self._hook, self._refuse = hook, refuse
        inside, flat = self._wrapper.module, self._wrapper._flat_param  # all gradients end there
        before = inside.register_forward_pre_hook(self._begin_forward)
        self._handles = before, flat.register_hook(self._end_backward)
        return self

    def remove(self) -> None:
        self._hook = None
        for handle in self._handles:
            handle.remove()

    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        _, view = in_use(self._root, self._wrapper, self._name) or (None, None)
        if view is not None and view.requires_grad and view is not self._view():
            self._view = weakref.ref(view)
            view.register_hook(self._run)

    def _run(self, grad: Tensor) -> Tensor | None:
        before, self._backward = self._backward, current_graph_task()
        if self._hook is None:
            return None
        if before != self._backward:
            return self._hook(grad)
        problem = (
            "this backward is of several forwards of its FSDP1 module, each of which has a part of "
            "the gradient; run backward after each forward, or hook the module's gradients"
        )
        self._refuse(problem)
        return None

    def _end_backward(self, grad: Tensor) -> None:
        if self._backward != current_graph_task():
            problem = (
                "it was registered after the forward, or for one of ignored_modules; register it "
                "before FSDP1 gathers its parameter, or hook the module's gradients"
            )
            self._refuse(problem)


def _check_idle(wrapper: Any, name: str) -> None:
    doing = {"FORWARD_BACKWARD": "it runs", "SUMMON_FULL_PARAMS": "summon_full_params is on"}
    state = wrapper.training_state.name
    if state in doing:
        raise ValueError(
            f"parameter {name!r} belongs to a FullyShardedDataParallel (FSDP1) module, which can't "
            f"be gathered while {doing[state]}; do it before or after, or shard with "
            "torch.distributed.fsdp.fully_shard"
        )


def is_flat(name: str) -> bool:
    """Whether this is the name of a flat parameter of FSDP1."""
    return name.rpartition(".")[2] == "_flat_param"


def names_in_flat(root: nn.Module, name: str) -> list[str]:
    """Return the names of the parameters in FSDP1's flat parameter. Collective over its group."""
    wrapper_name = name.removesuffix("_flat_param").removesuffix("_fsdp_wrapped_module.")
    wrapper = root.get_submodule(wrapper_name.rstrip("."))
    with summoned(root, wrapper, name, writeback=False, with_grads=False):
        inside = [inner for inner, _ in wrapper.named_parameters() if not is_flat(inner)]
    return [wrapper_name + inner for inner in inside]


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
        for group in _groups(module):
            for kept in getattr(group, "fsdp_params", ()):
                if kept.sharded_param is parameter:
                    return module, group, kept
    return None, None, None


def _groups(module: nn.Module) -> list[Any]:
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
        for group in _groups(module)
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
        for group in _groups(module):
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

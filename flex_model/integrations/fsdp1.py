"""FSDP1: the wrapper that owns a parameter, access to the full one, and its own gradient."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from flex_model import names
from flex_model.integrations.torch_private import current_graph_task


def is_fsdp1(module: nn.Module) -> bool:
    """Whether a module is a ``FullyShardedDataParallel`` (FSDP1) wrapper."""
    torch_fsdp = sys.modules.get("torch.distributed.fsdp")
    return isinstance(module, getattr(torch_fsdp, "FullyShardedDataParallel", ()))


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
    return names.wrapped_chain(names.find_module(root, module_name))[-1], leaf


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

"""Names of modules and parameters: as in the model, or clean, without the parts of wrappers."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn

from flex_model.errors import nearest

# Children under which wrappers keep the module that they wrap.
_WRAPPED_CHILDREN = {"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"}
# These keep it under "module": torch's, and Megatron's.
_WRAPPER_CLASSES = {"DistributedDataParallel", "DataParallel", "Float16Module"}


def clean(module: nn.Module, name: str) -> str:
    """Return the name of a module or parameter of ``module`` without the parts of wrappers.

    ``module.layers.0`` under DDP is ``layers.0``; ``layers.0._fsdp_wrapped_module.fc`` is
    ``layers.0.fc``.
    """
    parts = []
    for part in name.split(".") if name else []:
        is_wrapper = part in _WRAPPED_CHILDREN or (
            part == "module" and type(module).__name__ in _WRAPPER_CLASSES
        )
        children = getattr(module, "_modules", {})  # of a ScriptModule: no dict, and no get()
        # A child may be falsy: it may have len().
        child = children[part] if part in children else None  # noqa: SIM401
        is_stage = child is not None and type(module).__name__ == "LocalStages"  # of a pipeline
        if not is_wrapper and not is_stage:
            parts.append(part)
        module = module if child is None else child
    return ".".join(parts)


def wrapped_chain(root: nn.Module) -> list[nn.Module]:
    """Return a module and, where it is a wrapper (DDP, FSDP1, a compiled module), those inside, the
    outermost first.
    """
    chain = [root]
    while True:
        children, is_ddp = chain[-1]._modules, type(chain[-1]).__name__ in _WRAPPER_CLASSES
        names = _WRAPPED_CHILDREN | {"module"} if is_ddp else _WRAPPED_CHILDREN
        held = (children[name] for name in sorted(names) if name in children)
        inner = [child for child in held if child is not None]
        if not inner:
            return chain
        chain.append(inner[0])


def own_tensor(module: nn.Module, name: str) -> Any:
    """Return what the module itself holds by this name, None without it: a parameter, a buffer or a
    plain attribute. Reading it as an attribute may run a property, which computes a parametrized
    weight: that draws numbers, or makes a step of a power iteration.
    """
    tables = (module._parameters, module._buffers, vars(module))
    return next((table[name] for table in tables if name in table), None)


def check_name(name: object, what: str) -> None:
    """Raise TypeError if the name is not a str."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a {what} must be a str, got {type(name).__name__}")


def module_names(root: nn.Module) -> list[str]:
    """Return the names of all modules below ``root``, not cleaned."""
    return [name for name, _ in root.named_modules(remove_duplicate=False) if name]


def find_module(root: nn.Module, name: str) -> nn.Module:
    """Return the module of this name, wrapped or clean; the outermost if several match.

    Raises:
        ValueError: no module has the name; the message has the nearest names.
    """
    check_name(name, "module")
    with contextlib.suppress(AttributeError, RuntimeError):  # RuntimeError: of a ScriptModule
        return root.get_submodule(name)
    cleaned: dict[str, nn.Module] = {}
    for full_name, module in root.named_modules(remove_duplicate=False):
        cleaned.setdefault(clean(root, full_name), module)
    if name in cleaned:
        return cleaned[name]
    raise ValueError(
        f"{type(root).__name__} has no module {name!r}; "
        f"{nearest(name, list(cleaned)[1:] or cleaned, 'module')}"
    )


def find_parameter(root: nn.Module, name: str) -> tuple[str, nn.Module, nn.Parameter]:
    """Find a parameter by its name, wrapped or clean; return its full name, the module that owns it
    and the parameter.

    Raises:
        ValueError: no parameter has the name, or it is a buffer; the message has the nearest names.
    """
    check_name(name, "parameter")
    with contextlib.suppress(AttributeError):
        owner, _, leaf = name.rpartition(".")
        module = root.get_submodule(owner)
        if isinstance(parameter := own_tensor(module, leaf), nn.Parameter):
            return name, module, parameter
    cleaned: dict[str, tuple[str, nn.Parameter]] = {}
    for full_name, parameter in root.named_parameters(remove_duplicate=False):
        cleaned.setdefault(full_name, (full_name, parameter))
        cleaned.setdefault(clean(root, full_name), (full_name, parameter))
    if name not in cleaned:
        buffers = dict(root.named_buffers(remove_duplicate=False))
        if name in buffers or any(clean(root, buffer) == name for buffer in buffers):
            raise ValueError(
                f"{name!r} is a buffer of {type(root).__name__}, not a parameter; every rank has "
                "its own: read it with flex.module.get_buffer(...)"
            )
        raise ValueError(
            f"{type(root).__name__} has no parameter {name!r}; "
            f"{nearest(name, cleaned, 'parameter')}"
        )
    full_name, parameter = cleaned[name]
    return full_name, root.get_submodule(full_name.rpartition(".")[0]), parameter


def first_name(root: nn.Module, name: str) -> str:
    """Return the clean first name of a tied parameter, by any of its names, wrapped or clean.

    Raises:
        ValueError: no parameter has the name; the message has the nearest names.
    """
    full_name, _, parameter = find_parameter(root, name)
    first = (first for first, other in root.named_parameters() if other is parameter)
    return clean(root, next(first, full_name))

"""Names of modules and parameters: as in the model, or clean, without the parts of wrappers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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
        is_wrapper = part in _names_of_wrapped(module)
        children = getattr(module, "_modules", {})  # of a ScriptModule: no dict, and no get()
        # A child may be falsy: it may have len().
        child = children[part] if part in children else None  # noqa: SIM401
        is_stage = child is not None and type(module).__name__ == "LocalStages"  # of a pipeline
        if not is_wrapper and not is_stage:
            parts.append(part)
        module = module if child is None else child
    return ".".join(parts)


def _names_of_wrapped(module: nn.Module) -> set[str]:
    """Return the names under which a module of this class keeps one that it wraps."""
    is_known = type(module).__name__ in _WRAPPER_CLASSES
    return _WRAPPED_CHILDREN | {"module"} if is_known else _WRAPPED_CHILDREN


def wrapped_chain(root: nn.Module) -> list[nn.Module]:
    """Return a module and, where it is a wrapper (DDP, FSDP1, a compiled module), those inside, the
    outermost first.
    """
    chain = [root]
    while True:
        children = chain[-1]._modules
        names = sorted(_names_of_wrapped(chain[-1]))
        held = (children[name] for name in names if name in children)
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
    """Return the module of this name, clean or wrapped; the outermost if several match.

    Raises:
        ValueError: no module has the name; the message has the nearest names.
    """
    check_name(name, "module")
    for _, module in _by_clean_name(root, name.split(".") if name else []):
        return module
    with contextlib.suppress(AttributeError, RuntimeError):  # RuntimeError: of a ScriptModule
        return root.get_submodule(name)
    names = list(dict.fromkeys(clean(root, full_name) for full_name in ["", *module_names(root)]))
    raise ValueError(
        f"{type(root).__name__} has no module {name!r}; "
        f"{nearest(name, names[1:] or names, 'module')}"
    )


def _by_clean_name(
    module: nn.Module | None, parts: list[str], above: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with the clean name of these parts and their full names, the outermost
    first.
    """
    if module is None:
        return
    if not parts:
        yield above, module
    children = getattr(module, "_modules", {})
    is_of_stages = type(module).__name__ == "LocalStages"
    wrapped = children if is_of_stages else sorted(_names_of_wrapped(module))
    ways = [(name, parts) for name in wrapped if name in children]
    if parts and parts[0] in children and parts[0] not in wrapped:
        ways.insert(0, (parts[0], parts[1:]))
    for name, rest in ways:
        yield from _by_clean_name(children[name], rest, f"{above}.{name}".lstrip("."))


def find_parameter(root: nn.Module, name: str) -> tuple[str, nn.Module, nn.Parameter]:
    """Find a parameter by its name, clean or wrapped; return its full name, the module that owns it
    and the parameter.

    Raises:
        ValueError: no parameter has the name, or it is a buffer; the message has the nearest names.
    """
    check_name(name, "parameter")
    owner, _, leaf = name.rpartition(".")
    held = list(_by_clean_name(root, owner.split(".") if owner else []))
    with contextlib.suppress(AttributeError):
        held.append((owner, root.get_submodule(owner)))
    for prefix, module in held:
        if isinstance(parameter := own_tensor(module, leaf), nn.Parameter):
            return f"{prefix}.{leaf}".lstrip("."), module, parameter
    buffers = dict(root.named_buffers(remove_duplicate=False))
    if name in buffers or any(clean(root, buffer) == name for buffer in buffers):
        raise ValueError(
            f"{name!r} is a buffer of {type(root).__name__}, not a parameter; every rank has "
            "its own: read it with flex.module.get_buffer(...)"
        )
    parameters = [full_name for full_name, _ in root.named_parameters(remove_duplicate=False)]
    names = [one for full in parameters for one in (full, clean(root, full))]
    raise ValueError(
        f"{type(root).__name__} has no parameter {name!r}; {nearest(name, names, 'parameter')}"
    )


def first_name(root: nn.Module, name: str) -> str:
    """Return the clean first name of a tied parameter, by any of its names, wrapped or clean.

    Raises:
        ValueError: no parameter has the name; the message has the nearest names.
    """
    full_name, _, parameter = find_parameter(root, name)
    first = (first for first, other in root.named_parameters() if other is parameter)
    return clean(root, next(first, full_name))

"""Checks the arguments of a sequential run before its first batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from flex_model.hooks.core import HookCore
from flex_model.integrations.compiled import is_compiled_itself
from flex_model.records.store import ActivationStore
from flex_model.runs.root_hooks import RootHooks
from flex_model.sequential.targets import Target


def check_types(model: object, batches: object, device: object, **functions: object) -> None:
    """TypeError for a model, batches, a device or functions of a wrong type."""
    checked: list[tuple[str, object, Any, str]] = [
        ("expected an nn.Module or a FlexModel", model, nn.Module, ""),
        ("batches must be an iterable", batches, Iterable, "; of one batch: [batch]"),
        ("device must be a str, a torch.device or None", device, str | torch.device | None, ""),
    ]
    for name, function in functions.items():
        checked.append((f"{name} must be a function or None", function, Callable | None, ""))
    for expected, value, kind, advice in checked:
        if not isinstance(value, kind):
            raise TypeError(f"sequential.run: {expected}, got {type(value).__name__}{advice}")
    if "schedule" in vars(model):
        raise TypeError(
            "sequential.run: the model is a FlexModel over a schedule, which alone runs its "
            "stages; give the unsplit model"
        )


def check_device(device: str | torch.device | None) -> None:
    """ValueError for a device that nothing can run on."""
    try:
        torch.empty(0, device=device or "cpu")
    except Exception as error:  # of another type for each kind of device
        raise ValueError(
            f"sequential.run: device {str(device)!r} can't be used: {error}; give 'cpu' or a "
            "device that torch has here, or leave device= out"
        ) from error


def check_counts(window: object, targets_per_step: object, prefetch: object) -> None:
    for name, value, least in (
        ("window", 1 if window is None else window, 1),
        ("targets_per_step", targets_per_step, 1),
        ("prefetch", prefetch, 0),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(
                f"sequential.run: {name} must be a whole number of at least {least}, got {value!r}"
            )


def check_offload(offload_activations: str, has_weights: bool) -> None:
    if offload_activations not in ("none", "cpu", "disk"):
        raise ValueError(
            "sequential.run: offload_activations must be 'none', 'cpu' or 'disk', got "
            f"{offload_activations!r}"
        )
    if offload_activations != "none" and torch.is_grad_enabled() and not has_weights:
        raise ValueError(
            f"sequential.run: offload_activations={offload_activations!r} needs gradients off, "
            "since a graph holds activations where they are; run it under torch.no_grad()"
        )


def store_of(store: object, core: HookCore | None) -> ActivationStore | None:
    """Return where records go: the store passed, or the FlexModel's own; None: ``output_ptr``."""
    own = None if core is None or core.runs.session is None else core.runs.session.store
    if store is None:
        return own
    if not isinstance(store, ActivationStore):
        raise TypeError(
            f"sequential.run: store must be an ActivationStore, got a {type(store).__name__}; "
            "sequential.ActivationStore(folder)"
        )
    if core is None:
        raise TypeError(
            "sequential.run: a store keeps what hooks record, and a plain module has none; give a "
            "FlexModel with hooks"
        )
    if own is not None and own is not store:
        raise ValueError(
            f"sequential.run: the FlexModel's records go to {own.folder}, and store= is "
            f"{store.folder}; give one of them"
        )
    return store


def check_not_compiled(module: nn.Module, found: list[Target]) -> None:
    """ValueError for targets inside compiled modules."""
    targets = {target.module for target in found}
    for name, part in module.named_modules():
        if is_compiled_itself(part) and not targets.isdisjoint(part.modules()):
            raise ValueError(
                f"sequential.run: {name or 'the model'} is compiled, and compiled code can't be "
                "suspended at a target inside; run the module that was compiled (._orig_mod)"
            )


def check_no_other_hooks(module: nn.Module, found: list[Target], core: HookCore | None) -> None:
    """RuntimeError for hooks of another FlexModel, for which the batches in progress would be one
    run.
    """
    targets, own = {target.module for target in found}, None if core is None else core.runs
    for name, part in module.named_modules():
        hooks = part._forward_pre_hooks.values()
        roots = [getattr(hook, "__self__", None) for hook in hooks]
        has_others = any(isinstance(root, RootHooks) and root.runs is not own for root in roots)
        if has_others and not targets.isdisjoint(set(part.modules()) - {part}):
            raise RuntimeError(
                f"sequential.run: {name or 'the model'} has hooks of a FlexModel that is not the "
                "one that is run; give that one, restore() it, or run one batch at a time, window=1"
            )

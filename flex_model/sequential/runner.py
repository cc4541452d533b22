"""``run``: a model over a data set, target by target; its arguments are checked before the first
batch.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flex_model.errors import check_type
from flex_model.hooks.core import HookCore
from flex_model.hooks.groups import as_names
from flex_model.hooks.random_state import advance_generator
from flex_model.integrations.compiled import is_compiled_itself
from flex_model.integrations.fsdp2 import is_fsdp2
from flex_model.model import FlexModel
from flex_model.records.store import ActivationStore
from flex_model.runs.batches import BatchRuns
from flex_model.runs.interrupts import Cleanup, deferred
from flex_model.runs.root_hooks import RootHooks
from flex_model.sequential import targets as choosing
from flex_model.sequential.engine import ActivationOffloader, Batch, Engine
from flex_model.sequential.store import StoredRecords
from flex_model.sequential.targets import Target
from flex_model.sequential.weights.loader import (
    WeightLoader,
    device_of,
    loaded,
    moved,
    needs_loading,
    weights_of_hooks,
)
from flex_model.sequential.weights.source import WeightSource

_MOST_BATCHES = 256  # of a window, where none is given


class RunResult(list[Any]):
    """The outputs of a run in the order of its batches.

    Attributes:
        save_ctxs: The batches' ``save_ctx``, in their order; empty ones without a FlexModel.
        loads: How often each target's weights were loaded, by name; {} without weights.
        bytes_read: Bytes of weights read from their source.
    """

    def __init__(self) -> None:
        super().__init__()
        self.save_ctxs: list[Namespace] = []
        self.loads: dict[str, int] = {}
        self.bytes_read = 0


def run(
    model: nn.Module,
    batches: Iterable[Any],
    targets: str | Sequence[str] = "auto",
    *,
    weights: str | Path | WeightSource | None = None,
    window: int | None = None,
    targets_per_step: int = 1,
    prefetch: int = 1,
    offload_activations: str = "none",
    offload_dir: str | Path | None = None,
    device: str | torch.device | None = None,
    groups: str | Iterable[str] = "all",
    complement: bool = False,
    call: Callable[[nn.Module, Any], Any] | None = None,
    on_output: Callable[[int, Any], Any] | None = None,
    on_target_end: Callable[[str, list[int]], Any] | None = None,
    progress: bool = False,
    store: ActivationStore | None = None,
) -> RunResult:
    """Run a model over many batches, target by target (usually decoder layer by decoder layer):
    each target's weights are loaded once per window of batches.

    The result equals ``[model(**batch) for batch in batches]`` bit for bit, hooks and edits
    included, for any Python control flow: each batch's forward is an ordinary one, suspended at the
    entry of a target until that target's turn comes.

    Example::

        with torch.device("meta"):
            model = LlamaForCausalLM(config).eval()
        flex = FlexModel(model, activations := {})
        flex.register_forward_hook(HookFunction("model.layers.7.mlp", editing_function=steer))
        outputs = sequential.run(flex, batches, weights="checkpoint/", window=8)

    Args:
        model: A module, or a FlexModel, whose hooks run. ``save_ctx`` of an editing function is its
            batch's own, and starts as a shallow copy of ``flex.save_ctx``; ``flex.shared_ctx`` is
            shared by all. ``output_ptr`` is in batch order, then call order.
        batches: Read a window at a time; with ``prefetch``, where weights are loaded, also the
            first of the next one. The model is called as ``model(**batch)`` with a Mapping, as
            ``model(*batch)`` with a tuple or list, else as ``model(batch)``. Shapes may differ.
        targets: ``"auto"`` (the model's ``_no_split_modules``, else the members of its largest
            ModuleList), or names, class names and ``re:`` patterns, as in ``match_modules``.
        weights: None: the model's own. Else a safetensors file, a Hugging Face folder or a
            ``WeightSource``: the model may be on meta, gradients are off, and weights outside
            targets (embedding, norm, head) are loaded once. The model's parameters are put back.
        window: The number of batches in progress at once (default: all, at most 256; 1 with FSDP2).
            Memory grows with it.
        targets_per_step: The number of neighbouring targets that are loaded together.
        prefetch: The number of steps that are read ahead in a thread; 0: none.
        offload_activations: Where a waiting batch's activations are: ``"none"`` (where they were
            computed), ``"cpu"`` or ``"disk"``.
        offload_dir: For ``"disk"``: the folder whose disk is used; the files have no names.
        device: Where it runs. Default: where the model is; for meta, the current CUDA device if
            there is one, else the CPU. With weights to load, batches are moved there; those of a
            model that is elsewhere in memory are copied there target by target, too.
        groups, complement: Of hooks, as in ``FlexModel.forward``.
        call: ``call(model, batch)`` instead of calling the model.
        on_output: ``on_output(index, output)``, in batch order; what it returns is kept instead.
        on_target_end: ``on_target_end(name, indices)``, when these batches have left the target.
        progress: Show a bar on stderr (needs tqdm).
        store: Where records go instead of ``output_ptr``, on disk (default: the FlexModel's own
            store, if it has one). Batches that it has are not run: their outputs are None. Each
            window has files of its own, so a run that was killed continues after its last window
            when it is called again. ``input_ids`` and ``attention_mask`` of a batch are stored too.

    Returns:
        The outputs in batch order, with ``save_ctxs``, ``loads`` and ``bytes_read``.

    The bits are those of a model whose weights are where torch puts them, at multiples of 64 bytes.
    ``from_pretrained`` leaves them where they are in the file; on CPUs the last bits of some matrix
    products depend on that.

    Random numbers: the first batch starts with the caller's random state, the others each with a
    random state derived from it, the same for every window. Random edits draw what they draw in a
    plain loop, if those of every batch draw: the next batch starts before that is known.

    Attributes that a forward sets on the model's modules, or deletes, are its own batch's.

    Not equal to a loop, unless ``window=1``: forwards that depend on earlier batches (BatchNorm in
    training), or read after a target what they have kept in the model otherwise: in buffers, in
    lists, dicts and objects that attributes hold, by compiled code, from another thread.

    Collective on a sharded model: every rank passes the same number of batches in the same order.

    Raises:
        ValueError: a target that matches nothing; a weight that is in no source, named, before the
            first batch: one on meta, or any parameter that ``weights`` lack; a weight with two
            names and two values there; activations to be offloaded with gradients on; hooks on
            gradients while weights are loaded.
        TypeError: an argument of a wrong type, before the first batch.
        Exception: what a batch raised, with its own type (``HookError`` for editing functions);
            ``error.batch_index`` is the batch. No thread, hook or loaded weight is left.
    """
    functions = {"call": call, "on_output": on_output, "on_target_end": on_target_end}
    check_types(model, batches, device, **functions)
    core = model._core if isinstance(model, FlexModel) else None
    module: nn.Module = model.module if isinstance(model, FlexModel) else model
    check_device(device)
    check_counts(window, targets_per_step, prefetch)
    if any(map(is_fsdp2, module.modules())):
        if window not in (None, 1):
            raise ValueError(
                "sequential.run: FSDP2 drops what it has gathered at the end of a batch, while "
                f"others wait inside the model; got window={window}, use window=1"
            )
        window = 1
    window = _MOST_BATCHES if window is None else window
    check_offload(offload_activations, weights is not None)
    store = store_of(store, core)
    if core is None and set(as_names(groups)) - {"all"}:
        raise ValueError(
            f"sequential.run: groups={groups!r} are of hooks, which a plain module does not have; "
            "give a FlexModel, or leave groups= out"
        )
    found = choosing.choose(module, targets, targets_per_step)
    check_not_compiled(module, found)
    if window != 1:
        check_no_other_hooks(module, found, core)
    result = RunResult()
    with Cleanup() as stack:
        place = device_of(module, device)
        is_loaded = weights is not None or needs_loading(module, device, place)
        if is_loaded and core is not None:
            check_no_backward_hooks(core, groups, complement)
        hooks = loader = offloader = records = None
        with deferred():  # so that nothing begins that the stack does not have
            if is_loaded:
                stack.enter_context(torch.no_grad())
            if core is not None:
                model._check_open()  # type: ignore[operator]
                hooks = stack.enter_context(BatchRuns(core, core.table.choice(groups, complement)))
            if core is not None and store is not None:
                records = stack.enter_context(StoredRecords(store, core))
            if is_loaded:
                wanted = [] if core is None else weights_of_hooks(core)
                made = loaded(module, found, weights, place, prefetch, wanted)
                loader = stack.enter_context(made)
            if offload_activations != "none":
                offloader = ActivationOffloader(module, offload_activations, offload_dir)
            is_shown = progress and (core is None or core.communicator.mesh.rank == 0)
            shown: Any = batches if is_shown else None
            bar = progress_bar(shown, window, found, loader, result)
            count_steps = stack.enter_context(bar)
        if loader is not None:
            loader.load_resident()

        def deliver(batch: Batch) -> None:
            output = batch.call.take_value()
            result.save_ctxs.append(Namespace() if batch.hooks is None else batch.hooks.save_ctx)
            if hooks is not None and batch.hooks is not None:
                if records is not None:
                    records.take(batch)
                hooks.delivered(batch.hooks)
            result.append(output if on_output is None else on_output(batch.index, output))
            count_steps(0)

        def forward(batch: Any) -> Any:
            if loader is not None:
                batch = moved(batch, place)
            try:
                return _call(module, batch) if call is None else call(model, batch)
            except RuntimeError as error:  # torch's, of a backward
                is_torchs = type(error) is RuntimeError and "does not require grad" in str(error)
                if not (is_loaded and is_torchs):
                    raise
                raise RuntimeError(
                    f"sequential.run: the batch runs a backward, {_NO_GRADIENTS}"
                ) from error

        engine = Engine(
            module,
            found,
            forward,
            hooks,
            loader,
            offloader,
            cuda_device=place.index if place.type == "cuda" else None,
            deliver=deliver,
            on_step=count_steps,
            on_target_end=on_target_end,
            on_window_end=(lambda: None) if records is None else records.end_window,
        )
        num_stored = 0 if records is None else records.num_stored
        if records is not None and hooks is not None:
            batches = records.missing(batches)
            hooks.skip(num_stored)
            result.extend([None] * num_stored)
            result.save_ctxs.extend(Namespace() for _ in range(num_stored))
            count_steps(0)
        engine.run(batches, window, first=num_stored)
        if records is not None:
            records.flush()
        if loader is not None:
            result.loads, result.bytes_read = dict(loader.loads), loader.bytes_read
    if engine.has_drawn:
        advance_generator()
    return result


_NO_GRADIENTS = (
    "but gradients are off while weights are loaded; run a model that is in memory, without "
    "weights= and device="
)


def check_no_backward_hooks(core: HookCore, groups: str | Iterable[str], complement: bool) -> None:
    """ValueError for hooks that would never be called, since no backward runs."""
    for one in core.table.chosen(core.table.choice(groups, complement)):
        if one.is_backward or one.kind == "tensor":
            raise ValueError(
                f"sequential.run: {one.describe()} needs a backward, {_NO_GRADIENTS}, or leave the "
                "hook out by groups="
            )


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


@contextmanager
def progress_bar(
    batches: Iterable[Any] | None,
    window: int,
    targets: list[Target],
    loader: WeightLoader | None,
    result: RunResult,
) -> Iterator[Callable[..., None]]:
    """A context with a bar on stderr that counts steps in all windows, with the batches that are
    done, the loads and the bytes read; nothing where ``batches`` is None. Yields the function that
    counts more steps.

    The total, and so the remaining time, is known if ``batches`` has a length, for models that call
    each target once.

    Raises:
        ImportError: a bar is asked for, and tqdm isn't there.
    """
    if batches is None:
        yield lambda number=1: None
        return
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError(
            "sequential.run: progress=True shows a bar of tqdm, which is not installed; "
            "pip install tqdm, or use on_target_end"
        ) from error
    num_steps, total = None, ""
    if isinstance(batches, Sized):
        total = f"/{len(batches)}"
        num_windows = -(-len(batches) // window)
        num_steps = (targets[-1].step + 1) * num_windows

    def count_steps(number: int = 1) -> None:
        facts = {"batches": f"{len(result)}{total}"}
        if loader is not None:
            facts["loads"] = str(sum(loader.loads.values()))
            facts["read"] = f"{loader.bytes_read / 2**20:.0f} MiB"
        bar.set_postfix(facts, refresh=False)
        bar.update(number)

    with tqdm(total=num_steps, desc="sequential run", unit=" steps", dynamic_ncols=True) as bar:
        yield count_steps


def check_types(model: object, batches: object, device: object, **functions: object) -> None:
    """TypeError for a model, batches, a device or functions of a wrong type."""
    check_type("sequential.run: expected an nn.Module or a FlexModel", model, nn.Module)
    hint = "; of one batch: [batch]"
    expected = "sequential.run: batches must be an iterable"
    check_type(expected, batches, Iterable, hint)
    if isinstance(batches, Mapping):  # its keys would be the batches
        raise TypeError(f"{expected} of batches, got one {type(batches).__name__}{hint}")
    expected = "sequential.run: device must be a str, a torch.device or None"
    check_type(expected, device, str | torch.device | None)
    for name, function in functions.items():
        check_type(f"sequential.run: {name} must be a function or None", function, Callable | None)
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


def store_of(store: ActivationStore | None, core: HookCore | None) -> ActivationStore | None:
    """Return where records go: the store passed, or the FlexModel's own; None: ``output_ptr``."""
    own = None if core is None or core.runs.session is None else core.runs.session.store
    if store is None:
        return own
    hint = "; sequential.ActivationStore(folder)"
    check_type("sequential.run: store must be an ActivationStore", store, ActivationStore, hint)
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
    """ValueError for targets that are, or are inside, compiled modules."""
    targets = {target.module for target in found}
    for name, part in module.named_modules():
        if is_compiled_itself(part) and not targets.isdisjoint(part.modules()):
            raise ValueError(
                f"sequential.run: {name or 'the model'} is compiled, and compiled code can't be "
                "suspended at a target inside; run the module that was compiled (._orig_mod), or "
                "call its .compile() after the run"
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

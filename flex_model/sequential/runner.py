"""``run``: a model over a data set, target by target."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flex_model.hooks.batches import BatchRuns
from flex_model.hooks.context import advance_generator
from flex_model.model import FlexModel
from flex_model.sequential import heap, inventory, rebuild, targets as choosing
from flex_model.sequential.activations import ActivationKeeper
from flex_model.sequential.engine import Batch, Engine
from flex_model.sequential.loading import WeightLoader
from flex_model.sequential.weights import WeightSource, as_source


class RunResult(list[Any]):
    """The outputs of a run in the order of its batches.

    Attributes:
        save_ctxs: The batches' ``save_ctx``, in their order; [] without a FlexModel.
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
) -> RunResult:
    """Run a model over many batches, target by target (usually decoder layer by decoder layer):
    each target's weights are loaded once per window of batches.

    The result equals ``[model(**batch) for batch in batches]`` bit for bit, hooks and edits
    included, for any Python control flow: each batch's forward is a plain one that is suspended
    at the entry of a target until that target's turn comes.

    Example::

        with torch.device("meta"):
            model = LlamaForCausalLM(config).eval()
        flex = FlexModel(model, activations := {})
        flex.register_forward_hook(HookFunction("model.layers.7.mlp", editing_function=steer))
        outputs = sequential.run(flex, batches, weights="checkpoint/", window=8)

    Args:
        model: A module, or a FlexModel, whose hooks run. ``save_ctx`` of an editing function is its
            batch's own, begun as a shallow copy of ``flex.save_ctx``; ``flex.shared_ctx`` is one
            for all. ``output_ptr`` is in batch order, then call order.
        batches: Read a window at a time. A Mapping is called as ``model(**batch)``, a tuple or list
            as ``model(*batch)``, anything else as ``model(batch)``. Shapes may differ.
        targets: ``"auto"`` (the model's ``_no_split_modules``, else the members of its largest
            ModuleList), or names, class names and ``re:`` patterns, as in ``match_modules``.
        weights: None: the model's own. Else a safetensors file, a Hugging Face folder or a
            ``WeightSource``: the model may be on meta, gradients are off, and what targets don't
            hold (embedding, norm, head) is loaded once. Parameters are what they were afterwards.
        window: How many batches are under way at once (default: all). Memory grows with it.
        targets_per_step: How many neighbouring targets are loaded together.
        prefetch: How many steps are read ahead in a thread; 0: none.
        offload_activations: Where a waiting batch's activations are: ``"none"`` (where they came to
            be), ``"cpu"`` or ``"disk"``.
        offload_dir: For ``"disk"``: where a folder for them is made; it is deleted at the end.
        device: Where it runs. Default: where the model is; for meta, the current CUDA device if
            there is one, else the CPU. With weights to load, batches are moved there.
        groups, complement: Of hooks, as in ``FlexModel.forward``.
        call: ``call(model, batch)`` instead of calling the model.
        on_output: ``on_output(index, output)``, in batch order; what it returns is kept instead.
        on_target_end: ``on_target_end(name, indices)``, when these batches have left the target.
        progress: Show a bar on stderr (needs tqdm).

    Returns:
        The outputs in batch order, with ``save_ctxs``, ``loads`` and ``bytes_read``.

    Random numbers: the first batch begins with the caller's random state, the others each with
    one of their own that follows from it, the same for every window. Random edits draw what they
    draw in a plain loop.

    Not equal to a loop: forwards that depend on the batches before (BatchNorm in training, a state
    kept in the model).

    Collective on a sharded model: every rank gives the same number of batches in the same order.

    Raises:
        ValueError: a target that matches nothing; a weight that nothing gives, named, before the
            first batch; activations to be offloaded with gradients on.
        Exception: what a batch raised, with its own type (``HookError`` for editing functions);
            ``error.batch_index`` says which batch. No thread, hook or loaded weight is left.
    """
    core = model._core if isinstance(model, FlexModel) else None
    module: nn.Module = model.module if isinstance(model, FlexModel) else model
    _check_counts(window, targets_per_step, prefetch)
    _check_offload(offload_activations, weights is not None)
    found = choosing.choose(module, targets, targets_per_step)
    _check_not_compiled(module, found)
    result = RunResult()
    with contextlib.ExitStack() as stack:
        hooks = None
        if core is not None:
            model._check_open()  # type: ignore[operator, union-attr]
            hooks = stack.enter_context(BatchRuns(core, core.table.choice(groups, complement)))
        place = _device_of(module, device)
        loader = None
        if weights is not None or _is_elsewhere(module, place):
            wanted = [] if core is None else _weights_of_hooks(core)
            stack.enter_context(torch.no_grad())
            loader = stack.enter_context(_loaded(module, found, weights, place, prefetch, wanted))
        keeper = None
        if offload_activations != "none":
            keeper = ActivationKeeper(module, offload_activations, offload_dir)
            stack.callback(keeper.close)

        def deliver(batch: Batch) -> None:
            output = batch.call.value
            batch.call.value = None
            if hooks is not None and batch.hooks is not None:
                hooks.delivered(batch.hooks)
                result.save_ctxs.append(batch.hooks.save_ctx)
            result.append(output if on_output is None else on_output(batch.index, output))

        engine = Engine(
            found,
            hooks,
            loader,
            keeper,
            deliver,
            on_target_end,
            lambda: None,
            place.index if place.type == "cuda" else None,
        )

        def forward(batch: Any) -> Any:
            if loader is not None:
                batch = _moved(batch, place)
            return _call(module, batch) if call is None else call(model, batch)

        engine.run(batches, window, forward)
        if loader is not None:
            result.loads, result.bytes_read = dict(loader.loads), loader.bytes_read
    if engine.has_drawn:
        advance_generator()
    return result


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


@contextlib.contextmanager
def _loaded(
    module: nn.Module,
    found: list[choosing.Target],
    weights: str | Path | WeightSource | None,
    place: torch.device,
    prefetch: int,
    wanted: Iterable[str],
) -> Iterator[WeightLoader]:
    """Inside, weights come and go; the model is as it was afterwards."""
    source = None if weights is None else as_source(weights, module)
    stock = inventory.take(module, found, _finder(module, source), wanted)
    _check_given(module, stock)
    loader = WeightLoader(source, stock, found, place, prefetch)
    try:
        with heap.small(), rebuild.rebuilt(module, stock.rebuilt, place):
            loader.load_resident()
            yield loader
    finally:
        loader.close()


def _finder(module: nn.Module, source: WeightSource | None) -> Callable[[list[str]], str | None]:
    """By which of its names the source has a weight."""
    if source is None:
        return lambda names: None
    tied = _tied_names(module)
    has = getattr(source, "has", None) or set(source.names()).__contains__

    def find(names: list[str]) -> str | None:
        for name in [*names, *(other for name in names for other in tied.get(name, ()))]:
            if has(name):
                return name
        return None

    return find


def _tied_names(module: nn.Module) -> dict[str, set[str]]:
    """What Hugging Face models state to be tied: also where it is several tensors, on meta."""
    groups: dict[str, set[str]] = {}
    for prefix, part in module.named_modules():
        stated = getattr(part, "all_tied_weights_keys", None)
        for target, source in (stated if isinstance(stated, Mapping) else {}).items():
            dot = prefix and f"{prefix}."
            group = groups.get(dot + source) or groups.get(dot + target) or set()
            group |= {dot + source, dot + target}
            groups.update(dict.fromkeys(group, group))
    return groups


def _weights_of_hooks(core: Any) -> list[str]:
    """Parameters that editing functions are handed: they may be those of another target."""
    return [
        name
        for registration in core.table.registrations
        if registration.index in core.table.active
        for name in registration.hook_function.parameter_names
    ]


def _device_of(module: nn.Module, device: str | torch.device | None) -> torch.device:
    if device is None:
        own = next((t.device for t in _tensors_of(module) if not t.is_meta), None)
        if any(t.is_meta for t in _tensors_of(module)) and (own is None or own.type == "cpu"):
            own = None
        device = own or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _is_elsewhere(module: nn.Module, place: torch.device) -> bool:
    return any(tensor.device != place for tensor in _tensors_of(module))


def _moved(batch: Any, place: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(place)
    if isinstance(batch, Mapping):
        return {name: _moved(value, place) for name, value in batch.items()}
    if type(batch) in (tuple, list):
        return type(batch)(_moved(value, place) for value in batch)
    return batch


# What can be wrong before the first batch.


def _check_given(module: nn.Module, stock: inventory.Inventory) -> None:
    every = [*stock.resident, *(weight for part in stock.steps.values() for weight in part)]
    missing = [w.names[0] for w in every if w.given_as is None and w.tensor.is_meta]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(
            f"sequential.run: nothing gives {missing[0]!r}{more}: it is on meta, and the weights do "
            "not have it. If they have it by another name: CheckpointWeights(path, rename=...); if "
            "the model is to be run as it is, build it on a real device"
        )


def _check_counts(window: object, targets_per_step: object, prefetch: object) -> None:
    for name, value, least in (
        ("window", 1 if window is None else window, 1),
        ("targets_per_step", targets_per_step, 1),
        ("prefetch", prefetch, 0),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(
                f"sequential.run: {name} must be a whole number of at least {least}, got {value!r}"
            )


def _check_offload(offload_activations: str, has_weights: bool) -> None:
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


def _check_not_compiled(module: nn.Module, found: list[choosing.Target]) -> None:
    for name, part in module.named_modules():
        is_compiled = getattr(part, "_compiled_call_impl", None) is not None
        if not is_compiled and type(part).__name__ != "OptimizedModule":
            continue
        if any(target.module in set(part.modules()) for target in found):
            raise ValueError(
                f"sequential.run: {name or 'the model'} is compiled, and compiled code can't be "
                "suspended at a target inside; run the module that was compiled (._orig_mod)"
            )

"""Records a fingerprint: one run of a wrapped model, whose hooks sum up the full tensors one at a
time, on rank 0.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flex_model.distributed.agreement import gather_checked
from flex_model.distributed.placement import Shard
from flex_model.fingerprints.fingerprint_folder import Folder, RecordedRun, RunWriter
from flex_model.fingerprints.summary import ROUTING, summarised
from flex_model.hooks.core import HookCore
from flex_model.hooks.function import HookFunction
from flex_model.inspection import second_core, text
from flex_model.inspection.tree import is_called, named
from flex_model.integrations import expert_routing, transformers_private
from flex_model.integrations.made_sites import MadeSites
from flex_model.names import clean

#: Returns the tensor that takes an input's place, given its name and call; None: there is none.
Replacement = Callable[[str, int], Tensor | None]


def on_rank_0(core: HookCore, what: str, compute: Callable[[], Any]) -> Any:
    """Compute something that JSON can hold on rank 0; return it, or raise its error, on every rank.
    Collective.
    """

    def computed() -> Any:
        try:
            return compute() if core.mesh.group_rank == 0 else None
        except (OSError, ImportError) as error:
            raise ValueError(str(error)) from error

    return gather_checked(core.communicator, what, computed)[0]


def record_run(
    core: HookCore,
    folder: Folder,
    inputs: tuple[Any, Any],
    loss: second_core.Loss | None,
    tensors: bool = False,
    routing: bool = True,
    replacement: Replacement | None = None,
) -> None:
    """Run ``FlexModel.fingerprint``. Collective over the mesh; rank 0 alone uses the folder and
    ``replacement``.
    """
    if loss is not None and not callable(loss):
        raise TypeError(f"fingerprint: loss must be a function of the output or None, got {loss!r}")
    if core.runs.is_inside:
        raise RuntimeError("fingerprint: a run of this FlexModel is under way; call it afterwards")
    if core.of_parameters is not core.communicator:
        raise ValueError(
            "fingerprint: with dp_batch='local' each data-parallel rank has a run of its own, and "
            "the folder is of one; use a FlexModel of this model without dp_batch"
        )
    writers: list[RunWriter] = []
    on_rank_0(core, "fingerprint", lambda: writers.append(RunWriter(Path(folder))))
    full_inputs = second_core.full_inputs(core, *inputs)
    with core.table.nothing_chosen():
        timeout_s = core.communicator.timeout_s
        second = second_core.second_core(core, core.module, core.mesh, timeout_s, False, "rank0")
        recorder = _Recorder(second, writers[0].add if writers and tensors else None, replacement)
        try:
            recorder.hook(is_backward=loss is not None, has_routing=routing)
            second_core.run_once(
                second, second_core.detached(inputs, None), loss, recorder.take_gradients
            )
            run = recorder.run(full_inputs)
        finally:
            second.close()
    on_rank_0(core, "fingerprint", lambda: writers[0].finish(run))


class _Recorder:
    """Hooks a model, and keeps the summaries of what the hooks are given.

    Args:
        write: Writes the full tensor of the site of a number; None: they are not kept.
    """

    def __init__(
        self,
        core: second_core.SecondCore,
        write: Callable[[int, Tensor], None] | None,
        replacement: Replacement | None,
    ) -> None:
        self._core, self._write, self._replacement = core, write, replacement
        self._found = RecordedRun([], {}, None, 0, has_tensors=write is not None)
        self._calls: Counter[tuple[str, str]] = Counter()
        self._choices: dict[str, Tensor] = {}  # of a block of experts, at its last call

    def hook(self, is_backward: bool, has_routing: bool) -> None:
        """Hook the first input and output of each module, and with a backward their gradients; and
        the choice of each block of experts.
        """
        kinds = ["forward_pre", "forward"]
        kinds += ["full_backward_pre", "full_backward"] * is_backward
        modules = named(self._core.module)
        made = tuple(f"{name}." for name, one in modules.items() if isinstance(one, MadeSites))
        for name, module in modules.items():
            if is_called(module) and not f"{name}.".startswith(made):
                for kind in kinds:
                    self._register(name, kind, module, self._seen)
            if has_routing and transformers_private.gate_of(module) is not None:
                routing, end = expert_routing.install(module, name)
                self._core.on_close.callback(end)
                for one, seen in (routing.choice, self._chose), (routing.indices, self._routed):
                    site = module.get_submodule(one.removeprefix(f"{name}."))
                    self._register(one, "forward", site, seen)

    def _register(self, name: str, kind: str, module: nn.Module, seen: Callable[..., Any]) -> None:
        def observe(
            current_module: Any, full: Tensor, save_ctx: Any, modules: Any
        ) -> Tensor | None:
            return seen(name, kind, full)

        self._core.register(HookFunction(name, None, observe, record=False), kind, [module])

    def _seen(self, name: str, kind: str, full: Tensor) -> Tensor | None:
        call = self._add(name, kind, full)
        if kind != "forward_pre" or self._replacement is None:
            return None
        other = self._replacement(name, call)
        if other is None or other.shape != full.shape:
            return None
        self._found.replaced.append((name, call))
        return other.to(full)

    def _add(self, name: str, kind: str, full: Tensor, margins: Tensor | None = None) -> int:
        call = self._calls[name, kind]
        self._calls[name, kind] += 1
        if self._write is not None:
            self._write(len(self._found.sites), full)
        self._found.sites.append(summarised(full, name, kind, call, margins))
        return call

    def _chose(self, name: str, kind: str, full: Tensor) -> None:
        self._choices[name.rpartition(".")[0]] = full.detach().clone()

    def _routed(self, name: str, kind: str, full: Tensor) -> None:
        choice, k = self._choices.pop(name.rpartition(".")[0], None), full.shape[-1]
        margins = torch.full(full.shape[:1], torch.inf, device=full.device)
        if choice is not None and choice.shape[-1] > k:
            best = choice.topk(k + 1).values
            scale = choice[choice.isfinite()].square().mean().sqrt()
            margins = (best[:, -2] - best[:, -1]) / (scale * torch.finfo(choice.dtype).eps)
        self._add(name, ROUTING, full.int().sort(-1).values, margins.float())

    def take_gradients(self) -> None:
        """Record the gradients of the parameters, one at a time. Collective."""
        root = self._core.module
        for name in [
            clean(root, name) for name, one in root.named_parameters() if one.requires_grad
        ]:
            try:
                gradient = self._core.parameters.gradient(name, None)
            except ValueError as error:
                self._found.refused[f"gradient of {name}"] = str(error)
                continue
            if gradient is not None:
                add = functools.partial(self._add, name, "tensor", gradient)
                on_rank_0(self._core, "fingerprint", add)

    def run(self, inputs: Any) -> RecordedRun:
        """Return what was recorded, with the layouts of the sites."""
        layouts: dict[tuple[str, str], dict[str, Any]] = {}
        for one in self._core.table.registrations:
            if one.index in self._core.unresolved:
                site = f"{one.kind} of {text.site(one.name, 0)}"
                self._found.refused[site] = str(self._core.unresolved[one.index])
            if one.specs:
                (_, shapes, *_), spec = list(one.specs.items())[-1]
                splits = _splits(spec.layout, shapes, self._core.mesh.tp_size)
                layouts[one.name, one.kind] = {"layout": str(spec.layout), "splits": splits}
        sites = [replace(one, **layouts.get(one.key[:2], {})) for one in self._found.sites]
        num_bytes = sum(one.dtype.itemsize * torch.Size(one.shape).numel() for one in sites)
        return replace(self._found, sites=sites, inputs=inputs, num_bytes=num_bytes)


def _splits(layout: Any, shapes: Any, tp_size: int) -> dict[str, Any]:
    """Return, by axis, the dim along which its ranks hold consecutive parts, and their sizes."""
    found = {}
    for axis, along in ("dp", shapes[::tp_size]), ("tp", shapes[:tp_size]):
        split = getattr(layout, axis)
        if isinstance(split, Shard) and split == Shard(split.dim) and not layout.splits_one_dim:
            found[axis] = split.dim, [shape[split.dim] for shape in along]
    return found

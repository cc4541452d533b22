"""Records a fingerprint: one run of a wrapped model, on whose hooks each rank sums up its own parts
of the tensors.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flex_model.distributed.agreement import gather_checked
from flex_model.distributed.gather import TensorSpec
from flex_model.distributed.header import Header, site_hash
from flex_model.fingerprints.fingerprint_folder import Folder, RecordedRun, RunWriter
from flex_model.fingerprints.summary import ROUTING, Summary, summed
from flex_model.fingerprints.summed_parts import Held, Part, described, joined
from flex_model.hooks.core import HookCore
from flex_model.hooks.function import HookFunction, PartHook
from flex_model.hooks.hook_call import HookCall
from flex_model.hooks.table import NOTHING
from flex_model.inspection import second_core, text
from flex_model.inspection.tree import is_called, named
from flex_model.integrations import expert_routing, transformers_private
from flex_model.integrations.made_sites import MadeSites
from flex_model.names import clean
from flex_model.runs.lifecycle import calls_of_modules

#: By name and call of an input, what reads the tensor that takes its place.
Replacements = Mapping[tuple[str, int], Callable[[], Tensor]]


def on_rank_0(core: HookCore, what: str, compute: Callable[[], Any]) -> Any:
    """Compute something that JSON can hold on rank 0; return it, or raise its error, on every rank.
    Collective.
    """
    is_first = core.mesh.group_rank == 0
    return gather_checked(core.communicator, what, lambda: compute() if is_first else None)[0]


def record_run(
    core: HookCore,
    folder: Folder,
    inputs: tuple[Any, Any],
    loss: second_core.Loss | None,
    tensors: bool = False,
    routing: bool = True,
    replacements: Replacements | None = None,
) -> None:
    """Run ``FlexModel.fingerprint``. Collective over the mesh; rank 0 alone uses the folder and
    ``replacements``.
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
    if loss is not None:
        second_core.check_backward(core, "fingerprint")
    writers: list[RunWriter] = []
    on_rank_0(core, "fingerprint", lambda: writers.append(RunWriter(Path(folder))))
    full_inputs = second_core.full_inputs(core, *inputs)
    with core.table.nothing_chosen():
        recorder = _recorder_of(core, loss is not None, routing, tensors, replacements is not None)
        write = writers[0].add if writers and tensors else None
        run = recorder.record(inputs, full_inputs, loss, write, replacements or {})
    on_rank_0(core, "fingerprint", lambda: writers[0].finish(run))


def _recorder_of(core: HookCore, *settings: bool) -> Recorder:
    """Return a recorder of the model as it is now: that of the fingerprint before, if it fits."""
    modules = {name: weakref.ref(one) for name, one in _own_modules(core.module).items()}
    key = (settings, tuple(core.tracking.statements), modules)
    recorder: Recorder | None = core.recorder
    if recorder is None or recorder.core.is_closed or recorder.key != key:
        if recorder is not None:
            recorder.core.close()
        recorder = Recorder(core, key, *settings)
        core.keep_recorder(recorder)
    return recorder


def _own_modules(root: nn.Module) -> dict[str, nn.Module]:
    """Return the modules by name, without those that flex_model has put there."""
    modules = named(root)
    made = tuple(f"{name}." for name, one in modules.items() if isinstance(one, MadeSites))
    return {name: one for name, one in modules.items() if not f"{name}.".startswith(made)}


class Recorder:
    """Hooks a model, and keeps what each rank sums up of its parts of the tensors there. It stays
    with the FlexModel, since hooks, their layouts and the proofs of these are the same in the next
    run; not where it records the choice of experts, or where a run has failed.

    Args:
        user: The core of the FlexModel.
        key: What it was made for.
        is_full: Whether rank 0 gets the full tensors; ``is_fed``: whether inputs are replaced.

    Attributes:
        core: Its own core of hooks, none of which is active between runs.
    """

    def __init__(
        self,
        user: HookCore,
        key: object,
        is_backward: bool,
        has_routing: bool,
        is_full: bool,
        is_fed: bool,
    ) -> None:
        self.key, self._is_kept, self._is_full = key, True, is_full
        self._takes: dict[str, Callable[[str, Tensor, TensorSpec | None], None]] = {}
        self._held: weakref.WeakKeyDictionary[TensorSpec, Held] = weakref.WeakKeyDictionary()
        self._names = {id(one): name for name, one in _own_modules(user.module).items()}
        self.core = second_core.SecondCore(user, edit_on="rank0")
        self.core.table.choose(NOTHING, NOTHING)
        try:
            self._hook(is_backward, has_routing, is_fed)
        except BaseException:
            self.core.close()
            raise

    def _begin(
        self, write: Callable[[int, Tensor], None] | None, replacements: Replacements
    ) -> None:
        self._write, self._replacements = write, replacements
        names, has_tensors = list(self._parameters()), write is not None
        self._found = RecordedRun([], {}, None, 0, has_tensors=has_tensors, parameters=names)
        self._parts: list[Part] = []
        self._order: list[int] = []  # the hooks that were called, on every rank
        self._calls: Counter[tuple[str, str]] = Counter()
        self._callers: dict[str, list[Sequence[str]]] = {}  # of each call
        self._choices: dict[str, Tensor] = {}  # of a block of experts, at its last call
        self.core.unresolved.clear()

    def record(
        self,
        inputs: tuple[Any, Any],
        full_inputs: Any,
        loss: second_core.Loss | None,
        write: Callable[[int, Tensor], None] | None,
        replacements: Replacements,
    ) -> RecordedRun:
        """Run the model. Collective.

        Args:
            write: Writes the full tensor of the site of a number; None: they are not kept.
        """
        self._begin(write, replacements)
        try:
            second_core.run_once(
                self.core, second_core.detached(inputs, None), loss, self._take_gradients
            )
            self.core.table.choose(NOTHING, NOTHING)
            return self._run(full_inputs)
        except BaseException:
            self._is_kept = False
            raise
        finally:
            if not self._is_kept:
                self.core.close()
            self._begin(None, {})

    def _hook(self, is_backward: bool, has_routing: bool, is_fed: bool) -> None:
        """Hook the first input and output of each module, and with a backward their gradients; and
        the choice of each block of experts.
        """
        kinds = ["forward_pre", "forward"]
        kinds += ["full_backward_pre", "full_backward"] * is_backward
        for name, module in _own_modules(self.core.module).items():
            if is_called(module):
                for kind in kinds:
                    feeds = is_fed and kind == "forward_pre"
                    hook = (
                        self._feeder(name) if feeds else PartHook(name, self._read, self._is_full)
                    )
                    self.core.register(hook, kind, [module])
            if has_routing and transformers_private.gate_of(module) is not None:
                self._is_kept = False  # a gate gets its own forward back after each run
                routing, end = expert_routing.install(module, name)
                self.core.on_close.callback(end)
                for one, take in (routing.choice, self._chose), (routing.indices, self._routed):
                    self._takes[one] = take
                    site = module.get_submodule(one.removeprefix(f"{name}."))
                    self.core.register(PartHook(one, self._read, True), "forward", [site])

    def _feeder(self, name: str) -> HookFunction:
        """Return the edit that puts another run's input in place of a module's, on rank 0."""

        def feed(module: Any, full: Tensor, save_ctx: Any, modules: Any) -> Tensor | None:
            spec = next(reversed(hook._registrations[0].specs.values()), None)
            call = self._add(name, "forward_pre", full, spec)
            read = self._replacements.get((name, call))
            other = full if read is None else read()
            if read is None or other.shape != full.shape:
                return None
            self._found.replaced.append((name, call))
            return other.to(full)

        return (hook := HookFunction(name, None, feed, record=False))

    def _read(
        self, call: HookCall, tensor: Tensor | None, spec: TensorSpec | None, is_part: bool
    ) -> None:
        """Sum up what this rank has: a part, or a full tensor. Local."""
        registration = call.registration
        self._order.append(registration.site)
        name, kind = registration.name, registration.kind
        if tensor is None:
            return
        if name in self._takes:
            self._takes[name](name, tensor, spec)
        elif is_part and spec is not None:
            held = self._held.get(spec)
            if held is None:
                held = self._held[spec] = Held.of(spec, tensor)
            sums, sample = held.summed(tensor)
            key, shape = self._key(name, kind), spec.full_shape
            of = {"callers": self._callers_of(*key), **held.described}
            summary = Summary(*key, tensor.dtype, shape, sums, sample, **of)
            self._parts.append(Part(summary, held, registration.layout_site))
        else:
            self._add(name, kind, tensor, spec)

    def _key(self, name: str, kind: str) -> tuple[str, str, int]:
        self._calls[name, kind] += 1
        return name, kind, self._calls[name, kind] - 1

    def _callers_of(self, name: str, kind: str, call: int) -> Sequence[str]:
        if kind in ("forward_pre", "forward"):
            owners = (frame.f_locals.get("self") for frame in calls_of_modules())
            called = dict.fromkeys(self._names.get(id(one), name) for one in owners)
            callers = [one for one in called if one != name]
            if kind == "forward_pre":
                self._callers.setdefault(name, []).append(callers)
            return callers
        calls = self._callers.get(name, ())
        if call < len(calls):
            return calls[-1 - call]  # the backward of the last call is the first
        parts = name.split(".")
        return [".".join(parts[:end]) for end in reversed(range(len(parts)))] if name else []

    def _add(
        self,
        name: str,
        kind: str,
        full: Tensor,
        spec: TensorSpec | None = None,
        margins: Tensor | None = None,
    ) -> int:
        """Keep the summary of a full tensor; return the number of the call."""
        if self._write is not None:
            self._write(len(self._parts), full)
        found = summed(full, *self._key(name, kind), margins)
        of = {} if spec is None else described(spec)
        found = replace(found, callers=self._callers_of(*found.key), **of)
        self._parts.append(Part(found))
        return found.call

    def _chose(self, name: str, full: Tensor, spec: TensorSpec | None) -> None:
        self._choices[name.rpartition(".")[0]] = full.detach().clone()

    def _routed(self, name: str, full: Tensor, spec: TensorSpec | None) -> None:
        choice, k = self._choices.pop(name.rpartition(".")[0], None), full.shape[-1]
        margins = torch.full(full.shape[:1], torch.inf, device=full.device)
        if choice is not None and choice.shape[-1] > k:
            best = choice.topk(k + 1).values
            scale = choice[choice.isfinite()].square().mean().sqrt()
            margins = (best[:, -2] - best[:, -1]) / (scale * torch.finfo(torch.float32).eps)
        self._add(name, ROUTING, full.int().sort(-1).values, spec, margins.float())

    def _take_gradients(self) -> None:
        """Record the gradients of the parameters, one at a time. Collective."""
        for name in [name for name, one in self._parameters().items() if one.requires_grad]:
            try:
                gradient = self.core.parameters.gradient(name, None)
            except ValueError as error:
                self._found.refused[f"gradient of {name}"] = str(error)
                continue
            if gradient is not None:
                self._add(name, "tensor", gradient)

    def _parameters(self) -> dict[str, nn.Parameter]:
        root = self.core.module
        return {clean(root, name): one for name, one in root.named_parameters()}

    def _run(self, inputs: Any) -> RecordedRun:
        """Return what was recorded, on rank 0. Collective."""
        communicator = self.core.communicator
        header = Header("described values", site=site_hash(*self._order))
        communicator.check_consistency(
            header, f"the end of a fingerprint, after {len(self._order)} tensors"
        )
        sites = joined(communicator, self._parts)
        for one in self.core.table.registrations:
            if one.index in self.core.unresolved:
                site = f"{one.kind} of {text.site(one.name, 0)}"
                self._found.refused[site] = str(self.core.unresolved[one.index])
        num_bytes = sum(one.dtype.itemsize * torch.Size(one.shape).numel() for one in sites)
        return replace(self._found, sites=sites, inputs=inputs, num_bytes=num_bytes)

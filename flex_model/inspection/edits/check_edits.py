"""The part of a dry run that checks editing functions; its findings are the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flex_model.distributed.placement import Shape, Shard
from flex_model.distributed.tensor_dicts import exchange_json
from flex_model.hooks.core import HookCore
from flex_model.hooks.registration import Registration
from flex_model.inspection.edits.calls import FakeCalls, FakeInput
from flex_model.inspection.edits.findings import ERROR, NOT_CHECKED, WARNING, Finding, Source
from flex_model.inspection.edits.watch import Sharded
from flex_model.integrations import dtensor
from flex_model.integrations.transformers_private import gate_of
from flex_model.names import clean, find_module


def check_edits(
    core: HookCore, calls: Mapping[Registration, Sequence[FakeInput] | str]
) -> dict[int, list[Finding]]:
    """Call each hook's editing function once, and return the findings by the hook's registration
    index. Collective over the grid.

    Args:
        calls: In the order of the forward: the tensors that are passed to a hook's function, or why
            they are not known.
    """
    registrations = [r for r in core.table.registrations if r.edits and r.calls_function]
    parameters, errors = _full_parameters(core, registrations)
    found: dict[int, list[Finding]] = {}
    if core.executor.edits_on_all or core.mesh.group_rank == 0:
        with FakeCalls(core, _sharded_parameters(core), parameters) as fake_calls:
            for registration in _in_order_of_run(registrations, list(calls)):
                inputs = calls.get(registration, "this forward, or its backward, does not call it")
                unknown = [e for n, e in errors.items() if n in registration.given.parameter_names]
                source = Source(registration)
                if unknown:
                    of_hook = [source.finding(ERROR, "parameter", error) for error in unknown]
                elif isinstance(inputs, str):
                    of_hook = [source.finding(NOT_CHECKED, "not called", f"not checked: {inputs}")]
                else:
                    of_hook = fake_calls.findings(registration, inputs)
                    of_hook += _of_gate(core, registration, source)
                found[registration.index] = of_hook
    return _merged(core, registrations, found)


def _of_gate(core: HookCore, registration: Registration, source: Source) -> list[Finding]:
    """A finding for an edit of the logits of a gate, which has chosen its experts by then."""
    block, _, child = registration.clean_name.rpartition(".")
    if (registration.kind, registration.given.unpack_idx) != ("forward", 0) or not child:
        return []
    found = gate_of(find_module(core.module, block))
    if found is None or registration.module is None or registration.module() is not found[0]:
        return []
    message = (
        "an edit of a gate's logits changes no route, as the gate has chosen its experts before; "
        f"edit the choice or the scores of flex.routing({block!r})"
    )
    return [source.finding(WARNING, "no effect", message)]


def _merged(
    core: HookCore,
    registrations: Sequence[Registration],
    found: Mapping[int, Sequence[Finding]],
) -> dict[int, list[Finding]]:
    """The findings of all ranks, each with its ranks. Collective."""
    local = [
        [(f.level, f.problem, f.message, f.file, f.line) for f in found.get(r.index, ())]
        for r in registrations
    ]
    per_rank = exchange_json(core.communicator, local, "the findings of a dry run")
    merged: dict[int, list[Finding]] = {}
    for i, registration in enumerate(registrations):
        source, ranks = Source(registration), dict[Finding, list[int]]()
        for rank, words in zip(core.mesh.stage_ranks, per_rank):
            for level, problem, message, *place in words[i]:
                finding = source.finding(level, problem, message, tuple(place))
                ranks.setdefault(finding, []).append(rank)
        merged[registration.index] = [replace(f, ranks=tuple(at)) for f, at in ranks.items()]
    return merged


def _in_order_of_run(
    registrations: Sequence[Registration], called: Sequence[Registration]
) -> list[Registration]:
    """The hooks of the forward; then of the backward, from the end; then all others."""
    forward = [r for r in called if r.kind in ("forward", "forward_pre")]
    backward = [r for r in called if r.is_backward]
    return list(dict.fromkeys([*forward, *backward[::-1], *registrations]))


def _full_parameters(
    core: HookCore, registrations: Sequence[Registration]
) -> tuple[dict[str, tuple[Shape, torch.dtype]], dict[str, str]]:
    """Shape and dtype of the parameters that hooks name, and of others why they can't be gathered.
    Collective.
    """
    known: dict[str, tuple[Shape, torch.dtype]] = {}
    errors: dict[str, str] = {}
    for name in dict.fromkeys(n for r in registrations for n in r.given.parameter_names):
        try:
            known[name] = core.parameters.full_kind(name)
        except ValueError as error:  # on all ranks
            errors[name] = str(error)
    return known, errors


def _sharded_parameters(core: HookCore) -> Sharded:
    """As of ``FakeArguments``."""
    if core.communicator.is_local:
        return {}
    found: dict[int, tuple[Tensor, str, bool]] = {}
    for full_name, parameter in core.module.named_parameters():
        name = clean(core.module, full_name)
        if dtensor.is_dtensor(parameter):
            layout = dtensor.layout(parameter, core.mesh, name, batch_on_dp=False)
            by_tp = isinstance(layout.tp, Shard)
            if by_tp or isinstance(layout.dp, Shard):
                with torch.no_grad():
                    tensors = (parameter, dtensor.to_local(parameter))
                found |= {id(one): (one, name, not by_tp) for one in tensors}
        elif core.mesh.tp_size > 1:
            _, tp = core.parameters.sources_of(name)[0].placements
            if tp is None or isinstance(tp, Shard):
                found[id(parameter)] = (parameter, name, False)
    return found

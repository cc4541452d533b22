"""The part of a dry run that checks editing functions; its findings are the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from flex_model.distributed.layout import Shape, Shard
from flex_model.distributed.tensor_dicts import exchange_json
from flex_model.hooks.core import HookCore
from flex_model.hooks.registration import Registration
from flex_model.inspection.edits.calls import FakeCalls, FakeInput
from flex_model.inspection.edits.findings import ERROR, NOT_CHECKED, Finding, Source
from flex_model.integrations import dtensor
from flex_model.names import clean


@dataclass(frozen=True)
class EditCall:
    """One call of a hook that edits.

    Attributes:
        registration: That of the last of its tensors.
        inputs: The tensors that are passed to its function; None where they are not known.
        why: Why they are not.
    """

    registration: Registration
    inputs: Sequence[FakeInput] | None
    why: str = ""


def check_edits(core: HookCore, calls: Sequence[EditCall]) -> dict[int, list[Finding]]:
    """Call each hook's editing function once, and return the findings by the hook's registration
    index. Collective over the grid.

    Args:
        calls: In the order of the forward. Of a hook's, the first one counts whose inputs are
            known.
    """
    registrations = [r for r in core.table.registrations if r.edits and r.calls_function]
    parameters, errors = _full_parameters(core, registrations)
    found: dict[int, list[Finding]] = {}
    if core.caller.edits_on_all or core.mesh.place == 0:
        with FakeCalls(core, _sharded_parameters(core), parameters) as fake_calls:
            for registration in _in_order_of_run(registrations, calls):
                own = [call for call in calls if call.registration is registration]
                source = Source(registration)
                unknown = [e for n, e in errors.items() if n in registration.given.parameter_names]
                inputs = next((call.inputs for call in own if call.inputs is not None), None)
                if unknown:
                    of_hook = [source.finding(ERROR, "parameter", error) for error in unknown]
                elif inputs is not None:
                    of_hook = fake_calls.findings(registration, inputs)
                else:
                    why = own[0].why if own else "this forward, or its backward, does not call it"
                    of_hook = [source.finding(NOT_CHECKED, "not called", f"not checked: {why}")]
                found[registration.index] = of_hook
    return _merged(core, registrations, found)


def _merged(
    core: HookCore,
    registrations: Sequence[Registration],
    found: Mapping[int, Sequence[Finding]],
) -> dict[int, list[Finding]]:
    """The findings of all ranks, each with its ranks. Collective."""
    local = [[finding.to_json() for finding in found.get(r.index, ())] for r in registrations]
    per_rank = exchange_json(core.channel, local, "the findings of a dry run")
    merged: dict[int, list[Finding]] = {}
    for i, registration in enumerate(registrations):
        ranks: dict[Finding, list[int]] = {}
        for rank, words in zip(core.mesh.grid, per_rank):
            for finding in words[i]:
                ranks.setdefault(Finding.from_json(finding), []).append(rank)
        merged[registration.index] = [replace(f, ranks=tuple(at)) for f, at in ranks.items()]
    return merged


def _in_order_of_run(
    registrations: Sequence[Registration], calls: Sequence[EditCall]
) -> list[Registration]:
    """The hooks of the forward; then of the backward, from the end; then of parameters; then those
    that are not called.
    """
    called = list(dict.fromkeys(call.registration for call in calls))
    forward = [r for r in called if r.kind in ("forward", "forward_pre")]
    backward = [r for r in called if r.is_backward]
    return list(dict.fromkeys([*forward, *backward[::-1], *called, *registrations]))


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


def _sharded_parameters(core: HookCore) -> dict[int, tuple[str, bool]]:
    """As of ``FakeArguments``."""
    if core.channel.is_local:
        return {}
    found: dict[int, tuple[str, bool]] = {}
    for full_name, parameter in core.module.named_parameters():
        name = clean(core.module, full_name)
        if dtensor.is_dtensor(parameter):
            layout = dtensor.layout(parameter, core.mesh, name, batch_on_dp=False)
            by_tp = isinstance(layout.tp, Shard)
            if by_tp or isinstance(layout.dp, Shard):
                with torch.no_grad():
                    local = dtensor.to_local(parameter)
                found[id(parameter)] = found[id(local)] = (name, not by_tp)
        elif core.mesh.tp_size > 1:
            _, tp = core.parameters.sources_of(name).placements
            if tp is None or isinstance(tp, Shard):
                found[id(parameter)] = (name, False)
    return found

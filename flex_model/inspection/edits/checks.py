"""The part of a dry run that looks at editing functions: each is called as a run would call it, and
what is found is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from flex_model.distributed.layout import Shape, Shard
from flex_model.distributed.tensor_dicts import exchange_json
from flex_model.hooks.core import HookCore
from flex_model.hooks.registration import Registration
from flex_model.inspection.edits.findings import ERROR, NOT_CHECKED, Finding, Source
from flex_model.inspection.edits.rehearsal import Given, Rehearsal
from flex_model.integrations import dtensor
from flex_model.names import clean


@dataclass(frozen=True)
class EditCall:
    """One call of a hook that edits.

    Attributes:
        registration: That of the last of its tensors.
        givens: What its function is given; None where that is not known.
        why: Why not.
    """

    registration: Registration
    givens: Sequence[Given] | None
    why: str = ""


def check_edits(core: HookCore, calls: Sequence[EditCall]) -> dict[int, list[Finding]]:
    """What is found, by the hooks' registration index. Collective over the grid.

    Args:
        calls: In the order of the forward.
    """
    channel, mesh = core.channel, core.mesh
    registrations = [r for r in core.table.registrations if r.edits and r.calls_function]
    parameters, unknown = _full_parameters(core, registrations)
    on_all = core.caller.edits_on_all
    rehearsal = Rehearsal(
        core,
        registrations,
        _split_parameters(core),
        parameters,
        is_alone=not on_all or channel.is_local,
    )
    if on_all or mesh.place == 0:
        with rehearsal:
            for call in _in_order_of_run(calls):
                names = _parameters_of(call.registration)
                if call.givens is not None and unknown.keys().isdisjoint(names):
                    rehearsal.run(call.registration, call.givens)
    found = {
        r.index: [*_not_called(r, calls, unknown), *rehearsal.findings.get(r.index, ())]
        for r in registrations
    }
    return _agreed(core, registrations, found, rehearsal.edited)


def _agreed(
    core: HookCore,
    registrations: Sequence[Registration],
    found: Mapping[int, Sequence[Finding]],
    edited: Mapping[int, Sequence[bool | None]],
) -> dict[int, list[Finding]]:
    """What any rank found, with its ranks, and where they do not edit alike. Collective."""
    mesh, on_all = core.mesh, core.caller.edits_on_all
    mine = [
        [[finding.to_json() for finding in found[r.index]], list(edited.get(r.index, ()))]
        for r in registrations
    ]
    told = exchange_json(core.channel, mine, "the findings of a dry run")
    ranks = {mesh.grid[i]: words for i, words in enumerate(told) if on_all or i == 0}
    agreed: dict[int, list[Finding]] = {}
    for i, registration in enumerate(registrations):
        merged: dict[Finding, list[int]] = {}
        for rank, words in ranks.items():
            for finding in words[i][0]:
                merged.setdefault(Finding.from_json(finding), []).append(rank)
        findings = [replace(finding, ranks=tuple(where)) for finding, where in merged.items()]
        changed = {rank: words[i][1] for rank, words in ranks.items()}
        is_wrong = any(finding.level == ERROR for finding in findings)
        if not is_wrong and len({tuple(calls) for calls in changed.values()}) > 1:
            findings.append(_unlike(registration, changed))
        agreed[registration.index] = findings
    return agreed


def _in_order_of_run(calls: Sequence[EditCall]) -> list[EditCall]:
    """The forward's; then the backward's, which comes from the end; then parameters'."""
    forward = [c for c in calls if c.registration.kind in ("forward", "forward_pre")]
    backward = [c for c in calls if c.registration.is_backward]
    return forward + backward[::-1] + [c for c in calls if c.registration.kind == "tensor"]


def _not_called(
    registration: Registration, calls: Sequence[EditCall], unknown: Mapping[str, str]
) -> list[Finding]:
    """Why a function was not looked at, if it was not."""
    errors = [unknown[name] for name in _parameters_of(registration) if name in unknown]
    if errors:
        return [_finding(registration, ERROR, "parameter", error) for error in errors]
    own = [call for call in calls if call.registration is registration]
    reasons = [call.why for call in own if call.givens is None]
    if not own:
        reasons = ["this forward does not get there, or no gradient does"]
    return [
        _finding(registration, NOT_CHECKED, "not called", f"was not looked at: {reason}")
        for reason in dict.fromkeys(reasons)
    ]


def _parameters_of(registration: Registration) -> tuple[str, ...]:
    return registration.given.parameter_names


def _unlike(registration: Registration, changed: Mapping[int, Sequence[bool | None]]) -> Finding:
    shown = "; ".join(
        f"rank {rank}: {['left' if one is False else 'changed' for one in calls]}"
        for rank, calls in changed.items()
    )
    message = f"ranks do not do the same with their tensor ({shown}); every rank must edit alike"
    return replace(_finding(registration, ERROR, "unlike", message), ranks=tuple(changed))


def _finding(registration: Registration, level: str, problem: str, message: str) -> Finding:
    source = Source(registration.given.editing_function)
    return Finding.of(registration, source, level, problem, message)


def _full_parameters(
    core: HookCore, registrations: Sequence[Registration]
) -> tuple[dict[str, tuple[Shape, torch.dtype]], dict[str, str]]:
    """Of the parameters that hooks name: shape and dtype, or why they can't be gathered.
    Collective.
    """
    known: dict[str, tuple[Shape, torch.dtype]] = {}
    unknown: dict[str, str] = {}
    for name in dict.fromkeys(name for r in registrations for name in _parameters_of(r)):
        try:
            known[name] = core.parameters.full_kind(name)
        except ValueError as error:  # on all ranks
            unknown[name] = str(error)
    return known, unknown


def _split_parameters(core: HookCore) -> dict[int, tuple[str, bool]]:
    """As of ``Watch``."""
    if core.channel.is_local:
        return {}
    found: dict[int, tuple[str, bool]] = {}
    for full_name, parameter in core.module.named_parameters():
        name = clean(core.module, full_name)
        if dtensor.is_dtensor(parameter):
            layout = dtensor.layout(parameter, core.mesh, name, batch_on_dp=False)
            by_tp = isinstance(layout.tp, Shard)
            if by_tp or isinstance(layout.dp, Shard):
                found[id(parameter)] = (name, not by_tp)
        elif core.mesh.tp_size > 1:
            _, tp = core.parameters.sources_of(name).placements
            if tp is None or isinstance(tp, Shard):
                found[id(parameter)] = (name, False)
    return found

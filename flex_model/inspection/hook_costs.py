"""Predicts what hooks cost on many ranks and hosts, from one process and without weights."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from flex_model.hooks.function import HookFunction
from flex_model.hooks.registration import Registration
from flex_model.inspection.call_costs import CallCosts, Setup
from flex_model.inspection.dry_run import DryRun, DryRunRow, rows_of_call, totals
from flex_model.inspection.offline import Call, OfflineRun
from flex_model.inspection.on_shapes import Seen

#: The kinds of hooks, and the tensor that each sees, or the gradient of.
KINDS = {
    "forward": "output",
    "forward_pre": "input",
    "full_backward": "input",
    "full_backward_pre": "output",
}


@dataclass(frozen=True)
class HookLine:
    """One line of a file of hooks.

    Attributes:
        pattern: The name of a module, in which ``*`` is any text.
    """

    pattern: str
    edits: bool
    kind: str


def read(path: str) -> list[HookLine]:
    """Read a file of hooks: a hook a line, as in ``layers.*.mlp edit``, with a kind other than
    ``forward`` behind it; ``#`` begins a comment.

    Raises:
        ValueError: a line is none, or there is none.
    """
    lines = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        pattern, what, kind, *more = [*words, *["", "forward"][len(words) - 1 :], ""]
        if what not in ("read", "edit") or kind not in KINDS or any(more):
            raise ValueError(
                f"{path}, line {number}: {line.strip()!r} is no hook; give a module's name, read "
                f"or edit, and one of {', '.join(KINDS)} (default: forward), as in 'layers.*.mlp "
                "edit'"
            )
        lines.append(HookLine(pattern, what == "edit", kind))
    if not lines:
        raise ValueError(f"{path}: there are no hooks in it; write a line as 'layers.*.mlp edit'")
    return lines


def hosts_in_order(num_ranks: int, num_hosts: int) -> tuple[str, ...]:
    """Return a host for each rank, where ranks fill one host after the other.

    Raises:
        ValueError: the ranks don't fill the hosts.
    """
    if num_hosts < 1 or num_ranks % num_hosts:
        raise ValueError(
            f"{num_ranks} ranks do not fill {num_hosts} hosts; give a number of hosts that divides "
            "the ranks"
        )
    return tuple(f"host {rank * num_hosts // num_ranks}" for rank in range(num_ranks))


def predict(
    run: OfflineRun, lines: Sequence[HookLine], hosts: tuple[str, ...], edit_on: str
) -> DryRun:
    """Predict what the hooks cost, of a model in training. Local.

    Args:
        hosts: The host of each rank.

    Raises:
        ValueError: a line names no module that is called.
    """
    costs = CallCosts(Setup(run.mesh, hosts, edits_on_all=edit_on == "all"))
    rows = [row for line in lines for row in _rows_of(costs, _calls_of(run, line), line)]
    return DryRun(rows, *totals(costs, rows), has_checked=False)


def _calls_of(run: OfflineRun, line: HookLine) -> list[Call]:
    """The calls that the hooks of a line see.

    Raises:
        ValueError: there are none.
    """
    kind = KINDS[line.kind]
    named = [call for call in run.calls if call[1] == kind]
    found = [call for call in named if fnmatch.fnmatchcase(call[0], line.pattern)]
    if not found:
        called = sorted({name for name, _, _ in named})
        close = difflib.get_close_matches(line.pattern, called, 3, 0.3)
        raise ValueError(
            f"no module that the model calls with tensors is named {line.pattern!r}; there are "
            f"{', '.join(close or called[:3])}; leave out --hooks to see all"
        )
    return found


def _rows_of(costs: CallCosts, calls: Sequence[Call], line: HookLine) -> list[DryRunRow]:
    """One row for each shape that the hooks of a line see."""
    function = HookFunction(line.pattern, editing_function=_edit if line.edits else None)
    registration = Registration(function, line.kind, 0, 0, None, function, line.pattern)
    rows: dict[Any, DryRunRow] = {}
    of_seen: dict[Any, DryRunRow] = {}
    for _, _, ranks in calls:
        seen = tuple((one.shape, one.dtype, one.pair) for one in ranks)
        if seen not in of_seen:
            in_training = [_in_training(one) for one in ranks]
            (of_seen[seen],) = rows_of_call(costs, [(registration, in_training)])
        row = of_seen[seen]
        key = row.full_shape, row.dtype, row.layout, row.source
        rows[key] = row if key not in rows else rows[key].with_calls(row)
    return list(rows.values())


def _in_training(seen: Seen) -> Seen:
    return replace(seen, needs_gradient=seen.dtype.is_floating_point)


def _edit(module: nn.Module | None, full: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    """Stands for the user's function, and is never called."""
    return full

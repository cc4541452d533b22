"""Predicts what hooks cost on many ranks and hosts, from one process and without weights."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from flex_model.distributed.costs import Connected
from flex_model.hooks.function import HookFunction
from flex_model.hooks.registration import Registration
from flex_model.inspection import text
from flex_model.inspection.call_costs import Cost, Setup
from flex_model.inspection.dry_run import DryRunRow, row_of, totals
from flex_model.inspection.offline import OfflineRun
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


@dataclass(frozen=True)
class Link:
    """The link of a host to all others."""

    bytes_per_s: float
    latency_s: float

    def seconds(self, cost: Cost) -> float:
        return cost.between.seconds(self.bytes_per_s, self.latency_s)

    def __str__(self) -> str:
        return f"{8 * self.bytes_per_s / 1e9:g} Gbit/s and {1e6 * self.latency_s:g} us a message"


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


class HookCosts:
    """What hooks cost in a run whose layouts are known. ``print`` or ``str`` it.

    Attributes:
        rows: One for each line of the file, and shape of the tensors that its hooks see.
        forward, backward: Of all hooks together, with what they share.
        connected: What the first rank of a host, and another rank, take when a FlexModel is made.
    """

    def __init__(self, setup: Setup, rows: Sequence[DryRunRow], link: Link) -> None:
        self.rows = list(rows)
        self.forward, self.backward = totals(setup, rows)
        num_hosts = len(set(setup.hosts))
        self.connected = tuple(Connected.of(num_hosts, is_first) for is_first in (True, False))
        self._link = link
        edits_on = "every rank" if setup.edits_on_all else "rank 0"
        self._title = f"{len(setup.hosts)} ranks on {num_hosts} hosts, edits on {edits_on}"

    def _parts(self) -> list[tuple[str, str, DryRunRow | None, Cost]]:
        parts: list[tuple[str, str, DryRunRow | None, Cost]] = []
        for row in self.rows:
            name = f"{row.name} ({row.kind}, {'edit' if row.edits else 'read'})"
            parts += [
                (name, when, row, cost)
                for when, cost in (("forward", row.forward), ("backward", row.backward))
                if cost != Cost()
            ] or [(name, row.source, row, Cost())]
        parts.append(("all hooks, and what they share", "forward", None, self.forward))
        if self.backward != Cost():
            parts.append(("all hooks, and what they share", "backward", None, self.backward))
        return parts

    def __str__(self) -> str:
        headers = ("hooks", "in the", "calls", "full shape", "headers", "transfers", "messages")
        rows = [
            [
                name,
                when,
                "" if row is None else str(row.calls),
                "" if row is None or not row.calls else text.shape(row.full_shape),
                str(cost.headers),
                str(cost.payloads),
                str(cost.between.most_messages),
                text.size(cost.between.most_bytes),
                text.size(cost.record_bytes),
                f"{1e3 * self._link.seconds(cost):.3f}",
            ]
            for name, when, row, cost in self._parts()
        ]
        first, other = self.connected
        return "\n".join(
            [
                self._title,
                text.table([*headers, "busiest link", "records", "ms"], rows),
                "messages: sent by one host at most; busiest link: what one host sends or receives "
                "at most; records: on rank 0",
                f"ms: between hosts, by links of {self._link}, without computation",
                f"FlexModel(...): the first rank of a host makes about {first.requests} requests "
                f"to torch's store and holds {first.sockets} sockets, another rank "
                f"{other.requests} and {other.sockets}",
            ]
        )

    def json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        first, other = self.connected
        return {
            "title": self._title,
            "rows": [
                {
                    "hooks": name,
                    "in": when,
                    "calls": 0 if row is None else row.calls,
                    "headers": cost.headers,
                    "transfers": cost.payloads,
                    "messages": cost.between.most_messages,
                    "bytes_on_busiest_link": cost.between.most_bytes,
                    "record_bytes": cost.record_bytes,
                    "seconds": self._link.seconds(cost),
                }
                for name, when, row, cost in self._parts()
            ],
            "requests": {"first_of_host": first.requests, "other": other.requests},
            "sockets": {"first_of_host": first.sockets, "other": other.sockets},
        }


def predict(
    run: OfflineRun, lines: Sequence[HookLine], num_hosts: int, edit_on: str, link: Link
) -> HookCosts:
    """Predict what the hooks cost, of a model in training, whose ranks fill one host after the
    other. Local.

    Raises:
        ValueError: the ranks don't fill the hosts, or a line names no module that is called.
    """
    num_ranks = len(run.mesh.stage_ranks)
    if num_hosts < 1 or num_ranks % num_hosts:
        raise ValueError(
            f"{num_ranks} ranks do not fill {num_hosts} hosts; give a number of hosts that divides "
            "the ranks"
        )
    hosts = tuple(f"host {rank * num_hosts // num_ranks}" for rank in range(num_ranks))
    setup = Setup(run.mesh, hosts, edits_on_all=edit_on == "all")
    return HookCosts(setup, [row for line in lines for row in _rows(setup, run, line)], link)


def _rows(setup: Setup, run: OfflineRun, line: HookLine) -> list[DryRunRow]:
    """One row for each shape that the hooks of a line see."""
    function = HookFunction(line.pattern, editing_function=_edit if line.edits else None)
    registration = Registration(function, line.kind, 0, 0, None, function, line.pattern)
    rows: dict[Any, DryRunRow] = {}
    of_seen: dict[Any, DryRunRow] = {}
    for name, kind, ranks in run.calls:
        if kind != KINDS[line.kind] or not fnmatch.fnmatchcase(name, line.pattern):
            continue
        seen = tuple((one.shape, one.dtype, one.pair) for one in ranks)
        if seen not in of_seen:
            of_seen[seen] = row_of(setup, registration, [_in_training(one) for one in ranks])
        row = of_seen[seen]
        key = row.full_shape, row.dtype, row.layout, row.source
        rows[key] = row if key not in rows else rows[key].with_calls(row)
    if not rows:
        called = {name for name, kind, _ in run.calls if kind == KINDS[line.kind]}
        close = difflib.get_close_matches(line.pattern, sorted(called), 3, 0.3)
        raise ValueError(
            f"no module that the model calls with tensors is named {line.pattern!r}; there are "
            f"{', '.join(close or sorted(called)[:3])}; leave out --hooks to see all"
        )
    return list(rows.values())


def _in_training(seen: Seen) -> Seen:
    return replace(seen, needs_gradient=seen.dtype.is_floating_point)


def _edit(module: nn.Module | None, full: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    """Stands for the user's function, and is never called."""
    return full

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
from flex_model.distributed.placement import Shape
from flex_model.hooks.function import HookFunction
from flex_model.hooks.registration import Registration
from flex_model.inspection import text
from flex_model.inspection.call_costs import Cost, Setup
from flex_model.inspection.dry_run import DryRunRow, row_of, totals
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


@dataclass(frozen=True)
class Part:
    """A row of the costs: of the hooks of one line of the file, or of what hooks share.

    Attributes:
        when: The part of a run that it is spent in; or why it is not known.
        calls: Of the hooks, if it is theirs; 0 where the run does not get there.
    """

    name: str
    when: str
    cost: Cost
    calls: int | None = None
    full_shape: Shape | None = None

    @property
    def is_known(self) -> bool:
        """Whether the sums include it."""
        return self.calls is None or self.full_shape is not None


class HookCosts:
    """What hooks cost in a run whose layouts are known. ``print`` or ``str`` it.

    Args:
        what: Which ranks run, for the title.
        hosts: The host of each rank.
        connected: What each rank takes when a FlexModel is made.
        notes: What the costs don't include.
    """

    def __init__(
        self,
        what: str,
        hosts: Sequence[str],
        edit_on: str,
        parts: Sequence[Part],
        connected: Sequence[Connected],
        link: Link,
        notes: str = "",
    ) -> None:
        edits_on = "every rank" if edit_on == "all" else "rank 0"
        num_hosts = len(set(hosts))
        self.parts = list(parts)
        self._title = f"{what} on {num_hosts} hosts, edits on {edits_on}"
        firsts = are_firsts(hosts)
        # What the first rank of a host takes at most, and another rank.
        self._connected = [
            max(one for one, is_its in zip(connected, firsts) if is_its is is_first)
            for is_first in (True, False)
            if is_first in firsts
        ]
        self._link, self._notes = link, notes

    def __str__(self) -> str:
        headers = ("hooks", "in the", "calls", "full shape", "headers", "transfers", "messages")
        rows = [
            [
                part.name,
                part.when if part.is_known else "?",
                "" if part.calls is None else str(part.calls),
                text.shape(part.full_shape) if part.calls else "",
                str(part.cost.headers),
                str(part.cost.payloads),
                str(part.cost.between.most_messages),
                text.size(part.cost.between.most_bytes),
                text.size(part.cost.record_bytes),
                f"{1e3 * self._link.seconds(part.cost):.3f}",
            ]
            for part in self.parts
        ]
        first, *others = self._connected
        others_take = [f", another rank {one.requests} and {one.sockets}" for one in others]
        unknown = [part for part in self.parts if not part.is_known]
        lines = [
            self._title,
            text.table([*headers, "busiest link", "records", "ms"], rows),
            *(f"?: {part.name}: {part.when}; no sum includes it" for part in unknown),
            "messages: sent by one host at most; busiest link: what one host sends or receives "
            "at most; records: on rank 0",
            f"ms: between hosts, by links of {self._link}, without computation",
            f"FlexModel(...): the first rank of a host makes about {first.requests} requests "
            f"to torch's store and holds {first.sockets} sockets{''.join(others_take)}",
        ]
        return "\n".join([*lines, self._notes] if self._notes else lines)

    def json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        first, other = self._connected[0], self._connected[-1]
        return {
            "title": self._title,
            "rows": [
                {
                    "hooks": part.name,
                    "in": part.when,
                    "calls": part.calls or 0,
                    "headers": part.cost.headers,
                    "transfers": part.cost.payloads,
                    "messages": part.cost.between.most_messages,
                    "bytes_on_busiest_link": part.cost.between.most_bytes,
                    "record_bytes": part.cost.record_bytes,
                    "seconds": self._link.seconds(part.cost),
                }
                for part in self.parts
            ],
            "requests": {"first_of_host": first.requests, "other": other.requests},
            "sockets": {"first_of_host": first.sockets, "other": other.sockets},
        }


def are_firsts(hosts: Sequence[str]) -> list[bool]:
    """Return whether each rank is the first one of its host."""
    return [hosts.index(host) == rank for rank, host in enumerate(hosts)]


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
    run: OfflineRun, lines: Sequence[HookLine], hosts: tuple[str, ...], edit_on: str, link: Link
) -> HookCosts:
    """Predict what the hooks cost, of a model in training. Local.

    Args:
        hosts: The host of each rank.

    Raises:
        ValueError: a line names no module that is called.
    """
    setup = Setup(run.mesh, hosts, edits_on_all=edit_on == "all")
    rows = [row for line in lines for row in rows_of(setup, calls_of(run, line), line)]
    forward, backward = totals(setup, rows)
    parts = [part for row in rows for part in parts_of(row)]
    parts.append(Part("all hooks, and what they share", "forward", forward))
    if backward != Cost():
        parts.append(Part("all hooks, and what they share", "backward", backward))
    num_hosts = len(set(hosts))
    connected = [Connected.of(num_hosts, is_first) for is_first in are_firsts(hosts)]
    return HookCosts(f"{len(hosts)} ranks", hosts, edit_on, parts, connected, link)


def parts_of(row: DryRunRow, where: str = "") -> list[Part]:
    """The parts of one row: in the forward, in the backward, or why there are none."""
    name = f"{row.name} ({row.kind}, {'edit' if row.edits else 'read'}){where}"
    costs = {"forward": row.forward, "backward": row.backward}
    found = [
        Part(name, when, cost, row.calls, row.full_shape)
        for when, cost in costs.items()
        if cost != Cost()
    ]
    return found or [Part(name, row.source, Cost(), row.calls, row.full_shape)]


def calls_of(run: OfflineRun, line: HookLine) -> list[Call]:
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


def rows_of(setup: Setup, calls: Sequence[Call], line: HookLine) -> list[DryRunRow]:
    """One row for each shape that the hooks of a line see."""
    function = HookFunction(line.pattern, editing_function=_edit if line.edits else None)
    registration = Registration(function, line.kind, 0, 0, None, function, line.pattern)
    rows: dict[Any, DryRunRow] = {}
    of_seen: dict[Any, DryRunRow] = {}
    for _, _, ranks in calls:
        seen = tuple((one.shape, one.dtype, one.pair) for one in ranks)
        if seen not in of_seen:
            of_seen[seen] = row_of(setup, registration, [_in_training(one) for one in ranks])
        row = of_seen[seen]
        key = row.full_shape, row.dtype, row.layout, row.source
        rows[key] = row if key not in rows else rows[key].with_calls(row)
    return list(rows.values())


def _in_training(seen: Seen) -> Seen:
    return replace(seen, needs_gradient=seen.dtype.is_floating_point)


def _edit(module: nn.Module | None, full: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    """Stands for the user's function, and is never called."""
    return full

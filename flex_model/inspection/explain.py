"""The cost of each hook in the last run, counted while it ran, and the reason for it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flex_model.distributed.costs import Spent
from flex_model.hooks.registration import Registration
from flex_model.inspection import text

if TYPE_CHECKING:
    from flex_model.hooks.core import HookCore


@dataclass(frozen=True)
class HookCost(text.SiteRow):
    """The cost of one hook, or the cost shared by all hooks (named ``"(all hooks)"``).

    Attributes:
        name, kind, unpack_idx: As in ``SiteLayout``.
        transport: The transport of its tensors; empty if nothing was moved.
        headers: The number of 64-byte exchanges, each among all ranks of the model.
        collectives: The number of collectives that moved tensors of this hook alone.
        bytes_moved: The bytes that this rank sent and received.
        why: The reason for the cost.
    """

    transport: str
    headers: int
    collectives: int
    bytes_moved: int
    why: str


class Explanation(list[HookCost], text.Printed):
    """A list of ``HookCost`` that prints as a table.

    Attributes:
        transports: For each group of ranks in use, by its mesh axes: the transport and the reason
            for choosing it.
    """

    def __init__(self, rows: Iterable[HookCost], transports: dict[str, tuple[str, str]]) -> None:
        super().__init__(rows)
        self.transports = transports

    @property
    def bytes_moved(self) -> int:
        """The bytes that this rank moved for all hooks."""
        return sum(row.bytes_moved for row in self)

    def _blocks(self) -> Iterator[text.Table | str]:
        if not self:
            yield "no hooks are registered"
            return
        headers = ("site", "kind", "transport", "headers", "collectives", "bytes moved", "why")
        yield text.Table(headers, [self._row(row) for row in self])
        for axes, (name, why) in self.transports.items():
            yield f"ranks along {axes}: {name}, because {why}"

    @staticmethod
    def _row(row: HookCost) -> list[str]:
        return [
            row.site,
            row.kind,
            row.transport,
            str(row.headers),
            str(row.collectives),
            text.size(row.bytes_moved),
            row.why,
        ]


def explain(core: HookCore) -> Explanation:
    """Return the costs of all hooks. Local; bytes are this rank's."""
    communicator = core.communicator
    spent, rows = communicator.meter.spent, []
    for registration in core.table.registrations:
        place = registration.name, registration.kind, registration.hook_function.unpack_idx
        own = spent.pop(registration.site, Spent())
        rows.append(_row(place, own, _why(registration, own, core)))
    if spent:
        why = (
            "one header when a forward begins, one when the run ends, with all records; more for "
            "new hooks or inputs"
        )
        rows.append(_row(("(all hooks)", "", 0), _sum(spent.values()), why))
    return Explanation(rows, communicator.transports())


def _row(place: tuple[str, str, int | str], spent: Spent, why: str) -> HookCost:
    transports = ", ".join(sorted(spent.transports))
    return HookCost(*place, transports, spent.headers, spent.payloads, spent.num_bytes, why)


def _sum(several: Collection[Spent]) -> Spent:
    return Spent(
        sum(one.headers for one in several),
        sum(one.payloads for one in several),
        sum(one.num_bytes for one in several),
        set().union(*(one.transports for one in several)),
    )


def _why(registration: Registration, spent: Spent, core: HookCore) -> str:
    has_calls = registration.kind in ("forward", "forward_pre") and registration.places
    if has_calls and core.runs.number and not registration.was_called(core.runs.number):
        return "not called in the last run"
    if core.communicator.is_local:
        return "one rank: the tensor is whole"
    if not registration.specs:
        return "not called yet"
    layout = list(registration.specs.values())[-1].layout
    where = f"{layout}, {layout.source}" if layout.source else str(layout)
    if not spent.headers and not spent.num_bytes:
        if registration.edits:
            return f"not called in the last run ({where})"
        if core.records.keeps_parts:
            return f"read-only: each rank stores its own shard ({where})"
        return f"read-only: nothing to move from this rank ({where})"
    if not registration.edits and core.records.keeps_parts:
        return f"read-only: summed, then each rank stores its own shard ({where})"
    if not registration.edits:
        return f"read-only: sent to rank 0 when the run ends ({where})"
    if not spent.payloads:
        return f"every rank has the whole tensor: only a header ({where})"
    place = "every rank" if core.executor.edits_on_all else "rank 0"
    return f"edited on {place} ({where})"

"""When each rank was at which hook, edit and transfer.

The recorder is an observer of the hook executor and of the communicators while it is on; with no
observer a hook or a transfer pays for one truth test.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

from flex_model.distributed.tensor_dicts import exchange_json
from flex_model.inspection import text

if TYPE_CHECKING:
    from flex_model.distributed.communicator import Communicator
    from flex_model.distributed.mesh import Axis
    from flex_model.hooks.core import HookCore
    from flex_model.hooks.hook_call import HookCall

KINDS = ("hook", "edit", "header", "transfer")
_REMEMBERED = 20_000  # spans of a rank, the last ones: some MiB


@dataclass(frozen=True)
class Span:
    """Something that a rank did.

    Attributes:
        kind: ``"hook"``: a call of a hook, all it takes. ``"edit"``: its editing function alone.
            ``"header"``: 64 bytes exchanged with all ranks of a stage. ``"transfer"``: a collective
            that moves tensors.
        what: The hook, or what was exchanged.
        site: The name of the hook's module or parameter; empty where it is not of one hook.
        start_us, end_us: Microseconds since the first span of all ranks began.
        waited_us: Of it, until the last of the ranks that it was with had come.
        num_bytes: That this rank moved, as ``flex.explain()`` counts them.
    """

    kind: str
    what: str
    site: str
    start_us: float
    end_us: float
    waited_us: float = 0.0
    num_bytes: int = 0


class Timeline(list[list[Span]], text.Printed):
    """By rank, its spans in the order in which they began. Prints as a table.

    Empty until the ``with`` of ``flex.timeline()`` is left; complete then on every rank.

    Attributes:
        ranks: Global ranks.
        num_forgotten: By rank, how many spans were let go, since only the last 20,000 are kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ranks: tuple[int, ...] = ()
        self.num_forgotten: list[int] = []

    def fill(
        self, spans: list[list[Span]], ranks: tuple[int, ...], num_forgotten: list[int]
    ) -> None:
        self[:] = spans
        self.ranks, self.num_forgotten = ranks, num_forgotten

    @property
    def end_us(self) -> float:
        """When the last span ended."""
        return max((span.end_us for spans in self for span in spans), default=0.0)

    def summary(self) -> list[dict[str, Any]]:
        """By rank: how many spans of each kind, bytes, and microseconds in edits and waiting."""
        rows = []
        for rank, spans in zip(self.ranks, self):
            kinds = Counter(span.kind for span in spans)
            rows.append(
                {
                    "rank": rank,
                    **{f"{kind}s": kinds[kind] for kind in KINDS},
                    "bytes": sum(span.num_bytes for span in spans),
                    "edit_us": sum(s.end_us - s.start_us for s in spans if s.kind == "edit"),
                    "waited_us": sum(span.waited_us for span in spans),
                }
            )
        return rows

    def shown(self) -> list[dict[str, str]]:
        """``summary`` as people read it."""
        return [
            {key: str(row[key]) for key in ("rank", "hooks", "edits", "headers", "transfers")}
            | {
                "bytes": text.size(row["bytes"]),
                "in edits": f"{row['edit_us'] / 1e3:.2f} ms",
                "waiting": f"{row['waited_us'] / 1e3:.2f} ms",
            }
            for row in self.summary()
        ]

    def _blocks(self) -> Iterator[text.Table | str]:
        if not self:
            yield "nothing is recorded yet"
            return
        shown = self.shown()
        end = f"{self.end_us / 1e3:.2f} ms in all"
        if any(self.num_forgotten):
            end += f"; the first {max(self.num_forgotten)} of a rank's spans are forgotten"
        yield text.Table(list(shown[0]), [list(row.values()) for row in shown])
        yield end


# ---- Recording -----------------------------------------------------------------------------------


@dataclass
class _Noted:
    """A span as its rank notes it: times in nanoseconds.

    Attributes:
        exchange: The ranks that take part, and the number of their exchange; empty for none.
    """

    kind: str
    what: str
    site: str
    start: int
    end: int = 0
    num_bytes: int = 0
    exchange: str = ""

    def finish(self) -> None:
        self.end = time.time_ns()


class _Recorder:
    """Notes what this rank does in a FlexModel.

    Args:
        communicators: All that its hooks talk through, by name.
    """

    def __init__(self, core: HookCore, communicators: dict[str, Communicator]) -> None:
        self.noted: deque[_Noted] = deque(maxlen=_REMEMBERED)
        self.num_noted = 0
        self._exchanges: Counter[str] = Counter()
        self._sites: dict[str, str] = {}  # of the last header, by communicator
        self._names = {r.site: r.name for r in core.table.registrations}
        self.observed: list[tuple[list[Any], Callable[..., Any]]] = [
            (core.executor.observers, self._begin_hook)
        ]
        for key, communicator in communicators.items():
            begin = functools.partial(self._begin_transfer, communicator, key)
            self.observed.append((communicator.observers, begin))

    def _begin(self, noted: _Noted) -> Callable[[], None]:
        self.noted.append(noted)
        self.num_noted += 1
        return noted.finish

    def _begin_hook(self, kind: str, call: HookCall) -> Callable[[], None]:
        return self._begin(_Noted(kind, call.describe(), call.registration.name, time.time_ns()))

    def _begin_transfer(
        self,
        communicator: Communicator,
        key: str,
        name: str,
        axes: tuple[Axis, ...],
        num_bytes: int,
    ) -> Callable[[], None]:
        kind, what = "transfer", f"{name.replace('_', ' ')}, after {communicator.where}"
        if name == "exchange_bytes":
            kind, what = "header", communicator.where
            self._sites[key] = self._names.get(communicator.meter.site, "")
        site = self._sites.get(key, "")
        exchange = self._exchange(communicator, key, axes)
        return self._begin(_Noted(kind, what, site, time.time_ns(), 0, num_bytes, exchange))

    def _exchange(self, communicator: Communicator, key: str, axes: tuple[Axis, ...]) -> str:
        """Return a name of this exchange among its ranks: all of them count the same number."""
        members = communicator.mesh.ranks_along(axes)
        if len(members) == 1:
            return ""
        ranks = ",".join(str(communicator.mesh.stage_ranks[place]) for place in members)
        group = f"{key} {ranks}"
        self._exchanges[group] += 1
        return f"{group} {self._exchanges[group]}"


@contextlib.contextmanager
def recorded(
    core: HookCore, communicators: dict[str, Communicator], timeline: Timeline
) -> Iterator[Timeline]:
    """Fill ``timeline`` with what all ranks do meanwhile. Its end is collective over the ranks of
    the first communicator; after an exception only this rank's spans are there.
    """
    everyone = next(iter(communicators.values()))
    recorder = _Recorder(core, communicators)
    if any(observers for observers, _ in recorder.observed):
        raise RuntimeError("flex.timeline(): one is being recorded already")
    for observers, begin in recorder.observed:
        observers.append(begin)
    is_complete = False
    try:
        yield timeline
        is_complete = True
    finally:
        for observers, begin in recorder.observed:
            observers.remove(begin)
        local: list[Any] = [
            everyone.mesh.ranks[everyone.mesh.rank],
            recorder.num_noted - len(recorder.noted),
            [astuple(span) for span in recorder.noted],
        ]
        per_rank = [local]
        if is_complete:
            with everyone.uncounted():
                per_rank = exchange_json(everyone, local, "the end of a timeline")
        timeline.fill(
            _joined([[_Noted(*row) for row in spans] for _, _, spans in per_rank]),
            tuple(rank for rank, _, _ in per_rank),
            [forgotten for _, forgotten, _ in per_rank],
        )


def _joined(noted: Sequence[Sequence[_Noted]]) -> list[list[Span]]:
    """Spans from the first start of all, with what each waited for the last to come."""
    origin = min((one.start for spans in noted for one in spans), default=0)
    last_came: dict[str, int] = {}
    for spans in noted:
        for one in spans:
            if one.exchange:
                last_came[one.exchange] = max(one.start, last_came.get(one.exchange, one.start))

    def span(one: _Noted) -> Span:
        waited = min(one.end, last_came.get(one.exchange, one.start)) - one.start
        start, end = (one.start - origin) / 1e3, (one.end - origin) / 1e3
        waited_us = max(0, waited) / 1e3
        return Span(one.kind, one.what, one.site, start, end, waited_us, one.num_bytes)

    return [[span(one) for one in spans] for spans in noted]

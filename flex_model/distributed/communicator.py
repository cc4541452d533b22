"""The communicator of a ``FlexModel``: every transfer among its ranks goes through it.

A transfer is ``check_consistency`` (a header of 64 bytes per rank, compared before any payload is
sent), then the payload along a GatherPlan; or ``gather_at_once``, which sends both in one round,
and uses no payload where the headers differ.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flex_model._C import GatherPlan
from flex_model.distributed import costs
from flex_model.distributed.failure import ERROR, FAILED, OK, STOPPED, RankState
from flex_model.distributed.group_pool import BITS_OF_SEQUENCE, GroupPool
from flex_model.distributed.header import Header
from flex_model.distributed.mesh import GRID, Axis, Mesh
from flex_model.distributed.plain import plain
from flex_model.distributed.transports.by_device import ByDevice
from flex_model.distributed.transports.shared_memory import SharedMemory
from flex_model.distributed.transports.transport import Gathered, exchange_bytes
from flex_model.errors import HookError, HookMismatchError, UnpackIndexError, agreed, see
from flex_model.integrations.torch_private import current_graph_task

_TEXT_BYTES = 2048
_MUST = "register the same hooks in the same order and run the same model"
_LEFT_OVER = (
    "This rank's output is of a collective that it has not waited for, and that the failed ranks "
    "may never have called: the model's next ones would be paired with it. Start the processes "
    "again, or make the model's process groups anew."
)
_GRACE_S = 10.0  # how long a rank whose model failed tries to report it
MODE_BITS = 2


class _Forward(NamedTuple):
    """A forward whose first exchange is the next one.

    Attributes:
        num_skipped: Number of forwards in its mode that this rank ran without hooks, since the last
            one with hooks.
        choice: A description of how its hooks were chosen.
    """

    num_skipped: int
    mode: int
    choice: str

    @property
    def mark(self) -> int:
        """The bits that distinguish its headers from those of another forward."""
        return self.num_skipped << MODE_BITS | self.mode

    def describe(self) -> str:
        training, grad = "training" if self.mode & 2 else "eval", "with" if self.mode & 1 else "no"
        return (
            f"the first exchange of a run of {self.choice} ({training} mode, {grad} gradients), "
            f"before which it made {self.num_skipped} such runs without hooks"
        )


class Communicator(GroupPool):
    """Performs the transfers among the ranks of one pipeline stage (``Mesh.stage_ranks``).

    All methods but ``close`` are collective over these ranks, or over the ranks along ``axes``
    where they take them.
    """

    def __init__(self, mesh: Mesh, timeout_s: float, device: torch.device | None = None) -> None:
        self.meter = costs.Meter()  # of the current run
        self._is_awaited = True  # whether the forward has waited for the collectives of its output
        self.edited = ""  # the hook whose edit just changed its tensor; compared over ranks
        self.defers = False  # whether what is of a GPU is looked at when the run or backward ends
        self._deferred_in = -1  # the last backward pass that ends by `finish_transfers`
        self._forward: _Forward | None = None  # its first exchange is the next one
        # Where those of ``gather_at_once`` differ: its header, as packed, all of them, ``edited``.
        self._received: tuple[Header, bytes, list[bytes], str] | None = None
        self._skipped: Counter[int] = Counter()  # forwards without hooks since then, by mode
        self.divisor: float | None = None  # of the ranks' summed losses, where one is known
        super().__init__(mesh, timeout_s, device)

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Exclude the exchanges inside from the costs of the last run. Local."""
        meter, self.meter = self.meter, costs.Meter()
        try:
            yield
        finally:
            self.meter = meter

    def defer(self, defers: bool) -> None:
        """From now on, don't wait for transfers of GPU tensors; the caller calls
        ``finish_transfers`` before anything that was computed from them leaves the run. Local.
        """
        self.defers = defers

    def defer_in_backward(self) -> None:
        """Defer as ``defer(True)`` does; the running backward pass calls ``finish_transfers`` when
        it ends. Outside of one, do nothing. Local.
        """
        task = current_graph_task()
        self.defers = task != -1
        if self.defers and self._by_device and task != self._deferred_in:
            self._deferred_in = task
            torch.autograd.Variable._execution_engine.queue_callback(self.finish_transfers)

    def begin_run(self) -> None:
        """Forget the backward passes and the costs of the run before. Local."""
        self.failure.begin_run()
        self.meter = costs.Meter()

    def divide_by(self, divisor: float) -> None:
        """Take the sum of the ranks' losses by this number for the loss of all. Local."""
        self.divisor = divisor

    def divisor_at(self, hook: str, is_dtensor: bool) -> float:
        """Return the number by which the sum of the ranks' losses is the loss of all: by default
        that of the ranks, as users average gradients themselves. Local.

        Raises:
            HookError: none is known, and the tensor of the ``hook`` is a DTensor along dp, through
                which autograd sums gradients over the ranks. On every rank.
        """
        if self.divisor is not None:
            return self.divisor
        if is_dtensor and self.mesh.dp_size > 1:
            raise agreed(
                HookError(
                    f"{hook}: its tensor is a DTensor along dp, and the model computes with no "
                    "parameter that is one, so whether gradients of parameters become the sum over "
                    "data-parallel ranks or the mean is not known; make parameters DTensors, too "
                    "(distribute_module), or apply DDP or fully_shard to the model"
                )
            )
        return self.mesh.dp_size

    def fail(self, text: str, cause: BaseException, state: RankState = ERROR) -> None:
        """Raise an error of this rank: now if it is alone, else on all ranks at the next exchange.
        Local.
        """
        if self.is_local:
            raise agreed(_kind_of(cause)(text)) from cause
        self.failure.set_error(text, cause, state)

    def note_edit(self, hook: str) -> None:
        """Record that the hook's edit changed its tensor (empty: it did not), for the next exchange
        to compare. Local.
        """
        self.edited = hook

    def note_output(self, is_awaited: bool) -> None:
        """Record whether a forward has waited for the collectives that make its output. Local."""
        self._is_awaited = is_awaited

    # The forward of the model that this rank is in.

    def note_forward(self, has_hooks: bool, mode: int, active: int, choice: str) -> None:
        """Record that a forward begins, for the next exchange to compare. Local.

        A forward without hooks exchanges nothing, so a rank that chose no hooks for a forward would
        be matched with the next forward of the others. Therefore the ranks compare how many
        forwards in this mode each of them ran without hooks. Forwards in other modes don't count:
        one rank alone may evaluate in the middle of a training.

        Args:
            mode: A number below ``1 << MODE_BITS`` that is the same on all ranks.
            active: A digest of the hooks that are active in the forward.
            choice: A description of how they were chosen, for messages.
        """
        if has_hooks:
            self._forward = _Forward(self._skipped[mode], mode, choice)
            self._skipped.clear()
        else:
            self._skipped[mode] += 1
            self.publish_run(active, choice, mode, has_hooks=False)

    @property
    def has_skipped(self) -> bool:
        """Whether there were forwards without hooks since the last one with hooks."""
        return bool(self._skipped)

    @property
    def is_after_skipped(self) -> bool:
        """Whether forwards without hooks, in its mode, came before the forward that begins."""
        return self._forward is not None and self._forward.num_skipped > 0

    def forget_forward(self) -> None:
        """Drop the recorded forward, which has ended. Local."""
        self._forward = None

    # Consistency checks.

    def check_consistency(self, header: Header, where: str) -> list[Header]:
        """Exchange headers and compare them; return those of all ranks, in the order of the stage.

        Args:
            where: This rank's position, for messages: ``"forward of 'layers.0' (hook 3)"``.

        Raises:
            HookError: a rank has a pending error, is missing, or died. Raised on every rank. An
                error of a hook's function is held instead, where ``Failure.hold`` can.
            HookMismatchError: the ranks are at different sites, or their tensors have different
                dtypes or numbers of dims.
        """
        forward, self._forward = self._forward, None
        mark, state = 0 if forward is None else forward.mark, self.failure.state
        received, self._received = self._received, None
        # Of another header where this rank fails before it comes to its own.
        if received is None or (received[0].kind, received[0].site) != (header.kind, header.site):
            edited = self.edited
            packed = self._begin_exchange(header, where, 0, mark)
            rows = [packed] if self.is_local else self.call("exchange_bytes", GRID, packed)
        else:
            _, packed, rows, edited = received
        seed = Header.seed_if_alike(rows, packed) if state == OK else None
        if seed is not None:
            return [header.of_call(seed, header.hash)] * len(rows)
        site = header.site ^ mark
        header = replace(header, site=site, sequence=self.sequence, state=state)
        try:
            headers = [Header.unpack(row) for row in rows]
        except ValueError as error:
            raise self.abort(f"{where}: {error}") from None
        if any(other.state != OK for other in headers):
            failure = self._agreed_error(headers, where)
            if _can_continue(headers) and self.failure.hold(failure):
                return headers
            self.failure.agree()
            raise failure
        if any(other.sequence >> BITS_OF_SEQUENCE != self._number for other in headers):
            raise self.mismatch(f"{where}, of FlexModel {self._number}", "run different FlexModels")
        place = header.kind, header.site, header.sequence
        for other in headers:
            if (other.kind, other.site, other.sequence) != place:
                where += "" if forward is None else f", {forward.describe()}"
                kinds = {one.kind for one in headers}
                must = _MUST + self.more_calls * ("end of the run" in kinds and len(kinds) > 1)
                if kinds == {"parameter"}:
                    must = "make the same calls, for parameters and gradients that all ranks have"
                raise self.mismatch(where, "are at different places", must)
            if other.dtype != header.dtype:
                raise self.mismatch(f"{where} with {header.dtype}", "have different dtypes")
        if any(bool(other.flags & Header.EDITED) != bool(edited) for other in headers):
            what = f"the edit of the {edited}, which changed" if edited else "an edit that left"
            raise self.mismatch(
                f"{where}, after {what} its tensor",
                "run edits that do not do the same (with edit_on='all' every rank must edit alike)",
            )
        if any(other.is_wide for other in headers):
            headers = self._exchange_wide_shapes(header, headers)
        if any(len(other.shape) != len(header.shape) for other in headers):
            raise self.mismatch(
                f"{where} with shape {header.shape}", "have tensors of different numbers of dims"
            )
        return headers

    def _begin_exchange(self, header: Header, where: str, flags: int, mark: int = 0) -> bytes:
        """Count an exchange, and return this rank's header for it. Local."""
        if self.edit_of:
            self.check_no_edit()
        self.sequence += 1
        self.where = where
        # One that has registered other hooks may never take part: reported after a few seconds.
        self._is_of_hooks = header.kind == "registered hooks"
        self.steps.add(where)
        self.meter.header(header.site)
        edited, self.edited = self.edited, ""
        flags |= Header.EDITED if edited else 0
        return header.pack(self.sequence, self.failure.state, flags, mark)

    @property
    def gathers_at_once(self) -> bool:
        """Whether there is ``gather_at_once``: among ranks that share memory, without GPUs."""
        return isinstance(self.transport(GRID), SharedMemory)

    def gather_at_once(
        self,
        header: Header,
        where: str,
        axes: tuple[Axis, ...],
        shard: Tensor,
        plan: GatherPlan,
        places: list[int],
        fulls: list[Tensor],
    ) -> bool:
        """Exchange headers with the shards behind them, where no rank is expected to differ: fill
        ``fulls`` if the headers are equal, and the seed is all that may differ. Else return False:
        the next ``check_consistency``, for the same header, goes on with what was exchanged.

        Args:
            places: The ranks of the stage that hold the plan's shards; none: nothing is gathered.
        """
        if self.failure.has_error or self._forward is not None or self.observers:
            return False
        edited = self.edited
        packed = self._begin_exchange(header, where, Header.CARRIES)
        targets = fulls if places else []
        rows = self.call("gather_at_once", GRID, packed, Header.SEED, plan, places, shard, targets)
        if Header.seed_if_alike(rows, packed) is None:
            self._received = header, packed, rows, edited
            return False
        if places:
            self.meter.payload(plan.full_bytes, self.transport(axes).name)
        return True

    def exchange(self, tensor: Tensor) -> Tensor:
        """Stack a CPU tensor of all ranks, with the same shape and dtype:
        ``(num_ranks, *shape)``.
        """
        tensor = plain(tensor)
        return tensor.unsqueeze(0) if self.is_local else self.call("exchange", GRID, tensor)

    def exchange_text(self, text: str) -> list[str]:
        """Gather a text of every rank, truncated to 2 KiB."""
        rows = self.exchange_padded(text.encode()[:_TEXT_BYTES], _TEXT_BYTES)
        return [row.rstrip().decode(errors="replace") for row in rows]

    def exchange_padded(self, data: bytes, width: int) -> list[bytes]:
        """Gather the bytes of every rank, with spaces up to a ``width`` that is the same on all."""
        return exchange_bytes(self.exchange, data.ljust(width))

    def _exchange_wide_shapes(self, header: Header, headers: list[Header]) -> list[Header]:
        texts = self.exchange_text(json.dumps(header.shape))
        return [
            replace(other, shape=tuple(json.loads(text))) for other, text in zip(headers, texts)
        ]

    def _agreed_error(self, headers: list[Header], where: str) -> HookError:
        state, cause = self.failure.state, self.failure.cause
        texts = self.exchange_text(self.failure.text)
        self.failure.clear()
        failed = [
            f"rank {self.mesh.rank_at(place)}: {texts[place]}"
            for place, other in enumerate(headers)
            if other.state != OK
        ]
        here = "" if state != OK else f" (this rank was at: {where})"
        text, kind = f"{'; '.join(failed)}{here}", _kind_of(cause)
        states = {other.state for other in headers}
        # Where all have stopped behind complete forwards, they have made the same calls.
        if not self._is_awaited and max(states) >= FAILED and states != {STOPPED}:
            error = self.abort(f"{text}. {_LEFT_OVER}", kind)
        else:
            error = kind(f"{text}{self._steps_of_all()}")
        error.__cause__ = cause
        return agreed(error)

    def _steps_of_all(self) -> str:
        """Return the last steps of all ranks, as the end of a message. Collective."""
        texts = self.exchange_text(str(self.steps))
        lines = [f"\n  rank {self.mesh.rank_at(place)}: {text}" for place, text in enumerate(texts)]
        return "\nLast steps:" + "".join(lines)

    def mismatch(self, description: str, what: str, must: str = _MUST) -> HookMismatchError:
        """Return the error to raise on every rank after an exchange in which ranks differed.
        Collective.

        Args:
            must: What every rank must do.
        """
        texts = self.exchange_text(description)
        self.failure.agree()
        listed = "; ".join(
            f"rank {self.mesh.rank_at(place)} is at {text}" for place, text in enumerate(texts)
        )
        return agreed(
            HookMismatchError(
                f"ranks {what}: {listed}. Every rank must {must} "
                f"({see('ranks-differ')}){self._steps_of_all()}"
            )
        )

    def report_failure(
        self,
        text: str,
        cause: BaseException | None,
        kind: str,
        grace_s: float = _GRACE_S,
        state: RankState = FAILED,
    ) -> None:
        """Report to the other ranks that the model itself failed here, or code between its forwards
        (``state``), within ``grace_s`` seconds.

        If that fails, or the groups are broken, which may be why the model failed, the reason is
        added to ``cause`` as a note.
        """
        if self.is_local or self.is_child:
            return
        if self.broken is not None:
            _note(cause, self.broken)
            return
        self.failure.set_error(text, cause, state)
        try:
            with self.deadline(min(self.timeout_s, grace_s)):
                self.check_consistency(Header(kind), f"{kind}, after {text}")
        except HookError as error:
            if self.broken is not None:
                _note(cause, str(error))
        finally:
            self.failure.clear()

    # Payload. Every method is collective over the ranks of `axes`, and follows a
    # `check_consistency`.

    def all_gather(
        self,
        axes: tuple[Axis, ...],
        shard: Tensor,
        plan: GatherPlan,
        num_copies: int = 1,
        num_read: int = 0,
    ) -> list[Tensor]:
        """Return ``num_copies`` full tensors, of which the last ``num_read`` are expected to be
        read only; both numbers may differ by rank.
        """
        args = plain(shard), plan, num_copies, num_read
        return self._move("all_gather", axes, *args, num_bytes=plan.full_bytes)

    def gather_to_first(
        self, axes: tuple[Axis, ...], tensors: list[Gathered]
    ) -> list[Tensor] | None:
        """Gather full tensors on the first rank along ``axes`` (see ``Gathered``); else None."""
        to = self.transport(axes)
        host_gather = to.host_gather_of(tensors) if isinstance(to, ByDevice) else None
        name = to.name if host_gather is None else host_gather.name
        self.meter.payload(0, name)
        num_bytes = 0
        for tensor in tensors:
            moved = costs.of_gather_to_first(tensor.plan, tensor.ranks, to.group.rank)
            self.meter.payload(moved, name, tensor.site, payloads=0)
            num_bytes += moved
        return self._moved("gather_to_first", axes, tensors, num_bytes=num_bytes)

    def scatter_from_first(
        self, axes: tuple[Axis, ...], full: Tensor | None, like: Tensor, plan: GatherPlan
    ) -> Tensor:
        """Return this rank's shard of the first rank's ``full``."""
        group = self.transport(axes).group
        num_bytes = costs.of_gather_to_first(plan, range(group.size), group.rank)
        full = None if full is None else plain(full)
        return self._move("scatter_from_first", axes, full, like, plan, num_bytes=num_bytes)

    def broadcast(self, tensor: Tensor | None, like: Tensor) -> Tensor:
        """Return the tensor of the stage's first rank on every rank."""
        tensor = None if tensor is None else plain(tensor)
        return self._move("broadcast", GRID, tensor, like, num_bytes=like.nbytes)

    def all_reduce_sum(self, axes: tuple[Axis, ...], tensor: Tensor) -> Tensor:
        """Return the sum over the ranks along ``axes``, on every rank."""
        num_bytes = 2 * tensor.nbytes  # its summand and the sum
        return self._move("all_reduce_sum", axes, plain(tensor), num_bytes=num_bytes)

    def _move(self, transfer: str, axes: tuple[Axis, ...], *args: Any, num_bytes: int) -> Any:
        self.meter.payload(num_bytes, self.transport(axes).name)
        return self._moved(transfer, axes, *args, num_bytes=num_bytes)

    def _moved(self, transfer: str, axes: tuple[Axis, ...], *args: Any, num_bytes: int) -> Any:
        result = self.call(transfer, axes, *args, num_bytes=num_bytes)
        if not self.defers:
            self.finish_transfers()
        return result


def _can_continue(headers: list[Header]) -> bool:
    """Whether only a hook's function failed, and all ranks are at the same site."""
    sites = {
        (header.kind, header.site, header.sequence, header.dtype, len(header.shape))
        for header in headers
    }
    is_plain = all(header.state < FAILED and not header.is_wide for header in headers)
    return is_plain and len(sites) == 1


def _kind_of(cause: BaseException | None) -> type[HookError]:
    return UnpackIndexError if isinstance(cause, UnpackIndexError) else HookError


def _note(error: BaseException | None, text: str) -> None:
    if error is not None and hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(f"flex_model: {text}")

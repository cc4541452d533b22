"""The one place through which every transfer of a wrapped model goes.

A transfer is: agree (64 bytes of every rank, compared before any payload moves), then the payload
    along a GatherPlan.
Waiting is polling with our own deadline, so that Ctrl-C, a peer's error and a late rank are seen;
after a wait that failed the private groups are unusable and say so, while the user's own groups are
untouched.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flex_model._C import GatherPlan, WaitError
from flex_model.diagnostics import Steps, logger
from flex_model.distributed import costs, groups
from flex_model.distributed.header import ERROR, FAILED, OK, Header
from flex_model.distributed.mesh import Axis, Mesh
from flex_model.distributed.transports import transport
from flex_model.distributed.transports.by_device import ByDevice
from flex_model.distributed.transports.choice import choose
from flex_model.distributed.transports.host_gather import HostGather
from flex_model.distributed.transports.transport import Gathered, Transport
from flex_model.errors import HookError, HookMismatchError, see

_TEXT_BYTES = 2048
_SPIN = 50  # polls that only yield the processor, before the first sleep
_MAX_PAUSE_S = 0.002
_LOOK_AROUND_S = 0.1  # between looks at the store for a peer's error
_GRID: tuple[Axis, ...] = ("dp", "tp")  # all ranks of a stage
_HOOKS_GRACE_S = 5.0  # how late a rank may register its hooks
_ANSWER_S = 2.0  # how long a rank that lost a connection waits for those that live
_GRACE_S = 10.0  # how long a rank whose model failed waits to tell the others


class Channel:
    """Transfers among the ranks of one pipeline stage of a wrap (the ``grid`` of its mesh).

    All methods but ``close`` are collective over the grid, or over the ranks of ``axes`` where they
    take them.

    Args:
        mesh: The ranks.
        timeout_s: Deadline of one wait, in seconds.
        device: Where this rank's model is: decides what moves tensors of GPUs.
    """

    def __init__(self, mesh: Mesh, timeout_s: float, device: torch.device | None = None) -> None:
        self.mesh = mesh
        self.timeout_s = timeout_s
        self.sequence = 0
        self.where = "nothing yet"
        self.steps = Steps()
        self.num_payloads = 0  # payload collectives so far
        self.meter = costs.Meter()  # of the run
        self.edited = ""  # the hook whose edit has just changed its tensor: on all ranks or on none
        self.edit_of = ""  # the hook whose editing function runs: nothing may be transferred in it
        self._error: tuple[int, str, BaseException | None] = (OK, "", None)
        self._groups: dict[tuple[Axis, ...], groups.PrivateGroup] = {}
        self._transports: dict[tuple[Axis, ...], tuple[Transport, str]] = {}
        self._by_axes: dict[tuple[Axis, ...], Transport] = {}
        self._device = device or torch.device("cpu")
        self._number = 0  # of this wrap, among those of its ranks
        self._hooks = ""  # a digest of those that this rank has registered
        self._compares_hooks = False
        self._pid = os.getpid()
        if not self.is_local:
            self._transport(_GRID)

    @property
    def is_local(self) -> bool:
        """Whether there is no other rank to talk to."""
        return len(self.mesh.grid) == 1

    def _transport(self, axes: tuple[Axis, ...]) -> Transport:
        """Of the ranks along ``axes``; made, collectively, when it is used first."""
        to = self._by_axes.get(axes)
        if to is not None:
            return to
        places = self.mesh.members(axes)
        key = _GRID if len(places) == len(self.mesh.grid) else axes
        if key not in self._transports:
            ranks = tuple(self.mesh.grid[place] for place in places)
            group, number = groups.acquire(ranks, self.timeout_s, self._device.type)
            self._groups[key] = group
            if key == _GRID:
                self._number = number
            to, why = self._transports[key] = choose(group, self._wait, self._device)
            logger.info("ranks %s talk by %s: %s", list(ranks), to.name, why)
        self._by_axes[axes] = self._transports[key][0]
        return self._by_axes[axes]

    @property
    def is_child(self) -> bool:
        """Whether this process was forked from the one that wrapped the model."""
        return os.getpid() != self._pid

    @property
    def transport_name(self) -> str:
        """What moves CPU tensors among all ranks; ``"local"`` with one rank."""
        return "local" if self.is_local else self._transport(_GRID).name

    def transports(self) -> dict[str, tuple[str, str]]:
        """By the axes of the ranks that talked so far: the transport, and why it is this one."""
        return {
            _text_of(axes): (to.name, why + _seen_since(to, why))
            for axes, (to, why) in self._transports.items()
        }

    @property
    def host_gather(self) -> HostGather | None:
        """What takes shards of any device, each rank its own, in ``gather_to_first`` of the whole
        grid; None where all ranks must bring theirs on one kind of device.
        """
        to = None if self.is_local else self._transport(_GRID)
        return to.host_gather if isinstance(to, ByDevice) else None

    def close(self) -> None:
        """Give the private groups back. Local."""
        for to, _ in self._transports.values():
            if isinstance(to, ByDevice):
                to.close()
        self._transports.clear()
        self._by_axes.clear()
        while self._groups:
            groups.release(self._groups.popitem()[1])

    # Errors of this rank, told with the next header.

    @property
    def has_error(self) -> bool:
        return self._error[0] != OK

    def set_error(self, text: str, cause: BaseException, state: int = ERROR) -> None:
        """Remember an error of this rank; all ranks raise it at the next exchange. The first one
        counts.
        """
        if not self.has_error or state == FAILED:
            self._error = (state, text, cause)

    def clear_error(self) -> None:
        self._error = (OK, "", None)

    # Agreement.

    def agree(self, header: Header, where: str) -> list[Header]:
        """Exchange headers and compare them; the headers of all ranks of the grid, in its order.

        Args:
            where: What this rank is doing, for messages: ``"forward of 'layers.0' (hook 3)"``.

        Raises:
            HookError: a rank has an error to tell, is missing, or died. Raised on every rank.
            HookMismatchError: ranks do different things, or tensors of another dtype or number of
                dims.
        """
        self._check_no_edit()
        self.sequence += 1
        self.where = where
        self.steps.add(where)
        self.meter.header(header.site)
        state = self._error[0]
        edited, self.edited = self.edited, ""
        packed = header.pack(self.sequence, state, Header.EDITED if edited else 0)
        rows = [packed] if self.is_local else self._call("exchange_bytes", _GRID, packed)
        seed = Header.seed_if_alike(rows, packed) if state == OK else None
        if seed is not None:
            return [replace(header, seed=seed)] * len(rows)
        header = replace(header, sequence=self.sequence, state=state)
        try:
            headers = [Header.unpack(row) for row in rows]
        except ValueError as error:
            raise self._break(f"{where}: {error}") from None
        if any(other.state != OK for other in headers):
            raise self._agreed_error(headers, where)
        for other in headers:
            if (other.kind, other.site, other.sequence) != (
                header.kind,
                header.site,
                header.sequence,
            ):
                raise self.mismatch(where, "are at different places")
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

    def publish_hooks(self, digest: str) -> None:
        """Put up which hooks this rank has registered; ``""`` for none. Local."""
        self._hooks = digest
        if not self.is_local and not self.is_child:
            self._groups[_GRID].publish(self._number, digest)

    def agree_on_hooks(self, header: Header, where: str) -> None:
        """As ``agree``. A rank that has registered other hooks, and so may never come, is told of
        after a few seconds.
        """
        self._compares_hooks = True
        try:
            self.agree(header, where)
        finally:
            self._compares_hooks = False

    def _compare_hooks(self, waited_s: float) -> None:
        """During a long wait: whether some rank's hooks are still others than this rank's."""
        if waited_s < min(_HOOKS_GRACE_S, self.timeout_s / 2):
            return
        group = self._groups[_GRID]
        told = [group.published(self._number, rank) for rank in range(group.size)]
        others = [rank for rank, hooks in enumerate(told) if hooks not in (None, self._hooks)]
        if not others:
            return
        listed = "; ".join(
            f"rank {rank} has registered {'other hooks' if told[rank] else 'no hooks'}"
            for rank in others
        )
        reason = (
            f"rank {group.rank} waited {waited_s:.0f} s at {self.where}, but {listed}. Every rank "
            "must register the same hooks in the same order before it runs the model."
        )
        raise self._break(reason, HookMismatchError)

    def exchange(self, tensor: Tensor) -> Tensor:
        """``(num_ranks, *shape)`` of a CPU tensor that has the same shape and dtype on every
        rank.
        """
        return tensor.unsqueeze(0) if self.is_local else self._call("exchange", _GRID, tensor)

    def exchange_text(self, text: str) -> list[str]:
        """A text of every rank, cut at 2 KiB."""
        data = text.encode()[:_TEXT_BYTES]
        row = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
        row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
        return [
            bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in self.exchange(row)
        ]

    def _exchange_wide_shapes(self, header: Header, headers: list[Header]) -> list[Header]:
        row = torch.full((65,), -1, dtype=torch.int64)
        row[0] = len(header.shape)
        row[1 : 1 + len(header.shape)] = torch.tensor(header.shape, dtype=torch.int64)
        rows = self.exchange(row).tolist()
        return [
            replace(other, shape=tuple(row[1 : 1 + row[0]])) for other, row in zip(headers, rows)
        ]

    def _agreed_error(self, headers: list[Header], where: str) -> HookError:
        state, text, cause = self._error
        texts = self.exchange_text(text)
        self.clear_error()
        failed = [
            f"rank {rank}: {texts[rank]}" for rank, other in enumerate(headers) if other.state != OK
        ]
        here = "" if state != OK else f" (this rank was at: {where})"
        error = HookError(f"{'; '.join(failed)}{here}{self._steps_of_all()}")
        error.__cause__ = cause
        return agreed(error)

    def _steps_of_all(self) -> str:
        """What all ranks did last, to end a message with. Collective."""
        texts = self.exchange_text(str(self.steps))
        lines = [f"\n  rank {rank}: {text}" for rank, text in enumerate(texts)]
        return "\nLast steps:" + "".join(lines)

    def mismatch(self, description: str, what: str) -> HookMismatchError:
        """What to raise, on every rank alike, when an exchange showed that ranks differ.
        Collective.
        """
        texts = self.exchange_text(description)
        self.clear_error()
        listed = "; ".join(f"rank {rank} is at {text}" for rank, text in enumerate(texts))
        return agreed(
            HookMismatchError(
                f"ranks {what}: {listed}. Every rank must register the same hooks in the same "
                f"order and run the same model ({see('ranks-differ')}){self._steps_of_all()}"
            )
        )

    def tell_failure(self, text: str, cause: BaseException, kind: str) -> None:
        """Tell the others that the model itself failed on this rank; bounded. Of its own troubles,
        which may be why the model failed, it leaves a note on ``cause``.
        """
        if self.is_local or self.is_child or any(group.broken for group in self._groups.values()):
            return
        self.set_error(text, cause, FAILED)
        timeout_s, self.timeout_s = self.timeout_s, min(self.timeout_s, _GRACE_S)
        try:
            self.agree(Header(kind), f"{kind} after a failure")
        except HookError as error:
            is_new = any(group.broken for group in self._groups.values())
            if is_new and hasattr(cause, "add_note"):  # from Python 3.11 on
                cause.add_note(f"flex_model: {error}")
        finally:
            self.timeout_s = timeout_s
            self.clear_error()

    def leave(self, error: BaseException) -> None:
        """This rank leaves a run in the middle and will not come to its end (Ctrl-C, for one).
        Local.
        """
        if not (self.is_local or self.is_child or any(g.broken for g in self._groups.values())):
            self._break(self._leaving(error))

    def _leaving(self, error: BaseException) -> str:
        return (
            f"rank {self.mesh.place} left while it was at {self.where}: "
            f"{type(error).__name__}: {error}."
        )

    # Payload. Every method is collective over the ranks of `axes`, and follows an `agree`.

    def all_gather(
        self, axes: tuple[Axis, ...], shard: Tensor, plan: GatherPlan, num_copies: int = 1
    ) -> list[Tensor]:
        """The full tensor ``num_copies`` times over: a number of each rank's own."""
        self._count(axes, costs.of_all_gather(plan))
        return self._call("all_gather", axes, shard, plan, num_copies)

    def gather_to_first(
        self, axes: tuple[Axis, ...], tensors: list[Gathered]
    ) -> list[Tensor] | None:
        """The full tensors in the CPU memory of the first rank along ``axes``, None elsewhere."""
        to = self._transport(axes)
        host_gather = to.host_gather if isinstance(to, ByDevice) else None
        name = to.name if host_gather is None else host_gather.name
        self.num_payloads += 1
        self.meter.payload(0, name)
        for tensor in tensors:
            moved = costs.of_gather_to_first(tensor.plan, tensor.ranks, to.group.rank)
            self.meter.part_of_payload(tensor.site, moved, name)
        return self._call("gather_to_first", axes, tensors)

    def scatter_from_first(
        self, axes: tuple[Axis, ...], full: Tensor | None, like: Tensor, plan: GatherPlan
    ) -> Tensor:
        """This rank's shard of the first rank's ``full``."""
        rank, size = self._transport(axes).group.rank, self._transport(axes).group.size
        self._count(axes, costs.of_gather_to_first(plan, range(size), rank))
        return self._call("scatter_from_first", axes, full, like, plan)

    def broadcast(self, tensor: Tensor | None, like: Tensor) -> Tensor:
        """The tensor of rank 0 of the grid on every rank."""
        self._count(_GRID, costs.of_broadcast(like.nbytes))
        return self._call("broadcast", _GRID, tensor, like)

    def all_reduce_sum(self, axes: tuple[Axis, ...], tensor: Tensor) -> Tensor:
        """The sum over the ranks along ``axes``, on every rank."""
        self._count(axes, costs.of_all_reduce(tensor.nbytes))
        return self._guarded(axes, lambda to: transport.all_reduce_sum(to, tensor))

    def _count(self, axes: tuple[Axis, ...], num_bytes: int) -> None:
        self.num_payloads += 1
        self.meter.payload(num_bytes, self._transport(axes).name)

    # Waiting.

    def _call(self, method: str, axes: tuple[Axis, ...], *args: Any) -> Any:
        return self._guarded(axes, lambda to: getattr(to, method)(*args))

    def _guarded(self, axes: tuple[Axis, ...], transfer: Callable[[Transport], Any]) -> Any:
        """What ``transfer`` returns; if it fails in any way, nobody is left waiting for it."""
        self._check_process()
        self._check_no_edit()
        to = self._transport(axes)
        self._check_usable()
        here = to.group.hosts.here
        if here is not None:
            told = (self.where, self.timeout_s, self._compares_hooks)
            if told != to.group.told:
                to.group.told = told
                here.set_position(self.where)
                here.set_timeout(self.timeout_s)
                here.set_watch(self._compare_hooks if self._compares_hooks else None)
        try:
            return transfer(to)
        except HookError:
            raise
        except WaitError as failure:
            raise self._break(self._explained(failure, to.group)) from None
        except BaseException as error:  # Ctrl-C, for one: the others must not wait for this rank
            self._break(self._leaving(error))
            raise

    def _check_no_edit(self) -> None:
        if self.edit_of:
            raise HookError(
                f"{self.edit_of}: a transfer among ranks inside an editing function, which may run "
                "on one rank only, and at its own time; name the weights that it needs in "
                f"HookFunction(parameters=...) ({see('inside-an-editing-function')})"
            )

    def _check_process(self) -> None:
        if self.is_child:
            raise agreed(
                HookError(
                    "this process was forked from a rank after the model was wrapped, and takes no "
                    "part in its transfers: run the model in the parent, or start the process by "
                    f"spawn and wrap a model of its own there ({see('a-forked-process')})"
                )
            )

    def _check_usable(self) -> None:
        for group in self._groups.values():
            if group.broken:
                raise HookError(
                    "this wrap can't be used any more, because an earlier wait failed: "
                    f"{group.broken} Call restore() "
                    "and wrap the model again on every rank; your own process groups still work "
                    f"({see('a-rank-is-missing')})"
                )

    def _explained(self, failure: WaitError, group: groups.PrivateGroup) -> str:
        """What to tell of a wait in shared memory that failed."""
        reason, places, text = failure.args
        hosts = group.hosts
        assert hosts.here is not None
        here = hosts.ranks_of(hosts.names[group.rank])
        if reason == "broken":
            return text or "another rank gave up, and died before it could say why."
        ranks = [here[place] for place in places]
        names = ", ".join(f"rank {rank} (global rank {group.ranks[rank]})" for rank in ranks)
        if reason == "dead":
            return f"{names} ended or died; rank {group.rank} waited for it at {self.where}."
        if reason == "out of step":
            return f"{text}, at {self.where}."
        listed = ", ".join(
            f"rank {rank} (global rank {group.ranks[rank]}; last seen waiting at: "
            f"{hosts.here.position_of(place) or 'not seen at any exchange that had to wait'})"
            for rank, place in zip(ranks, places)
        )
        return f"rank {group.rank} waited {self.timeout_s:g} s at {self.where}; missing: {listed}."

    def _wait(self, works: list) -> None:
        start = time.monotonic()
        look_at = start + _LOOK_AROUND_S
        polls, pause_s = 0, 5e-5
        while not all(work.is_completed() for work in works):
            polls += 1
            if polls < _SPIN:
                time.sleep(0)
                continue
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _MAX_PAUSE_S)
            now = time.monotonic()
            if now > look_at:
                self._look_around(now - start)
                look_at = now + _LOOK_AROUND_S
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self._break(self._who_is_lost(self._groups[_GRID])) from error

    def _who_is_lost(self, group: groups.PrivateGroup) -> str:
        """Why a connection was lost. Gloo does not tell whose it was; those who live say so."""
        lost = f"the connection to another rank was lost at {self.where}:"
        silent = [rank for rank in range(group.size) if rank != group.rank]
        until = time.monotonic() + (0 if group.size == 2 else _ANSWER_S)
        try:
            group.store.set("lost", "")
            group.store.set(f"lives/{group.rank}", "")
            while True:
                if group.store.check(["broken"]):
                    return group.store.get("broken").decode()
                silent = [rank for rank in silent if not group.store.check([f"lives/{rank}"])]
                if not silent or time.monotonic() > until:
                    break
                time.sleep(0.01)
        except RuntimeError:
            return f"{lost} a rank ended or died, and with it the store by which ranks meet."
        names = ", ".join(f"rank {rank} (global rank {group.ranks[rank]})" for rank in silent)
        return f"{lost} {names or 'a rank that was there a moment ago'} ended or died."

    def _look_around(self, waited_s: float) -> None:
        """Tell where this rank waits, and see whether a peer gave up or the deadline has passed."""
        group = self._groups[_GRID]
        position = json.dumps([self.sequence, self.where])
        group.store.set(f"at/{group.rank}", position)
        if group.store.check(["broken"]):
            raise self._break(group.store.get("broken").decode())
        if group.store.check(["lost"]):
            group.store.set(f"lives/{group.rank}", "")
        if self._compares_hooks:
            self._compare_hooks(waited_s)
        if waited_s < self.timeout_s:
            return
        absent = []
        for rank in range(group.size):
            if rank == group.rank:
                continue
            sequence, where = -1, "not seen at any exchange that had to wait"
            if group.store.check([f"at/{rank}"]):
                sequence, where = json.loads(group.store.get(f"at/{rank}"))
            if sequence != self.sequence:
                absent.append(
                    f"rank {rank} (global rank {group.ranks[rank]}; last seen waiting at: {where})"
                )
        raise self._break(
            f"rank {group.rank} waited {self.timeout_s:g} s at {self.where}; missing: "
            f"{', '.join(absent) or 'none'}."
        )

    def _break(self, reason: str, kind: type[HookError] = HookError) -> HookError:
        """Give the private groups up, tell the others, and return what to raise."""
        for group in self._groups.values():
            if group.broken is None:
                with contextlib.suppress(RuntimeError):  # the store may have died with its host
                    if not group.store.check(["broken"]):
                        group.store.set("broken", reason)
                groups.give_up(group, reason)
        self.clear_error()
        logger.error("%s Last steps: %s", reason, self.steps)
        anchor = "ranks-differ" if kind is HookMismatchError else "a-rank-is-missing"
        return agreed(
            kind(
                f"{reason} This wrap can't be used any more; your own process groups are untouched "
                f"({see(anchor)})\nLast steps of rank {self.mesh.place}: {self.steps}"
            )
        )


def _seen_since(to: Transport, why: str) -> str:
    """What this rank has seen of a transport since it was chosen, if it is not told yet."""
    host_gather = to.host_gather if isinstance(to, ByDevice) else None
    refused = host_gather.why_not_locked() if host_gather is not None else ""
    return f"; host_copies: staged in part on this rank: {refused}" * (refused not in why)


def _text_of(axes: tuple[Axis, ...]) -> str:
    """``dp x tp``; a part of an axis as ``tp (2 pieces)``."""
    texts = [axis if isinstance(axis, str) else f"{axis[0]} ({axis[1]} pieces)" for axis in axes]
    return " x ".join(texts)


def agreed(error):
    """Mark an error that every rank raises at the same place: nobody needs to be told of it
    again.
    """
    error.is_agreed = True
    return error


def is_agreed(error: BaseException | None) -> bool:
    """Whether all ranks know of this error, or of one that it was raised from."""
    while error is not None:
        if getattr(error, "is_agreed", False):
            return True
        error = error.__cause__
    return False

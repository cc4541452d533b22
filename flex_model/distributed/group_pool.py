"""The private groups of a ``FlexModel``, and the handling of failed waits.

A wait polls with our own deadline, so that it sees Ctrl-C, a peer's error and a late rank. After a
failed wait the private groups are unusable and raise an error that says why; the user's own groups
are untouched.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from flex_model._C import EditMark, WaitError
from flex_model.diagnostics import FlightRecorder, logger
from flex_model.distributed import process_groups
from flex_model.distributed.failure import Failure
from flex_model.distributed.mesh import GRID, Axis, Mesh
from flex_model.distributed.messages import LostError
from flex_model.distributed.notices import Notices
from flex_model.distributed.polling import Looks, sleeps
from flex_model.distributed.transports.by_device import ByDevice, GpuTransport
from flex_model.distributed.transports.choice import choose
from flex_model.distributed.transports.host_gather import HostGather
from flex_model.distributed.transports.transport import TensorTransport, TransferError, Transport
from flex_model.errors import HookError, HookMismatchError, agreed, see, text_of
from flex_model.integrations import profiler
from flex_model.integrations.torch_private import current_transform, is_batched

_LOOK_S = 0.1  # until a wait first looks in the store for a peer's error
BITS_OF_SEQUENCE = 32  # above them: the number of the FlexModel


class GroupPool:
    """Holds the private groups among the ranks of one pipeline stage, and waits for their ranks.

    Args:
        mesh: The ranks.
        timeout_s: Deadline of one wait, in seconds.
        device: The device of this rank's model, by which the transport of GPU tensors is chosen.

    Attributes:
        observers: Functions called at the start of a transfer with its name, its axes and the bytes
            that this rank moves; the function that they return is called at its end.
    """

    def __init__(self, mesh: Mesh, timeout_s: float, device: torch.device | None = None) -> None:
        self.mesh = mesh
        self.is_local = len(mesh.stage_ranks) == 1  # there is no other rank
        self.timeout_s = timeout_s
        self.sequence = 0  # of the last exchange
        self.where = "nothing yet"
        self.steps = FlightRecorder()
        self.failure = Failure()
        self.observers: list[Callable[[str, tuple[Axis, ...], int], Callable[[], None]]] = []
        self.edit = EditMark()  # an editing function must not transfer anything
        self._groups: dict[tuple[Axis, ...], process_groups.PrivateGroup] = {}
        self._transports: dict[tuple[Axis, ...], tuple[Transport, str]] = {}
        self._by_device: list[ByDevice] = []  # of the transports
        self._device = device or torch.device("cpu")
        self._number = 0  # of this FlexModel, among those of its ranks
        self._is_of_hooks = False
        self._notices: Notices | None = None
        self._pid = os.getpid()
        self._is_closed = False
        self._has_opened = self.is_local and self._device.type == "cuda"
        if self._has_opened:
            process_groups.open_pool()
        if not self.is_local:
            self.connect()

    def connect(self) -> None:
        """Connect to the other ranks of the stage. Collective."""
        self.transport(GRID)
        self.sequence = self._number << BITS_OF_SEQUENCE  # unique among these ranks' models
        self._notices = Notices(self._groups[GRID].board, self._number)

    def transport(self, axes: tuple[Axis, ...]) -> Transport:
        """Return the transport of the ranks along ``axes``, made collectively at the first use."""
        made = self._transports.get(axes)
        if made is not None:
            return made[0]
        places = self.mesh.ranks_along(axes)
        key = GRID if len(places) == len(self.mesh.stage_ranks) else axes
        if key not in self._transports:
            ranks = tuple(self.mesh.stage_ranks[place] for place in places)
            group, number = process_groups.acquire(ranks, self.timeout_s, self._device.type)
            self._groups[key] = group
            if key == GRID:
                self._number = number
            where = "the choice of a transport"
            group.prepare_wait(self, where, self.timeout_s)
            try:
                to, why = self._transports[key] = choose(group, self._wait, self._device)
            except WaitError as failure:
                raise self.abort(group.explained(failure, where, self.timeout_s)) from None
            if isinstance(to, ByDevice):
                self._by_device.append(to)
            logger.info("ranks %s communicate by %s: %s", list(ranks), to.name, why)
        self._transports[axes] = self._transports[key]
        return self._transports[axes][0]

    @property
    def _gpu_transports(self) -> list[GpuTransport]:
        return [to.on_gpu for to in self._by_device if to.on_gpu is not None]

    @property
    def is_child(self) -> bool:
        """Whether this process was forked from the one that made the FlexModel."""
        return os.getpid() != self._pid

    def transports(self) -> dict[str, tuple[str, str]]:
        """The transports used so far, by axes: the name, and the reason for the choice."""
        return {
            _text_of(axes): (to.name, why + (to.changes(why) if isinstance(to, ByDevice) else ""))
            for axes, (to, why) in self._transports.items()
            if axes in self._groups  # not those of other axes with the same ranks
        }

    @property
    def host_gather(self) -> HostGather | None:
        """The implementation of ``gather_to_first`` over the stage that takes shards of any device,
        which may differ by rank; None where all shards must be on one kind of device.
        """
        to = None if self.is_local else self.transport(GRID)
        return to.host_gather if isinstance(to, ByDevice) else None

    def close(self) -> None:
        """Release the private groups; in a forked child they remain its parent's. Local."""
        self._is_closed = True
        if self.is_child:
            process_groups.leave_to_parent(self._transports)
            return
        for to in self._gpu_transports:
            to.close()
        self._by_device.clear()
        self._transports.clear()
        self._notices = None  # which has the memory that the ranks share
        while self._groups:
            group = self._groups.popitem()[1]
            group.forget(self)
            group.release()
        if self._has_opened:
            self._has_opened = False
            process_groups.release_pool()

    # Notices of this rank's hooks and runs, which others read during a long wait.

    def agree_hooks(self) -> None:
        """Note that all ranks have registered the same hooks. Local."""
        if self._notices is not None:
            self._notices.agree_hooks()

    def publish_hooks(self, digest: str) -> None:
        """Publish a digest of this rank's registered hooks; ``""`` for none. Local."""
        if self._notices is not None and not self.is_child:
            self._notices.publish_hooks(digest)

    def publish_run(
        self, active: int, choice: str, mode: int, has_hooks: bool = True, skipped: bool = False
    ) -> None:
        """Publish that a run, or a part of one, begins, and its active hooks. Local.

        Args:
            active: A digest of the active hooks.
            choice: A description of how they were chosen, for messages.
            mode: The mode of its forwards. A run without hooks, in another mode, may be between two
                runs of the other ranks.
            skipped: Whether this rank ran forwards in this mode without hooks before it, which
                others may still be in.
        """
        if self._notices is not None and not self.is_child:
            self._notices.publish_run(self.sequence, active, choice, mode, has_hooks, skipped)

    def compare(self, waited_s: float) -> None:
        """During a long wait, raise if a rank has other hooks than this one and may never
        arrive.
        """
        notices = self._notices
        if notices is None:  # the groups are being made
            return
        difference = notices.difference(waited_s, self.timeout_s, self._is_of_hooks)
        if difference:
            here = f"rank {self.mesh.group_rank} waited {waited_s:.0f} s at {self.where}"
            raise self.abort(f"{here}, but {difference}", HookMismatchError)

    # Waiting.

    @property
    def more_calls(self) -> str:
        """What to do where one rank's run is over and another's is not, for messages: rows of
        data-parallel ranks end at different steps.
        """
        if self.mesh.dp_size == 1:
            return ""
        return (
            "; where the data-parallel ranks call the model different numbers of times (generate, "
            "if the rows of one rank end earlier), give generate synced_gpus=True, or see each "
            'rank\'s own calls with FlexModel(dp_batch="local")'
        )

    @contextlib.contextmanager
    def deadline(self, timeout_s: float) -> Iterator[None]:
        """Inside, one wait lasts at most ``timeout_s`` seconds. Local."""
        before, self.timeout_s = self.timeout_s, timeout_s
        try:
            yield
        finally:
            self.timeout_s = before

    @property
    def broken(self) -> str | None:
        """Why a wait in the private groups failed, in this FlexModel or another one that shares
        them; they can't be used any more. None as long as they can.
        """
        for group in self._groups.values():
            if group.broken is not None:
                return group.broken
        return None

    def abort_on(self, error: BaseException) -> None:
        """Abort because this rank stops in the middle of a run (by Ctrl-C, for example). Local."""
        if not (self.is_local or self.is_child or self.broken is not None):
            self.abort(self._abort_reason(error))

    def _abort_reason(self, error: BaseException) -> str:
        return f"rank {self.mesh.group_rank} left while it was at {self.where}: {text_of(error)}."

    def call(self, transfer: str, axes: tuple[Axis, ...], *args: Any, num_bytes: int = 0) -> Any:
        """Call a method of the transport. On any error the groups are aborted, so that no rank
        waits for it.

        Args:
            num_bytes: The bytes that this rank moves, for observers.
        """
        if self.is_child or self.edit_of or self._is_closed:
            self._refuse()
        self._check_no_transform(args)
        if self.broken is not None:
            raise self._unusable(self.broken)
        to = self.transport(axes)
        to.group.prepare_wait(self, self.where, self.timeout_s)
        begin = profiler.begin_transfer
        ends = profiler.begun(self.observers, begin, transfer, axes, num_bytes)
        try:
            for other in self._gpu_transports:
                self._guarded(other, other.check)
            return self._guarded(to, getattr(to, transfer), *args)
        finally:
            for end in ends:
                end()

    def finish_transfers(self) -> None:
        """Wait until the transfers of GPU tensors so far are complete. HookError, on every rank,
        where one has failed: what was computed from it must not leave this rank. Local.
        """
        for to in self._gpu_transports:
            if self.broken is None:  # else the next exchange raises
                self._guarded(to, to.finish)

    def _guarded(self, to: TensorTransport, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of a transport. On any error, abort."""
        try:
            return function(*args)
        except HookError:
            raise
        except WaitError as failure:
            raise self.abort(to.group.explained(failure, self.where, self.timeout_s)) from None
        except TransferError as failure:
            raise self.abort(self._found(failure)) from None
        except BaseException as error:  # such as Ctrl-C: the others must not wait for this rank
            self.abort(self._abort_reason(error))
            raise

    def set_edit(self, hook: str) -> None:
        """Forbid transfers while the editing function of the hook runs; empty: allow them. Local.

        No context manager: a Ctrl-C between its entry and its body would leave it set.
        """
        self.edit.set(hook)

    @property
    def edit_of(self) -> str:
        """The hook whose editing function runs; empty: none."""
        return self.edit.hook

    def check_no_edit(self) -> None:
        if self.edit_of:
            raise HookError(
                f"{self.edit_of}: a transfer among ranks inside an editing function, which may run "
                "on one rank only, and at its own time; name the weights that it needs in "
                f"HookFunction(parameters=...) ({see('inside-an-editing-function')})"
            )

    def _check_no_transform(self, args: tuple[Any, ...]) -> None:
        is_batch = [is_batched(arg) for arg in args if isinstance(arg, torch.Tensor)]
        if current_transform() is not None or any(is_batch):
            raise agreed(
                HookError(
                    f"{self.where}: transforms of torch.func (vmap, grad, jvp) and batched "
                    "gradients can't be followed by a transfer among ranks; use torch.autograd and "
                    f"a loop, or one process ({see('a-transform-of-functions')})"
                )
            )

    def _refuse(self) -> NoReturn:
        """Raise the error of a transfer that can't be made."""
        if self.is_child:
            raise agreed(
                HookError(
                    "this process was forked from a rank after the model was wrapped, and takes no "
                    "part in its transfers: run the model in the parent, or start the process by "
                    f"spawn and wrap a model of its own there ({see('a-forked-process')})"
                )
            )
        self.check_no_edit()
        raise agreed(
            HookError(
                f"{self.where}: this FlexModel was restored, and its process groups were "
                "released, then or after the last backward of its graphs; run "
                "the model and its backward before restore()"
            )
        )

    def _unusable(self, reason: str) -> HookError:
        return HookError(
            f"this FlexModel can't be used any more, because of an earlier failure: {reason} "
            "Call restore() and wrap the model again on every rank; your own process groups still "
            f"work ({see('a-rank-is-missing')})"
        )

    def _found(self, failure: TransferError) -> str:
        """The message of a transfer that failed on the GPU; the reason of a rank that has aborted
        is better than that it is missing.
        """
        reason = None
        with contextlib.suppress(RuntimeError):  # the store may have ended with its host
            reason = self._groups[GRID].bounded_store.read("broken")
        return reason or f"{failure}, in a transfer at or before {self.where}."

    def _wait(self, works: list) -> None:
        group, start, looks = self._groups[GRID], time.monotonic(), Looks(_LOOK_S)
        with group.bounded_store.answer_limit.within(self.timeout_s):
            for _ in sleeps(lambda: all(work.is_completed() for work in works)):
                waited_s = time.monotonic() - start
                if looks.are_due(waited_s, self.timeout_s):
                    self._on_poll(waited_s)
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                lost = error.rank if isinstance(error, LostError) else None
                raise self.abort(self._who_is_lost(group, lost)) from error

    def _who_is_lost(self, group: process_groups.PrivateGroup, lost: int | None) -> str:
        """Name the rank of a lost connection: to the global rank ``lost``, which may also have
        closed it because of a third rank. So the ranks that live answer first.
        """
        what = f"the connection to another rank was lost at {self.where}:"
        reported = functools.partial(group.bounded_store.read, "broken")
        try:
            found = group.roll_call.ask(reported, waits=group.size > 2)
        except RuntimeError as error:
            return f"{what} a rank ended or died, and {error}."
        if isinstance(found, str):
            return found
        gone = [rank for rank in found if rank in group.connected_ranks]
        # Others of them may live, and not answer because they wait for nothing.
        surely_gone = [rank for rank in gone if group.ranks[rank] == lost] or gone
        names = ", ".join(map(group.name_of, surely_gone))
        return f"{what} {names or 'a rank that was there a moment ago'} ended or died."

    def _on_poll(self, waited_s: float) -> None:
        """Publish where this rank waits, and raise if a peer aborted or the deadline has passed."""
        group = self._groups[GRID]
        store, position = group.bounded_store, json.dumps([self.sequence, self.where])
        try:
            store.set(f"at/{group.rank}", position)
            reason = store.read("broken")
            if reason is None:
                group.roll_call.answer()
            others = group.awaited_ranks if waited_s >= self.timeout_s else []
            at = {rank: store.read(f"at/{rank}") for rank in others}
        except RuntimeError as error:
            reason = f"{group.name_of(group.rank)} waited at {self.where}, and {error}."
        if reason is not None:
            raise self.abort(reason)
        self.compare(waited_s)
        if waited_s < self.timeout_s:
            return
        absent = []
        for rank, position_there in at.items():
            sequence, where = json.loads(position_there or f'[-1, "{process_groups.NOT_SEEN}"]')
            if sequence != self.sequence:
                absent.append(group.name_of(rank, where))
        more = self.more_calls if self.where.startswith("end of the run") else ""
        raise self.abort(
            f"rank {group.rank} waited {self.timeout_s:g} s at {self.where}; missing: "
            f"{', '.join(absent) or 'none'}{more}."
        )

    def abort(self, reason: str, kind: type[HookError] = HookError) -> HookError:
        """Make the private groups unusable on all ranks, and return the error to raise, which
        replaces the pending one.
        """
        self.failure.agree()
        for to in self._gpu_transports:
            to.abort()
        is_reported = True
        for group in self._groups.values():
            if group.broken is None:
                # They have one store: where it is silent, it is waited for once.
                is_reported = is_reported and group.bounded_store.tell("broken", reason)
                group.abort(reason)
                logger.error("%s Last steps: %s", reason, self.steps)
        anchor = "ranks-differ" if kind is HookMismatchError else "a-rank-is-missing"
        return agreed(
            kind(
                f"{reason} This FlexModel can't be used any more; your own process groups are "
                f"untouched ({see(anchor)})\n"
                f"Last steps of rank {self.mesh.group_rank}: {self.steps}"
            )
        )


def _text_of(axes: tuple[Axis, ...]) -> str:
    """Format axes as ``dp x tp``; a part of an axis as ``tp (2 pieces)``."""
    texts = [axis if isinstance(axis, str) else f"{axis[0]} ({axis[1]} pieces)" for axis in axes]
    return " x ".join(texts)

"""Notices of what ranks do, which others read during a long wait: to see that a rank has other
hooks, and so may never arrive.
"""

from __future__ import annotations

import contextlib
import functools
import json
from typing import Any

from flex_model import _C
from flex_model.distributed.bounded_store import BoundedStore
from flex_model.distributed.hosts import Hosts
from flex_model.distributed.polling import Looks

_HOOKS_GRACE_S = 5.0  # how long a rank may take to register its first hooks
_RUN_GRACE_S = 1.0  # how long to wait for the exchange before runs are compared


class Board:
    """Publishes the notices of a group's rank, JSON texts, and reads those of others.

    Args:
        rank: This process's index among ``size``.
        store: By which ranks of several hosts read them; those of one host share memory.
    """

    def __init__(self, rank: int, size: int, hosts: Hosts, store: BoundedStore) -> None:
        self.rank, self._size = rank, size
        self._hosts, self._store = hosts, store
        self._notices: dict[str, str] = {}
        self._has_rest = False

    @property
    def compared_ranks(self) -> list[int]:
        """The ranks with whose notices this one compares its own: on several hosts its neighbours,
        since all together ask one store, and somewhere two neighbours differ.
        """
        if self._memory is not None:
            return [rank for rank in range(self._size) if rank != self.rank]
        return sorted({(self.rank + step) % self._size for step in (-1, 1)})

    @property
    def _memory(self) -> _C.HostGroup | None:
        """The memory by which all ranks read each other's notices; None if there is none."""
        return self._hosts.here if self._hosts.is_one else None

    def publish(self, what: str, notice: str, is_urgent: bool = True) -> None:
        """Publish a notice of this rank. Local. There is room for about 500 bytes. On several hosts
        one that is not urgent waits for ``publish_rest``: the store by which they read it must not
        be asked in every run.
        """
        self._notices[what] = notice
        self._has_rest = True
        if is_urgent or self._memory is not None:
            self.publish_rest()

    def publish_rest(self) -> None:
        """Publish the notices that were not urgent. Local."""
        if not self._has_rest:
            return
        self._has_rest = False
        texts = ", ".join([f'"{name}": {text}' for name, text in self._notices.items()])
        board = f"{{{texts}}}"
        if self._memory is not None:
            self._memory.publish(board)
        else:
            with contextlib.suppress(RuntimeError):  # lost: a wait will say so
                self._store.set(f"notices/{self.rank}", board)

    def own(self, what: str) -> Any:
        """Return this rank's notice; None if it has none. Local."""
        return json.loads(self._notices.get(what, "null"))

    def read(self, what: str, rank: int) -> Any:
        """Read a rank's notice; empty if it has none, None if it can't be read. Local."""
        if self._memory is not None:
            board = self._memory.published(rank)
            if board is None:  # it is being written
                return None
        else:
            try:
                board = self._store.read(f"notices/{rank}")
            except RuntimeError:
                return None
        try:
            notices = json.loads(board or "{}")
        except ValueError:  # too long, so it was cut
            return None
        return notices.get(what, "")


class Notices:
    """The notices of one FlexModel's hooks and runs, and their comparison with other ranks'.

    Args:
        number: Distinguishes the FlexModel from others of the same ranks.
    """

    def __init__(self, board: Board, number: int) -> None:
        self._board, self._name = board, str(number)
        self._hooks = ""  # a digest of this rank's registered hooks
        self._agreed: str | None = None  # the one that all ranks had when they last compared them
        self._num_runs = 0  # those with hooks
        self._run = ""  # the last published run
        self._active = -1  # the digest of its hooks
        self._has_skipped = False  # whether runs without hooks, of its mode, came before it
        self._waited_s = 0.0  # so far, in this wait
        self._looks = Looks()  # of this wait

    def publish_hooks(self, digest: str) -> None:
        """Publish a digest of this rank's registered hooks; ``""`` for none. Local."""
        self._hooks = digest
        self._board.publish(self._name, json.dumps(digest))

    def agree_hooks(self) -> None:
        """Note that all ranks have registered the same hooks. Local."""
        self._agreed = self._hooks

    def publish_run(
        self, sequence: int, active: int, choice: str, mode: int, has_hooks: bool, skipped: bool
    ) -> None:
        """Publish that a run, or a part of one, begins after the exchange ``sequence``. The other
        arguments are those of ``GroupPool.publish_run``. Local.
        """
        self._num_runs += has_hooks
        self._has_skipped = skipped
        number = self._num_runs + (not has_hooks)
        flag = "true" if has_hooks else "false"
        notice = f"[{sequence}, {number}, {active}, {_quoted(choice)}, {mode}, {flag}]"
        if notice != self._run:
            self._run = notice
            # The others may wait for this rank where it publishes nothing: in the model.
            is_urgent = not has_hooks or active != self._active
            self._active = active
            self._board.publish("run", notice, is_urgent)

    def difference(self, waited_s: float, timeout_s: float, is_of_hooks: bool) -> str:
        """After a wait of ``waited_s`` seconds, return how another rank's hooks differ from this
        one's; empty if they don't, as far as is known. Local.

        Args:
            timeout_s: The deadline of the wait.
            is_of_hooks: Whether this is the exchange that compares the registered hooks. Elsewhere
                a rank that is behind may have yet to change them as this one has.
        """
        compares_hooks = is_of_hooks or self._hooks == self._agreed
        run_grace_s = min(_RUN_GRACE_S, timeout_s / 2)
        # What changes hooks between runs that went well does so on every rank, sooner or later.
        hooks_grace_s = timeout_s / 2 if self._agreed else min(_HOOKS_GRACE_S, timeout_s / 2)
        if waited_s > run_grace_s / 2:
            self._board.publish_rest()
        if waited_s < self._waited_s:  # in another wait
            self._looks = Looks()
        self._waited_s = waited_s
        if waited_s <= run_grace_s or not self._looks.are_due(waited_s, timeout_s):
            return ""
        difference = self._of_runs()
        if not difference and compares_hooks and waited_s > hooks_grace_s:
            difference = self._of_hooks()
        return difference

    def _of_runs(self) -> str:
        board = self._board
        runs = {rank: board.read("run", rank) for rank in board.compared_ranks}
        local = board.own("run")
        if not local or not local[5]:
            return ""
        # Others may be in a run before or after this one, or in one before it without hooks.
        others = [
            rank
            for rank, run in runs.items()
            if run
            and run[:2] == local[:2]
            and run[2] != local[2]
            and (run[5] or (run[4] == local[4] and not self._has_skipped))
        ]
        if not others:
            return ""
        listed = "; ".join(f"rank {rank} runs {runs[rank][3]}" for rank in others)
        listed = f"rank {board.rank} runs {local[3]}; {listed}"
        return (
            f"the ranks have chosen different hooks for this run: {listed}. Every rank must choose "
            "the same groups."
        )

    def _of_hooks(self) -> str:
        board = self._board
        published = {rank: board.read(self._name, rank) for rank in board.compared_ranks}
        others = [rank for rank, hooks in published.items() if hooks not in (None, self._hooks)]
        if not others:
            return ""
        listed = "; ".join(
            f"rank {rank} has registered {'other hooks' if published[rank] else 'no hooks'}"
            for rank in others
        )
        return (
            f"{listed}. Every rank must register the same hooks in the same order before it runs "
            "the model."
        )


@functools.lru_cache(maxsize=64)
def _quoted(choice: str) -> str:
    return json.dumps(choice[:80])

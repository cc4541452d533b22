"""The state of one run of a model: one call, or everything inside one ``active()``."""

from __future__ import annotations

import bisect
import collections
import copy
import hashlib
from argparse import Namespace
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flex_model.hooks.evidence import Evidence
from flex_model.layouts.follow import UNKNOWN, Pair

if TYPE_CHECKING:
    from flex_model.hooks.registration import Registration
    from flex_model.records.records import PendingRecord


OPEN = 2**63  # the last node of a run that has not ended
# The offset of the first word of the twister in a state of torch's CPU generator (after its seed
# and counters; CPUGeneratorImplStateLegacy in ATen/CPUGeneratorImpl.cpp), and its unused bits.
_FIRST_WORD, _UNREAD_BITS = 24, 2**31 - 1


class Turns:
    """Which of several batches made autograd's nodes, whose numbers are those of one thread.

    Attributes:
        batch: Whose turn it is; None: the caller's.
    """

    def __init__(self) -> None:
        self.batch: int | None = None
        self._ends: list[int] = []  # numbers of the first nodes after each turn
        self._batches: list[int | None] = []

    def begin(self, batch: int | None) -> None:
        """End the current turn, and begin the turn of this batch."""
        number = next_sequence()
        if not self._ends or number != self._ends[-1]:
            self._ends.append(number)
            self._batches.append(self.batch)
        self.batch = batch

    def batch_of(self, node: int) -> int | None:
        place = bisect.bisect(self._ends, node)
        return self._batches[place] if place < len(self._ends) else self.batch


@dataclass(eq=False, slots=True)
class RunContext:
    """The state of one run. The graph of its forward holds it, so backward and recomputation find
    it.

    Attributes:
        active: Indices of the registrations that it chose, of any kind.
        hooks_seen: Indices of all registrations chosen during one outermost run, whose lists the
            run has cleared.
        direct_depth: For a run begun by a direct call of the wrapped module: the depth of such
            calls inside each other.
        seed: Random seed of the run, rank 0's; None until an edit needs it.
        consumed: Whether an edit drew random numbers.
        calls: By registration index: how often its editing function was called.
        random_calls: By registration index: fingerprint of the input -> call number, for calls that
            drew random numbers.
        keys: The keys of its forwards (see ``layouts.cache``), for their recomputation.
        outer_error: The exception that was being handled when a direct call began; a different one
            at the end is the call's own.
        ran_model: Whether the wrapped module was called in it.
        is_recomputed: Whether an edit, or a hook on gradients, ran in a part of the model that a
            checkpoint may recompute.
        was_cut: Whether ``run_until`` ended one of its forwards early.
        first_node, last_node: Sequence numbers of the autograd nodes made during the run: from
            ``first_node`` to before ``last_node``.
        backward_task: The backward pass at whose end its records will be delivered; -1 if none
            runs.
        entry: Its number among the runs of a store.
        save_ctx, batch, turns: For a batch of a sequential run: its own ``save_ctx``, its index,
            and which batch made which nodes. None: the FlexModel's, no batch, one thread.
    """

    active: frozenset[int] = frozenset()
    hooks_seen: set[int] = field(default_factory=set)
    direct_depth: int = 0
    seed: int | None = None
    consumed: bool = False
    calls: dict[int, int] = field(default_factory=dict)
    random_calls: dict[int, dict[int, int]] = field(default_factory=dict)
    keys: set[int | None] = field(default_factory=set)
    pending: list[PendingRecord] = field(default_factory=list)
    outer_error: BaseException | None = None
    ran_model: bool = False
    is_recomputed: bool = False
    was_cut: bool = False
    first_node: int = 0
    last_node: int = OPEN
    backward_task: int = -1
    entry: int = 0
    save_ctx: Namespace | None = None
    batch: int | None = None
    turns: Turns | None = None

    def use_seed(self, seed: int) -> None:
        """Draw from rank 0's seed."""
        self.seed = seed

    def take_draws(self) -> bool:
        """Return whether an edit drew random numbers, and forget it."""
        consumed, self.consumed = self.consumed, False
        return consumed

    def cut(self) -> None:
        """Note that ``run_until`` ended a forward early."""
        self.was_cut = True

    def holds(self, node: object) -> bool:
        """Whether an autograd node was made during this run."""
        number = node._sequence_nr()  # type: ignore[attr-defined]
        return self.first_node <= number < self.last_node and (
            self.turns is None or self.turns.batch_of(number) == self.batch
        )


NOTHING = Evidence()


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one hook.

    Attributes:
        module: None for a parameter's gradient.
        is_replay: Whether it is a recomputation during backward (checkpointing).
        number: Counts the calls of this hook in one forward of the wrapped model; None in a replay,
            whose calls may come in another order.
        evidence: The evidence of the tensor's placements (of a backward hook: the activation's).
        stated: Placements that a DTensor states, along the axes that its mesh has.
    """

    registration: Registration
    module: nn.Module | None
    run: RunContext
    is_replay: bool = False
    number: int | None = 0
    evidence: Evidence = NOTHING
    stated: Pair = UNKNOWN

    @property
    def records(self) -> bool:
        """Whether the tensor is recorded."""
        return self.registration.hook_function.record and not self.is_replay

    def describe(self) -> str:
        return self.registration.describe()


def next_sequence() -> int:
    """Return the sequence number that autograd gives to the next node made in this thread."""
    return torch._C._autograd._get_sequence_nr()


def seed_of_state() -> int:
    """Return a seed from the state of torch's CPU generator, without drawing from it, so that
    ``torch.manual_seed`` determines it.
    """
    state = torch.default_generator.get_state()
    return int(torch.ops.flex_model.fingerprint(state)[0]) & (2**63 - 1)


def seed_of_call(run_seed: int, site: int, call: int) -> int:
    digest = hashlib.blake2b(f"{run_seed} {site} {call}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class RandomState:
    """Seeds torch's generators (CPU, and the CUDA device of a tensor) for one edit, and restores
    them after it.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.consumed = False
        self._seed = seed
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index])

    def __enter__(self) -> RandomState:
        self._states = [generator.get_state() for generator in self._generators]
        for generator in self._generators:
            generator.manual_seed(self._seed)
        self._seeded = [generator.get_state() for generator in self._generators]
        return self

    def __exit__(self, *exc_info: object) -> None:
        for generator, state, seeded in zip(self._generators, self._states, self._seeded):
            self.consumed |= not torch.equal(generator.get_state(), seeded)
            generator.set_state(state)


def renew_seed() -> None:
    """Make the edits of the next run draw other numbers. The stream of torch's CPU generator does
    not change: a model's dropout draws the same numbers as without hooks.

    The seed of a run is a hash of the generator's state, and this increments 31 bits of that state
    which the generator never reads: of its first word, a Mersenne twister uses the highest bit only
    (19937 = 624 * 32 - 31). So ``manual_seed`` resets the edits too, and a state that is saved and
    restored gives the same numbers again.

    Source: Matsumoto and Nishimura 1998, section 2.1.
    """
    state = torch.default_generator.get_state()
    word = state[_FIRST_WORD : _FIRST_WORD + 4].view(torch.int32)
    first = int(word)
    word.fill_((first & ~_UNREAD_BITS) | (first + 1 & _UNREAD_BITS))
    torch.default_generator.set_state(state)


def advance_generator() -> None:
    """Advance torch's CPU generator by one draw."""
    torch.empty((), dtype=torch.int64).random_()


def throw_away(save_ctx: Namespace) -> Namespace:
    """Copy ``save_ctx`` for a recomputed edit: the edit has run before, and what it adds to tensors
    and containers must not be added twice. Other objects are shared, not copied.
    """
    return Namespace(**{name: _copied(value) for name, value in vars(save_ctx).items()})


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    twin: Any
    if isinstance(value, dict):
        twin = copy.copy(value)
        for key in twin:
            twin[key] = _copied(twin[key])
        return twin
    if isinstance(value, (list, collections.deque)):
        twin = copy.copy(value)
        for index, item in enumerate(value):
            twin[index] = _copied(item)
        return twin
    if type(value) is tuple:
        return tuple(_copied(item) for item in value)
    if isinstance(value, set) or type(value).__module__ == "numpy":
        return copy.copy(value)
    return value

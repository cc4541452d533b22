"""The random numbers of editing functions: the same on any sharding, apart from the model's own."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from flex_model import _C
from flex_model.distributed import values
from flex_model.integrations.torch_private import position_on_gpu

# The offset of the first word of the twister in a state of torch's CPU generator (after its seed
# and counters; CPUGeneratorImplStateLegacy in ATen/CPUGeneratorImpl.cpp), and its unused bits.
_FIRST_WORD, _UNREAD_BITS = 24, 2**31 - 1


def seed_of_state() -> int:
    """Return a seed from the state of torch's CPU generator, without drawing from it, so that
    ``torch.manual_seed`` determines it.
    """
    state = torch.default_generator.get_state()
    return _C.hash_of(state)


class RandomState:
    """Seeds torch's generators (CPU, and the CUDA device of a tensor) for one call of an editing
    function, until ``end``.
    """

    __slots__ = ("_states",)

    def __init__(self, run_seed: int, site: int, call: int, tensor: Tensor) -> None:
        digest = hashlib.blake2b(f"{run_seed} {site} {call}".encode(), digest_size=8).digest()
        generators = [torch.default_generator]
        if tensor.is_cuda:
            generators.append(torch.cuda.default_generators[tensor.device.index])
        self._states: list[tuple[torch.Generator, Tensor, Tensor]] = []  # before, and seeded
        for generator in generators:
            before = generator.get_state()
            generator.manual_seed(int.from_bytes(digest, "little") >> 1)
            self._states.append((generator, before, generator.get_state()))

    def end(self) -> bool:
        """Restore the generators; return whether the function drew from one of them."""
        has_drawn = False
        for generator, before, seeded in self._states:
            has_drawn |= not _C.same_bytes(generator.get_state(), seeded)
            generator.set_state(before)
        return has_drawn


class DrawWatch:
    """Notices whether a function draws from torch's generators (CPU, and the CUDA device of a
    tensor), which it leaves as they are.
    """

    __slots__ = ("_before", "_device", "_position")

    def __init__(self, tensor: Tensor) -> None:  # which is not kept: its references are counted
        self._before = torch.default_generator.get_state()
        self._device = tensor.device if tensor.is_cuda else None
        self._position = None if self._device is None else position_on_gpu(self._device)

    def end(self) -> bool:
        """Return whether the function drew."""
        has_drawn = not _C.same_bytes(torch.default_generator.get_state(), self._before)
        position = None if self._device is None else position_on_gpu(self._device)
        return has_drawn or position != self._position


class RandomCalls:
    """The calls of one hook in a run that drew random numbers, by a hash of their input.

    Inputs on a GPU are hashed there, and the host reads the hashes when it needs one: where a call
    is recomputed.
    """

    AMBIGUOUS = -1  # the number of a call with the same input as another

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}  # by hash
        self._unread: list[tuple[Tensor, torch.cuda.Event, int]] = []  # hash on a GPU, when, number

    def note(self, tensor: Tensor, number: int) -> None:
        """Note the input and the number of a call. Local."""
        hashed = values.hashed(tensor, tensor.is_cuda)
        if not hashed.is_cuda:
            self._add(int(hashed), number)
            return
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(tensor.device))
        self._unread.append((hashed, ready, number))

    def number_of(self, tensor: Tensor) -> int:
        """Return the number of the call with this input; ``AMBIGUOUS`` if it is not known. For
        inputs on a GPU the host waits: it seeds the generators. Local.
        """
        unread, self._unread = self._unread, []
        for hashed, ready, number in unread:
            ready.wait(torch.cuda.current_stream(hashed.device))
            self._add(int(hashed), number)
        key = int(values.hashed(tensor, tensor.is_cuda))
        return self._numbers.get(key, self.AMBIGUOUS)

    def _add(self, key: int, number: int) -> None:
        self._numbers[key] = self.AMBIGUOUS if key in self._numbers else number


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
    torch.empty((), dtype=torch.int64, device="cpu").random_()

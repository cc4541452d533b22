"""The interface of transports, and functions that they share.

A transport moves bytes along GatherPlans among the ranks of one private group; all transports give
the same bits. The communicator has checked before that all ranks make the same calls with the same
plans, and it handles failed waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from flex_model._C import GatherPlan
from flex_model.distributed import memory
from flex_model.distributed.costs import SUMMED_BYTES
from flex_model.distributed.plain import plain
from flex_model.distributed.process_groups import PrivateGroup
from flex_model.distributed.transports import buffer_layout
from flex_model.distributed.transports.host_copies import Ready
from flex_model.errors import HookError

# Waits for works of torch.distributed with the communicator's deadline, then raises their errors.
Wait = Callable[[list], None]

_REASON_BYTES = 300  # of each rank, that others read

Result = TypeVar("Result")


class UnavailableError(RuntimeError):
    """A transport can't be used, or not any more. Raised on every rank, with the reasons of all."""


class TransferError(Exception):
    """A transfer of GPU tensors failed; the message is what the GPU has found."""


@dataclass(eq=False)
class Gathered:
    """One tensor of several that are gathered together.

    Attributes:
        plan: The plan of its shards.
        ranks: The ranks of the group that hold them, in the plan's order.
        shard: This rank's shard; only its dtype counts on ranks that hold none.
        num_copies: The number of full tensors to return.
        site: The hook for which its costs are counted.
        stays: Whether the full tensors stay on rank 0's GPU, if a transport of GPU tensors gathers
            them; else they are on the CPU. The same for all tensors that are gathered together.
        ready: The event after which a shard on a GPU has its values; None: the work queued on the
            current stream.
    """

    plan: GatherPlan
    ranks: list[int]
    shard: Tensor
    num_copies: int = 1
    site: int = 0
    stays: bool = False
    ready: Ready | None = None

    def __post_init__(self) -> None:
        self.shard = plain(self.shard)

    def copies(self, full: Tensor) -> list[Tensor]:
        """Return a full tensor and its copies, ``num_copies`` in all, where they shall be."""
        if self.stays and full.is_cuda:
            return [full, *(full.clone() for _ in range(self.num_copies - 1))]
        return copies(memory.copy(full) if full.is_cuda else full, self.num_copies)


class TensorTransport(Protocol):
    """Moves tensors. All methods are collective over the group's ranks, whose first is rank 0.

    Attributes:
        name: As users name it in ``FLEX_MODEL_TRANSPORT``.
        group: Its ranks.
    """

    name: str
    group: PrivateGroup

    def all_gather(
        self, shard: Tensor, plan: GatherPlan, num_copies: int = 1, num_read: int = 0
    ) -> list[Tensor]:
        """Return ``num_copies`` full tensors on the device of ``shard``, in memory of this rank;
        the number may differ by rank, and may be 0.

        The last ``num_read`` of them, or fewer, are expected to be read only: they may be
        copy-on-write views, whose first write takes longer.
        """

    def gather_to_first(self, tensors: list[Gathered]) -> list[Tensor] | None:
        """Return the full tensors on rank 0's CPU, or on its GPU if they ``stay``, copies one after
        the other; None elsewhere. No payload is sent to other ranks.
        """

    def scatter_from_first(self, full: Tensor | None, like: Tensor, plan: GatherPlan) -> Tensor:
        """Return this rank's shard of rank 0's ``full``; shape, dtype and device are those of
        ``like``, this rank's own shard.
        """

    def broadcast(self, tensor: Tensor | None, like: Tensor) -> Tensor:
        """Return rank 0's tensor on every rank; ``like`` has its shape, dtype and device. On rank 0
        it is ``tensor`` itself.
        """

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks, on every rank. It is added in the order of ranks, in the
        tensor's own dtype: the same bits on all ranks, and by all transports.
        """

        def of_piece(piece: Tensor) -> Tensor:
            plan = stacking(self.group.size, piece.numel(), piece.element_size())
            (rows,) = self.all_gather(piece.unsqueeze(0), plan, num_read=1)
            return added_up(list(rows))

        return sum_of_pieces(tensor, of_piece)


class Transport(TensorTransport, Protocol):
    """Moves tensors, and a few bytes of each rank."""

    def exchange_bytes(self, data: bytes) -> list[bytes]:
        """Gather the bytes of every rank, all of one length."""

    def exchange(self, tensor: Tensor) -> Tensor:
        """Stack a CPU tensor of all ranks, of one shape and dtype: ``(num_ranks, *shape)``."""


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes as a contiguous 1-D uint8 CPU tensor; a view where possible."""
    return buffer_layout.as_bytes(tensor.detach().cpu())


def on_cpu(tensor: Tensor) -> Tensor:
    """Return a contiguous CPU tensor of the same values; shares memory where possible."""
    if tensor.requires_grad or not tensor.is_cpu:
        tensor = tensor.detach().cpu()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous()


@lru_cache(maxsize=256)
def stacking(num_ranks: int, num_elements: int, element_bytes: int) -> GatherPlan:
    """The plan that stacks tensors of one size in rank order: ``(num_ranks, num_elements)``."""
    sizes = [1, num_elements]
    boxes = [(rank, [rank, 0], [0, 0], sizes) for rank in range(num_ranks)]
    return GatherPlan([num_ranks, num_elements], [sizes] * num_ranks, boxes, element_bytes)


def copies(full: Tensor, number: int) -> list[Tensor]:
    """Return a full CPU tensor and copies of it, ``number`` (at least 1) in all."""
    return [full, *(memory.copy(full) for _ in range(number - 1))]


def exchange_bytes(exchange: Callable[[Tensor], Tensor], data: bytes) -> list[bytes]:
    """Implement ``Transport.exchange_bytes`` by ``exchange``."""
    rows = exchange(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    copied = bytearray(rows.numel())  # no numpy: errors must be reported without it, too
    torch.frombuffer(copied, dtype=torch.uint8).copy_(rows.flatten())
    return [bytes(copied[at : at + len(data)]) for at in range(0, len(copied), len(data))]


def exchange_texts(transport: Transport, text: str) -> list[str]:
    """Gather a text of every rank, cut to 300 bytes. Collective."""
    data = " ".join(text.split()).encode()[:_REASON_BYTES].ljust(_REASON_BYTES, b"\0")
    return [
        other.rstrip(b"\0").decode(errors="replace") for other in transport.exchange_bytes(data)
    ]


def by_ranks(texts: list[str]) -> list[str]:
    """Each text of some ranks, with their list in front; empty ones are left out."""
    listed = {text: [r for r, other in enumerate(texts) if other == text] for text in texts if text}
    return [f"ranks {ranks}: {text}" for text, ranks in listed.items()]


def on_every_rank(on_cpu: Transport, step: Callable[[], Result]) -> Result:
    """Return the result of ``step``, which may raise any error, once all ranks have run it.
    Collective.

    Raises:
        UnavailableError: it failed on some ranks.
        HookError: a wait in it failed, so that no exchange is possible.
    """
    result: list[Result] = []
    text = ""
    try:
        result.append(step())
    except HookError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    failed = by_ranks(exchange_texts(on_cpu, text))
    if failed:
        raise UnavailableError("; ".join(failed))
    return result[0]


def end_to_end(sizes: list[int]) -> GatherPlan:
    """The plan that concatenates bytes of several ranks."""
    starts = itertools.accumulate(sizes, initial=0)
    boxes = [(r, [start], [0], [size]) for r, (start, size) in enumerate(zip(starts, sizes))]
    return GatherPlan([sum(sizes)], [[size] for size in sizes], boxes, 1)


def sum_of_pieces(tensor: Tensor, of_piece: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the sum of a tensor over ranks, by the sums of 1-D pieces of it."""
    flat = tensor.detach().contiguous().reshape(-1)
    total = torch.empty_like(flat)
    step = max(1, SUMMED_BYTES // flat.element_size())
    for at in range(0, flat.numel(), step):
        total[at : at + step].copy_(of_piece(flat[at : at + step]))
    return total.reshape(tensor.shape)


def added_up(rows: Sequence[Tensor]) -> Tensor:
    """Add rows, one after the other. Local."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total

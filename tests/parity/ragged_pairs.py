"""Ragged batches as rows of the table: data-parallel ranks of other lengths and numbers of rows.

The oracle runs all rows, padded at the end. It is causal, so that no row sees its padding, and its
hooks see zeros there, as those of FlexModel do.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

import frameworks
from frameworks import Core, Pair, apply


class CausalCore(Core):
    def forward(self, q, k, v):
        times = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        return (scores + torch.full_like(scores, -1e9).triu(1)).softmax(-1) @ v


@dataclass
class Ragged(Pair):
    """A pair of which each data-parallel rank has some rows, of a length.

    Attributes:
        num_rows, lengths: By data-parallel rank. One without rows runs a stand-in.
    """

    num_rows: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()

    @property
    def longest(self) -> int:
        return max(length for rows, length in zip(self.num_rows, self.lengths) if rows)

    def own(self, full: torch.Tensor, dp_rank: int) -> torch.Tensor:
        """A rank's rows of a padded tensor, without what pads them."""
        start = sum(self.num_rows[:dp_rank])
        own = full.narrow(0, start, self.num_rows[dp_rank])
        for dim in range(1, own.ndim):
            if own.shape[dim] == self.longest:
                own = own.narrow(dim, 0, self.lengths[dp_rank])
        return own

    def joined(self, parts: list[torch.Tensor], full: torch.Tensor) -> torch.Tensor:
        """The ranks' own rows, padded with zeros as ``full`` is."""
        padded = []
        for part in parts:
            missing = [size - own for size, own in zip(full.shape[1:], part.shape[1:])]
            padded.append(F.pad(part, [n for size in reversed(missing) for n in (0, size)]))
        return torch.cat(padded)

    def without_padding(self, full: torch.Tensor) -> torch.Tensor:
        parts = [self.own(full, dp) for dp, rows in enumerate(self.num_rows) if rows]
        return self.joined(parts, full)

    def see_all(self, full: torch.Tensor, edit: Callable | None) -> tuple:
        record, edited = apply(self.without_padding(full), edit)
        return record, None if edited is None else self.without_padding(edited)

    def see_own_rows(self, full: torch.Tensor, edit: Callable | None) -> tuple:
        records, parts = [], []
        for dp, rows in enumerate(self.num_rows):
            record, edited = apply(self.own(full, dp), edit) if rows else (None, None)
            records.append(record)
            if rows:
                parts.append(edited)
        return records, None if edit is None else self.joined(parts, full)

    def own_inputs(self, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        if self.num_rows[self.dp_rank] == 0:
            return [frameworks.tokens(1, self.lengths[self.dp_rank])]
        return [self.own(value, self.dp_rank) for value in inputs]

    def own_output(self, full: torch.Tensor) -> torch.Tensor:
        return self.columns(self.own(full, self.dp_rank))

    def run_ragged(self, flex, inputs, keywords, targets) -> torch.Tensor:
        rows = self.num_rows[self.dp_rank]
        with contextlib.nullcontext() if rows else flex.no_rows():
            output = self.forward(flex, inputs, keywords)
        output = output[:rows]
        (output * targets).sum().backward()
        return output


@contextlib.contextmanager
def ragged(
    tmp_path: Path,
    build: Callable,
    dp_batch: str,
    num_rows: tuple[int, ...],
    lengths: tuple[int, ...],
) -> Iterator[Pair]:
    """A row of a decoder with other batches, causal. On one process: one rank's batch."""
    with build(tmp_path) as pair:
        for layer in pair.oracle.layers:
            layer.attention.core = CausalCore()
        num_rows, lengths = num_rows[: pair.dp], lengths[: pair.dp]
        made = Ragged(**vars(pair) | {"num_rows": num_rows, "lengths": lengths})
        made.inputs = (frameworks.tokens(sum(num_rows), made.longest),)
        made.sizes = made.sizes | {"dp_batch": dp_batch}
        made.masked, made.run = made.without_padding, made.run_ragged
        made.has_own_runs = dp_batch == "local"
        made.call_hook = made.see_own_rows if made.has_own_runs else made.see_all
        yield made

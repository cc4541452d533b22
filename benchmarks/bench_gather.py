"""Shards to the full tensor and back, on the ranks of one host: ours against every usual way.

    python benchmarks/bench_gather.py [--ranks 4] [--quick] [--kib N ...] [--json FILE]
                                      [--original PATH_OF_FLEX_MODEL_0.1.0]

Ours are the calls of ``Communicator`` and ``TensorSpec``, as hooks make them, outputs owned by the
caller. All ways of a row's operation take turns in one run, and every result is compared with the
tensor that the shards were cut from, bit by bit. The time of a call is that of its slowest rank; up
to 64 KiB it is the mean of 20 calls in a row, and up to 1 MiB of 5.

Columns:
    operation  ``all``: the full tensor on every rank, to be read, as a hook's function gets it that
               has not written to it; ``all, to write``: as one gets it that has, in memory that no
               other rank reads; ``first``: on rank 0 only; ``from first``:
               rank 0's full tensor back to shards; ``there and back``: to every rank, and this
               rank's shard cut out again; ``dp x tp``: to every rank of 2 x 2, rows split over dp
               and columns over tp
    kib        the full tensor
    dim        that is split
    dtype
    split      ``even``; ``uneven``: one row or column less, so that the last shard is smaller
    us, median_us              ours: minimum and median over repeats, microseconds
    against                    what it is compared with: ``copy_``, every rank at once copies a full
                               tensor to warm memory; ``list + cat``, ``flat + cat``,
                               ``functional``, ``DTensor``, ``gather + cat``, ``scatter``, ``two
                               gathers``: torch.distributed over gloo, see gathers.py; ``best gloo:
                               x``, the fastest of these; ``flat + cat, warm``: into kept memory;
                               ``0.1.0``, the release, or ``0.1.0's steps`` without --original;
                               ``even``: ours of the even split; ``with header``: ours after the
                               exchange of headers that a hook's call begins with
    their_us, their_median_us  of that
    ratio      minimum against minimum: our time in theirs where the goal is ``<=``, else theirs in
               ours (how many times faster we are)
    goal, met  of issue 5, for 2 ranks and 4 on 2 cores; ``-``: none
    wrong      elements that differ, on all ranks, in the first and last repeat of both: 0

Printed are the rows with a goal, and at the end each goal's worst and best; --all prints all rows,
--json writes all.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator

import gathers
import ranks
import torch
import torch.distributed as dist
from ranks import Report, Timing, compared, measure
from torch import Tensor

from flex_model.distributed.communicator import Communicator
from flex_model.distributed.gather import TensorSpec
from flex_model.distributed.header import Header
from flex_model.distributed.mesh import Mesh
from flex_model.distributed.placement import Shard, ShardLayout

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
DTYPES = (torch.float32, torch.bfloat16)
INTS = {4: torch.int32, 2: torch.int16}


def full_tensor(num_bytes: int, dtype: torch.dtype, rows_less: int, columns_less: int) -> Tensor:
    """The same bits on every rank, all bytes in use; NaNs among them."""
    columns = 256 if num_bytes < MIB else 4096
    rows = num_bytes // (columns * dtype.itemsize)
    shape = rows - rows_less, columns - columns_less
    bits = torch.arange(-(-shape[0] * shape[1] * dtype.itemsize // 4), dtype=torch.int32)
    values = bits.mul_(-1640531527).view(dtype)[: shape[0] * shape[1]]
    return values.view(shape)


def num_wrong(expected: Tensor | None, result: Tensor | None) -> int:
    """How many elements differ in their bits; NaNs of one payload are equal."""
    if expected is None or result is None:
        return int(expected is not result)
    if expected.shape != result.shape or expected.dtype != result.dtype:
        return max(expected.numel(), 1)
    as_int = INTS[expected.element_size()]
    expected, result = expected.contiguous().view(as_int), result.contiguous().view(as_int)
    return 0 if torch.equal(expected, result) else int((expected != result).sum())


class Case:
    """One tensor, split over all ranks along ``dim``, or rows over dp and columns over tp."""

    def __init__(self, num_bytes: int, dim: int, dtype: torch.dtype, split: str = "even") -> None:
        self.num_bytes, self.dim, self.dtype, self.split = num_bytes, dim, dtype, split
        less = (int(dim == 0), int(dim == -1)) if split == "uneven" else (0, 0)
        self.full = full_tensor(num_bytes, dtype, *less)
        parts = self.full.tensor_split(dist.get_world_size(), dim)
        self.shard = parts[dist.get_rank()].contiguous()
        self.sizes = [part.shape[dim] for part in parts]
        self.is_first = dist.get_rank() == 0

    def spec(self, communicator: Communicator) -> TensorSpec:
        layout = ShardLayout(tp=Shard(self.dim % 2))
        shapes = [list(self.full.shape) for _ in self.sizes]
        for shape, size in zip(shapes, self.sizes):
            shape[self.dim] = size
        return TensorSpec.of(communicator, layout, [tuple(shape) for shape in shapes], self.dtype)

    @property
    def calls(self) -> int:
        return 20 if self.num_bytes <= 64 * KIB else 5 if self.num_bytes <= MIB else 1

    def columns(self, operation: str) -> dict:
        return {
            "operation": operation,
            "ranks": dist.get_world_size(),
            "kib": self.num_bytes // KIB,
            "dim": self.dim,
            "dtype": str(self.dtype).removeprefix("torch."),
            "split": self.split,
        }


def _read_only(spec: TensorSpec, shard: Tensor) -> Tensor:
    return spec.copies(shard, 1, num_read=1)[0]


class Bench:
    """The operations, each measured against its baselines and reported. Collective."""

    def __init__(self, report: Report, options: argparse.Namespace) -> None:
        self.report, self.budget_s = report, options.budget_s
        self.world = dist.group.WORLD
        self.num_ranks = dist.get_world_size()
        self.mesh = dist.init_device_mesh("cpu", (self.num_ranks,))
        self.communicator = Communicator(Mesh.from_sizes(tp_size=self.num_ranks), 60.0)
        self.original = gathers.original(options.original)

    def to_all(self, case: Case) -> None:
        spec, world, shard, dim = case.spec(self.communicator), self.world, case.shard, case.dim
        warm = gathers.FlatThenCatWarm(case.full)
        cases = self._bound(case) | {
            "ours": lambda: _read_only(spec, shard),
            "ours, to write": lambda: spec.all_gather(shard),
            "list + cat": lambda: gathers.list_then_cat(shard, dim, world),
            "flat + cat": lambda: gathers.flat_then_cat(shard, dim, world),
            "functional": lambda: gathers.functional(shard, dim, world),
            "DTensor": lambda: gathers.by_dtensor(shard, dim, case.full.shape, self.mesh),
            "flat + cat, warm": lambda: warm(shard, dim, world),
            self.original.name: lambda: self.original.gather(shard, dim, world),
        }
        if case.num_bytes <= 64 * KIB:
            cases["with header"] = lambda: self._agree(shard) and spec.all_gather(shard)
        times = self._measure(case, cases, case.full)
        large, is_two = case.num_bytes >= 16 * MIB, self.num_ranks == 2
        self._row(case, "all", times, "copy_", "<= 0.9" if large and is_two else "-")
        goal = "-"
        if case.num_bytes <= 64 * KIB and is_two:
            self._row(case, "all", times, "list + cat", ">= 20")
        elif large and is_two:
            goal = ">= 8"
        elif case.num_bytes >= 64 * MIB and self.num_ranks == 4:
            goal = ">= 10"
        to_write = times.pop("ours, to write")
        self._best_gloo(case, "all", times, goal)
        times["ours"] = to_write
        self._row(case, "all, to write", times, "copy_", "-")
        self._best_gloo(case, "all, to write", times, "-")

    def to_first(self, case: Case) -> None:
        spec = case.spec(self.communicator)
        cases = {
            "ours": lambda: spec.gather_to_first(case.shard),
            "gather + cat": lambda: gathers.to_first(case.shard, case.dim),
        }
        times = self._measure(case, cases, case.full if case.is_first else None)
        large = case.num_bytes >= 16 * MIB and self.num_ranks == 2
        self._row(case, "first", times, "gather + cat", ">= 10" if large else "-")

    def from_first(self, case: Case) -> None:
        spec = case.spec(self.communicator)
        full = case.full if case.is_first else None
        cases = {
            "ours": lambda: spec.scatter_from_first(full, case.shard),
            "scatter": lambda: gathers.from_first(full, case.dim, case.shard),
        }
        self._row(case, "from first", self._measure(case, cases, case.shard), "scatter", "-")

    def there_and_back(self, case: Case) -> None:
        spec, shard, dim, world = case.spec(self.communicator), case.shard, case.dim, self.world
        original = self.original

        def theirs() -> Tensor:
            return original.scatter(original.gather(shard, dim, world), dim, world)

        cases = {"ours": lambda: spec.slice(_read_only(spec, shard)), original.name: theirs}
        times = self._measure(case, cases, shard)
        self._row(case, "there and back", times, original.name, "-")

    def uneven(self, even: Case, case: Case) -> None:
        spec, spec_even = case.spec(self.communicator), even.spec(self.communicator)
        shard, dim, full = case.shard, case.dim, case.full
        cases = {
            "ours": lambda: _read_only(spec, shard),
            "even": lambda: _read_only(spec_even, even.shard),
            "list + cat": lambda: gathers.padded_then_cat(shard, dim, case.sizes, self.world),
            "DTensor": lambda: gathers.by_dtensor(shard, dim, full.shape, self.mesh),
        }

        def wrong(name: str, result: Tensor) -> int:
            return num_wrong(even.full if name == "even" else full, result)

        times = measure(cases, wrong, self.budget_s)
        self._row(case, "all", times, "even", "<= 1.1")
        self._best_gloo(case, "all", times, "-")

    def dp_x_tp(
        self,
        num_bytes: int,
        dtype: torch.dtype,
        communicator: Communicator,
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
    ) -> None:
        case = Case(num_bytes, 0, dtype)
        mesh, (dp, tp) = communicator.mesh, groups
        rows = case.full.tensor_split(mesh.dp_size)[dp.rank()]
        shard = rows.tensor_split(mesh.tp_size, -1)[tp.rank()].contiguous()
        layout = ShardLayout(dp=Shard(0), tp=Shard(1))
        spec = TensorSpec.of(
            communicator, layout, [tuple(shard.shape)] * len(mesh.stage_ranks), dtype
        )

        def in_two_steps() -> Tensor:
            columns = self.original.gather(shard, -1, tp)
            return self.original.gather(columns, 0, dp)

        cases = self._bound(case) | {
            "ours": lambda: _read_only(spec, shard),
            "two gathers": in_two_steps,
        }
        times = self._measure(case, cases, case.full)
        case.dim = "0, -1"
        self._row(case, "dp x tp", times, "copy_", "-")
        self._row(case, "dp x tp", times, "two gathers", ">= 15")

    def _bound(self, case: Case) -> dict[str, Callable[[], Tensor]]:
        out = torch.empty_like(case.full)
        return {"copy_": lambda: out.copy_(case.full)}

    def _agree(self, shard: Tensor) -> list[Header]:
        header = Header("forward", dtype=shard.dtype, shape=tuple(shard.shape))
        return self.communicator.check_consistency(header, "a benchmark")

    def _measure(self, case: Case, cases: dict, expected: Tensor | None) -> dict[str, Timing]:
        check = lambda name, result: num_wrong(expected, result)  # noqa: E731
        return measure(cases, check, self.budget_s, case.calls)

    def _best_gloo(self, case: Case, operation: str, times: dict[str, Timing], goal: str) -> None:
        """A row for the fastest way over gloo, and one for each of the others."""
        others = [n for n in times if n not in ("ours", "copy_", "even", "flat + cat, warm")]
        theirs = [n for n in others if n not in ("with header", self.original.name)]
        best = min(theirs, key=lambda name: times[name].min_us)
        against = times | {f"best gloo: {best}": times[best]}
        self._row(case, operation, against, f"best gloo: {best}", goal)
        for name in times:
            if (name in others and name != best) or name == "flat + cat, warm":
                self._row(case, operation, times, name, "-")

    def _row(
        self, case: Case, operation: str, times: dict[str, Timing], against: str, goal: str
    ) -> None:
        row = compared(times["ours"], times[against], against, goal)
        self.report(case.columns(operation) | row)


def grid(options: argparse.Namespace) -> Iterator[tuple[int, int, torch.dtype]]:
    """256 MiB, seconds a collective, along the last dim only, where ours has the most to do."""
    for num_bytes, dtype, dim in itertools.product(options.sizes, options.dtypes, options.dims):
        if num_bytes < 256 * MIB or (dim == -1 and dtype == torch.bfloat16):
            yield num_bytes, dim, dtype


def body(report: Report, options: argparse.Namespace) -> None:
    bench = Bench(report, options)
    for num_bytes, dim, dtype in grid(options):
        case = Case(num_bytes, dim, dtype)
        bench.to_all(case)
        if dtype == torch.float32 or num_bytes == 256 * MIB:
            bench.to_first(case)
            bench.from_first(case)
            bench.there_and_back(case)
    large = [size for size in options.sizes if 16 * MIB <= size < 256 * MIB]
    for num_bytes, dim in itertools.product(large, options.dims):
        even = Case(num_bytes, dim, torch.float32)
        bench.uneven(even, Case(num_bytes, dim, torch.float32, "uneven"))
    if bench.num_ranks == 4:
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        communicator = Communicator(Mesh.from_sizes(tp_size=2, dp_size=2), 60.0)
        for num_bytes in (*(size for size in options.sizes if size == MIB), *large):
            bench.dp_x_tp(
                num_bytes,
                torch.float32,
                communicator,
                (mesh["dp"].get_group(), mesh["tp"].get_group()),
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a few sizes, few repeats")
    parser.add_argument("--all", action="store_true", help="print the rows without a goal too")
    parser.add_argument("--kib", type=int, nargs="+", help="sizes of the full tensors, in KiB")
    ranks.add_arguments(parser)
    options = parser.parse_args()
    options.sizes = (64 * KIB, 16 * MIB) if options.quick else SIZES
    if options.ranks > 2:  # more copies of everything
        options.sizes = (64 * MIB,) if options.quick else SIZES[:-1]
    options.sizes = tuple(KIB * kib for kib in options.kib) if options.kib else options.sizes
    options.dims = (-1,) if options.quick and options.ranks > 2 else (0, -1)
    options.dtypes = DTYPES[:1] if options.quick else DTYPES
    options.budget_s = 0.5 if options.quick else 2.0
    ranks.report(ranks.rows_of(options.ranks, body, options), options)


if __name__ == "__main__":
    main()

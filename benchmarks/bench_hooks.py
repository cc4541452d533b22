"""FlexModel's hooks on a tensor-parallel model, against torch's hooks around gloo collectives.

    python benchmarks/bench_hooks.py [--ranks 4] [--quick] [--json FILE]
                                     [--original PATH_OF_FLEX_MODEL_0.1.0]

The model is column-parallel layers side by side and one row-parallel layer on their sum: one
collective of its own, so that its time is small and steady. Times are what the hooks add to a
forward: the model with hooks less the bare model, which takes its turn in the same run; that of the
slowest rank, under ``no_grad``. All models have the same weights, and every output and every record
is compared bit by bit.

Columns:
    operation  ``edit``: one hook whose function returns ``full * 0.5``; ``edit in place``:
               ``full.mul_(0.5)``; ``edit on rank 0``: ``edit_on="rank0"``; ``look``: a function
               that returns what it was given; ``edit alone``: ``record=False``, as 0.1.0's own
               mappings do it; ``collect``: 8 hooks without a function. All the others keep a
               record on rank 0
    ranks
    kib        one full activation, float32, of which each rank has some columns
    bare_us    the forward without hooks: the minimum, microseconds
    function_us                the editing function alone, on every rank at once: the minimum. It is
               a part of what both sides add; ``, but the function`` after the operation: less it
    us, median_us              added by FlexModel: from the minima, and from the medians
    against    ``0.1.0``: its gather and scatter in a torch hook, around ``full * 0.5``, on every
               rank (``0.1.0's steps`` without --original); ``list + cat``: torch hooks that gather
               over gloo and keep the result on rank 0
    their_us, their_median_us  added by that
    ratio, goal, met           as in bench_gather.py
    wrong      elements of outputs and records that differ, on all ranks, in the first and last
               repeat of both: 0
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import gathers
import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import Report, Timing, compared, measure
from torch import Tensor, nn

from flex_model import FlexModel, HookFunction

KIB, MIB = 1 << 10, 1 << 20
NARROW = 4  # features of input and output
NUM_COLLECTED = 8

Function = Callable[[Tensor], Tensor | None]


# ---- The model -----------------------------------------------------------------------------------


class ColumnLinear(nn.Module):
    """Each rank has some output features. It says how many there are in all, as fairscale's do."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        part = weight.tensor_split(dist.get_world_size())[dist.get_rank()]
        self.weight = nn.Parameter(part.clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class RowLinear(nn.Module):
    """Each rank has some input features; the output is summed over ranks."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        part = weight.tensor_split(dist.get_world_size(), 1)[dist.get_rank()]
        self.weight = nn.Parameter(part.clone())

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.weight)
        if dist.get_world_size() > 1:
            dist.all_reduce(x)
        return x


class Model(nn.Module):
    """Column-parallel layers side by side, their sum through one row-parallel layer."""

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        weights = (torch.randn(width, NARROW, generator=generator) for _ in range(num_layers))
        self.up = nn.ModuleList(ColumnLinear(weight) for weight in weights)
        self.down = RowLinear(torch.randn(NARROW, width, generator=generator) / width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up[0](x)
        for layer in self.up[1:]:
            hidden = hidden + layer(x)
        return self.down(hidden)


# ---- What edits do -------------------------------------------------------------------------------


def halve(full: Tensor) -> Tensor:
    return full * 0.5


def halve_in_place(full: Tensor) -> Tensor:
    return full.mul_(0.5)


def look(full: Tensor) -> Tensor:
    return full


EDITS: dict[str, tuple[Function, str]] = {
    "edit": (halve, "all"),
    "edit in place": (halve_in_place, "all"),
    "edit on rank 0": (halve, "rank0"),
    "look": (look, "all"),
    "edit alone": (halve, "all"),
}


# ---- The two benchmarks --------------------------------------------------------------------------


Result = tuple[Tensor, list[Tensor]]  # the model's output, and rank 0's records


def num_wrong(expected: Result, result: Result) -> int:
    tensors, others = [result[0], *result[1]], [expected[0], *expected[1]]
    if len(tensors) != len(others):
        return max(sum(tensor.numel() for tensor in others), 1)
    return sum(
        0 if torch.equal(a, b) else max(int((a != b).sum()), 1) for a, b in zip(tensors, others)
    )


def less(timing: Timing, part: Timing) -> Timing:
    """What ``timing`` is more than one of its parts."""
    return Timing(
        timing.min_us - part.min_us, timing.median_us - part.median_us, timing.wrong + part.wrong
    )


class Bench:
    """The two benchmarks of one size each, measured and reported. Collective."""

    def __init__(self, report: Report, options: argparse.Namespace) -> None:
        self.report, self.budget_s = report, options.budget_s
        self.original = gathers.original(options.original)
        self.is_first = dist.get_rank() == 0

    def edits(self, num_bytes: int, names: tuple[str, ...]) -> None:
        """One column-parallel layer, with one hook."""
        width = 4096
        x = torch.randn(num_bytes // 4 // width, NARROW, generator=torch.Generator().manual_seed(2))
        models = {name: Model(1, width) for name in ("bare", self.original.name, *names)}
        full = gathers.list_then_cat(models["bare"].up[0](x), -1, dist.group.WORLD)
        records: dict[str, list[Tensor]] = {}

        def hook(module: nn.Module, args: tuple, shard: Tensor) -> Tensor:
            full = self.original.gather(shard, -1, dist.group.WORLD)
            records["up"] = [full]
            return self.original.scatter(halve(full), -1, dist.group.WORLD)

        models[self.original.name].up[0].register_forward_hook(hook)

        def theirs() -> Result:
            output = models[self.original.name](x)
            return output, records["up"] if self.is_first else []

        cases: dict[str, Callable] = {
            "bare": lambda: (models["bare"](x), []),
            "function": lambda: (halve(full), []),
            self.original.name: theirs,
        }
        for name in names:
            function, edit_on = EDITS[name]
            flex = FlexModel(
                models[name], {}, tensor_parallel_size=dist.get_world_size(), edit_on=edit_on
            )
            edit = partial(_edit, function)
            records_it = name != "edit alone"
            flex.register_forward_hook(
                HookFunction("up.0", editing_function=edit, record=records_it)
            )
            cases[name] = partial(_run, flex, x)

        layers = models["bare"]
        halved, unchanged = layers.down(layers.up[0](x) * 0.5), layers(x)
        record = [full] if self.is_first else []
        expected = dict.fromkeys(cases, (halved, record))
        expected |= {"bare": (unchanged, []), "look": (unchanged, record)}
        expected["function"] = (full * 0.5, [])
        expected["edit alone"] = (halved, [])

        def wrong(name: str, result: Result) -> int:
            return num_wrong(expected[name], result)

        times = measure(cases, wrong, self.budget_s)
        theirs_added = less(times[self.original.name], times["bare"])
        for name in names:
            ours = less(times[name], times["bare"])
            goal = ">= 8" if name in ("edit", "edit alone") else "-"
            row = compared(ours, theirs_added, self.original.name, goal)
            self._row(name, num_bytes, times, row)
        function = times["function"]
        ours = less(less(times["edit"], times["bare"]), function)
        row = compared(ours, less(theirs_added, function), self.original.name, "-")
        self._row("edit, but the function", num_bytes, times, row)

    def collects(self, num_bytes: int) -> None:
        """Eight column-parallel layers, with a hook on each."""
        width = 2048
        x = torch.randn(num_bytes // 4 // width, NARROW, generator=torch.Generator().manual_seed(2))
        bare, hooked, wrapped = (Model(NUM_COLLECTED, width) for _ in range(3))
        records: list[Tensor] = []

        def hook(module: nn.Module, args: tuple, shard: Tensor) -> None:
            full = gathers.list_then_cat(shard, -1, dist.group.WORLD)
            if self.is_first:
                records.append(full)

        for layer in hooked.up:
            layer.register_forward_hook(hook)

        def theirs() -> Result:
            records.clear()
            return hooked(x), list(records)

        flex = FlexModel(wrapped, {}, tensor_parallel_size=dist.get_world_size())
        for i in range(NUM_COLLECTED):
            flex.register_forward_hook(HookFunction(f"up.{i}"))
        cases = {
            "bare": lambda: (bare(x), []),
            "collect": partial(_run, flex, x),
            "list + cat": theirs,
        }
        output, of_rank_0 = theirs()

        def wrong(name: str, result: Result) -> int:
            return num_wrong((output, [] if name == "bare" else of_rank_0), result)

        times = measure(cases, wrong, self.budget_s)
        bare_time = times["bare"]
        row = compared(
            less(times["collect"], bare_time),
            less(times["list + cat"], bare_time),
            "list + cat",
            "<= 0.5",
        )
        self._row("collect", num_bytes, times, row)

    def _row(self, operation: str, num_bytes: int, times: dict[str, Timing], row: dict) -> None:
        function = times["function"].min_us if "function" in times else 0.0
        self.report(
            {
                "operation": operation,
                "ranks": dist.get_world_size(),
                "kib": num_bytes // KIB,
                "bare_us": times["bare"].min_us,
                "function_us": function,
            }
            | row
        )


def _edit(function: Function, module: nn.Module, full: Tensor, save_ctx, modules) -> Tensor | None:
    return function(full)


def _run(flex: FlexModel, x: Tensor) -> Result:
    output = flex(x)
    return output, [record for records in flex.output_ptr.values() for record in records]


def body(report: Report, options: argparse.Namespace) -> None:
    torch.set_grad_enabled(False)
    bench = Bench(report, options)
    for num_bytes in options.edited:
        bench.edits(num_bytes, tuple(EDITS))
    for num_bytes in options.collected:
        bench.collects(num_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one size each, few repeats")
    ranks.add_arguments(parser)
    options = parser.parse_args()
    options.all = True
    options.edited = (16 * MIB,) if options.quick else (16 * MIB, 64 * MIB)
    options.collected = (4 * MIB,) if options.quick else (128 * KIB, MIB, 4 * MIB, 16 * MIB)
    options.budget_s = 2.0 if options.quick else 12.0
    ranks.report(ranks.rows_of(options.ranks, body, options), options)


if __name__ == "__main__":
    main()

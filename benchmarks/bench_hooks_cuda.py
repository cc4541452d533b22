"""FlexModel's hooks on GPUs, against torch hooks written by hand.

    python benchmarks/bench_hooks_cuda.py [--json FILE]
    torchrun --nproc-per-node N benchmarks/bench_hooks_cuda.py [...]

The first takes one GPU, whose tensors are whole; the second a GPU for each process. The models are
those of bench_hooks.py, in bfloat16. Times are of a forward up to the end of the GPU's work, by the
clock of the slowest rank, less that of the bare model, which takes its turn in the same run.
``--dry-run``: tiny cases, whose times mean nothing; on the CPU where there is no GPU.

Columns:
    case       ``edit``: one hook, whose function returns ``full * 0.5``, without a record;
               ``record``: 8 hooks without a function
    n          processes
    mib        of one full activation
    bare_us    the forward without hooks: the minimum
    min_us, median_us   added by FlexModel: from the minima, and from the medians
    their_us   added by torch hooks: for ``edit``, all_gather_into_tensor, chunk, cat, the function,
               and the rank's part (with one process, the function alone); for ``record``,
               ``detach().clone()`` of the rank's part, which stays on its GPU
    ratio      min_us / their_us
    wrong      bytes of outputs and records that differ, on all ranks: 0
"""

import os

import gpus
import torch
import torch.distributed as dist
from bench_hooks import NARROW, NUM_COLLECTED, Model, halve, less
from gpus import MIB, num_wrong
from ranks import measure

from flex_model import FlexModel, HookFunction


class Bench:
    """Both cases of one size each. Collective."""

    def __init__(self, device, budget_s):
        self.device, self.budget_s = device, budget_s
        self.rank, self.n = dist.get_rank(), dist.get_world_size()
        self.synchronize = torch.cuda.synchronize if device.type == "cuda" else int

    def models(self, num_layers, width, mib):
        """The bare one, that with torch hooks, that with FlexModel's; and their input."""
        rows = max(1, int(mib * MIB) // (2 * width))
        x = torch.randn(rows, NARROW, generator=torch.Generator().manual_seed(2))
        models = [Model(num_layers, width).to(self.device, torch.bfloat16) for _ in range(3)]
        return *models, x.to(self.device, torch.bfloat16)

    def run(self, forward):
        def case():
            result = forward()
            self.synchronize()
            return result

        return case

    def edits(self, mib):
        bare, hooked, wrapped, x = self.models(1, 4096, mib)

        def by_hand(module, args, shard):
            if self.n == 1:
                return halve(shard)
            flat = shard.new_empty((self.n * shard.shape[0], shard.shape[1]))
            dist.all_gather_into_tensor(flat, shard)
            full = halve(torch.cat(flat.chunk(self.n), -1))
            return full.chunk(self.n, -1)[self.rank].contiguous()

        hooked.up[0].register_forward_hook(by_hand)
        flex = FlexModel(wrapped, {}, tensor_parallel_size=self.n)
        edit = HookFunction(
            "up.0", editing_function=lambda m, full, s, ms: halve(full), record=False
        )
        flex.register_forward_hook(edit)
        cases = {"bare": lambda: bare(x), "ours": lambda: flex(x), "theirs": lambda: hooked(x)}
        expected = dict.fromkeys(("ours", "theirs"), hooked(x)) | {"bare": bare(x)}

        def wrong(case, result):
            return num_wrong(result, expected[case])

        return self.row("edit", mib, cases, wrong, flex)

    def records(self, mib):
        bare, hooked, wrapped, x = self.models(NUM_COLLECTED, 2048, mib)
        kept, records = [], {}
        for layer in hooked.up:
            layer.register_forward_hook(lambda m, args, shard: kept.append(shard.detach().clone()))
        flex = FlexModel(wrapped, records, tensor_parallel_size=self.n)
        for i in range(NUM_COLLECTED):
            flex.register_forward_hook(HookFunction(f"up.{i}"))

        def ours():
            return flex(x), [tensor for tensors in records.values() for tensor in tensors]

        def theirs():
            kept.clear()
            return hooked(x), list(kept)

        cases = {"bare": lambda: (bare(x), []), "ours": ours, "theirs": theirs}
        output, parts = theirs()

        def wrong(case, result):
            count = num_wrong(result[0], output)
            if case == "ours" and self.rank == 0:
                firsts = [record.chunk(self.n, -1)[0] for record in result[1]]
                count += sum(num_wrong(got, part) for got, part in zip(firsts, parts, strict=True))
            return count

        return self.row("record", mib, cases, wrong, flex)

    def row(self, case, mib, cases, wrong, flex):
        times = measure({name: self.run(f) for name, f in cases.items()}, wrong, self.budget_s)
        flex.restore()
        ours, theirs = (less(times[name], times["bare"]) for name in ("ours", "theirs"))
        return {
            "case": case,
            "n": self.n,
            "mib": mib,
            "bare_us": times["bare"].min_us,
            "min_us": ours.min_us,
            "median_us": ours.median_us,
            "their_us": theirs.min_us,
            "ratio": ours.min_us / theirs.min_us,
            "wrong": ours.wrong + theirs.wrong,
        }


def main():
    args = gpus.parse(gpus.arguments(__doc__.splitlines()[0], repeats=None))
    rank, n = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device, backend = gpus.device(), "gloo"
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl" if n > 1 else "gloo"
    if n > 1:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    torch.set_grad_enabled(False)
    bench = Bench(device, 0.01 if args.dry_run else 2.0)
    edited, recorded = ((0.1,), (0.1,)) if args.dry_run else ((1, 16, 64), (1, 16))
    rows = [bench.edits(mib) for mib in edited] + [bench.records(mib) for mib in recorded]
    dist.destroy_process_group()
    gpus.report(rows if rank == 0 else [], args)


if __name__ == "__main__":
    main()

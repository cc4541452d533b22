"""What a wrapper and its hooks cost, on one process and one thread, against bare PyTorch; and what
following a forward costs, on two ranks.

    python benchmarks/bench_dispatch.py [--json FILE] [--original PATH_OF_FLEX_MODEL_0.1.0]

A chain of 64 Identity modules, input (1, 16, 64), under ``no_grad``; every case runs interleaved
with the others, and what is recorded is compared with the bare hooks' records in the same run.

``shapes``: as ``hooks``, with ``expected_shape``. ``identity edits``: with an editing function that
returns what it gets. ``inference``: the same under ``inference_mode``. ``same groups``:
``flex(x, groups=())`` at every call, with a hook on each of 8 MLPs of 256 features, input
(64, 256); ``bare mlps``: that model alone.

Followed forwards: a chain of 8 MLPs under ``parallelize_module`` on two ranks, input (8, 64, 256),
``no_grad``, one hook that only looks. ``sharded hook``: its layout is known from the first
forward; ``followed``: each forward is followed operation by operation (``follow="always"``), as the
first one of each kind of input is.

Columns:
    case      what runs
    us        time of one forward of the chain: minimum over repeats, in microseconds
    median    median over repeats
    ratio     minimum over the minimum of the case it is measured against
    against   that case
    hooks     torch hooks found on the model's modules
    wrong     records that differ from the input

``--original`` measures release 0.1.0 too, in a process of its own, against the same bare hook
measured there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import ranks
import torch
from torch import nn

NUM_MODULES = 64


def chain() -> nn.Sequential:
    return nn.Sequential(*(nn.Identity() for _ in range(NUM_MODULES)))


def bare_hooks(model: nn.Module, records: dict) -> None:
    """What a careful user would write: keep a copy of each output."""
    for name, module in model.named_children():

        def hook(module, args, output, name=name):
            records[name] = [output.detach().clone()]

        module.register_forward_hook(hook)


def num_torch_hooks(model: nn.Module) -> int:
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks)
        for m in model.modules()
    )


def measure(cases: dict, repeats: int, inner: int) -> dict[str, list[float]]:
    """Seconds per call, by case: the cases take turns, so that drift of the machine meets all of
    them.
    """
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, run in cases.items():
            start = time.perf_counter()
            for _ in range(inner):
                run()
            times[name].append((time.perf_counter() - start) / inner)
    return times


def rows_of(times, against, models, records, x) -> list[dict]:
    rows = []
    for name, values in times.items():
        base = against.get(name)
        kept = records.get(name, {})
        rows.append(
            {
                "case": name,
                "us": min(values) * 1e6,
                "median": statistics.median(values) * 1e6,
                "ratio": min(values) / min(times[base]) if base else 1.0,
                "against": base or "-",
                "hooks": num_torch_hooks(models[name]),
                "wrong": sum(len(r) != 1 or not torch.equal(r[0], x) for r in kept.values()),
            }
        )
    return rows


def bench(repeats: int, inner: int) -> list[dict]:
    from flex_model import FlexModel, HookFunction

    x, rows = torch.randn(1, 16, 64), torch.randn(64, 256)
    models = {
        name: chain()
        for name in (
            "bare",
            "wrapper",
            "wrapper, no group",
            "bare hooks",
            "hooks",
            "shapes",
            "one bare",
            "one",
            "identity edits",
        )
    }
    models |= {name: mlps() for name in ("bare mlps", "same groups")}
    recorded = ("bare hooks", "hooks", "shapes", "one bare", "one", "identity edits")
    records: dict[str, dict] = {name: {} for name in recorded}
    bare_hooks(models["bare hooks"], records["bare hooks"])
    one_bare = models["one bare"][31]
    one_bare.register_forward_hook(
        lambda m, a, o: records["one bare"].__setitem__("31", [o.detach().clone()])
    )

    wrapper = FlexModel(models["wrapper"])
    hooked = FlexModel(models["hooks"], records["hooks"])
    for name, _ in models["hooks"].named_children():
        hooked.register_forward_hook(HookFunction(name))
    shaped = FlexModel(models["shapes"], records["shapes"])
    for name, _ in models["shapes"].named_children():
        shaped.register_forward_hook(HookFunction(name, expected_shape=(None, 16, 64)))
    one = FlexModel(models["one"], records["one"])
    one.register_forward_hook(HookFunction("31"))
    edited = FlexModel(models["identity edits"], records["identity edits"])
    for name, _ in models["identity edits"].named_children():
        edited.register_forward_hook(HookFunction(name, editing_function=identity))
    chosen = FlexModel(models["same groups"])
    for name, _ in models["same groups"].named_children():
        chosen.register_forward_hook(HookFunction(name, editing_function=identity))
    removed = FlexModel(models["wrapper, no group"])
    removed.register_forward_hook(HookFunction("31")).remove()

    cases = {
        "bare": lambda: models["bare"](x),
        "wrapper": lambda: wrapper(x),
        "wrapper, no group": lambda: removed(x),
        "one bare": lambda: models["one bare"](x),
        "one": lambda: one(x),
        "bare hooks": lambda: models["bare hooks"](x),
        "hooks": lambda: hooked(x),
        "shapes": lambda: shaped(x),
        "identity edits": lambda: edited(x),
        "bare mlps": lambda: models["bare mlps"](rows),
        "same groups": lambda: chosen(rows, groups=()),
    }
    in_inference = ("bare hooks", "hooks", "shapes", "identity edits")
    with torch.no_grad():
        measure(cases, 3, inner)
        times = measure(cases, repeats, inner)
    with torch.inference_mode():
        others = {f"{name}, inference": cases[name] for name in in_inference}
        measure(others, 3, inner)
        times |= measure(others, repeats, inner)
    models |= {f"{name}, inference": models[name] for name in in_inference}
    records |= {f"{name}, inference": records[name] for name in in_inference}
    against = {
        "wrapper": "bare",
        "wrapper, no group": "bare",
        "one bare": "bare",
        "one": "one bare",
        "bare hooks": "bare",
        "hooks": "bare hooks",
        "shapes": "bare hooks",
        "identity edits": "bare hooks",
        "hooks, inference": "bare hooks, inference",
        "shapes, inference": "bare hooks, inference",
        "identity edits, inference": "bare hooks, inference",
        "same groups": "bare mlps",
    }
    return rows_of(times, against, models, records, x)


def identity(module, full, save_ctx, modules):
    return full


def mlps() -> nn.Module:
    torch.manual_seed(0)
    blocks = (
        nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(8)
    )
    return nn.Sequential(*blocks)


def bench_followed(report, options) -> None:
    """On each rank: the rows of followed forwards."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    from flex_model import FlexModel, HookFunction

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = {f"{i}.0": ColwiseParallel() for i in range(8)}
    plan |= {f"{i}.2": RowwiseParallel() for i in range(8)}
    names = ("sharded", "sharded hook", "followed")
    models = {name: parallelize_module(mlps(), mesh, plan) for name in names}
    records: dict[str, dict] = {"sharded hook": {}, "followed": {}}
    x = torch.randn(8, 64, 256, generator=torch.Generator().manual_seed(1))
    cases = {"sharded": lambda: models["sharded"](x)}
    for name, follow in (("sharded hook", "new"), ("followed", "always")):
        flex = FlexModel(models[name], records[name], follow=follow)
        flex.register_forward_hook(HookFunction("3.1"))
        cases[name] = lambda flex=flex: flex(x)
    with torch.no_grad():
        expected = mlps()[:3](x)
        expected = mlps()[3][:2](expected)
        times = measure(cases, options.repeats, 1)
    against = {"sharded hook": "sharded", "followed": "sharded"}
    rows = rows_of(times, against, models, {}, x)
    for row in rows if dist.get_rank() == 0 else ():
        kept = records.get(row["case"], {}).values()
        row["wrong"] = sum(not torch.allclose(r[0], expected, atol=1e-5) for r in kept)
        report(row)


def bench_original(repeats: int, inner: int) -> list[dict]:
    """Release 0.1.0, which must be importable; it needs a process group of its own."""
    import torch.distributed as dist

    for key, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
    }.items():
        os.environ.setdefault(key, value)
    os.environ.setdefault("MASTER_PORT", "29511")
    dist.init_process_group("gloo")
    new_group = dist.new_group
    dist.new_group = lambda ranks=None, *a, **k: new_group(ranks)  # it hard-codes nccl
    from flex_model.core import FlexModel, HookFunction

    x = torch.randn(1, 16, 64)
    models = {"bare hooks": chain(), "0.1.0 hooks": chain()}
    records: dict[str, dict] = {"bare hooks": {}, "0.1.0 hooks": {}}
    bare_hooks(models["bare hooks"], records["bare hooks"])
    hooked = FlexModel(models["0.1.0 hooks"], records["0.1.0 hooks"])
    for name, _ in models["0.1.0 hooks"].named_children():
        hooked.register_forward_hook(HookFunction(name))

    def run_original():
        records["0.1.0 hooks"].clear()  # it would grow for ever
        hooked(x)

    cases = {"bare hooks": lambda: models["bare hooks"](x), "0.1.0 hooks": run_original}
    with torch.no_grad():
        measure(cases, 3, inner)
        times = measure(cases, repeats, inner)
    return rows_of(times, {"0.1.0 hooks": "bare hooks"}, models, records, x)


def report(rows: list[dict]) -> None:
    for i, row in enumerate(rows):
        if i == 0:
            print(*(f"{name:>25}" for name in row))
        print(*(f"{v:>25.2f}" if isinstance(v, float) else f"{v:>25}" for v in row.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--inner", type=int, default=20, help="forwards per timing")
    parser.add_argument("--json", help="also write the rows to this file")
    parser.add_argument(
        "--original", metavar="PATH", help="folder that holds release 0.1.0's flex_model"
    )
    parser.add_argument("--only-original", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)

    if args.only_original:
        print(json.dumps(bench_original(args.repeats, args.inner)), flush=True)
        os._exit(0)
    rows = [*ranks.rows_of(2, bench_followed, args), *bench(args.repeats, args.inner)]
    if args.original:
        command = [
            sys.executable,
            __file__,
            "--only-original",
            "--repeats",
            str(args.repeats),
            "--inner",
            str(args.inner),
        ]
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": args.original},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"release 0.1.0 did not run:\n{done.stderr}")
        rows += [
            row for row in json.loads(done.stdout.splitlines()[-1]) if row["case"] != "bare hooks"
        ]
    report(rows)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=2)
    if any(row["wrong"] for row in rows):
        sys.exit("wrong records")


if __name__ == "__main__":
    main()

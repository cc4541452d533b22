"""A rank of `test_hosts.py`, started by torchrun, or as srun does it: edits that mix the shards of
all ranks.

    torchrun ... rank.py MODE FOLDER

MODE: "run" it all; "lose" or "wrap": write a file when the model is wrapped, or the world made, and
go on when the file `go` is there, which is when the hosts can't reach each other any more.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from flex_model import FlexModel, HookError, HookFunction
from flex_model.integrations import slurm

TIMEOUT_S = 6
RUNS, ROWS, WIDTH = 4, 2048, 1024


def mixed(module, full, save_ctx, modules):
    """Every element depends on the shards of all ranks."""
    return full.flip(-1) * 0.5 + full.mean(-1, keepdim=True)


def model(is_sharded):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8))
    if is_sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(layers, mesh, plan)
    return layers


def digest(tensor):
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return hashlib.sha1(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def sent_bytes():
    card = Path("/sys/class/net", os.environ.get("GLOO_SOCKET_IFNAME", "lo"), "statistics/tx_bytes")
    return int(card.read_text())


def wrapped(sharded, records):
    flex = FlexModel(sharded, records, timeout=TIMEOUT_S)
    flex.register_forward_hook(HookFunction("0", editing_function=mixed))
    return flex


def run(x):
    """What a forward and a backward give, and what an edit of ROWS x WIDTH sends off this host."""
    records = {}
    flex = wrapped(model(is_sharded=True), records)
    flex(x).square().mean().backward()
    values = [digest(x.grad), *(digest(p.grad) for p in flex.module.parameters())]
    values += [digest(record) for record in records.get("0", [])]
    with torch.no_grad():
        out = flex(x)
        dist.barrier()
        before = sent_bytes()
        for _ in range(RUNS):
            flex(x)
        dist.barrier()
        of_edits = sent_bytes()
        flex.restore()
        dist.barrier()
        start = sent_bytes()
        for _ in range(RUNS):
            flex.module(x)
        dist.barrier()
        bare = sent_bytes() - start
    return {"values": [digest(out), *values], "sent": (of_edits - before - bare) / RUNS}


def expected(x):
    """The same on one process."""
    reference = model(is_sharded=False)
    reference[0].register_forward_hook(lambda m, args, out: mixed(m, out, None, None))
    reference(x).square().mean().backward()
    return x.grad


def main():
    mode, folder = sys.argv[1], Path(sys.argv[2])
    slurm.set_ranks()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    x = torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    result = {}
    if mode == "run":
        result = run(x)
        of_ranks, x.grad = x.grad, None
        torch.testing.assert_close(of_ranks, expected(x))
    else:
        sharded = model(is_sharded=True)
        flex = wrapped(sharded, {}) if mode == "lose" else None
        (sharded if flex is None else flex)(x)
        dist.barrier()
        (folder / f"ready{rank}").touch()
        while not (folder / "go").exists():
            time.sleep(0.05)
        start = time.monotonic()
        try:
            wrapped(sharded, {}) if flex is None else flex(x)
        except HookError as error:
            result["error"] = str(error)
        result["took_s"] = time.monotonic() - start
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

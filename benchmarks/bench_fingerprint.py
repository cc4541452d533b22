"""What ``flex.fingerprint`` adds to the forward of a tensor-parallel Llama on two ranks.

    python benchmarks/bench_fingerprint.py [--json FILE] [--width 2048] [--layers 2]

Forwards and fingerprints in turns, 4 x 256 tokens, float32. A fingerprint's own forward is not
counted. The first fingerprint proves the layouts, the later ones reuse its proofs.

Columns:
    forward_s   the bare model: the minimum over repeats, in seconds
    first_s     what the first fingerprint adds
    later_s     what a later one adds: the minimum over repeats
    of_forward  later_s over forward_s
    cpu         the same of rank 0's CPU time, on which other processes act less
    follows     how often the fingerprints' forwards were followed
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import ranks
import torch
import torch.distributed as dist

from flex_model import FlexModel

COLUMNWISE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
COLUMNWISE += ("mlp.gate_proj", "mlp.up_proj")
ROWWISE = ("self_attn.o_proj", "mlp.down_proj")


def make_model(width: int, layers: int) -> torch.nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=width,
        intermediate_size=width * 43 // 16,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).eval()
    plan = {f"model.layers.*.{name}": ColwiseParallel() for name in COLUMNWISE}
    plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in ROWWISE}
    return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


def seconds(run: Callable[[], object]) -> torch.Tensor:
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    dist.barrier()
    return torch.tensor([time.perf_counter() - wall, time.process_time() - cpu])


def body(report: ranks.Report, options: argparse.Namespace) -> None:
    model = make_model(options.width, options.layers)
    tokens = torch.randint(0, 1024, (4, 256), generator=torch.Generator().manual_seed(1))
    flex = FlexModel(model, {})

    def forward() -> None:
        with torch.no_grad():
            model(tokens)

    def fingerprint() -> None:
        flex.fingerprint(options.folder, tokens)

    forward()
    first = seconds(fingerprint)
    turns = [(seconds(forward), seconds(fingerprint)) for _ in range(options.repeats)]
    bare, later = (torch.stack(of_one).amin(0) for of_one in zip(*turns))
    added = later - bare
    report(
        {
            "width": options.width,
            "layers": options.layers,
            "forward_s": round(bare[0].item(), 3),
            "first_s": round((first - bare)[0].item(), 3),
            "later_s": round(added[0].item(), 3),
            "of_forward": round((added / bare)[0].item(), 2),
            "cpu": round((added / bare)[1].item(), 2),
            "follows": flex._core.recorder.core.tracking.num_followed,
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        options.folder = Path(name) / "run"
        rows = list(ranks.rows_of(2, body, options))
    print(*rows, sep="\n")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

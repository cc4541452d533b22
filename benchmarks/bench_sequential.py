"""What suspending costs: `sequential.run` against a plain loop, on a model that fits.

    python benchmarks/bench_sequential.py [--json FILE]

A random Llama of 8 layers under ``no_grad``, no cache; the loop and the run take turns in one
process, and all outputs are compared.

Columns:
    width     the model's hidden size
    tokens    rows x tokens of a batch
    window    batches under way at once
    hooks     hooks that record, on as many layers' MLPs
    loop_ms   time of the plain loop for one batch: minimum over repeats, in milliseconds
    run_ms    the same of the sequential run
    ratio     run_ms over loop_ms
    wrong     outputs that differ
"""

from __future__ import annotations

import argparse
import json
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from flex_model import FlexModel, HookFunction, sequential

CASES = [  # width, rows, tokens, batches, window, hooks, repeats
    (32, 2, 8, 64, 64, 0, 25),
    (32, 2, 8, 64, 8, 0, 25),
    (256, 4, 32, 32, 32, 0, 5),
    (256, 4, 32, 32, 8, 0, 5),
    (256, 4, 32, 32, 8, 8, 5),
    (768, 4, 64, 8, 8, 0, 5),
]


def llama(width: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=8,
        num_attention_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config).eval()


def measure(
    width: int, rows: int, tokens: int, num_batches: int, window: int, hooks: int, repeats: int
) -> dict:
    flex = FlexModel(llama(width), {})
    for layer in range(hooks):
        flex.register_forward_hook(HookFunction(f"model.layers.{layer}.mlp"))
    batches = [{"input_ids": torch.randint(0, 256, (rows, tokens))} for _ in range(num_batches)]
    times: dict[str, list[float]] = {"loop": [], "run": []}
    with torch.no_grad():
        for _ in range(repeats):
            start = time.perf_counter()
            expected = [flex(**batch).logits for batch in batches]
            middle = time.perf_counter()
            outputs = sequential.run(flex, batches, window=window)
            end = time.perf_counter()
            times["loop"].append(middle - start)
            times["run"].append(end - middle)
    loop, run = (min(times[name]) / num_batches * 1e3 for name in ("loop", "run"))
    wrong = sum(not torch.equal(one.logits, other) for one, other in zip(outputs, expected))
    return {
        "width": width,
        "tokens": f"{rows}x{tokens}",
        "window": window,
        "hooks": hooks,
        "loop_ms": round(loop, 2),
        "run_ms": round(run, 2),
        "ratio": round(run / loop, 3),
        "wrong": wrong,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="also write the rows to this file")
    args = parser.parse_args()
    rows = [measure(*case) for case in CASES]
    print("  ".join(f"{name:>8}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{value!s:>8}" for value in row.values()))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)
    if any(row["wrong"] for row in rows):
        raise SystemExit("outputs differ")


if __name__ == "__main__":
    main()

"""Hooks on every layer of a Llama while it generates, on one GPU or the CPU, against torch's hooks.

    python benchmarks/bench_generate.py [--json FILE] [--repeats N] [--dry-run]
    PYTHONPATH=FOLDER_WITH_NNSIGHT python benchmarks/bench_generate.py

16 layers, 2,048 wide, in bfloat16; on the CPU 64 wide, in float32, one thread. ``decode``: one new
token after a cache of 32, batch 1; ``prefill``: 8 rows of 512 tokens (on the CPU 2 of 32). All
cases take turns in one run, under ``no_grad``, and what they return and record is compared.
``--dry-run``: tiny, whose times mean nothing.

Columns:
    case     ``steer``: adds a vector to the output of each layer, without a record; ``steer,
             record``: with one; ``record``: nothing else
    tool     ``torch``: one hook, as short as can be; ``two clones``: of the input and of the
             result; ``kept``: ``detach().clone()`` on the device; ``cpu``: ``.cpu()``; ``nnsight``,
             where it can be imported; ``flex_model``, whose records are on the CPU
    us       time added to a forward, up to the end of the device's work, per layer: the minimum
    median   the same by the medians
    wrong    elements of outputs and records that differ from those of torch's hooks: 0
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
import warnings

import torch
from bench_dispatch import report
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from flex_model import FlexModel, HookFunction

NUM_LAYERS, CACHED = 16, 32


class Case:
    """A model with one kind of hooks; ``run`` returns its output and records."""

    def __init__(self, case: str, tool: str, model: nn.Module, vector: Tensor) -> None:
        self.case, self.tool, self.model, self.vector = case, tool, model, vector
        self.records: dict[str, list[Tensor]] = {}
        self.call = model
        getattr(self, f"with_{tool.replace(' ', '_')}")()

    @property
    def steers(self) -> bool:
        return self.case.startswith("steer")

    @property
    def keeps(self) -> bool:
        return self.case.endswith("record")

    def layers(self):
        return [(f"model.layers.{i}", layer) for i, layer in enumerate(self.model.model.layers)]

    def with_bare(self) -> None:
        """No hooks."""

    def with_torch(self) -> None:
        self._hook_all(lambda output: output + self.vector, lambda output: output.detach().clone())

    with_kept = with_torch

    def with_two_clones(self) -> None:
        self._hook_all(
            lambda output: (output.clone() + self.vector).clone(), lambda output: output.clone()
        )

    def with_cpu(self) -> None:
        self._hook_all(lambda output: output + self.vector, lambda output: output.cpu())

    def _hook_all(self, steer, keep) -> None:
        for name, layer in self.layers():

            def hook(module, args, output, name=name):
                if self.keeps:
                    self.records[name] = [keep(output)]
                return steer(output) if self.steers else None

            layer.register_forward_hook(hook)

    def with_flex_model(self) -> None:
        def steer(module, full, save_ctx, modules):
            return full + self.vector

        flex = FlexModel(self.model, self.records)
        for name, _ in self.layers():
            function = HookFunction(
                name, editing_function=steer if self.steers else None, record=self.keeps
            )
            flex.register_forward_hook(function)
        self.call = flex

    def with_nnsight(self) -> None:
        from nnsight import NNsight

        traced = NNsight(self.model)
        vector, steers, keeps = self.vector, self.steers, self.keeps

        def call(tokens, past_key_values):
            with traced.trace(tokens, past_key_values=past_key_values):
                kept = [].save()  # nnsight adds this method to all objects
                for layer in traced.model.layers:
                    if keeps:
                        kept.append(layer.output.detach().cpu())
                    if steers:
                        layer.output = layer.output + vector
                output = traced.output.save()
            self.records.update({f"model.layers.{i}": [one] for i, one in enumerate(kept)})
            return output

        self.call = call

    def run(self, tokens: Tensor, cache: DynamicCache) -> Tensor:
        return self.call(tokens, past_key_values=cache).logits

    def num_wrong(self, output: Tensor, of: Case, expected: Tensor) -> int:
        pairs = [(output, expected)]
        if self.keeps:
            pairs += [(self.records[name][0], of.records[name][0]) for name in of.records]
            pairs += [(self.vector, self.vector[:0])] * (len(self.records) != len(of.records))
        return sum(
            int((one.cpu() != other.cpu()).sum()) if one.shape == other.shape else one.numel()
            for one, other in pairs
        )


def cases_of(config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> list[Case]:
    kinds = [("", "bare")]
    kinds += [("steer", "torch"), ("steer", "two clones"), ("steer", "flex_model")]
    kinds += [("steer, record", "two clones"), ("steer, record", "flex_model")]
    kinds += [("record", "kept"), ("record", "cpu"), ("record", "flex_model")]
    if importlib.util.find_spec("nnsight"):
        kinds += [("steer", "nnsight"), ("record", "nnsight")]
    vector = torch.linspace(-1, 1, config.hidden_size).to(device, dtype)
    found = []
    for kind in kinds:
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(device, dtype).eval()
        found.append(Case(*kind, model, vector))
    return found


def measure(cases: list[Case], step: str, tokens: Tensor, repeats: int) -> list[dict]:
    is_gpu = tokens.is_cuda
    times: list[list[float]] = [[] for _ in cases]
    outputs: list[Tensor] = []

    def cache() -> DynamicCache:
        found = DynamicCache()
        if step == "decode":
            cases[0].model(tokens.expand(1, CACHED), past_key_values=found)
        return found

    for repeat in range(-3, repeats):
        for case, taken in zip(cases, times):
            filled = cache()
            if is_gpu:
                torch.cuda.synchronize()
            start = time.perf_counter()
            output = case.run(tokens, filled)
            if is_gpu:
                torch.cuda.synchronize()
            if repeat >= 0:
                taken.append(time.perf_counter() - start)
            else:
                outputs = [*outputs, output][-len(cases) :]
    of = {case.case: i for i, case in reversed(list(enumerate(cases)))}
    rows = []
    for i, case in enumerate(cases[1:], 1):
        added = [f(times[i]) - f(times[0]) for f in (min, statistics.median)]
        first = of[case.case]
        rows.append(
            {
                "step": step,
                "case": case.case,
                "tool": case.tool,
                "us": added[0] * 1e6 / NUM_LAYERS,
                "median": added[1] * 1e6 / NUM_LAYERS,
                "wrong": case.num_wrong(outputs[i], cases[first], outputs[first]),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", help="also write the rows to this file")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)  # of the cache's name, which is to change
    is_gpu = torch.cuda.is_available()
    is_small = options.dry_run or not is_gpu
    device = torch.device("cuda" if is_gpu else "cpu")
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64 if is_small else 2048,
        intermediate_size=128 if is_small else 5632,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4 if is_small else 16,
        num_key_value_heads=4 if is_small else 16,
        attn_implementation="eager" if options.dry_run else "sdpa",  # emulated GPUs have no other
    )
    rows = []
    with torch.no_grad():
        cases = cases_of(config, device, torch.float32 if is_small else torch.bfloat16)
        for step, shape in (("decode", (1, 1)), ("prefill", (2, 32) if is_small else (8, 512))):
            tokens = (torch.arange(shape[0] * shape[1]).reshape(shape) % 256).to(device)
            rows += measure(cases, step, tokens, 2 if options.dry_run else options.repeats)
    report(rows)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=2)
    if any(row["wrong"] for row in rows):
        sys.exit("wrong outputs or records")


if __name__ == "__main__":
    main()

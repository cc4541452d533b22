"""Activations of a model that does not fit: a 724 MiB Llama in less than 250 MiB.

    python examples/harvest_sequential.py

A random Llama is written to disk by another process. Here it is built without weights and run over
the lines of a text file, layer by layer: each layer is read once for a window of batches. The
activations of two modules go straight to disk. In the end the model is loaded in full, and every
activation is compared with that of a plain forward.
"""

import argparse
import copy
import multiprocessing
import threading
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from flex_model import FlexModel, HookFunction, sequential

MIB = 2**20
PADDING = 256  # after the 256 bytes, which are the tokens


def config(num_layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=257,
        hidden_size=1024,
        intermediate_size=2464,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        max_position_embeddings=256,
        use_cache=False,
    )


def write_checkpoint(folder: Path, num_layers: int) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(config(num_layers)).save_pretrained(folder, max_shard_size="200MB")


def read_batches(text: Path, num_batches: int, rows: int = 4) -> list[dict[str, Tensor]]:
    """The first lines of a text, as bytes, padded to the longest line of their batch."""
    lines = [line.encode()[:80] for line in text.read_text().splitlines() if line.strip()]
    batches = []
    for start in range(0, rows * num_batches, rows):
        chosen = lines[start : start + rows]
        if not chosen:
            break
        ids = torch.full((len(chosen), max(map(len, chosen))), PADDING)
        for row, line in zip(ids, chosen):
            row[: len(line)] = torch.tensor(list(line))
        batches.append({"input_ids": ids, "attention_mask": (ids != PADDING).long()})
    return batches


class PeakMemory:
    """The largest anonymous memory of this process inside, over that at the start, in bytes."""

    def __enter__(self) -> "PeakMemory":
        self.start = self.peak = self._now()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.is_set():
            self.peak = max(self.peak, self._now())
            time.sleep(0.005)

    @staticmethod
    def _now() -> int:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("RssAnon:")[1].split()[0])


def harvest(
    folder: Path, batches: list[dict[str, Tensor]], modules: list[str], args: argparse.Namespace
) -> sequential.RunResult:
    with torch.device("meta"):
        model = LlamaForCausalLM(config(args.layers)).eval()
    with FlexModel(model, {}) as flex:
        for name in modules:
            flex.register_forward_hook(HookFunction(name))
        return sequential.run(
            flex,
            batches,
            weights=folder,
            window=args.window,
            store=sequential.ActivationStore(args.out / "activations"),
            on_output=lambda index, output: None,  # only the activations are wanted
            progress=not args.quiet,
        )


def compare(folder: Path, batches: list[dict[str, Tensor]], modules: list[str], out: Path) -> None:
    store = sequential.ActivationStore(out / "activations")
    model = copy.deepcopy(LlamaForCausalLM.from_pretrained(folder)).eval()
    with FlexModel(model, records := {}) as flex, torch.no_grad():
        for name in modules:
            flex.register_forward_hook(HookFunction(name))
        for index, batch in enumerate(batches):
            flex(**batch)
            stored = store.batch(index)
            for name in modules:
                assert torch.equal(stored[name][0], records[name][0]), (name, index)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, default=Path(__file__), help="a text file")
    parser.add_argument("--out", type=Path, default=Path("harvest"), help="folder for all files")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--window", type=int, default=8, help="batches under way at once")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args()

    folder = args.out / "model"
    if not (folder / "config.json").exists():
        # Another process, so that the memory that it takes is none of this one's.
        maker = multiprocessing.get_context("spawn").Process(
            target=write_checkpoint, args=(folder, args.layers)
        )
        maker.start()
        maker.join()
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    batches = read_batches(args.text, args.batches)
    modules = [f"model.layers.{args.layers // 2}.mlp", "model.norm"]

    with PeakMemory() as memory:
        result = harvest(folder, batches, modules, args)
    loads = sum(result.loads.values())
    print(f"model           {size / MIB:.0f} MiB on disk, {args.layers} layers")
    print(f"peak memory     {(memory.peak - memory.start) / MIB:.0f} MiB over the start")
    print(f"layer loads     {loads} for {len(batches)} batches")
    print(f"read            {result.bytes_read / MIB:.0f} MiB")
    print(f"activations in  {args.out / 'activations'}: {', '.join(modules)}")
    compare(folder, batches, modules, args.out)
    print("equal to the full forward")


if __name__ == "__main__":
    main()

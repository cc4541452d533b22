"""A random Llama of 45 MiB a layer, for processes of their own.

``make FOLDER LAYERS`` writes it; ``run FOLDER WINDOW`` and ``full FOLDER`` print one line of JSON:
hashes, and for ``run`` the peak of anonymous memory over the start in bytes, and what was loaded.
"""

import copy
import hashlib
import json
import sys
import threading
import time
from pathlib import Path

import torch

NUM_BATCHES = 8


def config(num_layers):
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=512,
        hidden_size=1024,
        intermediate_size=2464,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        max_position_embeddings=128,
    )


def batches():
    generator = torch.Generator().manual_seed(1)
    return [
        {"input_ids": torch.randint(0, 512, (2, 32), generator=generator)}
        for _ in range(NUM_BATCHES)
    ]


def make(folder, num_layers):
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(config(num_layers)).save_pretrained(folder, max_shard_size="200MB")


def anonymous_bytes():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("no RssAnon in /proc/self/status")


class Peak:
    """Watches the process's anonymous memory, in a thread."""

    def __enter__(self):
        self.base = self.peak = anonymous_bytes()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._ends.is_set():
            self.peak = max(self.peak, anonymous_bytes())
            time.sleep(0.003)

    def __exit__(self, *exc_info):
        self._ends.set()
        self._thread.join()


def middle(model):
    return f"model.layers.{len(model.model.layers) // 2}.mlp"


def hash_of(tensor):
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def run(folder, window):
    from transformers import LlamaConfig, LlamaForCausalLM

    from flex_model import FlexModel, HookFunction, sequential

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).eval()
    flex = FlexModel(model, records := {})
    site = middle(model)
    flex.register_forward_hook(HookFunction(site))
    tiny = LlamaForCausalLM(config(1))
    with torch.no_grad():
        tiny(**batches()[0])  # what torch sets up once is no part of the run
    del tiny
    with Peak() as peak:
        result = sequential.run(
            flex, batches(), weights=folder, window=window, on_output=lambda i, o: hash_of(o.logits)
        )
    flex.restore()
    report = {
        "bytes": peak.peak - peak.base,
        "loads": result.loads,
        "read": result.bytes_read,
        "logits": list(result),
        "records": [hash_of(record) for record in records[site]],
        "threads": threading.active_count(),
        "hooks": sum(len(m._forward_pre_hooks) for m in model.modules()),
    }
    print(json.dumps(report))


def full(folder):
    from transformers import LlamaForCausalLM

    from flex_model import FlexModel, HookFunction

    model = copy.deepcopy(LlamaForCausalLM.from_pretrained(folder)).eval()
    flex = FlexModel(model, records := {})
    site = middle(model)
    flex.register_forward_hook(HookFunction(site))
    report = {"logits": [], "records": []}
    with torch.no_grad():
        for batch in batches():
            report["logits"].append(hash_of(flex(**batch).logits))
            report["records"].append(hash_of(records[site][0]))
    print(json.dumps(report))


if __name__ == "__main__":
    command, folder, *rest = sys.argv[1:]
    {"make": make, "run": run, "full": full}[command](folder, *map(int, rest))

"""Train a sparse autoencoder on a layer of a small Llama, from a store of its activations.

    python examples/train_sae.py                             # one process
    torchrun --nproc-per-node 2 examples/train_sae.py        # two data-parallel processes

The script

1. harvests: it runs the model over texts and writes a layer's activations to a store, each process
   its own rows (after a kill, it continues);
2. trains a top-k autoencoder on shuffled rows of the store; each process reads its part of every
   batch, and gradients are averaged;
3. splices it back into the model and compares the loss with that of the model, and with the layer's
   mean in its place: the share of the loss that is recovered;
4. lists the tokens on which features are largest, and draws `sae.png`.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm
from train_induction_model import VOCABULARY, Language, training_batch
from transformers import AutoModelForCausalLM

from flex_model import ActivationStore, FlexModel, HookFunction
from flex_model.editing import splice

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
SITE, LENGTH, TEXTS = "model.layers.1", 64, 32
console = Console(quiet=RANK != 0, highlight=False)


def texts(seed: int) -> Tensor:
    """One batch of texts: half of the made-up language, half random, with repetitions."""
    generator = torch.Generator().manual_seed(seed)
    return training_batch(Language(), TEXTS, LENGTH, generator)


def my_rows(full: Tensor) -> Tensor:
    return full.chunk(WORLD_SIZE)[RANK]


# ---- 1. Harvest ----------------------------------------------------------------------------------


def harvest(model: nn.Module, folder: Path, num_batches: int) -> ActivationStore:
    """Write the activations of the layer, and the tokens, to a store."""
    store = ActivationStore(folder, key={"texts": num_batches})
    with FlexModel(model, store, data_parallel_size=WORLD_SIZE) as flex, torch.no_grad():
        flex.register_forward_hook(HookFunction(SITE))
        steps = range(store.num_batches, num_batches)
        for i in tqdm(steps, desc="harvest", disable=RANK != 0):
            rows = my_rows(texts(i + 1))
            store.annotate(token_ids=rows)
            flex(rows, use_cache=False)
    return ActivationStore(folder)


# ---- 2. The autoencoder --------------------------------------------------------------------------


class SparseAutoencoder(nn.Module):
    """A row is the sum of the `k` largest of `features` directions, and a mean."""

    def __init__(self, mean: Tensor, scale: float, features: int, k: int):
        super().__init__()
        directions = nn.functional.normalize(torch.randn(features, len(mean)), dim=1)
        self.encoder, self.decoder = nn.Parameter(directions.T), nn.Parameter(directions.clone())
        self.bias, self.mean = nn.Parameter(torch.zeros(features)), nn.Parameter(mean.clone())
        self.scale, self.k = scale, k

    def encode(self, x: Tensor) -> Tensor:
        values = ((x - self.mean) / self.scale @ self.encoder + self.bias).relu()
        largest = values.topk(self.k, dim=-1)
        return torch.zeros_like(values).scatter(-1, largest.indices, largest.values)

    def decode(self, latents: Tensor) -> Tensor:
        return latents @ self.decoder * self.scale + self.mean

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


def train(store: ActivationStore, features: int, k: int, epochs: int) -> SparseAutoencoder:
    torch.manual_seed(0)
    found = store.statistics(SITE)
    spread = float(found.variance.sum().sqrt())
    sae = SparseAutoencoder(found.mean.float(), spread, features, k)
    loader = store.loader(SITE, 1024, buffer_rows=2**15, rank=RANK, world=WORLD_SIZE, epochs=epochs)
    optimizer = torch.optim.Adam(sae.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, len(loader))
    for rows in tqdm(loader, desc="training", disable=RANK != 0):
        x = rows.records[SITE]
        loss = (sae(x) - x).square().sum(-1).mean() / spread**2
        loss.backward()
        for parameter in sae.parameters():
            if WORLD_SIZE > 1:
                dist.all_reduce(parameter.grad)
                parameter.grad /= WORLD_SIZE
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return sae


# ---- 3. Back in the model ------------------------------------------------------------------------


@torch.no_grad()
def losses(model: nn.Module, sae: SparseAutoencoder, mean: Tensor) -> list[float]:
    """The loss of the model, with the autoencoder, and with the mean in place of the layer."""
    flex = FlexModel(model, {}, data_parallel_size=WORLD_SIZE)
    flex.register_trainable_module("sae", sae)

    def to_mean(module: nn.Module, full: Tensor, save_ctx: object, modules: object) -> Tensor:
        return mean.to(full).expand_as(full)

    tokens = my_rows(texts(0))
    found = []
    for edit in (None, splice("sae").at(SITE), HookFunction(SITE, editing_function=to_mean)):
        handle = None if edit is None else flex.register_forward_hook(edit)
        loss = flex(tokens, labels=tokens, use_cache=False).loss / WORLD_SIZE
        if WORLD_SIZE > 1:
            dist.all_reduce(loss)
        found.append(float(loss))
        if handle is not None:
            handle.remove()
    flex.restore()
    return found


# ---- 4. What features stand for ------------------------------------------------------------------


@torch.no_grad()
def by_token(store: ActivationStore, sae: SparseAutoencoder) -> tuple[Tensor, Tensor]:
    """Return each feature's mean on each token, (features, tokens), and how often it is not 0."""
    total = torch.zeros(len(sae.bias), len(VOCABULARY))
    counts, uses, num_rows = torch.zeros(len(VOCABULARY)), torch.zeros(len(sae.bias)), 0
    for rows in store.loader(SITE, 1024, seed=None):
        latents, tokens = sae.encode(rows.records[SITE]), rows.annotations["token_ids"]
        total.index_add_(1, tokens, latents.T)
        counts += tokens.bincount(minlength=len(VOCABULARY))
        uses, num_rows = uses + (latents > 0).sum(0), num_rows + len(latents)
    return total / counts.clamp(min=1), uses / num_rows


def show(means: Tensor, frequency: Tensor) -> None:
    share = means.max(1).values / means.sum(1).clamp(min=1e-9)
    sharpest = share.where(frequency > 1e-4, -1).topk(12).indices
    table = Table("feature", "active on", "largest on")
    for feature in sharpest.tolist():
        best = means[feature].topk(4).indices.tolist()
        words = " ".join(VOCABULARY[token] for token in best)
        table.add_row(str(feature), f"{frequency[feature]:.2%}", words)
    console.print(table)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    left.hist(frequency.clamp(min=1e-6).log10(), bins=40)
    left.set(xlabel="log10 of the share of tokens", ylabel="features", title="how often")
    order = means[sharpest].argmax(1)
    right.imshow(means[sharpest][:, order] / means[sharpest].max(1, keepdim=True).values)
    right.set_xticks(range(12), [VOCABULARY[token] for token in order.tolist()])
    right.set_yticks(range(12), [str(feature) for feature in sharpest.tolist()])
    right.set(xlabel="token", ylabel="feature", title="mean of a feature on a token")
    figure.savefig("sae.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", help="a folder for the activations; else a temporary one")
    parser.add_argument("--batches", type=int, default=128)
    parser.add_argument("--features", type=int, default=1024)
    parser.add_argument("--k", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    if WORLD_SIZE > 1:
        dist.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(Path(__file__).parent / "induction_model").eval()
    wrapped = DistributedDataParallel(model) if WORLD_SIZE > 1 else model
    with tempfile.TemporaryDirectory() as temporary:
        folder = [args.store or temporary]
        if WORLD_SIZE > 1:
            dist.broadcast_object_list(folder)  # the temporary one of rank 0
        store = harvest(wrapped, Path(folder[0]), args.batches)
        sae = train(store, args.features, args.k, args.epochs)
        mean = store.statistics(SITE).mean
        clean, spliced, ablated = losses(wrapped, sae, mean)
        if RANK == 0:
            show(*by_token(store, sae))
        if WORLD_SIZE > 1:
            dist.barrier()  # before rank 0 deletes its folder
    recovered = (ablated - spliced) / (ablated - clean)
    console.print(f"loss {clean:.3f}, with the autoencoder {spliced:.3f}, the mean {ablated:.3f}")
    console.print(f"{recovered:.1%} of the loss recovered; see sae.png")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    if WORLD_SIZE > 1:
        dist.destroy_process_group()

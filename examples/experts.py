"""Which expert serves which tokens of a small mixture of experts, and what is lost without one.

    python examples/experts.py                             # one process
    torchrun --nproc-per-node 2 examples/experts.py        # data parallel, the same numbers

The script

1. trains a small Qwen3-MoE on eight made-up languages, each with tokens and a grammar of its own
   (under a minute; every process trains the same model, so nothing is loaded);
2. counts for each language which experts its tokens are sent to, and draws `experts.png`;
3. takes the expert that the tokens of one language use most, once by giving it no weight (the
   tokens lose what it would have said), once by forbidding it (they go to their next best one),
   and measures the loss of each language;
4. compares with the plain model: routes with those of a torch hook, the ablation with a copy whose
   expert has no weights.
"""

import argparse
import copy
import os
import sys
from collections.abc import Callable

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
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from flex_model import FlexModel, HookFunction

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
LANGUAGES, WORDS, EXPERTS, LENGTH = 8, 8, 8, 16
BLOCK = "model.layers.0.mlp"
console = Console(quiet=RANK != 0, highlight=False)


# ---- 1. Languages, and a model of them -----------------------------------------------------------


def grammars() -> Tensor:
    """For each language and two words, how likely each next word is."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(LANGUAGES, WORDS, WORDS, WORDS, generator=generator)
    return scores.mul(3.0).softmax(-1)


def sentences(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return ``count`` sentences of each language, and their languages, mixed."""
    generator, likely = torch.Generator().manual_seed(seed), grammars()
    language = torch.arange(LANGUAGES).repeat(count)
    words = list(torch.randint(WORDS, (2, len(language)), generator=generator))
    for _ in range(LENGTH - 2):
        of_next = likely[language, words[-2], words[-1]]
        words.append(torch.multinomial(of_next, 1, generator=generator)[:, 0])
    return torch.stack(words, 1) + WORDS * language[:, None], language


def trained(steps: int) -> nn.Module:
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=LANGUAGES * WORDS,
            hidden_size=32,
            moe_intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=16,
            num_experts=EXPERTS,
            num_experts_per_tok=1,
            output_router_logits=True,  # a loss that spreads tokens over the experts
            router_aux_loss_coef=0.003,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in tqdm(range(steps), desc="training", disable=RANK != 0):
        tokens, _ = sentences(4, seed=step + 1)
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.config.output_router_logits = False
    return model.eval()


# ---- 2. Runs of the sharded model ----------------------------------------------------------------


def my_rows(full: Tensor) -> Tensor:
    return full.chunk(WORLD_SIZE)[RANK]


def losses(logits: Tensor, tokens: Tensor, language: Tensor) -> Tensor:
    """The mean loss of each language's words."""
    each = nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    ).view(len(tokens), -1)
    total = torch.zeros(LANGUAGES).index_add(0, language, each.mean(1))
    return total / language.bincount(minlength=LANGUAGES)


def run(flex: FlexModel, tokens: Tensor) -> Tensor:
    """Return the logits of the whole batch, as a hook on the model's head sees them."""
    with torch.no_grad(), flex.register_forward_hook(HookFunction("lm_head")):
        flex(my_rows(tokens), use_cache=False)
    return flex.output_ptr["lm_head"][0]


def without_weight(expert: int) -> Callable[..., Tensor]:
    """Make an edit of the experts' weights by which one has none."""

    def edit(module: nn.Module, weights: Tensor, save_ctx: object, modules: object) -> Tensor:
        return weights.masked_fill(save_ctx.chosen == expert, 0)

    return edit


def keep_chosen(module: nn.Module, chosen: Tensor, save_ctx: object, modules: object) -> None:
    save_ctx.chosen = chosen.clone()


# ---- 3. The plain model --------------------------------------------------------------------------


def plain_routes(model: nn.Module, tokens: Tensor) -> Tensor:
    chosen: list[Tensor] = []
    handle = model.get_submodule(f"{BLOCK}.gate").register_forward_hook(
        lambda gate, args, output: chosen.append(output[2])
    )
    with torch.no_grad():
        model(tokens, use_cache=False)
    handle.remove()
    return chosen[0]


def plain_ablation(model: nn.Module, tokens: Tensor, expert: int) -> Tensor:
    ablated = copy.deepcopy(model)
    with torch.no_grad():
        ablated.get_submodule(f"{BLOCK}.experts").down_proj[expert] = 0
        return ablated(tokens, use_cache=False).logits


# ---- 4. All of it --------------------------------------------------------------------------------


def show(share: Tensor, rows: list[tuple[str, Tensor]], language: int) -> None:
    table = Table("loss of language", *(name for name, _ in rows))
    for i in range(LANGUAGES):
        table.add_row(str(i), *(f"{values[i]:.3f}" for _, values in rows))
    console.print(table)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    left.imshow(share, cmap="viridis", vmin=0)
    left.set(xlabel="expert", ylabel="language", title=f"tokens of a language, by expert ({BLOCK})")
    places = torch.arange(LANGUAGES)
    for i, (name, values) in enumerate(rows):
        right.bar(places + 0.27 * (i - 1), values, width=0.25, label=name)
    right.set(xlabel="language", ylabel="loss", title=f"without language {language}'s expert")
    right.legend()
    figure.savefig("experts.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--language", type=int, help="whose expert is taken")
    args = parser.parse_args()
    if WORLD_SIZE > 1:
        dist.init_process_group("gloo")
    model = trained(args.steps)
    tokens, language = sentences(8, seed=0)
    wrapped = DistributedDataParallel(model) if WORLD_SIZE > 1 else model
    flex = FlexModel(wrapped, {}, data_parallel_size=WORLD_SIZE, output_ranks="all")
    routing = flex.routing(BLOCK)

    with flex.register_forward_hook(HookFunction(routing.indices)):
        before = run(flex, tokens)
        routes = flex.output_ptr[routing.indices][0]
    uses = nn.functional.one_hot(routes, EXPERTS).view(len(tokens), -1, EXPERTS).sum(1).float()
    counts = torch.zeros(LANGUAGES, EXPERTS).index_add(0, language, uses)
    share = counts / counts.sum(1, keepdim=True)
    chosen = int(share.max(1).values.argmax()) if args.language is None else args.language
    expert = int(share[chosen].argmax())
    console.print(
        f"language {chosen} goes to expert {expert} most often: "
        f"{share[chosen, expert]:.0%} of its tokens' routes"
    )

    with (
        flex.register_forward_hook(HookFunction(routing.indices, None, keep_chosen)),
        flex.register_forward_hook(HookFunction(routing.weights, None, without_weight(expert))),
    ):
        ablated = run(flex, tokens)
    with flex.register_forward_hook(routing.forbid(expert)):
        around = run(flex, tokens)
    flex.restore()

    if RANK == 0:
        rows = [
            ("all experts", losses(before, tokens, language)),
            (f"expert {expert} has no weight", losses(ablated, tokens, language)),
            (f"routed around expert {expert}", losses(around, tokens, language)),
        ]
        show(share, rows, chosen)
        assert torch.equal(routes, plain_routes(model, tokens))
        torch.testing.assert_close(
            ablated, plain_ablation(model, tokens, expert), rtol=1e-4, atol=1e-4
        )
        console.print("routes and ablation equal those of the unsharded model; see experts.png")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    if WORLD_SIZE > 1:
        dist.destroy_process_group()

"""Train the small Llama that the examples use: five to ten minutes on one CPU core.

    python examples/train_induction_model.py --out examples/induction_model

The model learns to continue sequences that repeat themselves. That takes two heads in a row: a
*previous-token head*, which writes into each position which token came before it, and an *induction
head*, which looks for the position after an earlier copy of the current token and copies the token
found there. The loss on repeated tokens stays near that of guessing until both exist, then falls
within a few hundred steps (the phase change of Olsson et al. 2022, "In-context learning and
induction heads").

Each batch is half random tokens, half text of a made-up language; both kinds repeat a stretch of
random length. The language has 120 syllables, in lower and in UPPER case. A document keeps its case
for a while, and its next syllable depends on the last two, so that it already pays to look one
token back.
"""

import argparse
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SYLLABLES = [c + v for c in "bcdfghjklmnpqrstvwxz" for v in "aeiouy"]
VOCABULARY = SYLLABLES + [syllable.upper() for syllable in SYLLABLES]


class Language:
    """The made-up language: which syllable follows which two.

    Args:
        seed: Of the grammar; texts are drawn with the generator given to `text`.
    """

    def __init__(self, seed: int = 1234):
        generator = torch.Generator().manual_seed(seed)
        # A syllable has four possible successors; the syllable before it chooses among them.
        self.successors = torch.stack(
            [torch.randperm(len(SYLLABLES), generator=generator)[:4] for _ in SYLLABLES]
        )

    def text(self, rows: int, length: int, generator: torch.Generator) -> Tensor:
        """Return token ids ``(rows, length)``: a tenth of the syllables is out of the blue."""
        syllables = torch.randint(len(SYLLABLES), (rows, length), generator=generator)
        follows = torch.rand(rows, length, generator=generator) < 0.9
        for t in range(2, length):
            expected = self.successors[syllables[:, t - 1], syllables[:, t - 2] % 4]
            syllables[:, t] = torch.where(follows[:, t], expected, syllables[:, t])
        first_case = torch.randint(2, (rows, 1), generator=generator)
        switches = (torch.rand(rows, length, generator=generator) < 0.02).cumsum(1)
        return syllables + len(SYLLABLES) * ((first_case + switches) % 2)


def training_batch(
    language: Language, rows: int, length: int, generator: torch.Generator
) -> Tensor:
    """Return tokens ``(rows, length)``; each row repeats itself from a random place to its end."""
    text = language.text(rows // 2, length, generator)
    noise = torch.randint(len(VOCABULARY), (rows - rows // 2, length), generator=generator)
    tokens = torch.cat([text, noise])

    # Position t >= start repeats position t - period. Half of the rows have short periods.
    def between(low: int, high: Tensor) -> Tensor:
        return low + (torch.rand(rows, 1, generator=generator) * (high - low + 1)).long()

    longest = torch.where(torch.arange(rows) % 2 == 0, length // 4, length // 2)[:, None]
    period = between(4, longest)
    start = period + between(0, torch.full((rows, 1), length // 4 - 1))
    position = torch.arange(length).expand(rows, length)
    source = start - period + (position - start) % period
    return tokens.gather(1, torch.where(position < start, position, source))


@torch.no_grad()
def evaluate(
    model: LlamaForCausalLM, length: int = 32, rows: int = 32, ablate: tuple[int, int] | None = None
) -> tuple[float, float, Tensor]:
    """Score the model on random sequences of ``length`` tokens, each written twice.

    Returns:
        Loss on the first copy, loss on the second copy, induction score of each head
        ``(layers, heads)``: its mean attention from a token of the second copy to the token after
        the same token in the first copy.
    """
    generator = torch.Generator().manual_seed(99)
    once = torch.randint(len(VOCABULARY), (rows, length), generator=generator)
    tokens = torch.cat([once, once], dim=1)
    handles = []
    if ablate is not None:
        layer, head = ablate
        width = model.config.head_dim

        def zero_the_head(module, args):
            heads = args[0].clone()
            heads[..., head * width : (head + 1) * width] = 0
            return (heads, *args[1:])

        o_proj = model.model.layers[layer].self_attn.o_proj
        handles.append(o_proj.register_forward_pre_hook(zero_the_head))

    model.set_attn_implementation("eager")  # the implementation that returns attention patterns
    output = model(tokens, output_attentions=True)
    model.set_attn_implementation("sdpa")
    for handle in handles:
        handle.remove()

    log_probs = output.logits[:, :-1].log_softmax(-1)
    loss = -log_probs.gather(-1, tokens[:, 1:, None])[..., 0].mean(0)
    stripes = [p.diagonal(1 - length, -2, -1)[..., 1:] for p in output.attentions]
    scores = torch.stack([stripe.mean((0, 2)) for stripe in stripes])
    return loss[: length - 1].mean().item(), loss[length:].mean().item(), scores


def make_model(args: argparse.Namespace) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        max_position_embeddings=512,
        attention_bias=True,  # "attend one position back" needs no help from the token's embedding
        initializer_range=0.06,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def make_optimizers(
    model: LlamaForCausalLM, steps: int
) -> tuple[list[torch.optim.Optimizer], list[torch.optim.lr_scheduler.LRScheduler]]:
    """Muon for the layers' matrices (with AdamW alone the heads take several times longer to
    form), AdamW for the rest; warm-up over 100 steps, then a linear decay."""
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "layers" in n]
    others = [p for n, p in model.named_parameters() if p.dim() != 2 or "layers" not in n]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.1),
    ]

    def schedule(step: int) -> float:
        return min(1.0, (step + 1) / 100) * max(0.02, 1 - step / steps)

    return optimizers, [torch.optim.lr_scheduler.LambdaLR(o, schedule) for o in optimizers]


def save_tokenizer(folder: Path) -> None:
    words = models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token=SYLLABLES[0])
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def report(model: LlamaForCausalLM, console: Console) -> None:
    """Print losses, the induction score of each head, and what the loss is without that head."""
    first, second, scores = evaluate(model)
    guess = torch.tensor(float(len(VOCABULARY))).log().item()
    console.print(
        f"loss on random tokens: guessing {guess:.3f}, first copy {first:.3f}, "
        f"second copy [bold]{second:.3f}"
    )
    table = Table(title="induction score | loss on the second copy without the head")
    table.add_column("layer", justify="right")
    for head in range(scores.shape[1]):
        table.add_column(f"head {head}", justify="right")
    for layer, row in enumerate(scores.tolist()):
        cells = []
        for head, score in enumerate(row):
            without = evaluate(model, ablate=(layer, head))[1]
            cells.append(f"{'[bold]' if score > 0.5 else ''}{score:.2f} | {without:.2f}")
        table.add_row(str(layer), *cells)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = Path(__file__).resolve().parent
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rows", type=int, default=32, help="sequences per step")
    parser.add_argument("--length", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2, help="key-value heads")
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--out", type=Path, default=here / "induction_model")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    console = Console()
    language, model = Language(), make_model(args)
    optimizers, schedulers = make_optimizers(model, args.steps)
    console.print(f"{sum(p.numel() for p in model.parameters()):,} parameters")

    started = time.monotonic()
    progress = tqdm(range(args.steps), unit="step", mininterval=0.5)
    for step in progress:
        tokens = training_batch(language, args.rows, args.length, generator)
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        model.zero_grad()
        progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
        if step % 100 == 99:
            first, second, scores = evaluate(model)
            progress.write(
                f"step {step + 1:5d}  loss {loss.item():.3f}  first copy {first:.3f}  "
                f"second copy {second:.3f}  best induction score {scores.max().item():.3f}"
            )
    console.print(f"trained for {time.monotonic() - started:.0f} s")
    report(model, console)

    model.set_attn_implementation("eager")
    model.generation_config.max_length = None
    model.save_pretrained(args.out)
    save_tokenizer(args.out)
    console.print(f"saved in {args.out}")


if __name__ == "__main__":
    main()

"""Find the induction heads of a sharded language model, and take one out.

    torchrun --nproc-per-node 2 examples/induction_heads.py      # tensor parallel, two processes
    python examples/induction_heads.py                           # the same script on one

The model reads random tokens, then the same tokens again. An induction head attends from each token
of the second copy to the token that came *after* it in the first copy, and so knows what comes next
(Olsson et al. 2022, "In-context learning and induction heads"). The script

1. loads the model sharded over all processes, and unsharded on rank 0, for comparison only;
2. collects attention patterns, the heads' outputs, MLP neurons and MLP outputs, all in full, and
   compares each of them with what plain torch hooks collect on the unsharded model;
3. scores every head, zeroes the best one and a control, by their global numbers, and measures the
   loss on the second copy.

Any causal language model works: --model takes a folder or a name on the Hugging Face hub. More than
one process needs a model with a tensor-parallel plan in transformers (Llama, Qwen, Mistral, ...).
"""

import argparse
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from flex_model import FlexModel, HookFunction

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
TOLERANCE = 1e-4  # sums over shards are added in another order than unsharded ones
console = Console(quiet=RANK != 0, highlight=False)


# ---- 1. The model --------------------------------------------------------------------------------


def start_processes() -> torch.device:
    """Join the processes that torchrun started; return this one's device."""
    cuda = torch.cuda.is_available()
    if cuda and torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        raise SystemExit("fewer GPUs than processes; CUDA_VISIBLE_DEVICES= runs them on the CPU")
    device = torch.device("cpu")
    if cuda:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if WORLD_SIZE > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
    return device


def load(name: str, device: torch.device, sharded: bool) -> nn.Module:
    """Load a causal language model, split over the processes or as a whole."""
    # "eager" is the attention implementation that returns its patterns.
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    if sharded and WORLD_SIZE > 1:
        options["distributed_config"] = DistributedConfig(tp_size=WORLD_SIZE)
    return AutoModelForCausalLM.from_pretrained(name, **options).to(device).eval()


def random_text_twice(config: transformers.PretrainedConfig, args: argparse.Namespace) -> Tensor:
    """Return tokens ``(batch, 2 * length)``, or one more where texts begin with a special token."""
    generator = torch.Generator().manual_seed(args.seed)
    once = torch.randint(config.vocab_size, (args.batch, args.length), generator=generator)
    bos = config.bos_token_id
    first = [] if bos is None or bos >= config.vocab_size else [torch.full_like(once[:, :1], bos)]
    return torch.cat([*first, once, once], dim=1)


# ---- 2. Where to hook ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """One activation of the model, and the name it is collected under."""

    output_name: str
    module: str
    expected_shape: tuple[int | None, ...] | None  # of the full tensor; None: any size
    pre_hook: bool = False  # the module's input rather than its output
    unpack_idx: int = 0  # which of the tensors


@dataclass(frozen=True)
class Layer:
    """The hook points of one transformer block."""

    sites: tuple[Site, ...]
    pattern: str  # where its attention patterns are collected: (batch, heads, to, from)
    heads: Site  # what its heads found, side by side: (batch, sequence, heads * head_dim)
    head_dim: int


def child(module: nn.Module, *names: str) -> str | None:
    return next((n for n in names if isinstance(getattr(module, n, None), nn.Module)), None)


def input_width(module: nn.Module) -> int:
    """The full width a linear module reads. A sharded weight is a DTensor, with the full shape."""
    return module.weight.shape[0 if type(module).__name__ == "Conv1D" else 1]


def find_layers(model: nn.Module, num_heads: int) -> list[Layer]:
    """Find the attention and MLP modules by their names in the families of transformers."""
    layers, missing = [], set()
    for name, attention in model.named_modules():
        path, _, last = name.rpartition(".")
        if last not in ("self_attn", "attn", "attention", "self_attention"):
            continue
        mix = child(attention, "o_proj", "out_proj", "c_proj", "dense", "wo")
        if mix is None:
            missing.add(f"{name}: no output projection (o_proj, out_proj, c_proj, dense, wo)")
            continue
        width = input_width(getattr(attention, mix))
        pattern = Site(f"{path}: pattern", name, (None, num_heads, None, None), unpack_idx=1)
        heads = Site(f"{path}: heads", f"{name}.{mix}", (None, None, width), pre_hook=True)
        sites = [pattern, heads]
        block = model.get_submodule(path)
        mlp = child(block, "mlp", "feed_forward", "ffn", "block_sparse_moe")
        if mlp is None:
            missing.add(f"{path}: no MLP (mlp, feed_forward, ffn, block_sparse_moe)")
        else:
            sites.append(Site(f"{path}: mlp", f"{path}.{mlp}", None))
            down = child(getattr(block, mlp), "down_proj", "c_proj", "dense_4h_to_h", "fc2", "w2")
            if down is None:
                missing.add(f"{path}.{mlp}: no projection back (down_proj, c_proj, fc2, w2, ...)")
            else:
                width_of_mlp = input_width(getattr(getattr(block, mlp), down))
                shape = (None, None, width_of_mlp)
                sites.append(Site(f"{path}: neurons", f"{path}.{mlp}.{down}", shape, pre_hook=True))
        layers.append(Layer(tuple(sites), pattern.output_name, heads, width // num_heads))
    for what in sorted(missing):
        console.print(f"[yellow]skipped {what}")
    if not layers:
        raise SystemExit(
            f"found no attention module in {type(model).__name__}: no module is named self_attn, "
            "attn, attention or self_attention and has an output projection"
        )
    return layers


# ---- 3. Collecting and editing, sharded and not --------------------------------------------------


def zero_head(layer: Layer, head: int) -> Callable:
    """Make an editing function that zeroes one head, numbered over all shards."""

    def edit(module, inputs, save_ctx, modules):
        inputs[..., head * layer.head_dim : (head + 1) * layer.head_dim] = 0
        return inputs

    return edit


def register(flex: FlexModel, site: Site, group: str, edit: Callable | None = None) -> None:
    hook = HookFunction(
        site.module,
        site.expected_shape,
        edit,
        unpack_idx=site.unpack_idx,
        output_name=site.output_name,
    )
    if site.pre_hook:
        flex.register_forward_pre_hook(hook)
    else:
        flex.register_forward_hook(hook)
    flex.update_hook_groups([hook], group)


@contextmanager
def plain_torch_hooks(model: nn.Module, sites: list[Site], records: dict[str, Tensor]):
    """Collect the sites of an unsharded model the way one does without flex_model."""

    def hook_for(site: Site):
        def forward(module, args, output):
            leaves = output if isinstance(output, tuple) else (output,)
            records[site.output_name] = leaves[site.unpack_idx].detach().cpu()

        def forward_pre(module, args):
            records[site.output_name] = args[site.unpack_idx].detach().cpu()

        module = model.get_submodule(site.module)
        if site.pre_hook:
            return module.register_forward_pre_hook(forward_pre)
        return module.register_forward_hook(forward)

    handles = [hook_for(site) for site in sites]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def unsharded_losses(
    model: nn.Module, tokens: Tensor, ablation: tuple[Layer, int] | None
) -> Tensor:
    """The losses of the unsharded model, with a head zeroed by a plain torch hook."""
    if ablation is None:
        return losses(model(tokens).logits, tokens)
    layer, head = ablation
    columns = slice(head * layer.head_dim, (head + 1) * layer.head_dim)

    def zero(module, args):
        heads = args[0].clone()
        heads[..., columns] = 0
        return (heads, *args[1:])

    handle = model.get_submodule(layer.heads.module).register_forward_pre_hook(zero)
    try:
        return losses(model(tokens).logits, tokens)
    finally:
        handle.remove()


# ---- 4. What is measured -------------------------------------------------------------------------


def losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean loss in nats by position, ``(sequence - 1,)``, on the CPU."""
    log_probs = logits[:, :-1].float().log_softmax(-1)
    return -log_probs.gather(-1, tokens[:, 1:, None])[..., 0].mean(0).cpu()


def induction_scores(pattern: Tensor, length: int) -> Tensor:
    """Mean attention of each head, ``(heads,)``, from a token of the second copy, at t, to the one
    after the same token in the first copy, at t - length + 1."""
    stripe = pattern.float().diagonal(offset=1 - length, dim1=-2, dim2=-1)  # from t = length - 1 on
    return stripe[..., -length:].mean((0, 2))


def choose_heads(scores: Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
    """The best head, and as control the one with the lowest score in its layer or a later one.

    Earlier layers hold the heads that induction is built on, such as previous-token heads.
    """
    layer, best = divmod(int(scores.argmax()), scores.shape[1])
    below, control = divmod(int(scores[layer:].argmin()), scores.shape[1])
    return (layer, best), (layer + below, control)


def compare(sharded: dict[str, list[Tensor]], unsharded: dict[str, Tensor]) -> list[str]:
    """Return one line for each activation that differs."""
    wrong = []
    for name, expected in unsharded.items():
        (full,) = sharded.get(name) or (None,)
        if full is None or full.shape != expected.shape:
            got = "nothing" if full is None else tuple(full.shape)
            wrong.append(f"{name}: expected {tuple(expected.shape)}, collected {got}")
            continue
        error = (full - expected).abs().max().item()
        if not error <= TOLERANCE * max(1.0, expected.abs().max().item()):
            wrong.append(f"{name}: off by up to {error:.2e}")
    return wrong


# ---- 5. What is shown ----------------------------------------------------------------------------


def draw(
    path: Path, scores: Tensor, best, control, pattern: Tensor, runs: dict[str, Tensor], length
):
    colors = dict(zip(runs, ("#4c72b0", "#c44e52", "#8c8c8c"), strict=True))
    figure, ((heat, attention), (curve, bars)) = plt.subplots(
        2, 2, figsize=(11, 8.5), layout="constrained"
    )
    image = heat.imshow(scores, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    figure.colorbar(image, ax=heat)
    if scores.numel() <= 256:
        for (layer, head), score in zip(
            torch.cartesian_prod(*map(torch.arange, scores.shape)).tolist(),
            scores.flatten().tolist(),
            strict=True,
        ):
            color = "black" if score > 0.6 else "white"
            heat.text(head, layer, f"{score:.2f}", ha="center", va="center", color=color)
    for (layer, head), label in ((best, "best"), (control, "control")):
        color = colors[f"{label} head zeroed"]
        box = plt.Rectangle((head - 0.5, layer - 0.5), 1, 1, fill=False, ec=color, lw=3)
        heat.add_patch(box)
    heat.set(title="Induction score", xlabel="head", ylabel="layer")
    heat.xaxis.get_major_locator().set_params(integer=True)
    heat.yaxis.get_major_locator().set_params(integer=True)

    attention.imshow(pattern.sqrt(), cmap="Blues", vmin=0, vmax=1)
    attention.axhline(pattern.shape[0] - length - 0.5, color="#c44e52", lw=0.8, ls="--")
    attention.set(
        title=f"Attention of layer {best[0]} head {best[1]} (square root)",
        xlabel="from position",
        ylabel="to position (second copy below the line)",
    )
    for name, loss in runs.items():
        curve.plot(range(1, len(loss) + 1), loss, color=colors[name], label=name)
    curve.axvline(len(runs["clean"]) - length + 0.5, color="black", lw=0.8, ls="--")
    curve.set(title="Loss by position (second copy right of the line)", ylim=(0, None))
    curve.set(xlabel="position", ylabel="nats")
    curve.legend(loc="lower left")

    means = [loss[-(length - 1) :].mean().item() for loss in runs.values()]
    bars.bar_label(bars.bar(list(runs), means, color=list(colors.values())), fmt="%.3f")
    bars.set(title="Loss on the second copy", ylabel="nats")
    for axes in (curve, bars):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


# ---- The experiment ------------------------------------------------------------------------------


@torch.no_grad()
def main(args: argparse.Namespace) -> int:
    steps = tqdm(total=6, disable=RANK != 0, leave=False, bar_format="{desc:<40}{bar:30}")

    def step(what: str) -> None:
        steps.update()
        steps.set_description_str(what)

    step("starting the processes")
    device = start_processes()
    config = AutoConfig.from_pretrained(args.model).get_text_config()
    num_heads = getattr(config, "num_attention_heads", None)
    if num_heads is None:
        raise SystemExit(f"{args.model}: its {config.model_type} config has no num_attention_heads")
    num_key_value_heads = getattr(config, "num_key_value_heads", None) or num_heads
    if num_heads % WORLD_SIZE or num_key_value_heads % WORLD_SIZE:
        raise SystemExit(
            f"{num_heads} heads and {num_key_value_heads} key-value heads can't be split evenly "
            f"over {WORLD_SIZE} processes; start a number of processes that divides both"
        )
    step("loading the model")
    model = load(args.model, device, sharded=True)
    reference = load(args.model, device, sharded=False) if RANK == 0 else None
    tokens = random_text_twice(config, args).to(device)

    # Collect. The names of modules and the numbers of heads are those of the unsharded model.
    activations: dict[str, list[Tensor]] = {}
    flex = FlexModel(model, activations, tensor_parallel_size=WORLD_SIZE)
    layers = find_layers(model, num_heads)
    sites = [site for layer in layers for site in layer.sites]
    for site in sites:
        register(flex, site, group="collect")
    step(f"collecting {len(sites)} activations")
    runs = {"clean": losses(flex(tokens, groups=["collect"]).logits, tokens)}

    # Score the heads where the activations are, on rank 0, and tell the others which to take out.
    chosen = [None, None]
    if RANK == 0:
        patterns = [activations[layer.pattern][0] for layer in layers]
        scores = torch.stack([induction_scores(pattern, args.length) for pattern in patterns])
        chosen = list(choose_heads(scores))
    if WORLD_SIZE > 1:
        dist.broadcast_object_list(chosen)
    best, control = chosen

    # Edit.
    heads_zeroed = {"best head zeroed": best, "control head zeroed": control}
    for name, (layer, head) in heads_zeroed.items():
        step(name)
        site = replace(layers[layer].heads, output_name=name)
        register(flex, site, group=name, edit=zero_head(layers[layer], head))
        runs[name] = losses(flex(tokens, groups=[name]).logits, tokens)

    # Every rank has the whole output of the model: they must agree.
    of_rank = [runs] * WORLD_SIZE
    if WORLD_SIZE > 1:
        dist.all_gather_object(of_rank, runs)
    if RANK != 0:
        return 0

    step("comparing with the unsharded model")
    expected: dict[str, Tensor] = {}
    with plain_torch_hooks(reference, sites, expected):
        unsharded = {"clean": unsharded_losses(reference, tokens, None)}
    for name, (layer, head) in heads_zeroed.items():
        unsharded[name] = unsharded_losses(reference, tokens, (layers[layer], head))
    wrong = compare(activations, expected)
    for rank, theirs in enumerate(of_rank):
        wrong += [
            f"rank {rank}: {line}"
            for line in compare({k: [v] for k, v in theirs.items()}, unsharded)
        ]
    draw(args.out, scores, best, control, patterns[best[0]][0][best[1]], runs, args.length)
    steps.close()

    world = "one process" if WORLD_SIZE == 1 else f"{WORLD_SIZE} tensor-parallel processes"
    console.print(
        f"{type(model).__name__}: {len(layers)} layers of {num_heads} heads, {world}, {device.type}"
    )
    megabytes = sum(full.nbytes for full in expected.values()) / 1e6
    console.print(f"{len(expected)} activations collected in full, {megabytes:.1f} MB")
    table = Table("run", "layer", "head", "score", "loss", "unsharded loss")
    table.title, table.title_justify = "loss on the second copy, in nats", "left"
    for name, loss in runs.items():
        layer, head = heads_zeroed.get(name, ("", ""))
        score = "" if layer == "" else f"{scores[layer, head]:.3f}"
        repeated = slice(-(args.length - 1), None)
        mean, mean_unsharded = (x[repeated].mean().item() for x in (loss, unsharded[name]))
        table.add_row(name, str(layer), str(head), score, f"{mean:.4f}", f"{mean_unsharded:.4f}")
    console.print(table)
    console.print(f"picture: {args.out}")
    if wrong:
        console.print("different from the unsharded model:", *wrong, sep="\n  ")
        return 1
    console.print("all activations equal to the unsharded model")
    return 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = Path(__file__).resolve().parent
    parser.add_argument("--model", default=str(here / "induction_model"), help="folder or hub name")
    parser.add_argument("--batch", type=int, default=16, help="sequences")
    parser.add_argument("--length", type=int, default=32, help="tokens before they are repeated")
    parser.add_argument("--seed", type=int, default=0, help="of the random tokens")
    parser.add_argument("--out", type=Path, default=Path("induction_heads.png"), help="PNG file")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    status = 1
    try:
        status = main(arguments)
        if dist.is_initialized():
            dist.barrier()
    except SystemExit as stop:
        console.print(f"[red]{stop}")
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # the threads of gloo may abort an ordinary exit

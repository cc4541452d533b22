"""Four experiments in a few lines each, the same on one process and on a sharded model.

    python examples/recipes.py
    torchrun --nproc-per-node 2 examples/recipes.py                # tensor parallel
    torchrun --nproc-per-node 2 examples/recipes.py --pipeline     # two stages, two micro-batches

1. Find the best induction head, and take it out. 2. Steer what the model writes. 3. Patch each
layer and position of a corrupted run with the clean one. 4. Read each layer with the logit lens.
The numbers are compared with those of the unsharded model. (The model: train_induction_model.py.)
"""

import argparse
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from rich.console import Console
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

from flex_model import FlexModel, HookFunction, editing
from flex_model.pipelining import ScheduleGPipe, SplitPoint, pipeline

MODEL = str(Path(__file__).resolve().parent / "induction_model")
LENGTH = 16  # tokens before they are repeated
console = Console(quiet=int(os.environ.get("RANK", 0)) != 0, highlight=False)


def load(name: str, sharding: str = "none", process_group=None) -> FlexModel:
    """A Llama-like model on one process ("none"), tensor parallel ("tp") or as a pipeline ("pp").

    Records and, from a pipeline, outputs are kept on every rank here, so that all ranks can decide
    by them what to do next.
    """
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    if sharding == "tp":
        options["distributed_config"] = DistributedConfig(tp_size=dist.get_world_size())
    model = AutoModelForCausalLM.from_pretrained(name, **options).eval()
    if sharding != "pp":
        return FlexModel(model, {}, process_group=process_group, output_ranks="all")
    middle = f"model.layers.{model.config.num_hidden_layers // 2}"
    example = torch.zeros(1, LENGTH, dtype=torch.int64)
    pipe = pipeline(model, (example,), split_spec={middle: SplitPoint.BEGINNING})
    schedule = ScheduleGPipe(pipe.build_stage(dist.get_rank(), torch.device("cpu")), 2)
    return FlexModel(schedule, {}, output_ranks="all", return_on="all")


def logits_of(flex: FlexModel, tokens: Tensor) -> Tensor:
    output = flex(tokens)
    return getattr(output, "logits", output)  # a pipeline gives the tensor itself


def loss_of_second_copy(flex: FlexModel, tokens: Tensor) -> float:
    predicted = logits_of(flex, tokens)[:, LENGTH:-1].flatten(0, 1)
    return F.cross_entropy(predicted, tokens[:, LENGTH + 1 :].flatten()).item()


def write(flex: FlexModel, tokens: Tensor, new: int) -> Tensor:
    """``new`` further tokens, the likeliest each time.

    A pipeline's stages can't run ``generate()``: its schedule takes a batch from the first stage to
    the last, and there is no cache. Each token is a step over the whole text there.
    """
    if flex.pp_size == 1:
        return flex.generate(tokens, max_new_tokens=new, do_sample=False)[:, tokens.shape[1] :]
    start = tokens.shape[1]
    for _ in range(new):
        following = logits_of(flex, tokens)[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, following], 1)
    return tokens[:, start:]


def random_text_twice(rows: int = 4, vocabulary: int = 240) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (rows, LENGTH), generator=generator).repeat(1, 2)


# ---- The four experiments ------------------------------------------------------------------------


def ablate_induction_head(flex: FlexModel, tokens: Tensor, layers: int, heads: int) -> dict:
    """Zero the head that attends most from each token to the one after its first occurrence."""
    attentions = [f"model.layers.{i}.self_attn" for i in range(layers)]
    shape = (None, heads, None, None)  # of attention patterns: (rows, heads, to, from)
    looking = [
        flex.register_forward_hook(HookFunction(name, shape, unpack_idx=1)) for name in attentions
    ]
    before = loss_of_second_copy(flex, tokens)
    patterns = torch.stack([flex.output_ptr[name][0] for name in attentions])
    stripe = patterns.diagonal(offset=1 - LENGTH, dim1=-2, dim2=-1)[..., -LENGTH:]
    scores = stripe.mean((1, 3))  # (layers, heads)
    layer, head = divmod(int(scores.argmax()), heads)
    for hook in looking:
        hook.remove()
    edit = editing.zero(heads=head, num_heads=heads)
    with flex.register_forward_pre_hook(edit.at(f"{attentions[layer]}.o_proj")):
        after = loss_of_second_copy(flex, tokens)
    return {"scores": scores, "layer": layer, "head": head, "before": before, "after": after}


def steer(flex: FlexModel, prompts: Tensor, towards: Tensor, away: Tensor, new: int) -> dict:
    """Add the difference of two texts' mean activations while the model writes."""
    means = []
    with flex.register_forward_hook(HookFunction("model.layers.1")):
        for text in (towards, away):
            logits_of(flex, text)
            means.append(flex.output_ptr["model.layers.1"][0].mean((0, 1)))
    before = write(flex, prompts, new)
    edit = editing.steer(means[0] - means[1], strength=1.5)
    with flex.register_forward_hook(edit.at("model.layers.1")):
        after = write(flex, prompts, new)
    return {"before": before, "after": after}


def patch_heat_map(flex: FlexModel, tokens: Tensor, layers: int) -> editing.PatchingMap:
    """The last token of ``tokens`` was followed by another token in its first copy. Where does the
    model keep which one it was?
    """
    clean, answer = tokens[:, :-1], tokens[:, LENGTH - 1]
    corrupted = clean.clone()
    corrupted[:, LENGTH - 1] = wrong = (answer + 1) % 240

    def logit_difference(logits: Tensor) -> Tensor:
        rows = torch.arange(len(answer))
        return (logits[rows, -1, answer] - logits[rows, -1, wrong]).mean()

    sites = [f"model.layers.{i}" for i in range(layers)]
    return editing.activation_patching(
        flex, clean, corrupted, sites, logit_difference, output="lm_head"
    )


def logit_lens(flex: FlexModel, tokens: Tensor, layers: int, eps: float) -> Tensor | None:
    """By layer and position, the probability of the token that comes next."""
    lens = editing.logit_lens("lm_head.weight", norm="model.norm.weight", eps=eps)
    hooks = [flex.register_forward_hook(lens.at(f"model.layers.{i}")) for i in range(layers)]
    logits_of(flex, tokens)
    for hook in hooks:
        hook.remove()
    read = lens.take(flex)  # {layer: [logits]}; in a pipeline on rank 0
    if not read:
        return None
    logits = torch.stack([read[f"model.layers.{i}"][0] for i in range(layers)])
    following = tokens[:, 1:, None].expand(layers, -1, -1, -1)
    return logits[:, :, :-1].softmax(-1).gather(-1, following)[..., 0].mean(1)


# ---- All of them, beside the unsharded model -----------------------------------------------------


@torch.no_grad()
def run_all(flex: FlexModel, name: str) -> dict[str, dict[str, Tensor]]:
    config, tokenizer = AutoConfig.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    layers, tokens = config.num_hidden_layers, random_text_twice()

    def encode(*texts: str) -> Tensor:
        return tokenizer(list(texts), return_tensors="pt").input_ids

    prompts = encode("by za ju qu no qe pa my ce zy fe", "ka my by ze ju ta ve ci pa ro se")
    upper = encode("CY MA XY MU WE RO GO SE", "FO RE HA LU CY MA XY MU")
    lower = encode("cy ma xy mu we ro go se", "fo re ha lu cy ma xy mu")
    found = {
        "induction": ablate_induction_head(flex, tokens, layers, config.num_attention_heads),
        "steering": steer(flex, prompts, upper, lower, new=8),
    }
    patched = patch_heat_map(flex, tokens, layers)
    found["patching"] = {"recovered": patched.recovered}
    found["lens"] = {"probability": logit_lens(flex, tokens, layers, config.rms_norm_eps)}
    texts = {key: tokenizer.batch_decode(text)[0] for key, text in found["steering"].items()}
    console.print(
        "induction head {layer}.{head}: loss {before:.3f}, without it {after:.3f}".format(
            **found["induction"]
        )
    )
    console.print(f"writes {texts['before']!r}, steered {texts['after']!r}")
    for what, values in (
        ("recovered by patching", patched.recovered),
        ("probability of the next token", found["lens"]["probability"]),
    ):
        if values is not None:
            console.print(f"{what}, by layer, at the position where it is largest:")
            console.print("  " + " ".join(f"{row.max():.2f}@{row.argmax()}" for row in values))
    return found


def is_equal(found: dict, expected: dict) -> bool:
    return all(
        torch.allclose(
            torch.as_tensor(value).double(),
            torch.as_tensor(expected[experiment][key]).double(),
            rtol=1e-3,
            atol=1e-4,
        )
        for experiment, values in found.items()
        for key, value in values.items()
    )


def main(args: argparse.Namespace) -> int:
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if args.pipeline and world_size == 1:
        raise SystemExit("a pipeline needs two processes: torchrun --nproc-per-node 2 ...")
    alone = None
    if world_size > 1:
        dist.init_process_group("gloo")
        alone = [dist.new_group([rank]) for rank in range(world_size)][dist.get_rank()]
    with load(args.model, process_group=alone) as flex:
        console.print("unsharded")
        expected = run_all(flex, args.model)
    if world_size == 1:
        return 0
    sharding = "pp" if args.pipeline else "tp"
    with load(args.model, sharding) as flex:
        console.print(f"{sharding}, {world_size} processes")
        found = run_all(flex, args.model)
    found["lens"] = {key: value for key, value in found["lens"].items() if value is not None}
    same = is_equal(found, expected)
    console.print("equal to the unsharded model" if same else "different from the unsharded model")
    return 0 if same else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=MODEL, help="folder or hub name of a Llama-like model")
    parser.add_argument("--pipeline", action="store_true", help="stages instead of shards")
    arguments = parser.parse_args()
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

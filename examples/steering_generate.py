"""Steer what a model writes: add a direction to one layer's activations while it generates.

    python examples/steering_generate.py
    torchrun --nproc-per-node 2 examples/steering_generate.py      # the same text, tensor parallel

The direction is the difference between a layer's mean activations on two texts. The model of these
examples writes syllables in lower or in UPPER case and keeps to one; the direction from one case to
the other makes it change over. (How the model was made: train_induction_model.py.)
"""

import argparse
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from rich.console import Console
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

from flex_model import FlexModel, HookFunction

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
console = Console(quiet=RANK != 0, highlight=False)


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
    options = {"dtype": torch.float32}
    if sharded and WORLD_SIZE > 1:
        options["distributed_config"] = DistributedConfig(tp_size=WORLD_SIZE)
    return AutoModelForCausalLM.from_pretrained(name, **options).to(device).eval()


def unsharded_generate(
    model: nn.Module, layer: str, edit, tokens: Tensor, settings: dict
) -> Tensor:
    """Generate with the same edit, by a plain torch hook on the unsharded model."""

    def hook(module, args, output):
        # Layers return their tensor, or a tuple that begins with it.
        if isinstance(output, tuple):
            return (edit(module, output[0], None, None), *output[1:])
        return edit(module, output, None, None)

    handle = model.get_submodule(layer).register_forward_hook(hook)
    generated = model.generate(tokens, **settings)
    handle.remove()
    return generated


@torch.no_grad()
def main(args: argparse.Namespace) -> int:
    device = start_processes()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = load(args.model, device, sharded=True)
    reference = load(args.model, device, sharded=False)

    def encode(text: str) -> Tensor:
        return tokenizer(text, return_tensors="pt").input_ids.to(device)

    # Records go to rank 0 alone by default; here every process computes the direction from them.
    activations: dict[str, list[Tensor]] = {}
    flex = FlexModel(model, activations, tensor_parallel_size=WORLD_SIZE, output_ranks="all")
    collecting = flex.register_forward_hook(HookFunction(args.layer))

    def mean_activation(text: str) -> Tensor:
        flex(encode(text))
        return activations[args.layer][0].mean((0, 1)).to(device)  # (batch, sequence, hidden)

    direction = mean_activation(args.towards) - mean_activation(args.away_from)
    collecting.remove()

    def steer(module, inputs, save_ctx, modules):
        return inputs + args.strength * direction

    prompt = encode(args.prompt)
    settings = {
        "max_new_tokens": args.new_tokens,
        "do_sample": False,
        "attention_mask": torch.ones_like(prompt),
    }
    before = flex.generate(prompt, **settings)
    # The hook is live whenever the model runs, at each step of generate() too.
    flex.register_forward_hook(HookFunction(args.layer, editing_function=steer))
    after = flex.generate(prompt, **settings)

    expected_before = reference.generate(prompt, **settings)
    expected_after = unsharded_generate(reference, args.layer, steer, prompt, settings)
    new = slice(prompt.shape[1], None)
    console.print(f"prompt   {tokenizer.decode(prompt[0])}")
    console.print(f"before   {tokenizer.decode(before[0, new])}")
    console.print(f"steered  {tokenizer.decode(after[0, new])}")
    same = torch.equal(before, expected_before) and torch.equal(after, expected_after)
    console.print(f"{'the same tokens as' if same else 'other tokens than'} the unsharded model")
    return 0 if same else 1


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = Path(__file__).resolve().parent
    parser.add_argument("--model", default=str(here / "induction_model"), help="folder or hub name")
    parser.add_argument("--layer", default="model.layers.1", help="module whose output is steered")
    parser.add_argument("--strength", type=float, default=1.5, help="multiple of the direction")
    parser.add_argument(
        "--towards", default="CY MA XY MU WE RO GO SE FO RE HA LU", help="text in the wanted manner"
    )
    parser.add_argument(
        "--away-from",
        default="cy ma xy mu we ro go se fo re ha lu",
        help="text in the unwanted manner",
    )
    parser.add_argument("--prompt", default="by za ju qu no qe pa my ce zy fe")
    parser.add_argument("--new-tokens", type=int, default=16)
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

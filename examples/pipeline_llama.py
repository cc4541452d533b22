"""Hooks on a Llama that runs as a pipeline: two stages on two processes, in micro-batches.

    torchrun --nproc-per-node 2 examples/pipeline_llama.py

torch.distributed.pipelining splits a model into stages and runs micro-batches through them. The
hooks below have the names of the unsplit model, whichever process has the module; what they see is
put together again from the micro-batches, and compared with the same model in one piece.
"""

import argparse
import copy
import os
import sys
import traceback

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from flex_model import FlexModel, HookFunction
from flex_model.pipelining import Schedule1F1B, ScheduleGPipe, SplitPoint, pipeline

LOOKED_AT = ["model.embed_tokens", "model.layers.1.self_attn", "model.layers.3.mlp.down_proj"]
EDITED = "model.layers.2.mlp"
GRADIENT = "model.layers.1.mlp"
WEIGHT = "model.layers.3.self_attn.q_proj.weight"


def mean_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def mix_features(module, inputs, save_ctx, modules):
    return (inputs + inputs.flip(-1)) / 2


def unsplit(model: LlamaForCausalLM, tokens: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """The expected values, by plain torch hooks on the whole model."""
    model, found = copy.deepcopy(model), {}

    def note(name):
        def hook(module, args, output):
            found[name] = (output[0] if isinstance(output, tuple) else output).detach().clone()
            return mix_features(module, output, None, None) if name == EDITED else None

        return hook

    for name in (*LOOKED_AT, EDITED):
        model.get_submodule(name).register_forward_hook(note(name))
    model.get_submodule(GRADIENT).register_full_backward_pre_hook(
        lambda module, grad: found.update({f"{GRADIENT}.grad": grad[0].detach().clone()})
    )
    logits = model(tokens, attention_mask=mask).logits
    loss = mean_loss(logits, tokens)
    loss.backward()
    return found | {
        "logits": logits,
        "loss": loss,
        f"gradient of {WEIGHT}": model.get_parameter(WEIGHT).grad,
    }


def main(args: argparse.Namespace) -> int:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)  # the same model and the same batch everywhere
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).eval()
    tokens = torch.randint(256, (args.rows, 24))
    mask = torch.ones_like(tokens)
    mask[-1, -5:] = 0  # one sequence is padded
    expected = unsplit(model, tokens, mask)

    table = Table("schedule", "what", "shape", "largest difference")
    equal = True
    for schedule in (ScheduleGPipe, Schedule1F1B):
        pipe = pipeline(
            copy.deepcopy(model),
            (tokens[:2],),
            {"attention_mask": mask[:2]},
            split_spec={"model.layers.2": SplitPoint.BEGINNING},
        )
        stage = pipe.build_stage(rank, torch.device("cpu"))
        activations: dict[str, list[Tensor]] = {}
        losses: list[Tensor] = []
        with FlexModel(
            schedule(stage, args.microbatches, loss_fn=mean_loss), activations, return_on="all"
        ) as flex:
            for name in LOOKED_AT:
                flex.register_forward_hook(HookFunction(name))
            flex.register_forward_hook(HookFunction(EDITED, editing_function=mix_features))
            flex.register_full_backward_pre_hook(
                HookFunction(GRADIENT, output_name=f"{GRADIENT}.grad")
            )
            # One step: forward and backward of all micro-batches through both stages.
            logits = flex(tokens, attention_mask=mask, target=tokens, losses=losses)
            found = {name: records[0] for name, records in activations.items()}  # on rank 0
            found |= {
                "logits": logits,
                f"gradient of {WEIGHT}": flex.get_module_gradient(WEIGHT),  # collective
            }
            if losses:  # on the rank of the last stage
                found["loss"] = torch.stack(losses).mean()
        rows = []
        for name, value in found.items():
            want = expected[name]
            same_shape = value.shape == want.shape
            error = (value - want).abs().max().item() if same_shape else float("inf")
            equal &= error <= 1e-5
            rows.append([schedule.__name__, name, str(tuple(value.shape)), f"{error:.0e}"])
        rows_of_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(rows_of_ranks, rows)
        told = {row[1]: row for rows in reversed(rows_of_ranks) for row in rows}
        for name in expected:
            table.add_row(*told[name])

    equal_on_rank = [None] * dist.get_world_size()
    dist.all_gather_object(equal_on_rank, equal)
    if rank == 0:
        console = Console(highlight=False)
        console.print(table)
        console.print(
            "activations, loss and gradients are equal to the unsplit model's"
            if all(equal_on_rank)
            else "different from the unsplit model"
        )
    return 0 if all(equal_on_rank) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=8, help="sequences in the batch")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if os.environ.get("WORLD_SIZE") != "2":
        parser.error("start it with: torchrun --nproc-per-node 2 examples/pipeline_llama.py")
    status = 1
    try:
        status = main(arguments)
        dist.barrier()
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # the threads of gloo may abort an ordinary exit

"""Hooks on a model sharded with FSDP2 (`fully_shard`): the global batch, gradients, parameters.

    torchrun --nproc-per-node 2 examples/fsdp2.py

Under data parallelism each process sees its own rows of the batch and, with FSDP, holds a part of
each parameter. The hooks below see the rows of all processes in one tensor, may mix them, and
parameters are read in full. Everything is compared with the same model, unsharded, on the whole
batch.
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
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from flex_model import FlexModel, HookFunction

MLP = "model.layers.1.mlp"
WEIGHT = "model.layers.2.self_attn.q_proj.weight"


def mean_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def mix_rows(module, inputs, save_ctx, modules):
    """Exchange half of each row with the row after it: rows of other processes among them."""
    return (inputs + inputs.roll(1, dims=0)) / 2


def unsharded(model: LlamaForCausalLM, tokens: Tensor) -> dict[str, Tensor]:
    """The expected values, by plain torch hooks on a model that is whole."""
    mlp, found = model.get_submodule(MLP), {}

    def forward_hook(module, args, output):
        found["activation"] = output.detach().clone()
        return mix_rows(module, output, None, None)

    def backward_pre_hook(module, grad_output):
        found["gradient"] = grad_output[0].detach().clone()

    handles = [
        mlp.register_forward_hook(forward_hook),
        mlp.register_full_backward_pre_hook(backward_pre_hook),
    ]
    found["logits"] = model(tokens).logits
    mean_loss(found["logits"], tokens).backward()
    for handle in handles:
        handle.remove()
    found["parameter"] = model.get_parameter(WEIGHT).detach()
    found["parameter's gradient"] = model.get_parameter(WEIGHT).grad
    return found


def full(tensor: Tensor) -> Tensor:
    """A DTensor's global value (collective)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def main(args: argparse.Namespace) -> int:
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device_mesh = dist.init_device_mesh(device.type, (world_size,))

    torch.manual_seed(args.seed)  # the same model and the same batch everywhere
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    reference = LlamaForCausalLM(config).to(device)
    tokens = torch.randint(256, (args.rows * world_size, 24)).to(device)
    my_rows = slice(rank * args.rows, (rank + 1) * args.rows)

    model = copy.deepcopy(reference)
    for layer in model.model.layers:
        fully_shard(layer, mesh=device_mesh)
    fully_shard(model, mesh=device_mesh)

    activations: dict[str, list[Tensor]] = {}
    flex = FlexModel(model, activations, data_parallel_size=world_size)
    # The second hook records under another name: two hooks cannot write one.
    flex.register_forward_hook(HookFunction(MLP, editing_function=mix_rows))
    flex.register_full_backward_pre_hook(HookFunction(MLP, output_name=f"{MLP}.grad"))

    # Each process runs its own rows; FSDP averages the gradients over the processes.
    logits = flex(tokens[my_rows]).logits
    mean_loss(logits, tokens[my_rows]).backward()
    parameter = flex.get_module_parameter(WEIGHT)  # collective, on the CPU
    parameter_gradient = full(model.get_parameter(WEIGHT).grad)

    # Records are on rank 0. The other values are there on every rank, and the logits of its rows.
    expected = unsharded(reference, tokens)
    rows = [
        ("parameter", parameter, expected["parameter"]),
        ("parameter's gradient", parameter_gradient, expected["parameter's gradient"]),
        ("edited logits, own rows", logits, expected["logits"][my_rows]),
    ]
    if rank == 0:
        rows[:0] = [
            ("activation, global batch", activations[MLP][0], expected["activation"]),
            ("gradient, global batch", activations[f"{MLP}.grad"][0], expected["gradient"]),
        ]
    table = Table("what", "shape", "largest value", "largest difference")
    equal = True
    for what, got, want in rows:
        got, want = got.detach().cpu(), want.detach().cpu()
        error = (got - want).abs().max().item() if got.shape == want.shape else float("inf")
        largest = want.abs().max().item()
        equal &= largest > 0 and error <= 1e-4 * largest
        table.add_row(what, str(tuple(got.shape)), f"{largest:.1e}", f"{error:.1e}")

    equal_on_rank = [None] * world_size
    dist.all_gather_object(equal_on_rank, equal)
    if rank == 0:
        console = Console(highlight=False)
        console.print(table)
        wrong = [r for r, same in enumerate(equal_on_rank) if not same]
        console.print(
            f"different from the unsharded model on ranks {wrong}"
            if wrong
            else "equal to the unsharded model"
        )
    return 0 if all(equal_on_rank) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=3, help="sequences per process")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if "WORLD_SIZE" not in os.environ:
        parser.error("start it with: torchrun --nproc-per-node 2 examples/fsdp2.py")
    status = 1
    try:
        status = main(arguments)
        dist.barrier()
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # the threads of gloo may abort an ordinary exit

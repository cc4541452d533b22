"""One step of training, twice in one process: on the unsharded twin under torch's hooks, and on
this rank's rows under FlexModel. All that must be equal is in a `Step`.
"""

import copy
import re
import warnings
from argparse import Namespace
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import models
from flex_model import FlexModel, HookFunction
from oracle import Hook, torch_hook
from shared_edits import mixing, mixing_features
from training_models import TRANSLATED

TOLERANCE = 1e-5  # of the largest: transformers computes losses and some norms in float32
SHARDINGS = ("ddp", "fsdp2")


#: What is equal on the twin and on the ranks, by name.
Step = dict[str, Tensor | None]


def step(loss, records, site_gradients, gradients) -> Step:
    found = {"loss": loss, "record": torch.cat(records)}
    found["gradient of the site's output"] = torch.cat(site_gradients)
    return found | {f"gradient of {name}": gradient for name, gradient in gradients.items()}


# ---- Batches and losses --------------------------------------------------------------------------


def rows_of(batch: dict, part: int, parts: int) -> dict:
    return {
        name: value.chunk(parts)[part] if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }


def my_rows(batch: dict) -> dict:
    return rows_of(batch, dist.get_rank(), dist.get_world_size())


def by_the_model(call: Callable, batch: dict) -> Tensor:
    """``labels=`` are the model's to use."""
    return call(**batch).loss


def outside(call: Callable, batch: dict) -> Tensor:
    """The loss is the user's, of what the model returns."""
    inputs = {n: value for n, value in batch.items() if n not in ("labels", "return_loss")}
    if "labels" in batch and batch["labels"].shape[1:] == (TRANSLATED,):  # a decoder reads them
        inputs["decoder_input_ids"] = batch["labels"]
    output = call(**inputs)
    if "return_loss" in batch:
        return (output.text_embeds * output.image_embeds).sum(-1).sin().mean()
    logits, labels = output.logits, batch["labels"]
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


LOSSES = {"labels given": by_the_model, "loss outside": outside}


# ---- What the hook does --------------------------------------------------------------------------


def with_probe(module, full, save_ctx, modules):
    return full + modules["probe"](full)


def probe_of(width: int) -> nn.Module:
    return models.seeded(nn.Linear, width, width, seed=5).double()


def mixing_with_probe(module, full, save_ctx, modules):
    return with_probe(module, mixing(module, full, save_ctx, modules), save_ctx, modules)


# ---- The twin ------------------------------------------------------------------------------------


def twin_step(model, site, batches, edit, loss, probe=None) -> Step:
    """``batches``: of which the loss is the mean: one batch, or what each rank has."""
    records, site_gradients, total = [], [], 0.0
    modules = nn.ModuleDict({"probe": probe} if probe is not None else {})

    def see(value):
        if torch._C._current_graph_task_id() == -1:  # not where it is computed once more
            records.append(value.detach().clone())
        edited = edit(None, value.clone(), Namespace(), modules).clone()
        edited.register_hook(lambda grad: site_gradients.append(grad.clone()))
        return edited

    with torch_hook(model, Hook("forward", site), see):
        for batch in batches:
            one = loss(model, batch) / len(batches)
            one.backward()
            total += one.detach()
    parameters = [*model.named_parameters(), *modules.named_parameters()]
    return step(total, records, site_gradients, {name: p.grad for name, p in parameters})


# ---- The ranks -----------------------------------------------------------------------------------


def shard(model: nn.Module, how: str) -> nn.Module:
    """A copy under DDP or FSDP2: each of its layers, and the rest."""
    model = copy.deepcopy(model)
    if how == "ddp":
        warnings.filterwarnings("ignore", "Grad strides do not match")  # torch's, of class tokens
        return DistributedDataParallel(model, find_unused_parameters=True)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # torch's, of T5
    mesh = models.mesh(dist.get_world_size(), 1)["dp"]
    for name, layer in list(model.named_modules()):
        is_of_list = re.fullmatch(r"[^\d]+\.\d+", name)  # of the outermost ones
        if is_of_list and not isinstance(layer, nn.ModuleList):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def without_scalars(model: nn.Module) -> nn.Module:
    """The model with vectors of one number for parameters of none, which FSDP2 asks for."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.ndim == 0:
                setattr(module, name, nn.Parameter(parameter.detach().reshape(1)))
    return model


def flex_of(sharded, records, site, edit, probe=None) -> FlexModel:
    flex = FlexModel(sharded, records, data_parallel_size=dist.get_world_size(), output_ranks="all")
    if probe is not None:
        flex.register_trainable_module("probe", probe)
    flex.register_forward_hook(HookFunction(site, None, edit))
    flex.register_full_backward_pre_hook(HookFunction(site, output_name="gradient"))
    return flex


def step_of(flex, records, site, loss, names) -> Step:
    """What the ranks have after a step; collective."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    gradients = {name: flex.get_module_gradient(name) for name in names}
    gradients |= {name: p.grad for name, p in flex.trainable_modules.named_parameters()}
    return step(total / dist.get_world_size(), records[site], records["gradient"], gradients)


def sharded_step(model, how, site, batch, edit, loss, probe=None) -> Step:
    records, sharded = {}, shard(model, how)
    with flex_of(sharded, records, site, edit, probe) as flex:
        value = loss(flex, my_rows(batch))
        value.backward()
        return step_of(flex, records, site, value, [n for n, _ in model.named_parameters()])


# ---- Comparing -----------------------------------------------------------------------------------


def assert_same(found: Step, expected: Step) -> None:
    """All that differs, in one message."""
    lines = [difference(name, found[name], tensor) for name, tensor in expected.items()]
    lines = [line for line in lines if line]
    assert not lines, "\n".join(lines)


def difference(name: str, found: Tensor | None, expected: Tensor | None) -> str:
    """What differs, or the empty string. None: no gradient, which some ranks give as zeros."""
    if expected is None or found is None:
        one = found if expected is None else expected
        return "" if one is None or not one.any() else f"{name}: one of both is None"
    if found.shape != expected.shape:
        return f"{name}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    if not expected.numel():
        return ""
    apart = (found.double() - expected.double()).abs().max().item()
    largest = expected.abs().max().item()
    if apart <= TOLERANCE * max(largest, 1e-3):
        return ""
    return f"{name}: off by {apart:.3g} of {largest:.3g}"


def compare(family, how, rows, loss, edit=None, probe_width=None) -> None:
    """One step of a family on ``rows`` rows a rank, and its twin's. Rows are mixed, too, unless the
    loss is of a rank's rows among themselves.
    """
    model, ranks = without_scalars(family.make()), dist.get_world_size()
    batch = family.batch(rows * ranks)
    is_own = family.own_loss and loss is by_the_model
    parts = [rows_of(batch, part, ranks) for part in range(ranks)] if is_own else [batch]
    edit = edit or (mixing_features if is_own else mixing)
    probes = [probe_width and probe_of(probe_width) for _ in range(2)]
    expected = twin_step(copy.deepcopy(model), family.site, parts, edit, loss, probes[0])
    found = sharded_step(model, how, family.site, batch, edit, loss, probes[1])
    assert_same(found, expected)

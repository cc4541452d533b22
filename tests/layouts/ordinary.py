"""A small model around a few lines of ordinary code, trained for a step with edits before and
behind them: the unsharded twin under torch's hooks, and two ranks' rows under FlexModel.
"""

from argparse import Namespace
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import models
from flex_model import FlexModel, HookFunction

WIDTH, LENGTH = 6, 5
SITES = ("before", "behind")


class Around(nn.Module):
    """A layer, a site, the lines, another site, and another layer."""

    def __init__(self, lines: Callable, width: int = WIDTH):
        super().__init__()
        self.fc, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(width, 4)
        self.before, self.behind = nn.Identity(), nn.Identity()
        self.register_buffer("groups", torch.tensor([0, 2, 1, 0, 2]))
        self.register_buffer("table", models.random(4, WIDTH, seed=8))
        self.tables = {"scale": models.random(WIDTH, seed=9), "steps": [models.random(LENGTH)]}
        self.lines = lines

    def forward(self, x):
        return self.head(self.behind(self.lines(self, self.before(self.fc(x)))))


def around(lines: Callable, width: int = WIDTH) -> nn.Module:
    return models.seeded(Around, lines, width).double()


def mixing_features(module, full, save_ctx, modules):
    width = full.shape[-1]
    return full + full @ models.random(width, width, seed=3) / width


def mixing_all(module, full, save_ctx, modules):
    """Every row, too."""
    full, rows = mixing_features(module, full, save_ctx, modules), full.shape[0]
    mix = models.random(rows, rows, seed=4) / rows
    return full + torch.tensordot(mix, full, 1)


def mean(output):
    return output.sin().mean()


def twin(model: nn.Module, parts, edits: dict, loss: Callable = mean):
    """The records and gradients of the sites, the outputs, and the gradients of weights.

    ``parts``: the whole batch, or what each rank has where the ranks' models are no parts of one.
    """
    found = {name: [] for site in edits for name in (site, f"{site}.grad")}
    handles = []
    for site, edit in edits.items():

        def hook(module, args, output, site=site, edit=edit):
            found[site].append(output.detach().clone())
            edited = edit(module, output.clone(), Namespace(), {}).clone()
            edited.register_hook(lambda grad: found[f"{site}.grad"].append(grad.clone()))
            return edited

        handles.append(model.get_submodule(site).register_forward_hook(hook))
    outputs = []
    for part in parts:
        outputs.append(model(part))
        (loss(outputs[-1]) / len(parts)).backward()
    for handle in handles:
        handle.remove()
    joined = {name: torch.cat(tensors) for name, tensors in found.items()}
    joined |= {f"{name} of all": p.grad for name, p in model.named_parameters()}
    return torch.cat(outputs).detach(), joined


def on_ranks(model: nn.Module, mine, edits: dict, loss: Callable = mean):
    """The same of a data-parallel model, whose rank has the rows ``mine``."""
    records, sharded = {}, DistributedDataParallel(model)
    with FlexModel(sharded, records, data_parallel_size=2, output_ranks="all", timeout=20) as flex:
        for site, edit in edits.items():
            flex.register_forward_hook(HookFunction(site, None, edit))
            flex.register_full_backward_pre_hook(HookFunction(site, output_name=f"{site}.grad"))
        output = flex(mine)
        loss(output).backward()
        found = {name: tensors[0] for name, tensors in records.items()}
        for name, _ in model.named_parameters():
            found[f"{name} of all"] = flex.get_module_gradient(name)
    return output.detach(), found


def check(make: Callable, x, edits: dict, is_own=False, loss: Callable = mean) -> None:
    """What ranks hold together is the twin's; ``is_own``: each rank's model is a twin of its own,
    since what it computes depends on its number of rows or on their values.
    """
    parts = list(x.chunk(2)) if is_own else [x]
    whole, expected = twin(make(), parts, edits, loss)
    output, found = on_ranks(make(), x.chunk(2)[dist.get_rank()], edits, loss)
    assert_close(output, whole.chunk(2)[dist.get_rank()])
    assert list(found) and set(found) == set(expected)
    for name, tensor in expected.items():
        assert_close(found[name], tensor, msg=lambda text, name=name: f"{name}: {text}")

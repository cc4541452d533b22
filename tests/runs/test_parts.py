"""Parts of the wrapped model that are called on their own: as in the unsharded model."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import models
import pipelines
from flex_model import FlexModel, HookFunction


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.act, self.down = nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)

    def forward(self, x, scale):
        return x + self.down(self.act(self.up(self.norm(x)))) * scale


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.scale = nn.Embedding(11, 6), nn.Linear(6, 6)
        self.body = nn.ModuleList(Block(6, 8) for _ in range(3))
        self.head = nn.Linear(6, 5)

    def forward(self, tokens):
        x = self.embed(tokens)
        scale = self.scale(x).sigmoid()
        for block in self.body:
            x = block(x, scale)
        return self.head(x)


def in_a_loop(stack, tokens):
    """As ``Stack.forward``, by hand."""
    return Stack.forward(stack, tokens)


def whole(stack, tokens):
    return stack(tokens)


SPLIT = ["body.0.act", "body.1.up", "body.1.act"]
SITES = [*SPLIT, "body.2", "head"]


def mix(module, full, save_ctx, modules):
    return full.flip(-1) + full.roll(1, 0)


def sharded(stack, axis):
    if axis == "dp":
        return DistributedDataParallel(stack)
    plan = {f"body.{i}.up": ColwiseParallel() for i in range(3)}
    plan |= {f"body.{i}.down": RowwiseParallel() for i in range(3)}
    return parallelize_module(stack, init_device_mesh("cpu", (2,)), plan)


def run(root, call, stack, tokens, sites, edits, backward, **group):
    """Run it twice: followed, and as the run before. Return the output and the records."""
    records = {}
    with FlexModel(root, records, **group) as flex:
        for i, site in enumerate(sites):
            edit = mix if edits and i % 2 == 0 else None
            flex.register_forward_hook(HookFunction(site, editing_function=edit))
            if backward:
                flex.register_full_backward_pre_hook(HookFunction(site, output_name=f"grad {site}"))
        for _ in range(2):
            found = call(stack, tokens)
            if backward:
                found.square().mean().backward()
    return found.detach(), records


class Cells(nn.Module):
    """A cell that is called three times, each of them in a checkpoint or not."""

    def __init__(self, recompute=None):
        super().__init__()
        self.cell, self.recompute = nn.Linear(6, 6), recompute

    def forward(self, x):
        for _ in range(3):
            if self.recompute is None:
                x = self.cell(x).tanh()
            else:
                call = lambda x: self.cell(x).tanh()  # noqa: E731
                x = checkpoint(call, x, use_reentrant=self.recompute == "reentrant")
        return x


def random_mix(module, full, save_ctx, modules):
    return full.flip(-1) * 2 + torch.rand_like(full)


def run_cells(recompute=None, in_a_run=False, removed=False, compiled=False):
    """Call a part of a model on one process, twice, and run backward; the input's gradient, and the
    records.
    """
    model = models.seeded(lambda: nn.Sequential(Cells(recompute), nn.Linear(6, 2))).double()
    records, x = {}, models.random(2, 6).requires_grad_()
    flex = FlexModel(model, records)
    for name in ("0.cell", "0"):  # one name of two hooks' records
        flex.register_forward_hook(HookFunction(name, output_name="shared"))
    edit = HookFunction("0.cell", editing_function=random_mix, record=False)
    flex.register_full_backward_hook(HookFunction("0.cell", output_name="gradients"))
    call = torch.compile(model[0], backend="eager") if compiled else model[0]
    torch.manual_seed(3)
    for _ in range(2):
        handle = flex.register_forward_hook(edit)
        with flex.active() if in_a_run else contextlib.nullcontext():
            output = call(x)
        if removed:
            handle.remove()
        output.square().sum().backward()
        handle.remove()
    flex.restore()
    return x.grad, records


CELLS = [
    {"recompute": recompute, "removed": removed}
    for recompute in (None, "reentrant", "not reentrant")
    for removed in (False, True)
]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("how", [*CELLS, {"compiled": True}])
def test_a_part_is_one_run_on_one_process(how):
    """One run for each hook: records of several were lost, and of several calls kept."""
    expected, expected_records = run_cells(in_a_run=True)
    assert [len(expected_records[name]) for name in ("shared", "gradients")] == [4, 3]
    found, records = run_cells(**how)
    torch.testing.assert_close(found, expected)
    assert records.keys() == expected_records.keys()
    for name, tensors in expected_records.items():
        torch.testing.assert_close(records[name], tensors, msg=name)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("edits", [False, True])
@pytest.mark.parametrize(
    ("axis", "sites", "backward"), [("dp", SITES, True), ("tp", SITES, False), ("tp", SPLIT, True)]
)
def test_layers_in_a_loop(axis, sites, backward, edits):
    stack, tokens = models.seeded(Stack).double(), torch.arange(24).reshape(4, 6) % 11
    how = sites, edits, backward
    reference, alone = copy.deepcopy(stack), pipelines.alone_group()
    expected, expected_records = run(reference, whole, reference, tokens, *how, process_group=alone)
    model, is_dp = sharded(stack, axis), axis == "dp"
    rows, expected = (
        (one.chunk(2)[dist.get_rank()] if is_dp else one) for one in (tokens, expected)
    )
    found, records = run(model, in_a_loop, stack, rows, *how)
    torch.testing.assert_close(found, expected)
    if dist.get_rank() == 0:
        assert records.keys() == expected_records.keys()
        for name, (record,) in expected_records.items():
            torch.testing.assert_close(records[name][0], record, msg=name)


@pytest.mark.ranks(2)
def test_the_gradient_of_what_a_part_returns_along_tp():
    """What reads it may be the first half of a parallel layer, whose gradients are summands."""
    stack = models.seeded(Stack).double()
    model = sharded(stack, "tp")
    with FlexModel(model) as flex:
        flex.register_full_backward_pre_hook(HookFunction("body.2"))
        with pytest.raises(ValueError, match=r"'body.2'.*the output of 'body.2', which was called"):
            in_a_loop(stack, torch.arange(6)[None]).sum().backward()


@pytest.mark.ranks(2)
def test_an_input_of_a_part_that_differs_along_tp():
    stack = models.seeded(Stack).double()
    model, x = sharded(stack, "tp"), models.random(2, 3, 6)
    with FlexModel(model) as flex:
        flex.register_forward_hook(HookFunction("body.0.act"))
        stack.body[0](x, x)
        with pytest.raises(ValueError, match=r"input 'scale', tensor 1: .* different values"):
            stack.body[0](x, x + dist.get_rank())


@pytest.mark.ranks(2)
def test_the_body_of_a_model_of_transformers(tmp_path):
    """As the whole model calls it, and with a hook that is only in what is not called."""
    transformers = pytest.importorskip("transformers")
    tokens, found = torch.arange(12).reshape(2, 6), []
    tp = models.loaded_by_transformers(models.llama(), tmp_path)
    alone = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    sites = ["model.layers.0.mlp.act_fn", "model.layers.1.self_attn.v_proj", "lm_head"]
    for model, group in (tp, {}), (alone, {"process_group": pipelines.alone_group()}):
        records = {}
        with FlexModel(model, records, **group) as flex, torch.no_grad():
            for site in sites:
                flex.register_forward_hook(HookFunction(site, editing_function=mix))
            hidden = [model.model(tokens).last_hidden_state for _ in range(2)]
        assert "lm_head" not in records
        found.append([*hidden, *(records[site][0] for site in sites[:2] if site in records)])
    for ours, theirs in zip(*found):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


class Siamese(nn.Module):
    """Two towers that share a module, of which a method may run one alone."""

    def __init__(self):
        super().__init__()
        shared = nn.Linear(6, 4)
        self.left, self.right = nn.Sequential(shared, nn.Tanh()), nn.Sequential(shared, nn.ReLU())

    def features(self, x):
        return self.right(x)

    def forward(self, x):
        return self.left(x) * self.right(x)


@pytest.mark.parametrize("kind", ["forward", "gradient"])
def test_a_part_empties_the_records_of_its_modules_by_their_other_names(kind):
    model, x = Siamese(), models.random(2, 6).float()
    flex = FlexModel(model, records := {})
    register = flex.register_hook if kind == "gradient" else flex.register_forward_hook
    names = ["left.0.weight"] if kind == "gradient" else ["left.0", "right.0", "right"]
    for name in names:
        register(HookFunction(name))
    for run in (model.right, flex.features, model.right, flex.features):
        run(x).sum().backward()
        if kind == "forward" or run is not model.right:
            assert {name: len(found) for name, found in records.items()} == dict.fromkeys(names, 1)

"""Compiled models under random orders of all that matters to hooks: compiling, registering,
removing, groups, other shapes, gradients. After each call, everything is compared with the
unsharded model under torch's hooks. With the "eager" backend, as in ``test_compiled.py``.
"""

import logging
import random
import re
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import compiling
import models
from flex_model import FlexModel, HookFunction
from oracle import watch
from shared_edits import mixing_ends as mix
from tiers import grid_but

SITES = ("", "a", "b", "a.norm", "a.attn", "a.attn.q", "a.mlp.act", "b.mlp.fc1", "b.mlp", "head")
KINDS = ("forward", "forward_pre", "full_backward")
NUM_STEPS = 16


class Two(nn.Module):
    columns = tuple(f"{block}.{name}" for block in "ab" for name in models.Block.columns)
    rows = tuple(f"{block}.{name}" for block in "ab" for name in models.Block.rows)

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = models.Block(), models.Block(), nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.b(self.a(x)))


def two():
    return models.seeded(Two).double()


WAYS = {
    "whole": compiling.whole,
    "in place": compiling.in_place,
    "blocks": compiling.modules("ab"),
    "forward": compiling.forward,
}


def expected(hooks, batch, grad):
    """Output, records and gradients of the unsharded model."""
    model, seen = two(), {}
    for site, kind, edits in hooks:
        seen[f"{site}.{kind}"] = watch(model, site, mix if edits else None, kind)
    with torch.set_grad_enabled(grad):
        output = model(batch)
        if grad:
            output.square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()} if grad else {}
    return output.detach(), {name: tensors for name, tensors in seen.items() if tensors}, gradients


class Walk:
    def __init__(self, parallelism, way, seed, **settings):
        self.choose = random.Random(seed)
        self.parallelism, self.way = parallelism, way
        self.settings = settings
        self.model, self.hooks, self.done = parallelism.shard(two()), {}, []
        self.is_compiled = way == "whole" or self.choose.random() < 0.5
        if self.is_compiled:
            self.model = WAYS[way](self.model, **self.settings)
        self.flex = FlexModel(self.model, {}, output_ranks="all", **parallelism.sizes)

    def run(self):
        steps = [self.register, self.register, self.call, self.call, self.remove, self.compile]
        for _ in range(NUM_STEPS):
            self.choose.choice(steps)()
        self.call("all")
        self.flex.restore()
        self.hooks.clear()
        self.call("all")

    def compile(self):
        if not self.is_compiled:
            WAYS[self.way](self.model, **self.settings)
            self.is_compiled = True
            self.done.append("compile")

    def register(self):
        site, kind = self.choose.choice(SITES), self.choose.choice(KINDS)
        edits, group = self.choose.random() < 0.6, self.choose.choice(["first", "second"])
        if (site, kind) in self.hooks:
            return
        edit = mix if edits else None
        hook = HookFunction(site, editing_function=edit, output_name=f"{site}.{kind}")
        handle = getattr(self.flex, f"register_{kind}_hook")(hook)
        self.flex.update_hook_groups(hook, group)
        self.hooks[site, kind] = edits, group, handle
        self.done.append(("register", site, kind, edits, group))

    def remove(self):
        if self.hooks:
            place = self.choose.choice(sorted(self.hooks))
            self.hooks.pop(place)[-1].remove()
            self.done.append(("remove", *place))

    def call(self, groups=None):
        there = sorted({group for _, group, _ in self.hooks.values()})
        groups = groups or self.choose.choice(["all", "all", (), *there])
        active = [
            (*place, edits)
            for place, (edits, group, _) in self.hooks.items()
            if groups in ("all", group)
        ]
        rows, length = self.choose.choice([4, 4, 6]), self.choose.choice([3, 3, 5])
        grad, seed = self.choose.random() < 0.5, self.choose.randrange(10**6)
        directly = groups == "all" and self.choose.random() < 0.5
        self.done.append(("call", rows, length, grad, groups, directly))
        batch = models.random(rows, length, 8, seed=seed)
        output, seen, gradients = expected(active, batch, grad)
        records, mine = self.flex.output_ptr, self.parallelism.my_rows
        self.model.zero_grad()
        records.clear()
        with torch.set_grad_enabled(grad):
            given = self.model(mine(batch)) if directly else self.flex(mine(batch), groups=groups)
            if grad:
                given.square().mean().backward()
        assert_close(given.detach(), mine(output))
        found = {name: tensors for name, tensors in records.items() if tensors}
        assert_close(found, seen)
        parameters = {
            re.sub(r"(_orig_mod|module)\.", "", name): parameter
            for name, parameter in self.model.named_parameters()
        }
        for name, gradient in gradients.items():
            full = self.parallelism.full(two(), name, parameters[name].grad, average=False)
            assert_close(full, gradient, msg=lambda text: f"{name}: {text}")  # noqa: B023


@contextmanager
def quiet():
    """Dynamo warns of breaks, and logs that it recompiles often."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    torch.compiler.reset()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.compiler.reset()
        logging.disable(before)


def check(walk):
    with quiet():
        try:
            walk.run()
        except BaseException:
            print(*walk.done, sep="\n")
            raise


@pytest.mark.parametrize("way", grid_but(WAYS, "whole", "blocks"))
@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.grid)])
def test_a_compiled_model(way, dynamic):
    check(Walk(models.ONE_RANK, way, seed=len(way), dynamic=dynamic))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "way"),
    grid_but(
        [("dtensor", "blocks"), ("fsdp2", "blocks"), ("fsdp2", "in place"), ("ddp", "whole")],
        ("dtensor", "blocks"),
    ),
)
def test_a_compiled_model_on_two_ranks(name, way):
    """Layouts are inferred, without expected_shape. Shapes of DTensors are static: with others,
    dynamo (torch 2.11) may fail where a hook breaks the graph.
    """
    check(Walk(models.TWO_RANKS[name], way, seed=3, dynamic=False if name == "dtensor" else None))

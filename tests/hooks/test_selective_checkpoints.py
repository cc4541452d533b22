"""Selective checkpointing saves results by operation and number: hooks inside must not shift the
numbers, and what they do is computed again.
"""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import models
from flex_model import FlexModel, HookFunction
from tiers import ways

PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
STEPS = 3
BATCH = models.random(4, 6)


def _save_most(context, operation, *args, **kwargs):
    """All but what FlexModel begins with: so that a number that is shifted raises nothing."""
    if "empty" in str(operation) or operation is torch.ops.aten.tanh.default:
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


POLICIES = {
    "none": [],
    "products": PRODUCTS,
    "most": _save_most,
    "all": lambda *args, **kwargs: CheckpointPolicy.MUST_SAVE,
}


def every_second_product():
    """A policy that counts, as those of torchtitan do."""
    seen = dict.fromkeys((False, True), 0)

    def policy(context, operation, *args, **kwargs):
        seen[context.is_recompute] += operation in PRODUCTS
        saves = operation in PRODUCTS and seen[context.is_recompute] % 2
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


class Block(nn.Module):
    columns, rows = ("fc1",), ("fc2",)

    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)
        self.tap, self.last, self.out = nn.Identity(), nn.Linear(6, 6), nn.Linear(6, 6)
        self.policy = None

    def run(self, x):
        return self.last(self.tap(self.fc2(self.act(self.fc1(x)))).clone())

    def forward(self, x):
        if self.policy is None:
            return self.out(self.run(x))
        policy = every_second_product() if self.policy == "counting" else POLICIES[self.policy]
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return self.out(checkpoint(self.run, x, use_reentrant=False, context_fn=contexts))


def mix(x):
    return x.flip(-1).cumsum(0).sin() @ torch.ones(x.shape[-1], x.shape[-1], dtype=x.dtype)


def write(x):
    x[:, ::2] *= 3
    x.tanh_()


def double(x):
    return x * 2


# By name: the site, the kind of the hook, whether it records, and its editing function.
HOOKS = {
    "edit": ("act", "forward", False, mix),
    "edit and record": ("fc1", "forward", True, mix),
    "write": ("tap", "forward", True, write),
    "write early": ("fc1", "forward_pre", False, write),
    "record": ("act", "forward", True, None),
    "train": ("fc2", "forward", True, "adapter"),
    "gradient": ("fc2", "full_backward", True, double),
    "gradient before": ("tap", "full_backward_pre", True, double),
}


def register(flex, name):
    site, kind, records, edit = HOOKS[name]

    def edited(module, x, save_ctx, modules):
        return modules["adapter"](x) if edit == "adapter" else edit(x)

    hook = HookFunction(site, None, edit and edited, output_name=name, record=records)
    getattr(flex, f"register_{kind}_hook")(hook)


def register_on_twin(twin, adapter, records, name):
    """The same by torch's own hooks."""
    site, kind, _, edit = HOOKS[name]

    def apply(x):
        records[name].append(x.detach().clone())
        if edit is None:
            return x
        full = x.clone()
        result = adapter(full) if edit == "adapter" else edit(full)
        return full if result is None else result

    records[name] = []
    module = twin.get_submodule(site)
    if kind == "forward_pre":
        module.register_forward_pre_hook(lambda module, args: apply(args[0]))
    elif kind == "forward":
        module.register_forward_hook(lambda module, args, output: apply(output))
    elif kind == "full_backward":
        module.register_full_backward_hook(lambda module, grads, outer: (apply(grads[0]),))
    else:
        module.register_full_backward_pre_hook(lambda module, grads: (apply(grads[0]),))


def check(way, policy, names):
    model = models.seeded(Block).double()
    adapter = models.seeded(nn.Linear, 6, 6, seed=4).double()
    twin, own, records, expected = copy.deepcopy(model), copy.deepcopy(adapter), {}, {}
    if way.name == "fsdp2":  # torch itself counts what FSDP2 does to modules in a checkpoint
        model.columns = model.rows = ()
    sharded = way.shard(model)
    for one in sharded.modules():
        if isinstance(one, Block):
            one.policy = policy
    with FlexModel(sharded, records, output_ranks="all", timeout=30, **way.sizes) as flex:
        if "train" in names:
            flex.register_trainable_module("adapter", adapter)
        for name in names:
            register(flex, name)
            register_on_twin(twin, own, expected, name)
        for step in range(STEPS):
            for one in expected.values():
                one.clear()
            for one in (sharded, twin, adapter, own):
                one.zero_grad()
            output = flex(way.my_rows(BATCH + step))
            output.square().mean().backward()
            of_twin = twin(BATCH + step)
            of_twin.square().mean().backward()
            assert_close(output, way.my_rows(of_twin))
            assert_close(
                way.full_gradients(model, sharded),
                {name: parameter.grad for name, parameter in twin.named_parameters()},
            )
            assert_close(adapter.weight.grad, own.weight.grad)
            assert_close(records, {n: kept for n, kept in expected.items() if HOOKS[n][2]})


@pytest.mark.parametrize("policy", [*POLICIES, "counting"])
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_in_a_selective_checkpoint_on_one_process(name, policy):
    check(models.ONE_RANK, policy, [name])


@pytest.mark.parametrize("policy", [*POLICIES, "counting"])
@pytest.mark.parametrize("way", ways("one", "ddp", "fsdp2", "dtensor"))
def test_all_kinds_of_hooks_in_a_selective_checkpoint(way, policy):
    check(way, policy, list(HOOKS))


@pytest.mark.parametrize("way", ways("one", "ddp", "dtensor"))
def test_a_policy_sees_the_operations_of_the_model_alone(way):
    """Also where the checkpoint is around the whole model, whose runs begin and end in it."""
    seen = []

    def policy(context, operation, *args, **kwargs):
        seen.append(str(operation))
        return CheckpointPolicy.PREFER_RECOMPUTE

    def operations_of(model):
        seen.clear()
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        rows = way.my_rows(BATCH).requires_grad_()
        checkpoint(model, rows, use_reentrant=False, context_fn=contexts).sum().backward()
        return list(seen)

    sharded = way.shard(models.seeded(Block).double())
    for _ in range(STEPS):  # DDP arranges its buckets in the second one
        expected = operations_of(sharded)
    for name in HOOKS:
        with FlexModel(sharded, timeout=30, **way.sizes) as flex:
            flex.register_trainable_module("adapter", models.seeded(nn.Linear, 6, 6).double())
            register(flex, name)
            for _ in range(STEPS):
                assert operations_of(flex) == expected, name

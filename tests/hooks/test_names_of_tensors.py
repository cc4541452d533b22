"""Hooks on tensors by name: arguments of a module, and fields of its output."""

from collections import namedtuple
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

import models
from flex_model import FlexModel, HookError, HookFunction, pytree
from flex_model.integrations.keyword_arguments import arguments_by_name

X = models.random(3, 4)
Pair = namedtuple("Pair", "left right")


class Named(nn.Module):
    def forward(self, first, second=None, *rest, mask=None, tables=()):
        total = first if second is None else first - 2 * second
        total = total if mask is None else total * mask
        return {"total": sum(rest, total), "pair": Pair(first * 3, [None, *tables])}


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.named = Named()

    def forward(self, *args, **kwargs):
        return self.named(*args, **kwargs)


def plus(module, inputs, save_ctx, modules):
    return inputs + 1


def run(name, *args, kind="forward_pre", edit=plus, **kwargs):
    records = {}
    with FlexModel(Outer(), records) as flex:
        register = getattr(flex, f"register_{kind}_hook")
        register(HookFunction("named", None, edit, name))
        return records, flex(*args, **kwargs)


def test_a_name_stays_with_its_tensor():
    for args, kwargs in (((X,), {}), ((X, X + 1), {}), ((X,), {"second": X, "tables": (X, X)})):
        mask = X.exp()
        _, output = run("mask", *args, mask=mask, **kwargs)
        assert_close(output["total"], Named()(*args, mask=mask + 1, **kwargs)["total"])


def test_one_tensor_passed_twice():
    _, output = run("second", X, X)
    assert_close(output["total"], X - 2 * (X + 1))
    _, output = run("rest.1", X, X, X, X)
    assert_close(output["total"], X - 2 * X + X + X + 1)


class Called:
    def __init__(self, forward):
        self._forward = forward

    def __call__(self, first, second=None, *rest, mask=None):
        return self._forward(first, second, *rest, mask=mask)


@pytest.mark.parametrize("make", [lambda forward: partial(forward, tables=(X,)), Called])
def test_a_forward_that_is_no_function(make):
    """Wrong before, silently: arguments by position counted for none, and the first was edited."""
    model, mask = Outer(), X.exp()
    model.named.forward = make(model.named.forward)
    with FlexModel(model, records := {}) as flex:
        for name in ("mask", "second", "rest.0"):
            flex.register_forward_pre_hook(
                HookFunction("named", None, plus, name, output_name=name)
            )
        output = flex(X, X + 1, X + 2, mask=mask)
    assert_close(output["total"], Named()(X, X + 2, X + 3, mask=mask + 1)["total"])
    assert_close(records, {"mask": [mask], "second": [X + 1], "rest.0": [X + 2]})


def test_of_inner_tensors():
    records, output = run("tables.1", X, tables=(X, X + 5))
    assert_close(records["named"][0], X + 5)
    assert_close(output["pair"].right, [None, X, X + 6])
    for name, number in (("pair.left", 1), ("pair.right.1", 2)):
        records, output = run(name, X, tables=(X,), kind="forward")
        assert_close(records["named"][0], pytree.leaf_at(output, number) - 1)
        records, _ = run(name, X, tables=(X,), kind="forward", edit=None)
        assert_close(records["named"][0], pytree.leaf_at(output, number) - 1)


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward", "full_backward_pre"])
def test_a_missing_name_lists_the_others(kind):
    names = "'total', 'pair.left'" if kind in ("forward", "full_backward_pre") else "'first'"
    with pytest.raises(HookError, match=f"of the name 'mask'.*there are {names}; give one"):
        run("mask", X.clone().requires_grad_(), kind=kind, edit=None, mask=None)


def test_gradients_by_name_and_number_are_of_one_tensor_in_order():
    seen = []
    second = X.clone().requires_grad_()
    with FlexModel(Outer()) as flex:
        for place, factor in (("second", 2.0), (1, 3.0)):

            def edit(module, grad, save_ctx, modules, factor=factor):
                seen.append(grad.clone())
                return grad * factor

            flex.register_full_backward_hook(HookFunction("named", None, edit, place))
        flex(X.clone().requires_grad_(), second)["total"].sum().backward()
    assert_close(seen, [torch.full_like(X, -2), torch.full_like(X, -4)])
    assert_close(second.grad, torch.full_like(X, -12))


def test_names_of_arguments_and_leaves():
    args, kwargs = (X, None, X, X), {"tables": [X], "mask": X}
    named = arguments_by_name(Named(), args, kwargs)
    assert pytree.leaf_names(named) == pytree.leaf_names(
        {"first": X, "rest": (X, X), "tables": [X], "mask": X}
    )
    assert list(named) == ["first", "second", "rest", "tables", "mask"]
    assert pytree.leaf_names(X) == {"": 0}
    assert pytree.leaf_names(None) == {}


@torch.no_grad()
def test_a_transformers_model():
    tokens, records = torch.randint(32, (2, 5)), {}
    names = {"position_embeddings.0": "model.layers.1.self_attn", "hidden_states": "model.layers.1"}
    with FlexModel(models.llama(), records) as flex:
        for name, module in names.items():
            flex.register_forward_pre_hook(HookFunction(module, None, None, name, output_name=name))
        cache = next(name for name, value in flex(tokens).items() if name != "logits")
        keys = f"{cache}.layers.1.keys"  # 5.24 has another name for it
        for name in ("logits", keys):
            flex.register_forward_hook(HookFunction("", None, None, name, output_name=name))
        output = flex(tokens, use_cache=True)
        rows = flex.dry_run(tokens, use_cache=True)
        assert "'position_embeddings.0'" in str(rows)
    assert_close(records["logits"][0], output.logits)
    assert_close(records[keys][0], output[cache].layers[1].keys)
    assert records["hidden_states"][0].shape == (2, 5, 32)
    assert_close(records["position_embeddings.0"][0][0, 0], torch.ones(8).double())


class Masked(Outer):
    """Passes a mask on, but on some ranks."""

    def __init__(self, without):
        super().__init__()
        self.without = without

    def forward(self, x, mask):
        return self.named(x, mask=None if dist.get_rank() in self.without else mask)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("without", [(0,), (0, 1)])
def test_a_name_without_a_tensor_on_some_rank_is_an_error_on_all(without):
    model = Masked(without)
    with FlexModel(model, {}, tensor_parallel_size=2) as flex:
        flex.register_forward_pre_hook(HookFunction("named", None, plus, "mask"))
        with pytest.raises(HookError, match=r"rank 0: .*no input .* of the name 'mask'"):
            flex(X, mask=X.exp())
        model.without = ()
        flex(X, mask=X.exp())

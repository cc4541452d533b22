"""Two FlexModels of one model: both see and edit, the one that came to a site first before the
other.
"""

import pytest
import torch
from torch.testing import assert_close

import models
from flex_model import FlexModel, HookFunction
from oracle import watch
from tiers import ways

BATCH = models.random(4, 6)


def add(module, full, save_ctx, modules):
    return full + torch.arange(full.shape[-1])


def mix(module, full, save_ctx, modules):
    return full.flip(-1) * 2


def oracle(sites, edits):
    """The output, and what each edit is given, of the unsharded model with plain hooks."""
    model = models.mlp()
    seen = [watch(model, site, edit) for site, edit in zip(sites, edits)]
    with torch.no_grad():
        return model(BATCH), [tensor for (tensor,) in seen]


@pytest.mark.parametrize("parallelism", ways("one", "tp", "dtensor", "dp"))
@pytest.mark.parametrize("second_site", ["fc1", "act"])
def test_both_edit(parallelism, second_site):
    """Was refused on ranks: the second wrapper took the first one's edit for operations of the
    model.
    """
    sizes = parallelism.sizes
    model, records = parallelism.shard(models.mlp()), ({}, {})
    flexes = [FlexModel(model, seen, output_ranks="all", **sizes) for seen in records]
    sites, edits = ("fc1", second_site), (add, mix)
    for flex, site, edit in zip(flexes, sites, edits):
        flex.register_forward_hook(HookFunction(site, editing_function=edit))

    def run(call, sites=sites, edits=edits):
        for seen in records:
            seen.clear()
        with torch.no_grad():
            output = call(parallelism.my_rows(BATCH))
        expected, given = oracle(sites, edits)
        assert_close(output, parallelism.my_rows(expected))
        found = [tensors[0] for seen in records for tensors in seen.values()]
        assert_close(found, given)

    for call in (flexes[0], flexes[1], model):
        run(call)
    for choice in ((), "all"):  # torch's hooks go and come again
        with flexes[0].active(choice):
            chosen = slice(1, None) if choice == () else slice(None)
            run(model, sites[chosen], edits[chosen])
    run(model)
    flexes[0].restore()
    run(model, sites[1:], edits[1:])
    flexes[1].restore()
    run(model, (), ())


@pytest.mark.ranks(2)
def test_an_edit_of_a_model_that_is_followed_no_more_is_placed():
    """The first one's layouts are known when the second one's are inferred, after its edit."""
    model, whole = models.TWO_RANKS["tp"].shard(models.mlp()), models.mlp()
    hidden = mix(None, mix(None, whole.fc1(whole.inp(BATCH)), None, None), None, None)
    acted = whole.act(hidden)
    expected = whole.out(whole.fc2(acted))
    gradient = torch.autograd.grad(expected.square().sum(), acted)[0]
    edit, records = HookFunction("fc1", editing_function=mix), {}
    with FlexModel(model, {}, tensor_parallel_size=2) as first:
        first.register_forward_hook(edit)
        first(BATCH), first(BATCH)
        with FlexModel(model, records, tensor_parallel_size=2, output_ranks="all") as second:
            second.register_forward_hook(HookFunction("fc1", editing_function=mix))
            second.register_forward_hook(HookFunction("act"))
            second.register_full_backward_pre_hook(HookFunction("act", output_name="gradient"))
            output = second(BATCH)
            output.square().sum().backward()
    assert_close(output, expected)
    assert_close(records["act"][0], acted)
    assert_close(records["gradient"][0], gradient)

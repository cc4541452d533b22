"""verify(edits=True): editing functions on the sharded model and on the unsharded one."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import models
from flex_model import FlexModel, HookError, HookFunction, Select, editing

X = models.random(4, 5, 6)


def flex_of(way, **settings):
    flex = FlexModel(way.shard(models.mlp()), {}, **way.sizes, **settings)
    flex.register_trainable_module("probe", models.seeded(lambda: nn.Linear(8, 8).double()))
    return flex


def loss(output):
    return output.square().mean()


def mixes(module, full, save_ctx, modules):
    save_ctx.total = getattr(save_ctx, "total", 0) + full.sum()
    return modules["probe"](full.cumsum(-1).flip(-1)) + torch.randn_like(full)


def in_place(module, full, save_ctx, modules):
    full += full.sum(-1, keepdim=True).detach() + save_ctx.total.detach()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["tp", "ddp", "fsdp2", "dtensor", "tp on rank 0"])
def test_edits_come_to_the_same_on_shards(name):
    way = models.TWO_RANKS[name.split()[0]]
    flex = flex_of(way, edit_on="rank0" if "rank 0" in name else "all")
    seen = []
    weighs = HookFunction("act", parameters=["fc2.weight"], select=Select(positions=[1, 3]))

    def weigh(module, full, save_ctx, modules):
        seen.append(full.detach())
        return full * weighs.parameters["fc2.weight"].norm(dim=0)

    weighs.editing_function = weigh
    flex.register_full_backward_pre_hook(HookFunction("inp", output_name="upstream"))
    flex.register_full_backward_hook(
        HookFunction("fc2", None, lambda m, full, *_: full.cumsum(-1), output_name="gradient")
    )
    flex.register_forward_hook(HookFunction("fc1", editing_function=mixes))
    flex.register_forward_hook(HookFunction("fc1", output_name="after"))
    flex.register_forward_hook(weighs)
    flex.register_forward_hook(HookFunction("fc2", editing_function=in_place))
    flex.register_forward_hook(editing.scale(0.5, units=[0, 3]).at("out"))
    rows = way.my_rows(X)
    state = torch.get_rng_state()

    report = flex.verify(models.mlp(), rows, loss=loss, edits=True)

    assert report.is_equal and all(row.result == "equal" for row in report.rows), report
    assert len(report.rows) == 10
    kinds = [row.kind for row in report.rows]
    assert kinds.count("forward") == 6 and kinds.count("gradient") == 2
    (after,) = [row for row in report.rows if row.kind == "full_backward_pre"]
    assert after.name == "inp"
    # Nothing is left of it, but for what functions keep elsewhere than in save_ctx.
    runs_sharded = dist.get_rank() == 0 or "rank 0" not in name
    assert len(seen) == runs_sharded + (dist.get_rank() == 0)  # rank 0 has the reference
    assert not flex.output_ptr and not vars(flex.save_ctx)
    assert all(p.grad is None for p in flex.trainable_modules.parameters())
    assert torch.equal(torch.get_rng_state(), state) and weighs.parameters == {}


def shifted(module, full, save_ctx, modules):
    return full.roll(1, -1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("edits", [False, True])
def test_sites_that_flex_model_makes_are_in_the_reference(edits):
    pytest.importorskip("transformers")
    from mixtures import BLOCK, TOKENS, make, sharded

    calls = []

    def shift(module, full, save_ctx, modules):
        calls.append(full.dim())
        return shifted(module, full, save_ctx, modules)

    model, reference = make("Qwen3Moe"), make("Qwen3Moe")
    flex = sharded("dp", model, None)
    attention = flex.attention("model.layers.0.self_attn", shift)
    routing, experts = flex.routing(BLOCK), flex.experts(f"{BLOCK}.experts")
    some = HookFunction(experts.units, None, shift, select=Select(experts=[2, 5]))
    for hook in (attention, routing.forbid([1]), some, HookFunction(experts.outputs)):
        flex.register_forward_hook(hook)
    names, rows = [*dict(reference.named_modules())], TOKENS.chunk(2)[dist.get_rank()]
    report = flex.verify(reference, rows, edits=edits)
    assert all(row.result == "equal" for row in report.rows), report
    assert len(report.rows) == 4 + edits and [*dict(reference.named_modules())] == names
    num_models = 1 + (dist.get_rank() == 0)  # rank 0 has the reference
    assert sorted(calls) == sorted([2, 4] * num_models * edits)


def test_an_edit_that_the_reference_has_no_module_for_is_an_error():
    model = models.mlp()
    model.more = nn.Identity()
    model.register_forward_hook(lambda module, args, output: module.more(output))
    with FlexModel(model, {}) as flex:
        flex.register_forward_hook(HookFunction("more", editing_function=shifted))
        with pytest.raises(ValueError, match="has no module 'more' for the edit there"):
            flex.verify(models.mlp(), X, edits=True)
        (reference := models.mlp()).more = nn.Identity()
        assert flex.verify(reference, X, edits=True).rows
        (row,) = flex.verify(models.mlp(), X).rows
        assert row.result == "is not in the reference"


def uses_its_shard(module, full, save_ctx, modules):
    return full * len(module.weight)


@pytest.mark.ranks(2)
def test_edits_of_several_tensors_come_to_the_same():
    flex = FlexModel(models.TWO_RANKS["tp"].shard(models.block()), {}, tensor_parallel_size=2)

    def mix(module, fulls, save_ctx, modules):
        first, second = fulls
        second.mul_(second.flip(1))
        return first.cumsum(-1) * second.mean(), None

    flex.register_forward_hook(HookFunction("mlp", output_name="before"))
    flex.register_forward_hook(HookFunction("attn", None, mix, (0, 1)))
    report = flex.verify(models.block(), models.random(2, 4, 8), edits=True)
    assert report.is_equal and all(row.result == "equal" for row in report.rows), report
    assert [row.unpack_idx for row in report.rows] == [0, 1, 0, 0], report


@pytest.mark.ranks(2)
def test_what_an_edit_makes_differ_is_found():
    flex = flex_of(models.TWO_RANKS["tp"])
    flex.register_forward_hook(HookFunction("fc1", editing_function=uses_its_shard))
    report = flex.verify(models.mlp(), X, edits=True)
    assert [(row.name, row.differs) for row in report.rows] == [("fc1", False), ("", True)], report
    assert report.first_difference.name == ""
    assert flex.verify(models.mlp(), X).is_equal  # the model itself is


def raises(module, full, save_ctx, modules):
    raise ValueError("no")


@pytest.mark.ranks(2)
def test_an_edit_that_raises_is_an_error_on_every_rank():
    flex = flex_of(models.TWO_RANKS["tp"])
    handle = flex.register_forward_hook(HookFunction("fc1", editing_function=raises))
    with handle, pytest.raises(HookError, match=r"the reference failed: .* raised ValueError: no"):
        flex.verify(models.mlp(), X, edits=True)
    assert flex.verify(models.mlp(), X, edits=True).is_equal


def test_on_one_process():
    flex = FlexModel(model := models.mlp(), {})
    flex.register_forward_hook(editing.noise(0.5).at("fc1"))
    assert flex.verify(models.mlp(), X, edits=True).is_equal
    with torch.no_grad():
        model.out.weight[0] += 1
    assert flex.verify(models.mlp(), X, edits=True).first_difference.name == ""

"""A FlexModel, or the model in it, in the hands of other code: compiled, copied, pickled, saved,
resized, generated with, beside a DataLoader. Right, or an error that says what to do.
"""

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

import models
from flex_model import FlexModel, HookError, HookFunction
from shared_edits import mixing_ends as mix

BATCH = models.random(4, 6)
IDS = 1 + models.random(2, 5, seed=6).argsort()


def wrapped(model, *names, edit=mix, **settings):
    flex = FlexModel(model, {}, **settings)
    for name in names:
        flex.register_forward_hook(HookFunction(name, editing_function=edit))
    return flex


# ---- Compiled ------------------------------------------------------------------------------------


# ---- Cast ----------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["fsdp2", "dtensor"])
def test_a_model_of_dtensors_is_cast_after_hooked_runs(name):
    """torch swaps the contents of DTensors, which it refuses while there are weak references."""
    parallelism = models.TWO_RANKS[name]
    model = parallelism.shard(models.mlp(dtype=torch.float32))
    rows = parallelism.my_rows(BATCH.float())
    gc.disable()  # which drops references of a cycle at any time
    try:
        with FlexModel(model, {}, **parallelism.sizes) as flex:
            flex.register_hook(HookFunction("fc2.weight"))
            flex(rows).sum().backward()
        flex = wrapped(model, "fc1", edit=None, **parallelism.sizes)
        flex(rows).sum().backward()
        flex.dry_run(rows)
        flex.double()
    finally:
        gc.enable()
    if name == "dtensor":  # FSDP2 itself can't run once it was cast after a forward
        assert_close(flex(BATCH), models.mlp()(BATCH), rtol=1e-6, atol=1e-6)
    assert all(parameter.dtype == torch.float64 for parameter in model.parameters())
    flex.restore()


# ---- Copied and pickled --------------------------------------------------------------------------


def check_a_copy(model, base, edited, **settings):
    flex = wrapped(model, "fc1", **settings)
    assert_close(flex(BATCH), edited)
    twin = copy.deepcopy(flex.module)
    flex.output_ptr.clear()
    assert_close(twin(BATCH), base)  # it was copied with its hooks, which are not its own
    assert not flex.output_ptr
    again = wrapped(twin, "fc1", **settings)
    assert_close(again(BATCH), edited)
    assert len(again.output_ptr.get("fc1", [0])) == 1
    assert not flex.output_ptr
    assert_close(flex(BATCH), edited)
    flex.restore()
    assert_close(again(BATCH), edited)
    again.restore()
    assert_close(twin(BATCH), base)


def edited_by_torch(model, name):
    model.get_submodule(name).register_forward_hook(lambda m, a, out: mix(m, out, None, None))
    return model


def test_a_copy_of_a_hooked_model_has_no_hooks_of_ours():
    base, edited = models.mlp()(BATCH), edited_by_torch(models.mlp(), "fc1")(BATCH)
    check_a_copy(models.mlp(), base, edited)


@pytest.mark.ranks(2)
def test_a_copy_of_a_hooked_model_on_two_ranks():
    base, edited = models.mlp()(BATCH), edited_by_torch(models.mlp(), "fc1")(BATCH)
    model = models.TWO_RANKS["dtensor"].shard(models.mlp())
    check_a_copy(model, base, edited, tensor_parallel_size=2)


# ---- Modules that were replaced ------------------------------------------------------------------


def test_a_hook_at_a_module_that_was_replaced_is_an_error():
    """Before, the hook was not called, without a word."""
    flex = wrapped(models.mlp())
    handle = flex.register_forward_hook(hook := HookFunction("fc1", editing_function=mix))
    flex.update_hook_groups("fc1", "edits")
    flex.register_forward_hook(HookFunction("act"))
    flex(BATCH)
    flex.module.fc1 = copy.deepcopy(flex.module.fc1)
    for _ in range(2):
        with pytest.raises(HookError, match=r"forward hook on .fc1.: the module .* not in the mod"):
            flex(BATCH)
    flex(BATCH, groups="edits", complement=True)  # it is not active
    handle.remove()
    flex(BATCH)
    flex.register_forward_hook(hook)
    assert_close(flex(BATCH), edited_by_torch(models.mlp(), "fc1")(BATCH))


def test_a_hook_inside_of_a_module_that_was_replaced():
    flex = wrapped(models.seeded(models.Checkpointed).double(), "a.act", "b.act")
    flex(BATCH)
    flex.module.set_submodule("b", copy.deepcopy(flex.module.b))
    with pytest.raises(HookError, match=r"forward hook on 'b\.act': the module"):
        flex(BATCH)


def test_a_module_that_was_only_wrapped_keeps_its_hooks():
    flex = wrapped(models.mlp(), "fc1")
    expected = flex(BATCH)
    flex.module.fc1 = nn.Sequential(flex.module.fc1)
    flex.module.act = flex.module.act  # nothing new
    assert torch.equal(flex(BATCH), expected)


def test_a_parameter_that_was_replaced():
    flex = FlexModel(models.mlp(), {})
    flex.register_hook(HookFunction("fc1.weight"))
    flex(BATCH).sum().backward()
    flex.module.load_state_dict(models.mlp().state_dict())  # in place
    flex(BATCH).sum().backward()
    flex.module.load_state_dict(models.mlp().state_dict(), assign=True)
    with pytest.raises(HookError, match=r"hook on 'fc1.weight': the parameter .* not in the model"):
        flex(BATCH)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("on", [(0, 1), (1,)])
def test_a_module_that_was_replaced_on_some_ranks(on):
    shard = models.TWO_RANKS["tp"].shard
    flex = wrapped(shard(models.mlp()), "fc1", tensor_parallel_size=2)
    flex(BATCH)
    if dist.get_rank() in on:
        flex.module.fc1 = shard(models.mlp()).fc1
    with pytest.raises(HookError, match=f"rank {on[0]}: forward hook on 'fc1': the module"):
        flex(BATCH)
    flex.restore()


# ---- What transformers does with a model ---------------------------------------------------------


def test_embeddings_that_are_resized():
    flex = wrapped(models.llama(), "model.embed_tokens", "model.layers.0.mlp")
    handle = flex.register_forward_hook(hook := HookFunction("lm_head"))
    with torch.no_grad():
        flex(IDS)
        flex.resize_token_embeddings(70, mean_resizing=False)
        with pytest.raises(HookError, match=r"hook on 'lm_head': .*resize_token_embeddings"):
            flex(IDS)
        handle.remove()
        flex.register_forward_hook(hook)
        logits = flex(IDS).logits
    assert logits.shape == flex.output_ptr["lm_head"][0].shape == (2, 5, 70)
    assert flex.get_module_parameter("lm_head.weight").shape == (70, 32)
    reference = models.llama()
    reference.model.embed_tokens.register_forward_hook(lambda m, a, o: mix(m, o, None, None))
    edited_by_torch(reference, "model.layers.0.mlp")
    assert_close(logits[..., :64], reference(IDS).logits.detach())


def generated(model, **settings):
    return model.generate(
        IDS[:1],
        attention_mask=torch.ones_like(IDS[:1]),
        max_new_tokens=6,
        do_sample=False,
        pad_token_id=0,
        **settings,
    )


def check_assisted(model, draft, hooked_draft):
    expected = generated(edited_by_torch(models.llama(), "model.layers.0.mlp"))
    flex = wrapped(model, "model.layers.0.mlp")
    rank = dist.get_rank() if dist.is_initialized() else 0
    ways = {
        "alone": {},
        "assistant": {"assistant_model": draft},
        "hooked assistant": {"assistant_model": hooked_draft},
        "prompt": {"prompt_lookup_num_tokens": 2},
        "early exit": {"assistant_early_exit": 1},
        "static cache": {"cache_implementation": "static"},
    }
    for way, more in ways.items():
        flex.output_ptr.clear()
        assert torch.equal(generated(flex, **more), expected), way
        # Each position but the last, and those of drafts that were rejected.
        positions = sum(one.shape[1] for one in flex.output_ptr.get("model.layers.0.mlp", []))
        assert positions >= 10 if rank == 0 else positions == 0, way
    flex.restore()


def test_assisted_generation_has_the_edits():
    hooked = wrapped(models.llama(layers=1), "model.layers.0.mlp", edit=None)
    check_assisted(models.llama(), models.llama(layers=1), hooked)


def test_a_hooked_model_is_saved_without_its_hooks(tmp_path):
    flex = wrapped(models.llama(), "model.layers.0.mlp")
    flex.save_pretrained(tmp_path)
    assert not flex.output_ptr
    again = type(flex.module).from_pretrained(tmp_path, dtype=torch.float64)
    assert again.state_dict().keys() == models.llama().state_dict().keys()
    assert_close(again(IDS).logits, models.llama()(IDS).logits)


@pytest.mark.ranks(2)
def test_a_copy_of_a_model_that_transformers_has_sharded_is_refused(tmp_path):
    """Before, hooks on its parameters saw nothing: it computes with the weights of the other."""
    pytest.importorskip("transformers.distributed")
    model = models.loaded_by_transformers(models.llama(layers=1), tmp_path)
    flex = wrapped(model, "model.layers.0.mlp")
    with pytest.raises(ValueError, match=r"computes with those of another.*load the model twice"):
        FlexModel(copy.deepcopy(flex.module))
    expected = edited_by_torch(models.llama(layers=1).float(), "model.layers.0.mlp")
    assert_close(flex(IDS).logits, expected(IDS).logits)
    flex.restore()


@pytest.mark.ranks(2)
def test_a_hooked_model_is_saved_from_two_ranks(tmp_path):
    pytest.importorskip("transformers.distributed")
    whole = models.llama()
    model = models.loaded_by_transformers(whole, tmp_path / "first")
    flex = wrapped(model, "model.layers.0.mlp.act_fn")
    flex(IDS)
    flex.save_pretrained(tmp_path / "second")
    dist.barrier()
    again = type(whole).from_pretrained(tmp_path / "second", dtype=torch.float32)
    for (name, value), expected in zip(again.state_dict().items(), whole.state_dict().values()):
        assert_close(value, expected.float(), rtol=0, atol=0, msg=name)
    flex.restore()


# ---- A DataLoader that is made after the wrap ----------------------------------------------------

"""A script that drives two ranks: the FlexModel of the ranks, used as if it were here."""

import re
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("ipyparallel")
kernels = pytest.importorskip("kernels")
pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

import flex_model.notebook
from flex_model import FlexModel, HookFunction, editing

PATH = str(Path(__file__).parents[2] / "examples" / "induction_model")
LAYERS = [f"model.layers.{i}" for i in range(2)]
TOKENS = torch.arange(24).reshape(2, 12) % 7 + 3


def load(path, num_ranks):
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    sharded = {"distributed_config": DistributedConfig(tp_size=num_ranks)} if num_ranks > 1 else {}
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **sharded).eval()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with kernels.marked(tmp_path_factory.mktemp("driver")) as mark:
        with flex_model.notebook.launch(2, grace_s=2) as ranks:
            yield ranks
        assert kernels.wait_until_none_left(mark) == []


@pytest.fixture(scope="module")
def models(ranks):
    """The model of the ranks and the unsharded one."""
    return ranks.run(load, PATH, 2), load(PATH, 1)


@pytest.fixture
def flex(ranks, models):
    with ranks.wrap(models[0]) as flex:
        yield flex


@pytest.fixture
def unsharded(models):
    with FlexModel(models[1], {}) as flex:
        yield flex


def mix(module, full, save_ctx, modules):
    """Mixes the shards, and reads what it kept."""
    save_ctx.seen = getattr(save_ctx, "seen", 0) + 1
    save_ctx.norm = full.norm()
    return full.flip(-1) * 0.5


def close(left, right):
    torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_hooks_records_and_save_ctx_are_those_of_the_unsharded_model(flex, unsharded):
    for one in (flex, unsharded):
        one.register_forward_hook(HookFunction("model.layers.0.mlp.act_fn", editing_function=mix))
        one.register_forward_hook(HookFunction("model.layers.1.self_attn.q_proj"))
    close(flex(TOKENS).logits, unsharded(TOKENS).logits)
    assert list(flex.output_ptr) == list(unsharded.output_ptr)
    for name, (record,) in unsharded.output_ptr.items():
        close(flex.output_ptr[name][0], record)
    close(flex.save_ctx.norm, unsharded.save_ctx.norm)
    assert flex.save_ctx["seen"] == 1
    with pytest.raises(KeyError):
        flex.output_ptr["nothing"]


@torch.no_grad()
def test_generate_groups_and_handles(flex, unsharded):
    generated = []
    for one in (flex, unsharded):
        hook = HookFunction("model.layers.0.mlp.act_fn", editing_function=mix)
        handle = one.register_forward_hook(hook)
        assert one.update_hook_groups([hook], "mixed") == [hook]
        assert one.get_hook_function_groups(hook) == {"all", "mixed"}
        found = [one.generate(TOKENS, max_new_tokens=4, do_sample=False, pad_token_id=0)]
        with one.active("mixed"):
            found += [one(TOKENS).logits, one(TOKENS).logits]
        assert len(one.output_ptr["model.layers.0.mlp.act_fn"]) == 2
        hook.editing_function = None
        found.append(one(TOKENS).logits)
        handle.remove()
        assert len(one.layouts()) == 0
        generated.append(found)
    for left, right in zip(*generated):
        close(left, right)
    assert not torch.equal(generated[0][1], generated[0][3])


@torch.no_grad()
def test_what_editing_functions_read_is_the_drivers_in_each_call(flex, unsharded):
    """Variables, tensors that are written in place, and hooks that only the ranks keep."""
    found = []
    for one in (flex, unsharded):
        settings, vector = {}, torch.arange(256.0)

        def scaled(module, full, save_ctx, modules, settings=settings):
            return full.flip(-1) * settings["strength"]

        kept = editing.capture()
        edit = scaled | editing.steer(vector) | kept
        one.register_forward_hook(edit.at("model.layers.0.mlp.act_fn"))
        del edit
        for settings["strength"] in (0.5, 2.0):
            found.append(one(TOKENS).logits)
        vector.mul_(0.1)
        found.append(one(TOKENS).logits)
        with torch.autocast("cpu", torch.bfloat16):
            assert one(TOKENS).logits.dtype == torch.bfloat16
        one.register_forward_pre_hook(editing.patch(kept).at("model.layers.0.mlp.down_proj"))
        found.append(one(TOKENS).logits)
    for left, right in zip(found, found[4:]):
        close(left, right)
    assert len({logits.sum().item() for logits in found[:3]}) == 3


@torch.no_grad()
def test_a_new_edit_holds_after_errors_and_looks_at_records(ranks, flex, unsharded):
    found = []
    for one in (flex, unsharded):
        hook = HookFunction("model.layers.0.mlp.act_fn", editing_function=mix)
        handle = one.register_forward_hook(hook)
        one(TOKENS)
        hook.editing_function = editing.scale(3.0)
        one.output_ptr[hook.module_name]
        found.append(one(TOKENS).logits)
        hook.editing_function = editing.scale(5.0)
        with pytest.raises((TypeError, ValueError)):
            one(TOKENS, groups=threading.Lock())  # can't travel
        found.append(one(TOKENS).logits)
        if one is flex:
            hook.output_name = "other"
            with pytest.raises(ValueError, match="can't be set while the hook is registered"):
                one(TOKENS)
            hook.output_name = None
        handle.remove()
        hook.output_name = "other"
        one.register_forward_hook(hook)
        found.append(one(TOKENS).logits)
        assert "other" in one.output_ptr
    for left, right in zip(found, found[3:]):
        close(left, right)


def test_a_sharded_state_dict_is_read_by_items(ranks, models):
    ranks["model"] = models[0]
    ranks.run("state = model.state_dict()")
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(ranks["state"][name], models[1].state_dict()[name])


@torch.no_grad()
def test_ready_edits_and_experiments(flex, unsharded):
    corrupted = TOKENS.flip(1)
    found = []
    for one in (flex, unsharded):
        kept = editing.capture()
        handle = one.register_forward_hook(kept.at(LAYERS[0]))
        one(TOKENS)
        handle.remove()
        handle = one.register_forward_hook(editing.patch(kept, positions=5).at(LAYERS[0]))
        patched = one(corrupted).logits
        handle.remove()
        lens = editing.logit_lens("lm_head.weight", norm="model.norm.weight")
        one.register_forward_hook(lens.at(LAYERS[0]))
        one(TOKENS)
        arguments = (TOKENS, corrupted, LAYERS, lambda logits: logits[:, -1, 5].sum().item())
        if one is flex:
            read, heat = flex.run(lens.take), flex.run(editing.activation_patching, *arguments)
        else:
            read, heat = lens.take(one), editing.activation_patching(one, *arguments)
        found.append([patched, read[LAYERS[0]][0], heat.values])
    for left, right in zip(*found):
        close(left, right)


def test_one_bar_shows_the_progress_of_all_ranks(ranks, flex, capsys):
    ranks.run("from tqdm import tqdm\nfor i in tqdm(range(3), desc='counting'): pass")
    shown = capsys.readouterr().err
    assert "[0] counting" in shown and "[1]" not in shown, shown
    flex.run(editing.activation_patching, TOKENS, TOKENS, LAYERS, lambda logits: 0.0, positions=[0])
    shown = capsys.readouterr().err
    assert "[0] patched runs" in shown and "[1]" not in shown, shown


def test_a_large_record_is_not_sent_but_mapped(ranks):
    """Its bytes lie in the memory file that a rank wrote: one copy there, none here."""
    ranks.run("large = {'record': [torch.arange(2.0**24)]}")
    found = ranks["large"]["record"][0]
    assert torch.equal(found, torch.arange(2.0**24))
    pages = Path("/proc/self/maps").read_text().splitlines()
    (mapped,) = (line for line in pages if contains(line, found.data_ptr()))
    assert "memfd:flex_model" in mapped


def contains(mapped, address):
    """Whether a line of /proc/self/maps is of the pages that hold ``address``."""
    begin, end = (int(number, 16) for number in mapped.split()[0].split("-"))
    return begin <= address < end


def test_reports_come_here(flex, models):
    hook = HookFunction("model.layers.0.mlp.act_fn", editing_function=mix)
    flex.register_forward_hook(hook)
    with torch.no_grad(), flex.timeline() as timeline:
        flex(TOKENS)
    assert len(timeline) == 2 and "in edits" in str(timeline) and timeline.end_us > 0
    report = flex.verify(models[1], TOKENS)
    assert report.is_equal and "sites are equal" in str(report)
    (row,) = flex.layouts()
    assert row.full_shape == (2, 12, 256)
    assert "</table>" in flex.dry_run(TOKENS)._repr_html_()


def test_trainable_modules_stay_on_the_ranks(flex, unsharded):
    torch.manual_seed(1)
    probe = nn.Linear(2, 2)
    flex.register_trainable_module("probe", probe)
    torch.testing.assert_close(flex.trainable_modules["probe"].weight, probe.weight.detach())
    assert "Linear" in repr(flex.trainable_modules["probe"])


def test_errors_are_raised_here(ranks, flex):
    with pytest.raises(flex_model.notebook.CellError, match="nearest") as caught:
        flex.register_forward_hook(HookFunction("model.layer.0"))
    assert caught.value.ranks == [0, 1] and caught.value.name == "ValueError"
    with pytest.raises(flex_model.notebook.CellError, match="no cell has defined 'missing'"):
        ranks["missing"]
    assert ranks.run(lambda: torch.distributed.get_rank()) == 0


def test_values_go_both_ways(ranks):
    ranks["given"] = {"a": torch.arange(6).reshape(2, 3).T, "b": [1, "two"]}
    given = ranks["given"]
    assert torch.equal(given["a"], torch.arange(6).reshape(2, 3).T) and given["b"] == [1, "two"]
    assert re.search(r"a +3 x 2 +int64 +1", repr(given))
    ranks.run("other = given['a'] + dist.get_rank()")
    assert torch.equal(ranks["other"], given["a"])


def test_a_data_parallel_model_is_not_called_with_one_batch_for_all(ranks):
    model = ranks.run(lambda: nn.Linear(3, 3))
    refused = pytest.raises(flex_model.notebook.CellError, match="rows of their own")
    with ranks.wrap(model, data_parallel_size=2) as flex:
        with refused:
            flex(torch.ones(2, 3))
        with refused:
            ranks.run(lambda flex, x: flex(x), flex, torch.ones(2, 3))
        ranks["parallel"] = flex
        flex.register_forward_hook(HookFunction("", output_name="whole"))
        ranks.run("with torch.no_grad(): parallel(torch.ones(1, 3) * dist.get_rank())")
        assert flex.output_ptr["whole"][0].shape == (2, 3)


def test_launch_without_a_number():
    if torch.cuda.is_available():
        pytest.skip("there are GPUs")
    with pytest.raises(ValueError, match="give the number of ranks"):
        flex_model.notebook.launch()


@torch.no_grad()
def test_caches_stay_on_the_ranks(flex, unsharded):
    found = []
    for one in (flex, unsharded):
        first = one(TOKENS[:, :6], use_cache=True)
        found.append(one(TOKENS[:, 6:], past_key_values=first.past_key_values).logits)
    close(*found)


def test_memory_and_doctor(ranks):
    assert len(ranks.memory()) == 2 and "MiB" in str(ranks.memory())
    report = ranks.doctor()
    assert not report.findings and "all is well" in str(report)
    assert "<table>" in report._repr_html_()

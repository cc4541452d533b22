"""Hooks over transformers' own pipeline (``pp_size``): the numbers of the unsplit model."""

import copy
import functools
import inspect

import pytest
import torch
import torch.distributed as dist

import models
import test_pipelining
from flex_model import FlexModel, HookError, HookFunction, HookMismatchError, editing
from pipelines import alone_group

check = functools.partial(test_pipelining.check, tolerance=1e-10)

TOKENS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
SITES = (
    "model.embed_tokens",
    "model.layers.0.self_attn.q_proj",
    "model.layers.0",
    "model.layers.1.mlp.act_fn",
    "model.layers.2.self_attn.o_proj",
    "model.layers.3",
    "model.norm",
    "lm_head",
)
EDITED = ("model.layers.1.mlp.up_proj", "model.layers.2.self_attn.v_proj", "model.layers.3")


CACHES = ("past_key_values", "cache")


def mix(module, full, save_ctx, modules):
    """An edit that mixes rows, positions and features."""
    full = full + 0.3 * full.flip(0) + 0.2 * full.flip(-1)
    return full + 0.1 * full.mean(1, keepdim=True)


def load(folder, layers=4, attention="eager", **settings):
    """The unsplit model, and a function that loads it with sizes."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    if dist.get_rank() == 0:
        models.llama(layers, **settings).save_pretrained(folder)
    dist.barrier()

    def loaded(**sizes):
        config = DistributedConfig(**sizes) if sizes else None
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation=attention, distributed_config=config
        ).eval()

    return loaded(), loaded


def bare(model, **settings):
    return FlexModel(model, {}, **settings)


def hooked(model, **settings):
    flex = bare(model, **settings)
    for name in SITES:
        flex.register_forward_hook(HookFunction(name))
    for name in EDITED:
        flex.register_forward_hook(
            HookFunction(name, editing_function=mix, output_name=f"{name}.edited")
        )
    flex.register_forward_pre_hook(HookFunction("model.layers.2", output_name="input"))
    return flex


def alone(model, wrap=hooked):
    """The unsplit model of this rank alone."""
    return wrap(model, process_group=alone_group())


def check_generated(flex, other, padding=0, **settings):
    mask = torch.ones_like(TOKENS)
    mask[0, :padding] = 0
    settings = settings | {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    settings |= {"output_logits": True, "return_dict_in_generate": True}
    found, expected = (
        one.generate(TOKENS, attention_mask=mask, **settings) for one in (flex, other)
    )
    assert found.sequences.tolist() == expected.sequences.tolist()
    check({"": found.logits}, {"": expected.logits})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("tied", [False, True])
def test_forwards_and_generate(tmp_path, tied):
    whole, loaded = load(tmp_path, tie_word_embeddings=tied)
    run_all(whole, loaded(pp_size=2))


@pytest.mark.grid
@pytest.mark.ranks(4)
def test_four_stages(tmp_path):
    whole, loaded = load(tmp_path)
    run_all(whole, loaded(pp_size=4))


def run_all(whole, split):
    oracle, flex = alone(whole), hooked(split)
    expect_records = dist.get_rank() == 0

    def compare(call):
        found, expected = call(flex, split), call(oracle, whole)
        check({"": [found]}, {"": [expected]})
        check(flex.output_ptr, oracle.output_ptr if expect_records else {})

    with torch.no_grad():
        compare(lambda flex, model: flex(TOKENS).logits)
        compare(lambda flex, model: model(input_ids=TOKENS).logits)
        embedded = whole.get_input_embeddings().weight[TOKENS]
        compare(lambda flex, model: model(inputs_embeds=embedded).logits)
        compare(lambda flex, model: flex(TOKENS, groups=()).logits)
    check_generated(flex, oracle)
    check(flex.output_ptr, oracle.output_ptr if expect_records else {})
    assert flex.restore() is split
    assert not hasattr(split.forward, "_flex_model_runner")
    oracle.restore()
    check_generated(split, whole)


def fails(module, full, save_ctx, modules):
    raise ZeroDivisionError("in an edit")


@pytest.mark.ranks(2, timeout=300)
def test_failures_on_one_stage(tmp_path):
    whole, loaded = load(tmp_path)
    split = loaded(pp_size=2)
    flex, oracle = hooked(split, timeout=20), alone(whole)
    for name in ("model.embed_tokens", "model.layers.1", "model.layers.2.mlp", "lm_head"):
        handle = flex.register_forward_hook(
            HookFunction(name, editing_function=fails, output_name="failing")
        )
        with pytest.raises(HookError, match=f"(?s)'{name}'.*ZeroDivisionError: in an edit"):
            flex(TOKENS)
        with pytest.raises(HookError, match="in an edit"):
            flex.generate(TOKENS, max_new_tokens=2)
        handle.remove()
        check_generated(flex, oracle)  # the next forwards are right
    # The model's own error: on the rank where it is raised as it is, on the others as a HookError.
    for name in ("model.layers.0.mlp", "model.layers.3", "lm_head", "model"):
        if name == "model" or dist.get_rank() == flex.stages_of(name)[0]:
            handle = split.get_submodule(name).register_forward_hook(raise_)
            error = OSError
        else:
            handle, error = None, HookError
        with pytest.raises(error, match="of the user"):
            split(TOKENS)
        if handle is not None:
            handle.remove()
        check_generated(flex, oracle)
    with pytest.raises((IndexError, HookError), match="out of range"):
        flex(TOKENS + 100)
    with pytest.raises(TypeError, match="multiple values"):
        flex(TOKENS, input_ids=TOKENS)
    with pytest.raises(ValueError, match=r"exactly one of input_ids|Cannot determine hidden"):
        split()
    with pytest.raises(HookMismatchError, match="shapes of keyword arguments along a pipeline"):
        flex(TOKENS[: 1 + dist.get_rank()])
    check_generated(flex, oracle)


def raise_(module, args, output):
    raise OSError("of the user")


@pytest.mark.ranks(2)
def test_what_is_refused(tmp_path):
    _, loaded = load(tmp_path, tie_word_embeddings=True)
    split = loaded(pp_size=2)
    with pytest.raises((TypeError, ValueError), match=r"pickle|does not copy its forwards"):
        FlexModel(copy.deepcopy(split))
    for setting in ({"batch_mode": "full"}, {"return_on": "all"}, {"microbatch_dim": 1}):
        with pytest.raises(TypeError, match="is a setting of the steps of a pipeline"):
            FlexModel(split, **setting)
    flex = FlexModel(split, {})
    with pytest.raises(TypeError, match="is a setting of the steps of a pipeline"):
        flex.batch_mode = "full"
    with pytest.raises(TypeError, match="FlexModel already, which runs its forwards"):
        FlexModel(split)
    for register in ("register_full_backward_hook", "register_full_backward_pre_hook"):
        with pytest.raises(ValueError, match=r"'lm_head': .*send no gradients"):
            getattr(flex, register)(HookFunction("lm_head"))
    with pytest.raises(ValueError, match=r"'model.norm.weight': .*send no gradients"):
        flex.register_hook(HookFunction("model.norm.weight"))
    for name, hint in (("model", "model.norm"), ("model.rotary_emb", ""), ("", "lm_head")):
        match = f"module '{name}' is spread over the stages.*{hint}"
        with pytest.raises(ValueError, match=match):
            flex.register_forward_hook(HookFunction(name))
    with pytest.raises(ValueError, match=r"no module 'model\.layers\.7'"):
        flex.register_forward_hook(HookFunction("model.layers.7"))
    with pytest.raises(RuntimeError, match="verify is for a model that runs as a whole"):
        flex.verify(TOKENS)
    with pytest.raises(RuntimeError, match="does not require grad"):
        flex(TOKENS).logits.sum().backward()


@pytest.mark.ranks(2, timeout=300)
def test_caches_of_which_later_stages_know_nothing(tmp_path):
    """Without a FlexModel, transformers' own pipeline gives wrong numbers for padded rows."""
    # Eager attention of rows that are all padding is NaN in float64.
    whole, loaded = load(tmp_path, attention="sdpa")
    split = loaded(pp_size=2)
    check_generated(split, whole, padding=2, use_cache=False)
    flex = FlexModel(split, {})
    check_generated(flex, whole, padding=2, use_cache=False)
    check_generated(flex, whole, num_beams=2)
    unknown = r"later stages of transformers' pipeline \(pp_size\) know nothing: "
    with pytest.raises(ValueError, match=unknown + "they would not leave out the padding"):
        check_generated(flex, whole, padding=2)
    with pytest.raises(ValueError, match=unknown + "they would not see the keys in a StaticCache"):
        check_generated(flex, whole, cache_implementation="static")
    flex.restore()
    with pytest.raises(AssertionError):
        check_generated(split, whole, padding=2)
    flex = FlexModel(split, {})

    def steps(model, size, name, positions=True):
        """The logits of the last ``size`` tokens, continued from the cache of the others."""
        past = model(TOKENS[:, :-size], use_cache=True)
        cache = past["cache"] if "cache" in past else past["past_key_values"]
        places = torch.arange(5)[-size:].expand(2, -1) if positions else None
        return model(TOKENS[:, -size:], position_ids=places, **{name: cache}).logits

    own = next(name for name in inspect.signature(whole.forward).parameters if name in CACHES)
    for name in dict.fromkeys(("past_key_values", own)):  # since transformers 5.24 "cache", too
        check({"": [steps(flex, 1, name)]}, {"": [steps(whole, 1, own)]})
        with pytest.raises(ValueError, match=unknown + "they would see no mask for several"):
            steps(flex, 2, name)
        with pytest.raises(ValueError, match=unknown + "without position_ids, they would count"):
            steps(flex, 1, name, positions=False)


@pytest.mark.ranks(2)
def test_parameters_of_all_stages(tmp_path):
    whole, loaded = load(tmp_path, tie_word_embeddings=True)
    split = loaded(pp_size=2)
    with bare(split) as flex, alone(whole, bare) as oracle:
        for name in ("model.layers.3.mlp.up_proj.weight", "lm_head.weight", "model.norm.weight"):
            full = flex.get_module_parameter(name)
            assert torch.equal(full, whole.get_parameter(name))
            for one in (flex, oracle):
                one.set_module_parameter(name, full + 0.1 * full.flip(0))
            check({"": [flex(TOKENS).logits]}, {"": [oracle(TOKENS).logits]})
        # Both names: on the first stage the embedding, on the last one the head.
        assert torch.equal(
            flex.get_module_parameter("model.embed_tokens.weight"), whole.lm_head.weight
        )
        found = dict(flex.iterate_parameters())
        assert set(found) == {*dict(whole.named_parameters()), "lm_head.weight"}
        name = "model.layers.0.mlp.down_proj.weight"  # of another stage than the hook's
        records = []
        for one in (flex, oracle):
            project.hook = HookFunction(
                "model.layers.3.mlp", editing_function=project, parameters=[name]
            )
            one.register_forward_hook(project.hook)
            records.append(one(TOKENS).logits)
        check({"": records[:1]}, {"": records[1:]})


def project(module, full, save_ctx, modules):
    weight = project.hook.parameters["model.layers.0.mlp.down_proj.weight"]
    return full + full @ weight.mean(1).diag()


@pytest.mark.ranks(2)
def test_rank_0_takes_the_logits_of_lenses_of_all_stages(tmp_path):
    whole, loaded = load(tmp_path)
    found = []
    with bare(loaded(pp_size=2)) as flex, alone(whole, bare) as oracle:
        for one in (flex, oracle):
            lens = editing.logit_lens("lm_head.weight", norm="model.norm.weight")
            for layer in range(4):
                one.register_forward_hook(lens.at(f"model.layers.{layer}"))
            one(TOKENS)
            found.append(lens.take(one))
            assert lens.take(one) == {}
    if dist.get_rank() == 0:
        check(*found)
    else:
        assert found[0] == {} and len(found[1]) == 4


@pytest.mark.ranks(2)
def test_settings_random_edits_and_save_ctx(tmp_path):
    whole, loaded = load(tmp_path)
    split = loaded(pp_size=2)
    for settings in ({"edit_on": "rank0", "save_ctx_on": "all"}, {"output_ranks": "all"}):
        with bare(split, **settings) as flex, alone(whole, bare) as oracle:
            check_settings(flex, oracle, settings)


def check_settings(flex, oracle, settings):
    outputs = []
    for one in (flex, oracle):
        for name in ("model.layers.0", "model.layers.3"):
            one.register_forward_hook(HookFunction(name, editing_function=noise))
        one.create_hook_group("norms", "post_attention_layernorm", output_name="n.{name}")
        torch.manual_seed(5)
        with one.active():
            outputs.append([one(TOKENS).logits, one(TOKENS[:1]).logits])
        found = one.generate(
            TOKENS, max_new_tokens=3, output_logits=True, return_dict_in_generate=True
        )
        outputs[-1] += [*found.logits, one(TOKENS).logits]
    check({"": outputs[0]}, {"": outputs[1]})
    if dist.get_rank() == 0 or "output_ranks" in settings:
        assert len(oracle.output_ptr) == 6
        check(flex.output_ptr, oracle.output_ptr)
    if dist.get_rank() == 0 or "save_ctx_on" in settings:
        for name in ("seen_0", "seen_3"):
            found, expected = (getattr(one.save_ctx, name) for one in (flex, oracle))
            torch.testing.assert_close(found, expected)


def noise(module, full, save_ctx, modules):
    setattr(save_ctx, f"seen_{module.self_attn.layer_idx}", full.mean())
    return full + 0.1 * torch.randn_like(full)

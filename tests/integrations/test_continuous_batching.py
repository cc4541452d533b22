"""Hooks in transformers' continuous batching are refused: it runs the model in a thread."""

import pytest

import models
from flex_model import FlexModel, HookError, HookFunction
from flex_model.integrations import transformers_private

pytest.importorskip("transformers")
from transformers import GenerationConfig, generation

PROMPTS = [[1, 2, 3], [4, 5]]
NAMES = ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager")

# Of transformers, whose thread may be collected late.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def generate_batch(model):
    settings = GenerationConfig(max_new_tokens=2, do_sample=False, pad_token_id=0, eos_token_id=-1)
    config = generation.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=16)
    config.default_compile_level = 0
    return model.generate_batch(PROMPTS, settings, config, warmup=False)


def test_methods_are_refused_by_name_while_hooks_are_active():
    flex = FlexModel(models.llama(1).float(), {})
    handle = flex.register_forward_hook(HookFunction("model.layers.0"))
    for name in NAMES:
        with pytest.raises(HookError, match=rf"{name}\(\): expected no active hook"):
            getattr(flex, name)(PROMPTS)
    handle.remove()
    assert flex.init_continuous_batching() is not None


def test_the_models_own_method_reports_it_for_each_request():
    flex = FlexModel(models.llama(1).float(), {})
    flex.register_forward_hook(HookFunction("model.layers.0"))
    results = generate_batch(flex.module).values()
    assert len(results) == len(PROMPTS)
    assert all("a forward with a paged cache: expected no active hook" in r.error for r in results)
    assert not flex.output_ptr


def test_attention_functions_get_arguments_that_show_it(monkeypatch):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model, seen = models.llama(1).float(), []
    find = type(ALL_ATTENTION_FUNCTIONS).get_interface

    def get_interface(self, *names):
        attend = find(self, *names)

        def recorded(layer, *tensors, **arguments):
            seen.append(transformers_private.is_paged(arguments))
            return attend(layer, *tensors, **arguments)

        return recorded

    monkeypatch.setattr(type(ALL_ATTENTION_FUNCTIONS), "get_interface", get_interface)
    results = generate_batch(model).values()
    assert [r.error for r in results] == [None, None]
    assert seen and all(seen)
    seen.clear()
    model.generate(models.llama(1).dummy_inputs["input_ids"][:, :2], max_new_tokens=2)
    assert seen and not any(seen)

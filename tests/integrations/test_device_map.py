"""accelerate's device maps on one process: weights on the CPU and on disk, loaded in each forward.
Several devices: cuda/test_devices_cuda.py.
"""

import pytest
import torch
from torch.testing import assert_close

from flex_model import FlexModel, HookFunction
from tests import device_maps, models
from tests.device_maps import IDS, LAYERS, WEIGHT

accelerate = pytest.importorskip("accelerate")


@pytest.mark.parametrize("case", device_maps.CASES)
def test_offloaded_to_cpu_and_disk(case, tmp_path_factory):
    def dispatch(model):
        places = device_maps.device_map("cpu", "disk", "disk")
        folder = tmp_path_factory.mktemp("offloaded")
        return accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=folder)

    device_maps.check(case, dispatch)


def test_the_gradient_of_an_offloaded_parameter_is_refused():
    model = models.llama(3)
    accelerate.cpu_offload(model.model.layers[1], torch.device("cpu"))
    flex = FlexModel(model, {})
    flex(IDS).logits.sum().backward()
    for use in (flex.get_module_gradient, lambda name: flex.register_hook(HookFunction(name))):
        with pytest.raises(ValueError, match=r"accelerate offloads .*up_proj.*keep its layer on"):
            use(WEIGHT)
    other = WEIGHT.replace("1", "2")
    assert_close(flex.get_module_gradient(other), model.get_parameter(other).grad)
    flex.wrapped_module_requires_grad(False)
    assert flex.get_module_gradient(WEIGHT) is None


@pytest.mark.parametrize("is_wrapped_first", [False, True])
def test_a_hook_gets_what_accelerates_hooks_return(is_wrapped_first):
    class Twice(accelerate.hooks.ModelHook):
        def post_forward(self, module, output):
            return output * 2

    model, records = models.llama(3), {}
    layer = model.model.layers[1].mlp
    add = lambda: accelerate.hooks.add_hook_to_module(layer, Twice())  # noqa: E731
    if not is_wrapped_first:
        add()
    flex = FlexModel(model, records)
    flex.register_forward_hook(HookFunction("model.layers.1.mlp"))
    if is_wrapped_first:
        add()
    flex(IDS)
    (twice,) = records.pop("model.layers.1.mlp")
    accelerate.hooks.remove_hook_from_module(layer)
    flex(IDS)
    assert_close(twice, records["model.layers.1.mlp"][0] * 2)


def test_hooks_stay_when_the_model_is_dispatched_and_taken_back():
    model, records = models.llama(3), {}
    flex = FlexModel(model, records)
    for layer in LAYERS:
        flex.register_forward_hook(HookFunction(layer, editing_function=device_maps.mix))
    expected = flex(IDS).logits, dict(records)
    accelerate.cpu_offload(model, torch.device("cpu"))
    assert model.lm_head.weight.is_meta
    assert_close((flex(IDS).logits, records), expected)
    accelerate.hooks.remove_hook_from_submodules(model)
    assert_close((flex(IDS).logits, records), expected)


def test_a_dry_run_leaves_an_offloaded_model_as_it_is():
    model = models.llama(3)
    expected = model(IDS).logits
    accelerate.cpu_offload(model, torch.device("cpu"))
    flex = FlexModel(model, {})
    flex.register_forward_hook(HookFunction(LAYERS[0]))
    assert flex.dry_run(IDS) is not None
    assert_close(flex(IDS).logits, expected)

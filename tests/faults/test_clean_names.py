"""Errors name modules and parameters as the model has them, without what wrappers put in between
(``_fsdp_wrapped_module``, DDP's ``module``, ``_orig_mod``), whichever of their names was given.
These named the wrapped ones before.
"""

import re
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import models
from flex_model import FlexModel, HookError, HookFunction

BATCH = models.random(4, 6)


def fsdp1(model):
    settings = {"device_id": torch.device("cpu"), "use_orig_params": True}
    model.fc1 = FullyShardedDataParallel(model.fc1, **settings)
    return FullyShardedDataParallel(model, **settings)


def ddp_compiled(model):
    model.fc1 = torch.compile(model.fc1, backend="eager")
    return DistributedDataParallel(model)


def fsdp2_compiled(model):
    model.fc1 = torch.compile(fully_shard(model.fc1), backend="eager")
    return fully_shard(model)


class AsMegatrons(nn.Module):
    """Keeps lists of its own where nn.Module has a method."""

    def __init__(self, module):
        super().__init__()
        self.module, self.buffers = module, []

    def forward(self, *inputs):
        return self.module(*inputs)


def megatron(model):
    for name in ("Float16Module", "DistributedDataParallel"):
        model = type(name, (AsMegatrons,), {})(model)
    return model


WRAPPERS = {"fsdp1": fsdp1, "ddp": ddp_compiled, "fsdp2": fsdp2_compiled, "megatron": megatron}


def fail(module, full, save_ctx, modules):
    raise ZeroDivisionError


def wrong_shape(module, full, save_ctx, modules):
    return full[:1]


def run(flex, kind="forward", edit=fail, name="fc1", **settings):
    function = HookFunction(name, editing_function=edit, **settings)
    handle = getattr(flex, f"register_{kind}_hook")(function)
    try:
        output = flex(BATCH)
        if "backward" in kind:
            output.sum().backward()
    finally:
        handle.remove()


def twice(flex, name):
    with flex.register_forward_hook(HookFunction(name, output_name="x")):
        flex.register_forward_pre_hook(HookFunction(name, output_name="x"))


# What raises, given the wrapped name of fc1 and that of its weight.
TRIGGERS = {
    "an edit": lambda flex, module, weight: run(flex, name=module),
    "a result": lambda flex, module, weight: run(flex, edit=wrong_shape, name=module),
    "a gradient": lambda flex, module, weight: run(flex, "full_backward", name=module),
    "unpack_idx": lambda flex, module, weight: run(flex, name=module, unpack_idx=3),
    "a shape": lambda flex, module, weight: run(flex, name=module, expected_shape=(None, 7)),
    "a record's name": lambda flex, module, weight: twice(flex, module),
    "a parameter": lambda flex, module, weight: flex.get_module_parameter(weight, (3, 3)),
    "a new value": lambda flex, module, weight: flex.set_module_parameter(weight, torch.ones(3)),
    "no tensor": lambda flex, module, weight: flex.set_module_parameter(weight, None),
    "no gradient": lambda flex, module, weight: no_gradient(flex, weight),
}


def no_gradient(flex, name):
    leaves = [parameter for parameter in flex.module.parameters() if parameter.is_leaf]
    for parameter in leaves:
        parameter.requires_grad_(False)
    try:
        flex.register_hook(HookFunction(name))
    finally:
        for parameter in leaves:
            parameter.requires_grad_(True)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_errors_have_clean_names(wrapper):
    flex = FlexModel(WRAPPERS[wrapper](models.mlp()), {}, data_parallel_size=2)
    plain = re.compile(r"(?<![\w.])fc1(\.weight)?(?!\w)")
    names = [name for name, _ in flex.module.named_modules() if "fc1" in name]
    parameters = [name for name, _ in flex.module.named_parameters() if "fc1" in name]
    assert max(names, key=len) != "fc1"
    wrong = []
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    for what, trigger in TRIGGERS.items():
        if (wrapper, what) == ("fsdp1", "no gradient"):
            continue  # after a forward its parameters are no leaves
        with pytest.raises((HookError, ValueError, TypeError)) as error:
            trigger(flex, max(names, key=len), parameters[-1].replace("bias", "weight"))
        text = str(error.value).partition("Last steps:")[0]
        if not plain.search(text) or re.search(r"_fsdp_wrapped|_orig_mod|'module\.", text):
            wrong.append(f"{what}: {text}")
    torch.compiler.reset()
    assert not wrong, "\n".join(wrong)


def test_a_group_of_a_wrapped_model():
    flex = FlexModel(torch.compile(nn.Sequential(nn.Linear(6, 6)), backend="eager"))
    flex.create_hook_group("all", nn.Linear, editing_function=fail)
    with pytest.raises(HookError, match="forward hook on '0': the editing function raised"):
        flex(BATCH.float())
    torch.compiler.reset()

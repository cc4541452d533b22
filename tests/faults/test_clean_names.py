"""Errors name modules and parameters as the model has them, without what wrappers put in between
(``_fsdp_wrapped_module``, DDP's ``module``, ``_orig_mod``), whichever of their names was given.
These named the wrapped ones before.
"""

import re
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

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


def checkpointed(model):
    model.fc1, model.fc2 = checkpoint_wrapper(model.fc1), checkpoint_wrapper(model.fc2)
    return torch.compile(model, backend="eager")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrapper", [*WRAPPERS, "checkpoint"])
@pytest.mark.parametrize("pattern", ["fc", re.compile(r"^fc\d$"), nn.Linear])
def test_a_group_has_each_module_of_a_wrapped_model_once_by_its_clean_name(wrapper, pattern):
    """A block in a wrapper of its own was edited twice; names, and so keys, had the wrappers'."""
    expected = ["inp", "fc1", "fc2", "out"] if pattern is nn.Linear else ["fc1", "fc2"]
    plain = models.mlp()
    for name in expected:
        plain.get_submodule(name).register_forward_hook(lambda module, args, output: output + 1)
    wrapped = {**WRAPPERS, "checkpoint": checkpointed}[wrapper](models.mlp())
    with FlexModel(wrapped, {}, data_parallel_size=2, output_ranks="all") as flex:
        hooks = flex.create_hook_group(
            "all of them", pattern, None, lambda m, full, s, ms: full + 1, output_name="{name}/out"
        )
        assert [hook.module_name for hook in hooks] == expected
        assert flex.update_hook_groups(re.compile("^fc2$"), "one") == [hooks[expected.index("fc2")]]
        weights = flex.create_hook_group("weights", "fc1.weight", hook_type="tensor")
        assert [hook.module_name for hook in weights] == ["fc1.weight"]
        with pytest.raises(ValueError, match="'mod' matches no module"):
            flex.create_hook_group("others", "mod")
        assert_close(flex(BATCH, groups="all of them"), plain(BATCH))
        assert sorted(flex.output_ptr) == sorted(f"{name}/out" for name in expected)
    torch.compiler.reset()


class Nested(nn.Module):
    """Has two modules ``fc``, one of them below a ``module``."""

    def __init__(self):
        super().__init__()
        self.fc, self.module = nn.Linear(6, 6), nn.ModuleDict({"fc": nn.Linear(6, 6)})

    def forward(self, x):
        return self.module["fc"](self.fc(x))


@pytest.mark.ranks(2)
def test_a_clean_name_that_is_also_the_wrapped_one_of_another_module():
    """``module.fc`` under DDP was ``fc``."""
    model = models.seeded(Nested)
    expected = {name: model.get_parameter(f"{name}.weight") for name in ("fc", "module.fc")}
    with FlexModel(DistributedDataParallel(model), data_parallel_size=2) as flex:
        found = {name: flex.get_module_parameter(f"{name}.weight") for name in expected}
        assert_close(found, expected)
        flex.register_forward_hook(HookFunction("module.fc", None, lambda m, *rest: 0 * rest[0]))
        assert not flex(BATCH.float()).any()

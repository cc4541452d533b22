"""FlexModel: wrap a module, look like it, restore it."""

import gc
import inspect
from argparse import Namespace
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

import models
from flex_model import DummyModule, FlexModel, HookFunction
from models import torch_hooks

BATCH = models.random(4, 6)


def plus_one(module, full, save_ctx, modules):
    return full + 1


def test_attributes():
    model, records = models.mlp(), {}
    flex = FlexModel(model, records)
    assert isinstance(flex, nn.Module)
    assert flex.module is model
    assert flex.output_ptr is records
    assert isinstance(flex.save_ctx, Namespace)
    assert isinstance(flex.trainable_modules, nn.ModuleDict)
    assert (flex.tp_size, flex.pp_size, flex.dp_size) == (1, 1, 1)
    assert isinstance(FlexModel(models.mlp()).output_ptr, dict)


@pytest.mark.parametrize("name", ["module", "trainable_modules", "mesh", "tp_size", "lengths"])
def test_what_hooks_rely_on_cannot_be_set(name):
    flex = FlexModel(models.mlp())
    before = getattr(flex, name)
    with pytest.raises(AttributeError, match=f"{name} can't be set.*wrap the other model"):
        setattr(flex, name, nn.ModuleDict())
    assert getattr(flex, name) is before


def test_the_signature_of_the_class_is_that_of_its_constructor():
    found = list(inspect.signature(FlexModel).parameters.values())
    assert found == list(inspect.signature(FlexModel.__init__).parameters.values())[1:]
    assert [parameter.default for parameter in found[1:6]] == [None, 1, 1, 1, None]


def test_what_belongs_to_schedules_is_refused_for_a_module():
    for setting in ({"batch_mode": "full"}, {"return_on": "all"}, {"microbatch_dim": 1}):
        with pytest.raises(TypeError, match="is a setting of the steps of a pipeline"):
            FlexModel(models.mlp(), **setting)
    flex = FlexModel(models.mlp(), batch_mode="micro")
    with pytest.raises(TypeError, match="is a setting of the steps of a pipeline"):
        flex.batch_mode = "full"
    with pytest.raises(TypeError, match="which has no stages"):
        flex.stages_of("fc1")
    assert not hasattr(flex, "batch_mode") and not hasattr(flex, "schedule")


@pytest.mark.ranks(4)
def test_sizes_on_four_ranks():
    flex = FlexModel(models.mlp(), {}, 2, 1, 2)
    assert (flex.tp_size, flex.pp_size, flex.dp_size) == (2, 1, 2)


def test_one_process_needs_no_process_group():
    flex = FlexModel(models.mlp())
    flex.register_forward_hook(HookFunction("fc1", editing_function=plus_one))
    flex(BATCH)
    assert not dist.is_initialized()


def test_the_output_is_the_modules_own():
    class Pair(nn.Module):
        def forward(self, x, *, scale=1.0):
            return {"scaled": x * scale, "text": "as it is"}

    result = FlexModel(Pair())(torch.ones(2), scale=3.0)
    assert type(result) is dict
    assert result["text"] == "as it is"
    assert_close(result["scaled"], torch.full((2,), 3.0))


def test_reading_changes_no_bit_of_output_and_gradients():
    model = models.mlp()
    expected = model(BATCH)
    expected.sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    flex = FlexModel(model)
    for name in ("inp", "fc1", "act", "fc2", "out", ""):
        flex.register_forward_hook(HookFunction(name))
    result = flex(BATCH)
    result.sum().backward()
    assert torch.equal(result, expected)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, gradients[name])


# ---- Like the wrapped module -----------------------------------------------------------------


def test_other_attributes_are_the_wrapped_modules():
    class Model(models.MLP):
        config = ("width", 6)

        def twice(self, x):
            return 2 * self(x)

    flex = FlexModel(Model())
    assert flex.config is Model.config
    assert_close(flex.twice(torch.ones(6)), 2 * flex(torch.ones(6)))
    assert flex.fc1 is flex.module.fc1
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = flex.no_such_thing


def test_parameters_and_buffers_are_the_wrapped_modules_by_its_names():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    flex = FlexModel(model)
    flex.register_trainable_module("probe", nn.Linear(3, 3))
    assert list(flex.named_parameters()) == list(model.named_parameters())
    assert list(flex.named_buffers()) == list(model.named_buffers())
    assert list(flex.parameters()) == list(model.parameters())
    assert len(list(flex.trainable_modules.parameters())) == 2


def test_state_dict_holds_both():
    flex = FlexModel(models.mlp())
    flex.register_trainable_module("probe", nn.Linear(3, 3))
    state = flex.state_dict()
    wrapped = {f"module.{name}" for name in flex.module.state_dict()}
    assert state.keys() == wrapped | {
        "trainable_modules.probe.weight",
        "trainable_modules.probe.bias",
    }

    other = FlexModel(models.seeded(models.MLP, seed=8).double())
    other.register_trainable_module("probe", nn.Linear(3, 3))
    other.load_state_dict(state)
    assert_close(dict(other.state_dict()), dict(state))


def test_train_eval_and_to_reach_the_wrapped_module():
    flex = FlexModel(models.mlp())
    flex.eval()
    assert not flex.training
    assert not flex.module.fc1.training
    flex.train()
    assert flex.module.fc1.training
    flex.to(torch.float32)
    assert flex.module.fc1.weight.dtype == torch.float32


def test_names():
    model = nn.Sequential()
    model.add_module("first", nn.Linear(2, 2))
    model.add_module("layers", nn.ModuleList([nn.Identity(), nn.Identity()]))
    flex = FlexModel(model)
    flex.register_trainable_module("probe", nn.Sequential(nn.Linear(2, 2)))
    names = ["first", "layers", "layers.0", "layers.1"]
    assert [name for name in flex.wrapped_module_names if name] == names
    assert "probe" in flex.trainable_modules_names
    assert set(flex.all_modules_names) >= {*names, *flex.trainable_modules_names}


def test_wrapped_module_requires_grad():
    flex = FlexModel(models.mlp())
    flex.register_trainable_module("probe", nn.Linear(8, 8).double())
    flex.wrapped_module_requires_grad(False)
    assert not any(p.requires_grad for p in flex.parameters())
    assert all(p.requires_grad for p in flex.trainable_modules.parameters())

    def edit(module, full, save_ctx, modules):
        return modules["probe"](full)

    flex.register_forward_hook(HookFunction("fc1", editing_function=edit))
    flex(BATCH).sum().backward()
    assert flex.trainable_modules["probe"].weight.grad is not None
    assert all(p.grad is None for p in flex.parameters())

    flex.wrapped_module_requires_grad(True)
    assert all(p.requires_grad for p in flex.parameters())


def test_dummy_module_is_a_place_for_a_hook():
    model = nn.Sequential(nn.Linear(2, 2), DummyModule())
    value = torch.ones(2)
    assert DummyModule()(value) is value
    flex = FlexModel(model)
    flex.register_forward_hook(HookFunction("1", editing_function=plus_one))
    assert_close(flex(value), model[0](value) + 1)


# ---- Trainable modules ---------------------------------------------------------------------------


def test_the_function_gets_the_trainable_modules_by_name():
    flex = FlexModel(models.mlp())
    probe = nn.Linear(8, 8).double()
    flex.register_trainable_module("probe", probe)
    got = []
    edit = lambda module, full, save_ctx, modules: got.append(modules["probe"])  # noqa: E731
    flex.register_forward_hook(HookFunction("fc1", editing_function=edit))
    flex(BATCH)
    assert got == [probe]
    assert flex.trainable_modules["probe"] is probe


@pytest.mark.ranks(2)
def test_trainable_modules_begin_with_the_values_of_rank_0():
    flex = FlexModel(models.mlp(), tensor_parallel_size=2)
    flex.register_trainable_module("probe", models.seeded(nn.Linear, 3, 3, seed=dist.get_rank()))
    expected = models.seeded(nn.Linear, 3, 3, seed=0)
    assert_close(dict(flex.trainable_modules["probe"].state_dict()), dict(expected.state_dict()))


# ---- Idle, restored, dropped ---------------------------------------------------------------------


def test_a_wrapper_without_hooks_installs_no_torch_hook():
    model = models.mlp()
    forward = model.forward
    flex = FlexModel(model)
    assert torch_hooks(model) == []
    handle = flex.register_forward_hook(HookFunction("fc1"))
    assert torch_hooks(model) != []
    handle.remove()
    assert torch_hooks(model) == []
    assert model.forward == forward
    assert all("forward" not in vars(child) for child in model.modules())


@pytest.mark.ranks(2)
def test_a_run_without_active_hooks_makes_no_collective():
    """Rank 0 runs alone: it would wait for rank 1 in any collective."""
    parallelism = models.TWO_RANKS["dp"]
    idle = FlexModel(models.mlp(), timeout=5, **parallelism.sizes)
    if dist.get_rank() == 0:
        idle(BATCH)

    hooked = FlexModel(models.mlp(), timeout=5, **parallelism.sizes)
    hooked.register_forward_hook(HookFunction("fc1"))
    hooked(BATCH)
    if dist.get_rank() == 0:
        hooked(BATCH, groups=())


KINDS = ["forward", "forward_pre", "full_backward", "full_backward_pre"]


def all_kinds(flex):
    for kind in KINDS:
        hook = HookFunction("fc1", editing_function=plus_one, output_name=kind)
        getattr(flex, f"register_{kind}_hook")(hook)
    flex.register_hook(HookFunction("fc1.weight", editing_function=plus_one))


@pytest.mark.parametrize("groups", ["all", ()])
@pytest.mark.parametrize("end", ["restore", "context", "error", "drop"])
def test_the_module_is_given_back_as_it_was(end, groups):
    model, records = models.mlp(), {}
    expected = model(BATCH)
    flex = FlexModel(model, records)
    all_kinds(flex)
    flex(BATCH, groups=groups).sum().backward()
    assert any(records.values()) == (groups == "all")
    if end == "restore":
        assert flex.restore() is model
    elif end == "drop":
        del flex
        gc.collect()
    else:
        with pytest.raises(ArithmeticError) if end == "error" else nullcontext(), flex:
            if end == "error":
                raise ArithmeticError
    assert torch_hooks(model) == []
    assert torch.equal(model(BATCH), expected)


def test_records_outlive_the_wrapper():
    records = {}
    with FlexModel(models.mlp(), records) as flex:
        flex.register_forward_hook(HookFunction("fc1"))
        flex(BATCH)
    del flex
    gc.collect()
    assert_close(records["fc1"], [models.mlp().fc1(models.mlp().inp(BATCH))])


@pytest.mark.ranks(2)
def test_the_users_groups_work_after_restore():
    with models.replicas(FlexModel(models.mlp(), tensor_parallel_size=2)) as flex:
        flex.register_forward_hook(HookFunction("fc1"))
        flex(BATCH)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2


@pytest.mark.ranks(2)
def test_ranks_may_drop_wrappers_at_different_times():
    """When a wrapper that nobody restored is collected, is not the same on every rank."""
    first = models.replicas(FlexModel(models.mlp(), tensor_parallel_size=2, timeout=5))
    kept = first if dist.get_rank() == 0 else None
    del first
    gc.collect()
    flex = models.replicas(FlexModel(models.mlp(), tensor_parallel_size=2, timeout=5))
    flex.register_forward_hook(HookFunction("fc1"))
    flex(BATCH)
    del kept
    gc.collect()
    flex(BATCH)


def test_the_same_module_can_be_wrapped_again():
    model = models.mlp()
    for _ in range(2):
        records = {}
        with FlexModel(model, records) as flex:
            flex.register_forward_hook(HookFunction("fc1"))
            flex(BATCH)
        assert len(records["fc1"]) == 1


@pytest.mark.ranks(2)
def test_torch_s_own_tools_may_watch_the_wrapper():
    """They put hooks of their own on every module they meet."""
    from torch.distributed.tensor.debug import CommDebugMode

    sharded = models.TWO_RANKS["dtensor"].shard(models.mlp())
    batch = models.random(4, 6).requires_grad_()
    with CommDebugMode() as bare:
        sharded(batch).sum().backward()
    flex = FlexModel(sharded, {})
    flex.register_forward_hook(HookFunction("out"))
    for _ in range(2):
        with CommDebugMode() as wrapped:
            flex(batch).sum().backward()
        assert wrapped.get_comm_counts() == bare.get_comm_counts()

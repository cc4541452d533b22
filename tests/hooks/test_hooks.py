"""HookFunction, the five kinds of hooks, groups, save_ctx, records and names."""

import contextlib
import copy
import pickle
import re
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

import models
from flex_model import FlexModel, HookError, HookFunction, Select
from flex_model.hooks.site import ModuleSite
from tiers import ways

BATCH = models.random(4, 6)
SITES = ("inp", "fc1", "act", "fc2", "out")


def plus_one(module, full, save_ctx, modules):
    return full + 1


def negate(module, full, save_ctx, modules):
    return -full


def doubled(module, full, save_ctx, modules):
    return full.mul_(2)


def wrap(*sites, edit=None, **settings):
    """A wrapped MLP with a forward hook on each site, and its records."""
    records = {}
    flex = FlexModel(models.mlp(), records, **settings)
    for site in sites:
        flex.register_forward_hook(HookFunction(site, editing_function=edit))
    return flex, records


def lengths(records):
    return {name: len(values) for name, values in records.items() if values}


# ---- HookFunction ----------------------------------------------------------------------------


def test_the_function_gets_module_tensor_context_and_modules():
    got = []
    flex, _ = wrap("fc1", edit=lambda *args: got.append(args))
    flex.register_trainable_module("probe", nn.Linear(1, 1))
    flex(BATCH)
    ((module, full, save_ctx, modules),) = got
    assert module is flex.module.fc1
    assert type(full) is torch.Tensor
    assert full.shape == (4, 8)
    assert save_ctx is flex.save_ctx
    assert modules["probe"] is flex.trainable_modules["probe"]


@pytest.mark.filterwarnings("ignore")  # it is deprecated
@pytest.mark.parametrize("compile_", [torch.jit.script, lambda m: torch.jit.trace(m, BATCH)])
@pytest.mark.parametrize("name", ["fc.0", "fc", "0", ""])
def test_a_hook_on_a_module_of_torch_jit_is_refused_and_not_registered(name, compile_):
    """It stayed registered, and each later change of hooks failed."""
    script = compile_(nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double())
    model = script if name in ("0", "") else models.mlp()
    model.fc = script if model is not script else None
    flex = FlexModel(model, records := {})
    around = "hook '', the module" if model is not script else "give the model"
    with pytest.raises(TypeError, match=f"on '{name}': .* torch.jit has compiled.*{around}"):
        flex.register_forward_hook(HookFunction(name))
    assert not flex.hook_functions
    if model is not script:
        flex.register_hook(HookFunction("fc.0.weight"))
        flex.register_forward_hook(HookFunction("fc1"))
        model.fc(flex(BATCH).new_ones(1, 6)).sum().backward()
        assert lengths(records) == {"fc1": 1, "fc.0.weight": 1}


def test_a_hook_function_can_be_used_again():
    hook = HookFunction("fc1", editing_function=plus_one)
    for _ in range(2):
        records = {}
        with FlexModel(models.mlp(), records) as flex:
            handle = flex.register_forward_hook(hook)
            flex(BATCH)
            handle.remove()
            flex.register_forward_hook(hook)
            flex(BATCH)
            assert len(records["fc1"]) == 1


class _Doubles(nn.Module):
    def forward(self, x):
        return 2 * x


def test_a_hook_at_a_module_where_one_that_is_gone_had_been_in_memory():
    for _ in range(20):  # the memory may be taken by something else meanwhile
        flex = FlexModel(nn.Sequential(_Doubles()), records := {})
        first = flex.register_forward_hook(HookFunction("0", output_name="first"))
        gone, others = id(flex.module[0]), []
        del flex.module[0]
        while id(new := _Doubles()) != gone and len(others) < 100:
            others.append(new)
        flex.module.append(new)
        flex.register_forward_hook(HookFunction("0", output_name="second"))
        first.remove()
        flex(torch.ones(1))
        assert_close(records["second"], [torch.full((1,), 2.0)])
        flex.restore()
        if id(new) == gone:
            return
    pytest.skip("no module was made where the former one had been")


def test_a_copy_of_a_registered_hook_is_registered_nowhere():
    flex = FlexModel(models.mlp(), activations := {})
    hook = HookFunction("fc1", editing_function=negate)
    flex.register_forward_hook(hook)
    for copied in (copy.copy(hook), copy.deepcopy(hook), pickle.loads(pickle.dumps(hook))):
        assert repr(copied) == repr(hook) and copied.save_ctx is None
        copied.output_name = "copy"
        with flex.register_forward_hook(copied):
            flex(BATCH)
        assert_close(activations["copy"][0], -activations["fc1"][0])
    flex.restore()


@pytest.mark.parametrize("edit_on", ["all", "rank0"])
@pytest.mark.parametrize("way", ways("one", "dtensor"))
def test_an_editing_function_is_replaced_taken_off_and_put_back(way, edit_on):
    whole = models.mlp()
    flex = FlexModel(way.shard(models.mlp()), records := {}, edit_on=edit_on)
    hook = HookFunction("act", editing_function=negate)
    flex.register_forward_hook(hook)
    for edit in (negate, plus_one, None, negate, None, None, plus_one):
        hook.editing_function = edit
        active = whole.act(whole.fc1(whole.inp(BATCH)))
        expected = active if edit is None else edit(None, active, None, None)
        assert_close(flex(BATCH), whole.out(whole.fc2(expected)))
        if not dist.is_initialized() or dist.get_rank() == 0:
            assert_close(records["act"][0], active)
    flex.restore()


@pytest.mark.parametrize("kind", ["forward", "full_backward"])
def test_a_hook_without_records_has_none_when_its_editing_function_is_taken_off(kind):
    flex = FlexModel(models.mlp(), records := {})
    hook = HookFunction("act", editing_function=negate, record=False)
    getattr(flex, f"register_{kind}_hook")(hook)
    hook.editing_function = None
    flex(BATCH).sum().backward()
    assert records == {}
    flex.restore()


FIXED = {
    "editing_function": negate,
    "expected_shape": (4, 8),
    "module_name": "fc2",
    "output_name": "other",
    "parameter_names": ("out.weight",),
    "placements": {},
    "record": False,
    "select": None,
    "unpack_idx": 1,
}


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("way", ways("one", "dtensor"))
def test_what_registration_reads_is_fixed_until_the_hook_is_removed(way, name):
    """One process would not use some of these at all, and several ranks would."""
    flex, hook = FlexModel(way.shard(models.mlp()), {}), HookFunction("act")
    before = getattr(hook, name)
    handle = flex.register_forward_hook(hook)
    with pytest.raises(ValueError, match=f"HookFunction\\('act'\\): {name} can't be set while"):
        setattr(hook, name, FIXED[name])
    assert getattr(hook, name) == before
    assert_close(flex(BATCH), models.mlp()(BATCH))
    handle.remove()
    setattr(hook, name, FIXED[name])
    flex.restore()


UNEDITED = {
    "no function": None,
    "returns None": lambda *args: None,
    "returns the tensor": lambda module, full, save_ctx, modules: full,
}


@pytest.mark.parametrize("name", UNEDITED)
@pytest.mark.parametrize("way", ways("one", "tp"))
def test_without_an_edit_the_modules_own_output_goes_on(way, name):
    made, taken = [], []

    class Make(nn.Module):
        def forward(self, x):
            made.append(x + 1)
            return made[-1]

    class Take(nn.Module):
        def forward(self, x):
            taken.append(x)
            return x

    with FlexModel(nn.Sequential(Make(), Take()), {}, **way.sizes) as flex:
        flex.register_forward_hook(HookFunction("0", editing_function=UNEDITED[name]))
        flex(torch.arange(3.0))
    assert taken[0] is made[0]


def test_an_edit_in_place_counts_with_and_without_grad():
    def zero_first(module, full, save_ctx, modules):
        full[:, 0] = 0

    model = models.mlp()
    handle = model.fc1.register_forward_hook(
        lambda module, args, output: torch.cat([torch.zeros(4, 1), output[:, 1:]], 1)
    )
    expected = model(BATCH)
    handle.remove()
    flex, records = wrap("fc1", edit=zero_first)
    assert_close(flex(BATCH), expected)
    assert records["fc1"][0][:, 0].all()  # the record is as it was before
    with torch.no_grad():
        assert_close(flex(BATCH), expected.detach())
    with torch.inference_mode():
        assert_close(flex(BATCH).clone(), expected.detach())


def test_a_module_that_runs_twice_is_hooked_twice():
    model = models.Twice().double()
    flex = FlexModel(model, records := {})
    flex.register_forward_hook(HookFunction("fc", editing_function=plus_one))
    result = flex(BATCH)
    first = nn.functional.linear(BATCH, model.fc.weight, model.fc.bias)
    second = nn.functional.linear(first + 1, model.fc.weight, model.fc.bias)
    assert_close(records["fc"], [first, second])
    assert_close(result, second + 1)


@pytest.mark.parametrize("parallelism", ways("one", "dtensor", "fsdp2", "ddp"))
def test_named_parameters_are_given_in_full(parallelism):
    """A logit lens: the weight of another layer, which is a shard here."""
    weight, seen = "fc2.weight", []

    def edit(module, full, save_ctx, modules):
        seen.append(hook.parameters[weight].clone())
        return full + full @ hook.parameters[weight] @ hook.parameters[weight].T

    model = models.mlp()
    flex = FlexModel(parallelism.shard(model), **parallelism.sizes)
    hook = HookFunction("inp", editing_function=edit, parameters=[weight])
    flex.register_forward_hook(hook)
    with torch.no_grad():
        result = flex(parallelism.my_rows(BATCH))
    full_weight = model.fc2.weight.detach()
    assert_close(seen, [full_weight])
    model.inp.register_forward_hook(lambda m, a, out: out + out @ full_weight @ full_weight.T)
    with torch.no_grad():
        assert_close(result, parallelism.my_rows(model(BATCH)))


# ---- Names ---------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_wrapped_and_clean_names_are_both_accepted():
    parallelism = models.TWO_RANKS["ddp"]
    records = {}
    flex = FlexModel(parallelism.shard(models.mlp()), records, data_parallel_size=2)
    for name in ("fc1", "module.act"):
        flex.register_forward_hook(HookFunction(name))
    flex(parallelism.my_rows(BATCH))
    if dist.get_rank() == 0:
        assert lengths(records) == {"fc1": 1, "module.act": 1}
    assert "module.fc1" in flex.wrapped_module_names


# ---- What a site gives ---------------------------------------------------------------------------


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = self.Inner()

    def forward(self, x):
        return self.inner(x, 3, y=(x + 1, None), z=x + 2)

    class Inner(nn.Module):
        def forward(self, x, number, y, z):
            return x + 10 * y[0] + 100 * z


def test_pre_hooks_count_positional_then_keyword_arguments():
    x = torch.zeros(2)
    for index, expected in enumerate([1.0, 10.0, 100.0]):
        records = {}
        with FlexModel(Keywords(), records) as flex:
            hook = HookFunction("inner", None, plus_one, index)
            flex.register_forward_pre_hook(hook)
            assert_close(flex(x), Keywords()(x) + expected)
        assert_close(records["inner"], [x + index])


def test_a_backward_hook_is_not_called_without_a_gradient():
    """The input of the first layer needs no gradient."""
    flex, records = wrap()
    flex.register_full_backward_hook(HookFunction("inp", editing_function=plus_one))
    flex(BATCH).sum().backward()
    assert not records.get("inp")
    assert flex.module.inp.weight.grad is not None


def test_a_backward_hook_survives_an_in_place_successor():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3))
    x = torch.ones(2, 3)
    model(x).sum().backward()
    expected = model[0].weight.grad.clone()
    model.zero_grad()
    records = {}
    flex = FlexModel(model, records)
    flex.register_full_backward_hook(HookFunction("2"))
    flex.register_full_backward_pre_hook(HookFunction("0"))
    flex(x).sum().backward()
    assert_close(model[0].weight.grad, expected)
    assert lengths(records) == {"0": 1, "2": 1}


class Reuses(nn.Module):
    """The input of a module remains in use beside its output, which may have its memory."""

    def __init__(self, middle, after=torch.relu, after_input=torch.sin):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), middle, nn.Linear(4, 1)
        self.after, self.after_input = after, after_input
        self.double()

    def forward(self, x):
        hidden = self.first(x)
        passed = self.middle(hidden)
        passed, hidden = self.after(passed).reshape(hidden.shape), self.after_input(hidden)
        return self.last(passed * 3 + hidden)


def gradients(model, x, *hooks):
    """The gradients of a model with these hooks, of a FlexModel each, and the hooks' records."""
    model.zero_grad()
    records = [{} for _ in hooks]
    wraps = [FlexModel(model, kept) for kept in records]
    for flex, (kind, name, function) in zip(wraps, hooks):
        register = getattr(flex, f"register_{kind}_hook")
        register(HookFunction(name, editing_function=function))
    try:
        model(x).sum().backward()
    finally:
        for flex in reversed(wraps):
            flex.restore()
    return [parameter.grad.clone() for parameter in model.parameters()], records


@pytest.mark.parametrize("kind", ["full_backward", "full_backward_pre"])
@pytest.mark.parametrize(
    "middle", [nn.Identity(), nn.Flatten(1), nn.Unflatten(1, (2, 2))], ids=lambda one: str(one)[:6]
)
def test_memory_that_a_module_passes_on_is_changed_by_no_one(kind, middle):
    """Torch refuses a change in place, of the input too; it would lack the other's history."""
    x, hook = models.random(3, 4), (kind, "middle", None)
    model = Reuses(middle)
    assert_close(gradients(model, x, hook)[0], gradients(model, x)[0])
    for after in ((torch.relu_,), (lambda passed: passed, torch.relu_)):
        with pytest.raises(RuntimeError, match=r"is a view and i.* modified inplace"):
            gradients(Reuses(middle, *after), x, hook)


class Doubles(nn.Module):
    def forward(self, x):
        return x.mul_(2)


@pytest.mark.parametrize("num_wraps", [1, 2])
def test_a_module_that_changes_its_input_in_place_returns_it(num_wraps):
    """It may be changed once more, and the caller has both changes."""
    x, hook = models.random(8, 4), ("full_backward", "middle", None)
    for after in (torch.neg, torch.neg_):
        model = Reuses(Doubles(), after)
        assert_close(gradients(model, x, *[hook] * num_wraps)[0], gradients(model, x)[0])


class Writes(nn.Module):
    """Layers that write into the containers that they are passed; their caller reads them there."""

    def __init__(self, make):
        super().__init__()
        self.layers, self.make = nn.ModuleList(WritesOnce() for _ in range(3)), make
        self.double()

    def forward(self, x):
        state = self.make(x)
        for layer in self.layers:
            layer((state,), scale=[state])
        return state["h"] + state["sum"] if isinstance(state, dict) else sum(vars(state).values())


class WritesOnce(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, states, scale):
        content = states[0] if isinstance(states[0], dict) else vars(states[0])
        content["sum"] = content.get("sum", 0) + content["h"] * 2
        content["h"] = self.linear(content["h"]).sin()


@dataclass
class State:
    h: torch.Tensor


@pytest.mark.parametrize("make", [lambda x: {"h": x * 1}, lambda x: State(x * 1)])
@pytest.mark.parametrize("kind", ["full_backward", "forward_pre"])
def test_what_a_module_writes_into_a_container_reaches_its_caller(make, kind):
    x, model = models.random(2, 4), Writes(make)
    plain, (records,) = gradients(model, x, (kind, "layers.1", None))
    hooked = gradients(model, x, (kind, "layers.1", lambda m, full, c, d: full * 1))
    assert_close(hooked, (gradients(model, x)[0], [records]))
    assert_close(plain, hooked[0])
    assert lengths(records) == {"layers.1": 1}
    # The edit is of what the layer is passed, and of all that the layer makes of it.
    if kind == "forward_pre":
        edited = gradients(model, x, (kind, "layers.1", lambda m, full, c, d: full * 2))[0]
        handle = model.layers[1].register_forward_pre_hook(doubles_state)
        assert_close(edited, gradients(model, x)[0])
        handle.remove()


def doubles_state(module, args):
    content = args[0][0] if isinstance(args[0][0], dict) else vars(args[0][0])
    content["h"] = content["h"] * 2


def test_a_call_that_fails_inside_a_call_of_the_same_module_leaves_that_alone():
    class Recursive(nn.Module):
        def forward(self, x, depth):
            if depth == 0:
                raise ValueError
            with contextlib.suppress(ValueError):
                self(x * 2, depth - 1)
            return x.relu_()

    model = nn.Module()
    model.first, model.again = nn.Linear(4, 4).double(), Recursive()

    def forward(x):
        hidden = model.first(x)
        model.again(hidden, 1)
        return hidden

    model.forward = forward
    x = models.random(2, 4)
    hook = ("full_backward", "again", None)
    assert_close(gradients(model, x, hook)[0], gradients(model, x)[0])


# ---- Records -------------------------------------------------------------------------------------


TRANSFORMS = {
    "vmap": lambda run, x: torch.func.vmap(run)(x),
    "vmap in other dims": lambda run, x: torch.func.vmap(run, in_dims=1)(x.T),
    "vmaps": lambda run, x: torch.func.vmap(torch.func.vmap(run))(x.view(2, 2, 6)),
    "grad": lambda run, x: torch.func.grad(lambda x: run(x).sum())(x),
    "vmap of grad": lambda run, x: torch.func.vmap(torch.func.grad(lambda x: run(x).sum()))(x),
    "jvp": lambda run, x: torch.func.jvp(run, (x,), (x,)),
    "jacrev": lambda run, x: torch.func.jacrev(run)(x),
}


@pytest.mark.parametrize("select", [None, Select(units=slice(0, 3))])
@pytest.mark.parametrize("edit", [None, plus_one, doubled])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_records_of_transformed_functions_are_plain(transform, edit, select):
    """They were wrappers, which are dead after the transform."""
    flex = FlexModel(models.mlp(), records := {})
    flex.register_forward_hook(HookFunction("act", None, edit, select=select))
    twin = models.mlp()
    expected = twin.act(twin.fc1(twin.inp(BATCH))).detach()
    expected = expected if select is None else expected[:, :3]
    for _ in range(2):
        TRANSFORMS[transform](flex, BATCH)
        (record,) = records["act"]
        assert_close(pickle.loads(pickle.dumps(record)).reshape(4, -1), expected)


def test_a_record_inside_a_transform_of_the_model_is_plain():
    class Mapped(models.MLP):
        def forward(self, x):
            return torch.func.vmap(self.act, in_dims=1)(self.fc1(self.inp(x)))

    flex = FlexModel(models.seeded(Mapped, 6, 8).double(), records := {})
    flex.register_forward_hook(HookFunction("act"))
    for _ in range(2):
        expected = flex(BATCH).detach()
        assert_close(pickle.loads(pickle.dumps(records["act"])), [expected])


@pytest.mark.parametrize("kind", ["full_backward", "full_backward_pre"])
def test_batched_gradients_are_recorded_and_edited(kind):
    v = torch.eye(5).double()[:, None].expand(5, 4, 5)

    def gradient(model):
        x = BATCH.clone().requires_grad_()
        return torch.autograd.grad(model(x), x, v, is_grads_batched=True)[0]

    expected = gradient(models.mlp())
    flex = FlexModel(models.mlp(), records := {})
    register = getattr(flex, f"register_{kind}_hook")
    hook = register(HookFunction("act"))
    assert_close(gradient(flex), expected)
    assert records["act"][0].numpy().shape == (5, 4, 8)
    with pytest.raises(HookError, match=r"transforms of torch\.func .* have no gradient"):
        torch.func.grad(lambda x: flex(x).sum())(BATCH)
    hook.remove()
    register(HookFunction("act", None, lambda m, g, s, ms: g * 2))
    assert_close(gradient(flex), 2 * expected)
    assert records["act"][0].numpy().shape == (5, 4, 8)


def test_records_are_owned_cpu_copies_without_grad():
    flex, records = wrap("fc1")
    result = flex(BATCH)
    (record,) = records["fc1"]
    assert record.device.type == "cpu"
    assert not record.requires_grad
    assert result.requires_grad
    with torch.inference_mode():
        flex(BATCH)
    assert not records["fc1"][0].is_inference()


def test_a_later_change_in_place_does_not_touch_the_record():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True)).double()
    records = {}
    flex = FlexModel(model, records)
    flex.register_forward_hook(HookFunction("0"))
    flex(BATCH)
    assert_close(records["0"], [model[0](BATCH).detach()])


@pytest.mark.parametrize("is_direct", [False, True])
def test_each_forward_begins_the_lists_afresh(is_direct):
    flex, records = wrap("fc1", "act")
    flex(BATCH)
    (flex.module if is_direct else flex)(2 * BATCH)
    assert lengths(records) == {"fc1": 1, "act": 1}
    oracle = models.mlp()
    assert_close(records["fc1"], [oracle.fc1(oracle.inp(2 * BATCH)).detach()])


class Noting(dict):
    """Keeps its names in an order of its own, as OrderedDict does, and makes values on look-up."""

    def __init__(self):
        super().__init__()
        self.order = []

    def __setitem__(self, name, value):
        self.order.append(name)
        super().__setitem__(name, value)

    def __delitem__(self, name):
        self.order.remove(name)
        super().__delitem__(name)

    def __missing__(self, name):
        raise AssertionError(name)

    def __iter__(self):
        return iter(self.order)


@pytest.mark.parametrize("kind", [OrderedDict, partial(defaultdict, tuple), Noting])
@pytest.mark.parametrize("edit", [None, plus_one])
@pytest.mark.parametrize("way", ways("one", "dtensor"))
def test_records_go_to_a_subclass_of_dict_by_its_own_methods(way, edit, kind):
    records = kind()
    flex = FlexModel(way.shard(models.mlp()), records, output_ranks="all", **way.sizes)
    for site in ("act", "fc1"):
        flex.register_forward_hook(HookFunction(site, editing_function=edit))
    for _ in range(2):
        flex(BATCH)
        assert sorted(records) == ["act", "fc1"]
        assert [len(records[name]) for name in records] == [1, 1]
    with flex.active([]), flex.active():  # only a part of the run has the hooks
        flex.module(BATCH)
    assert [len(records[name]) for name in list(records)] == [1, 1]


def test_calls_inside_active_append():
    flex, records = wrap("fc1")
    flex(BATCH)
    with flex.active():
        flex.module(BATCH)
        flex(BATCH)
        flex.module(BATCH)
    assert lengths(records) == {"fc1": 3}
    with flex.active():
        flex.module(BATCH)
    assert lengths(records) == {"fc1": 1}


class Repeating(models.MLP):
    def three_times(self, x):
        return [self(x * (i + 1)) for i in range(3)]


@pytest.mark.parametrize("parallelism", ways("one", "ddp", "fsdp2", "dtensor"))
def test_a_method_of_the_model_is_one_run(parallelism):
    twin = models.seeded(Repeating, 6, 8).double()
    flex = FlexModel(parallelism.shard(twin), records := {}, **parallelism.sizes)
    flex.register_forward_hook(HookFunction("fc1"))
    edit = HookFunction("act", editing_function=lambda module, x, save_ctx, modules: x.flip(-1))
    flex.register_forward_hook(edit)
    seen = {"fc1": [], "act": []}
    twin.fc1.register_forward_hook(lambda m, a, output: seen["fc1"].append(output))
    twin.act.register_forward_hook(
        lambda m, a, output: seen["act"].append(output) or output.flip(-1)
    )
    with torch.no_grad():
        outputs = flex.three_times(parallelism.my_rows(BATCH))
        expected = twin.three_times(BATCH)
    assert_close(outputs, [parallelism.my_rows(full) for full in expected])
    is_first = parallelism is models.ONE_RANK or dist.get_rank() == 0
    assert_close(records, seen if is_first else {})
    flex.restore()


class Streaming(models.MLP):
    def forward(self, x):
        yield from self.stream(x)

    def stream(self, x):
        for i in range(3):
            yield super().forward(x * (i + 1))

    async def later(self, x):
        return super().forward(x)

    async def stream_later(self, x):
        yield super().forward(x)


LATER = {
    "forward": (lambda flex: flex(BATCH, groups=()), "for part in flex(...)"),
    "part of a run": (lambda flex: in_active(flex, groups=()), "for part in flex(...)"),
    "method": (lambda flex: flex.stream(BATCH), "for part in flex.stream"),
    "coroutine": (lambda flex: flex.later(BATCH), "result = await flex.later(...)"),
    "async generator": (
        lambda flex: flex.stream_later(BATCH),
        "async for part in flex.stream_later",
    ),
}


def in_active(flex, **groups):
    with flex.active():
        return list(flex(BATCH, **groups))


@pytest.mark.parametrize("case", LATER)
@pytest.mark.parametrize("way", ways("one", "dtensor"))
def test_a_run_of_a_generator_is_refused_since_its_body_runs_later(way, case):
    run, expected = LATER[case]
    flex = FlexModel(way.shard(models.seeded(Streaming, 6, 8).double()), records := {}, **way.sizes)
    assert len(list(flex(BATCH))) == 3  # there is no hook
    flex.register_forward_hook(HookFunction("fc1", editing_function=negate))
    with pytest.raises(TypeError, match=re.escape(f"active(groups=...):\n        {expected}")):
        run(flex)
    with flex.active([]):
        bare = list(flex.module(BATCH))
    assert_close(bare, list(models.seeded(Streaming, 6, 8).double()(BATCH)))
    edited = in_active(flex)
    assert (edited[2] - bare[2]).abs().min() > 0
    with flex.active():
        assert_close(list(flex.stream(BATCH)), edited)
    is_first = way is models.ONE_RANK or dist.get_rank() == 0
    assert lengths(records) == ({"fc1": 3} if is_first else {})


def test_hooks_of_inactive_groups_keep_their_records():
    flex, records = wrap("fc1", "act")
    flex.update_hook_groups("fc1", "ours")
    flex(BATCH)
    before = records["act"][0]
    flex(2 * BATCH, groups=["ours"])
    assert records["act"][0] is before
    assert len(records["act"]) == 1
    assert lengths(records) == {"fc1": 1, "act": 1}


@pytest.mark.parametrize("way", ways("one", "ddp"))
def test_a_hook_that_an_editing_function_removes_is_not_called(way):
    records, handles = {}, []

    def remove(module, full, save_ctx, modules):
        while handles:
            handles.pop().remove()

    with FlexModel(way.shard(models.mlp()), records, **way.sizes) as flex:
        flex.register_forward_hook(HookFunction("fc1", editing_function=remove, record=False))
        handles.append(flex.register_forward_hook(HookFunction("fc1", output_name="removed")))
        flex(way.my_rows(BATCH))
    assert "removed" not in records


def test_an_editing_function_that_runs_a_hooked_module_is_refused():
    """It was recorded there, on one process."""
    model = models.mlp()
    with FlexModel(model) as flex:
        edit = lambda module, full, save_ctx, modules: model.fc2(full)  # noqa: E731
        flex.register_forward_hook(HookFunction("act", editing_function=edit))
        flex.register_forward_hook(HookFunction("fc2"))
        with pytest.raises(HookError, match="is run inside an editing function"):
            flex(BATCH)


def test_a_failed_forward_leaves_records_and_the_next_begins_afresh():
    class Picky(nn.Module):
        def forward(self, x):
            if x.sum() > 0:
                raise ArithmeticError("too much")
            return x

    records = {}
    flex = FlexModel(nn.Sequential(nn.Identity(), Picky()), records)
    flex.register_forward_hook(HookFunction("0"))
    with pytest.raises(ArithmeticError, match="too much"):
        flex(torch.ones(2))
    assert_close(records["0"], [torch.ones(2)])
    flex(-torch.ones(2))
    assert_close(records["0"], [-torch.ones(2)])


@pytest.mark.ranks(2)
def test_records_are_complete_when_forward_and_backward_return():
    parallelism = models.TWO_RANKS["tp"]
    records = {}
    flex = FlexModel(parallelism.shard(models.mlp()), records, tensor_parallel_size=2)
    flex.register_forward_hook(HookFunction("fc1", (None, 8)))
    flex.register_full_backward_hook(HookFunction("fc2", (None, 8)))
    for _ in range(3):
        output = flex(BATCH)
        assert lengths(records) == ({"fc1": 1} if dist.get_rank() == 0 else {})
        output.sum().backward()
        assert lengths(records) == ({"fc1": 1, "fc2": 1} if dist.get_rank() == 0 else {})


@pytest.mark.ranks(2)
def test_a_hook_that_an_editing_function_registers_is_refused_and_later_runs_work():
    parallelism = models.TWO_RANKS["tp"]
    flex = FlexModel(parallelism.shard(models.mlp()), {}, **parallelism.sizes)
    calls = []

    def register(module, full, save_ctx, modules):
        calls.append(full)
        if len(calls) == 1:
            flex.register_forward_hook(HookFunction("fc2"))

    flex.register_forward_hook(HookFunction("fc1", None, register))
    with pytest.raises(HookError, match=r"registers a forward hook on 'fc2'.* before the run"):
        flex(BATCH)
    flex(BATCH)
    assert len(calls) == 2 and set(flex.hook_functions) == {"fc1"}
    flex.restore()


# ---- save_ctx ------------------------------------------------------------------------------------


def test_save_ctx_goes_from_hook_to_hook_and_run_to_run():
    def save(module, full, save_ctx, modules):
        save_ctx.saved = full.detach()
        save_ctx.calls = getattr(save_ctx, "calls", 0) + 1

    def use(module, full, save_ctx, modules):
        return full + save_ctx.saved

    flex = FlexModel(models.mlp())
    flex.register_forward_hook(HookFunction("fc1", editing_function=save))
    flex.register_forward_hook(HookFunction("act", editing_function=use))
    oracle = models.mlp()
    oracle.act.register_forward_hook(lambda module, args, output: output + args[0])
    for calls in (1, 2):
        assert_close(flex(BATCH), oracle(BATCH))
        assert flex.save_ctx.calls == calls
    assert flex.save_ctx.saved.shape == (4, 8)


# ---- Groups --------------------------------------------------------------------------------------


def grouped():
    """Hooks on four sites: two in group a, two in b, one of them in both, one in none but all."""
    flex, records = wrap("inp", "fc1", "act", "fc2")
    flex.update_hook_groups("inp", "a")
    flex.update_hook_groups("fc1", "a")
    flex.update_hook_groups("fc1", "b")
    flex.update_hook_groups("act", "b")
    return flex, records


GROUPS = [
    ({}, "inp fc1 act fc2"),
    ({"groups": "all"}, "inp fc1 act fc2"),
    ({"groups": "a"}, "inp fc1"),
    ({"groups": ["a"]}, "inp fc1"),
    ({"groups": ["a", "b"]}, "inp fc1 act"),
    ({"groups": ["a"], "complement": True}, "act fc2"),
    ({"groups": ["a", "b"], "complement": True}, "fc2"),
    ({"groups": "all", "complement": True}, ""),
    ({"groups": ()}, ""),
    ({"groups": [], "complement": True}, "inp fc1 act fc2"),
]


@pytest.mark.parametrize(("choice", "expected"), GROUPS)
def test_groups_choose_the_hooks_of_a_run(choice, expected):
    flex, records = grouped()
    flex(BATCH, **choice)
    assert lengths(records) == dict.fromkeys(expected.split(), 1)
    records.clear()
    with flex.active(**choice):
        flex.module(BATCH)
    assert lengths(records) == dict.fromkeys(expected.split(), 1)


def test_after_a_run_the_former_choice_is_back():
    flex, records = grouped()
    flex(BATCH, groups=["a"])
    records.clear()
    flex.module(BATCH)
    assert len(lengths(records)) == 4
    with flex.active(["b"]):
        flex(BATCH, groups=["a"])
        records.clear()
        flex.module(BATCH)
        assert lengths(records) == {"fc1": 1, "act": 1}
    with pytest.raises(RuntimeError):  # a run that fails
        flex(BATCH[:, :3], groups=["a"])
    records.clear()
    flex(BATCH)
    assert len(lengths(records)) == 4


def test_groups_follow_the_graph_into_its_backward():
    flex, records = wrap()
    hooks = {"a": HookFunction("fc1"), "b": HookFunction("fc2"), "none": HookFunction("act")}
    for group, hook in hooks.items():
        flex.register_full_backward_hook(hook)
        if group != "none":
            flex.update_hook_groups(hook, group)
    first = flex(BATCH, groups=["a"])
    second = flex(BATCH, groups=["b"])
    third = flex(BATCH)
    records.clear()
    second.sum().backward()
    assert lengths(records) == {"fc2": 1}
    records.clear()
    first.sum().backward()
    assert lengths(records) == {"fc1": 1}
    records.clear()
    third.sum().backward()
    assert lengths(records) == {"fc1": 1, "fc2": 1, "act": 1}


@pytest.mark.parametrize(
    "happens",
    [
        lambda flex, other: flex.dry_run(BATCH),
        lambda flex, other: flex(BATCH, groups=()),
        lambda flex, other: flex.register_full_backward_hook(other),
        lambda flex, other: flex.register_full_backward_hook(other).remove(),
    ],
    ids=["dry run", "no groups", "another kind", "another kind that is removed"],
)
def test_a_hook_keeps_its_place_among_torch_hooks_of_the_user(happens):
    """It was called behind those that were registered later."""
    flex, records = wrap("fc1", edit=doubled)
    flex.register_hook(HookFunction("fc1.bias", editing_function=doubled))
    module, bias = flex.module.fc1, flex.module.fc1.bias
    bias.register_hook(lambda gradient: gradient + 10)
    module.register_forward_hook(lambda module, args, output: output + 10)
    module.register_forward_hook(lambda module, args, output: output * 2 + 1, prepend=True)
    second = FlexModel(flex.module, others := {})  # on the same model
    second.register_forward_hook(HookFunction("fc1", editing_function=plus_one))
    seen = []
    for _ in range(2):
        bias.grad = None
        flex(BATCH).sum().backward()
        seen.append([bias.grad, *records["fc1"], *records["fc1.bias"], *others["fc1"]])
        happens(flex, HookFunction("fc1", output_name="other"))
        happens(second, HookFunction("fc1", output_name="other"))
    assert_close(seen[1], seen[0], rtol=0, atol=0)


def test_a_hook_that_is_registered_anew_is_called_last():
    flex, records = wrap()
    handle = flex.register_forward_hook(HookFunction("fc1"))
    flex.module.fc1.register_forward_hook(lambda module, args, output: output + 10)
    flex(BATCH)
    before = records["fc1"][0]
    handle.remove()
    flex.register_forward_hook(HookFunction("fc1"))
    flex(BATCH)
    assert_close(records["fc1"][0], before + 10)


def test_no_backward_hook_runs_for_a_graph_without_groups():
    flex, records = wrap()
    flex.register_full_backward_hook(HookFunction("fc1"))
    flex.register_hook(HookFunction("fc1.weight"))
    flex(BATCH, groups=()).sum().backward()
    assert lengths(records) == {}
    for _ in range(3):  # the lists of others begin afresh
        flex(BATCH).sum().backward()
        assert lengths(records) == {"fc1": 1, "fc1.weight": 1}


@pytest.mark.parametrize("site", [None, "fc1"])
def test_a_run_without_groups_between_a_forward_and_its_backward_leaves_parameters_hooks(site):
    """A reference for a loss turned off the hook that the graph's own run had chosen."""
    flex, records = wrap()
    weight = flex.module.fc1.weight
    expected = torch.autograd.grad(flex.module(BATCH).sum(), weight)[0] + 1
    flex.register_hook(HookFunction("fc1.weight", editing_function=plus_one))
    if site is not None:
        flex.register_full_backward_hook(HookFunction(site))
    for _ in range(2):
        weight.grad, output = None, flex(BATCH)
        (output - flex(BATCH, groups=()).detach()).sum().backward()
        assert_close(weight.grad, expected)
        assert len(records["fc1.weight"]) == 1


@pytest.mark.parametrize(
    "pattern", ["fc", re.compile(r"^fc\d$"), nn.Linear], ids=["substring", "regex", "type"]
)
def test_create_hook_group_by(pattern):
    flex, records = wrap("act")
    flex.create_hook_group("mine", pattern, None, negate, 0)
    names = {"fc1", "fc2"} | ({"inp", "out"} if pattern is nn.Linear else set())
    members = flex.get_group_hook_functions("mine")
    assert {hook.module_name for hook in members} == names
    assert len(members) == len(names)
    flex(BATCH, groups=["mine"])
    assert lengths(records) == dict.fromkeys(names, 1)
    for hook in members:
        assert set(flex.get_hook_function_groups(hook)) == {"all", "mine"}
    assert len(flex.get_group_hook_functions("all")) == len(names) + 1


def test_create_hook_group_of_another_kind():
    flex, records = wrap("fc1", "fc2")
    flex.create_hook_group("gradients", "fc", hook_type="full_backward", output_name="{name}.grad")
    flex(BATCH).sum().backward()
    assert lengths(records) == dict.fromkeys(["fc1", "fc2", "fc1.grad", "fc2.grad"], 1)


def test_hooks_join_and_leave_groups_by_list_hook_or_substring():
    flex = FlexModel(models.mlp())
    hooks = {site: HookFunction(site) for site in SITES}
    for hook in hooks.values():
        flex.register_forward_hook(hook)

    def members(group):
        return {hook.module_name for hook in flex.get_group_hook_functions(group)}

    flex.update_hook_groups([hooks["inp"], hooks["out"]], "g")
    assert members("g") == {"inp", "out"}
    flex.update_hook_groups(hooks["act"], "g")
    flex.update_hook_groups("fc", "g")
    assert members("g") == set(SITES)
    flex.remove_hook_groups("fc", "g")
    flex.remove_hook_groups(hooks["act"], "g")
    assert members("g") == {"inp", "out"}
    flex.remove_hook_groups([hooks["inp"]], "g")
    assert members("g") == {"out"}
    assert set(flex.get_hook_function_groups(hooks["out"])) == {"all", "g"}
    assert set(flex.get_hook_function_groups(hooks["inp"])) == {"all"}
    assert members("all") == set(SITES)


def test_a_change_touches_the_sites_of_its_hooks_only(monkeypatch):
    """So that registering and removing cost the same beside any number of hooks."""
    touched, install = [], ModuleSite.install
    monkeypatch.setattr(
        ModuleSite, "install", lambda site, keeps: (touched.append(site), install(site, keeps))
    )
    flex = FlexModel(nn.Sequential(*[nn.Linear(2, 2) for _ in range(20)]), records := {})
    flex.create_hook_group("linears", nn.Linear)
    assert len(touched) == 20
    with flex.register_forward_hook(HookFunction("3", output_name="one")) as handle:
        flex.update_hook_groups(handle.hook_function, "of one")
        flex(torch.ones(1, 2))
    flex.remove_hook_groups(re.compile("^5$"), "linears")
    assert len(touched) == 20 + 4
    assert lengths(records) == {**{str(i): 1 for i in range(20)}, "one": 1}
    records.clear()
    flex(torch.ones(1, 2), groups="linears")
    assert set(records) == {str(i) for i in range(20)} - {"5"}
    touched.clear()
    flex.restore()
    assert not touched


def test_a_group_that_lost_its_hooks_is_empty():
    """It was unknown before."""
    flex, records = wrap("fc1")
    (hook,) = flex.create_hook_group("g", "fc2", editing_function=negate)
    flex.update_hook_groups("fc2", "other")
    flex.remove_hook_groups("fc2", "g")
    assert flex.get_group_hook_functions("g") == []
    expected = models.mlp()(BATCH)
    assert_close(flex(BATCH, groups="g"), expected)
    assert not records
    flex(BATCH, groups="g", complement=True)
    assert sorted(records) == ["fc1", "fc2"]
    with flex.active(["g"]):
        assert_close(flex(BATCH), expected)
    flex.update_hook_groups(hook, "g")
    assert flex.get_group_hook_functions("g") == [hook]
    with flex.register_forward_hook(HookFunction("inp", editing_function=negate)):
        flex.update_hook_groups("inp", "of one")
    assert flex.get_group_hook_functions("of one") == []  # its hook was removed
    assert_close(flex(BATCH, groups="of one"), expected)
    with pytest.raises(ValueError, match="no hook group 'h'"):
        flex(BATCH, groups="h")
    flex.restore()

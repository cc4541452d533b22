"""Advice about wrapping, hooks, runs, selections and verify()."""

import contextlib
import copy
import operator
import pickle
import threading
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import frameworks
import models
from advice.triggers import BATCH, run, wrapped
from flex_model import FlexModel, HookFunction, Select, pytree
from flex_model.distributed.placement import Shard
from shared_edits import double


class Tuples(nn.Module):
    """A tensor in a container of its own, or no tensor."""

    def __init__(self, make):
        super().__init__()
        self.make, self.after = make, nn.Identity()

    def forward(self, x):
        self.make(x)
        return self.after(x)


def routed(name):
    """Forbid an expert, and run."""
    flex = FlexModel(frameworks.huggingface_model("mixtral"), {})
    flex.register_forward_hook(flex.routing(name).forbid(0))
    flex(torch.arange(10).view(2, 5))


def units_of(name):
    """Hook the units of experts, and run."""
    flex = FlexModel(frameworks.huggingface_model("mixtral"), {})
    flex.register_forward_hook(HookFunction(flex.experts(name).units))
    flex(torch.arange(10).view(2, 5))


def patterns(name, *queries, is_training=False):
    """Hook the attention patterns of a layer, and run."""
    flex = FlexModel(models.llama(attention_dropout=0.1).train(is_training), {})
    for i, one in enumerate(queries or (None,)):
        flex.register_forward_hook(flex.attention(name, queries=one, output_name=f"pattern {i}"))
    flex(torch.arange(10).view(2, 5))


class Box:
    def __init__(self, x):
        self.x = x


class Boxing(nn.Module):
    def __init__(self):
        super().__init__()
        self.box, self.after = Tuples(lambda x: None), nn.Identity()
        self.box.forward = Box

    def forward(self, x):
        return self.after(self.box(x).x)


def register_box():
    pytree.register(Box, lambda box: ([box.x], None), lambda children, _: Box(children[0]))
    try:
        run(HookFunction("box"), model=Boxing())
    finally:
        pytree.unregister(Box)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.sparse, self.dense = Tuples(lambda x: None), nn.Identity()
        self.sparse.forward = lambda x: x.to_sparse()

    def forward(self, x):
        return self.dense(self.sparse(x).to_dense())


def two_kinds(**settings):
    flex = wrapped(HookFunction("fc1"))
    flex.register_forward_pre_hook(HookFunction("fc1", **settings))


def twice(function, make):
    flex = wrapped()
    handle = flex.register_forward_hook(function)
    make(flex, handle)


def remove_and_register(flex, handle):
    handle.remove()
    flex.register_forward_hook(handle.hook_function)


def edit_with(function):
    function.editing_function = double


def remove_edit_and_register(flex, handle):
    handle.remove()
    edit_with(handle.hook_function)
    flex.register_forward_hook(handle.hook_function)


def leave_all(how):
    flex = wrapped()
    function = flex.create_hook_group("some", "fc", editing_function=double)[0]
    flex.register_forward_hook(HookFunction("act", output_name="other"))
    how(flex, function)


def run_without(flex, function):
    flex(BATCH, groups="some", complement=True)
    assert "fc1" not in flex.output_ptr and "other" in flex.output_ptr
    flex.restore()
    assert torch.equal(flex.module(BATCH), models.mlp()(BATCH))


def groups_of(register):
    function, flex = HookFunction("fc1"), wrapped()
    if register:
        flex.register_forward_hook(function)
    flex.get_hook_function_groups(function)


def calls_the_model():
    flex = wrapped()
    edit = lambda module, full, save_ctx, modules: flex.module(BATCH)[:, :1] + full  # noqa: E731
    flex.register_forward_hook(HookFunction("fc1", editing_function=edit))
    flex(BATCH)


def uses_weights_and_modules():
    flex = wrapped()
    flex.register_trainable_module("probe", nn.Linear(8, 8).double())

    def edit(module, full, save_ctx, modules):
        return modules["probe"](full) + hook.parameters["fc2.weight"].sum()

    hook = HookFunction("fc1", editing_function=edit, parameters=["fc2.weight"])
    flex.register_forward_hook(hook)
    flex(BATCH)


def second_thread(in_a_run):
    flex, errors = wrapped(HookFunction("fc1", editing_function=double)), []

    def other():
        try:
            flex(BATCH)
        except Exception as error:
            errors.append(error)

    with flex.active() if in_a_run else torch.no_grad():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    for error in errors:
        raise error


def in_the_run(method, *args):
    flex = wrapped(HookFunction("fc1"))
    with flex.active():
        flex(BATCH)
        getattr(flex, method)(*args)


def no_gradient(on):
    flex = wrapped()
    flex.module.requires_grad_(False)
    flex.module.fc1.weight.requires_grad_(on)
    flex.register_hook(HookFunction("fc1.weight"))


def restored(again):
    flex = wrapped(HookFunction("fc1"))
    flex.restore()
    if again:
        flex = FlexModel(flex.module)
    flex.register_forward_hook(HookFunction("fc2"))


def read_meta(loaded):
    with torch.device("meta"):
        model = models.MLP()
    if loaded:
        model = model.to_empty(device="cpu")
    name = next(name for name, _ in model.named_parameters())
    FlexModel(model).get_module_parameter(name)


def buffer(read):
    flex = FlexModel(nn.Sequential(nn.BatchNorm1d(3)))
    assert operator.attrgetter(read)(flex)("0.running_mean").tolist() == [0, 0, 0]


def until(name, *functions, compiled=False):
    flex = wrapped(*functions)
    flex.module.unused = nn.Identity()
    if compiled:
        flex.module.compile(backend="eager")
    flex.run_until(name, BATCH)


class Layers(nn.Module):
    """Layers in a list, around which the input goes or not, the first of which may come again."""

    def __init__(self, kind=""):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6)) for _ in range(3)).double()
        self.kind = kind

    def forward(self, x, cache=None):
        for layer in self.layers:
            y = x + layer(x) if self.kind == "residual" else layer(x)
            x = x if self.kind == "in place" else y
        return self.layers[0](x) if self.kind == "again" else x


class Catches(Layers):
    def __init__(self, kind):
        super().__init__()
        self.caught = kind

    def forward(self, x):
        with contextlib.suppress(self.caught):
            x = self.layers[0](x)
        return self.layers[1](x)


def until_caught(kind):
    flex = FlexModel(Catches(kind), {})
    flex.register_forward_hook(HookFunction("layers.0"))
    flex.run_until("layers.0", BATCH)


class Reports(Layers):
    def forward(self, x, output_attentions=True):
        return super().forward(x)


class PassesCache(Layers):
    def __init__(self):
        super().__init__()
        self.layers[0].forward = lambda x, cache: x

    def forward(self, x, cache=None):
        return self.layers[1](self.layers[0](x, cache))


def run_from(name, model=None, hook="layers.2", **inputs):
    flex = FlexModel(model or Layers(), {})
    flex.register_forward_hook(HookFunction(hook))
    flex.run_from(name, BATCH, BATCH, **inputs)


def unused_hook(follow):
    flex = wrapped()
    flex.module.unused = nn.Identity()
    flex.register_forward_hook(HookFunction("fc1" if follow == "other" else "unused"))
    if follow == "groups":
        flex.update_hook_groups("unused", "probe")
        flex(BATCH, groups="probe", complement=True)
    else:
        flex(BATCH)


def select(batch=BATCH, **arguments):
    run(HookFunction("fc1", select=Select(**arguments)), batch=batch)


def random_edit(module, full, save_ctx, modules):
    return full + torch.rand_like(full)


class Checkpointed(nn.Module):
    """One part called twice on one input, checkpointed; it needs the edit again for backward."""

    def __init__(self, on):
        super().__init__()
        self.fc, self.on = nn.Linear(6, 6).double(), on

    def part(self, x):
        return self.fc(x).tanh()

    def forward(self, x):
        x = x * self.fc.weight.sum()
        call = partial(checkpoint, self.part, use_reentrant=False) if self.on else self.part
        return call(x) + call(x)


def checkpointed(on, edit=random_edit):
    flex = wrapped(HookFunction("fc", editing_function=edit), model=Checkpointed(on))
    flex(BATCH).sum().backward()


def verify(reference, loss=None, backward=False):
    flex = wrapped()
    if backward:
        flex.register_full_backward_hook(HookFunction("fc2"))
    given = flex.module if reference == "itself" else models.mlp()
    flex.verify(given, BATCH, loss=loss)


def pickled(what):
    flex = wrapped(HookFunction("fc1"))
    taken = {"flex": lambda: flex, "module": lambda: flex.module, "restored": flex.restore}
    pickle.dumps(taken.get(what, flex.state_dict)())


def replaced(again):
    flex = wrapped()
    handle = flex.register_forward_hook(hook := HookFunction("fc1"))
    flex.module.fc1 = copy.deepcopy(flex.module.fc1)
    if again:
        handle.remove()
        flex.register_forward_hook(hook)
    flex(BATCH)


def trainable(name):
    wrapped().register_trainable_module(name, nn.Linear(2, 2))


ROWS = {
    # Wrapping.
    "give sizes that multiply to": (
        lambda: FlexModel(models.mlp(), tensor_parallel_size=2),
        lambda: FlexModel(models.mlp(), tensor_parallel_size=1),
    ),
    "FlexModel already; wrap its .module": (
        lambda: FlexModel(wrapped()),
        lambda: FlexModel(wrapped().module),
    ),
    "copy flex.module and wrap the copy": (
        lambda: copy.deepcopy(wrapped()),
        lambda: FlexModel(copy.deepcopy(wrapped().module)),
    ),
    "can't be pickled; save flex.state_dict()": (lambda: pickled("flex"), lambda: pickled("state")),
    "with hooks of a FlexModel can't be pickled; save its ": (
        lambda: pickled("module"),
        lambda: pickled("restored"),
    ),
    "remove the hook, and register it again at the {} that is ": (
        lambda: replaced(again=False),
        lambda: replaced(again=True),
    ),
    "this FlexModel was restored; wrap the model again": (
        lambda: restored(False),
        lambda: restored(True),
    ),
    "part_sizes must be the full size of each part": (
        lambda: Shard(0, part_sizes=()),
        lambda: Shard(0, part_sizes=(4096, 1024, 1024)),
    ),
    "contradicts part_sizes": (
        lambda: Shard(0, 2, part_sizes=(4, 2, 2)),
        lambda: Shard(0, part_sizes=(4, 2, 2)),
    ),
    # Attention patterns, routing, units.
    "name one such as 'model.layers.3.mlp.experts', of weights": (
        lambda: units_of("model.layers.1.mlp"),
        lambda: units_of("model.layers.1.mlp.experts"),
    ),
    "name the module that has both, such as 'model.layers.3.mlp'": (
        lambda: routed("model.layers.1"),
        lambda: routed("model.layers.1.mlp"),
    ),
    "name the module that does, such as 'model.layers.3.self_attn'": (
        lambda: patterns("model.layers.0"),
        lambda: patterns("model.layers.0.self_attn"),
    ),
    "use the same for all hooks on a layer, the union": (
        lambda: patterns("model.layers.0.self_attn", [0], [1]),
        lambda: patterns("model.layers.0.self_attn", [0, 1], [0, 1]),
    ),
    "call model.eval(), or set attention_dropout to 0": (
        lambda: patterns("model.layers.0.self_attn", is_training=True),
        lambda: patterns("model.layers.0.self_attn"),
    ),
    # Hook functions.
    "expected_shape must be a tuple of ints": (
        lambda: run(HookFunction("fc1", 3)),
        lambda: run(HookFunction("fc1", (None, 8))),
    ),
    "write None for a size that is not known": (
        lambda: run(HookFunction("fc1", (-1, 8))),
        lambda: run(HookFunction("fc1", (None, 8))),
    ),
    "has nothing to do; give an editing_function": (
        lambda: HookFunction("fc1", record=False),
        lambda: run(
            HookFunction("fc1", editing_function=double, record=False), HookFunction("fc2")
        ),
    ),
    "names a tensor twice": (
        lambda: HookFunction("fc1", unpack_idx=(0, 0)),
        lambda: HookFunction("fc1", unpack_idx=(0, 1)),
    ),
    "is an empty name; leave it out for tensor 0": (
        lambda: HookFunction("fc1", unpack_idx=""),
        lambda: run(HookFunction("fc1")),
    ),
    "parameters must be names of parameters": (
        lambda: HookFunction("fc1", parameters=3),
        lambda: run(HookFunction("fc1", editing_function=double, parameters=("out.weight",))),
    ),
    # Registering.
    "is registered already; make another HookFunction": (
        lambda: twice(
            HookFunction("fc1"), lambda flex, h: flex.register_forward_hook(h.hook_function)
        ),
        lambda: (
            twice(HookFunction("fc1"), remove_and_register),
            wrapped(HookFunction("fc1"), HookFunction("fc1")),
        ),
    ),
    "FlexModel: {} can't be set, for its hooks would go on": (
        lambda: setattr(FlexModel(models.mlp(), {}), "module", models.mlp()),
        lambda: FlexModel(models.mlp(), {}).register_trainable_module("probe", nn.Linear(1, 1)),
    ),
    "can't be set while the hook is registered": (
        lambda: twice(HookFunction("fc1"), lambda flex, handle: edit_with(handle.hook_function)),
        lambda: twice(HookFunction("fc1"), remove_edit_and_register),
    ),
    "is not registered with this FlexModel; register it first": (
        lambda: groups_of(False),
        lambda: groups_of(True),
    ),
    'every registered hook is in "all"': (
        lambda: leave_all(lambda flex, function: flex.remove_hook_groups(function, "all")),
        lambda: (leave_all(run_without), twice(HookFunction("fc1"), remove_and_register)),
    ),
    "give one of them an output_name": (two_kinds, lambda: two_kinds(output_name="input")),
    "does not require a gradient; call requires_grad_(True) first": (
        lambda: no_gradient(False),
        lambda: no_gradient(True),
    ),
    "can't edit several tensors in one call": (
        lambda: wrapped().register_full_backward_hook(
            HookFunction("fc1", editing_function=lambda *args: None, unpack_idx=(0, 1))
        ),
        lambda: [
            wrapped().register_full_backward_hook(
                HookFunction("fc1", editing_function=double, unpack_idx=i)
            )
            for i in (0, 1)
        ],
    ),
    "can't be the name of a trainable module": (lambda: trainable("a.b"), lambda: trainable("ab")),
    "pass register(type, flatten, unflatten)": (lambda: pytree.register(Box, 1, 2), register_box),
    "pass the registered type": (lambda: pytree.unregister(Box(1)), register_box),
    "pass the container's type": (lambda: pytree.register(Box(1), len, len), register_box),
    # Running.
    "give an unpack_idx from 0 to": (
        lambda: run(HookFunction("fc1", unpack_idx=1)),
        lambda: run(HookFunction("fc1", unpack_idx=0)),
    ),
    "give one of these names, or the tensor's number": (
        lambda: run(HookFunction("fc1", unpack_idx="mask")),
        lambda: run(HookFunction("fc1", unpack_idx=0)),
    ),
    "register the container's type with": (
        lambda: run(HookFunction("box"), model=Boxing()),
        lambda: (register_box(), run(HookFunction("after"), model=Boxing())),
    ),
    "hook a module whose tensor is dense": (
        lambda: run(HookFunction("sparse", editing_function=double), model=Sparse()),
        lambda: run(HookFunction("dense", editing_function=double), model=Sparse()),
    ),
    "compute there with plain tensors, with": (calls_the_model, uses_weights_and_modules),
    "run the model from one thread at a time": (
        lambda: second_thread(True),
        lambda: second_thread(False),
    ),
    "not called in this run": (
        lambda: unused_hook(None),
        lambda: (unused_hook("other"), unused_hook("groups")),
    ),
    "can't be drawn again; do without checkpointing there": (
        lambda: checkpointed(True),
        lambda: checkpointed(False),
    ),
    "so no module can be run to": (
        lambda: until(None),
        lambda: (until(None, HookFunction("fc1")), until("fc1")),
    ),
    "give the name of a module that this forward calls": (
        lambda: until("unused"),
        lambda: (until("fc1"), run()),
    ),
    "or catch exceptions of other types there": (
        lambda: until_caught(Exception),
        lambda: (until_caught(ValueError), run(HookFunction("layers.0"), model=Catches(Exception))),
    ),
    "forward can't run in part": (lambda: until("fc1", compiled=True), lambda: run()),
    "so it can't be skipped; call flex(...)": (
        lambda: run_from("layers.1", Layers("again")),
        lambda: run(HookFunction("layers.1"), model=Layers("again")),
    ),
    "what the model returns depends on {}, not only on": (
        lambda: run_from("layers.1", Layers("residual"), hook="layers.1"),
        lambda: run(HookFunction("layers.1"), model=Layers("residual")),
    ),
    "are not known, and are read; call flex(...)": (
        lambda: run_from("layers.1", Layers("residual")),
        lambda: run(HookFunction("layers.2"), model=Layers("residual")),
    ),
    "may need what that does otherwise; call flex(...)": (
        lambda: run_from("layers.1", Layers("in place")),
        lambda: run(HookFunction("layers.1"), model=Layers("in place")),
    ),
    "=False, and hook what is needed": (
        lambda: run_from("layers.1", Reports(), output_attentions=True),
        lambda: run_from("layers.1", Reports(), output_attentions=False),
    ),
    "before it are not computed; choose other hooks with groups=": (
        lambda: run_from("layers.1", hook="layers.0"),
        lambda: run_from("layers.1"),
    ),
    "give the output of a module of the list itself, such as": (
        lambda: run_from("model.layers.1.mlp", models.llama(), hook="lm_head"),
        lambda: run_from("layers.0"),
    ),
    "which it may change (a cache: pass use_cache=False)": (
        lambda: run_from("layers.1", PassesCache(), hook="layers.1", cache=[]),
        lambda: run_from("layers.1", PassesCache(), hook="layers.1"),
    ),
    "is on the meta device": (lambda: read_meta(False), lambda: read_meta(True)),
    "read it with flex.module.get_buffer(...)": (
        lambda: buffer("get_module_parameter"),
        lambda: buffer("module.get_buffer"),
    ),
    # Selections.
    "give rows, positions, heads or units": (lambda: Select(), lambda: select(rows=[0])),
    "no rectangular part": (
        lambda: Select(positions=torch.ones(4, 3, dtype=torch.bool)),
        lambda: select(models.random(4, 3, 6), positions=[0, 1]),
    ),
    "expected a tensor (rows, positions, units), got the shape {}": (
        lambda: select(positions=[0]),
        lambda: select(positions=[0], dims={"positions": 0}),
    ),
    "which the tensor of shape {} does not have; give the dim with dims=": (
        lambda: select(positions=[0], dims={"positions": 4}),
        lambda: select(positions=[0], dims={"positions": 0}),
    ),
    "are both dim": (
        lambda: select(rows=[0], positions=[0], dims={"positions": 0}),
        lambda: select(rows=[0], positions=[0], dims={"positions": 1}),
    ),
    "hook the heads' output": (
        lambda: select(models.random(4, 3, 6), heads=[0], num_heads=3),
        lambda: select(models.random(4, 3, 6), heads=[0], num_heads=4),
    ),
    # Looking.
    "verify: a run of this FlexModel is under way": (
        lambda: in_the_run("verify", models.mlp(), BATCH),
        lambda: wrapped().verify(models.mlp(), BATCH),
    ),
    "{}: a run of this FlexModel is under way": (
        lambda: in_the_run("dry_run", BATCH),
        lambda: wrapped().dry_run(BATCH),
    ),
    "only backward hooks are registered; give loss=": (
        lambda: verify("other", backward=True),
        lambda: verify("other", lambda output: output.mean(), backward=True),
    ),
    "the reference is the wrapped model itself": (
        lambda: verify("itself"),
        lambda: verify("other"),
    ),
}

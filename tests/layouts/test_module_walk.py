"""`_C.walk_modules`: how a forward detects that the model was changed."""

import functools
import gc
import operator
import types
import weakref
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn

from flex_model import _C, FlexModel, HookFunction


def walk(root, before):
    return _C.walk_modules(root, before, torch.Tensor, nn.Module)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))


def test_a_model_that_did_not_change_gives_the_list_of_before():
    root = model()
    objects, *digests = walk(root, [])
    assert all(module in objects for module in root.modules())
    assert walk(root, objects) == (objects, *digests)
    assert walk(root, objects)[0] is objects
    assert walk(root, list(objects))[0] is not objects


def replace(root):
    root[1][1] = nn.Linear(2, 2)


def leave_out(root):
    root[1] = None


def patch(root):
    root[0].forward = types.MethodType(lambda self, x: x, root[0])


def patch_class(root):
    root[1][0].__class__ = type("Other", (nn.ReLU,), {"forward": lambda self, x: x})


def hook(root):
    root[1][1].register_forward_hook(lambda module, args, output: None)


def hook_with_kwargs(root):
    root[1].register_forward_hook(lambda module, args, kwargs, out: None, with_kwargs=True)


def hook_before(root):
    root[1][1].register_forward_pre_hook(lambda module, args: None)


def hook_backward(root):
    root[0].register_full_backward_pre_hook(lambda module, grad: None)


CHANGES = [
    replace, leave_out, patch, patch_class, hook, hook_with_kwargs, hook_before, hook_backward,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_gives_another_list(change):
    root = model()
    before, *_ = walk(root, [])
    change(root)
    after, *_ = walk(root, before)
    assert after is not before
    assert walk(root, after)[0] is after


def test_a_hook_that_was_taken_off_is_a_change():
    root = model()
    handle = root[0].register_forward_hook(lambda module, args, output: None)
    before, *_ = walk(root, [])
    handle.remove()
    assert walk(root, before)[0] is not before


def test_hooks_of_this_library_are_no_change():
    root = model()
    before, *_ = walk(root, [])
    flex = FlexModel(root, {})
    flex.register_forward_hook(HookFunction("0"))
    flex.register_full_backward_hook(HookFunction("1.1"))
    assert walk(root, before)[0] is before


def test_training_flags_are_told_apart():
    root = model()
    _, all_training, _ = walk(root, [])
    digests = {all_training}
    for module in root.modules():
        module.training = False
        digests.add(walk(root, [])[1])
    assert len(digests) == 1 + len(list(root.modules()))
    root.train()
    assert walk(root, [])[1] == all_training


def test_parameters_that_require_gradients_are_told_apart():
    root = model()
    digests = {walk(root, [])[1]}
    for parameter in root.parameters():
        digests.add(walk(root.requires_grad_(), [])[1])
        parameter.requires_grad_(False)
        digests.add(walk(root, [])[1])
    assert len(digests) == 1 + len(list(root.parameters()))


class Slots:
    __slots__ = ("size", "unset")

    def __init__(self, size):
        self.size = size

    def method(self):
        """A bound method holds its object."""


def closure(size):
    return lambda x, y=0: x[size]


MAKE = [
    lambda n: n,  # hash(-1) is hash(-2)
    float,
    lambda n: complex(0, n),
    np.int64,
    Slots,
    lambda n: Slots(n).method,
    closure,
    lambda n: functools.partial(max, n),
    operator.itemgetter,
    slice,
    lambda n: range(n, 3),
    lambda n: deque([n]),
    lambda n: [0] * 80 + [n],
    lambda n: dict.fromkeys(range(80), n),
]
ALIKE = [make(n) for make in MAKE for n in (-1, -2)]


def state(root):
    return walk(root, [])[2]


def test_attributes_are_told_apart():
    root = model()
    seen = {state(root)}
    loop: list = []
    loop.append(loop)
    values = (
        False,
        True,
        0,
        1.0,
        "a",
        "b",
        None,
        torch.relu,
        torch.tanh,
        torch.ones(1),
        [nn.ReLU()],
    )
    containers = [(1,), [1], {1}, {"a": 1}, {"a": 2}, loop]
    for number, value in enumerate([*values, *containers, *ALIKE], 2):
        root[1][0].own = value
        assert state(root) == state(root)
        seen.add(state(root))
        assert len(seen) == number


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(1),
        lambda: lambda x: x,
        lambda: {"a", "b", "c"},
        lambda: types.SimpleNamespace(a=1, b=[2]),
        lambda: list(range(100)),
        *(functools.partial(make, -1) for make in MAKE),
    ],
)
def test_attributes_that_are_made_anew_are_no_change(make):
    root = model()
    root.own = make()
    before = state(root)
    root.own = make()
    assert state(root) == before


def test_what_wraps_a_model_may_keep_notes():
    class Wrapper(nn.Sequential):
        """As DDP, which notes there what it did."""

    Wrapper.__module__ = "torch.nn.parallel.distributed"
    root = Wrapper(model())
    before = state(root)
    root.num_forwards = 1
    assert state(root) == before
    root[0].num_forwards = 1
    assert state(root) != before


def test_attributes_of_any_object_are_read_without_its_code():
    class Closed:
        def __getattribute__(self, name):
            raise RuntimeError("asked")

        def __hash__(self):
            raise RuntimeError("asked")

    root = model()
    root.own = [Closed()]
    before = state(root)
    object.__setattr__(root.own[0], "flag", True)
    assert state(root) != before


def test_a_shared_module_and_one_inside_itself_are_walked_once():
    shared = nn.Linear(2, 2)
    root = nn.Sequential(shared, shared)
    root.own = [root]  # no submodule: a plain list
    shared._modules["back"] = root
    objects, *digests = walk(root, [])
    assert walk(root, objects) == (objects, *digests)


def test_nothing_is_kept_alive():
    root = model()
    walk(root, [])
    reference = weakref.ref(root)
    del root
    gc.collect()
    assert reference() is None


def test_what_is_no_module_is_an_error():
    with pytest.raises(TypeError, match="no __dict__"):
        walk(object(), [])
    broken = nn.Identity()
    broken._forward_hooks[0] = Raising()
    with pytest.raises(RuntimeError, match="asked"):
        walk(broken, [])
    broken._forward_hooks.clear()
    assert torch.equal(broken(torch.ones(1)), torch.ones(1))


class Raising:
    @property
    def __module__(self):
        raise RuntimeError("asked")

"""`_C.walk_modules`: how a forward detects that the model was changed."""

import gc
import types
import weakref

import pytest
import torch
from torch import nn

from flex_model import _C, FlexModel, HookFunction


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))


def test_a_model_that_did_not_change_gives_the_list_of_before():
    root = model()
    objects, training = _C.walk_modules(root, [])
    assert all(module in objects for module in root.modules())
    assert _C.walk_modules(root, objects) == (objects, training)
    assert _C.walk_modules(root, objects)[0] is objects
    assert _C.walk_modules(root, list(objects))[0] is not objects


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


def hook_backward(root):
    root[0].register_full_backward_pre_hook(lambda module, grad: None)


@pytest.mark.parametrize("change", [replace, leave_out, patch, patch_class, hook, hook_backward])
def test_a_change_gives_another_list(change):
    root = model()
    before, _ = _C.walk_modules(root, [])
    change(root)
    after, _ = _C.walk_modules(root, before)
    assert after is not before
    assert _C.walk_modules(root, after)[0] is after


def test_a_hook_that_was_taken_off_is_a_change():
    root = model()
    handle = root[0].register_forward_hook(lambda module, args, output: None)
    before, _ = _C.walk_modules(root, [])
    handle.remove()
    assert _C.walk_modules(root, before)[0] is not before


def test_hooks_of_this_library_are_no_change():
    root = model()
    before, _ = _C.walk_modules(root, [])
    flex = FlexModel(root, {})
    flex.register_forward_hook(HookFunction("0"))
    flex.register_full_backward_hook(HookFunction("1.1"))
    assert _C.walk_modules(root, before)[0] is before


def test_training_flags_are_told_apart():
    root = model()
    _, all_training = _C.walk_modules(root, [])
    digests = {all_training}
    for module in root.modules():
        module.training = False
        digests.add(_C.walk_modules(root, [])[1])
    assert len(digests) == 1 + len(list(root.modules()))
    root.train()
    assert _C.walk_modules(root, [])[1] == all_training


def test_a_shared_module_and_one_inside_itself_are_walked_once():
    shared = nn.Linear(2, 2)
    root = nn.Sequential(shared, shared)
    root.own = [root]  # no submodule: a plain list
    shared._modules["back"] = root
    objects, training = _C.walk_modules(root, [])
    assert _C.walk_modules(root, objects) == (objects, training)


def test_nothing_is_kept_alive():
    root = model()
    _C.walk_modules(root, [])
    reference = weakref.ref(root)
    del root
    gc.collect()
    assert reference() is None


def test_what_is_no_module_is_an_error():
    with pytest.raises(TypeError, match="no __dict__"):
        _C.walk_modules(object(), [])
    broken = nn.Identity()
    broken._forward_hooks[0] = Raising()
    with pytest.raises(RuntimeError, match="asked"):
        _C.walk_modules(broken, [])
    broken._forward_hooks.clear()
    assert torch.equal(broken(torch.ones(1)), torch.ones(1))


class Raising:
    @property
    def __module__(self):
        raise RuntimeError("asked")

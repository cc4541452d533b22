"""What parity is judged by: torch's own hooks on an unsharded model, as a user of one process
writes them, and the edits that they make.
"""

from argparse import Namespace
from contextlib import contextmanager

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from shared_edits import elementwise, in_place, mixing

KINDS = ("forward", "forward_pre", "full_backward", "full_backward_pre", "parameter")
EDITS = {"elementwise": elementwise, "mixing": mixing, "in place": in_place}


def apply(value, edit, modules=()):
    """What a hook of one process records of a tensor, and what it returns."""
    record = value.detach().clone()
    if edit is None:
        return record, None
    given = value.clone()
    edited = edit(None, given, Namespace(), modules)
    return record, given if edited is None else edited


# ---- Hooks ---------------------------------------------------------------------------------------


@contextmanager
def torch_hook(model: nn.Module, hook, see):
    """Torch's hook where ``hook`` says (``kind``, ``site``, ``leaf``).

    ``see`` is given the tensor, and returns None or another one. Gradients at a module's edge are
    caught by tensor hooks on copies that only the module, or only those after it, use: an in-place
    operation on either side does not change what they see.
    """

    def at_leaf(tree):
        leaves, spec = tree_flatten(tree)
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if hook.leaf >= len(tensors):
            return tree
        at = tensors[hook.leaf]
        if hook.kind in ("forward", "forward_pre"):
            edited = see(leaves[at])
            if edited is None:
                return tree
            leaves[at] = edited
        elif leaves[at].requires_grad:
            leaves[at] = leaves[at].clone()
            leaves[at].register_hook(see)
        return tree_unflatten(leaves, spec)

    if hook.kind == "parameter":
        handle = model.get_parameter(hook.site).register_hook(see)
    elif hook.kind in ("forward", "full_backward_pre"):
        module = model.get_submodule(hook.site)
        handle = module.register_forward_hook(lambda module, args, output: at_leaf(output))
    else:
        module = model.get_submodule(hook.site)
        handle = module.register_forward_pre_hook(
            lambda module, args, kwargs: at_leaf((args, kwargs)), with_kwargs=True
        )
    try:
        yield
    finally:
        handle.remove()


def register(flex, kind, hook_function):
    """The same hook on a FlexModel."""
    name = "register_hook" if kind == "parameter" else f"register_{kind}_hook"
    return getattr(flex, name)(hook_function)

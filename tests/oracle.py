"""What parity is judged by: torch's own hooks on an unsharded model, as a user of one process
writes them, and the edits that they make.
"""

from argparse import Namespace
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from shared_edits import elementwise, in_place, mixing

KINDS = ("forward", "forward_pre", "full_backward", "full_backward_pre", "parameter")
READ = "read"
EDITS = {"elementwise": elementwise, "mixing": mixing, "in place": in_place}
DOINGS = {READ: None, **EDITS}


@dataclass(frozen=True)
class Hook:
    """``site`` is a module's name, or a parameter's; ``leaf`` counts its tensors."""

    kind: str
    site: str
    doing: str = READ
    leaf: int = 0

    @property
    def edit(self):
        return DOINGS[self.doing]


def apply(value, edit, modules=()):
    """What a hook of one process records of a tensor, and what it returns."""
    record = value.detach().clone()
    if edit is None:
        return record, None
    given = value.clone()
    edited = edit(None, given, Namespace(), modules)
    return record, given if edited is None else edited


# ---- Hooks ---------------------------------------------------------------------------------------


def torch_hook(model: nn.Module, hook: Hook, see):
    """Torch's hook where ``hook`` says: its handle.

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
        return model.get_parameter(hook.site).register_hook(see)
    module = model.get_submodule(hook.site)
    if hook.kind in ("forward", "full_backward_pre"):
        return module.register_forward_hook(lambda module, args, output: at_leaf(output))
    return module.register_forward_pre_hook(
        lambda module, args, kwargs: at_leaf((args, kwargs)), with_kwargs=True
    )


def watch(model: nn.Module, site, edit=None, kind="forward", modules=()):
    """Put such a hook on a model for good: the list of what it will have seen, before its edit."""
    seen = []

    def see(value):
        record, edited = apply(value, edit, modules)
        seen.append(record)
        return edited

    torch_hook(model, Hook(kind, site), see)
    return seen


def register(flex, kind, hook_function):
    """The same hook on a FlexModel."""
    name = "register_hook" if kind == "parameter" else f"register_{kind}_hook"
    return getattr(flex, name)(hook_function)

"""Ends a forward early: when all the modules that are needed were called."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flex_model import pytree
from flex_model.integrations import cut
from flex_model.runs.graphs import nodes_behind

#: Modules, the first call of any of which counts, and "forward" or "forward_pre".
Site = tuple[Sequence[nn.Module], str]


class CutError(Exception):
    """Leaves the forward early; not a failure. An ``Exception``: for no other does torch call the
    hooks that end a module's forward, those of other FlexModels, too.
    """


@contextlib.contextmanager
def ended_at(
    sites: Sequence[Site] | None, root: nn.Module, module_name: str | None = None
) -> Iterator[None]:
    """A context for one forward, which ends when the last of these sites was computed for the first
    time; without sites, at its end. Its torch hooks run after those of the hook core, which must be
    registered before.
    """
    if sites is None:
        yield
        return
    missing, handles = set(range(len(sites))), []

    def reach(number: int) -> None:
        if missing:
            missing.discard(number)
            if not missing:
                raise CutError

    try:
        for number, (modules, kind) in enumerate(sites):
            for module in modules:
                register: Any = getattr(module, f"register_{kind}_hook")
                handles.append(register(lambda *_, number=number: reach(number)))
        yield
        if sites and not missing:
            raise RuntimeError(
                "run_until: the model caught the exception that ends its forward, and went on; "
                "call flex(...), or catch exceptions of other types there"
            )
    except Exception as error:  # of torch's stages, too, which raise one of their own from it
        if missing or not isinstance(error.__cause__ or error, CutError):  # another forward's
            raise
    finally:
        for handle in handles:
            handle.remove()
    cut.clean_up(root)
    if missing:
        raise RuntimeError(cut.not_reached(module_name))


@contextlib.contextmanager
def averaged_gradients(root: nn.Module) -> Iterator[None]:
    """A context for one forward: where it ends inside of a DDP that averages gradients, which then
    does not begin to, a backward of its graph fails as it reaches DDP's parameters.
    """
    entered: set[nn.Module] = set()  # and not left
    nodes: set[Any] = set()  # of the tensors that hooks of the modules see
    with contextlib.ExitStack() as stack:

        def note(module: nn.Module, *seen: Any) -> None:
            nodes.update(t.grad_fn for t in pytree.flatten(seen)[0] if t.grad_fn is not None)

        for ddp in root.modules() if torch.is_grad_enabled() else ():
            if not isinstance(ddp, DistributedDataParallel) or not ddp.require_backward_grad_sync:
                continue
            handles = [
                ddp.register_forward_pre_hook(lambda ddp, args: entered.add(ddp)),
                ddp.register_forward_hook(lambda ddp, args, output: entered.discard(ddp)),
            ]
            for module in ddp.module.modules():
                if module._forward_hooks or module._forward_pre_hooks:
                    # Before those hooks: what they replace may be kept and differentiated.
                    handles += [
                        module.register_forward_pre_hook(note, prepend=True, with_kwargs=True),
                        module.register_forward_hook(note, prepend=True),
                    ]
            for handle in handles:
                stack.callback(handle.remove)
        yield
    parameters = {id(parameter) for ddp in entered for parameter in ddp.parameters()}
    for node in {*nodes, *nodes_behind([*nodes])} if parameters else ():
        leaves = [getattr(behind, "variable", None) for behind, _ in node.next_functions]
        places = [i for i, leaf in enumerate(leaves) if id(leaf) in parameters]
        if places:
            node.register_hook(partial(_refuse, places))


def _refuse(places: Sequence[int], grads: Sequence[Any], _: Any) -> None:
    """Refuse gradients of parameters at these places; a backward may need only those of others."""
    if any(grads[place] is not None for place in places):
        raise RuntimeError(
            "run_until: the forward ended inside of a DistributedDataParallel, which would not "
            "average the gradients of its parameters, and this backward reaches them; call it "
            "inside of the module's no_sync() and average them yourself before they are used, or "
            "call flex(...) and begin the backward at its output"
        )

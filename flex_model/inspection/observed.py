"""Observes the input and output tensors of every module in a run on shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from flex_model import _C
from flex_model.distributed.header import site_hash
from flex_model.distributed.mesh import Mesh
from flex_model.errors import HookError
from flex_model.inspection.on_shapes import Seen, exchange_seen, layout_from_shapes, on_shapes
from flex_model.inspection.tree import Node, TensorSeen, named
from flex_model.integrations import dtensor
from flex_model.layouts import follow
from flex_model.layouts.follow import Follower
from flex_model.layouts.tensor_site import Site

if TYPE_CHECKING:
    from flex_model.hooks.core import HookCore

#: A module's name, ``"input"`` or ``"output"``, and its first tensor at one call.
Observed = tuple[str, str, Seen]


def observe(
    root: nn.Module, mesh: Mesh, follower: Follower, run: Callable[[], Any]
) -> list[Observed]:
    """Run the model; return the first input and output tensor of each module call on this rank."""
    found: list[Observed] = []

    def observe_tensor(name: str, kind: str, tree: Any) -> None:
        tensors, _ = _C.flatten(tree)
        if not tensors:
            return
        with follow.paused(follower):
            leaf = tensors[0]
            value = follower.joint_value(leaf)
            plain, stated, known = dtensor.plain_and_stated(leaf, mesh, name)
            site = site_hash(name, kind)
            seen = Seen(site, tuple(plain.shape), plain.dtype, stated, known=known, value=value)
            found.append((name, kind, seen))

    def pre_hook(name: str) -> Callable[..., None]:
        return lambda module, args, kwargs: observe_tensor(name, "input", (args, kwargs))

    def hook(name: str) -> Callable[..., None]:
        return lambda module, args, output: observe_tensor(name, "output", output)

    handles: list[Any] = []
    try:
        for name, module in named(root).items():
            handles.append(module.register_forward_pre_hook(pre_hook(name), with_kwargs=True))
            handles.append(module.register_forward_hook(hook(name)))
        run()
    finally:
        for handle in handles:
            handle.remove()
    return found


def set_tensors(nodes: dict[str, Node], calls: Iterable[Sequence[Observed]], mesh: Mesh) -> None:
    """Set the nodes' input and output tensors, from the first call of each module.

    Args:
        calls: The observations of all ranks, call by call.
    """
    for per_rank in calls:
        name, kind, _ = per_rank[0]
        if name in nodes and getattr(nodes[name], kind) is None:
            seen = [one for _, _, one in per_rank]
            tensor: Any = {kind: _full_tensor(name, kind, seen, mesh)}
            nodes[name] = replace(nodes[name], **tensor)


def _full_tensor(name: str, kind: str, ranks: Sequence[Seen], mesh: Mesh) -> TensorSeen:
    site = Site(name, name, "forward" if kind == "output" else "forward_pre")
    shapes = [one.shape for one in ranks]
    try:
        layout: Any = layout_from_shapes(site, ranks, mesh)
        full = layout.full_shape(shapes, mesh.dp_size, mesh.tp_size)
    except (HookError, ValueError):
        layout, full = None, None
    return TensorSeen(full, tuple(shapes), ranks[0].dtype, layout)


def fill(core: HookCore, nodes: dict[str, Node], args: Any) -> None:
    """Set the input and output tensors of a wrapped model's nodes, from a run on the shapes of
    these inputs. Collective over the mesh.

    Raises:
        HookError: the model can't be run on shapes.
        RuntimeError: called during a run.
    """
    follower = core.tracking.follower()

    def follow(given: Any) -> list[Observed]:
        inputs, _ = given
        return observe(core.module, core.mesh, follower, lambda: core.module(*inputs))

    with core.communicator.uncounted():
        local = on_shapes(core, follower, "show", args, {}, follow)
        ranks = exchange_seen(core.communicator, [seen.concluded(follower) for _, _, seen in local])
    calls = [
        [(name, kind, seen) for seen in per_rank] for (name, kind, _), per_rank in zip(local, ranks)
    ]
    set_tensors(nodes, calls, core.mesh)
    for name, node in nodes.items():
        nodes[name] = replace(node, was_run=True)

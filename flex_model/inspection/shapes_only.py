"""Runs a model on the shapes of its inputs: no values, no transfers, no lasting change; and what
all ranks see there.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flex_model import pytree
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.header import DTYPES, site_hash
from flex_model.distributed.mesh import Mesh
from flex_model.distributed.placement import Partial, Placement, Replicate, Shape, ShardLayout
from flex_model.distributed.tensor_dicts import exchange_json
from flex_model.integrations import compiled, dtensor, fsdp1, fsdp2, torch_private
from flex_model.integrations.torch_private import FakeTensor, FakeTensorMode
from flex_model.layouts import follow, resolve
from flex_model.layouts.expected_shape import ExpectedShape
from flex_model.layouts.follow import UNKNOWN, Follower, Pair
from flex_model.layouts.placement_encoding import decode, encode
from flex_model.layouts.statements import Statements

if TYPE_CHECKING:
    from flex_model.hooks.core import HookCore


_LRU_CACHE = type(functools.lru_cache(lambda: None))


@contextlib.contextmanager
def without_values(*roots: nn.Module) -> Iterator[FakeTensorMode]:
    """A context for code that runs on fake tensors, and is not compiled; it yields their mode.
    Afterwards the attributes, buffers and parameters of ``roots`` are the same objects as before,
    and the states of random generators are restored.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    reference = weakref.ref(mode)
    # Deep copies of its tensors share it: torch would copy it with its weak references, and free
    # those twice. Not a subclass: higher-order operators know the class itself.
    mode.__deepcopy__ = lambda memo: reference()  # type: ignore[attr-defined]
    with contextlib.ExitStack() as stack:
        # What is kept elsewhere is an error where it meets a tensor with values.
        stack.callback(setattr, mode, "allow_non_fake_inputs", False)
        stack.callback(_clear_caches)
        for root in roots:
            # An operation of buffers and numbers alone runs with values: `num_batches_tracked`.
            stack.enter_context(torch_private.buffers_unchanged(root))
            stack.enter_context(torch_private.restored(_tables(root)))
        stack.enter_context(same_torch_random_state())
        stack.enter_context(compiled.nothing_compiled())
        yield mode


@contextlib.contextmanager
def shapes_only(root: nn.Module, mesh: Mesh, follower: Follower, arguments: Any) -> Iterator[Any]:
    """Enter fake tensor mode and yield ``arguments`` with fake tensors, for a run of the model that
    ``follower`` records. Afterwards it is as ``without_values`` leaves it.

    Raises:
        ValueError: FSDP1, or FSDP2 with mixed precision.
    """
    with contextlib.ExitStack() as stack:
        fake_mode = stack.enter_context(without_values(root))
        _keep_ddp_out(root, stack)
        _stand_in_for_fsdp2(root, mesh, fake_mode)

        def faked(tensor: Tensor) -> Tensor:
            fake = fake_mode.from_tensor(tensor)
            if fake is not tensor:
                follower.note_substitute(fake, tensor)
            return fake

        given = pytree.copied(arguments, faked)
        stack.enter_context(fake_mode)
        stack.enter_context(_NoTransfers())
        stack.enter_context(follower)
        yield given


class _Done(dist.Work):
    """A completed ``Work``."""

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: Any = None) -> bool:
        return True


class _NoTransfers(compiled.DispatchMode):
    """A dispatch mode in which collectives return tensors of the right shape at once. Functional
    collectives have fake kernels; in-place ones are skipped.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._done = _Done()  # kept: torch holds only the C++ part, whose wait() would never end

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, dtensor.dtensor_class()) for kind in types):
            return NotImplemented  # DTensor then dispatches here again, with plain tensors
        kwargs = kwargs or {}
        if func.namespace != "c10d":
            return func(*args, **kwargs)
        results = [
            self._done.boxed() if "Work" in str(returned.type) else args[0]
            for returned in func._schema.returns
        ]
        return results[0] if len(results) == 1 else tuple(results)


def _tables(root: nn.Module) -> Iterator[dict[Any, Any] | list[Any]]:
    """Yield where modules may keep fake tensors (caches, tables of positions)."""
    seen: set[int] = set()
    for module in root.modules():
        yield from (module._parameters, module._buffers, module._modules)
        yield from (module._forward_hooks, module._forward_pre_hooks)
        yield from _containers(module.__dict__, seen)
    state = sys.modules.get("megatron.core.parallel_state")
    if state is not None and state.is_initialized():  # its layers share buffers
        yield state.get_global_memory_buffer().buffer


def _containers(value: Any, seen: set[int], depth: int = 4) -> Iterator[dict[Any, Any] | list[Any]]:
    """Yield the dicts and lists in a value, and the attributes of objects."""
    if isinstance(value, (nn.Module, Tensor, type)) or id(value) in seen or depth == 0:
        return
    found = value if isinstance(value, (dict, list)) else getattr(value, "__dict__", None)
    if isinstance(found, (dict, list)):
        seen.add(id(value))
        yield found
        for item in list(found.values() if isinstance(found, dict) else found):
            yield from _containers(item, seen, depth - 1)


def _clear_caches() -> None:
    """Clear every ``functools.lru_cache`` (Megatron's rotary embedding has one) that holds fake
    tensors: a later forward that reads their memory would crash the process.
    """
    for found in gc.get_objects():
        if type(found) is _LRU_CACHE and _holds_fakes(found):
            found.cache_clear()


def _holds_fakes(cache: Any) -> bool:
    """Whether a cache's results, or containers among them, hold fake tensors."""
    level = gc.get_referents(cache)  # type() below: isinstance would evaluate __class__ of users
    for _ in range(4):
        if any(issubclass(type(found), FakeTensor) for found in level):
            return True
        level = [
            below
            for found in level
            if type(found) in (dict, list, tuple) or type(found).__module__ == "functools"
            for below in gc.get_referents(found)
        ]
    return False


def same_torch_random_state() -> contextlib.AbstractContextManager[None]:
    """A context that restores the states of torch's generators afterwards."""
    has_cuda = torch.cuda.is_initialized()
    return torch.random.fork_rng([torch.cuda.current_device()] if has_cuda else [])


def _keep_ddp_out(root: nn.Module, stack: contextlib.ExitStack) -> None:
    """Stop DDP from preparing gradient buckets and broadcasting buffers."""
    for module in root.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            stack.enter_context(module.no_sync())
            module.require_forward_param_sync = False
            vars(module)["reducer"] = _IdleReducer()


class _IdleReducer:
    """Stands in for what holds the buckets of DDP: none of its methods does anything."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


# ---- FSDP2: full parameters in place of gathered ones -------------------------------------------


def _stand_in_for_fsdp2(root: nn.Module, mesh: Mesh, fake_mode: FakeTensorMode) -> None:
    """Remove FSDP2's hooks and replace the parameters that they would gather by fake ones."""
    if any(fsdp1.is_fsdp1(module) for module in root.modules()):
        raise ValueError("FSDP1 gathers its flattened parameters in ways that need their values")
    stand_ins: dict[Any, nn.Parameter] = {}
    for module in root.modules():
        for table in (module._forward_pre_hooks, module._forward_hooks):
            _without_fsdp_hooks(table)
    if not any(fsdp2.is_fsdp2(module) for module in root.modules()):
        return
    for module in root.modules():
        for leaf, parameter in module._parameters.items():
            if dtensor.is_dtensor(parameter):
                if parameter not in stand_ins:
                    stand_ins[parameter] = _gathered(parameter, mesh, fake_mode)
                module._parameters[leaf] = stand_ins[parameter]


def _without_fsdp_hooks(table: dict[int, Any]) -> None:
    for key, hook in list(table.items()):
        while not hasattr(hook, "__self__") and hasattr(hook, "__wrapped__"):
            hook = hook.__wrapped__  # a hook that several modules share is wrapped
        owner = getattr(hook, "__self__", None)
        if not type(owner).__module__.startswith("torch.distributed.fsdp"):
            continue
        policy = getattr(owner, "_mp_policy", None)
        names = ("param_dtype", "output_dtype")
        if any(getattr(policy, name, None) is not None for name in names):
            raise ValueError("FSDP2 with mixed precision casts inputs and parameters in its hooks")
        del table[key]


def _gathered(parameter: Any, mesh: Mesh, fake_mode: FakeTensorMode) -> nn.Parameter:
    """Return the parameter that FSDP2 would gather: full along dp, unchanged along tp; itself if it
    is on no other axis.
    """
    device_mesh = parameter.device_mesh
    axes = dtensor.axes_of(device_mesh, mesh, "a parameter")
    kept = [i for i, axis in enumerate(axes) if axis == "tp"]
    if len(kept) == device_mesh.ndim:
        return parameter
    device = torch.device(device_mesh.device_type)
    with fake_mode:
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        if kept:
            (dim,) = kept
            full = sys.modules["torch.distributed.tensor"].distribute_tensor(
                full,
                device_mesh[device_mesh.mesh_dim_names[dim]],
                [parameter.placements[dim]],
                src_data_rank=None,
            )
        return nn.Parameter(full, requires_grad=parameter.requires_grad)


@dataclass(frozen=True)
class Seen:
    """One rank's tensor at one call of a hook.

    Attributes:
        hook: The registration's index; or a module's name, and "input" or "output".
        pair: The placements along dp and tp that a DTensor states or the followed run proves.
        known: The layout that a DTensor states, the same on every rank.
        value: The follower's value for the tensor.
    """

    hook: Any
    shape: Shape
    dtype: torch.dtype
    pair: Pair = UNKNOWN
    needs_gradient: bool = False
    known: ShardLayout | None = field(default=None, compare=False)
    device: torch.device = field(default=torch.device("cpu"), compare=False)  # this rank's
    value: Any = field(default=None, compare=False)

    def concluded(self, follower: Follower) -> Seen:
        """Return a copy with the placements that the run proves."""
        proven = follower.placements(self.value)
        dp, tp = (a if a is not None else b for a, b in zip(self.pair, proven))
        return replace(self, pair=(dp, tp))


#: A module, whether its input or its output is looked at, and what is made of it.
Look = tuple[nn.Module, bool, Callable[[Any], Seen | None]]


def run_watched(
    root: nn.Module, follower: Follower, looks: Sequence[Look], args: Any, kwargs: Any
) -> list[Seen]:
    """Run a model; return, call by call, what ``looks`` make of modules' inputs ``(args, kwargs)``
    and outputs, but None.
    """
    found: list[Seen | None] = []

    def hook(is_input: bool, look: Callable[[Any], Seen | None]) -> Callable[..., None]:
        def call(module: nn.Module, args: Any, last: Any) -> None:
            with follow.paused(follower):
                found.append(look((args, last) if is_input else last))

        return call

    with contextlib.ExitStack() as stack:
        for module, is_input, look in looks:
            register: Any = module.register_forward_hook
            if is_input:
                register = functools.partial(module.register_forward_pre_hook, with_kwargs=True)
            stack.callback(register(hook(is_input, look)).remove)
        root(*args, **kwargs)
    return [one for one in found if one is not None]


def on_shapes(
    core: HookCore, name: str, args: Any, kwargs: Any, look: Callable[[Follower, Any], list[Seen]]
) -> list[list[Seen]]:
    """Call ``look(follower, inputs)``, which runs the model, on shapes alone and without hooks,
    while the follower records the operations; return the result of all ranks of the mesh, call by
    call, with what the run proves. Collective over the mesh.

    Args:
        name: The operation, for messages.

    Raises:
        HookError: a rank could not run the model.
        HookMismatchError: ranks called different hooks.
        RuntimeError: called during a run.
    """
    if core.runs.is_inside:
        raise RuntimeError(f"{name}: a run of this FlexModel is under way; call it before or after")
    communicator, follower = core.communicator, core.tracking.follower()
    found: list[Seen] = []
    with communicator.uncounted(), core.table.nothing_chosen():
        if not communicator.is_local:
            core.tracking.seed(follower, args, kwargs)
        try:
            with shapes_only(core.module, core.mesh, follower, (args, kwargs)) as given:
                found = look(follower, given)
        except Exception as error:
            message = (
                f"{name}: the model can't be run on shapes alone ({type(error).__name__}: "
                f"{str(error)[:600]}); run it with values, and call flex.layouts()"
            )
            communicator.fail(message, error)
        if not communicator.is_local:
            follower.sync(communicator)
        return _exchanged(communicator, [one.concluded(follower) for one in found])


def _exchanged(communicator: Communicator, seen: list[Seen]) -> list[list[Seen]]:
    if communicator.is_local:
        return [[one] for one in seen]
    sites = f"{len(seen)} sites ({site_hash(*(one.hook for one in seen)):x})"
    where = f"the end of a run on shapes, which called {sites}"  # the ranks compare it
    per_rank = exchange_json(communicator, [_to_json(one) for one in seen], where)
    return [[_from_json(rank[i], one) for rank in per_rank] for i, one in enumerate(seen)]


def _to_json(one: Seen) -> list[Any]:
    pair = [encode(placement) for placement in one.pair]
    return [one.shape, DTYPES.index(one.dtype), pair, one.needs_gradient]


def _from_json(fields: list[Any], local: Seen) -> Seen:
    shape, dtype, pair, needs = fields
    dp, tp = (decode(placement) for placement in pair)
    kind = DTYPES[dtype]
    return Seen(local.hook, tuple(shape), kind, (dp, tp), needs, local.known, local.device)


def layout_from_shapes(
    site: resolve.Site,
    ranks: Sequence[Seen],
    mesh: Mesh,
    stated: Mapping[str, Placement] | None = None,
    expected_shape: ExpectedShape = None,
    is_gradient: bool = False,
    rows: int | None = 0,
    statements: Statements | None = None,
) -> ShardLayout:
    """Return the layout that a run will resolve. A gradient is assumed to be replicated along tp
    unless its tensor is sharded. Local.

    Raises:
        ValueError: the sources contradict each other, or the placement along an axis is not known.
    """
    shapes = [one.shape for one in ranks]
    known = ShardLayout(source="one process") if len(mesh.stage_ranks) == 1 else ranks[0].known
    dp, tp = (
        placements.pop() if len(placements := {one.pair[i] for one in ranks}) == 1 else None
        for i in range(2)
    )
    layout = resolve.resolve(
        site,
        shapes,
        mesh,
        (dp, tp),
        stated or {},
        expected_shape,
        known,
        rows_dim=rows,
        statements=statements,
    )
    if not is_gradient or known is not None:
        return layout
    dp = Partial() if layout.dp == Replicate() and mesh.dp_size > 1 else layout.dp
    tp = Replicate() if isinstance(layout.tp, Partial) else layout.tp
    return replace(layout, dp=dp, tp=tp, source=f"its tensor's: {layout.source}")

"""The private functions and classes of torch that flex_model uses, each named once.

All exist in torch 2.11 to 2.15. A comment says what to do where one is gone. Public, by
torch's pages on extending it, are ``torch.utils._pytree``, ``torch.utils._python_dispatch``,
``Tensor._version`` and the ``_schema`` of an operation.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C import _autograd, _functorch
from torch._C._dynamo import eval_frame as eval_frame  # compiled.outside_graphs does without it
from torch._decomp import decomposition_table as decomposition_table
from torch._functorch import pyfunctorch
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._subclasses import fake_tensor as fake_tensor  # tensors without values; nothing else is
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.autograd import forward_ad
from torch.autograd import profiler as _profiler
from torch.nn.utils import stateless
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _device, _pytree, checkpoint
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

# ---- Tensors without values. Without them: no runs on shapes -------------------------------------


def makes_fakes() -> bool:
    """Whether tensors that are made now have no values."""
    return type(torch.empty(0, device="cpu")) is FakeTensor


# ---- The dispatcher: what an operation is composed of. Without it: a list of names, by hand ------

disabled_modes = _disable_current_modes  # without it: modes of the user see shapes of ours
DisableTorchFunction = torch._C.DisableTorchFunction  # else an empty TorchFunctionMode


def is_composite(operation: Any) -> bool:
    """Whether an operation is composed of others on every device: some have a kernel on one."""
    has_kernel, name = torch._C._dispatch_has_kernel_for_dispatch_key, operation.name()
    is_whole = has_kernel(name, "CPU") or has_kernel(name, "CUDA")
    return has_kernel(name, "CompositeImplicitAutograd") and not is_whole


def decompose(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation that is composed of others as these. Torch's own method prefers another form
    of some, in Python, which imports sympy.
    """
    return operation._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def decomposition_of(operation: Any) -> Callable[..., Any]:
    """Return a function that runs an operation as a sequence of others. NotImplementedError if
    there is none. Without torch's table: only for those that are composed of others.
    """
    if operation in decomposition_table:
        return decomposition_table[operation]
    if not is_composite(operation):
        raise NotImplementedError(operation)
    return functools.partial(decompose, operation)


# ---- Autograd and torch.func. Without them: hooks on the graph's nodes; no check ----------------

current_graph_task = torch._C._current_graph_task_id  # -1: no backward runs in this thread
current_node = torch._C._current_autograd_node  # the one that runs; None outside of a backward
next_sequence = _autograd._get_sequence_nr  # the number of the next node made in this thread
keeps_graph = _autograd._get_current_graph_task_keep_graph  # backward(retain_graph=True)
is_batched = _functorch.is_legacy_batchedtensor  # by grad(is_grads_batched=True)
is_functorch_tensor = _functorch.is_functorch_wrapped_tensor
current_transform = _functorch.peek_interpreter_stack  # None for none
outside_transforms = pyfunctorch.temporarily_clear_interpreter_stack


def call_last(end: Callable[..., None]) -> None:
    """Have autograd call ``end`` after all callbacks queued during the pass. A Ctrl-C before that
    drops ``end``, which is detected; no Python code, where a Ctrl-C would be missed, runs between.
    """
    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(functools.partial(queue, end))


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor in the wrappers of transforms, which they leave dead; the dims of
    ``vmap``, and of batched gradients, are its first. To be called ``outside_transforms``.
    """
    dims = []  # each counts without those of the wrappers inside
    while is_functorch_tensor(tensor):
        dims.append(_functorch.maybe_get_bdim(tensor))
        tensor = _functorch.get_unwrapped(tensor)
    for number, dim in enumerate(dim for dim in reversed(dims) if dim >= 0):
        tensor = tensor.movedim(dim + number, number)
    if is_batched(tensor):
        level = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()
        while is_batched(tensor):
            tensor, level = torch._remove_batch_dim(tensor, level, 1, 0), level - 1
    return tensor


def function_of(node: Any) -> Any:
    """Return the ``autograd.Function`` whose backward a node is; None for other nodes. Without it:
    no Function has a contract, and gradients along tp before them are refused.
    """
    return getattr(type(node), "_forward_cls", None)


CUSTOM_BACKWARD = "torch._library.autograd.GeneratedBackwardFor_"


def backward_of(namespace: str, name: str) -> str:
    """Return the qualified name of the ``autograd.Function`` that ``torch.library`` makes for the
    backward of an operation. Under another name it has no contract.
    """
    return f"{CUSTOM_BACKWARD}{namespace}_{name}_default"


# ---- The profiler. Without it: no ranges of hooks in a trace -------------------------------------


def is_profiling() -> bool:
    """Whether torch's profiler runs, or ``emit_nvtx``."""
    return _profiler._is_profiler_enabled


# ---- The compiler. Modules that are not imported before they are used ---------------------------

DYNAMO = "torch._dynamo"


def num_compiled() -> int:
    """Return a number that changes whenever anything is compiled in this process, also code that
    ``compiled.is_compiled`` can't find: ``generate`` with a static cache keeps a compiled
    ``model._compiled_call``, and a user's function may do the same. Cheap. Without it: 0.
    """
    dynamo: Any = sys.modules.get(DYNAMO)
    return getattr(getattr(dynamo, "convert_frame", None), "FRAME_COUNTER", 0)


def guard_on_hooks() -> bool:
    """Make dynamo guard on the hooks of modules; whether it did not before. Without it: refuse
    compiled models.
    """
    config = torch._dynamo.config
    before = config.skip_nnmodule_hook_guards
    config.skip_nnmodule_hook_guards = False
    return before


# ---- torch.distributed ---------------------------------------------------------------------------

c10d: Any = dist.distributed_c10d
default_store = c10d._get_default_store  # without it: a TCPStore of our own
find_group = c10d._resolve_process_group  # by name; without it: ProcessGroup.unbox alone


def reduction_of(argument: Any) -> str:
    """Return the reduction that an operation of c10d is passed, such as "sum"; "" where it does not
    show (before torch 2.15).
    """
    unbox = getattr(dist.ReduceOp, "unbox", None)
    return "" if unbox is None else str(unbox(argument).op.name).lower()


def new_group_of_members(ranks: tuple[int, ...]) -> Any:
    """Make a group of ``ranks`` on these alone: others may belong to another model, or to none.

    torch names such a group by its ranks and by the number of groups that a process has made, and
    ranks that use different names wait for each other for ever; torch 2.15 then counts it on its
    members alone, so that the next group of all ranks has two names. This one is named by its
    ranks, and not counted. Without it: ``use_local_synchronization``, where the numbers agree.
    Source: https://github.com/pytorch/pytorch/pull/189073.
    """
    own = {"_hash_ranks_to_str": lambda ranks: "flex_model_" + "_".join(map(str, ranks))}
    before = {name: getattr(c10d, name) for name in ("_group_count", *own)}
    vars(c10d).update(own)
    try:
        return dist.new_group(list(ranks), use_local_synchronization=True)
    finally:
        vars(c10d).update(before)


def forget_meshes() -> None:
    """Empty DTensor's caches: meshes of other ranks of a world count as the same there. Without it:
    ``inspect`` finds fewer layouts.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        debug._clear_sharding_prop_cache()


FUNCTIONAL_COLLECTIVES = "torch.distributed._functional_collectives"  # AsyncCollectiveTensor
CONTEXT_PARALLEL = "torch.distributed.tensor.experimental._context_parallel._attention"


def root_mesh(device_mesh: Any) -> Any:
    """Return the mesh that a DeviceMesh is a part of; without it, None."""
    find = getattr(device_mesh, "_get_root_mesh", None)
    return None if find is None else find()


def fsdp2_state(module: Any) -> Any:
    """Return what ``fully_shard`` keeps of a module: ``_fsdp_param_group``, ``_training_state``.
    Without it: refuse ``run_until``; meshes are those of the DTensors.
    """
    return module._get_fsdp_state()


# What torch has for `register_comm_hook` that averages, also as one of DDP's mixed precision.
_AVERAGE = {
    "allreduce_hook", "reduce_scatter_hook", "fp16_compress_hook", "bf16_compress_hook",
    "powerSGD_hook", "batched_powerSGD_hook", "_reducer_allreduce_and_upcast_hook",
}  # fmt: skip


def unknown_comm_hook(module: Any) -> str:
    """Return the name of the function that reduces the gradients of DDP or FSDP1 in their place, if
    it is not one of torch's that average; else an empty one. Without it: none is seen.
    """
    found = [one for one, _ in getattr(module, "_comm_hooks", ())]
    for hook in [*found, getattr(module, "_comm_hook", None)]:
        name = getattr(hook, "__qualname__", type(hook).__name__)
        is_known = name in _AVERAGE and hook.__module__.startswith("torch.distributed.algorithms.")
        if hook is not None and not is_known:
            return name
    return ""


def fsdp2_fills() -> list[tuple[Any, str]]:
    """Return the class and names of the methods with which FSDP2 fills its weights. Without them:
    those that are not sharded along dim 0 are lost where a module is called twice.
    """
    module: Any = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    names = () if module is None else ("unshard", "wait_for_unshard")
    return [(module.FSDPParamGroup, name) for name in names]


def accumulation_hooks(parameter: Any) -> list[Any]:
    """Return the hooks of ``register_post_accumulate_grad_hook`` on a parameter; of None, none.
    Without their name: backwards of experiments step optimizers that are hooks.
    """
    return [*(getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()]


# ---- Sequential runs: what torch keeps per thread or process ---------------------------------
# There is no public way to read these, or to set them without a context. Without one of them, a
# batch that changes the setting around a target would change it for other batches.

_C: Any = torch._C


def _set_saved_hooks_error(message: str | None) -> None:
    if message is None:
        _autograd._saved_tensors_hooks_enable()
    else:
        _autograd._saved_tensors_hooks_disable(message, False)


def _set_default_device(device: Any) -> None:
    _device.CURRENT_DEVICE = device


def _set_device_context(context: Any) -> None:
    torch._GLOBAL_DEVICE_CONTEXT.device_context = context


# How each setting is read, and set. The attention kernels are one choice for the process.
THREAD_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (_C._get_torch_function_state, _C._set_torch_function_state),
    (lambda: _device.CURRENT_DEVICE, _set_default_device),  # of `with torch.device`
    (
        lambda: getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None),
        _set_device_context,  # of `torch.set_default_device`
    ),
    (torch.is_grad_enabled, _C._set_grad_enabled),
    (_C._is_fwd_grad_enabled, _C._set_fwd_grad_enabled),
    (_C._is_multithreading_enabled, _C._set_multithreading_enabled),
    (_C._is_view_replay_enabled, _C._set_view_replay_enabled),
    (_C._get_flash_sdp_enabled, _C._set_sdp_use_flash),
    (_C._get_mem_efficient_sdp_enabled, _C._set_sdp_use_mem_efficient),
    (_C._get_math_sdp_enabled, _C._set_sdp_use_math),
    (_C._get_cudnn_sdp_enabled, _C._set_sdp_use_cudnn),
    (_C._get_sdp_priority_order, _C._set_sdp_priority_order),
    *(
        (functools.partial(read, kind), functools.partial(write, kind))
        for kind in ("cpu", "cuda")
        for read, write in (
            (torch.is_autocast_enabled, torch.set_autocast_enabled),
            (torch.get_autocast_dtype, torch.set_autocast_dtype),
        )
    ),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (_C._get_dtensor_allow_implicit_replication, _C._set_dtensor_allow_implicit_replication),
    (_autograd._saved_tensors_hooks_get_disabled_error_message, _set_saved_hooks_error),
    # What torch.compile has called for each Python frame: last, since ours are not to be compiled.
    (eval_frame.get_eval_frame_callback, eval_frame.set_eval_frame),
)


class ModeStack(NamedTuple):
    """One of torch's stacks of modes. Modes are pushed and popped here, not entered and left."""

    read: Callable[[], list[Any]]
    pop: Callable[[], Any]
    push: Callable[[Any], None]

    def write(self, modes: list[Any]) -> None:
        for _ in self.read():
            self.pop()
        for mode in modes:
            self.push(mode)


MODE_STACKS = (
    ModeStack(
        _get_current_function_mode_stack,
        _C._pop_torch_function_stack,
        _C._push_on_torch_function_stack,
    ),
    ModeStack(
        _get_current_dispatch_mode_stack,
        functools.partial(_C._pop_torch_dispatch_stack, None),  # of any kind
        _C._push_on_torch_dispatch_stack,
    ),
)

# ---- Selective checkpointing. Without its modes: hooks in it are wrong ---------------------------

_num_dispatch_modes = _C._len_torch_dispatch_stack
_SELECTIVE = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)
_ANYHOW = contextlib.nullcontext()


def is_selective() -> bool:
    """Whether selective checkpointing counts the operations that run: what it saved in a forward,
    a recomputation gets by operation and number.
    """
    return any(isinstance(mode, _SELECTIVE) for mode in _get_current_dispatch_mode_stack())


@contextlib.contextmanager
def _without_selective() -> Iterator[None]:
    stack = MODE_STACKS[1]
    before = stack.read()
    stack.write([mode for mode in before if not isinstance(mode, _SELECTIVE)])
    try:
        yield
    finally:  # a mode may have been entered inside, or left
        now = stack.read()
        kept = [mode for mode in before if mode in now or isinstance(mode, _SELECTIVE)]
        stack.write([*kept, *(mode for mode in now if mode not in before)])


def uncounted() -> contextlib.AbstractContextManager[None]:
    """Return a context whose operations selective checkpointing neither counts nor serves: they are
    not the same in a recomputation.
    """
    return _without_selective() if _num_dispatch_modes() and is_selective() else _ANYHOW


InferenceMode = _C._InferenceMode  # a guard: its end restores what was there when it was made
ForceDispatchKeys = _C._ForceDispatchKeyGuard
is_any_autocast_enabled = _C._is_any_autocast_enabled
included_dispatch_keys = _C._dispatch_tls_local_include_set
excluded_dispatch_keys = _C._dispatch_tls_local_exclude_set

enable_saved_hooks = _autograd._saved_tensors_hooks_enable
top_saved_hooks = functools.partial(_autograd._top_saved_tensors_default_hooks, True)
push_saved_hooks = _autograd._push_saved_tensors_default_hooks
pop_saved_hooks = _autograd._pop_saved_tensors_default_hooks


def position_on_gpu(device: torch.device) -> tuple[int, int]:
    """Return what changes with every draw on a GPU: its generator's seed and offset. The state
    would be a copy that the host waits for.
    """
    generator = torch.cuda.default_generators[device.index or 0]
    return generator.initial_seed(), generator.get_offset()


# What the compiled dispatcher calls: without any of these, it leaves all hooks to Python.
FOR_DISPATCHER = SimpleNamespace(
    Tensor=torch.Tensor,
    strided=torch.strided,
    current_graph_task=current_graph_task,
    is_inference_mode=torch.is_inference_mode_enabled,
    is_grad_enabled=torch.is_grad_enabled,
    inference_mode=torch._C._InferenceMode,
    num_dispatch_modes=_num_dispatch_modes,
    is_selective=is_selective,
    current_transform=_functorch.maybe_current_level,  # faster than the other
    saved_hooks=top_saved_hooks,
    random_state=torch.default_generator.get_state,
    position_on_gpu=position_on_gpu,
    is_capturing=lambda: torch.cuda.is_current_stream_capturing(),
    storage_uses=getattr(torch._C, "_storage_Use_Count", lambda storage: 0),  # without it: copies
)

num_transforms = _functorch.get_dynamic_layer_stack_depth  # of torch.func that are in progress
pop_transform = _functorch.pop_dynamic_layer_stack
push_transform = _functorch.push_dynamic_layer_stack


def forward_mode_level() -> int:
    """The level of forward-mode differentiation, one for the process; -1 outside of it."""
    return forward_ad._current_level


# ---- Sequential runs: the rest ---------------------------------------------------------------

functional_call_code = stateless._functional_call.__code__  # of the frame in which the model runs
# A function of pybind11 in torch's library: its code is that of all others there.
PYBIND11_FUNCTION = _C._dispatch_tls_local_include_set
make_subclass = torch.Tensor._make_subclass
DisableSubclassFunction = _C.DisableTorchFunctionSubclass
tree_flatten, tree_unflatten = _pytree.tree_flatten, _pytree.tree_unflatten


@contextlib.contextmanager
def restored(tables: Iterable[dict[Any, Any] | list[Any]]) -> Iterator[None]:
    """A context after which tables of modules (parameters, buffers, attributes, hooks, containers
    in these) have the entries that they had before, in their order.
    """
    before: list[Any] = [
        (table, list(table) if isinstance(table, list) else dict(table)) for table in tables
    ]
    try:
        yield
    finally:
        for table, old in before:
            if isinstance(table, list):
                if len(table) != len(old) or any(map(operator.is_not, table, old)):
                    table[:] = old
            elif list(table) != list(old) or any(table[key] is not old[key] for key in old):
                table.clear()
                table.update(old)


@contextlib.contextmanager
def buffers_unchanged(*modules: torch.nn.Module) -> Iterator[None]:
    """A context after which buffers have the values that they had before."""
    own = [buffer for one in modules for _, buffer in one.named_buffers()]
    buffers = [(buffer, buffer.clone()) for buffer in own]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, before in buffers:  # what has not changed is not written to
                is_known = not tensor.is_meta and tensor.shape == before.shape
                if is_known and not torch.equal(tensor, before):
                    tensor.copy_(before)


@contextlib.contextmanager
def unchanged(*modules: torch.nn.Module) -> Iterator[None]:
    """No gradients; afterwards buffers and random states are what they were before."""
    tensors = [one for module in modules for one in (*module.buffers(), *module.parameters())]
    devices = {tensor.device.index or 0 for tensor in tensors if tensor.is_cuda}
    with (
        torch.random.fork_rng(devices=sorted(devices)),
        torch.no_grad(),
        buffers_unchanged(*modules),
    ):
        yield


def is_held_once(tensor: torch.Tensor) -> bool:
    """Whether no other tensor or holder has a tensor's storage."""
    storage = tensor.untyped_storage()  # a reference, too
    return bool(_C._storage_Use_Count(storage._cdata) <= 2)


def local_shape_and_offset(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """This rank's part of a DTensor: its sizes, and where it begins."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )


# ---- Splitting of models into stages. Without them: no pipeline(method="modules") ------------

no_torch_function = torch._C._disabled_torch_function_impl


def wrapper_tensor(kind: type, elem: torch.Tensor, device: torch.device) -> Any:
    """Return a tensor of a class that handles its operations itself, with the sizes of another."""
    make = torch.Tensor._make_wrapper_subclass
    return make(kind, elem.shape, strides=elem.stride(), dtype=elem.dtype, device=device)

"""The private functions and classes of torch that flex_model uses, each named once.

All exist in torch 2.11, the version tried. A comment says what to do where one is gone. Public, by
torch's pages on extending it, are ``torch.utils._pytree``, ``torch.utils._python_dispatch``,
``Tensor._version`` and the ``_schema`` of an operation.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _functorch
from torch._C._dynamo import eval_frame as eval_frame  # compiled.outside_graphs does without it
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._subclasses import fake_tensor as fake_tensor  # tensors without values; nothing else is
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily

# ---- The dispatcher: which operations there are. Without it: a list of names, kept by hand ------

all_operation_names = torch._C._dispatch_get_all_op_names
DisableTorchFunction = torch._C.DisableTorchFunction  # else an empty TorchFunctionMode


def is_composite(operation: Any) -> bool:
    """Whether an operation is composed of others."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(operation.name(), "CompositeImplicitAutograd")


# ---- Autograd and torch.func. Without them: hooks on the graph's nodes; no check ----------------

current_graph_task = torch._C._current_graph_task_id  # -1 outside of a backward
is_batched = _functorch.is_legacy_batchedtensor  # by grad(is_grads_batched=True)
is_functorch_tensor = _functorch.is_functorch_wrapped_tensor
current_transform = _functorch.peek_interpreter_stack  # None for none

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
group_world = c10d._world  # counts groups by name; pull request 189073 makes this unnecessary
symmetric_memory: Any = getattr(torch._C, "_distributed_c10d", None)  # without it: CUDA IPC
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

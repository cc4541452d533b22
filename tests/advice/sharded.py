"""Advice about meshes and about models that are sharded. Two ranks."""

import contextlib
import gc
import os
import shutil
import tempfile
import warnings
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import models
from advice.triggers import BATCH, in_a_folder
from flex_model import ActivationStore, FlexModel, HookFunction
from flex_model import distributed as fm_dist
from pipelines import alone_group
from shared_edits import double


def mesh(*names, shape=None):
    return init_device_mesh("cpu", shape or (2,), mesh_dim_names=names or None)


PLAN = {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}


def tensor_parallel(**settings):
    return FlexModel(parallelize_module(models.mlp(), mesh("tp"), PLAN), {}, **settings)


def expert_parallel(**settings):
    model = parallelize_module(models.mlp(), mesh("ep"), PLAN)
    return FlexModel(model, **{name: make() for name, make in settings.items()})


def fsdp1(model, orig=True):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=orig)


def fsdp1_gradient(orig):
    flex = FlexModel(fully_shard(models.mlp()) if orig is None else fsdp1(models.mlp(), orig), {})
    flex(BATCH).sum().backward()
    flex.get_module_gradient("fc1.weight")


def fsdp1_hook(num_forwards=1, is_late=False):
    flex = FlexModel(fsdp1(models.mlp()), {})
    if not is_late:
        flex.register_hook(HookFunction("fc1.weight"))
    loss = sum(flex(BATCH).sum() for _ in range(num_forwards))
    if is_late:
        flex.register_hook(HookFunction("fc1.weight"))
    loss.backward()


def unsynchronized(then):
    flex = FlexModel(fully_shard(models.mlp()), {})
    if then == "hooked":
        flex.register_hook(HookFunction("fc1.weight"))
    flex.set_requires_gradient_sync(False)
    flex(BATCH).sum().backward()
    if then in ("averaged", "averaged and read"):
        flex.set_requires_gradient_sync(True)
        flex(BATCH, groups=()).sum().backward()
    if then in ("read", "averaged and read"):
        flex.get_module_gradient("fc1.weight")
        return
    if then != "hooked":
        flex.register_hook(HookFunction("fc1.weight"))
    flex(BATCH).sum().backward()


def divided(by):
    flex = FlexModel(models.TWO_RANKS["fsdp2"].shard(models.mlp()), {})
    flex.register_full_backward_hook(HookFunction("fc2"))
    for module in flex.module.modules() if by == "all" else [flex.module]:
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    flex(BATCH).sum().backward()
    flex.restore()


def reduced(by):
    module = fsdp1(models.mlp())
    module.register_comm_hook(default_hooks.DefaultState(dist.group.WORLD), by)
    flex = FlexModel(module, {})
    flex.register_full_backward_hook(HookFunction("fc2"))
    flex(BATCH).sum().backward()
    flex.restore()


def summed(state, grad, output):
    dist.reduce_scatter_tensor(output, grad)


def set_weight(seed, change=lambda full: full):
    flex = tensor_parallel()
    flex.set_module_parameter("fc1.weight", change(models.random(8, 6, seed=seed)))
    flex.restore()


def by_hand(*functions, is_stated=False):
    """Shards that are plain tensors, of layers that say nothing about them."""
    way, model = models.TWO_RANKS["tp"], models.mlp()
    sharded = models.tensor_parallel(model, way.mesh["tp"].get_group(), states_sizes=False)
    flex = FlexModel(sharded, {}, **way.sizes)
    if is_stated:
        models.state_layouts(flex, model)
    for function in functions:
        flex.register_forward_hook(function)
    return flex


def of_a_parameter(is_stated):
    flex = by_hand(is_stated=is_stated)
    if not is_stated:
        models.replicas(flex)
    flex.register_hook(HookFunction("fc1.weight"))
    flex(BATCH).sum().backward()
    flex.restore()


def unknown_layout():
    flex = by_hand(HookFunction("fc1"))
    flex(BATCH)


def run_from(*functions, **stated):
    with by_hand(*functions, **stated) as flex:
        flex(BATCH)  # with a hook there, or none
        flex.run_from("fc2", models.random(4, 6), BATCH)


def each_line():
    """Every line of the message can be executed; the right one, which is the first, gives the
    record of the whole model.
    """
    with by_hand(HookFunction("fc1")) as flex:
        try:
            flex(BATCH)
        except ValueError as error:
            lines = [line.strip() for line in str(error).splitlines()[1:-1]]
    assert len(lines) == 4 and "tp=Shard(1)" in lines[0]
    shapes = []
    for line in lines:
        names = {"Partial": Partial, "Replicate": Replicate, "Shard": Shard}
        with by_hand(HookFunction("fc1")) as flex:
            exec(line, {"flex": flex, **names})
            if "Replicate" in line:
                continue  # whose values differ
            flex(BATCH)
            shapes += [tuple(one.shape) for one in flex.output_ptr.get("fc1", [])]
    assert shapes == ([(4, 8), (8, 4), (4, 4)] if dist.get_rank() == 0 else [])


def reads_a_weight(how):
    def edit(module, full, save_ctx, modules):
        if how == "transfer":
            return full + flex.get_module_parameter("out.bias").sum()
        return full + hook.parameters["out.bias"].sum()

    hook = HookFunction("fc1", None, edit, parameters=["out.bias"])
    with by_hand(hook, is_stated=True) as flex:  # which the edit would keep alive
        flex(BATCH)


def transformed(how):
    hook = HookFunction("act", editing_function=double)
    if how == "one process":
        flex = FlexModel(models.mlp(), process_group=alone_group())
        flex.register_forward_hook(hook)
    else:
        flex = by_hand(hook, is_stated=True)
    if how == "a loop":
        rows = [row.clone().requires_grad_() for row in BATCH]
        torch.stack([torch.autograd.grad(flex(row[None]).sum(), row)[0] for row in rows])
    else:
        torch.func.grad(lambda x: flex(x).sum())(BATCH)
    flex.restore()


def transports(*names):
    with mock.patch.dict(os.environ, FLEX_MODEL_TRANSPORT=names[dist.get_rank()]):
        flex = by_hand(HookFunction("fc1"), is_stated=True)
        flex(BATCH)
        flex.restore()


def of_a_dtensor(is_local):
    part = DTensor.from_local(BATCH, mesh("tp"), [Replicate()])
    fmps = fm_dist.initialize_distributed_state(nn.Identity(), 2, 1, 1)
    fm_dist.all_gather_tensor_parallel(part.to_local() if is_local else part, 0, fmps)


def offloaded(is_back):
    model = models.mlp()
    weight = model.fc1.weight.data
    model.fc1.weight.data = torch.empty(0, dtype=weight.dtype)
    flex = models.replicas(FlexModel(model, tensor_parallel_size=2))
    if is_back:
        model.fc1.weight.data = weight
    assert torch.equal(flex.get_module_parameter("fc1.weight"), weight)


def dropped(action):
    """The warnings of a store whose FlexModel is dropped, raised."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    store = ActivationStore(folder[0])
    flex = FlexModel(models.mlp(), store, tensor_parallel_size=2)
    models.replicas(flex).register_forward_hook(HookFunction("fc1"))
    flex(BATCH)
    if action == "flush":
        store.flush()
    elif action == "restore":
        flex.restore()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        del flex
        gc.collect()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    if found:
        raise RuntimeError("; ".join(str(warning.message) for warning in found))


class Joined(nn.Module):
    """Rows and columns become one dim, which both axes split then."""

    columns, rows = ("fc",), ()

    def __init__(self):
        super().__init__()
        self.fc, self.joined = models.seeded(nn.Linear, 6, 8).double(), nn.Identity()

    def forward(self, x):
        return self.joined(self.fc(x).flatten())


def fused(name):
    """Columns of two parts, which are stated where they are made, or behind."""
    way = models.FOUR_RANKS["tp x dp"]
    model = models.tensor_parallel(Joined(), way.mesh["tp"].get_group(), states_sizes=False)
    flex = FlexModel(model, {}, **way.sizes)
    dim = {"fc": 1, "joined": 0}[name]
    flex.annotate_layout(name, tp=Shard(dim), part_sizes=(4, 4))
    flex.register_forward_hook(HookFunction("fc"))
    flex(way.my_rows(BATCH))
    flex.restore()


def loss_of_what_is_kept(edit_on="rank0", is_detached=False):
    """A loss of what the editing function kept, where it ran."""
    kept, flex = [], tensor_parallel(edit_on=edit_on)
    flex.register_forward_hook(HookFunction("fc1", None, lambda m, full, *_: kept.append(full)))
    flex(BATCH)
    if kept:
        loss = (kept[0].detach() if is_detached else kept[0]).sum()
        if loss.requires_grad:
            loss.backward()
    flex(BATCH)
    flex.restore()


def second_derivative(name, **settings):
    way = models.TWO_RANKS[name]
    with FlexModel(way.shard(models.mlp()), **way.sizes, **settings) as flex:
        flex.register_forward_hook(HookFunction("fc1", None, double))
        loss = flex(way.my_rows(BATCH)).square().sum()
        weight = flex.module.get_parameter("module.inp.weight" if name == "ddp" else "inp.weight")
        (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
        torch.autograd.grad(gradient.sum(), weight)


@in_a_folder
def between_micro_batches(folder, is_last):
    flex = FlexModel(fully_shard(models.mlp()), {})
    flex.module.set_requires_gradient_sync(is_last)
    flex(BATCH).sum().backward()
    flex.fingerprint(folder / str(dist.get_rank()), BATCH, loss=torch.sum)


def trained_on_a_layer(has_sync):
    flex = FlexModel(nn.parallel.DistributedDataParallel(models.mlp()))
    flex.register_forward_hook(
        HookFunction(
            "fc1", editing_function=lambda m, full, save_ctx, _: setattr(save_ctx, "h", full)
        )
    )
    with contextlib.nullcontext() if has_sync else flex.module.no_sync():
        flex.run_until("fc1", BATCH)
        flex.save_ctx.h.sum().backward()


TWO_RANKS = {
    "inside of the module's no_sync() and average them yourself": (
        lambda: trained_on_a_layer(has_sync=True),
        lambda: trained_on_a_layer(has_sync=False),
    ),
    "before the first micro-batch, or after the backward of the last one": (
        lambda: between_micro_batches(is_last=False),
        lambda: between_micro_batches(is_last=True),
    ),
    "is not known; call flex(...) with a hook on it first, whose error says what to state": (
        run_from,
        lambda: run_from(HookFunction("fc2"), is_stated=True),
    ),
    "the function runs on rank 0 only; use FlexModel(edit_on='all')": (
        lambda: second_derivative("tp", edit_on="rank0"),
        lambda: second_derivative("tp", edit_on="all"),
    ),
    "; use DDP, or one process, for it": (
        lambda: second_derivative("dtensor"),
        lambda: second_derivative("ddp"),
    ),
    "; keep full.detach() for a loss of rank 0, or use": (
        loss_of_what_is_kept,
        lambda: (loss_of_what_is_kept("all"), loss_of_what_is_kept(is_detached=True)),
    ),
    "make it with torch.distributed.new_group(ranks)": (
        lambda: FlexModel(models.mlp(), process_group=3),
        lambda: FlexModel(models.mlp(), data_parallel_size=2, process_group=dist.new_group([0, 1])),
    ),
    "device_mesh must be a DeviceMesh": (
        lambda: FlexModel(models.mlp(), device_mesh=3),
        lambda: FlexModel(models.mlp(), device_mesh=mesh("dp", "tp", shape=(1, 2))),
    ),
    "device_mesh must have named dims": (
        lambda: FlexModel(models.mlp(), device_mesh=mesh()),
        lambda: FlexModel(models.mlp(), device_mesh=mesh("dp", "tp", shape=(1, 2))),
    ),
    "is not a known axis; name the dims after": (
        lambda: FlexModel(models.mlp(), device_mesh=mesh("rows")),
        lambda: FlexModel(models.mlp(), device_mesh=mesh("dp")),
    ),
    "shard the model over a mesh without it, or of size 1": (
        lambda: FlexModel(models.mlp(), device_mesh=mesh("cp")),
        lambda: FlexModel(models.mlp(), device_mesh=mesh("dp", "cp", shape=(2, 1))),
    ),
    "which are not known axes (tp, dp, pp); give device_mesh=": (
        expert_parallel,
        lambda: expert_parallel(device_mesh=lambda: mesh("dp", "tp", shape=(1, 2))),
    ),
    "leave the sizes out, or give a device_mesh with the model's": (
        lambda: tensor_parallel(device_mesh=mesh("dp")),
        lambda: (tensor_parallel(), tensor_parallel(device_mesh=mesh("tp"))),
    ),
    "pipeline_parallel_size is": (
        lambda: FlexModel(models.mlp(), pipeline_parallel_size=2),
        tensor_parallel,
    ),
    "pass the same full tensor on every rank": (
        lambda: set_weight(dist.get_rank()),
        lambda: set_weight(1),
    ),
    "pass its full_tensor()": (
        lambda: set_weight(1, lambda full: distribute_tensor(full, mesh("tp"), [Shard(0)])),
        lambda: set_weight(
            1, lambda full: distribute_tensor(full, mesh("tp"), [Shard(0)]).full_tensor()
        ),
    ),
    "each of which has a part of the gradient": (lambda: fsdp1_hook(num_forwards=2), fsdp1_hook),
    "it was registered after the forward": (lambda: fsdp1_hook(is_late=True), fsdp1_hook),
    "wait for FSDP2 to average them": (
        lambda: unsynchronized("hook late"),
        lambda: (unsynchronized("hooked"), unsynchronized("averaged")),
    ),
    "hooks need one number for all": (lambda: divided("one"), lambda: divided("all")),
    "expected no comm hook, or one of torch's": (
        lambda: reduced(summed),
        lambda: reduced(default_hooks.reduce_scatter_hook),
    ),
    "waits for FSDP2 to average it": (
        lambda: unsynchronized("read"),
        lambda: unsynchronized("averaged and read"),
    ),
    "(FSDP1) module that keeps one flattened gradient": (
        lambda: fsdp1_gradient(False),
        lambda: (fsdp1_gradient(True), fsdp1_gradient(None)),
    ),
    "states to be split; state the layout of shards with annotate_layout": (
        lambda: of_a_parameter(is_stated=False),
        lambda: of_a_parameter(is_stated=True),
    ),
    "; state it before the run with": (unknown_layout, each_line),
    "name the weights that it needs in": (
        lambda: reads_a_weight("transfer"),
        lambda: reads_a_weight("parameters"),
    ),
    "use torch.autograd and a loop, or one process": (
        lambda: transformed("transform"),
        lambda: (transformed("a loop"), transformed("one process")),
    ),
    "FLEX_MODEL_TRANSPORT differs": (
        lambda: transports("gloo", "shared_memory"),
        lambda: (transports("gloo", "gloo"), transports("shared_memory", "shared_memory")),
    ),
    "; pass its .to_local()": (lambda: of_a_dtensor(False), lambda: of_a_dtensor(True)),
    "bring them back before they are read": (
        lambda: offloaded(is_back=False),
        lambda: offloaded(is_back=True),
    ),
    "call flush(), or restore() on every rank": (
        lambda: dropped("nothing"),
        lambda: (dropped("flush"), dropped("restore")),
    ),
}

FOUR_RANKS = {
    "state the tensor before its dims are joined": (lambda: fused("joined"), lambda: fused("fc"))
}

"""Tiny seeded models, each unsharded and sharded from the same weights.

Every model says in ``columns`` and ``rows`` which of its Linears tensor parallelism splits, so one
function shards them all. Weights are float64: a wrong sum shows, a reordered one doesn't.
"""

import copy
import re
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from flex_model.layouts import register_function


class MLP(nn.Module):
    """A column-parallel and a row-parallel layer between two replicated ones."""

    columns, rows = ("fc1",), ("fc2",)

    def __init__(self, width=6, hidden=8):
        super().__init__()
        self.inp = nn.Linear(width, width)
        self.fc1 = nn.Linear(width, hidden)
        self.act = nn.Tanh()
        self.fc2 = nn.Linear(hidden, width)
        self.out = nn.Linear(width, 5)

    def forward(self, x):
        return self.out(self.fc2(self.act(self.fc1(self.inp(x)))))


class Attention(nn.Module):
    """Self-attention over heads; returns (output, attention weights), as Hugging Face does."""

    def __init__(self, width, head_size):
        super().__init__()
        self.head_size = head_size
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, hidden, *, causal):
        batch, length, _ = hidden.shape
        split = (batch, length, -1, self.head_size)
        q, k, v = (proj(hidden).view(split).transpose(1, 2) for proj in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / self.head_size**0.5
        scores = scores + torch.full_like(scores, -torch.inf).triu(1) if causal else scores
        weights = scores.softmax(-1)
        mixed = (weights @ v).transpose(1, 2).reshape(batch, length, -1)
        return self.o(mixed), weights


class Block(nn.Module):
    """Attention called by keyword, then an MLP, with residuals; (batch, length, width)."""

    columns = ("attn.q", "attn.k", "attn.v", "mlp.fc1")
    rows = ("attn.o", "mlp.fc2")

    def __init__(self, width=8, head_size=2, hidden=12):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = Attention(width, head_size)
        self.mlp = MLP(width, hidden)
        self.mlp.out = nn.Identity()

    def forward(self, x):
        x = x + self.attn(hidden=self.norm(x), causal=True)[0]
        return x + self.mlp(x)


class Checkpointed(nn.Module):
    """Two MLPs, the second of which is recomputed in backward."""

    columns, rows = ("a.fc1", "b.fc1"), ("a.fc2", "b.fc2")

    def __init__(self, recompute=None):
        super().__init__()
        self.a, self.b = MLP(), MLP()
        self.a.out = nn.Identity()
        self.recompute = recompute

    def forward(self, x):
        x = self.a(x)
        if self.recompute is None:
            return self.b(x)
        return checkpoint(self.b, x, use_reentrant=self.recompute == "reentrant")


class Autoencoder(nn.Module):
    def __init__(self, width, latents):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(width, latents), nn.Linear(latents, width)

    def encode(self, x):
        return self.encoder(x).relu()

    def decode(self, latents):
        return self.decoder(latents)

    def forward(self, x):
        return self.decode(self.encode(x))


class Twice(nn.Module):
    """Calls its layer twice."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x):
        return self.fc(self.fc(x))


def mlp(width=6, hidden=8, dtype=torch.float64):
    return seeded(MLP, width, hidden).to(dtype)


def block(dtype=torch.float64):
    return seeded(Block).to(dtype)


INPUT = re.compile("^$")  # the wrapped model itself, for ``annotate_layout``


def replicas(flex):
    """The same FlexModel, of a model of which every tensor-parallel rank has all: that is stated,
    since a model whose layers state nothing proves nothing.
    """
    flex.annotate_layout("", kind="parameter", tp=Replicate())
    return flex


def seeded(make, *args, seed=1, **kwargs):
    """The same weights on every rank, whatever was drawn before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make(*args, **kwargs)


def random(*shape, seed=2, dtype=torch.float64):
    """The same tensor on every rank, whatever was drawn before."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def torch_hooks(module):
    """Every hook that torch knows of on a module, its children and parameters."""
    hooks = []
    for child in module.modules():
        for name, value in vars(child).items():
            if name.endswith("_hooks") and value:
                hooks += value
    for parameter in module.parameters():
        hooks += list(parameter._backward_hooks or ())
        hooks += list(parameter._post_accumulate_grad_hooks or ())
    return hooks


# ---- Hugging Face ----------------------------------------------------------------------------


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def llama(layers=2, **settings):
    """A random Llama with grouped-query attention, unsharded, float64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZES, num_hidden_layers=layers, attn_implementation="eager", **settings)
    return seeded(LlamaForCausalLM, config).double().eval()


def gpt2(layers=2, **settings):
    """A random GPT-2, unsharded, float64."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=64,
        n_embd=32,
        n_layer=layers,
        n_head=4,
        n_positions=64,
        attn_implementation="eager",
        **settings,
    )
    return seeded(GPT2LMHeadModel, config).double().eval()


def loaded_by_transformers(model, folder, dtype=torch.float32, sizes=None):
    """``model``, saved by rank 0, as ``from_pretrained`` splits it over two ranks: its tensors, or
    as ``sizes`` say.
    """
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    return AutoModelForCausalLM.from_pretrained(
        folder,
        distributed_config=DistributedConfig(**sizes or {"tp_size": 2}),
        attn_implementation="eager",
        dtype=dtype,
    ).eval()


def tensor_parallel_llama(model, group_mesh):
    """``model`` sharded by ``parallelize_module``, as its own tp_plan would."""
    styles = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    styles |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    styles |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
    plan = {f"model.layers.*.{name}": style for name, style in styles.items()}
    return parallelize_module(copy.deepcopy(model), group_mesh, plan)


# ---- Tensor parallelism by hand, on plain tensors ----------------------------------------------


class CopyToRanks(torch.autograd.Function):
    """The identity; its gradient is summed over the ranks that each use the copy in part."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return SumOverRanks.apply(grad, ctx.group), None  # in a graph of its own, too


class SumOverRanks(torch.autograd.Function):
    """The sum of the ranks' partial results, the same on all of them."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return CopyToRanks.apply(grad, ctx.group), None


register_function(CopyToRanks, gradient="whole")


class Gather(torch.autograd.Function):
    """All ranks' parts along a dim. The gradient of this rank's part is whole on each rank, or the
    sum of what all have of it.
    """

    @staticmethod
    def forward(ctx, x, group, dim, is_summed):
        ctx.group, ctx.dim, ctx.is_summed = group, dim, is_summed
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        if ctx.is_summed:
            dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size(), ctx.dim)[ctx.group.rank()], None, None, None


class ColumnLinear(nn.Module):
    """A Linear of which each rank has some output features; its output stays split."""

    def __init__(self, linear, group):
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(my_part(linear.weight.detach(), 0, group))
        self.bias = nn.Parameter(my_part(linear.bias.detach(), 0, group))

    def forward(self, x):
        return F.linear(CopyToRanks.apply(x, self.group), self.weight, self.bias)


class RowLinear(nn.Module):
    """A Linear of which each rank has some input features; its output is whole."""

    def __init__(self, linear, group):
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(my_part(linear.weight.detach(), 1, group))
        self.bias = nn.Parameter(linear.bias.detach().clone())

    def forward(self, x):
        return SumOverRanks.apply(F.linear(x, self.weight), self.group) + self.bias


def tensor_parallel(model, group, states_sizes=True):
    """``model`` with its columns and rows split over ``group``, as far as they go evenly or not.

    ``states_sizes``: whether the layers say how wide they are in all, as fairscale's do.
    """
    model = copy.deepcopy(model)
    for names, make in ((model.columns, ColumnLinear), (model.rows, RowLinear)):
        for name in names:
            linear = model.get_submodule(name)
            layer = make(linear, group)
            if states_sizes:
                layer.in_features, layer.out_features = linear.in_features, linear.out_features
            model.set_submodule(name, layer)
    return model


def state_layouts(flex, model):
    """State of every weight of the ``tensor_parallel`` form of ``model`` how it is split."""
    for name, _ in model.named_parameters():
        dim = split_dim(model, name)
        placement = Replicate() if dim is None else Shard(dim)
        flex.annotate_layout(re.compile(rf"^{name}$"), kind="parameter", tp=placement)
    return flex


def split_dim(model, parameter_name):
    """The dim of a parameter that `tensor_parallel` splits, or None."""
    module_name, _, kind = parameter_name.rpartition(".")
    if module_name in model.columns:
        return 0
    return 1 if module_name in model.rows and kind == "weight" else None


def my_part(full, dim, group):
    """This rank's part of ``full``; the first ranks have one more where it splits unevenly."""
    return full.tensor_split(group.size(), dim)[group.rank()].clone()


def all_parts(part, dim, group):
    """The full tensor from its parts, by a plain collective: an oracle for the library."""
    parts = [None] * group.size()
    dist.all_gather_object(parts, part.detach(), group=group)
    return torch.cat(parts, dim)


# ---- The ways to run a model on many ranks -------------------------------------------------------


@cache
def mesh(dp, tp):
    """Ranks as (dp, tp), tp fastest; made once, for every test of this process."""
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


@dataclass(frozen=True)
class Parallelism:
    """How to shard a model, its batch, and how to read the result back.

    ``by_hand``: shards are plain tensors.
    """

    name: str
    tp: int = 1
    dp: int = 1

    @property
    def by_hand(self):
        return self.tp > 1 and "dtensor" not in self.name

    @property
    def sizes(self):
        return {"tensor_parallel_size": self.tp, "data_parallel_size": self.dp}

    @property
    def mesh(self):
        return mesh(self.dp, self.tp)

    def shard(self, model):
        model = copy.deepcopy(model)
        if "dtensor" in self.name:
            columns = {name: ColwiseParallel() for name in model.columns}
            rows = {name: RowwiseParallel() for name in model.rows}
            model = parallelize_module(model, self.mesh["tp"], columns | rows)
        elif self.tp > 1:
            model = tensor_parallel(model, self.mesh["tp"].get_group())
        if "ddp" in self.name:
            model = DistributedDataParallel(model, process_group=self.mesh["dp"].get_group())
        if "fsdp2" in self.name:
            for name in model.columns + model.rows:
                fully_shard(model.get_submodule(name), mesh=self.mesh["dp"])
            fully_shard(model, mesh=self.mesh["dp"])
        return model

    def my_rows(self, batch):
        """This rank's part of the batch; the first ranks have one more where it splits unevenly."""
        return batch if self.dp == 1 else my_part(batch, 0, self.mesh["dp"].get_group())

    def full_gradients(self, model, sharded):
        """The gradients of ``sharded`` by the names of ``model``, in full; collective."""
        return {
            name: self.full(model, name, parameter.grad, average="ddp" not in self.name)
            for name, parameter in self.named_parameters(sharded)
            if parameter.grad is not None
        }

    def full_parameters(self, model, sharded):
        return {
            name: self.full(model, name, parameter.detach(), average=False)
            for name, parameter in self.named_parameters(sharded)
        }

    def full(self, model, name, value, average):
        if isinstance(value, DTensor):
            return value.full_tensor()
        dim = split_dim(model, name)
        if self.by_hand and dim is not None:
            value = all_parts(value, dim, self.mesh["tp"].get_group())
        if average and self.dp > 1:
            value = value.clone()
            dist.all_reduce(value, group=self.mesh["dp"].get_group())
            value /= self.dp
        return value

    def named_parameters(self, sharded):
        for name, parameter in sharded.named_parameters():
            yield name.removeprefix("module."), parameter


ONE_RANK = Parallelism("one")
TWO_RANKS = {
    "tp": Parallelism("tp", tp=2),
    "dp": Parallelism("dp", dp=2),
    "ddp": Parallelism("ddp", dp=2),
    "fsdp2": Parallelism("fsdp2", dp=2),
    "dtensor": Parallelism("dtensor", tp=2),
}
FOUR_RANKS = {
    "tp": Parallelism("tp", tp=4),
    "tp x dp": Parallelism("tp x dp", tp=2, dp=2),
    "tp x ddp": Parallelism("tp x ddp", tp=2, dp=2),
    "dtensor x fsdp2": Parallelism("dtensor x fsdp2", tp=2, dp=2),
}


class Overwriting(nn.Module):
    """Writes over what its hooked modules gave, as fused and in-place layers do."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Identity(), nn.Identity()

    def forward(self, x, y):
        first = self.wide(x + 1)
        first.zero_()
        second = self.narrow(y * 2)
        second.fill_(7)
        return first.sum() + second.sum()

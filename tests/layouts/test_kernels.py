"""Kernels that are no operations of torch, by stand-ins, on 2 ranks; see also rows of the parity
table with flash-attn and Liger (tests/parity/kernel_pairs.py).
"""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import models
import pipelines
import stand_in_kernels
from flex_model import FlexModel, HookFunction
from flex_model.distributed.placement import Replicate, Shard
from flex_model.layouts import register_function, register_rule
from flex_model.layouts.propagation import rules
from flex_model.layouts.propagation.kernel_rules import flash_attention
from flex_model.layouts.propagation.operation import Operand, Operation

HEADS, UNITS, WIDTH = 4, 3, 12


def mix(module, full, save_ctx, modules):
    """Every element depends on all rows and all columns."""
    return full + 0.5 * full.flip(0).flip(-1)


class Attention(nn.Module):
    """Attention of flash-attn, called as its users do: padded, packed, or its operation alone."""

    columns, rows = ("q", "k", "v"), ("o",)

    def __init__(self, how):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.inner, self.how = nn.Identity(), how

    def forward(self, x):
        if self.how == "recomputed":
            return checkpoint(self.attend, x, use_reentrant=False)
        return self.attend(x)

    def attend(self, x):
        q, k, v = (one(x).unflatten(-1, (-1, UNITS)) for one in (self.q, self.k, self.v))
        if self.how == "packed":
            ends = torch.arange(x.shape[0] + 1) * x.shape[1]
            q, k, v = (one.flatten(0, 1) for one in (q, k, v))
            made = stand_in_kernels.flash_attn_varlen_func(q, k, v, ends, ends, 5, 5, causal=True)
            made = made.unflatten(0, x.shape[:2])
        elif self.how == "operation":
            run = torch.ops.flash_attn._flash_attn_forward
            made = run(q, k, v, 0.0, 0.4, True, -1, -1, 0.0, None, False)[0]
        else:
            made = stand_in_kernels.flash_attn_func(q, k, v, causal=True)
        return self.o(self.inner(made.flatten(2)))


def run(flex, x):
    """Edits before and behind the kernel; what the hooks saw, and the gradient of the input."""
    x = x.clone().requires_grad_()
    for site in ("q", "inner"):
        flex.register_forward_hook(HookFunction(site, None, mix, output_name=site))
    for site in ("k", "inner"):
        hook = HookFunction(site, None, mix, output_name=f"gradient of {site}")
        flex.register_full_backward_hook(hook)
    output = flex(x)
    if output.requires_grad and flex.module.training:
        output.sin().mean().backward()
    return output, x.grad


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["padded", "recomputed", "packed", "operation"])
@pytest.mark.parametrize("kind", ["tp", "dp"])
def test_flash_attn_as_users_call_it(kind, how):
    """Its operations have no gradients here. Along dp, tokens that are packed are refused."""
    model, x = models.seeded(Attention, how).double(), models.random(4, 5, WIDTH)
    model.train(how != "operation")
    if (kind, how) == ("dp", "packed"):
        flex = FlexModel(model, data_parallel_size=2, timeout=20)
        with pytest.raises(ValueError, match=r"(?s)'inner'.*is not known.*dp_batch="):
            run(flex, x.chunk(2)[dist.get_rank()])
        return
    sharded = models.tensor_parallel(model, dist.group.WORLD) if kind == "tp" else model
    grad = check_kernel(kind, model, sharded, x, run)
    assert model.training == (grad is not None)


def check_kernel(kind, model, sharded, x, run, state=lambda flex: None):
    """What hooks see and what the model gives, against the unsharded model; its gradient."""
    rank, seen, records = dist.get_rank(), {}, {}
    alone = pipelines.alone_group()
    with FlexModel(copy.deepcopy(model), seen, process_group=alone) as whole:
        output, grad = run(whole, x)
    if kind == "dp":
        x, output = x.chunk(2)[rank], output.chunk(2)[rank]
        grad = None if grad is None else 2 * grad.chunk(2)[rank]
    sizes = {"tensor_parallel_size": 2} if kind == "tp" else {"data_parallel_size": 2}
    flex = FlexModel(sharded, records, timeout=20, **sizes)
    state(flex)
    assert_close(run(flex, x), (output, grad))
    if rank == 0:
        assert_close(records, seen)
    return grad


def test_scores_that_a_function_of_the_head_changes_are_not_known():
    shapes = ((2, 5, 2, 3),) * 2
    heads = Operand(shapes, torch.float32, Shard(2))
    made = (Operand(shapes, torch.float32),)

    def placed(**more):
        arguments = dict.fromkeys("qkv", heads) | more
        return flash_attention(Operation("kernel::any", (arguments,) * 2, made))

    assert placed() == [Shard(2)]
    assert placed(score_mod="function") == placed(mask_mod="function") == [None]
    assert placed(page_table=Operand(((2, 3),) * 2, torch.int32, Replicate())) == [None]


# ---- Linear layers of fp8 ------------------------------------------------------------------------


class Rounded(nn.Module):
    """Two layers of transformers with weights in fp8, in blocks of two by three."""

    def __init__(self, seed=0):
        super().__init__()
        from transformers.integrations.finegrained_fp8 import FP8Linear

        self.site = nn.Identity()
        for name, sizes in (("up", (12, 24)), ("down", (24, 12))):
            layer = FP8Linear(*sizes, block_size=(2, 3))
            weight = models.random(*layer.weight.shape, seed=seed + 3).float() * 9
            layer.weight.data = weight.to(torch.float8_e4m3fn)
            layer.weight.requires_grad_(False)
            layer.weight_scale_inv.data.copy_(models.random(*layer.weight_scale_inv.shape).abs())
            layer.weight_scale_inv.requires_grad_(False)
            setattr(self, name, layer)
        self.act = nn.Tanh()

    def forward(self, x):
        return self.down(self.act(self.up(self.site(x))))


class RoundedHalves(Rounded):
    """The rank's columns of the first layer and rows of the second, summed over ranks."""

    def __init__(self, group):
        super().__init__()
        self.group = group
        for layer, dim in ((self.up, 0), (self.down, 1)):
            for name in ("weight", "weight_scale_inv"):
                parameter = getattr(layer, name)
                parameter.data = parameter.data.chunk(2, dim)[dist.get_rank(group)].contiguous()

    def forward(self, x):
        x = models.CopyToRanks.apply(self.site(x), self.group)
        return models.SumOverRanks.apply(self.down(self.act(self.up(x))), self.group)


def run_rounded(flex, x):
    x = x.clone().requires_grad_()
    flex.register_forward_hook(HookFunction("up", None, mix))
    flex.register_full_backward_hook(HookFunction("act", None, mix, output_name="gradient"))
    flex.register_full_backward_hook(HookFunction("site", output_name="gradient of site"))
    with torch.no_grad():  # calls a function in place of an `autograd.Function`
        without_graph = flex(x)
    output = flex(x)
    assert_close(output, without_graph)
    output.sin().mean().backward()
    return output, x.grad


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["tp", "dp"])
def test_linear_layers_of_fp8(kind, monkeypatch):
    from transformers.integrations import finegrained_fp8 as fp8

    found = fp8.FineGrainedFP8(stand_in_kernels.fp8_matmul, None, None)
    monkeypatch.setattr(fp8, "load_finegrained_fp8_kernel", lambda: found)

    def state(flex):
        for name in ("weight", "weight_scale_inv") if kind == "tp" else ():
            for layer, dim in (("up", 0), ("down", 1)):
                flex.annotate_layout(f"{layer}.{name}", kind="parameter", tp=Shard(dim))

    sharded = RoundedHalves(dist.group.WORLD) if kind == "tp" else Rounded()
    check_kernel(kind, Rounded(), sharded, models.random(4, 12), run_rounded, state)


# ---- An operation of one's own -------------------------------------------------------------------


@torch.library.custom_op("flex_model_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return stand_in_kernels.hidden(x @ weight.T)


@scaled.register_fake
def _(x, weight):
    return x.new_empty(*x.shape[:-1], len(weight))


scaled.register_autograd(
    lambda ctx, grad: (grad @ ctx.saved_tensors[1], grad.T @ ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@functools.cache
def by_triton():
    """The same by a kernel of Triton, which its interpreter runs on the CPU."""
    triton, tl = pytest.importorskip("triton"), pytest.importorskip("triton.language")

    def kernel(x, weight, out, width, num_out):
        row, column = tl.program_id(0), tl.program_id(1)
        total = tl.load(x + row * width) * tl.load(weight + column * width)
        for k in range(1, width):
            total += tl.load(x + row * width + k) * tl.load(weight + column * width + k)
        tl.store(out + row * num_out + column, total)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        kernel = triton.jit(kernel)

    @torch.library.triton_op("flex_model_tests::by_triton", mutates_args=())
    def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(len(x), len(weight))
        torch.library.wrap_triton(kernel)[out.shape](x, weight, out, x.shape[1], len(weight))
        return out

    linear.register_autograd(
        lambda ctx, grad: (grad @ ctx.saved_tensors[1], grad.T @ ctx.saved_tensors[0]),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return linear


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return stand_in_kernels.hidden(x @ weight.T)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ x


class Own(nn.Module):
    """Each rank has a summand of the gradient of what the kernel reads."""

    def __init__(self, full, run):
        super().__init__()
        self.read, self.run = nn.Tanh(), run
        self.up = models.ColumnLinear(full, dist.group.WORLD)
        self.up.in_features, self.up.out_features = 6, 8

    def forward(self, x):
        return self.run(self.read(x), self.up.weight)


FULL, ROWS = models.seeded(nn.Linear, 6, 8).double(), models.random(4, 6)
TEXT = "x:...i weight:oi -> ...o = x*weight"


def gradient(model, records):
    with FlexModel(model, records, tensor_parallel_size=2, timeout=20) as flex:
        flex.register_forward_hook(HookFunction("read"))
        flex.register_forward_hook(HookFunction("", output_name="root"))
        flex.register_full_backward_pre_hook(HookFunction("read", output_name="gradient"))
        flex(ROWS.clone().requires_grad_()).sin().sum().backward()


def check(records):
    if dist.get_rank() == 0:
        read = ROWS.tanh().requires_grad_()
        root = nn.functional.linear(read, FULL.weight)
        root.sin().sum().backward()
        assert_close(records, {"read": [read], "root": [root], "gradient": [read.grad]})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["scaled", "by_triton"])
def test_an_operation_of_ones_own_is_refused_until_it_is_stated(name):
    model = Own(FULL, by_triton() if name == "by_triton" else scaled)
    records, name = {}, f"flex_model_tests::{name}"
    try:
        with pytest.raises(ValueError, match=rf"lost at {name}"):
            gradient(model, {})
        register_rule(name, TEXT)
        with pytest.raises(ValueError, match=r"'read'.*register_rule\(\.\.\., gradient='local'\)"):
            gradient(model, {})
        register_rule(name, TEXT, gradient="local", replace=True)
        gradient(model, records)
    finally:
        rules.RULES.pop(name, None)
    check(records)


@pytest.mark.ranks(2)
def test_a_function_of_ones_own_is_refused_until_it_is_stated():
    model, records = Own(FULL, lambda x, weight: Scaled.apply(x, weight)), {}
    try:
        with pytest.raises(ValueError, match="tensor-parallel ranks is not known"):
            gradient(model, {})
        register_function(Scaled, forward=TEXT, gradient="local")
        gradient(model, records)
    finally:
        rules.RULES.pop(f"kernel::{Scaled.__module__}.Scaled", None)
    check(records)

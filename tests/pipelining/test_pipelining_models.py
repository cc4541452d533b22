"""Hooks over pipelines of real architectures, split by ``flex_model.pipelining.pipeline``."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from flex_model import FlexModel, HookError, HookFunction
from flex_model.pipelining import (
    PassThrough,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    SplitPoint,
    pipeline,
)
from pipelines import ALL, SINGLE, alone_group, my_indices
from tiers import grid_but

transformers = pytest.importorskip("transformers")

VOCABULARY = 97


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        )
    ).eval()


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=4, n_head=4, n_positions=32, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config).eval()


def batch(rows=8, length=6):
    torch.manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (rows, length))
    mask = torch.ones_like(ids)
    mask[3, -3:] = 0
    return ids, mask


def loss_fn(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def mix(module, x, save_ctx, modules):
    return x.flip(-1) * 0.5 + x.mean(-1, keepdim=True)


def looking(flex, names):
    for name, index in names:
        flex.register_forward_hook(HookFunction(name, unpack_idx=index))


def editing(flex, names):
    looking(flex, names)
    block = "model.layers" if "model.norm" in dict(names) else "transformer.h"
    flex.register_full_backward_pre_hook(HookFunction(f"{block}.3", output_name="grad"))
    flex.register_forward_hook(
        HookFunction(f"{block}.1.mlp", editing_function=mix, output_name="edited")
    )
    flex.register_full_backward_hook(
        HookFunction(f"{block}.2", editing_function=mix, output_name="edited.grad")
    )


LLAMA_NAMES = [
    ("model.embed_tokens", 0),
    *((f"model.layers.{i}.mlp.down_proj", 0) for i in range(4)),
    *((f"model.layers.{i}.self_attn", 0) for i in range(4)),
    ("model.norm", 0),
    ("lm_head", 0),
]
GPT2_NAMES = [
    ("transformer.wte", 0),
    ("transformer.wpe", 0),
    *((f"transformer.h.{i}.mlp.c_fc", 0) for i in range(4)),
    ("transformer.h.3.attn", 0),
    ("lm_head", 0),
]


def reference(model, script, ids, mask):
    model = copy.deepcopy(model)
    records = {}
    with FlexModel(model, records, process_group=alone_group()) as flex:
        script(flex)
        logits = flex(ids, attention_mask=mask).logits
        loss = loss_fn(logits, ids)
        loss.backward()
    return records, logits, loss, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("script", [looking, editing])
@pytest.mark.parametrize("schedule", grid_but(ALL[:3], ALL[1]))
@pytest.mark.parametrize("family", grid_but(["llama", "gpt2"], "llama"))
def test_language_models_equal_the_unsplit_ones(family, schedule, script):
    model, names, block = {
        "llama": (llama, LLAMA_NAMES, "model.layers"),
        "gpt2": (gpt2, GPT2_NAMES, "transformer.h"),
    }[family]
    model = model()
    ids, mask = batch()
    expected, logits, loss, grads = reference(model, lambda f: script(f, names), ids, mask)
    is_looped = schedule is ScheduleInterleaved1F1B
    splits = {f"{block}.{i}": SplitPoint.BEGINNING for i in ((1, 2, 3) if is_looped else (2,))}
    pipe = pipeline(model, (ids[:2],), {"attention_mask": mask[:2]}, split_spec=splits)
    rank, device = torch.distributed.get_rank(), torch.device("cpu")
    if is_looped:
        stages = [pipe.build_stage(rank, device), pipe.build_stage(rank + 2, device)]
    else:
        stages = pipe.build_stage(rank, device)
    records, losses = {}, []
    with FlexModel(schedule(stages, 4, loss_fn=loss_fn), records, return_on="all") as flex:
        script(flex, names)
        output = flex(ids, attention_mask=mask, target=ids, losses=losses)
        # Rows of a matrix product are the same bits in a batch and in a part of it, or nearly so.
        torch.testing.assert_close(output, logits, rtol=0, atol=1e-6)
        if rank == 0:
            assert set(records) == set(expected)
            for name, (wanted,) in expected.items():
                torch.testing.assert_close(records[name][0], wanted, rtol=0, atol=1e-6)
        for stage in flex.module.children():
            for name, parameter in stage.named_parameters():
                if family == "gpt2" and name in ("transformer.wte.weight", "lm_head.weight"):
                    continue  # tied: each stage has its part of the gradient
                torch.testing.assert_close(parameter.grad, grads[name], rtol=0, atol=1e-6)
        if family == "gpt2":
            for name in ("transformer.wte.weight", "lm_head.weight"):
                with pytest.raises(ValueError, match=r"wte.weight' on stage 0, 'lm_head.weight'"):
                    flex.get_module_gradient(name)
        if losses:
            torch.testing.assert_close(torch.stack(losses).mean(), loss, rtol=0, atol=1e-6)
        # Run whole: the same bits. And a batch of another size and length.
        flex.batch_mode = "full"
        for rows, length in ((8, 6), (4, 9)):
            ids, mask = batch(rows, length)
            expected, logits, loss, _ = reference(model, lambda f: script(f, names), ids, mask)
            flex.zero_grad()
            output = flex(ids, attention_mask=mask, target=ids, losses=losses)
            assert torch.equal(output, logits)
            if losses:
                assert torch.equal(losses[0], loss)
            if rank == 0:
                for name, (wanted,) in expected.items():
                    if "grad" not in name:
                        assert torch.equal(records[name][0], wanted), name


@pytest.mark.ranks(2)
@pytest.mark.parametrize("method", ["trace", "modules"])
def test_gpt2_traced_or_by_modules_looked_at(method):
    model, (ids, _) = gpt2(), batch()
    names = [("transformer.h.0.mlp.c_fc", 0), ("transformer.h.3.attn", 0), ("lm_head", 0)]
    with FlexModel(model, expected := {}, process_group=alone_group()) as flex, torch.no_grad():
        looking(flex, names)
        for i in range(4):
            flex(ids[2 * i : 2 * i + 2])
            for name, _ in names:
                expected.setdefault(name + "+", []).extend(expected[name])
    pipe = pipeline(
        model,
        (ids[:2],),
        split_spec={"transformer.h.2": SplitPoint.BEGINNING},
        method=method,
    )
    stage = pipe.build_stage(torch.distributed.get_rank(), torch.device("cpu"))
    with FlexModel(ScheduleGPipe(stage, 4), records := {}) as flex, torch.no_grad():
        looking(flex, names)
        if method == "trace":  # the tracer makes plain numbers of all sizes
            with pytest.raises(HookError, match=r"is not known .lost at arange"):
                flex(ids)
            flex.microbatch_dim = 0
        flex(ids)
        if torch.distributed.get_rank() == 0:
            for name, _ in names:
                assert torch.equal(records[name][0], torch.cat(expected[name + "+"]))
        if method == "trace":
            with pytest.raises(ValueError, match="leaves out modules that do nothing"):
                flex.register_forward_hook(HookFunction("transformer.h.0.attn.attn_dropout"))
            with pytest.raises(ValueError, match=r"can't run these inputs: stage 0: .*its example"):
                flex(ids[:4])


# ---- Every schedule, four ranks, and sharded stages ----------------------------------------------


def everywhere(flex):
    """Hooks of all kinds, most at the edges of stages."""
    for i in range(4):
        block = f"model.layers.{i}"
        flex.register_forward_hook(HookFunction(f"{block}.self_attn", unpack_idx=0))
        flex.register_forward_pre_hook(
            HookFunction(f"{block}.self_attn", output_name=f"{i}.hidden_states")
        )
        flex.register_forward_pre_hook(HookFunction(block, output_name=f"{i}.input"))
        flex.register_full_backward_hook(HookFunction(block, output_name=f"{i}.grad_input"))
        flex.register_full_backward_pre_hook(HookFunction(block, output_name=f"{i}.grad_output"))
    for register, name in (
        (flex.register_forward_hook, "model.embed_tokens"),
        (flex.register_forward_hook, "model.layers.1"),
        (flex.register_forward_pre_hook, "model.layers.2"),
        (flex.register_full_backward_hook, "model.layers.2"),
        (flex.register_full_backward_pre_hook, "model.layers.1"),
        (flex.register_forward_hook, "lm_head"),
        (flex.register_hook, "model.layers.3.mlp.down_proj.weight"),
    ):
        output_name = f"{register.__name__}.{name}"
        register(HookFunction(name, editing_function=mix, output_name=output_name))


def inside(flex):
    """Hooks on what tensor parallelism splits."""
    for i in range(4):
        for name in ("self_attn.q_proj", "mlp.gate_proj", "mlp.down_proj"):
            name = f"model.layers.{i}.{name}"
            flex.register_forward_hook(HookFunction(name))
            flex.register_full_backward_pre_hook(HookFunction(name, output_name=f"{name}.grad"))
    edited = "model.layers.{}.mlp.up_proj".format
    flex.register_forward_hook(HookFunction(edited(2), editing_function=mix))
    flex.register_full_backward_pre_hook(
        HookFunction(edited(1), editing_function=mix, output_name="edited.grad")
    )


def llama_stages(kind, model, ids, mask, group=None, shard=lambda stage: None):
    """This rank's."""
    place, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    num_stages = size if kind in SINGLE else 2 * size
    splits = {
        f"model.layers.{i * 4 // num_stages}": SplitPoint.BEGINNING for i in range(1, num_stages)
    }
    pipe = pipeline(model, (ids[:2],), {"attention_mask": mask[:2]}, split_spec=splits)
    stages = []
    for index in my_indices(kind, place, size):
        shard(pipe.get_stage_module(index))
        stages.append(pipe.build_stage(index, torch.device("cpu"), group))
    return stages


def close(found, expected, name="", tolerance=3e-6):
    torch.testing.assert_close(
        found, expected, rtol=0, atol=tolerance, msg=lambda message: f"{name}: {message}"
    )


def check_llama(
    kind,
    script,
    wrap=lambda stage: stage,
    part=slice(None),
    number=4,
    state=lambda flex: None,
    **kwargs,
):
    model = llama()
    ids, mask = batch()
    expected, logits, _, grads = reference(model, script, ids, mask)
    stages = llama_stages(kind, copy.deepcopy(model), ids, mask, **kwargs)
    for stage in stages:
        stage.submod = wrap(stage.submod)
    schedule = kind(stages[0] if kind in SINGLE else stages, number, loss_fn=loss_fn)
    with FlexModel(schedule, records := {}, return_on="all") as flex:
        state(flex)
        script(flex)
        for name in ("model.rotary_emb", "model.layers", "model"):
            with pytest.raises(ValueError, match="spread over the stages"):
                flex.register_forward_hook(HookFunction(name))
        for mode in ("micro", "full"):
            flex.batch_mode = mode
            flex.zero_grad()
            close(flex(ids[part], attention_mask=mask[part], target=ids[part]), logits[part])
            if torch.distributed.get_rank() == 0:
                assert set(records) == set(expected)
                for name, (wanted,) in expected.items():
                    close(records[name][0], wanted, name)
            for name, grad in grads.items():
                close(flex.get_module_gradient(name), grad, name)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", grid_but(ALL, ALL[2], ALL[5]), ids=lambda kind: kind.__name__)
def test_llama_under_every_schedule(kind):
    check_llama(kind, everywhere)


@pytest.mark.grid
@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", SINGLE, ids=lambda kind: kind.__name__)
def test_llama_with_a_block_on_each_rank(kind):
    check_llama(kind, everywhere)


@pytest.mark.grid
@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", [ALL[1], ALL[4]], ids=lambda kind: kind.__name__)
def test_llama_with_tensor_parallel_stages(kind):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    columns += ("mlp.gate_proj", "mlp.up_proj")
    plan = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}

    def shard(stage):
        for layer in stage.model.layers:
            if not isinstance(layer, PassThrough):
                parallelize_module(layer, mesh["tp"], plan)

    check_llama(kind, inside, group=mesh["pp"].get_group(), shard=shard)


@pytest.mark.grid
@pytest.mark.ranks(4)
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", [ALL[1], ALL[4]], ids=lambda kind: kind.__name__)
def test_llama_with_data_parallel_stages(kind, how):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))

    def wrap(stage):
        if how == "ddp":
            return DistributedDataParallel(stage, process_group=mesh["dp"].get_group())
        for layer in stage.model.layers:
            if not isinstance(layer, PassThrough):
                fully_shard(layer, mesh=mesh["dp"])
        return fully_shard(stage, mesh=mesh["dp"])

    def state(flex):
        """transformers leaves the mask out where no row of the rank's has padding."""
        flex.annotate_layout("self_attn.o_proj", kind="forward_pre", dp=Shard(0))

    place, group = mesh["dp"].get_local_rank(), mesh["pp"].get_group()
    rows = slice(4 * place, 4 * place + 4)
    check_llama(kind, inside, wrap, rows, number=2, state=state, group=group)

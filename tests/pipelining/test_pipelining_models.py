"""Hooks over pipelines of real architectures, split by ``flex_model.pipelining.pipeline``."""

import copy

import pytest
import torch
from torch import nn

import models
from flex_model import FlexModel, HookError, HookFunction
from flex_model.pipelining import ScheduleGPipe, SplitPoint, pipeline
from pipelines import ALL, alone_group, my_indices
from shared_edits import mixing_units as mix
from test_pipelining import assert_near

pytest.importorskip("transformers")


def batch(rows=8, length=6):
    torch.manual_seed(1)
    ids = torch.randint(64, (rows, length))
    mask = torch.ones_like(ids)
    mask[3, -3:] = 0
    return ids, mask


def loss_fn(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def reference(model, script, ids, mask):
    model = copy.deepcopy(model)
    records = {}
    with FlexModel(model, records, process_group=alone_group()) as flex:
        script(flex)
        logits = flex(ids, attention_mask=mask).logits
        loss_fn(logits, ids).backward()
    return records, logits, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("method", ["trace", "modules"])
def test_gpt2_traced_or_by_modules(method):
    model, (ids, _) = models.gpt2(4, use_cache=False).float(), batch()
    names = ["transformer.h.0.mlp.c_fc", "transformer.h.3.attn", "lm_head"]
    expected = {name: [] for name in names}
    with FlexModel(model, found := {}, process_group=alone_group()) as flex, torch.no_grad():
        for name in names:
            flex.register_forward_hook(HookFunction(name))
        for rows in ids.chunk(4):
            flex(rows)
            for name in names:
                expected[name] += found[name]
    split = {"transformer.h.2": SplitPoint.BEGINNING}
    pipe = pipeline(model, (ids[:2],), split_spec=split, method=method)
    stage = pipe.build_stage(torch.distributed.get_rank(), torch.device("cpu"))
    with FlexModel(ScheduleGPipe(stage, 4), records := {}) as flex, torch.no_grad():
        for name in names:
            flex.register_forward_hook(HookFunction(name))
        if method == "trace":  # the tracer makes plain numbers of all sizes
            with pytest.raises(HookError, match=r"is not known .lost at arange"):
                flex(ids)
            flex.microbatch_dim = 0
        flex(ids)
        if torch.distributed.get_rank() == 0:
            for name in names:
                assert torch.equal(records[name][0], torch.cat(expected[name]))
        if method == "modules":  # tied: each stage has its part of the gradient
            with pytest.raises(ValueError, match=r"wte.weight' on stage 0, 'lm_head.weight'"):
                flex.get_module_gradient("lm_head.weight")


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


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [ALL[2], ALL[5]])
def test_a_step_of_llama_with_padding(kind):
    model, (ids, mask) = models.llama(4, use_cache=False).float(), batch()
    split = {f"model.layers.{i}": SplitPoint.BEGINNING for i in (1, 2, 3)}
    pipe = pipeline(
        copy.deepcopy(model), (ids[:2],), {"attention_mask": mask[:2]}, split_spec=split
    )
    mine = my_indices(kind, torch.distributed.get_rank(), 2)
    stages = [pipe.build_stage(index, torch.device("cpu")) for index in mine]
    schedule = kind(stages, 4, loss_fn=loss_fn)
    with FlexModel(schedule, records := {}, return_on="all") as flex:
        everywhere(flex)
        for name in ("model.rotary_emb", "model.layers", "model"):
            with pytest.raises(ValueError, match="spread over the stages"):
                flex.register_forward_hook(HookFunction(name))
        for mode, rows, length in (("micro", 8, 6), ("full", 8, 6), ("full", 4, 9)):
            ids, mask = batch(rows, length)
            expected, logits, grads = reference(model, everywhere, ids, mask)
            flex.batch_mode = mode
            flex.zero_grad()
            assert_near(flex(ids, attention_mask=mask, target=ids), logits, "logits", 3e-6)
            if torch.distributed.get_rank() == 0:
                assert set(records) == set(expected)
                for name, (wanted,) in expected.items():
                    assert_near(records[name][0], wanted, name, 3e-6)
            for name, grad in grads.items():
                assert_near(flex.get_module_gradient(name), grad, name, 3e-6)

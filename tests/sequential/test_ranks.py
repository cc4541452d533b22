"""Two ranks of a sharded model run the same order; hooks see full tensors."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

import models
from flex_model import FlexModel, HookError, HookFunction, sequential
from flex_model.sequential import ActivationStore


class Blocks(nn.Module):
    """Three blocks of a column- and a row-parallel layer."""

    columns = tuple(f"blocks.{i}.fc1" for i in range(3))
    rows = tuple(f"blocks.{i}.fc2" for i in range(3))

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(models.MLP() for _ in range(3))
        for block in self.blocks:
            block.out = nn.Identity()

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


class Masked(Blocks):
    def forward(self, input_ids, attention_mask):
        return super().forward(input_ids * attention_mask)


BATCHES = [models.random(rows, 6, seed=rows) for rows in (2, 4, 6, 4)]
SHARDED = {name: models.TWO_RANKS[name] for name in ("tp", "dtensor")}


def unsharded():
    return models.seeded(Blocks).double()


def mix(module, x, save_ctx, modules):
    save_ctx.sum = float(x.detach().sum())
    return x.flip(-1) * 2 + torch.rand(())


def read(module, x, save_ctx, modules):
    return x + save_ctx.sum


def hooked(model, **settings):
    flex = FlexModel(model, {}, **settings)
    flex.register_forward_hook(HookFunction("blocks.0.fc1", editing_function=mix))
    flex.register_forward_hook(HookFunction("blocks.1.fc1"))
    flex.register_forward_hook(HookFunction("blocks.2.fc1", editing_function=read))
    return flex


def check_loop(flex, outputs):
    """Outputs, and records on rank 0, are those of plain forwards of the unsharded model."""
    group = models.mesh(2, 1)["tp"].get_group()  # of one rank
    alone = hooked(unsharded(), process_group=group, output_ranks="all")
    torch.manual_seed(7)
    expected, records = [], {}
    for batch in BATCHES:
        expected.append(alone(batch).detach())
        for name, found in alone.output_ptr.items():
            records.setdefault(name, []).extend(found)
    alone.restore()
    assert_close([output.detach() for output in outputs], expected)
    assert_close(flex.output_ptr, records if dist.get_rank() == 0 else {})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("edit_on", ["all", "rank0"])
def test_ranks_equal_the_unsharded_loop(name, window, edit_on):
    way = SHARDED[name]
    flex = hooked(way.shard(unsharded()), **way.sizes, edit_on=edit_on)
    torch.manual_seed(7)
    outputs = sequential.run(flex, BATCHES, window=window)
    check_loop(flex, outputs)
    flex.restore()


@pytest.mark.ranks(2)
def test_each_rank_has_its_own_rows():
    way = models.TWO_RANKS["dp"]
    flex = FlexModel(unsharded(), {}, **way.sizes)
    flex.register_forward_hook(
        HookFunction("blocks.1", editing_function=lambda m, x, ctx, mods: x - x.mean(0))
    )
    outputs = sequential.run(flex, [way.my_rows(batch) for batch in BATCHES])
    flex.restore()
    model = unsharded()
    model.blocks[1].register_forward_hook(lambda m, a, output: output - output.mean(0))
    for output, batch in zip(outputs, BATCHES):
        assert_close(output, way.my_rows(model(batch)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("window", [None, 2])
def test_equal_rows_of_the_ranks_are_annotations_of_all_rows(window, tmp_path):
    way = models.TWO_RANKS["dp"]
    flex = FlexModel(models.seeded(Masked).double(), {}, **way.sizes)
    flex.register_forward_hook(HookFunction("blocks.1"))
    batches = [{"input_ids": batch, "attention_mask": torch.ones_like(batch)} for batch in BATCHES]
    sequential.run(flex, batches, window=window, store=ActivationStore(tmp_path))
    flex.restore()
    dist.barrier()
    store = ActivationStore(tmp_path)
    for i, batch in enumerate(BATCHES):
        assert store.annotations(i)["attention_mask"].shape == (2 * len(batch), 6)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("prefetch", [0, 1])
def test_weights_of_dtensors_are_read_in_parts(prefetch):
    model, way = unsharded(), SHARDED["dtensor"]
    state = model.state_dict()
    empty = way.shard(model.to("meta"))
    flex = hooked(empty, **way.sizes)
    torch.manual_seed(7)
    outputs = sequential.run(flex, BATCHES, weights=state, window=2, prefetch=prefetch)
    check_loop(flex, outputs)
    assert outputs.loads == {f"blocks.{i}": 2 for i in range(3)}
    assert all(parameter.is_meta for parameter in empty.parameters())
    flex.restore()


@pytest.mark.ranks(2)
def test_a_dtensor_that_is_used_outside_of_its_target_has_no_values():
    sharded = SHARDED["dtensor"].shard(unsharded())

    def after(module, args, output):
        return output + module.blocks[0].fc1.weight.to_local().sum()

    sharded.register_forward_hook(after)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        sequential.run(sharded, BATCHES[:1], weights=unsharded().state_dict())


@pytest.mark.ranks(2)
def test_packed_projections_are_read_in_the_parts_that_a_rank_has(tmp_path):
    """Each rank has a piece of each of the fused projections: ``_StridedShard``."""
    transformers = pytest.importorskip("transformers")
    from transformers.distributed import DistributedConfig

    settings = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_local_experts=2, **settings
    )
    if dist.get_rank() == 0:
        models.seeded(transformers.MixtralForCausalLM, config).save_pretrained(tmp_path)
    dist.barrier()
    model = transformers.MixtralForCausalLM.from_pretrained(
        tmp_path, distributed_config=DistributedConfig(tp_size=2)
    ).eval()
    batch = {"input_ids": torch.arange(8)[None], "use_cache": False}
    (output,) = sequential.run(model, [batch], weights=tmp_path)
    with torch.no_grad():
        assert_close(output.logits, model(**batch).logits)


@pytest.mark.ranks(2)
def test_fsdp2_keeps_its_weights_and_one_batch_at_a_time():
    model, batches = models.TWO_RANKS["fsdp2"].shard(unsharded()), BATCHES[1:2] * 2
    with torch.no_grad():
        outputs = sequential.run(model, batches)
        assert all(torch.equal(one, model(batches[0])) for one in outputs)
    with pytest.raises(ValueError, match="use window=1"):
        sequential.run(model, batches, window=2)
    with pytest.raises(ValueError, match="can't replace those that FSDP gathers"):
        sequential.run(model, batches, weights=unsharded().state_dict())


@pytest.mark.ranks(2)
def test_rank_0_writes_the_store_and_all_go_on_from_it(tmp_path):
    way = SHARDED["tp"]
    flex = FlexModel(way.shard(unsharded()), {}, **way.sizes)
    flex.register_forward_hook(HookFunction("blocks.1.fc1"))
    sequential.run(flex, BATCHES[:3], window=2, store=ActivationStore(tmp_path))
    outputs = sequential.run(flex, BATCHES, window=2, store=ActivationStore(tmp_path))
    assert outputs[:3] == [None] * 3 and outputs[3] is not None
    flex.restore()
    dist.barrier()
    records = list(ActivationStore(tmp_path).tensors("blocks.1.fc1"))
    model = unsharded()
    found = []
    model.blocks[1].fc1.register_forward_hook(lambda m, a, output: found.append(output))
    for batch in BATCHES:
        model(batch)
    assert len(records) == len(BATCHES)
    for one, other in zip(records, found):
        assert_close(one, other.detach())


@pytest.mark.ranks(2)
def test_an_edit_that_fails_on_one_rank_is_an_error_on_both():
    def fail(module, x, save_ctx, modules):
        if dist.get_rank() == 1 and len(x) == 6:
            raise ValueError("on rank 1")
        return x * 2

    way = SHARDED["tp"]
    flex = FlexModel(way.shard(unsharded()), {}, **way.sizes)
    handle = flex.register_forward_hook(HookFunction("blocks.1.fc1", editing_function=fail))
    with pytest.raises(HookError, match="on rank 1"):
        sequential.run(flex, BATCHES)
    handle.remove()
    flex.register_forward_hook(HookFunction("blocks.1.fc1"))
    outputs = sequential.run(flex, BATCHES)
    for output, batch in zip(outputs, BATCHES):
        assert_close(output, unsharded()(batch))
    flex.restore()

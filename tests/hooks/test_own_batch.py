"""``FlexModel(dp_batch="local")``: what runs of a data-parallel rank alone have, and what they do
not; and that a script is the same on one process.
"""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import models
import pipelines
from flex_model import ActivationStore, FlexModel, HookError, HookFunction, sequential
from flex_model.distributed.mesh import Mesh
from shared_edits import double
from tiers import grid_but

BATCH = models.random(4, 6)


def own_rows():
    """Three rows on rank 0, one on rank 1."""
    return BATCH.split((3, 1))[dist.get_rank()]


def local(model, records=None, **settings):
    settings |= {"data_parallel_size": 2, "dp_batch": "local", "timeout": 20}
    return FlexModel(model, {} if records is None else records, **settings)


def test_wrong_values():
    with pytest.raises(ValueError, match=r'"global".*"local"'):
        FlexModel(models.mlp(), dp_batch=1)
    with pytest.raises(TypeError, match="pad_value must be a number"):
        FlexModel(models.mlp(), pad_value="0")
    with pytest.raises(ValueError, match="there is one data-parallel rank"):
        FlexModel(models.mlp()).no_rows().__enter__()
    with pytest.raises(TypeError, match="dp_batch"):
        HookFunction("fc1", dp_batch="local")


def test_the_ranks_that_share_a_batch():
    """In each pipeline stage, a tensor-parallel group."""
    for rank in range(8):
        mesh = Mesh(tuple(range(10, 18)), rank, pp_size=2, dp_size=2, tp_size=2).of_own_batch()
        first = 10 + rank // 2 % 2 * 2
        assert mesh.ranks == (first, first + 1, first + 4, first + 5)
        assert mesh.ranks[mesh.rank] == 10 + rank
        assert (mesh.pp_size, mesh.dp_size, mesh.tp_size) == (2, 1, 2)
        assert mesh.coordinates == {"pp": rank // 4, "dp": 0, "tp": rank % 2}
        assert mesh.of_own_batch() is mesh


@pytest.mark.ranks(2)
@pytest.mark.parametrize("groups", ["all", "mine"])
def test_no_hook_is_called_without_rows_whatever_the_groups(groups):
    records = {}
    flex = local(models.mlp(), records)
    flex.create_hook_group("mine", "fc1")
    with flex.no_rows() if dist.get_rank() else contextlib.nullcontext():
        flex(BATCH, groups=groups)
    assert list(records) == ["fc1"] * (dist.get_rank() == 0)
    flex.restore()


@pytest.mark.ranks(2)
def test_what_needs_all_ranks_is_refused(tmp_path):
    flex = local(models.mlp())
    with pytest.raises(ValueError, match=r"'fc1': parameters= .*get_module_parameter"):
        flex.register_forward_hook(HookFunction("fc1", None, double, parameters=["out.bias"]))
    with pytest.raises(ValueError, match=r"'out.bias': .*another FlexModel of this model"):
        flex.register_hook(HookFunction("out.bias"))
    assert not flex.hook_functions
    flex.restore()
    schedule = pipelines.make_schedule(pipelines.SINGLE[0], pipelines.make_mlp())
    with pytest.raises(ValueError, match='dp_batch="global" is not for a pipeline'):
        FlexModel(schedule, {}, dp_batch="global")
    pytest.importorskip("safetensors")
    with pytest.raises(ValueError, match=r"ActivationStore.*a dict, or use dp_batch='global'"):
        local(models.mlp(), ActivationStore(tmp_path / "store"))


@pytest.mark.ranks(2)
def test_another_flex_model_has_the_gradients_of_parameters():
    """As the refusal says: those of all ranks, whatever the first one's hooks do."""
    whole, site = models.mlp(), "fc2.weight"
    whole.fc1.register_forward_hook(lambda module, args, output: output * 2)
    whole(BATCH).sum().div(2).backward()
    model = DistributedDataParallel(models.mlp())
    records, of_weights = {}, {}
    with local(model, records) as flex, FlexModel(model, of_weights, timeout=20) as other:
        flex.register_forward_hook(HookFunction("fc1", None, double))
        other.register_hook(HookFunction(site, None, double))
        flex(own_rows()).sum().backward()
    assert_close(records["fc1"], [whole.fc1(whole.inp(own_rows())).detach() / 2])
    if dist.get_rank() == 0:
        assert_close(of_weights[site], [whole.fc2.weight.grad])
    assert_close(model.module.fc2.weight.grad, 2 * whole.fc2.weight.grad)
    assert_close(model.module.inp.weight.grad, whole.inp.weight.grad)


@pytest.mark.ranks(2)
def test_a_transfer_inside_an_editing_function_is_refused():
    flex = local(models.mlp())

    def read(module, full, save_ctx, modules):
        return full + flex.get_module_parameter("fc1.bias")

    flex.register_forward_hook(HookFunction("fc1", None, read))
    with pytest.raises(HookError, match="a transfer among ranks inside an editing function"):
        flex(own_rows())
    flex.restore()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["dp", "fsdp2"])
def test_tools_are_of_a_ranks_own_rows(name):
    """Each of them runs on the rank's tensor-parallel group."""
    model = models.mlp()
    if name == "fsdp2":
        fully_shard(model)
    with local(model) as flex:
        flex.register_forward_hook(HookFunction("fc1", None, double))
        (row,) = flex.dry_run(own_rows())
        assert row.full_shape == (len(own_rows()), 8)
        report = flex.verify(models.mlp(), own_rows(), edits=True, loss=lambda out: out.sum())
        assert report.is_equal, report
    if name == "dp":
        with local(model, records := {}) as flex:
            flex.register_forward_hook(HookFunction("fc1", None, double))
            sequential.run(flex, [own_rows()] * (1 + dist.get_rank()), targets=["fc1", "fc2"])
            assert len(records["fc1"]) == 1 + dist.get_rank()
            whole = models.mlp()
            assert_close(records["fc1"][0], whole.fc1(whole.inp(own_rows())).detach())


@pytest.mark.ranks(2)
def test_ranks_with_another_choice():
    """A rank that waits for one which has runs of its own learns of it soon."""
    choice = {"dp_batch": "local"} if dist.get_rank() == 0 else {}
    flex = FlexModel(models.mlp(), {}, data_parallel_size=2, timeout=20, **choice)
    flex.register_forward_hook(HookFunction("fc1"))
    if dist.get_rank() == 0:
        flex(BATCH)
    else:
        with pytest.raises(HookError, match="rank 0"):
            flex(BATCH)
    flex.restore()


@pytest.mark.ranks(4, timeout=120)
@pytest.mark.parametrize(
    "kind", [pipelines.LOOPED[0], pytest.param(pipelines.SINGLE[1], marks=pytest.mark.grid)]
)
def test_each_pipeline_has_its_own_steps(kind):
    """Two pipelines of two stages, with other rows, and other numbers of steps."""
    rank, model = dist.get_rank(), pipelines.make_mlp()
    mine, dp = dist.get_rank() // 2, rank % 2
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    x = models.random(4 + 4 * dp, pipelines.WIDTH).float()
    y, loss_fn = torch.zeros(len(x), 3), nn.functional.mse_loss

    def register(flex):
        probe = models.seeded(nn.Linear, 16, 16)
        flex.register_trainable_module("probe", probe)
        for layer in (1, 6):
            flex.register_forward_hook(
                HookFunction(
                    f"layers.{layer}.fc1",
                    editing_function=lambda m, full, ctx, modules: modules["probe"](full),
                )
            )
        flex.register_full_backward_hook(HookFunction("layers.5.act", output_name="grad"))

    expected = pipelines.unsplit(model, register, x, y, loss_fn)
    schedule = pipelines.make_schedule(kind, copy.deepcopy(model), 4, groups[dp], loss_fn=loss_fn)
    sizes, records = {"pipeline_parallel_size": 2, "data_parallel_size": 2}, {}
    with FlexModel(schedule, records, **sizes, dp_batch="local", timeout=20) as flex:
        assert (flex.pp_size, flex.dp_size, flex.tp_size) == (2, 2, 1)
        register(flex)
        for _ in range(1 + dp):
            flex.zero_grad()
            output = flex(x, target=y)
        full = flex.get_module_parameter("layers.6.fc1.weight")
        trainable = flex.trainable_modules["probe"].weight.grad
    assert_close(full, model.layers[6].fc1.weight.detach(), rtol=0, atol=0)
    if mine == 0:
        assert_close(records, expected["records"])
    else:
        assert not records
        if kind in pipelines.SINGLE:
            assert_close(output, expected["output"])
    for name, grad in expected["trainable"].items():
        if name == "probe.weight":
            assert_close(trainable, grad)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", grid_but(["tp x dp", "dtensor x fsdp2"], "tp x dp"))
def test_tools_are_of_a_tensor_parallel_group(name):
    """Its ranks draw the same numbers, and its first rank has the reference."""
    parallelism, whole = models.FOUR_RANKS[name], models.seeded(models.Block).double()
    model, sizes = parallelism.shard(whole), parallelism.sizes | {"dp_batch": "local"}
    dp, is_first = dist.get_rank() // 2, dist.get_rank() % 2 == 0
    x = models.random(2 + dp, 5 + dp, 8)

    def draw(module, full, save_ctx, modules):
        save_ctx.drawn = torch.rand_like(full)
        return full + save_ctx.drawn

    settings = {"save_ctx_on": "all", "edit_on": "rank0", "timeout": 20}
    with FlexModel(model, records := {}, **sizes, **settings) as flex:
        flex.register_forward_hook(HookFunction("mlp.fc1", editing_function=draw))
        flex.register_forward_hook(HookFunction("mlp.act", output_name="after"))
        (row, _) = flex.dry_run(x)
        flex(x)
        assert row.full_shape == flex.save_ctx.drawn.shape == (2 + dp, 5 + dp, 12)
    assert row.owners == (2 * dp, 2 * dp + 1)
    assert bool(records) == is_first
    if is_first:
        after = whole.mlp.act(records["mlp.fc1"][0] + flex.save_ctx.drawn)
        assert_close(records["after"][0], after)
    with FlexModel(model, **sizes, timeout=20) as flex:
        flex.register_forward_hook(HookFunction("mlp.fc1", editing_function=double))
        reference = whole if is_first else None
        assert flex.verify(reference, x, edits=True, loss=lambda output: output.sum()).is_equal
        assert flex.verify(reference, x).is_equal

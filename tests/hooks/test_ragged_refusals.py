"""What ``dp_batch`` refuses by name, on one process; and that a script is the same there."""

import pytest
import torch

import models
import pipelines
from flex_model import ActivationStore, FlexModel, HookFunction, sequential

BATCH = models.random(4, 6)


def double(module, full, save_ctx, modules):
    return full * 2


def test_what_own_rows_cant_have(tmp_path):
    local = {"dp_batch": "local"}
    flex = FlexModel(models.mlp(), {}, save_ctx_on="all", edit_on="rank0")
    flex.register_forward_hook(HookFunction("fc1", **local))  # one process: nothing is sent
    flex = FlexModel(models.mlp(), {})
    with pytest.raises(ValueError, match="get_module_parameter"):
        flex.register_forward_hook(
            HookFunction("fc1", None, double, parameters=["out.bias"], **local)
        )
    assert not flex.hook_functions
    pytest.importorskip("safetensors")
    flex = FlexModel(models.mlp(), ActivationStore(tmp_path / "store"))
    with pytest.raises(ValueError, match=r"ActivationStore.*record=False"):
        flex.register_forward_hook(HookFunction("fc1", **local))
    flex.register_forward_hook(HookFunction("fc1", None, double, record=False, **local))
    flex.restore()


@pytest.mark.ranks(2)
def test_what_own_rows_cant_have_on_two_ranks():
    flex = FlexModel(
        models.mlp(), {}, data_parallel_size=2, save_ctx_on="all", edit_on="rank0", timeout=20
    )
    with pytest.raises(ValueError, match="has its own; use save_ctx_on='rank0'"):
        flex.register_forward_hook(HookFunction("fc1", dp_batch="local"))
    flex.restore()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dp_batch", ["global", "local"])
def test_of_a_pipeline(dp_batch):
    schedule = pipelines.make_schedule(pipelines.SINGLE[0], pipelines.make_mlp())
    with (
        FlexModel(schedule, {}) as flex,
        pytest.raises(ValueError, match="not for the hooks of a pipeline"),
    ):
        flex.register_forward_hook(HookFunction("emb", dp_batch=dp_batch))


def test_runs_that_dont_know_own_rows():
    flex = FlexModel(models.mlp(), {}, dp_batch="local")
    flex.register_forward_hook(HookFunction("fc1", None, double))
    for run in (
        lambda: flex.dry_run(BATCH),
        lambda: flex.verify(models.mlp(), BATCH, edits=True),
        lambda: sequential.run(flex, [BATCH], targets=["fc1"]),
    ):
        with pytest.raises(ValueError, match="forward hook on 'fc1' has dp_batch='local'"):
            run()
    flex.restore()


def test_wrong_values():
    with pytest.raises(ValueError, match=r'"global".*"local"'):
        HookFunction("fc1", dp_batch="own")
    with pytest.raises(ValueError, match=r'"global".*"local"'):
        FlexModel(models.mlp(), dp_batch=1)
    with pytest.raises(TypeError, match="pad_value must be a number"):
        FlexModel(models.mlp(), pad_value="0")
    with pytest.raises(ValueError, match="there is one data-parallel rank"):
        FlexModel(models.mlp()).no_rows().__enter__()


def test_one_process_has_lists_of_one_rank():
    records, whole = {}, models.mlp()
    flex = FlexModel(models.mlp(), records, dp_batch="local")
    flex.register_forward_hook(HookFunction("fc1", None, double))
    flex.register_full_backward_hook(HookFunction("act", None, double, output_name="grad"))
    output = flex(BATCH)
    output.sum().backward()
    ((record,),), ((grad,),) = records["fc1"], records["grad"]
    torch.testing.assert_close(record, whole.fc1(whole.inp(BATCH)))
    assert grad.shape == record.shape
    flex.restore()

"""Hooks over the schedules of torch.distributed.pipelining: the numbers of the unsplit model."""

import pytest
import torch
from torch import nn

from flex_model import FlexModel, HookFunction
from pipelines import ALL, make_mlp, make_schedule, unsplit

MSE = nn.MSELoss()


def data(rows=8):
    torch.manual_seed(1)
    return torch.randn(rows, 8), torch.randn(rows, 3)


def mix(module, x, save_ctx, modules):
    """An edit that mixes features."""
    return x.flip(-1) * 0.5 + x.mean(-1, keepdim=True)


def hooks_of_all_kinds(flex):
    for i in range(8):
        flex.register_forward_hook(HookFunction(f"layers.{i}.fc1"))
        flex.register_full_backward_pre_hook(
            HookFunction(f"layers.{i}", output_name=f"layers.{i}.grad")
        )
    flex.register_forward_hook(HookFunction("layers.3.act", editing_function=mix))
    flex.register_forward_pre_hook(
        HookFunction("layers.4", editing_function=mix, output_name="layers.4.in")
    )
    flex.register_full_backward_pre_hook(
        HookFunction("layers.6.fc1", editing_function=mix, output_name="fc1.grad")
    )
    flex.register_full_backward_hook(
        HookFunction("layers.2.fc2", editing_function=mix, output_name="fc2.grad_in")
    )
    flex.register_full_backward_hook(HookFunction("layers.4", output_name="edge.grad_in"))
    flex.register_hook(
        HookFunction("layers.5.fc1.weight", editing_function=mix, output_name="weight.grad")
    )
    flex.register_forward_hook(HookFunction("head"))


def check(found, expected, tolerance=1e-6):
    assert list(found) == list(expected) or set(found) == set(expected)
    for name, tensors in expected.items():
        assert len(found[name]) == len(tensors), name
        for one, other in zip(found[name], tensors):
            torch.testing.assert_close(
                one, other, rtol=0, atol=tolerance, msg=lambda m: f"{name}: {m}"
            )


def check_parameters(flex, expected):
    for stage in flex.module.children():
        for name, parameter in stage.named_parameters():
            torch.testing.assert_close(
                parameter.grad, expected[name], rtol=0, atol=1e-6, msg=lambda m: f"{name}: {m}"
            )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_a_step_gives_what_the_unsplit_model_gives(kind):
    model = make_mlp()
    x, y = data()
    expected = unsplit(model, hooks_of_all_kinds, x, y, MSE)
    records, losses = {}, []
    with FlexModel(make_schedule(kind, model, loss_fn=MSE), records) as flex:
        hooks_of_all_kinds(flex)
        for _ in range(2):
            flex.zero_grad()
            output = flex(x, target=y, losses=losses)
            if flex._channel.mesh.rank == 0:
                check(records, expected["records"])
            else:
                assert records == {}
            check_parameters(flex, expected["grads"])
            if any(stage.is_last for stage in flex._pipeline.runner.stages):
                torch.testing.assert_close(output, expected["output"], rtol=0, atol=1e-6)
                assert len(losses) == 4
                loss = torch.stack(losses).mean()
                torch.testing.assert_close(loss, expected["loss"], rtol=0, atol=1e-6)
            else:
                assert output is None

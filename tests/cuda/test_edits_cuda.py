"""Edits of one process on a GPU: a recomputation draws their random numbers again; those that draw
none are called by the dispatcher.
"""

from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flex_model import FlexModel, HookError, HookFunction
from tests import models
from tests.cuda.processes import Model

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


class Recomputed(Model):
    """Calls a module on several inputs, each of which is recomputed in backward."""

    def forward(self, inputs):
        def square(x):
            return self.inner(x) ** 2

        return [
            checkpoint(square, x, use_reentrant=False, preserve_rng_state=False) for x in inputs
        ]


def noisy():
    flex = FlexModel(Recomputed().cuda())
    edit = lambda m, full, s, ms: full * (1 + torch.rand_like(full))  # noqa: E731
    flex.register_forward_hook(HookFunction("inner", editing_function=edit))
    return flex


def test_a_recomputed_edit_draws_the_same_numbers():
    """Each of the calls its own, whichever is recomputed first."""
    whole = [models.random(32, 16, seed=seed, dtype=torch.float32) for seed in range(3)]
    inputs = [x.cuda().requires_grad_() for x in whole]
    with noisy() as flex:
        outputs = flex(inputs)
        for x, y in zip(inputs, outputs):
            y.sum().backward()
            torch.testing.assert_close(x.grad.cpu(), 2 * y.detach().cpu() / x.detach().cpu())


def test_calls_with_the_same_input_are_refused_where_they_are_recomputed():
    x = torch.ones(8, 4, device="cuda", requires_grad=True)
    with noisy() as flex:
        first, _ = flex([x, x])
        with pytest.raises(HookError, match="can't be drawn again"):
            first.sum().backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_an_edit_that_the_dispatcher_calls_equals_a_hook_of_torch(mode):
    def edit(module, full, save_ctx, modules):
        return full * 2 + 1

    x = models.random(4, 16, dtype=torch.float32).cuda()
    layers = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4))).cuda()
    handles = [
        layer.register_forward_hook(lambda module, args, output: output * 2 + 1) for layer in layers
    ]
    with mode():
        expected = layers(x)
    for handle in handles:
        handle.remove()
    with FlexModel(layers) as flex:
        for name in "0123":
            flex.register_forward_hook(HookFunction(name, None, edit, record=False))
        with mode(), flex.active("all"):
            for _ in range(3):
                assert torch.equal(flex(x), expected)
            assert is_settled(flex)


def is_settled(flex):
    """Whether the next edit is called by the dispatcher alone."""
    function = flex._runner.core.executor.function
    with mock.patch.object(type(function), "run") as by_python:
        flex(torch.ones(4, 16, device="cuda"))
    return not by_python.called


def test_a_late_draw_on_the_gpu_is_an_error():
    def edit(module, full, save_ctx, modules):
        save_ctx.calls = getattr(save_ctx, "calls", 0) + 1
        return full + torch.rand_like(full) if save_ctx.calls > 3 else full

    x = torch.ones(4, 16, device="cuda")
    with FlexModel(torch.nn.Sequential(torch.nn.Identity())) as flex, torch.no_grad():
        flex.register_forward_hook(HookFunction("0", None, edit, record=False))
        with flex.active("all"):
            for _ in range(3):
                flex(x)
            with pytest.raises(HookError, match="draws=True"):
                flex(x)

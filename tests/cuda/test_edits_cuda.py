"""Edits of one process on a GPU that draw random numbers: a recomputation draws them again."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flex_model import FlexModel, HookError, HookFunction
from tests import models
from tests.cuda.processes import Model

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


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

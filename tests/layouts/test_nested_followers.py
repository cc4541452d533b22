"""Two FlexModels that follow one forward: neither hides from the other what the model does."""

import pytest
import torch
from torch import nn

from flex_model import FlexModel, HookFunction


class Counted(nn.Module):
    """Makes views of its own sizes, and may scale by a number that it reads from its rows."""

    def __init__(self, reads):
        super().__init__()
        self.reads, self.inner = reads, nn.Linear(8, 8)

    def forward(self, x):
        rows, features = x.shape
        y = self.inner(x).view(rows, 2, features // 2)
        y = y.transpose(1, 2).reshape(rows, features)
        return y * (x > 0).sum().item() if self.reads else y


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reads", [False, True])
def test_a_module_with_a_flex_model_of_its_own(reads):
    torch.manual_seed(0)
    model = nn.Sequential(Counted(reads), nn.Linear(8, 4))
    x = torch.randn(2, 8)  # the same rows on both ranks, so that both read the same number
    whole = torch.cat([x, x])
    expected = {"0.inner": model[0].inner(whole), "1": model(whole)}
    settings = {"data_parallel_size": 2, "batch_dim": 0}
    with (
        FlexModel(model[0], inside := {}, **settings) as inner,
        FlexModel(model, outside := {}, **settings) as outer,
    ):
        inner.register_forward_hook(HookFunction("inner"))
        outer.register_forward_hook(HookFunction("0.inner"))
        outer.register_forward_hook(HookFunction("1"))
        output = outer(x)
        if torch.distributed.get_rank() == 0:
            torch.testing.assert_close(inside["inner"][-1], expected["0.inner"])
            if reads:  # each rank's number of its own rows, which are the same here
                expected["1"] = torch.cat([output, output])
            for name in expected:
                torch.testing.assert_close(outside[name][0], expected[name])

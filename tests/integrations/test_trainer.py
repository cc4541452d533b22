"""transformers' Trainer around a hooked model: training, evaluation and checkpoints."""

import json

import pytest
from torch.testing import assert_close

import models
import scripts
from flex_model import FlexModel, HookFunction
from training import SITE, mix, train

pytest.importorskip("accelerate")
SCRIPT = scripts.ROOT / "tests" / "integrations" / "training.py"


def by_torch(folder):
    """Losses and weights with torch's own hook, on one process."""
    losses = train("", folder, hook=lambda module, args, output: mix(module, output, None, None))
    assert len(losses) >= 6
    return losses, weights(folder)


def weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "checkpoint-4" / "model.safetensors")


def test_a_trainer_of_a_hooked_model(tmp_path, monkeypatch):
    seen, llama = [], models.llama

    def count(module, full, save_ctx, modules):
        seen.append(tuple(full.shape))

    def hooked():
        flex = FlexModel(llama().float(), records := {})
        flex.register_forward_hook(HookFunction(SITE, editing_function=mix))
        flex.register_full_backward_hook(HookFunction(SITE, None, count, output_name="gradient"))
        wrapped.append((flex, records))
        return flex.module

    expected, wrapped = by_torch(tmp_path / "torch"), []
    monkeypatch.setattr(models, "llama", hooked)
    losses = train("", tmp_path / "flex")
    assert_close((losses, weights(tmp_path / "flex")), expected)
    assert seen == [(4, 6, 32)] * 4
    assert [tuple(one.shape) for one in wrapped[0][1][SITE]] == [(4, 6, 32)]


@pytest.mark.grid
@pytest.mark.parametrize(("how", "num_ranks"), [("", 1), ("ddp", 2), ("fsdp2", 2)])
def test_hooks_while_a_trainer_trains(how, num_ranks, tmp_path):
    expected = by_torch(tmp_path / "torch")
    folder, count = tmp_path / "flex", str(num_ranks)
    text = scripts.run(
        tmp_path, "torchrun", "--nproc-per-node", count, str(SCRIPT), how, str(folder)
    )
    losses = json.loads(text.splitlines()[-1])
    assert_close((losses, weights(folder)), expected, rtol=1e-4, atol=5e-5)  # Adam, in float32

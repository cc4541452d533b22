"""Activations that wait elsewhere: the same bits, and nothing left on disk."""

from typing import ClassVar

import pytest
import torch
from families import FAMILIES
from test_engine import BATCHES, Stack, assert_equal, assert_nothing_left
from torch import nn

from flex_model import sequential
from flex_model.sequential.engine import ActivationOffloader

pytest.importorskip("safetensors")


@pytest.fixture
def moved(monkeypatch):
    """The bytes that the last offloader moved."""
    made, init = [], ActivationOffloader.__init__

    def noted(self, *args):
        made.append(self)
        init(self, *args)

    monkeypatch.setattr(ActivationOffloader, "__init__", noted)
    return lambda: made[-1].bytes_moved


@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_equal(name, where, tmp_path, moved):
    pytest.importorskip("transformers")
    make, batches, _ = FAMILIES[name]
    model = make()
    with torch.no_grad():
        outputs = sequential.run(
            model, batches, window=3, offload_activations=where, offload_dir=tmp_path / "waiting"
        )
        for output, batch in zip(outputs, batches):
            assert_equal(output, model(**batch))
    # They are on the CPU already; on disk is at least what one block of one batch was given.
    assert moved() == 0 if where == "cpu" else moved() > 32 * 4 * 5
    assert list(tmp_path.rglob("*")) == ([tmp_path / "waiting"] if where == "disk" else [])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_strides_views_dtypes_and_arguments(mode, moved):
    class Block(nn.Module):
        def forward(self, turned, half, whole, part, empty, flags):
            assert turned.stride() == (1, 3) and whole.data_ptr() == part.data_ptr()
            part.add_(1)  # seen in `whole`, as they share memory
            return turned.t().contiguous().t() * 2, half + 1, whole, part, empty, ~flags

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x):
            given = x.clone()
            whole = given * 2
            state = given.t().contiguous().t()[:3, :2] * 1, given.half(), whole, whole[:1]
            state = (torch.empty_strided((3, 2), (1, 3)).copy_(given[:3, :2]), *state[1:])
            state = (*state, given[:0], given > 0)
            for block in self.blocks:
                state = block(*state)
            return (*state, given)

    model = Model()
    batches = [torch.randn(4, 5), torch.randn(6, 5)]
    with mode():
        outputs = sequential.run(model, batches, offload_activations="disk")
        for output, batch in zip(outputs, batches):
            assert_equal(output, model(batch))
    assert moved() > 0


def test_a_mask_that_batches_share_is_right_meanwhile(moved):
    class Cached(Stack):
        masks: ClassVar = {}  # beyond what can be seen of the model

        def forward(self, x):
            mask = self.masks.setdefault(x.shape[1], torch.arange(6.0).add(1))
            for block in self.blocks:
                x = self.scaled(block, x, mask)
            return x

        def scaled(self, block, x, mask):
            return block(x) * mask

    class Scaled(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear

        def forward(self, x, mask):
            return self.linear(x) * mask

    model = Cached(3)
    model.blocks = nn.ModuleList(Scaled(block) for block in model.blocks)
    model.scaled = lambda block, x, mask: block(x, mask)
    with torch.no_grad():
        outputs = sequential.run(model, BATCHES, offload_activations="disk")
        for output, batch in zip(outputs, BATCHES):
            assert torch.equal(output, model(batch))
    assert moved() > 0


def test_inputs_of_the_user_stay_where_they_are():
    model = Stack(2)
    places = [batch.data_ptr() for batch in BATCHES]
    seen = []

    def look(name, indices):
        seen.append([batch.data_ptr() for batch in BATCHES] == places)

    with torch.no_grad():
        sequential.run(model, BATCHES, offload_activations="disk", on_target_end=look)
    assert seen == [True, True]


def test_files_on_disk_have_no_names(tmp_path, moved):
    """So that a killed run leaves nothing."""
    model, seen = Stack(4), []
    settings = {"offload_activations": "disk", "offload_dir": tmp_path}
    settings["on_target_end"] = lambda *_: seen.append(list(tmp_path.iterdir()))
    with torch.no_grad():
        sequential.run(model, BATCHES, **settings)
    assert seen == [[]] * 4 and moved() > 0
    handle = model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), torch.no_grad():
        sequential.run(model, BATCHES, **settings)
    handle.remove()
    assert list(tmp_path.iterdir()) == []
    assert_nothing_left(model)

"""Tensors that do not fit together, at every kind of hook: an error on every rank, never a wrong
record or a crash, and the next run works.
"""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate

import models
from flex_model import FlexModel, HookError, HookFunction, HookMismatchError
from shared_edits import double
from tiers import grid_but

BATCH = models.random(4, 6)
# What rank 1 has where rank 0 has BATCH, and what both are told of it.
OTHERS = {
    "shape": lambda x: x[:3],
    "same numel": lambda x: x.reshape(6, 4),
    "numel": lambda x: x.repeat(1, 2),
    "nothing": lambda x: x[:0],
    "more dims": lambda x: x.unsqueeze(0),
    "fewer dims": lambda x: x[0],
    "scalar": lambda x: x.sum(),
    "wide": lambda x: x.reshape(1, 1, 1, 1, 1, 1, 1, 4, 6),
    "float32": lambda x: x.float(),
    "bfloat16": lambda x: x.bfloat16(),
    "none": lambda x: None,
}


def words_for(name):
    """What an error must say: the value of each rank, where they are two tensors."""
    other = OTHERS[name](BATCH)
    if other is None:
        return ["rank 1"]
    if other.dtype != BATCH.dtype:
        return [str(other.dtype), str(BATCH.dtype)]
    return [str(tuple(other.shape)), str(tuple(BATCH.shape))]


class Gives(nn.Module):
    """On rank 1 what ``other`` makes of its input; the gradient of it, where that can be."""

    def __init__(self):
        super().__init__()
        self.site = nn.Identity()
        self.other = None

    def forward(self, x):
        return self.site(x if self.other is None or dist.get_rank() == 0 else self.other(x))


HOOKS = {
    "read": ("forward", None, "all"),
    "read before": ("forward_pre", None, "all"),
    "edit": ("forward", double, "all"),
    "edit before": ("forward_pre", double, "all"),
    "edit on rank 0": ("forward", double, "rank0"),
    "read gradient": ("full_backward", None, "all"),
    "edit gradient": ("full_backward_pre", double, "all"),
}


def run(flex, kind):
    output = flex(BATCH.clone().requires_grad_())
    if kind.startswith("full_backward"):
        output.sum().backward()


@pytest.mark.ranks(2, timeout=100)
@pytest.mark.parametrize("transport", grid_but(["shared_memory", "gloo"], "shared_memory"))
@pytest.mark.parametrize("hook", HOOKS)
def test_tensors_that_do_not_fit_are_an_error_on_every_rank(hook, transport, monkeypatch):
    monkeypatch.setenv("FLEX_MODEL_TRANSPORT", transport)
    kind, edit, edit_on = HOOKS[hook]
    records, model = {}, Gives()
    flex = FlexModel(model, records, tensor_parallel_size=2, edit_on=edit_on, timeout=20)
    getattr(flex, f"register_{kind}_hook")(HookFunction("site", editing_function=edit))
    for name, model.other in OTHERS.items():
        start = time.monotonic()
        with pytest.raises((HookError, ValueError), match="'site'") as error:
            run(flex, kind)
        assert time.monotonic() - start < 5, name
        assert all(word in str(error.value) for word in words_for(name)), (name, error.value)
        model.other = None
        x = BATCH.clone().requires_grad_()
        output = flex(x)
        output.sum().backward()
        edited = 2 if edit else 1
        if dist.get_rank() == 0:
            (record,) = records["site"]
            assert torch.equal(record, torch.ones_like(BATCH) if "gradient" in hook else BATCH)
        assert torch.equal(output, BATCH * (1 if "gradient" in hook else edited))
        assert torch.equal(x.grad, torch.full_like(BATCH, edited))
    flex.restore()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
@pytest.mark.parametrize("site", ["inp", "fc1"])
def test_an_edit_that_changes_its_tensor_on_one_rank_only_is_an_error(site, transport, monkeypatch):
    monkeypatch.setenv("FLEX_MODEL_TRANSPORT", transport)
    model, rank = models.TWO_RANKS["tp"].shard(models.mlp()), [0]

    def edit(module, full, save_ctx, modules):
        return full * 2 if dist.get_rank() in rank else None

    flex = FlexModel(model, {}, tensor_parallel_size=2, timeout=20)
    flex.register_forward_hook(HookFunction(site, (None, 8) if site == "fc1" else None, edit))
    flex.register_forward_hook(HookFunction("out"))
    for rank[:], fails in (([0], True), ([], False), ([1], True), ([0, 1], False)):
        if fails:
            with pytest.raises(HookMismatchError, match=rf"(?s){site}.*changed its tensor"):
                flex(BATCH)
        else:
            flex(BATCH)
    flex.restore()


# ValueError before, which nobody expects of a run.
@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["data", "tensor"])
@pytest.mark.parametrize("edit", [None, double])
def test_shapes_that_fit_no_layout_are_a_mismatch(kind, edit):
    flex = FlexModel(nn.Sequential(nn.Identity()), {}, **{f"{kind}_parallel_size": 2})
    if kind == "tensor":
        flex.annotate_layout(models.INPUT, kind="forward_pre", tp=Replicate())
    flex.register_forward_hook(HookFunction("0", editing_function=edit))
    x = models.random(4, 6)[:, dist.get_rank() :]
    with pytest.raises(
        HookMismatchError, match=r"forward hook on '0': ranks hold \[6, 5\]"
    ) as error:
        flex(x)
    assert isinstance(error.value, ValueError)  # as of a wrong expected_shape
    advice = "pad the inputs of the data-parallel ranks to one length"
    if kind == "tensor":
        advice = "give the tensor-parallel ranks the same inputs"
    assert advice in str(error.value)
    flex(models.random(4, 6))  # as the advice says
    assert flex.output_ptr["0"] if dist.get_rank() == 0 else True

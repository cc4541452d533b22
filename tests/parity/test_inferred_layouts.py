"""What hooks cost where no layout is stated, and tensors that can't be gathered."""

import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing import assert_close

import frameworks
import models
from counted_traffic import payloads_of
from flex_model import FlexModel, HookError, HookFunction
from flex_model.distributed.communicator import Communicator
from frameworks import tensor_of
from shared_edits import mixing

native = frameworks.CASES["native-tp-2"].build


# ---- What it costs -------------------------------------------------------------------------------


def collectives_of(call):
    """How many collectives torch's dispatcher sees: the model's; our own groups go around it."""
    with CommDebugMode() as counted:
        call()
    return counted.get_total_counts()


@pytest.mark.ranks(2)
def test_hooks_on_replicated_tensors_move_no_payload(tmp_path):
    with frameworks.quiet(), native(tmp_path) as pair, torch.no_grad():
        sharded, records = pair.shard(), {}
        bare = collectives_of(lambda: sharded(*pair.inputs, **pair.keywords))
        with FlexModel(sharded, records) as flex:
            for what in ("outside", "row output", "norm", "layer", "root"):
                name = f"{what} edited"
                site = pair.sites[what]
                flex.register_forward_hook(HookFunction(site, output_name=what))
                flex.register_forward_hook(
                    HookFunction(site, editing_function=mixing, output_name=name)
                )
            for _ in range(2):  # the second knows the layouts already
                counted = collectives_of(lambda: sharded(*pair.inputs, **pair.keywords))
                assert counted == bare
                assert payloads_of(flex._core.communicator) == 0
            assert len(records) == (10 if dist.get_rank() == 0 else 0)
            flex.register_forward_hook(HookFunction(pair.sites["column output"]))
            flex(*pair.inputs, **pair.keywords)
            assert payloads_of(flex._core.communicator) > 0  # the count can fail


@pytest.mark.ranks(2)
def test_an_idle_wrapper_makes_no_collective(tmp_path):
    ways = [name for name, value in vars(Communicator).items() if callable(value)]
    ways = [name for name in ways if name not in ("__init__", "close", "is_local")]
    with frameworks.quiet(), native(tmp_path) as pair:
        sharded = pair.shard()

        def step(model):
            tensor_of(model(*pair.inputs, **pair.keywords)).sum().backward()

        bare = collectives_of(lambda: step(sharded))
        with FlexModel(sharded) as flex:
            handle = flex.register_forward_hook(HookFunction(pair.sites["row output"]))
            flex(*pair.inputs, **pair.keywords)
            handle.remove()
            with mock.patch.multiple(Communicator, **dict.fromkeys(ways)):
                assert collectives_of(lambda: step(flex)) == bare


# ---- Tensors that can't be gathered --------------------------------------------------------------


class Aside(models.MLP):
    """An MLP that computes with tensors that can't be gathered, beside its own."""

    def __init__(self, make):
        super().__init__()
        self.aside = nn.Identity()
        self.make = make

    def forward(self, x):
        hidden = self.act(self.fc1(self.inp(x)))
        hidden, _ = self.aside((hidden, self.make(hidden)))
        return self.out(self.fc2(hidden))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "unpack_idx"), [("forward", 0), ("forward", 1), ("full_backward_pre", 1)]
)
@pytest.mark.parametrize("is_sparse", [True, False])
def test_a_model_may_compute_with_tensors_that_can_not_be_gathered(is_sparse, kind, unpack_idx):
    def make(hidden):
        if is_sparse:
            return hidden.to_sparse()
        with warnings.catch_warnings():  # of a prototype
            warnings.simplefilter("ignore")
            return torch.nested.as_nested_tensor([hidden[0], hidden[1, :2]])

    way, model, x = models.TWO_RANKS["tp"], models.seeded(Aside, make).double(), models.random(4, 6)
    flex = FlexModel(way.shard(model), **way.sizes)
    getattr(flex, f"register_{kind}_hook")(HookFunction("aside", unpack_idx=unpack_idx))
    text = r"torch\.sparse.*hook a module" if is_sparse else "nested.*enable_nested_tensor=False"
    if unpack_idx == 1:
        with pytest.raises(HookError, match=f"the tensor is {text}"):
            flex(x)
        return
    assert_close(flex(x), model(x))

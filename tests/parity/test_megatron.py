"""Megatron-core beyond the rows of the parity table: its own wrappers and mixtures of experts."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

import frameworks
from flex_model import FlexModel, HookFunction
from frameworks.megatron_gpt import megatron_model
from frameworks.pair import randomise
from shared_edits import mixing_features

pytestmark = [pytest.mark.grid, pytest.mark.ranks(2, timeout=180)]  # Megatron's imports
IDS = frameworks.tokens(2, length=8)
POSITIONS = torch.arange(8).expand(2, 8).contiguous()
MASK = torch.ones(1, 1, 8, 8).triu(1).bool()
LAYER = "decoder.layers.0"
NEAR = {"rtol": 2e-5, "atol": 2e-5}


@contextlib.contextmanager
def megatron():
    with frameworks.quiet(), frameworks.megatron_on_cpu(), frameworks.own_groups():
        from megatron.core import parallel_state

        try:
            yield parallel_state
        finally:
            parallel_state.destroy_model_parallel()


def flipped(module, full, save_ctx, modules):
    return full + full.flip(0)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_its_data_parallelism(is_sharded):
    """Megatron's DDP has a list ``buffers``: FlexModel was a TypeError. With ``is_sharded`` its
    distributed optimizer leaves each rank a part of the averaged gradients.
    """
    with megatron() as state:
        from megatron.core import distributed

        state.initialize_model_parallel()
        whole = randomise(megatron_model(1, False, None))
        model = megatron_model(1, False, None)
        model.load_state_dict(whole.state_dict())
        settings = distributed.DistributedDataParallelConfig(
            use_distributed_optimizer=is_sharded, overlap_grad_reduce=not is_sharded
        )
        wrapped = distributed.DistributedDataParallel(model.config, settings, model)
        wrapped.zero_grad_buffer()

        mlp, name = f"{LAYER}.mlp", f"{LAYER}.mlp.linear_fc1.weight"
        records, passed = {}, []
        whole.get_submodule(mlp).register_forward_hook(
            lambda module, args, out: (mixing_features(module, out[0], None, None), out[1])
        )
        whole.get_submodule(LAYER).register_full_backward_pre_hook(
            lambda module, gradients: passed.append(gradients[0])
        )
        whole(IDS, POSITIONS, MASK).sin().mean().backward()
        expected = {name: parameter.grad for name, parameter in whole.named_parameters()}

        mine = slice(dist.get_rank(), dist.get_rank() + 1)
        with FlexModel(
            wrapped, records, output_ranks="all", batch_dim={"attention_mask": None}
        ) as flex:
            assert next(flex.buffers(), None) is None
            flex.register_forward_hook(HookFunction(mlp, None, mixing_features))
            flex.register_full_backward_pre_hook(HookFunction(f"module.{LAYER}"))
            for one, edit in ((name, flipped), (f"module.{LAYER}.input_layernorm.weight", None)):
                flex.register_hook(HookFunction(one, None, edit))
            flex(IDS[mine], POSITIONS[mine], MASK).sin().mean().backward()
            distributed.finalize_model_grads([wrapped])
            assert_close(records[f"module.{LAYER}"], passed, **NEAR)
            assert_close(records[name], [expected[name]], **NEAR)
            expected[name] = flipped(None, expected[name], None, None)
            if is_sharded:
                with pytest.raises(ValueError, match=r"distributed optimizer.*register_hook"):
                    flex.get_module_gradient(name)
                return
            for one, gradient in expected.items():
                assert_close(flex.get_module_gradient(one), gradient, **NEAR)

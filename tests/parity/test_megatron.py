"""Megatron-core beyond the rows of the parity table: its own wrappers and mixtures of experts."""

import contextlib
import re
from unittest import mock

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


@contextlib.contextmanager
def all_to_all_on_cpu():
    """Its dispatcher copies the numbers of rows to the host on a stream of its own."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    def to_host(self, point, rows_of_experts=None):
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            value = getattr(self, name, None)
            if isinstance(value, torch.Tensor):
                setattr(self, name, value.tolist())
        return rows_of_experts

    with (
        mock.patch.object(torch.cuda, "Stream"),
        mock.patch.object(MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize", to_host),
    ):
        yield


@pytest.mark.parametrize("is_split", [True, False])
def test_experts_on_other_ranks(is_split):
    """What a block gives for its rows was not known along tp: its rows go to their experts and
    back. Split: sequence parallelism; else in eval mode, since Megatron refuses to train without.
    """
    with megatron() as state, all_to_all_on_cpu():
        size, rank, mlp = dist.get_world_size(), dist.get_rank(), f"{LAYER}.mlp"
        state.initialize_model_parallel()
        whole, records, passed = randomise(megatron_model(1, False, 4)).eval(), {}, []
        whole.get_submodule(mlp).register_forward_hook(
            lambda module, args, out: (mixing_features(module, out[0], None, None), out[1])
        )
        whole.get_submodule(LAYER).register_forward_hook(lambda *of: records.update(layer=of[2][0]))
        whole.get_submodule(LAYER).register_full_backward_pre_hook(
            lambda module, gradients: passed.append(gradients[0])
        )
        full = whole(IDS, POSITIONS, MASK)
        full.sin().sum().backward()
        layer = records.pop("layer").detach()

        state.destroy_model_parallel()
        settings = {"expert_model_parallel_size": size, "expert_tensor_parallel_size": 1}
        state.initialize_model_parallel(tensor_model_parallel_size=size, **settings)
        settings["moe_token_dispatcher_type"] = "alltoall"
        model = megatron_model(size, is_split, 4, **settings).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                of_whole = re.sub(
                    r"(?<=local_experts\.)\d", lambda n: str(2 * rank + int(n[0])), name
                )
                value = whole.get_parameter(of_whole)
                if value.shape != parameter.shape:
                    dim, parts = parameter.partition_dim, parameter.partition_stride
                    pieces = [part.chunk(size, dim)[rank] for part in value.chunk(parts, dim)]
                    value = torch.cat(pieces, dim)
                parameter.copy_(value)
        own = {"tensor_parallel_size": size, "output_ranks": "all"}
        with FlexModel(model, records, **own) as flex:
            flex.register_forward_hook(HookFunction(mlp, None, mixing_features))
            flex.register_forward_hook(HookFunction(LAYER))
            flex.register_full_backward_pre_hook(HookFunction(LAYER, output_name="gradient"))
            output = flex(IDS, POSITIONS, MASK)
            assert_close(output, full.chunk(size, -1)[rank], **NEAR)
            assert_close(records[LAYER], [layer], **NEAR)
            if is_split:  # what an exchange passes back to replicas has no contract
                output.sin().sum().backward()
                assert_close(records["gradient"], passed, **NEAR)
            with pytest.raises(ValueError, match="each rank has others by this name"):
                flex.get_module_parameter(f"{mlp}.experts.local_experts.0.linear_fc1.weight")

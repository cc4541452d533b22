"""A GPT of Megatron-core."""

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from frameworks.pair import ROUNDED, Pair, gathered, own_groups, randomise, tokens


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """What Megatron-core 0.16 needs to run without CUDA and TransformerEngine."""
    pytest.importorskip("megatron.core")
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer import torch_norm
    from megatron.core.transformer.moe import moe_utils

    new = torch_norm.WrappedTorchNorm.__new__

    def norm(cls, config, *args, **kwargs):
        # It refuses sequence parallelism since nobody would mark its parameters; done here.
        plain = copy.copy(config)
        plain.sequence_parallel = False
        made = new(cls, plain, *args, **kwargs)
        for parameter in made.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return made

    with contextlib.ExitStack() as stack:
        for patch in (
            mock.patch.object(torch.cuda, "current_device", return_value=torch.device("cpu")),
            mock.patch.object(CudaRNGStatesTracker, "fork", return_value=contextlib.nullcontext()),
            mock.patch.object(torch_norm.WrappedTorchNorm, "__new__", staticmethod(norm)),
            mock.patch.object(moe_utils, "te_general_gemm", None, create=True),
        ):
            stack.enter_context(patch)
        yield


def megatron_model(tp: int, sp: bool, experts: int | None, **settings) -> nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=8,
        num_query_groups=4,
        ffn_hidden_size=48,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
        sequence_parallel=sp,
        pipeline_dtype=torch.float32,
        params_dtype=torch.float32,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        num_moe_experts=experts,
        moe_router_topk=2,
        moe_ffn_hidden_size=48 if experts else None,
        **{"moe_token_dispatcher_type": "allgather", **settings},
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=experts, normalization="LayerNorm"),
        vocab_size=48,
        max_sequence_length=32,
        parallel_output=True,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )


@contextlib.contextmanager
def megatron(tmp_path: Path, sp: bool = False, experts: int | None = None) -> Iterator[Pair]:
    """Activations are [sequence, batch, width]; linear_fc1 holds a gate and an up projection."""
    pytest.importorskip("megatron.core")
    from megatron.core import parallel_state

    size, rank = dist.get_world_size(), dist.get_rank()

    def split(parameter):
        """Dim and number of interleaved parts of a sharded parameter; None where it is whole."""
        if not getattr(parameter, "tensor_model_parallel", False):
            return None
        return parameter.partition_dim, parameter.partition_stride

    def shard():
        model = megatron_model(size, sp, experts)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                full = oracle.get_parameter(name)
                if split(parameter) is not None:
                    dim, parts = split(parameter)
                    pieces = [part.chunk(size, dim)[rank] for part in full.chunk(parts, dim)]
                    full = torch.cat(pieces, dim)
                parameter.copy_(full)
        return model

    def full_gradients(model):
        full, group = {}, parallel_state.get_tensor_model_parallel_group()
        for name, parameter in model.named_parameters():
            grad = parameter.grad
            if grad is None:
                continue
            if split(parameter) is not None:
                dim, parts = split(parameter)
                pieces = [piece.chunk(parts, dim) for piece in gathered(grad, group)]
                grad = torch.cat([piece[part] for part in range(parts) for piece in pieces], dim)
            elif getattr(parameter, "sequence_parallel", False):
                grad = sum(gathered(grad, group))  # Megatron does it in finalize_model_grads
            full[name] = grad
        return full

    mlp = "decoder.layers.0.mlp"
    sites = {
        "outside": "embedding",
        "column output": "decoder.layers.0.self_attention.linear_qkv",
        "interleaved output": f"{mlp}.experts.local_experts.0.linear_fc1"
        if experts
        else f"{mlp}.linear_fc1",
        "inside attention": "decoder.layers.0.self_attention.core_attention",
        "row output": "decoder.layers.0.self_attention.linear_proj",
        "MLP": mlp,
        "norm": "decoder.layers.1.pre_mlp_layernorm",
        "layer": "decoder.layers.0",
        "root": "",
    }
    if experts:
        sites["experts"] = f"{mlp}.experts"
    ids = tokens(2, length=8)
    positions = torch.arange(8).expand(2, 8).contiguous()
    mask = torch.ones(1, 1, 8, 8).triu(1).bool()
    with megatron_on_cpu(), own_groups() as end:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
        oracle = randomise(megatron_model(1, False, experts))

        def start_tensor_parallel():
            parallel_state.destroy_model_parallel()
            end()
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)

        try:
            yield Pair(
                oracle,
                shard,
                (ids, positions, mask),
                sites,
                (
                    "embedding.word_embeddings.weight",
                    "decoder.layers.0.self_attention.linear_qkv.weight",
                    sites["interleaved output"] + ".weight",
                    "decoder.layers.0.self_attention.linear_proj.weight",
                    "decoder.layers.1.pre_mlp_layernorm.weight",
                ),
                full_gradients,
                inputs_of={sites["inside attention"]: (1, 2)},
                columns=lambda full: full.chunk(size, -1)[rank],
                sizes={"tensor_parallel_size": size},
                tolerance=ROUNDED,
                turned={"embedding.word_embeddings": (1, 0, 2)} if sp else {},
                start=start_tensor_parallel,
            )
        finally:
            parallel_state.destroy_model_parallel()

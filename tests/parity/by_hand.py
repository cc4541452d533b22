"""Models of frameworks that shard by hand, and the same models unsharded."""

import contextlib
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import models


def quietly(make):
    """Frameworks warn as they are imported and built; that is not what is tested."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


# ---- fairscale -----------------------------------------------------------------------------------


class Tokens(nn.Module):
    """Two embeddings, a column- and a row-parallel layer, a head whose output is gathered."""

    def __init__(self):
        super().__init__()
        self.embed, self.vocab = nn.Embedding(12, 8), nn.Embedding(12, 8)
        self.norm = nn.LayerNorm(8)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 12)

    def forward(self, tokens):
        x = self.norm(self.embed(tokens) + self.vocab(tokens))
        return self.head(x + self.down(self.up(x).tanh()))


def fairscale_tokens(model):
    """``model``, a ``Tokens``, over all ranks with fairscale's layers."""
    layers = pytest.importorskip("fairscale.nn.model_parallel.layers")
    from fairscale.nn.model_parallel import initialize

    if not initialize.model_parallel_is_initialized():
        initialize.initialize_model_parallel(dist.get_world_size())
    sharded = models.seeded(Tokens).double()
    made = {
        "embed": (layers.ParallelEmbedding(12, 8), 1),
        "vocab": (layers.VocabParallelEmbedding(12, 8), 0),
        "up": (layers.ColumnParallelLinear(8, 16, gather_output=False), 0),
        "down": (layers.RowParallelLinear(16, 8, input_is_parallel=True), 1),
        "head": (layers.ColumnParallelLinear(8, 12, gather_output=True), 0),
    }
    group = initialize.get_model_parallel_group()
    for name, (layer, dim) in made.items():
        layer.double()
        for leaf, parameter in layer.named_parameters():
            full = model.get_parameter(f"{name}.{leaf}").detach()
            split = dim < full.ndim and not (leaf == "bias" and dim == 1)
            parameter.data.copy_(models.my_part(full, dim, group) if split else full)
        setattr(sharded, name, layer)
    sharded.norm.load_state_dict(model.norm.state_dict())
    return sharded


# ---- Megatron ------------------------------------------------------------------------------------


@contextlib.contextmanager
def megatron():
    """Megatron on CPUs, inside. Its parallel state is one for the process, so models of two tensor
    parallel sizes are run one after the other.
    """
    pytest.importorskip("megatron.core")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        quietly(lambda: _patch_megatron(patch))
        yield
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


def _patch_megatron(patch):
    from megatron.core.tensor_parallel import random

    tracker = random.CudaRNGStatesTracker
    patch.setattr(tracker, "fork", lambda self, name=None: contextlib.nullcontext())


def megatron_gpt(tp_size):
    """A gated GPT with biases and learned positions, over ``tp_size`` ranks; inside
    `megatron`.
    """
    return quietly(lambda: _megatron_gpt(tp_size))


def _megatron_gpt(tp_size):
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp_size)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=24,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp_size,
        params_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="LayerNorm"),
        vocab_size=32,
        max_sequence_length=8,
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=False,
        parallel_output=False,
    )
    for index, (name, parameter) in enumerate(model.named_parameters()):
        parameter.data.copy_(megatron_part(name, parameter, tp_size, seed=100 + index))
    return model


def megatron_part(name, parameter, tp_size, seed):
    """This rank's part of a full random tensor, cut the way that Megatron's documents say."""
    rows = {"word_embeddings", "linear_qkv", "linear_fc1", "output_layer"}
    layer, leaf = name.split(".")[-2:]
    columns = layer in {"linear_proj", "linear_fc2"} and leaf == "weight"
    shape = list(parameter.shape)
    if layer in rows or columns:
        shape[1 if columns else 0] *= tp_size
    full = 0.3 * models.random(*shape, seed=seed, dtype=torch.float32)
    rank = dist.get_rank() % tp_size
    if layer == "linear_fc1":  # a piece of the gate, then a piece of what is gated
        gate, up = full.chunk(2)
        return torch.cat([gate.chunk(tp_size)[rank], up.chunk(tp_size)[rank]])
    if layer in rows or columns:
        return full.chunk(tp_size, 1 if columns else 0)[rank]
    return full

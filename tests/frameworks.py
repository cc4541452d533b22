"""Tiny models sharded by real frameworks, each beside the unsharded model with the same weights.

But for what splits models into stages, nothing here uses flex_model: the parity table compares it
with what is made here. Every framework
runs on CPU and gloo; a package that is not installed is asked for with ``pytest.importorskip``.
"""

import contextlib
import copy
import functools
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import models

EXACT, ROUNDED = 1e-9, 2e-5  # float64; float32, or models that compute parts in float32


def call(model, inputs, keywords) -> torch.Tensor:
    return tensor_of(model(*inputs, **keywords))


def apply(value: torch.Tensor, edit: Callable | None) -> tuple:
    """What a hook of one process records of a tensor, and what it returns."""
    record = value.detach().clone()
    if edit is None:
        return record, None
    given = value.clone()
    edited = edit(None, given, Namespace(), {})
    return record, given if edited is None else edited


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@dataclass
class Pair:
    """An unsharded model, and how to make the sharded one from its weights.

    Attributes:
        oracle: To be run before `start`.
        start: Brings the framework's global state from the oracle's to the sharded model's.
        shard: Makes this rank's model, afresh each time; collective.
        inputs: Of the whole batch.
        batch_dims: Which dim of each input is the batch; None where all rows share it. Dim 0 where
            nothing is said, as in ``keywords``.
        output_batch_dim: Of the model's output.
        first: Inputs of a run before the one that is compared, with the same hooks.
        sites: Where edits are made: module names by what they are.
        parameters: Whose gradients are edited.
        outputs, inputs_of: Further tensors of modules that are read: ``{name: indices}``.
        dp, dp_rank: Over how many ranks the rows of the batch are split, and which part is ours.
        columns: The part of a full output that this rank's output holds.
        sizes: What FlexModel must be told where the model does not say it.
        full_gradients: By the oracle's parameter names, of the sharded model; collective.
        turned: Sites whose dims the sharded model has in another order: ``{name: permutation}``.
        mixes_rows: Whether edits see the whole batch, so may mix its rows.
        backward: Whether there is one; else the model runs under ``inference_mode``.
        forward: ``(model, inputs, keywords) -> output``, where it is not a call of the model.
        run: ``(flex, inputs, keywords, targets) -> output``: forward and backward of the sharded
            model, where it is not `forward` and a sum.
        session: ``(register, records, targets) -> (output, gradients)``: runs the sharded model in
            a loop that wraps it by itself, and then calls ``register(flex)``.
        call_hook: What an oracle's hook records and returns, from its tensor and an edit.
        masked: A tensor of the whole batch without what pads it.
        state: States layouts to the FlexModel.
        without_gradients: Parts of the names of parameters whose gradients can't be read.
    """

    oracle: nn.Module
    shard: Callable[[], nn.Module]
    inputs: tuple[torch.Tensor, ...]
    sites: dict[str, str]
    parameters: tuple[str, ...]
    full_gradients: Callable[[nn.Module], dict[str, torch.Tensor]]
    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    inputs_of: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dp: int = 1
    dp_rank: int = 0
    columns: Callable[[torch.Tensor], torch.Tensor] = lambda full: full
    sizes: dict[str, int] = field(default_factory=dict)
    keywords: dict[str, object] = field(default_factory=dict)
    tolerance: float = EXACT
    turned: dict[str, tuple[int, ...]] = field(default_factory=dict)
    start: Callable[[], None] = lambda: None
    mixes_rows: bool = True
    backward: bool = True
    forward: Callable[..., torch.Tensor] = call
    run: Callable[..., torch.Tensor] | None = None
    session: Callable[..., tuple[torch.Tensor, dict]] | None = None
    call_hook: Callable[[torch.Tensor, Callable | None], tuple] = apply
    masked: Callable[[torch.Tensor], torch.Tensor] = lambda full: full
    state: Callable[[object], object] = lambda flex: None
    without_gradients: tuple[str, ...] = ()
    batch_dims: tuple[int | None, ...] = ()
    output_batch_dim: int = 0
    first: tuple[torch.Tensor, ...] = ()

    def has_no_gradient(self, name: str) -> bool:
        return any(part in name for part in self.without_gradients)

    def run_sharded(self, flex, targets: torch.Tensor) -> torch.Tensor:
        """Run forward and backward on this rank's part of the batch. Collective."""
        inputs, keywords = self.own_inputs(self.inputs), self.own_keywords()
        if self.run is not None:
            return self.run(flex, inputs, keywords, targets)
        if not self.backward:
            with torch.inference_mode():
                return self.forward(flex, inputs, keywords)
        output = self.forward(flex, inputs, keywords)
        (output * targets).sum().backward()
        return output

    def rows(self, full, dim: int | None = 0):
        """This rank's rows of a tensor; anything else as it is."""
        if self.dp == 1 or dim is None or not isinstance(full, torch.Tensor):
            return full
        return full.chunk(self.dp, dim)[self.dp_rank]

    def own_inputs(self, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        dims = self.batch_dims or (0,) * len(inputs)
        return [self.rows(value, dim) for value, dim in zip(inputs, dims, strict=True)]

    def own_keywords(self) -> dict[str, object]:
        return {name: self.rows(value) for name, value in self.keywords.items()}

    def own_output(self, full: torch.Tensor) -> torch.Tensor:
        return self.columns(self.rows(full, self.output_batch_dim))


@dataclass(frozen=True)
class Case:
    """One row of the table: ``build(tmp_path)`` is a context with a `Pair`; collective."""

    framework: str
    model: str
    ranks: int
    build: Callable[[Path], contextlib.AbstractContextManager[Pair]]
    when: str = "make parity"

    @property
    def marks(self) -> list[str]:
        """What keeps it out of ``make test``, and out of ``make check``."""
        return {"make test": [], "make check": ["slow"]}.get(self.when, ["slow", "table"])


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Frameworks warn of much; flex_model's own warnings stay errors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(?!flex_model)")
        yield


def tensor_of(output):
    """The tensor of a model's output that the loss is made of, as this rank holds it."""
    output = getattr(output, "logits", output)
    return output.to_local() if isinstance(output, DTensor) else output


def randomise(model: nn.Module, seed: int = 7) -> nn.Module:
    """Weights that show what is wrong: none is zero or one, no two layers are alike."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            mean = 1.0 if parameter.ndim == 1 else 0.0
            std = 0.1 if parameter.ndim == 1 else 0.2
            parameter.normal_(mean, std, generator=generator)
    return model


def tokens(rows: int, length: int = 6, vocabulary: int = 48) -> torch.Tensor:
    generator = torch.Generator().manual_seed(11)
    return torch.randint(1, vocabulary, (rows, length), generator=generator)


@contextlib.contextmanager
def own_groups() -> Iterator[Callable[[], None]]:
    """Process groups made inside are destroyed at the end, or by what this gives.

    Megatron makes twenty at a time, with their threads, and leaves most of them.
    """
    made, new_group = [], dist.new_group

    def keep(*args, **kwargs):
        made.append(new_group(*args, **kwargs))
        return made[-1]

    def end():
        for group in made:
            with contextlib.suppress(ValueError):  # not a member, or destroyed already
                dist.destroy_process_group(group)
        made.clear()

    try:
        with mock.patch.object(dist, "new_group", keep):
            yield end
    finally:
        end()


# ---- Gradients in full, without flex_model -------------------------------------------------------


def full_tensor(value: torch.Tensor) -> torch.Tensor:
    """A DTensor in full; a plain tensor is as it is. Collective over its mesh."""
    if not isinstance(value, DTensor):
        return value
    (placement, *others) = value.placements
    parts = getattr(placement, "split_factor", 1)
    if parts == 1 or others:
        return value.full_tensor()
    # torch refuses a lone _StridedShard: each rank's piece of each interleaved part
    group, dim = value.device_mesh.get_group(), placement.dim
    pieces = [piece.chunk(parts, dim) for piece in gathered(value.to_local(), group)]
    return torch.cat([piece[part] for part in range(parts) for piece in pieces], dim)


def gathered(part: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Every rank's tensor, of any shape. Collective."""
    parts = [None] * group.size()
    dist.all_gather_object(parts, part.detach(), group=group)
    return parts


def clean(name: str) -> str:
    for word in ("_fsdp_wrapped_module.", "_orig_mod."):
        name = name.replace(word, "")
    return name.removeprefix("module.")


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Of DTensor parameters, and of plain ones that are whole."""
    return {
        clean(name): full_tensor(parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


# ---- torch.distributed.tensor.parallel -----------------------------------------------------------


class Core(nn.Module):
    """What attention does between its projections; (batch, heads, length, head_size)."""

    def forward(self, q, k, v):
        times = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        return (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1) @ v


class DecoderAttention(nn.Module):
    def __init__(self, width, heads, kv_heads):
        super().__init__()
        self.head_size = width // heads
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, kv_heads * self.head_size, bias=False)
        self.wv = nn.Linear(width, kv_heads * self.head_size, bias=False)
        self.core = Core()
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x):
        batch, length, _ = x.shape
        split = (batch, length, -1, self.head_size)
        q, k, v = (layer(x).view(split).transpose(1, 2) for layer in (self.wq, self.wk, self.wv))
        return self.wo(self.core(q, k, v).transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.act = nn.SiLU()
        self.w2 = nn.Linear(hidden, width)

    def forward(self, x):
        return self.w2(self.act(self.w1(x)) * self.w3(x))


class DecoderLayer(nn.Module):
    def __init__(self, width, heads, kv_heads, hidden):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = DecoderAttention(width, heads, kv_heads)
        self.feed_forward = FeedForward(width, hidden)

    def forward(self, x):
        x = x + self.attention(self.n1(x))
        return x + self.feed_forward(self.n2(x))


class Decoder(nn.Module):
    """torchtitan's Llama in small: 8 heads over 4 key-value heads, a gated MLP."""

    def __init__(self, width=32, heads=8, kv_heads=4, hidden=64, vocabulary=48, num_layers=2):
        super().__init__()
        self.tok = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            DecoderLayer(width, heads, kv_heads, hidden) for _ in range(num_layers)
        )
        self.norm = nn.RMSNorm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        x = self.tok(ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


DECODER_SITES = {
    "outside": "tok",
    "column output": "layers.0.attention.wk",
    "act_fn": "layers.0.feed_forward.act",
    "inside attention": "layers.0.attention.core",
    "row output": "layers.0.attention.wo",
    "norm": "layers.1.n2",
    "layer": "layers.0",
    "root": "",
}
DECODER_INPUTS = {f"layers.{i}.attention.core": (1, 2) for i in (0, 1)}  # keys and values
DECODER_PARAMETERS = (
    "tok.weight",
    "layers.0.attention.wk.weight",
    "layers.0.feed_forward.w1.bias",
    "layers.1.feed_forward.w2.weight",
    "layers.1.n2.weight",
)


def decoder() -> Decoder:
    return randomise(Decoder().double())


def decoder_plan(kind: str) -> tuple[dict, dict]:
    """For the model and for each layer. "tp": activations between layers are whole; "sp":
    torchtitan's, they are split along the sequence; "dtensor": as "tp", the MLP's inside as
    DTensors.
    """
    columns = ["attention.wq", "attention.wk", "attention.wv"]
    mlp_columns = ["feed_forward.w1", "feed_forward.w3"]
    rows = ["attention.wo", "feed_forward.w2"]
    if kind == "sp":
        model = {
            "tok": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1)),
        }
        whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        layer = {"n1": SequenceParallel(), "n2": SequenceParallel()}
        layer |= {"attention": whole, "feed_forward": copy.deepcopy(whole)}
        layer |= {name: ColwiseParallel() for name in columns + mlp_columns}
        layer |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in rows}
        return model, layer
    model = {
        "tok": RowwiseParallel(input_layouts=Replicate()),
        "output": ColwiseParallel(output_layouts=Replicate()),
    }
    layer = {name: ColwiseParallel() for name in columns}
    layer |= {name: ColwiseParallel(use_local_output=kind != "dtensor") for name in mlp_columns}
    layer |= {name: RowwiseParallel() for name in rows}
    return model, layer


def parallelized(model: Decoder, kind: str, mesh) -> Decoder:
    model = copy.deepcopy(model)
    of_model, of_layer = decoder_plan(kind)
    parallelize_module(model, mesh, of_model)
    for layer in model.layers:
        parallelize_module(layer, mesh, of_layer)
    return model


@contextlib.contextmanager
def native(tmp_path: Path, kind: str) -> Iterator[Pair]:
    model, size = decoder(), dist.get_world_size()
    mesh = models.mesh(1, size)["tp"]
    ids = tokens(2, length=8)
    pair = Pair(
        model,
        functools.partial(parallelized, model, kind, mesh),
        (ids,),
        DECODER_SITES,
        DECODER_PARAMETERS,
        gradients,
        inputs_of=DECODER_INPUTS,
    )
    if kind == "sp":
        pair.columns = lambda full: full.chunk(size, -1)[dist.get_rank()]
    yield pair


# ---- torch.distributed.pipelining ----------------------------------------------------------------


@contextlib.contextmanager
def pipelined(
    tmp_path: Path, schedule: str, family: str = "decoder", mode: str = "full", tp: int = 1
) -> Iterator[Pair]:
    """A model in stages, one or two a rank. In "micro" mode edits see micro-batches."""
    from torch.distributed import pipelining

    from flex_model.pipelining import PassThrough, SplitPoint, pipeline

    kind = getattr(pipelining, schedule)
    ranks = dist.get_world_size() // tp
    is_single = schedule in ("ScheduleGPipe", "Schedule1F1B")
    num_stages = ranks if is_single else 2 * ranks
    mesh = init_device_mesh("cpu", (ranks, tp), mesh_dim_names=("pp", "tp"))
    place, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    places = [place] if is_single else [place, place + ranks]
    if schedule in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"):
        places = [place, num_stages - 1 - place]
    number = 2 * num_stages
    ids = tokens(number, length=8)
    if family == "llama":
        model, sites, parameters = huggingface_model("llama").double(), HF_SITES, HF_PARAMETERS
        model.config.use_cache = False
        blocks, block_of = "model.layers", num_stages // 2
    else:
        model = randomise(Decoder(num_layers=max(2, num_stages)).double())
        sites, parameters = DECODER_SITES, DECODER_PARAMETERS

    def stage_of(index):
        if family == "llama":
            splits = {
                f"{blocks}.{i * block_of}": SplitPoint.BEGINNING for i in range(1, num_stages)
            }
            pipe = pipeline(copy.deepcopy(model), (ids[:2],), split_spec=splits)
            return pipe.build_stage(index, torch.device("cpu"), group)
        part = copy.deepcopy(model)
        for i in range(len(part.layers)):
            if i * num_stages // len(part.layers) != index:
                part.layers[i] = PassThrough()
        if index > 0:
            part.tok = PassThrough()
        if index < num_stages - 1:
            part.norm, part.output = PassThrough(), PassThrough()
        if tp > 1:
            of_model, of_layer = decoder_plan("tp")
            present = {
                n: plan for n, plan in of_model.items() if list(part.get_submodule(n).parameters())
            }
            parallelize_module(part, mesh["tp"], present)
            for layer in part.layers:
                if not isinstance(layer, PassThrough):
                    parallelize_module(layer, mesh["tp"], of_layer)
        return pipelining.PipelineStage(part, index, num_stages, torch.device("cpu"), group=group)

    def shard():
        stages = [stage_of(index) for index in places]
        return kind(
            stages[0] if is_single else stages,
            number,
            loss_fn=lambda output, target: (output * target).sum(),
            scale_grads=False,
        )

    def of_all_ranks(module):
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, gradients(module))
        return {name: grad for of_rank in found for name, grad in of_rank.items()}

    yield Pair(
        model,
        shard,
        (ids,),
        sites,
        parameters,
        of_all_ranks,
        inputs_of=DECODER_INPUTS if family == "decoder" else {},
        sizes={"batch_mode": mode, "return_on": "all"},
        mixes_rows=mode == "full",
        run=lambda flex, inputs, keywords, targets: flex(*inputs, target=targets, **keywords),
    )


# ---- Data parallel -------------------------------------------------------------------------------


@contextlib.contextmanager
def data_parallel(tmp_path: Path, kind: str) -> Iterator[Pair]:
    """The decoder on parts of a batch, under torch's own wrappers."""
    model, size = decoder(), dist.get_world_size()

    def shard():
        sharded = copy.deepcopy(model)
        if kind == "ddp":
            return DistributedDataParallel(sharded)
        if kind.startswith("fsdp1"):
            return FullyShardedDataParallel(
                sharded,
                auto_wrap_policy=wrap_layers,
                use_orig_params=kind == "fsdp1 orig",
                device_id=torch.device("cpu"),
            )
        mesh = models.mesh(size, 1)["dp"] if kind == "fsdp2" else replicas_and_shards()
        for layer in sharded.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(sharded, mesh=mesh)

    yield Pair(
        model,
        shard,
        (tokens(2 * size, length=8),),
        DECODER_SITES,
        DECODER_PARAMETERS,
        fsdp1_gradients if kind.startswith("fsdp1") else gradients,
        inputs_of=DECODER_INPUTS,
        dp=size,
        dp_rank=dist.get_rank(),
    )


def wrap_layers(module, recurse, nonwrapped_numel):
    return recurse or isinstance(module, DecoderLayer)


@functools.cache
def replicas_and_shards():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))


def fsdp1_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """What ``summon_full_params`` shows while the gradients stand in for the parameters."""
    kept = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
    with torch.no_grad():
        for parameter, _ in kept:
            if parameter.grad is not None:  # None: another rank has all of it
                parameter.copy_(parameter.grad)
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        full = {clean(name): value.detach().clone() for name, value in model.named_parameters()}
    with torch.no_grad():
        for parameter, value in kept:
            parameter.copy_(value)
    return full


@contextlib.contextmanager
def tensor_and_data_parallel(tmp_path: Path, kind: str) -> Iterator[Pair]:
    """The decoder, tensor parallel on pairs of ranks, FSDP2 over the pairs."""
    model, mesh = decoder(), models.mesh(2, 2)

    def shard():
        sharded = parallelized(model, kind, mesh["tp"])
        for layer in sharded.layers:
            fully_shard(layer, mesh=mesh["dp"])
        return fully_shard(sharded, mesh=mesh["dp"])

    pair = Pair(
        model,
        shard,
        (tokens(4, length=8),),
        DECODER_SITES,
        DECODER_PARAMETERS,
        gradients,
        inputs_of=DECODER_INPUTS,
        dp=2,
        dp_rank=dist.get_rank() // 2,
    )
    if kind == "sp":
        pair.columns = lambda full: full.chunk(2, -1)[dist.get_rank() % 2]
    yield pair


@contextlib.contextmanager
def gpt2_ddp(tmp_path: Path) -> Iterator[Pair]:
    """Its positional embedding has no batch dim: all data-parallel ranks share it."""
    model, size = randomise(models.gpt2()), dist.get_world_size()
    yield Pair(
        model,
        lambda: DistributedDataParallel(copy.deepcopy(model)),
        (tokens(2 * size),),
        {
            "outside": "transformer.wte",
            "shared by all rows": "transformer.wpe",
            "column output": "transformer.h.0.attn.c_attn",
            "act_fn": "transformer.h.0.mlp.act",
            "row output": "transformer.h.0.attn.c_proj",
            "norm": "transformer.h.1.ln_2",
            "layer": "transformer.h.0",
            "root": "",
        },
        (
            "transformer.wpe.weight",
            "transformer.h.0.attn.c_attn.weight",
            "transformer.h.1.ln_2.bias",
        ),
        gradients,
        outputs={"transformer.h.0.attn": (1,)},
        dp=size,
        dp_rank=dist.get_rank(),
        keywords={"use_cache": False},
        tolerance=ROUNDED,
    )


# ---- Hugging Face --------------------------------------------------------------------------------

HF_MODELS = {
    "llama": ("Llama", {}),
    "llama 4 layers": ("Llama", {"num_hidden_layers": 4}),
    "llama uneven": ("Llama", {"intermediate_size": 97}),
    "qwen2": ("Qwen2", {}),
    "qwen3-moe": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "deepseek-v3": (
        "DeepseekV3",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "num_key_value_heads": 8,
            "first_k_dense_replace": 1,
        },
    ),
    "llama two heads": ("Llama", {"num_attention_heads": 2, "num_key_value_heads": 2}),
}
HF_SITES = {
    "outside": "model.embed_tokens",
    "column output": "model.layers.0.self_attn.k_proj",
    "act_fn": "model.layers.0.mlp.act_fn",
    "row output": "model.layers.0.self_attn.o_proj",  # its input is inside attention
    "norm": "model.layers.1.post_attention_layernorm",
    "layer": "model.layers.0",
    "root": "",
}
HF_PARAMETERS = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.1.post_attention_layernorm.weight",
)


def huggingface_model(name: str) -> nn.Module:
    import transformers

    family, settings = HF_MODELS[name]
    config = getattr(transformers, f"{family}Config")(
        **{
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "intermediate_size": 96,
            "vocab_size": 48,
            "max_position_embeddings": 64,
            "tie_word_embeddings": False,
        }
        | settings
    )
    return randomise(transformers.AutoModelForCausalLM.from_config(config)).eval()


@contextlib.contextmanager
def huggingface(
    tmp_path: Path, name: str, tp: int = 1, fsdp: int = 1, pp: int = 1
) -> Iterator[Pair]:
    """``from_pretrained`` with a plan, as a user loads a model."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    is_mixture = name in ("qwen3-moe", "mixtral", "deepseek-v3")
    dtype = torch.float32 if is_mixture else torch.float64
    folder = tmp_path / "model"
    if dist.get_rank() == 0:
        huggingface_model(name).save_pretrained(folder)
    dist.barrier()
    sizes = {"tp_size": tp, "fsdp_size": fsdp, "pp_size": pp}
    sizes = {name: size for name, size in sizes.items() if size > 1}

    def load(**settings):
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", **settings
        )
        return model.eval()

    sites, parameters = HF_SITES, HF_PARAMETERS
    if is_mixture:
        experts = f"model.layers.{int(name == 'deepseek-v3')}.mlp.experts"  # its first one has none
        sites = sites | {"act_fn": f"{experts}.act_fn", "experts": experts}
        parameters += (f"{experts}.gate_up_proj",)
    if name == "deepseek-v3":  # keys and values are made of one latent tensor
        sites["column output"] = "model.layers.0.self_attn.kv_b_proj"
        parameters = tuple(one.replace("k_proj", "kv_b_proj") for one in parameters)
    if name == "qwen3-moe":
        sites = sites | {"inside attention": "model.layers.0.self_attn.k_norm"}
    yield Pair(
        load(),
        lambda: load(distributed_config=DistributedConfig(**sizes)),
        (tokens(2 * fsdp),),
        sites,
        parameters,
        gradients,
        outputs={f"model.layers.{i}.self_attn": (1,) for i in (0, 1)},
        dp=fsdp,
        dp_rank=dist.get_rank() // tp,
        keywords={"use_cache": False},
        tolerance=ROUNDED,
        backward=pp == 1,
    )


# ---- fairscale -----------------------------------------------------------------------------------


class FairscaleOracle(nn.Module):
    """Two embeddings, an MLP and a head: each of fairscale's layers once."""

    def __init__(self, width=32, hidden=64, vocabulary=48):
        super().__init__()
        self.emb, self.vemb = nn.Embedding(vocabulary, width), nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.act = nn.GELU()
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        x = self.emb(ids) + self.vemb(ids)
        x = x + self.down(self.act(self.up(self.norm(x))))
        return self.head(x)


@contextlib.contextmanager
def fairscale(tmp_path: Path, tp: int) -> Iterator[Pair]:
    """Layers that shard by hand, plain tensors; more ranks than ``tp`` are replicas under DDP."""
    parallel = pytest.importorskip("fairscale.nn.model_parallel")
    layers = pytest.importorskip("fairscale.nn.model_parallel.layers")
    dp = dist.get_world_size() // tp
    oracle = randomise(FairscaleOracle().double())
    groups = contextlib.ExitStack()
    groups.enter_context(own_groups())
    with contextlib.redirect_stdout(None):
        parallel.initialize_model_parallel(tp)
    group = parallel.get_model_parallel_group()

    def split_dim(name, parameter):
        full = oracle.get_parameter(name).shape
        return next((d for d, n in enumerate(parameter.shape) if n != full[d]), None)

    def shard():
        model = FairscaleOracle()
        model.emb = layers.ParallelEmbedding(48, 32)
        model.vemb = layers.VocabParallelEmbedding(48, 32)
        model.up = layers.ColumnParallelLinear(32, 64, gather_output=False)
        model.down = layers.RowParallelLinear(64, 32, input_is_parallel=True)
        model.head = layers.ColumnParallelLinear(32, 48, gather_output=True)
        model.double()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                dim, full = split_dim(name, parameter), oracle.get_parameter(name)
                parameter.copy_(full if dim is None else full.chunk(tp, dim)[group.rank()])
        if dp == 1:
            return model
        return DistributedDataParallel(model, process_group=parallel.get_data_parallel_group())

    def full_gradients(model):
        full = {}
        for name, parameter in model.named_parameters():
            name, dim = clean(name), split_dim(clean(name), parameter)
            grad = parameter.grad
            full[name] = grad if dim is None else torch.cat(gathered(grad, group), dim)
        return full

    try:
        yield Pair(
            oracle,
            shard,
            (tokens(2 * dp),),
            {
                "outside": "emb",
                "column output": "up",
                "act_fn": "act",
                "row output": "down",
                "norm": "norm",
                "gathered output": "head",
                "root": "",
            },
            ("emb.weight", "up.weight", "up.bias", "down.weight", "norm.weight"),
            full_gradients,
            dp=dp,
            dp_rank=dist.get_rank() // tp,
            sizes={"tensor_parallel_size": tp, "data_parallel_size": dp},
        )
    finally:
        parallel.destroy_model_parallel()
        groups.close()


# ---- Megatron-core -------------------------------------------------------------------------------


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


def megatron_model(tp: int, sp: bool, experts: int | None) -> nn.Module:
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
        moe_token_dispatcher_type="allgather",
        moe_ffn_hidden_size=48 if experts else None,
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


# ---- What looks alike on all ranks ---------------------------------------------------------------


class Masked(nn.Module):
    """Attention with positions (length,) and a mask (length, length) that all rows share."""

    def __init__(self, width=16, vocabulary=48, length=8):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.scores, self.act = nn.Softmax(-1), nn.GELU()
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids, positions, mask):
        x = self.tok(ids) + self.pos(positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = self.scores(q @ k.transpose(-1, -2) + mask)
        return self.head(self.act(x + self.out(weights @ v)))


@contextlib.contextmanager
def masked(tmp_path: Path) -> Iterator[Pair]:
    """The mask and the positions are as long as a rank's part of the batch: that they are shared
    is stated.
    """
    model, size, length = randomise(Masked().double()), dist.get_world_size(), 4
    yield Pair(
        model,
        lambda: DistributedDataParallel(copy.deepcopy(model)),
        (
            tokens(length * size, length=length),
            torch.arange(length),
            torch.full((length, length), -1e9, dtype=torch.float64).triu(1),
        ),
        {"shared": "pos", "fused": "qkv", "inside attention": "scores", "root": ""},
        ("pos.weight", "qkv.weight", "out.bias"),
        gradients,
        dp=size,
        dp_rank=dist.get_rank(),
        batch_dims=(0, None, None),
        sizes={"batch_dim": {"positions": None, "mask": None}},
    )


@contextlib.contextmanager
def positions_first(tmp_path: Path) -> Iterator[Pair]:
    """torch's own encoder, whose activations are (length, batch, width)."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model, size = randomise(encoder.double()), dist.get_world_size()
    yield Pair(
        model,
        lambda: DistributedDataParallel(copy.deepcopy(model)),
        (models.random(6, 2 * size, 32),),
        {"MLP": "layers.0.linear1", "norm": "layers.1.norm1", "layer": "layers.0", "root": ""},
        ("layers.0.self_attn.in_proj_weight", "layers.1.linear2.bias", "layers.1.norm2.weight"),
        gradients,
        outputs={f"layers.{i}.self_attn": () for i in (0, 1)},
        dp=size,
        dp_rank=dist.get_rank(),
        batch_dims=(1,),
        output_batch_dim=1,
        sizes={"batch_dim": 1},
    )


@contextlib.contextmanager
def bert(tmp_path: Path, kind: str) -> Iterator[Pair]:
    """Its token types and positions are buffers of one row; a mask pads each row's end."""
    import transformers

    config = transformers.BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        vocab_size=48,
        max_position_embeddings=16,
        attn_implementation="eager",
    )
    model = randomise(transformers.BertForMaskedLM(config).double()).eval()
    size = dist.get_world_size()

    def shard():
        sharded = copy.deepcopy(model)
        if kind == "ddp":
            return DistributedDataParallel(sharded)
        mesh = models.mesh(size, 1)["dp"]
        for layer in sharded.bert.encoder.layer:
            fully_shard(layer, mesh=mesh)
        return fully_shard(sharded, mesh=mesh)

    ids = tokens(2 * size)
    lengths = torch.arange(len(ids)) % 3 + 3
    yield Pair(
        model,
        shard,
        (ids,),
        {
            "outside": "bert.embeddings.word_embeddings",
            "shared by all rows": "bert.embeddings.token_type_embeddings",
            "column output": "bert.encoder.layer.0.attention.self.query",
            "row output": "bert.encoder.layer.0.attention.output.dense",
            "norm": "bert.encoder.layer.1.output.LayerNorm",
            "root": "",
        },
        (
            "bert.embeddings.token_type_embeddings.weight",
            "bert.encoder.layer.0.attention.self.query.weight",
            "bert.encoder.layer.1.output.LayerNorm.bias",
        ),
        gradients,
        dp=size,
        dp_rank=dist.get_rank(),
        keywords={"attention_mask": (torch.arange(6) < lengths[:, None]).long()},
        tolerance=ROUNDED,
    )


@contextlib.contextmanager
def changed(tmp_path: Path, build: Callable, zeros: tuple[str, ...] = (), **changes):
    """A row as another, but for what it is run with. ``zeros``: modules whose weights are zero in
    the oracle, which the sharded model is copied from.
    """
    with build(tmp_path) as pair:
        for name, parameter in pair.oracle.named_parameters():
            if any(part in name for part in zeros):
                parameter.data.zero_()
        yield replace(pair, **changes)


# ---- The rows of the table -----------------------------------------------------------------------

HF = "Hugging Face tp_plan"
HF_PP = "Hugging Face pp_size"
NATIVE = "parallelize_module"
P = functools.partial

PP = "torch.distributed.pipelining"
CASES = {
    "hf-llama-2": Case(HF, "Llama", 2, P(huggingface, name="llama", tp=2), when="make test"),
    "hf-llama-uneven-2": Case(HF, "Llama, MLP 97", 2, P(huggingface, name="llama uneven", tp=2)),
    "hf-qwen2-2": Case(HF, "Qwen2", 2, P(huggingface, name="qwen2", tp=2)),
    "hf-qwen3moe-2": Case(HF, "Qwen3-MoE", 2, P(huggingface, name="qwen3-moe", tp=2)),
    "hf-mixtral-2": Case(HF, "Mixtral", 2, P(huggingface, name="mixtral", tp=2)),
    "hf-deepseek-v3-2": Case(HF, "DeepSeek-V3", 2, P(huggingface, name="deepseek-v3", tp=2)),
    "hf-llama-4": Case(HF, "Llama", 4, P(huggingface, name="llama", tp=4)),
    "hf-pp-2": Case(HF_PP, "Llama", 2, P(huggingface, name="llama", pp=2), when="make check"),
    "hf-pp-qwen3moe-2": Case(HF_PP, "Qwen3-MoE", 2, P(huggingface, name="qwen3-moe", pp=2)),
    "hf-pp-4": Case(HF_PP, "Llama, 4 layers", 4, P(huggingface, name="llama 4 layers", pp=4)),
    "hf-tp-fsdp-4": Case(
        "Hugging Face tp 2 x fsdp 2", "Llama", 4, P(huggingface, name="llama", tp=2, fsdp=2)
    ),
    "native-tp-2": Case(NATIVE + ", tp", "decoder", 2, P(native, kind="tp")),
    "native-sp-2": Case(
        NATIVE + ", sequence parallel", "decoder", 2, P(native, kind="sp"), when="make test"
    ),
    "native-dtensor-2": Case(
        NATIVE + ", use_local_output=False", "decoder", 2, P(native, kind="dtensor")
    ),
    "native-tp-4": Case(NATIVE + ", tp", "decoder", 4, P(native, kind="tp")),
    "native-sp-4": Case(NATIVE + ", sequence parallel", "decoder", 4, P(native, kind="sp")),
    "fairscale-2": Case("fairscale", "MLP", 2, P(fairscale, tp=2), when="make check"),
    "fairscale-4": Case("fairscale", "MLP", 4, P(fairscale, tp=4)),
    "fairscale-ddp-4": Case("fairscale tp 2 x DDP 2", "MLP", 4, P(fairscale, tp=2)),
    "megatron-tp-2": Case("Megatron-core", "GPT", 2, megatron),
    "megatron-sp-2": Case("Megatron-core, sequence parallel", "GPT", 2, P(megatron, sp=True)),
    "megatron-moe-2": Case(
        "Megatron-core, sequence parallel", "GPT MoE", 2, P(megatron, sp=True, experts=4)
    ),
    "pp-gpipe-2": Case(PP + ", GPipe", "decoder", 2, P(pipelined, schedule="ScheduleGPipe")),
    "pp-1f1b-micro-2": Case(
        PP + ", 1F1B, micro-batches",
        "decoder",
        2,
        P(pipelined, schedule="Schedule1F1B", mode="micro"),
        when="make test",
    ),
    "pp-interleaved-micro-2": Case(
        PP + ", interleaved 1F1B, micro-batches",
        "decoder",
        2,
        P(pipelined, schedule="ScheduleInterleaved1F1B", mode="micro"),
    ),
    "pp-zero-bubble-micro-2": Case(
        PP + ", interleaved zero-bubble, micro-batches",
        "decoder",
        2,
        P(pipelined, schedule="ScheduleInterleavedZeroBubble", mode="micro"),
    ),
    "pp-zbv-2": Case(PP + ", ZBV", "decoder", 2, P(pipelined, schedule="ScheduleZBVZeroBubble")),
    "pp-dualpipev-micro-2": Case(
        PP + ", DualPipeV, micro-batches",
        "decoder",
        2,
        P(pipelined, schedule="ScheduleDualPipeV", mode="micro"),
    ),
    "pp-llama-2": Case(
        PP + ", 1F1B", "Llama", 2, P(pipelined, schedule="Schedule1F1B", family="llama")
    ),
    "pp-llama-micro-2": Case(
        PP + ", GPipe, micro-batches",
        "Llama",
        2,
        P(pipelined, schedule="ScheduleGPipe", family="llama", mode="micro"),
        when="make check",
    ),
    "pp-tp-4": Case(
        PP + ", 1F1B, x parallelize_module tp 2",
        "decoder",
        4,
        P(pipelined, schedule="Schedule1F1B", tp=2),
        when="make check",
    ),
    "ddp-2": Case("DDP", "decoder", 2, P(data_parallel, kind="ddp")),
    "ddp-gpt2-2": Case("DDP", "GPT-2", 2, gpt2_ddp),
    "fsdp1-2": Case("FSDP1", "decoder", 2, P(data_parallel, kind="fsdp1")),
    "fsdp1-orig-2": Case(
        "FSDP1, use_orig_params", "decoder", 2, P(data_parallel, kind="fsdp1 orig")
    ),
    "fsdp2-2": Case("FSDP2", "decoder", 2, P(data_parallel, kind="fsdp2")),
    "fsdp2-4": Case("FSDP2", "decoder", 4, P(data_parallel, kind="fsdp2")),
    "hsdp-4": Case("HSDP", "decoder", 4, P(data_parallel, kind="hsdp"), when="make check"),
    "tp-fsdp2-4": Case(
        "parallelize_module tp 2 x FSDP2",
        "decoder",
        4,
        P(tensor_and_data_parallel, kind="tp"),
        when="make check",
    ),
    "sp-fsdp2-4": Case(
        "parallelize_module sp 2 x FSDP2", "decoder", 4, P(tensor_and_data_parallel, kind="sp")
    ),
    "bert-ddp-2": Case("DDP", "BERT, padded", 2, P(bert, kind="ddp")),
    "bert-fsdp2-2": Case("FSDP2", "BERT, padded", 2, P(bert, kind="fsdp2")),
    "masked-ddp-2": Case("DDP", "shared mask and positions as long as the batch", 2, masked),
    "positions-first-ddp-2": Case("DDP", "TransformerEncoder, positions first", 2, positions_first),
}


def like(name: str, how: str, when: str = "make parity", **changes) -> Case:
    """A row as another, but for what it is run with: see `changed`."""
    case = CASES[name]
    build = P(changed, build=case.build, **changes)
    return replace(case, model=f"{case.model}, {how}", build=build, when=when)


TWO_HEADS = P(huggingface, name="llama two heads", tp=2)
CASES |= {
    "hf-batch-1-2": like("hf-llama-2", "batch 1", inputs=(tokens(1),)),
    "hf-one-token-2": like("hf-llama-2", "one token", inputs=(tokens(2, 1),)),
    "hf-batch-1-one-token-2": like("hf-llama-2", "batch 1, one token", inputs=(tokens(1, 1),)),
    "hf-one-head-2": Case(HF, "Llama, one head a rank", 2, TWO_HEADS),
    "hf-one-head-batch-1-2": Case(
        HF, "Llama, one head a rank, batch 1", 2, P(changed, build=TWO_HEADS, inputs=(tokens(1),))
    ),
    "hf-inference-2": like("hf-llama-2", "inference_mode", backward=False),
    "hf-first-batch-1-2": like("hf-llama-2", "after a batch of 1", first=(tokens(1),)),
    "native-tp-one-token-2": like("native-tp-2", "one token", inputs=(tokens(2, 1),)),
    "native-tp-inference-2": like("native-tp-2", "inference_mode", backward=False),
    "native-tp-zeros-2": like("native-tp-2", "zero weights", zeros=("wo", "w2")),
    "native-sp-batch-1-2": like("native-sp-2", "batch 1", inputs=(tokens(1, 8),)),
    "native-sp-inference-2": like(
        "native-sp-2", "inference_mode", backward=False, when="make check"
    ),
    "native-sp-zeros-2": like("native-sp-2", "zero weights", zeros=("wo", "w2")),
    "native-sp-first-batch-1-2": like("native-sp-2", "after a batch of 1", first=(tokens(1, 8),)),
    "fairscale-batch-1-2": like("fairscale-2", "batch 1", inputs=(tokens(1),)),
    "fairscale-inference-2": like("fairscale-2", "inference_mode", backward=False),
    "fairscale-zeros-2": like("fairscale-2", "zero weights", zeros=("down", "emb")),
    "ddp-one-row-2": like("ddp-2", "one row a rank", inputs=(tokens(2, 8),)),
    "ddp-one-token-2": like("ddp-2", "one token", inputs=(tokens(4, 1),)),
    "ddp-one-row-one-token-2": like("ddp-2", "one row, one token", inputs=(tokens(2, 1),)),
    "ddp-inference-2": like("ddp-2", "inference_mode", backward=False, when="make check"),
    "ddp-zeros-2": like("ddp-2", "zero weights", zeros=("wo", "w2")),
    "ddp-first-one-row-2": like("ddp-2", "after one row a rank", first=(tokens(2, 8),)),
    "bert-inference-2": like("bert-ddp-2", "inference_mode", backward=False),
    "masked-inference-2": like("masked-ddp-2", "inference_mode", backward=False),
    "positions-first-inference-2": like("positions-first-ddp-2", "inference_mode", backward=False),
    "positions-first-one-row-2": like(
        "positions-first-ddp-2", "one row a rank", inputs=(models.random(6, 2, 32),)
    ),
}

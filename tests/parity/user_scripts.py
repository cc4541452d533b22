"""What users' scripts do to a model, as rows of the table: adapters, compiled blocks, quantised
weights, device maps, attention patterns, generation, copies; on one process and on many.
"""

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import frameworks
import lora
import models
import quantized_layers
from flex_model import FlexModel, HookFunction
from frameworks import ROUNDED, Pair, call, gradients, num_ranks, rank, tokens
from shared_edits import double

SITES = {
    "act_fn": "model.layers.0.mlp.act_fn",
    "row output": "model.layers.0.self_attn.o_proj",
    "layer": "model.layers.0",
}
PARAMETERS = ("model.layers.0.self_attn.k_proj.weight", "model.layers.1.input_layernorm.weight")


def averaged_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Of replicas whose gradients nobody averages. Collective."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name] = parameter.grad.clone()
            if num_ranks() > 1:
                dist.all_reduce(found[name])
                found[name] /= num_ranks()
    return found


def fewer(sites: dict[str, str]) -> dict[str, str]:
    """The sites of a decoder that are edited."""
    return {name: sites[name] for name in ("act_fn", "inside attention", "layer")}


@contextlib.contextmanager
def one_process(tmp_path: Path) -> Iterator[Pair]:
    """The decoder, on one process."""
    model = frameworks.decoder()
    yield Pair(
        model,
        lambda: copy.deepcopy(model),
        (tokens(2, length=8),),
        fewer(frameworks.DECODER_SITES),
        frameworks.DECODER_PARAMETERS[:2],
        gradients,
        inputs_of=frameworks.DECODER_INPUTS,
    )


@contextlib.contextmanager
def llama(tmp_path: Path, kind: str, **settings) -> Iterator[Pair]:
    """A Llama: "one" process, "ddp", "fsdp2", or "tp" or "pp" by transformers."""
    if kind in ("tp", "pp"):
        with frameworks.huggingface(tmp_path, "llama", **{kind: num_ranks()}) as pair:
            yield replace(pair, sites=SITES, parameters=PARAMETERS, **settings)
        return
    model = frameworks.huggingface_model("llama").double()
    model.set_attn_implementation("eager")
    size = num_ranks()
    yield Pair(
        model,
        lambda: sharded_llama(copy.deepcopy(model), kind),
        (tokens(2 * size),),
        SITES,
        PARAMETERS,
        gradients,
        dp=size,
        dp_rank=rank(),
        **{"keywords": {"use_cache": False}, "tolerance": ROUNDED} | settings,
    )


def sharded_llama(model: nn.Module, kind: str) -> nn.Module:
    if kind == "one":
        return model
    if kind == "ddp":
        return DistributedDataParallel(model)
    mesh = models.mesh(num_ranks(), 1)["dp"]
    for name, module in model.named_modules():
        if name.endswith(("layers.0", "layers.1")):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def packed(num_rows: int) -> dict[str, object]:
    """Keywords of rows of six tokens in which several texts follow one another."""
    texts = torch.tensor([[0, 1, 2, 3, 0, 1], [0, 1, 0, 1, 2, 3]])
    return {"use_cache": False, "position_ids": texts.repeat(num_rows // 2, 1)}


# ---- Attention patterns --------------------------------------------------------------------------


def observed(model: nn.Module) -> nn.Module:
    """The model with its attention computed by hand, each pattern the output of a child module."""
    import transformers

    def attend(module, query, key, value, mask, scaling, **others):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = query @ key.mT * scaling
        scores = scores if mask is None else scores + mask
        pattern = module.attention_pattern(scores.softmax(-1))
        return (pattern @ value).transpose(1, 2).contiguous(), pattern

    transformers.AttentionInterface.register("observed", attend)
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.attention_pattern = nn.Identity()
        attention.config = copy.deepcopy(attention.config)
        attention.config._attn_implementation = "observed"
    return model


@contextlib.contextmanager
def attention(tmp_path: Path, kind: str) -> Iterator[Pair]:
    """A Llama with hooks on its attention patterns."""
    with llama(tmp_path, kind) as pair:
        sites = {"pattern": "model.layers.0.self_attn.attention_pattern"}
        sites |= {"last pattern": "model.layers.1.self_attn.attention_pattern"}
        oracle = observed(copy.deepcopy(pair.oracle))
        yield replace(pair, oracle=oracle, sites=sites, parameters=(), outputs={})


# ---- Adapters ------------------------------------------------------------------------------------

ADAPTED = "base_model.model.model.layers.0."
ADAPTER_SITES = {
    "act_fn": f"{ADAPTED}mlp.act_fn",
    "adapted layer": f"{ADAPTED}self_attn.q_proj",
    "adapter": f"{ADAPTED}mlp.up_proj.lora_B.first",
    "layer": ADAPTED[:-1],
}


def switched(model, inputs, keywords) -> torch.Tensor:
    """Three forwards in one run: the first adapter, the second, and the first again."""
    total = 0
    with model.active() if isinstance(model, FlexModel) else contextlib.nullcontext():
        for times, adapter in enumerate(("first", "second", "first"), 1):
            switch(model, adapter)
            total = total + times * call(model, inputs, keywords)
    return total


def switch(model, adapter: str) -> None:
    peft = pytest.importorskip("peft")
    inner = model.module if isinstance(model, FlexModel) else model
    if isinstance(inner, peft.PeftModel):
        model.set_adapter(adapter)
        return
    for layer in inner.modules():
        if isinstance(layer, peft.tuners.tuners_utils.BaseTunerLayer):
            layer.set_adapter(adapter)


@contextlib.contextmanager
def adapters(tmp_path: Path, kind: str) -> Iterator[Pair]:
    """Adapters of PEFT, switched inside a run: as `llama`; "parallelize_module": the adapted model
    is split, its adapters with the layers; "pp": the model that has the stages is wrapped.
    """
    layers = lora.COLUMNS + (() if kind == "tp" else lora.ROWS)  # PEFT can't train these there
    with llama(tmp_path, "one" if kind == "parallelize_module" else kind) as pair:
        oracle = lora.adapted(copy.deepcopy(pair.oracle), layers)
        if rank() == 0:
            oracle.save_pretrained(tmp_path / "adapters")
        if num_ranks() > 1:
            dist.barrier()

        def shard():
            if kind in ("tp", "pp"):
                model = lora.loaded(pair.shard(), tmp_path / "adapters")
                return model if kind == "tp" else model.base_model.model
            model = lora.adapted(copy.deepcopy(pair.oracle), layers)
            if kind == "parallelize_module":
                return lora.parallelized(model, models.mesh(1, num_ranks())["tp"])
            return sharded_llama(model, kind)

        if kind == "parallelize_module":
            pair = replace(pair, inputs=(tokens(2),), dp=1, dp_rank=0)
        sites = ADAPTER_SITES
        if kind == "pp":  # the model in the PeftModel
            oracle = oracle.base_model.model
            sites = {what: name.removeprefix("base_model.model.") for what, name in sites.items()}
        yield replace(
            pair,
            oracle=oracle,
            shard=shard,
            sites=sites,
            parameters=tuple(f"{ADAPTED}mlp.up_proj.lora_{part}.first.weight" for part in "AB"),
            outputs={},
            forward=switched,
        )


# ---- Compiled, copied, generating ----------------------------------------------------------------


@contextlib.contextmanager
def compiled(tmp_path: Path, build: Callable) -> Iterator[Pair]:
    """Each block compiled on its own, as training loops do, for each hook anew."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    with build(tmp_path) as pair:

        def shard():
            model = pair.shard()
            for layer in getattr(model, "module", model).layers:
                layer.compile(backend=backend, dynamic=False)
            return model

        def forward(model, inputs, keywords):
            torch.compiler.reset()
            return pair.forward(model, inputs, keywords)

        yield replace(pair, shard=shard, forward=forward, sites=fewer(pair.sites))
        torch.compiler.reset()
        assert len(graphs) > 10


def generated(model, inputs, keywords) -> torch.Tensor:
    output = model.generate(
        *inputs,
        attention_mask=torch.ones_like(inputs[0]),
        max_new_tokens=3,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.stack(output.logits, 1)


@contextlib.contextmanager
def copied(tmp_path: Path, build: Callable) -> Iterator[Pair]:
    """A copy of a model that has hooks, which the copy has not."""
    with build(tmp_path) as pair:
        hooked = []

        def shard():
            flex = FlexModel(pair.shard())
            site = pair.sites["act_fn"]
            flex.register_forward_hook(HookFunction(site, editing_function=double))
            hooked.append(flex)
            return copy.deepcopy(flex.module)

        yield replace(pair, shard=shard, sites=fewer(pair.sites))
        for flex in hooked:
            flex.restore()


# ---- transformers' Trainer -----------------------------------------------------------------------


@contextlib.contextmanager
def trainer(tmp_path: Path, kind: str = "ddp") -> Iterator[Pair]:
    """One training step of a Llama by ``Trainer``, which shards it by "ddp" or "fsdp2" on several
    ranks; its learning rate is zero. Hooks come by a ``HookCallback``.
    """
    pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from flex_model.integrations.trainer import HookCallback

    size = num_ranks()
    launcher = {"RANK": str(rank()), "LOCAL_RANK": str(rank()), "WORLD_SIZE": str(size)}
    with llama(tmp_path, "ddp") as pair, mock.patch.dict(os.environ, launcher if size > 1 else {}):
        pair.oracle.config.use_cache = False
        layers = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        rows = [{"input_ids": row, "labels": row} for row in pair.inputs[0]]
        arguments = TrainingArguments(
            output_dir=str(tmp_path / f"trainer{rank()}"),
            per_device_train_batch_size=2,
            max_steps=1,
            learning_rate=0.0,
            max_grad_norm=0.0,
            optim="sgd",
            average_tokens_across_devices=False,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **({"fsdp": "full_shard", "fsdp_config": layers} if kind == "fsdp2" else {}),
        )

        def session(register, records, targets):
            found = {}

            def loss(outputs, labels, num_items_in_batch=None):
                found["output"] = outputs.logits.detach()
                return (outputs.logits * targets).sum()

            class Gradients(TrainerCallback):
                def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
                    found["gradients"] = {
                        name: grad.clone() for name, grad in gradients(model).items()
                    }

            sizes = {"data_parallel_size": size} if size > 1 else {}
            hooks = HookCallback(register, records, timeout=20, **sizes)
            with contextlib.redirect_stdout(None):
                Trainer(
                    copy.deepcopy(pair.oracle),
                    arguments,
                    train_dataset=InOrder(rows),
                    compute_loss_func=loss,
                    callbacks=[hooks, Gradients()],
                ).train()
            return found["output"], found["gradients"]

        try:
            yield replace(pair, session=session)
        finally:  # what it keeps of the launcher is one for the process
            AcceleratorState._reset_state(reset_partial_state=True)


class InOrder(torch.utils.data.IterableDataset):
    """Rows that no sampler shuffles."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


# ---- One process, many devices -------------------------------------------------------------------


@contextlib.contextmanager
def device_map(tmp_path: Path, places: tuple[object, ...]) -> Iterator[Pair]:
    """A Llama that accelerate spreads: what comes before the layers, both layers, and the head.
    On several ranks each spreads a model of its own, for some rows.
    """
    accelerate = pytest.importorskip("accelerate")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if any(isinstance(place, int) and place >= num_gpus for place in places):
        pytest.skip("not as many devices")
    names = ("model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head")
    where = dict(zip(names, places))
    where |= {"model.rotary_emb": places[0], "model.norm": places[2]}
    offloaded = tuple(name for name, place in where.items() if place == "disk")

    with llama(tmp_path, "one") as pair:

        def shard():
            model, folder = copy.deepcopy(pair.oracle), tmp_path / f"offloaded{rank()}"
            main = places[0] if num_gpus else "cpu"
            return accelerate.dispatch_model(model, where, main, offload_dir=folder)

        yield replace(
            pair,
            shard=shard,
            forward=lambda model, inputs, keywords: call(model, inputs, keywords).cpu(),
            full_gradients=lambda model: {
                name: grad.cpu()
                for name, grad in averaged_gradients(model).items()
                if not any(part in name for part in offloaded)
            },
            sizes={"data_parallel_size": num_ranks()} if num_ranks() > 1 else {},
            without_gradients=offloaded,
        )


# ---- Quantised weights ---------------------------------------------------------------------------

QUANTISED_SITES = {"act_fn": "blocks.0.act", "quantised": "blocks.0.up", "layer": "blocks.0"}


@contextlib.contextmanager
def quantised(tmp_path: Path, kind: str) -> Iterator[Pair]:
    """Blocks of frozen quantised weights between plain layers, on parts of a batch."""
    size = num_ranks()
    yield Pair(
        quantized_layers.build(kind),
        lambda: quantized_layers.build(kind),
        (models.random(4 * size, 8, dtype=torch.float32),),
        QUANTISED_SITES,
        ("embed.weight", "blocks.0.norm.bias"),
        averaged_gradients,
        dp=size,
        dp_rank=rank(),
        sizes={"data_parallel_size": size} if size > 1 else {},
        tolerance=ROUNDED,
    )


@contextlib.contextmanager
def split_quantised(tmp_path: Path) -> Iterator[Pair]:
    """int8 beside scales, split by hand over tensor-parallel ranks, and stated."""
    kind, size = "int8 beside scales", num_ranks()
    build, split = quantized_layers.build, quantized_layers.split_by_hand

    def full_gradients(model):
        found = averaged_gradients(model)
        for name, parameter in model.named_parameters():
            if name.endswith("up.bias"):
                group = dist.group.WORLD
                found[name] = torch.cat(frameworks.gathered(parameter.grad, group))
        return found

    yield Pair(
        split(build(kind), 0, 1),
        lambda: split(build(kind), rank(), size),
        (models.random(4, 8, dtype=torch.float32),),
        QUANTISED_SITES,
        ("embed.weight", "blocks.0.up.bias"),
        full_gradients,
        sizes={"tensor_parallel_size": size},
        tolerance=ROUNDED,
        state=quantized_layers.state_layouts,
    )

"""The rows of the parity table, by name."""

import contextlib
import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

import models
from frameworks.batches import bert, masked, positions_first
from frameworks.data_parallel import data_parallel, gpt2_ddp, tensor_and_data_parallel
from frameworks.decoder_model import native
from frameworks.fairscale_mlp import fairscale
from frameworks.hugging_face import MIXTURES, huggingface, huggingface_batches
from frameworks.megatron_gpt import megatron
from frameworks.pair import Case, tokens
from frameworks.pipelined import pipelined


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
    "hf-llama-2": Case(HF, "Llama", 2, P(huggingface, name="llama", tp=2), is_quick=True),
    "hf-llama-uneven-2": Case(HF, "Llama, MLP 97", 2, P(huggingface, name="llama uneven", tp=2)),
    "hf-qwen2-2": Case(HF, "Qwen2", 2, P(huggingface, name="qwen2", tp=2)),
    "hf-llama-4": Case(HF, "Llama", 4, P(huggingface, name="llama", tp=4)),
    "hf-pp-2": Case(HF_PP, "Llama", 2, P(huggingface, name="llama", pp=2)),
    "hf-pp-qwen3moe-2": Case(HF_PP, "Qwen3-MoE", 2, P(huggingface, name="qwen3-moe", pp=2)),
    "hf-pp-4": Case(HF_PP, "Llama, 4 layers", 4, P(huggingface, name="llama 4 layers", pp=4)),
    "hf-tp-fsdp-4": Case(
        "Hugging Face tp 2 x fsdp 2", "Llama", 4, P(huggingface, name="llama", tp=2, fsdp=2)
    ),
    "native-tp-2": Case(NATIVE + ", tp", "decoder", 2, P(native, kind="tp")),
    "native-sp-2": Case(NATIVE + ", sequence parallel", "decoder", 2, P(native, kind="sp")),
    "native-dtensor-2": Case(
        NATIVE + ", use_local_output=False", "decoder", 2, P(native, kind="dtensor")
    ),
    "native-tp-4": Case(NATIVE + ", tp", "decoder", 4, P(native, kind="tp")),
    "native-sp-4": Case(NATIVE + ", sequence parallel", "decoder", 4, P(native, kind="sp")),
    "fairscale-2": Case("fairscale", "MLP", 2, P(fairscale, tp=2)),
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
    ),
    "pp-tp-4": Case(
        PP + ", 1F1B, x parallelize_module tp 2",
        "decoder",
        4,
        P(pipelined, schedule="Schedule1F1B", tp=2),
    ),
    "ddp-2": Case("DDP", "decoder", 2, P(data_parallel, kind="ddp")),
    "ddp-gpt2-2": Case("DDP", "GPT-2", 2, gpt2_ddp),
    "fsdp1-2": Case("FSDP1", "decoder", 2, P(data_parallel, kind="fsdp1")),
    "fsdp1-orig-2": Case(
        "FSDP1, use_orig_params", "decoder", 2, P(data_parallel, kind="fsdp1 orig")
    ),
    "fsdp2-2": Case("FSDP2", "decoder", 2, P(data_parallel, kind="fsdp2")),
    "fsdp2-4": Case("FSDP2", "decoder", 4, P(data_parallel, kind="fsdp2")),
    "hsdp-4": Case("HSDP", "decoder", 4, P(data_parallel, kind="hsdp")),
    "tp-fsdp2-4": Case(
        "parallelize_module tp 2 x FSDP2", "decoder", 4, P(tensor_and_data_parallel, kind="tp")
    ),
    "sp-fsdp2-4": Case(
        "parallelize_module sp 2 x FSDP2", "decoder", 4, P(tensor_and_data_parallel, kind="sp")
    ),
    "bert-ddp-2": Case("DDP", "BERT, padded", 2, P(bert, kind="ddp")),
    "bert-fsdp2-2": Case("FSDP2", "BERT, padded", 2, P(bert, kind="fsdp2")),
    "masked-ddp-2": Case("DDP", "shared mask and positions as long as the batch", 2, masked),
    "positions-first-ddp-2": Case("DDP", "TransformerEncoder, positions first", 2, positions_first),
}


def like(name: str, how: str, **changes) -> Case:
    """A row as another, but for what it is run with: see `changed`."""
    case = CASES[name]
    build = P(changed, build=case.build, **changes)
    return replace(case, model=f"{case.model}, {how}", build=build, is_quick=False)


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
    "native-sp-inference-2": like("native-sp-2", "inference_mode", backward=False),
    "native-sp-zeros-2": like("native-sp-2", "zero weights", zeros=("wo", "w2")),
    "native-sp-first-batch-1-2": like("native-sp-2", "after a batch of 1", first=(tokens(1, 8),)),
    "fairscale-batch-1-2": like("fairscale-2", "batch 1", inputs=(tokens(1),)),
    "fairscale-inference-2": like("fairscale-2", "inference_mode", backward=False),
    "fairscale-zeros-2": like("fairscale-2", "zero weights", zeros=("down", "emb")),
    "ddp-one-row-2": like("ddp-2", "one row a rank", inputs=(tokens(2, 8),)),
    "ddp-one-token-2": like("ddp-2", "one token", inputs=(tokens(4, 1),)),
    "ddp-one-row-one-token-2": like("ddp-2", "one row, one token", inputs=(tokens(2, 1),)),
    "ddp-inference-2": like("ddp-2", "inference_mode", backward=False),
    "ddp-zeros-2": like("ddp-2", "zero weights", zeros=("wo", "w2")),
    "ddp-first-one-row-2": like("ddp-2", "after one row a rank", first=(tokens(2, 8),)),
    "bert-inference-2": like("bert-ddp-2", "inference_mode", backward=False),
    "masked-inference-2": like("masked-ddp-2", "inference_mode", backward=False),
    "positions-first-inference-2": like("positions-first-ddp-2", "inference_mode", backward=False),
    "positions-first-one-row-2": like(
        "positions-first-ddp-2", "one row a rank", inputs=(models.random(6, 2, 32),)
    ),
}

# ---- In bfloat16 --------------------------------------------------------------------------------


@contextlib.contextmanager
def low_precision(tmp_path: Path, build: Callable):
    """A row in bfloat16, beside which the oracle runs in float32 with the same weights."""
    with build(tmp_path, dtype=torch.bfloat16) as pair:
        yield replace(pair, precise=copy.deepcopy(pair.oracle).float())


CASES |= {
    f"{name}-bf16": replace(
        CASES[name],
        model=f"{CASES[name].model}, bfloat16",
        build=P(low_precision, build=CASES[name].build),
        is_quick=False,
    )
    for name in (  # not of experts: a rounding error sends tokens to others
        "hf-llama-2",
        "native-tp-2",
        "native-sp-2",
        "ddp-2",
        "fsdp2-2",
        "pp-gpipe-2",
        "pp-llama-2",
    )
}

# ---- Mixtures of experts ----------------------------------------------------------------------

HF_EP = "Hugging Face ep_plan"
EP = {
    "all-reduce-2": {"tp": 2, "ep": 2, "ep_implementation": "all_reduce"},
    "all-to-all-2": {"tp": 2, "ep": 2, "ep_implementation": "all_to_all"},
    "fsdp-2": {"fsdp": 2, "ep": 2},
    "all-reduce-4": {"tp": 4, "ep": 4, "ep_implementation": "all_reduce"},
    "all-to-all-4": {"tp": 4, "ep": 4, "ep_implementation": "all_to_all"},
    "fsdp-4": {"fsdp": 4, "ep": 2},
    "tp-fsdp-4": {"tp": 2, "fsdp": 2, "ep": 2},
    "across-4": {"tp": 2, "fsdp": 2, "ep": 4},
    "hsdp-4": {"replicas": 2, "fsdp": 2, "ep": 2},
}
OF_MIXTURES = (
    {  # what makes a pair of a mixture's name, and the row's framework
        "tp-2": (HF, P(huggingface, tp=2)),
        "tp-4": (HF, P(huggingface, tp=4)),
        "ddp-2": ("DDP", P(huggingface_batches, kind="ddp")),
        "ddp-4": ("DDP", P(huggingface_batches, kind="ddp")),
        "fsdp2-2": ("FSDP2", P(huggingface_batches, kind="fsdp2")),
        "fsdp2-4": ("FSDP2", P(huggingface_batches, kind="fsdp2")),
    }
    | {
        f"ep-{way}": (f"{HF_EP}, {way[:-2].replace('hsdp', 'HSDP')}", P(huggingface, **sizes))
        for way, sizes in EP.items()
    }
)
CASES |= {
    f"mixture-{way}-{name}": Case(framework, model, int(way[-1]), P(build, name=name))
    for way, (framework, build) in OF_MIXTURES.items()
    for name, model in MIXTURES.items()
}

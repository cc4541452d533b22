"""The parity table on real frameworks: each case in one session of its ranks.

`make parity` runs all cases and writes docs/parity.md; `make test` runs two, `make check` one of
each framework, on the oldest versions. No cell may be wrong; errors must be those that are listed
here, and the right cells at least as many as are recorded.
"""

import json
import os
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from torch.testing import assert_close

import frameworks
import table
from rows import CASES

# Cells that can't be had, and why: patterns of case, kind, site and doing, and the reason.
ERRORS = [
    ("fsdp1-*", "parameter", "*", "*", "FSDP1 gives hooks a local, flattened gradient"),
    ("*hf-pp-*", "*", "", "*", "the root is spread over all stages"),
    ("*hf-pp-*", "*", "model", "*", "the module is spread over all stages"),
    ("*hf-pp-*", "*", "model.rotary_emb", "*", "every stage has one"),
    ("pp-llama-*", "*", "model", "*", "the module is spread over all stages"),
    ("pp-llama-*", "*", "model.rotary_emb", "*", "every stage has one"),
    *(
        (f"{how}-*", "*", "*.experts.act_fn", "*", "rows are in the order of their experts there")
        for how in ("ddp", "fsdp2", "hf-ep")
    ),
    ("quantised-bnb8-2", "*", "*", "*", "a batch's outliers are not those of its parts"),
    (
        "modality-gemma3-[24]",
        "*",
        "model.language_model.layers.0.self_attn.*",
        "*",
        "the mask of its window has sizes that may be a rank's own",
    ),
    *(
        (f"device-map-{n}", "parameter", f"{name}*", "*", "accelerate drops offloaded gradients")
        for n in ("one", "2", "4")
        for name in ("model.layers.1.", "model.norm.", "lm_head.")
    ),
]

# How many cells are right; a change may only raise it.
RIGHT = {
    "hf-llama-2": 227,
    "hf-llama-uneven-2": 227,
    "hf-qwen2-2": 233,
    "hf-qwen3moe-2": 264,
    "hf-mixtral-2": 232,
    "hf-deepseek-v3-2": 290,
    "hf-llama-4": 227,
    "hf-pp-2": 92,
    "hf-pp-qwen3moe-2": 108,
    "hf-pp-4": 144,
    "hf-tp-fsdp-4": 227,
    "native-tp-2": 258,
    "native-sp-2": 258,
    "native-dtensor-2": 258,
    "native-tp-4": 258,
    "native-sp-4": 258,
    "fairscale-2": 123,
    "fairscale-4": 123,
    "fairscale-ddp-4": 123,
    "megatron-tp-2": 286,
    "megatron-sp-2": 286,
    "megatron-moe-2": 408,
    "pp-gpipe-2": 250,
    "pp-1f1b-micro-2": 188,
    "pp-interleaved-micro-2": 324,
    "pp-zero-bubble-micro-2": 324,
    "pp-zbv-2": 386,
    "pp-dualpipev-micro-2": 324,
    "pp-llama-2": 213,
    "pp-llama-micro-2": 161,
    "pp-tp-4": 250,
    "ddp-2": 258,
    "ddp-gpt2-2": 232,
    "fsdp1-2": 216,
    "fsdp1-orig-2": 216,
    "fsdp2-2": 258,
    "fsdp2-4": 258,
    "hsdp-4": 258,
    "tp-fsdp2-4": 258,
    "sp-fsdp2-4": 258,
    "bert-ddp-2": 293,
    "bert-fsdp2-2": 293,
    "masked-ddp-2": 79,
    "positions-first-ddp-2": 148,
    "hf-batch-1-2": 227,
    "hf-one-token-2": 227,
    "hf-batch-1-one-token-2": 227,
    "hf-one-head-2": 227,
    "hf-one-head-batch-1-2": 227,
    "hf-inference-2": 99,
    "hf-first-batch-1-2": 227,
    "native-tp-one-token-2": 258,
    "native-tp-inference-2": 108,
    "native-tp-zeros-2": 258,
    "native-sp-batch-1-2": 258,
    "native-sp-inference-2": 108,
    "native-sp-zeros-2": 258,
    "native-sp-first-batch-1-2": 258,
    "fairscale-batch-1-2": 123,
    "fairscale-inference-2": 49,
    "fairscale-zeros-2": 123,
    "ddp-one-row-2": 258,
    "ddp-one-token-2": 258,
    "ddp-one-row-one-token-2": 258,
    "ddp-inference-2": 108,
    "ddp-zeros-2": 258,
    "ddp-first-one-row-2": 258,
    "bert-inference-2": 121,
    "masked-inference-2": 31,
    "positions-first-inference-2": 62,
    "positions-first-one-row-2": 148,
    "ragged-global-one": 201,
    "ragged-local-one": 201,
    "ragged-global-ddp-2": 210,
    "ragged-local-ddp-2": 210,
    "ragged-global-none-fsdp2-2": 210,
    "ragged-local-none-fsdp2-2": 210,
    "ragged-global-fsdp2-4": 210,
    "ragged-local-fsdp2-4": 210,
    "ragged-global-tp-fsdp2-4": 210,
    "ragged-local-tp-fsdp2-4": 210,
    "packed-one": 183,
    "packed-ddp-2": 183,
    "packed-hf-2": 185,
    "packed-hf-4": 185,
    "device-map-one": 169,
    "device-map-gpus-one": 183,
    "device-map-2": 169,
    "device-map-4": 169,
    "accelerate-shard-2": 204,
    "accelerate-tp-2": 204,
    "accelerate-hsdp-4": 204,
    "accelerate-shard-tp-4": 204,
    "torchtitan-1": 204,
    "torchtitan-2": 204,
    "torchtitan-hsdp-4": 204,
    "torchtitan-tp-4": 204,
    "patterns-one": 157,
    "patterns-ddp-2": 157,
    "patterns-fsdp2-2": 157,
    "patterns-hf-2": 157,
    "patterns-fsdp2-4": 157,
    "patterns-hf-4": 157,
    "kernels-one": 187,
    "kernels-ddp-2": 187,
    "kernels-fsdp2-2": 187,
    "kernels-hf-2": 187,
    "adapters-one": 332,
    "adapters-fsdp2-2": 332,
    "adapters-hf-2": 272,
    "adapters-hf-pp-2": 165,
    "adapters-native-2": 332,
    "adapters-fsdp2-4": 332,
    "adapters-hf-4": 272,
    "adapters-native-4": 332,
    "compiled-one": 201,
    "compiled-native-tp-2": 210,
    "compiled-fsdp2-2": 210,
    "compiled-ddp-2": 210,
    "compiled-tp-fsdp2-4": 210,
    "trainer-1": 183,
    "trainer-2": 183,
    "trainer-4": 183,
    "trainer-fsdp2-2": 183,
    "trainer-fsdp2-4": 183,
    "generate-one": 79,
    "generate-hf-2": 81,
    "generate-hf-pp-2": 77,
    "generate-hf-4": 81,
    "copied-one": 201,
    "copied-native-tp-2": 210,
    "copied-native-tp-4": 210,
    "quantised-int8-by-hand-1": 104,
    "quantised-int4-by-hand-1": 104,
    "quantised-torchao-1": 104,
    "quantised-bnb4-1": 104,
    "quantised-bnb8-1": 104,
    "quantised-compressed-int4-1": 100,
    "quantised-compressed-float8-1": 100,
    "quantised-int8-by-hand-2": 104,
    "quantised-int4-by-hand-2": 104,
    "quantised-torchao-2": 104,
    "quantised-bnb4-2": 104,
    "quantised-bnb8-2": 7,
    "quantised-compressed-int4-2": 100,
    "quantised-compressed-float8-2": 100,
    "quantised-int8-by-hand-4": 104,
    "quantised-int4-by-hand-4": 104,
    "quantised-torchao-4": 104,
    "quantised-bnb4-4": 104,
    "quantised-compressed-int4-4": 100,
    "quantised-compressed-float8-4": 100,
    "quantised-tp-2": 104,
    "quantised-tp-4": 104,
    "ddp-deepseek-v3-2": 284,
    "ddp-glm4-moe-2": 268,
    "ddp-gpt-oss-2": 240,
    "ddp-mixtral-2": 222,
    "ddp-qwen3-moe-2": 254,
    "fsdp2-deepseek-v3-2": 284,
    "fsdp2-glm4-moe-2": 268,
    "fsdp2-gpt-oss-2": 240,
    "fsdp2-mixtral-2": 222,
    "fsdp2-qwen3-moe-2": 254,
    "hf-ep-all-reduce-gpt-oss-2": 240,
    "hf-ep-all-reduce-mixtral-2": 224,
    "hf-ep-all-to-all-gpt-oss-2": 240,
    "hf-ep-all-to-all-mixtral-2": 224,
    "hf-ep-fsdp-gpt-oss-2": 240,
    "hf-ep-fsdp-gpt-oss-4": 240,
    "hf-ep-fsdp-mixtral-2": 224,
    "hf-ep-fsdp-mixtral-4": 224,
    "hf-ep-tp-fsdp-gpt-oss-4": 240,
    "hf-ep-tp-fsdp-mixtral-4": 224,
    "hf-glm4-moe-2": 290,
    "hf-gpt-oss-2": 240,
    "hf-ep-across-mixtral-4": 224,
    "hf-ep-across-gpt-oss-4": 240,
    "ddp-2-bf16": 258,
    "hf-llama-2-bf16": 227,
    "native-tp-2-bf16": 258,
    "native-sp-2-bf16": 258,
    "fsdp2-2-bf16": 258,
    "pp-gpipe-2-bf16": 258,
    "pp-llama-2-bf16": 221,
    "modality-llava-1": 407,
    "modality-qwen2_vl-1": 345,
    "modality-qwen2_5_vl-1": 352,
    "modality-idefics3-1": 361,
    "modality-gemma3-1": 399,
    "modality-mistral3-1": 364,
    "modality-pixtral-1": 353,
    "modality-whisper-1": 400,
    "modality-llava-2": 407,
    "modality-qwen2_vl-2": 345,
    "modality-qwen2_5_vl-2": 352,
    "modality-idefics3-2": 361,
    "modality-gemma3-2": 388,
    "modality-mistral3-2": 364,
    "modality-pixtral-2": 353,
    "modality-llava-4": 407,
    "modality-qwen2_vl-4": 345,
    "modality-qwen2_5_vl-4": 352,
    "modality-idefics3-4": 361,
    "modality-gemma3-4": 388,
    "modality-mistral3-4": 364,
    "modality-pixtral-4": 353,
    "modality-llava-ddp-2": 179,
    "modality-qwen2_vl-ddp-2": 146,
    "modality-qwen2_5_vl-ddp-2": 150,
    "modality-idefics3-ddp-2": 152,
    "modality-gemma3-ddp-2": 167,
    "modality-whisper-ddp-2": 156,
    "modality-llava-ddp-4": 179,
    "modality-qwen2_vl-ddp-4": 146,
    "modality-qwen2_5_vl-ddp-4": 150,
    "modality-idefics3-ddp-4": 152,
    "modality-gemma3-ddp-4": 167,
    "modality-whisper-ddp-4": 156,
    "inside-ddp-2-deepseek-v3": 244,
    "inside-ddp-2-glm4-moe": 242,
    "inside-ddp-2-gpt-oss": 214,
    "inside-ddp-2-mixtral": 196,
    "inside-ddp-2-qwen3-moe": 216,
    "inside-ep-across-4-gpt-oss": 214,
    "inside-ep-across-4-mixtral": 198,
    "inside-ep-all-reduce-2-deepseek-v3": 246,
    "inside-ep-all-reduce-2-glm4-moe": 244,
    "inside-ep-all-reduce-2-gpt-oss": 214,
    "inside-ep-all-reduce-2-mixtral": 198,
    "inside-ep-all-reduce-2-qwen3-moe": 218,
    "inside-ep-all-to-all-2-deepseek-v3": 246,
    "inside-ep-all-to-all-2-glm4-moe": 244,
    "inside-ep-all-to-all-2-gpt-oss": 214,
    "inside-ep-all-to-all-2-mixtral": 198,
    "inside-ep-all-to-all-2-qwen3-moe": 218,
    "inside-ep-fsdp-2-deepseek-v3": 246,
    "inside-ep-fsdp-2-glm4-moe": 244,
    "inside-ep-fsdp-2-gpt-oss": 214,
    "inside-ep-fsdp-2-mixtral": 198,
    "inside-ep-fsdp-2-qwen3-moe": 218,
    "inside-ep-fsdp-4-gpt-oss": 214,
    "inside-ep-fsdp-4-mixtral": 198,
    "inside-ep-hsdp-4-mixtral": 198,
    "inside-ep-tp-fsdp-4-gpt-oss": 214,
    "inside-ep-tp-fsdp-4-mixtral": 198,
    "inside-fsdp2-2-deepseek-v3": 244,
    "inside-fsdp2-2-glm4-moe": 242,
    "inside-fsdp2-2-gpt-oss": 214,
    "inside-fsdp2-2-mixtral": 196,
    "inside-fsdp2-2-qwen3-moe": 216,
    "inside-tp-2-deepseek-v3": 246,
    "inside-tp-2-glm4-moe": 244,
    "inside-tp-2-gpt-oss": 214,
    "inside-tp-2-mixtral": 198,
    "inside-tp-2-qwen3-moe": 218,
}


def cases(ranks):
    return [
        pytest.param(name, marks=[] if case.is_quick else pytest.mark.grid)
        for name, case in CASES.items()
        if case.ranks == ranks
    ]


def check(name, tmp_path):
    with frameworks.quiet(), CASES[name].build(tmp_path) as pair:
        outcomes = table.outcomes_of(pair)
    write_rows(name, outcomes)
    wrong = [outcome for outcome in outcomes if outcome.result == "wrong"]
    undocumented = [o for o in outcomes if o.result == "error" and reason(name, o.cell) is None]
    right = sum(outcome.result == "right" for outcome in outcomes)
    assert not wrong + undocumented, told(f"{name}: {right} of {len(outcomes)} right", outcomes)
    assert right >= RIGHT[name]


def told(title, outcomes):
    """Each hook that is not right, once with all that it was to do; rank 0 tells it."""
    groups = {}
    for outcome in outcomes:
        if outcome.result != "right":
            site = replace(outcome.cell, doing="")
            groups.setdefault((outcome.result, site), []).append(outcome)
    lines = [
        f"{result}: {site}{' / '.join(o.cell.doing for o in group)}: {group[0].text}"
        for (result, site), group in groups.items()
    ]
    return "\n".join([title, *lines]) if frameworks.rank() == 0 else title


def reason(name, cell):
    """Why this cell is an error; None if it should not be."""
    for *patterns, why in ERRORS:
        if all(map(fnmatchcase, (name, cell.kind, cell.site, cell.doing), patterns)):
            return why
    return None


def write_rows(name, outcomes):
    """For docs/parity.md, where `python tests/parity` has asked for them."""
    folder = os.environ.get("PARITY_ROWS")
    if folder and frameworks.rank() == 0:
        rows = [asdict(o) | {"reason": reason(name, o.cell)} for o in outcomes]
        Path(folder, f"{name}.json").write_text(json.dumps(rows, indent=1))


@pytest.mark.parametrize("name", cases(1))
def test_one_process(name, tmp_path):
    check(name, tmp_path)


@pytest.mark.ranks(2, timeout=600)
@pytest.mark.parametrize("name", cases(2))
def test_two_ranks(name, tmp_path):
    check(name, tmp_path)


@pytest.mark.ranks(4, timeout=600)
@pytest.mark.parametrize("name", cases(4))
def test_four_ranks(name, tmp_path):
    check(name, tmp_path)


# ---- The table itself ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")  # the embedding's
@pytest.mark.parametrize("kind", ["full_backward", "full_backward_pre"])
def test_the_oracle_sees_what_torch_s_backward_hooks_see(kind):
    model, seen, handles = frameworks.decoder(), {}, []
    pair = frameworks.Pair(model, None, (frameworks.tokens(2),), {}, (), None)
    cells = table.readable(pair, kind)
    expected = table.oracle_run(pair, cells)
    for cell in cells:

        def hook(module, grads, *_, record=cell.record):
            seen[record] = [grads[0].clone()]

        register = getattr(model.get_submodule(cell.site), f"register_{kind}_hook")
        handles.append(register(hook))
    model.zero_grad()
    (model(*pair.inputs) * table.random_targets(pair)).sum().backward()
    assert len(seen) == len(cells) > 20
    assert_close(seen, expected.records)
    assert_close({name: p.grad for name, p in model.named_parameters()}, expected.gradients)


@pytest.mark.ranks(2)
def test_what_is_wrong_is_found(tmp_path):
    """The cell of one edit against the oracle of another, and of one site against another's."""
    with CASES["native-tp-2"].build(tmp_path) as pair:
        sharded = table.Sharded(pair)
        for kind, site in (
            ("forward", "layers.0.attention.wo"),
            ("full_backward", "layers.1"),
            ("parameter", "layers.1.n2.weight"),
        ):
            edited, other = (table.Cell(kind, site, doing) for doing in ("mixing", "in place"))
            read = table.Cell(kind, site)
            for cell, oracle, result in (
                (edited, edited, "right"),
                (edited, other, "wrong"),
                (read, edited, "wrong"),
                (edited, read, "wrong"),
            ):
                run = table.oracle_run(pair, [oracle])
                outcomes = table.merged(table.run_cells(sharded, [cell], run))
                assert [outcome.result for outcome in outcomes] == [result], outcomes
        oracle = table.oracle_run(pair, [read])
        oracle.records[read.record][0] += 1e-6
        assert table.merged(table.run_cells(sharded, [read], oracle))[0].result == "wrong"

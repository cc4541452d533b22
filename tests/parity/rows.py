"""All rows of the parity table: models as frameworks shard them, and what users' scripts do."""

import functools
from dataclasses import replace

import expert_pairs
import frameworks
import kernel_pairs
import mesh_pairs
import modality_pairs
import user_scripts
from frameworks import Case
from ragged_pairs import ragged

P = functools.partial


ONE = Case("one process", "decoder", 1, user_scripts.one_process)
FRAMEWORKS = frameworks.CASES

# ---- Ragged batches ------------------------------------------------------------------------------

RAGGED = {  # numbers of rows and lengths by data-parallel rank
    "3 + 1 rows of 10 and 12 tokens": ((3, 1), (10, 12)),
    "3 rows and none": ((3, 0), (12, 10)),
    "3, 1, no and 2 rows of 7 to 12 tokens": ((3, 1, 0, 2), (10, 12, 9, 7)),
}
BATCHES, NONE, FOUR = RAGGED
WAYS = {
    "one": (ONE, BATCHES),
    "ddp-2": (FRAMEWORKS["ddp-2"], BATCHES),
    "none-fsdp2-2": (FRAMEWORKS["fsdp2-2"], NONE),
    "fsdp2-4": (FRAMEWORKS["fsdp2-4"], FOUR),
    "tp-fsdp2-4": (FRAMEWORKS["tp-fsdp2-4"], BATCHES),
}
DECODER_SITES = user_scripts.fewer(frameworks.DECODER_SITES)


def ragged_case(case: Case, batches: str, dp_batch: str) -> Case:
    num_rows, lengths = RAGGED[batches]
    build = P(ragged, build=case.build, dp_batch=dp_batch, num_rows=num_rows, lengths=lengths)
    build = P(frameworks.changed, build=build, sites=DECODER_SITES)
    how = f'{case.framework}, dp_batch="{dp_batch}"'
    model = f"decoder, {batches}" if case.ranks > 1 else "decoder"
    return replace(case, framework=how, model=model, build=build, is_quick=False)


SCRIPTS = {
    f"ragged-{dp_batch}-{way}": ragged_case(case, batches, dp_batch)
    for way, (case, batches) in WAYS.items()
    for dp_batch in ("global", "local")
}


def llama(framework: str, model: str, ranks: int, kind: str, make=user_scripts.llama, **settings):
    return Case(framework, model, ranks, P(make, kind=kind, **settings))


HF = frameworks.HF
PACKED = user_scripts.packed
SCRIPTS |= {
    "packed-one": llama("one process", "Llama, packed rows", 1, "one", keywords=PACKED(2)),
    "packed-ddp-2": llama("DDP", "Llama, packed rows", 2, "ddp", keywords=PACKED(4)),
    "packed-hf-2": llama(HF, "Llama, packed rows", 2, "tp", keywords=PACKED(2)),
    "packed-hf-4": llama(HF, "Llama, packed rows", 4, "tp", keywords=PACKED(2)),
}

# ---- One process, many devices -------------------------------------------------------------------

MAPS = {
    "device-map-one": ("CPU and disk", 1, ("cpu", "cpu", "disk", "disk")),
    "device-map-gpus-one": ("two GPUs", 1, (0, 0, 1, 1)),
    "device-map-2": ("CPU and disk, on each rank", 2, ("cpu", "cpu", "disk", "disk")),
    "device-map-4": ("CPU and disk, on each rank", 4, ("cpu", "cpu", "disk", "disk")),
}
SCRIPTS |= {
    name: Case("accelerate device_map", f"Llama, {how}", n, P(user_scripts.device_map, places=at))
    for name, (how, n, at) in MAPS.items()
}

# ---- Meshes as frameworks name them --------------------------------------------------------------


def mesh_case(framework: str, make, num_dp: int, num_tp: int, **sizes) -> Case:
    build = P(mesh_pairs.named_mesh, make=P(make, **sizes), dp=num_dp, tp=num_tp)
    names = " x ".join(f"{name.removesuffix('_size')} {size}" for name, size in sizes.items())
    return Case(f"{framework}, {names}", "decoder", num_dp * num_tp, build)


ACCELERATE = P(mesh_case, "accelerate ParallelismConfig", mesh_pairs.accelerate_mesh)
TORCHTITAN = P(mesh_case, "torchtitan mesh", mesh_pairs.torchtitan_mesh)
SCRIPTS |= {
    "accelerate-shard-2": ACCELERATE(2, 1, dp_shard_size=2),
    "accelerate-tp-2": ACCELERATE(1, 2, tp_size=2),
    "accelerate-hsdp-4": ACCELERATE(4, 1, dp_replicate_size=2, dp_shard_size=2),
    "accelerate-shard-tp-4": ACCELERATE(2, 2, dp_shard_size=2, tp_size=2),
    "torchtitan-1": TORCHTITAN(1, 1, fsdp=1, tp=1),
    "torchtitan-2": TORCHTITAN(2, 1, fsdp=2),
    "torchtitan-hsdp-4": TORCHTITAN(4, 1, dp_replicate=2, fsdp=2),
    "torchtitan-tp-4": TORCHTITAN(2, 2, fsdp=2, tp=2),
}

# ---- Attention patterns, adapters, compiled blocks, other people's loops -------------------------

KINDS = {
    "one": ("one process", 1, "one"),
    "ddp-2": ("DDP", 2, "ddp"),
    "fsdp2-2": ("FSDP2", 2, "fsdp2"),
    "hf-2": (HF, 2, "tp"),
    "fsdp2-4": ("FSDP2", 4, "fsdp2"),
    "hf-4": (HF, 4, "tp"),
    "hf-pp-2": (frameworks.HF_PP, 2, "pp"),
}
NATIVE_ADAPTERS = {f"native-{n}": ("parallelize_module", n, "parallelize_module") for n in (2, 4)}


def of_kinds(prefix: str, model: str, make, names, kinds=KINDS | NATIVE_ADAPTERS, **settings):
    return {
        f"{prefix}-{name}": llama(kinds[name][0], model, *kinds[name][1:], make=make, **settings)
        for name in names
    }


def rebuilt(prefix, names, build, **notes):
    """Cases whose pair ``build`` makes of another case's; a note is added to each named text."""
    cases = {"one": ONE} | {name: FRAMEWORKS[name] for name in names}
    return {
        f"{prefix}-{name}": replace(
            case,
            build=P(build, build=case.build),
            is_quick=False,
            **{field: f"{getattr(case, field)}, {note}" for field, note in notes.items()},
        )
        for name, case in cases.items()
    }


PATTERNS = [name for name in KINDS if name != "hf-pp-2"]  # which is refused
SCRIPTS |= of_kinds("patterns", "Llama, attention patterns", user_scripts.attention, PATTERNS)
SCRIPTS |= of_kinds(
    "kernels",
    "Llama, flash-attn and Liger, padded",
    kernel_pairs.fused,
    ("one", "ddp-2", "fsdp2-2", "hf-2"),
)
SCRIPTS |= of_kinds(
    "adapters",
    "Llama, two LoRA adapters, switched in a run",
    user_scripts.adapters,
    ("one", "fsdp2-2", "hf-2", "hf-pp-2", "native-2", "fsdp2-4", "hf-4", "native-4"),
)
SCRIPTS |= rebuilt(
    "compiled",
    ("native-tp-2", "fsdp2-2", "ddp-2", "tp-fsdp2-4"),
    user_scripts.compiled,
    framework="blocks compiled",
)
SCRIPTS |= {
    f"trainer-{n}": Case(f"transformers' Trainer{how}", "Llama, a step", n, user_scripts.trainer)
    for n, how in ((1, ""), (2, ", DDP"), (4, ", DDP"))
}
SCRIPTS |= {
    f"trainer-fsdp2-{n}": Case(
        "transformers' Trainer, FSDP2", "Llama, a step", n, P(user_scripts.trainer, kind="fsdp2")
    )
    for n in (2, 4)
}
SCRIPTS |= of_kinds(
    "generate",
    "Llama, 3 tokens by generate",
    user_scripts.llama,
    ("one", "hf-2", "hf-pp-2", "hf-4"),
    KINDS,
    backward=False,
    forward=user_scripts.generated,
    keywords={},
)
SCRIPTS |= rebuilt(
    "copied", ("native-tp-2", "native-tp-4"), user_scripts.copied, model="a copy of a hooked one"
)

# ---- Quantised weights ---------------------------------------------------------------------------

QUANTISED = {
    "int8-by-hand": "int8 beside scales",
    "int4-by-hand": "two in a byte",
    "torchao": "torchao int8",
    "bnb4": "bitsandbytes 4 bits",
    "bnb8": "bitsandbytes 8 bits",
    "compressed-int4": "compressed-tensors int4",
    "compressed-float8": "compressed-tensors float8",
}
SCRIPTS |= {
    f"quantised-{name}-{ranks}": Case(
        "data parallel" if ranks > 1 else "one process",
        f"MLPs of {kind}",
        ranks,
        P(user_scripts.quantised, kind=kind),
    )
    for ranks in (1, 2, 4)
    for name, kind in QUANTISED.items()
    if (name, ranks) != ("bnb8", 4)  # it is refused, hook by hook, as on two ranks
}
SCRIPTS |= {
    f"quantised-tp-{ranks}": Case(
        "tensor parallel by hand, layouts stated",
        "MLPs of int8 beside scales",
        ranks,
        user_scripts.split_quantised,
    )
    for ranks in (2, 4)
}

# ---- Models of images, sound and text ------------------------------------------------------------

MODELS = {
    "llava": "LLaVA",
    "qwen2_vl": "Qwen2-VL",
    "qwen2_5_vl": "Qwen2.5-VL",
    "idefics3": "Idefics3",
    "gemma3": "Gemma 3",
    "mistral3": "Mistral 3",
    "pixtral": "Pixtral",
    "whisper": "Whisper",
}


def notes_of(name: str, kind: str, ranks: int) -> str:
    if kind != "tp" or not name.startswith("qwen"):
        return ""
    return ", its positions stated" + ", 3 x 3 patches merged" * (ranks == 4)


WITH_A_PLAN = [name for name in MODELS if name != "whisper"]
OF_ROWS = [name for name in MODELS if name not in ("mistral3", "pixtral")]  # not images in a row
LOCAL = 'DDP, dp_batch="local"'
SCRIPTS |= {
    f"modality-{name}-{place}": Case(
        framework,
        MODELS[name] + notes_of(name, kind, ranks),
        ranks,
        P(modality_pairs.of_modality, name=name, kind=kind),
    )
    for place, framework, kind, ranks, names in (
        ("1", "one process", "one", 1, MODELS),
        ("2", HF, "tp", 2, WITH_A_PLAN),
        ("4", HF, "tp", 4, WITH_A_PLAN),
        ("ddp-2", LOCAL, "ddp", 2, OF_ROWS),
        ("ddp-4", LOCAL, "ddp", 4, OF_ROWS),
    )
    for name in names
}

# ---- Inside of experts ---------------------------------------------------------------------------

SCRIPTS |= {
    name.replace("mixture", "inside"): replace(
        case,
        model=f"{case.model}, inside of experts",
        build=P(expert_pairs.inside, build=case.build),
    )
    for name, case in FRAMEWORKS.items()
    if name.startswith("mixture-")
    and (case.ranks == 2 or case.framework.startswith(frameworks.HF_EP))
}

CASES = FRAMEWORKS | SCRIPTS
assert len(CASES) == len(FRAMEWORKS) + len(SCRIPTS)

"""The subcommand ``python -m flex_model harvest`` and its options."""

from __future__ import annotations

import argparse
from importlib.util import find_spec

import torch

from flex_model.sequential.harvest import harvest, report

_OWN = ("command", "run", "json")  # the options that are not arguments of `harvest`


def add_harvest(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand ``harvest``."""
    parser = commands.add_parser(
        "harvest",
        help="a model's activations for a text file, on disk; the model may be larger than memory",
        description="Runs a model layer by layer over the lines of a text file and writes the "
        "outputs of chosen modules to a folder, as safetensors files with a JSON manifest. Each "
        "layer's weights are read once per window of batches. The same command goes on after a "
        "kill.",
        epilog="example: python -m flex_model harvest llama-8b/ --modules model.layers.7.mlp "
        "--data lines.txt --out activations/",
    )
    parser.add_argument("model", help="a Hugging Face folder, with a tokenizer")
    parser.add_argument(
        "--modules",
        nargs="+",
        required=True,
        metavar="NAME",
        help="names, class names or re:PATTERN of modules",
    )
    parser.add_argument("--data", required=True, help="a text file; each line is one sequence")
    parser.add_argument("--out", required=True, help="folder for the activations")
    parser.add_argument("--inputs", action="store_true", help="write the modules' inputs instead")
    parser.add_argument("--batch-size", type=_at_least_1, default=8, metavar="LINES")
    parser.add_argument("--max-length", type=_at_least_1, default=512, metavar="TOKENS")
    parser.add_argument(
        "--window",
        type=_at_least_1,
        default=16,
        metavar="BATCHES",
        help="in progress at once: more need more memory and fewer loads (default 16)",
    )
    parser.add_argument(
        "--targets",
        nargs="+",
        default="auto",
        metavar="NAME",
        help="modules that are loaded one at a time, as --modules (default: the model's layers)",
    )
    parser.add_argument("--dtype", type=_dtype, help="such as bfloat16 (default: the model's own)")
    parser.add_argument("--device", help="such as cuda (default: a GPU where there is one)")
    parser.add_argument(
        "--offload-activations",
        choices=("none", "cpu", "disk"),
        default="none",
        help="where activations of waiting batches are",
    )
    parser.add_argument("--quiet", dest="progress", action="store_false", help="no progress bar")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    parser.set_defaults(run=_harvest)


def _at_least_1(value: str) -> int:
    number = int(value) if value.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {value!r}")
    return number


def _dtype(value: str) -> torch.dtype:
    dtype = getattr(torch, value, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise argparse.ArgumentTypeError(f"expected a dtype such as bfloat16, got {value!r}")
    return dtype


def _harvest(options: argparse.Namespace) -> int:
    settings = {key: value for key, value in vars(options).items() if key not in _OWN}
    settings["progress"] &= find_spec("tqdm") is not None
    report(harvest(**settings), options.out, as_json=options.json)
    return 0

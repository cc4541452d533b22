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
        usage="python -m flex_model harvest MODEL --modules NAME ... --data FILE --out FOLDER ...",
        description="Runs a model layer by layer, writes what modules give; resumes after a kill.",
        epilog="example: python -m flex_model harvest llama-8b/ --modules layers.7.mlp "
        "--data a.txt --out out/",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=38),
    )
    parser.add_argument("model", help="a Hugging Face folder, with a tokenizer")
    parser.add_argument(
        "--modules",
        nargs="+",
        required=True,
        metavar="NAME",
        help="names, class names or re:PATTERN of modules",
    )
    parser.add_argument(
        "--data", required=True, metavar="FILE", help="a text file; each line is one sequence"
    )
    parser.add_argument(
        "--out", required=True, metavar="FOLDER", help="of safetensors and a manifest"
    )
    parser.add_argument("--inputs", action="store_true", help="write the modules' inputs instead")
    parser.add_argument("--batch-size", type=_at_least_1, default=8, metavar="LINES")
    parser.add_argument("--max-length", type=_at_least_1, default=512, metavar="TOKENS")
    parser.add_argument(
        "--window",
        type=_at_least_1,
        default=16,
        metavar="BATCHES",
        help="at once: more take more memory and fewer loads (default 16)",
    )
    parser.add_argument(
        "--targets",
        nargs="+",
        default="auto",
        metavar="NAME",
        help="modules that are loaded one by one (default: layers)",
    )
    parser.add_argument("--dtype", type=_dtype, help="such as bfloat16 (default: the model's own)")
    parser.add_argument("--device", help="such as cuda (default: a GPU where there is one)")
    parser.add_argument(
        "--offload-activations",
        choices=("none", "cpu", "disk"),
        default="none",
        metavar="WHERE",
        help="activations of waiting batches: none, cpu, disk",
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

"""The command line: ``python -m flex_model inspect | doctor | harvest``; ``--help`` tells more."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from flex_model.diagnostics import doctor
from flex_model.distributed.layout import Shape
from flex_model.inspection import offline
from flex_model.sequential.command import add_harvest


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m flex_model", description="flex_model's tools")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_inspect(commands)
    _add_doctor(commands)
    add_harvest(commands)
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except (ValueError, OSError, ImportError, offline.CannotInspectError) as error:
        print(f"python -m flex_model {options.command}: {error}", file=sys.stderr)
        return 1


def _add_inspect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "inspect",
        help="the modules of a model, where hooks can sit, and how their tensors are split",
        description="Prints the modules of a model as a tree, with the full shape of what each "
        "takes and gives, and its layout under the sharding given. One process, no weights and "
        "no computing: the model is built on the meta device and run on shapes.",
    )
    parser.add_argument(
        "model",
        help="a Hugging Face folder or config.json, or package.module:function or file.py:function "
        "that returns a module; the function is called once for every rank, inside a process group "
        "without transfers, and may shard the module",
    )
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks (default 1)")
    parser.add_argument("--dp", type=int, default=1, help="data-parallel ranks (default 1)")
    parser.add_argument(
        "--input",
        action="append",
        type=_shape_and_dtype,
        metavar="SIZES[:DTYPE]",
        help="full shape of an input, for example 4,128:int64; once for each positional one "
        "(default, for Hugging Face models: 2 x dp rows of 8 tokens)",
    )
    parser.add_argument("--all", action="store_true", help="show layers that are alike one by one")
    parser.set_defaults(run=_inspect)


def _shape_and_dtype(value: str) -> tuple[Shape, str]:
    sizes, _, dtype = value.partition(":")
    try:
        return tuple(int(size) for size in sizes.split(",")), dtype or "float32"
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected sizes and a dtype as in 4,128:int64, got {value!r}"
        ) from None


def _inspect(options: argparse.Namespace) -> int:
    tree = offline.inspect(options.model, options.tp, options.dp, options.input)
    tree.print(show_all=options.all)
    return 0


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor",
        help="what is installed, built and loaded, and which transports work between two ranks",
        description="Looks at this machine and this installation, and starts two processes for "
        "each transport, which gather a tensor and compare it bit for bit. Takes half a minute. "
        "The exit status is 0 if all that must work does.",
        epilog="example: python -m flex_model doctor --json > report.json",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    report = doctor.examine()
    print(report.json() if options.json else report)
    return 0 if report.is_well else 1

"""The command line: ``python -m flex_model demo | inspect | doctor | harvest | compare``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from flex_model import demo
from flex_model.diagnostics import doctor
from flex_model.diagnostics.local_ranks import RankError
from flex_model.diagnostics.progress_bar import progress
from flex_model.distributed.placement import Shape
from flex_model.errors import HookError
from flex_model.fingerprints import compare
from flex_model.inspection import offline
from flex_model.sequential.harvest import add_harvest

_TOLD = (ValueError, OSError, ImportError, HookError, offline.CannotInspectError, RankError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; return the exit status."""
    options = make_parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except _TOLD as error:
        print(f"python -m flex_model {options.command}: {error}", file=sys.stderr)
        return 1


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all subcommands; ``options.run`` runs the chosen one."""
    parser = argparse.ArgumentParser(
        prog="python -m flex_model",
        description="flex_model's tools",
        epilog="example: python -m flex_model demo",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _add_demo(commands)
    _add_inspect(commands)
    _add_doctor(commands)
    add_harvest(commands)
    _add_compare(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "demo",
        help="find and ablate an induction head, on 1 process and on several ranks",
        description="Finds the induction head of a small hand-written model and ablates it: on "
        "one process, and on tensor-parallel ranks that it starts. Shows the hooks with their "
        "costs, and compares all numbers. Takes some seconds, and needs no other package. "
        "The exit status is 0 if the numbers are equal.",
        epilog="example: python -m flex_model demo --html map.html",
    )
    parser.add_argument(
        "--ranks", type=int, choices=(1, 2, 4), default=2, help="besides 1 process (default 2)"
    )
    parser.add_argument("--html", metavar="FILE", help="also write the model map as a page")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> int:
    if options.html is not None:
        open(options.html, "w").close()  # fails here if it can't be written, not in a rank
    steps = progress([(1, None), (options.ranks, options.html)], "demo", is_shown=True)
    one, several = [demo.on_ranks(*step) for step in steps]
    comparison = demo.DemoComparison(one, several, options.ranks)
    print(json.dumps(comparison.json(), indent=2) if options.json else comparison)
    if options.html is not None:
        print(f"the model map is in {options.html}", file=sys.stderr)
    return 0 if comparison.is_equal else 1


def _add_inspect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "inspect",
        help="print the modules of a model, with the layouts of their tensors",
        usage="python -m flex_model inspect MODEL [options]",
        description="Prints a model's modules as a tree, with full shapes and layouts for a "
        "sharding. Runs in one process, without weights or computation: on shapes.",
        epilog="example: python -m flex_model inspect llama-8b/config.json --tp 4 --dp 2",
    )
    parser.add_argument(
        "model",
        help="a Hugging Face folder or config.json; or file.py:function or package.module:function "
        "that makes a rank's module",
    )
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks (default 1)")
    parser.add_argument("--dp", type=int, default=1, help="data-parallel ranks (default 1)")
    parser.add_argument(
        "--input",
        action="append",
        type=_shape_and_dtype,
        metavar="SHAPE",
        help="full shape of each positional input, such as 4,128:int64 (default, for Hugging Face "
        "models: 2 x dp rows of 8 tokens); one alone is its main input, such as 2,3,224,224",
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--hooks",
        metavar="FILE",
        help="print instead what hooks would cost: in each line one, such as 'model.layers.*.mlp "
        "edit full_backward' or 'lm_head read'",
    )
    parser.add_argument(
        "--edit-on", choices=("all", "rank0"), default="all", help="with --hooks: as of FlexModel"
    )
    instead.add_argument("--json", action="store_true", help="print all modules as JSON")
    parser.add_argument("--all", action="store_true", help="show equal layers one by one")
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
    lines = None if options.hooks is None else offline.read(options.hooks)
    sizes = options.tp, options.dp
    run = offline.run_on_shapes(options.model, *sizes, options.input, show_progress=True)
    if lines is not None:
        print(offline.predict(run, lines, options.edit_on))
    elif options.json:
        print(json.dumps(run.tree().json(), indent=2))
    else:
        run.tree().print(show_all=options.all)
    return 0


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor",
        help="report what is installed, built and loaded, and which transports work here",
        description="Inspects this machine and this installation, runs a kernel on each GPU, and "
        "starts two processes for each transport, which gather a tensor and compare it bit for "
        "bit. Says how to mend what is missing. Takes half a minute. The exit status is 0 if "
        "nothing is missing.",
        epilog="example: python -m flex_model doctor --json > report.json",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    report = doctor.examine(show_progress=True)
    print(report.json() if options.json else report)
    return 0 if report.is_well else 1


def _add_compare(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "compare",
        help="print where two recorded runs first differ",
        description="Compares two folders of flex.fingerprint, site by site, in units of rounding, "
        "and names the first module that differs by more than its inputs explain. The exit status "
        "is 0 if there is none, and no call or gradient is lost.",
        epilog="example: python -m flex_model compare before after --html page.html",
    )
    parser.add_argument("a", metavar="A", help="the folder of the run that is taken as right")
    parser.add_argument("b", metavar="B", help="the folder of the other run")
    parser.add_argument("--html", metavar="FILE", help="also write it as a page")
    parser.set_defaults(run=_compare)


def _compare(options: argparse.Namespace) -> int:
    comparison = compare(options.a, options.b)
    print(comparison)
    if options.html is not None:
        comparison.show(options.html)
    return 0 if comparison.is_equal else 1

"""Writes the activations of a Hugging Face model over a text file to disk; the model may be larger
than memory. ``python -m flex_model harvest`` runs it.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from flex_model.distributed import values
from flex_model.hooks.function import HookFunction
from flex_model.integrations.checkpoints import model_on_meta
from flex_model.model import FlexModel
from flex_model.records.store import ActivationStore
from flex_model.sequential.runner import RunResult, run
from flex_model.sequential.targets import find_modules

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_DTYPES = ("bfloat16", "float16", "float32", "float64")  # that a model can be built in


def harvest(
    model: str | Path,
    modules: Sequence[str],
    data: str | Path,
    out: str | Path,
    *,
    batch_size: int = 8,
    max_length: int = 512,
    window: int | None = 16,
    dtype: torch.dtype | None = None,
    inputs: bool = False,
    progress: bool = False,
    **settings: Any,
) -> RunResult:
    """Write the activations of chosen modules for every line of a text file into an
    ``ActivationStore``. Called again after a kill, it continues where it was, with the same
    weights: the files' contents are hashed first, and others are an error.

    Example::

        harvest("checkpoint/", ["model.layers.7.mlp"], "lines.txt", "activations/", window=8)
        for tensor in ActivationStore("activations/").tensors("model.layers.7.mlp"):
            ...                                          # (lines, tokens, features) of each batch

    Args:
        model: A Hugging Face folder with a tokenizer.
        modules: Names, class names or ``re:`` patterns, as in ``match_modules``.
        data: One text per line; empty lines are skipped.
        max_length: In tokens, at most the model's ``max_position_embeddings``: longer lines are
            cut, and counted in a warning.
        dtype: The dtype that the model computes in (default: its configuration's own).
        inputs: Write the modules' inputs (their first tensor) rather than their outputs.
        settings: As in ``run``: ``targets``, ``prefetch``, ``offload_activations``, ``device``, ...

    Raises:
        ValueError: a name that matches no module, or none that is called, or no text.
        FileNotFoundError: there is no such folder or file.
    """
    folder = Path(model)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"harvest: {folder} has no config.json; give a folder as save_pretrained writes it"
        )
    empty = model_on_meta(folder, "AutoModel", dtype)
    if "input_ids" not in inspect.signature(empty.forward).parameters:
        raise ValueError(
            f"harvest: {type(empty).__name__} reads {empty.main_input_name}, and not the tokens of "
            "a text; call flex_model.sequential.run with batches of your own"
        )
    positions = getattr(empty.config.get_text_config(), "max_position_embeddings", None)
    max_length = min(max_length, positions or max_length)  # some configurations have none
    lines = _Lines(data)
    batches = _batches(lines, _tokenizer(folder), empty, batch_size, max_length)
    with FlexModel(empty, {}) as flex:
        register = flex.register_forward_pre_hook if inputs else flex.register_forward_hook
        names = _names(empty, modules)
        for name in names:
            register(HookFunction(name))
        store = ActivationStore(out, key=_key(folder, empty, batch_size, max_length))
        try:
            result = run(
                flex,
                batches,
                weights=folder,
                window=window,
                store=store,
                progress=progress,
                on_output=lambda index, output: None,
                **settings,
            )
        except ValueError as error:
            if "batch_index" in vars(error) and getattr(empty.config, "is_encoder_decoder", False):
                raise ValueError(
                    f"harvest: {type(empty).__name__} can't be called with what its encoder reads "
                    f"alone ({error}); call sequential.run with batches that have its decoder's "
                    "inputs"
                ) from error
            raise
    if not store.names:
        raise ValueError(f"harvest: {type(empty).__name__} calls none of {', '.join(names)}")
    if lines.num_cut:
        warnings.warn(
            f"harvest: {lines.num_cut} of {len(lines)} lines were cut at {max_length} tokens, by "
            "max_length (--max-length) or the model's max_position_embeddings",
            stacklevel=2,
        )
    return result


def _tokenizer(folder: Path) -> Any:
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"harvest: no tokenizer in {folder} ({error}); save it there with save_pretrained, or "
            "call flex_model.sequential.run with batches of your own"
        ) from error
    if tokenizer.pad_token is None:  # any will do: padding is masked
        token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
        tokenizer.add_special_tokens({"pad_token": token})
    return tokenizer


class _Lines(IterableDataset[str]):
    """The lines of a text file that are not empty; each iteration reads the file again.

    Attributes:
        num_cut: How many of them were longer than a sequence may be.
    """

    def __init__(self, file: str | Path) -> None:
        self._file, self.num_cut = Path(file), 0
        self._number = sum(1 for _ in self)
        if not self._number:
            raise ValueError(f"harvest: {file} has no line with text")

    def __len__(self) -> int:
        return self._number

    def note_cut(self, number: int) -> None:
        self.num_cut += number

    def __iter__(self) -> Iterator[str]:
        with self._file.open(encoding="utf-8") as file:
            yield from (line.rstrip("\n") for line in file if line.strip())


def _batches(
    lines: _Lines, tokenizer: Any, model: nn.Module, batch_size: int, max_length: int
) -> DataLoader[Any]:
    """Return the batches of lines, tokenized and padded to the longest of each."""
    names = inspect.signature(model.forward).parameters

    def is_longer(line: str) -> bool:
        ids = tokenizer(line, truncation=True, max_length=max_length + 1)["input_ids"]
        return len(ids) > max_length

    def tokenized(some: list[str]) -> dict[str, Any]:
        made = tokenizer(
            some, return_tensors="pt", padding=True, truncation=True, max_length=max_length
        )
        if made["input_ids"].shape[1] == max_length:
            lines.note_cut(sum(map(is_longer, some)))
        batch = {name: value for name, value in made.items() if name in names}
        if "use_cache" in names:
            batch["use_cache"] = False  # keys and values of every layer would pile up
        return batch

    generator = torch.Generator()  # else iterating draws from the process's own
    return DataLoader(lines, batch_size, collate_fn=tokenized, generator=generator)


def _names(model: nn.Module, wanted: Sequence[str]) -> list[str]:
    found: list[str] = []
    for name, module in find_modules(model, wanted, "harvest:"):
        if name and not isinstance(module, _CONTAINERS):
            found.append(name)
    if not found:
        raise ValueError(
            f"harvest: {', '.join(map(repr, wanted))} is a list or dict of modules, which is never "
            rf"called; give its members: 're:{wanted[0]}\.[^.]+$' if it is a name"
        )
    return found


def _key(folder: Path, model: nn.Module, batch_size: int, max_length: int) -> dict[str, Any]:
    """Return what records depend on beside hooks and inputs; by content, so folders may move."""
    digest = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=16)
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        content = torch.from_file(str(file), size=size, dtype=torch.uint8)  # memory-mapped
        # All bytes: weights that were trained on have the sizes of those before.
        digest.update(f"{file.name} {size} {values.fingerprint(content)}".encode())
    dtype = next((str(parameter.dtype) for parameter in model.parameters()), "none")
    return {
        "model": digest.hexdigest(),
        "dtype": dtype,
        "batch_size": batch_size,
        "max_length": max_length,
    }


def report(result: RunResult, out: str | Path, as_json: bool = False) -> None:
    """Print what a harvest wrote, and what it cost."""
    store = ActivationStore(out)
    facts = {
        "out": str(out),
        "modules": store.names,
        "num_batches": store.num_batches,
        "num_targets": len(result.loads),
        "num_loads": sum(result.loads.values()),
        "bytes_read": result.bytes_read,
    }
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    print(f"{out}: {store.num_batches} batches of {', '.join(store.names)}")
    costs = "{num_loads} loads of {num_targets} targets, {0:.1f} MiB read"
    print(costs.format(result.bytes_read / 2**20, **facts), file=sys.stderr)


_OWN = ("command", "run", "json")  # the options that are not arguments of `harvest`


def add_harvest(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand ``harvest``."""
    parser = commands.add_parser(
        "harvest",
        help="a model's activations for a text file, on disk; the model may be larger than memory",
        usage="python -m flex_model harvest MODEL --modules NAME ... --data FILE --out FOLDER ...",
        description="Runs a model layer by layer, writes what modules give; resumes after a kill.",
        epilog="example: python -m flex_model harvest llama/ --modules model.layers.7.mlp "
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
    parser.add_argument(
        "--batch-size", type=_at_least_1, default=8, metavar="LINES", help="(default 8)"
    )
    parser.add_argument(
        "--max-length",
        type=_at_least_1,
        default=512,
        metavar="TOKENS",
        help="longer lines are cut, and counted (default 512)",
    )
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
    if value not in _DTYPES:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(_DTYPES)}, got {value!r}")
    dtype: torch.dtype = getattr(torch, value)
    return dtype


def _harvest(options: argparse.Namespace) -> int:
    settings = {key: value for key, value in vars(options).items() if key not in _OWN}
    settings["progress"] &= find_spec("tqdm") is not None
    report(harvest(**settings), options.out, as_json=options.json)
    return 0

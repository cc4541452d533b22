"""The folder of a fingerprint: its file is written last, and a folder without it unfinished."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

from flex_model.distributed.tensor_dicts import DTYPE_OF_NAME, describe
from flex_model.fingerprints.summary import NUM_SAMPLES, ROUTING, Summary
from flex_model.records.store.files import ASIDE, MappedFile, safetensors_of, write_whole

Folder = str | os.PathLike[str]
_RUN, _TENSORS = "run.safetensors", "tensors"
_PLAIN = (Tensor, nn.Parameter)
_IN_JSON = ("name", "kind", "call", "shape", "callers", "layout", "splits")


@dataclass(eq=False)
class RecordedRun:
    """The summaries of one run, in the order of execution.

    Attributes:
        refused: By site, such as ``"forward of layers.0"``, why it could not be recorded.
        inputs: The full arguments, ``[args, kwargs]``; None where they can't be kept in a file.
        num_bytes: Those of all recorded tensors.
        replaced: The inputs that were another run's, as ``[name, call]``: ``compare(own=True)``.
        has_tensors: Whether the full tensors are on disk, too.
        parameters: The names of all, with a gradient or not.
    """

    sites: list[Summary]
    refused: dict[str, str]
    inputs: Any
    num_bytes: int
    replaced: list[Any] = field(default_factory=list)
    has_tensors: bool = False
    parameters: list[str] = field(default_factory=list)


class RunWriter:
    """Writes a run to a folder; what another fingerprint left there is replaced.

    Raises:
        ValueError: the folder has other files.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        names = {one.name.removesuffix(ASIDE) for one in folder.iterdir()}
        if names - {_RUN, _TENSORS}:
            raise ValueError(f"fingerprint: {folder} has other files; give a folder of its own")
        (folder / _RUN).unlink(missing_ok=True)  # first: from now on it is unfinished
        for old in (folder / _TENSORS).glob("*"):
            old.unlink()
        self.folder = folder
        self._error: OSError | None = None

    def add(self, number: int, full: Tensor) -> None:
        """Write the full tensor of the site of this number. ``finish`` raises what fails: until
        then the other ranks wait for this one's part of the run.
        """
        try:
            (self.folder / _TENSORS).mkdir(exist_ok=True)
            _write(_file_of(self.folder, number), {"full": full.detach()})
        except OSError as error:
            self._error = error

    def finish(self, run: RecordedRun) -> None:
        """Write all else.

        Raises:
            OSError: something could not be written.
        """
        if self._error is not None:
            raise self._error
        structure, inputs = as_json(run.inputs)
        values = {f"input {i}": one for i, one in enumerate(inputs)}
        if run.sites:
            values["moments"] = torch.stack([site.moments for site in run.sites])
            values["samples"] = torch.cat([site.sample.cpu() for site in run.sites])
        for i, site in enumerate(run.sites):
            if site.margins is not None:
                values[f"margins {i}"] = site.margins
        sites = [
            {name: getattr(site, name) for name in _IN_JSON} | {"dtype": str(site.dtype)}
            for site in run.sites
        ]
        described = {**vars(run), "sites": sites, "inputs": [structure, describe(inputs)]}
        values["run"] = torch.frombuffer(
            bytearray(json.dumps(described).encode()), dtype=torch.uint8
        )
        _write(self.folder / _RUN, values)


def read_run(folder: Folder) -> RecordedRun:
    """Read a run; full tensors are read when they are needed.

    Raises:
        ValueError: the folder does not hold a finished fingerprint.
    """
    folder = Path(folder)
    if not (folder / _RUN).exists():
        raise ValueError(
            f"compare: {folder} has no whole fingerprint: there is none, or its run was "
            f"interrupted; run flex.fingerprint({str(folder)!r}, ...) again"
        )
    values, sites, end = _read(folder / _RUN), [], 0
    run = json.loads(bytes(values["run"].tolist()))
    for i, row in enumerate(run["sites"]):
        dtype, shape = DTYPE_OF_NAME[row["dtype"]], tuple(row["shape"])
        numel = math.prod(shape)
        kept = numel if row["kind"] == ROUTING else min(numel, NUM_SAMPLES)
        start, end = end, end + kept * dtype.itemsize
        read = (
            functools.partial(_read_full, folder, i, dtype, shape) if run["has_tensors"] else None
        )
        sample = values["samples"][start:end]
        margins = values.get(f"margins {i}")
        tensors = {"moments": values["moments"][i], "sample": sample, "margins": margins}
        sites.append(Summary(**{**row, **tensors, "dtype": dtype, "shape": shape}, read_full=read))
    structure, described = run["inputs"]
    inputs = [
        values[f"input {i}"].view(DTYPE_OF_NAME[dtype]).reshape(shape)
        for i, (dtype, shape) in enumerate(described)
    ]
    return RecordedRun(**{**run, "sites": sites, "inputs": of_json(structure, inputs)})


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    whole = {k: one.cpu().resolve_conj().resolve_neg().contiguous() for k, one in tensors.items()}
    chunks = safetensors_of(whole)
    write_whole(path, chunks, syncs=False)


def _read_full(folder: Path, number: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    return _read(_file_of(folder, number))["full"].view(dtype).reshape(shape)


def _read(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file; tensors of dtypes that it has no name for are bytes."""
    try:
        return MappedFile(path).tensors()
    except (KeyError, TypeError, ValueError, RuntimeError, OSError) as error:
        raise ValueError(f"compare: {path} can't be read ({error}); record the run again") from None


def _file_of(folder: Path, number: int) -> Path:
    return folder / _TENSORS / f"{number:06}.safetensors"


def as_json(inputs: Any) -> tuple[Any, list[Tensor]]:
    """Return what JSON holds of a tree, and its plain tensors; None of None, and if it has more."""
    if inputs is None:
        return None, []
    leaves, spec = tree_flatten(inputs)
    plain = [None if type(leaf) in _PLAIN else [leaf] for leaf in leaves]
    try:
        structure = json.loads(json.dumps([treespec_dumps(spec), plain]))
    except (TypeError, NotImplementedError):
        return None, []
    return structure, [leaf for leaf in leaves if type(leaf) in _PLAIN]


def of_json(structure: Any, tensors: Iterable[Tensor]) -> Any:
    """Return the tree of which ``as_json`` returned this; None for None."""
    if structure is None:
        return None
    (spec, plain), left = structure, iter(tensors)
    leaves = [next(left) if one is None else one[0] for one in plain]
    return tree_unflatten(leaves, treespec_loads(spec))

"""Saves the trainable modules and their optimizer to a file, without the wrapped model.

The file is what ``torch.save`` makes of their state dicts, and is read with ``torch.load(path,
weights_only=True)``. It does not depend on how the model is sharded, so it is loaded on any number
of ranks and any layout. Rank 0 writes and reads it.
"""

from __future__ import annotations

import io
import json
import os
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flex_model.distributed import values
from flex_model.distributed.agreement import gather_checked
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.header import site_hash
from flex_model.distributed.serialization import decode, encode
from flex_model.distributed.tensor_dicts import describe, from_rank
from flex_model.errors import agreed
from flex_model.parameters.trainable import refuse_different
from flex_model.records.store.files import write_whole

_FILE_TIMEOUT_S = 1800.0  # for other ranks' wait while rank 0 writes or reads

_SECTION = "trainable-modules-cannot-be-saved-or-loaded"


# ---- The contents of a file ----


def _contents(modules: nn.ModuleDict, optimizer: Any, extra: Any) -> dict[str, Any]:
    """Return what a file contains. TypeError or ValueError for what can't be saved.

    ``hashes`` are kept since ``torch.load`` does not notice that bytes were changed.
    """
    contents = {
        "modules": dict(modules.state_dict()),
        "optimizer": None,
        "optimizer_parameters": None,
        "extra": extra,
    }
    if optimizer is not None:
        contents["optimizer_parameters"] = _parameters(modules, optimizer)
        contents["optimizer"] = optimizer.state_dict()
    return {**contents, "hashes": _hashes(contents)}


def _parameters(modules: nn.ModuleDict, optimizer: Any) -> list[list[str]]:
    """Return the names of an optimizer's parameters, by group."""
    if not all(hasattr(optimizer, name) for name in ("param_groups", "state_dict")):
        raise TypeError(
            f"expected an optimizer of torch, or one like it, got {type(optimizer).__name__}"
        )
    name_of = {id(parameter): name for name, parameter in modules.named_parameters()}
    found = [[name_of.get(id(p), "") for p in g["params"]] for g in optimizer.param_groups]
    unknown = sum(not name for group in found for name in group)
    if unknown:
        raise ValueError(
            f"the optimizer has {unknown} parameters that are not those of trainable modules; give "
            "flex.trainable_modules.parameters() an optimizer of their own, and save the wrapped "
            "model's apart (torch.distributed.checkpoint)"
        )
    return found


def _hashes(contents: dict[str, Any]) -> dict[str, Any]:
    optimizer = [contents["optimizer"], contents["optimizer_parameters"]]
    return {
        "modules": {name: _hash(value, name) for name, value in contents["modules"].items()},
        "optimizer": {"the optimizer": _hash(optimizer, "the optimizer")},
        "extra": _hash(contents["extra"], "extra"),
    }


def _hash(value: Any, name: str) -> int:
    tensors: list[Tensor] = []
    try:
        encoded = encode(value, tensors)
    except TypeError as error:
        raise _not_saved(name, str(error)) from None
    text = json.dumps([name, encoded, describe(tensors)])
    return site_hash(text, *map(values.fingerprint, tensors))


def _not_saved(name: str, what: str) -> TypeError:
    return TypeError(
        f"save_trainable_modules: {name} has {what}, which can't be saved; keep tensors, numbers, "
        "text, and lists and dicts of them"
    )


# ---- Saving ----


def save(
    path: str | os.PathLike[str],
    modules: nn.ModuleDict,
    optimizer: Any,
    extra: Any,
    communicator: Communicator,
    runs_edits: bool,
) -> None:
    """See ``FlexModel.save_trainable_modules``.

    Args:
        runs_edits: Whether this rank runs editing functions: then its modules must be rank 0's.
    """
    is_first = communicator.mesh.rank == 0
    contents: dict[str, Any] = {}

    def hashes() -> dict[str, Any]:
        if runs_edits:
            contents.update(_contents(modules, optimizer, extra if is_first else None))
        return {"with optimizer": optimizer is not None, **contents.get("hashes", {})}

    agree = partial(gather_checked, communicator, section=_SECTION)
    per_rank = agree("what is in a file of trainable modules", hashes)
    have_optimizer = [of_rank["with optimizer"] for of_rank in per_rank]
    if any(have_optimizer) and not have_optimizer[0]:
        raise agreed(
            ValueError(
                f"save_trainable_modules: ranks {[r for r, h in enumerate(have_optimizer) if h]} "
                "gave an optimizer and rank 0 did not; rank 0's is saved, give it there"
            )
        )
    refuse_different([of_rank.get("modules") for of_rank in per_rank])
    refuse_different(
        [of_rank.get("optimizer") if of_rank["with optimizer"] else None for of_rank in per_rank]
    )
    moment = f"the file {Path(path).name} of trainable modules"
    with _waiting(communicator):
        agree(moment, lambda: _write(Path(path), contents) if is_first else None)


def _write(path: Path, contents: dict[str, Any]) -> None:
    file = io.BytesIO()
    torch.save(contents, file)
    file.seek(0)
    refused = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    if refused:  # by torch.load(weights_only=True)
        raise _not_saved("extra, or the optimizer's state,", ", ".join(refused))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, [file.getvalue()])


# ---- Loading ----


def load(
    path: str | os.PathLike[str], modules: nn.ModuleDict, optimizer: Any, communicator: Communicator
) -> Any:
    """See ``FlexModel.load_trainable_modules``."""
    tensors: list[Tensor] = []

    def read() -> Any:
        if communicator.mesh.rank > 0:
            return None
        return encode(_read(Path(path)), tensors), describe(tensors)

    agree = partial(gather_checked, communicator, section=_SECTION)
    with _waiting(communicator):
        encoded, described = agree(f"the file {Path(path).name} of trainable modules", read)[0]
    contents = decode(encoded, from_rank(communicator, 0, tensors, described))
    moment = "whether a file of trainable modules fits"
    agree(moment, lambda: _check(Path(path), contents, modules, optimizer))
    modules.load_state_dict(contents["modules"])
    if optimizer is not None:
        optimizer.load_state_dict(contents["optimizer"])
    return contents["extra"]


def _read(path: Path) -> dict[str, Any]:
    """Read a whole file that ``save`` wrote, and check its values by their hashes.

    Raises:
        OSError: there is none, or it can't be read.
        ValueError: another file, or not the whole of it.
    """
    if not path.is_file():
        raise FileNotFoundError(f"load_trainable_modules: there is no file {path}")
    data = io.BytesIO(path.read_bytes())
    try:
        contents = torch.load(data, map_location="cpu", weights_only=True)
        if contents["hashes"] != _hashes(contents):
            raise ValueError("its values are not those that were written")
    except Exception as error:  # of many kinds, by where bytes were changed
        first_line = str(error).partition("\n")[0]
        raise ValueError(
            f"load_trainable_modules: {path} is not a whole file of save_trainable_modules "
            f"({type(error).__name__}: {first_line}); take an older one"
        ) from error
    return contents


def _check(path: Path, contents: dict[str, Any], modules: nn.ModuleDict, optimizer: Any) -> None:
    """ValueError where the file does not fit these modules and this optimizer."""
    where = f"load_trainable_modules: {path}: "
    state, saved = modules.state_dict(), contents["modules"]
    missing = [name for name in state if name not in saved]
    unexpected = [name for name in saved if name not in state]
    if missing or unexpected:
        raise ValueError(
            f"{where}not in the file: {missing}; only in the file: {unexpected}; register the "
            "modules that were saved, by the same names"
        )
    for name, tensor in state.items():
        if isinstance(tensor, Tensor) and _kind(saved[name]) != _kind(tensor):
            raise ValueError(
                f"{where}{name!r} is {_kind(saved[name])} in the file, and {_kind(tensor)} here; "
                "make it as it was saved"
            )
    if optimizer is None:
        return
    if contents["optimizer"] is None:
        raise ValueError(
            f"{where}there is no optimizer in the file; load it without one, or save with "
            "save_trainable_modules(path, optimizer)"
        )
    groups, own = contents["optimizer_parameters"], _parameters(modules, optimizer)
    if groups != own:  # the order counts: state is by the numbers of parameters
        raise ValueError(
            f"{where}the optimizer's groups of parameters are {own}, and in the file {groups}; "
            "make it of the same ones, in the same order"
        )


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"of {value.dtype} and shape {tuple(value.shape)}"


def _waiting(communicator: Communicator) -> AbstractContextManager[None]:
    """A context for a wait for rank 0's disk; a rank that dies is detected all the same."""
    return communicator.deadline(max(communicator.timeout_s, _FILE_TIMEOUT_S))

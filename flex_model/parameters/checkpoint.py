"""Saves the trainable modules and their optimizer to a file, without the wrapped model.

The file does not depend on how the model is sharded, so it is loaded on any number of ranks and any
layout. It is a safetensors file: tensors by name, and all else as JSON in its header. Rank 0 writes
and reads it.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flex_model.distributed import values
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.header import site_hash
from flex_model.distributed.serialization import decode, encode
from flex_model.distributed.tensor_dicts import DTYPE_OF_NAME, exchange_json, from_rank
from flex_model.errors import agreed, see
from flex_model.integrations import dtensor
from flex_model.parameters.trainable import refuse_different, tensors_of
from flex_model.records.store.files import safetensors_of, write_whole

_VERSION = 1
_PREFIX, _OPTIMIZER, _EXTRA = "trainable_modules.", "optimizer.", "extra"  # of tensors' names
_FILE_TIMEOUT_S = 1800.0  # for other ranks' wait while rank 0 writes or reads

_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (ValueError, TypeError, RuntimeError, OSError, FileNotFoundError, PermissionError)
}


@dataclass
class State:
    """The contents of a file.

    Attributes:
        index: The parts as JSON, with numbers in place of tensors.
        tensors: By their names in the file, on the CPU.
    """

    index: dict[str, Any]
    tensors: dict[str, Tensor]

    @staticmethod
    def of(modules: nn.ModuleDict, optimizer: Any, extra: Any) -> State:
        """Make the state to save. TypeError or ValueError for what can't be saved."""
        index: dict[str, Any] = {"version": _VERSION, "modules": {}}
        tensors: dict[str, Tensor] = {}
        for name, value in modules.state_dict().items():
            index["modules"][name] = _put(tensors, value, _PREFIX + name)
        if optimizer is not None:
            named = _by_name(modules, optimizer)
            index["state"] = {
                parameter: {
                    key: _put(tensors, value, f"{_OPTIMIZER}{parameter}.{key}")
                    for key, value in of_parameter.items()
                }
                for parameter, of_parameter in named.pop("state").items()
            }
            index["optimizer"] = _put(tensors, named, _OPTIMIZER + "settings")
        index["extra"] = _put(tensors, extra, _EXTRA)
        kept = {name: _owned(tensor) for name, tensor in tensors.items()}
        index["tensors"] = {
            name: [str(t.dtype), list(t.shape), int(values.fingerprint(t)[0])]
            for name, t in kept.items()
        }
        return State(index, kept)

    def digests(self) -> dict[str, int]:
        """Return by name the hashes that must be equal on all ranks; ``extra`` is rank 0's."""
        found = {
            name: hashed
            for name, (_, _, hashed) in self.index["tensors"].items()
            if name.startswith((_PREFIX, _OPTIMIZER))
        }
        if "optimizer" in self.index:
            settings = json.dumps([self.index["state"], self.index["optimizer"]])
            found["settings of the optimizer"] = site_hash(settings)
        return found

    def value(self, put: list[Any]) -> Any:
        """Return a part as it was passed to ``of``; its tensors are those of ``tensors``."""
        encoded, names = put
        return decode(encoded, [self.tensors[name] for name in names])

    def copy_of(self, put: list[Any]) -> Any:
        """Return ``value`` with copies of its tensors, for others to keep: files are mapped."""
        return copy.deepcopy(self.value(put))


def _put(tensors: dict[str, Tensor], value: Any, name: str) -> list[Any]:
    """Encode a part as JSON; add its tensors, with names that begin with this one."""
    found: list[Tensor] = []
    try:
        encoded = encode(value, found)
    except TypeError as error:
        raise TypeError(
            f"save_trainable_modules: {name} has {error}, which can't be saved; keep tensors, "
            "numbers, text, and lists and dicts of them"
        ) from None
    names = [name] if isinstance(value, Tensor) else [f"{name}.{i}" for i in range(len(found))]
    for own, tensor in zip(names, found):
        if dtensor.is_dtensor(tensor) or tensor.is_meta or tensor.layout != torch.strided:
            kind = "a DTensor" if dtensor.is_dtensor(tensor) else "not a dense tensor with values"
            raise TypeError(
                f"save_trainable_modules: {own} is {kind}; trainable modules are whole on every "
                "rank, give them plain tensors"
            )
        tensors[own] = tensor
    return [encoded, names]


def _owned(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


# ---- Optimizers, by parameters' names ----


def _by_name(modules: nn.ModuleDict, optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's ``state_dict`` with parameters' names in place of their numbers."""
    names = _names(modules, optimizer)
    state = optimizer.state_dict()
    in_order = [name for group in names for name in group]
    groups = []
    for group, own in zip(state["param_groups"], names):
        kept = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        groups.append({**kept, "params": own})
    of_parameters = {}
    for key, value in state["state"].items():
        if not isinstance(key, int) or not isinstance(value, Mapping):
            raise TypeError(
                f"save_trainable_modules: the state of {type(optimizer).__name__} is not by "
                "parameters, as that of torch's optimizers is; save its state_dict() in extra"
            )
        of_parameters[in_order[key]] = value
    others = {k: v for k, v in state.items() if k not in ("state", "param_groups")}
    return {"state": of_parameters, "param_groups": groups, "others": others}


def _names(modules: nn.ModuleDict, optimizer: Any) -> list[list[str]]:
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


def _check_optimizer(index: dict[str, Any], modules: nn.ModuleDict, optimizer: Any) -> None:
    if "optimizer" not in index:
        raise ValueError(
            "there is no optimizer in the file; load it without one, or save with "
            "save_trainable_modules(path, optimizer)"
        )
    groups = _groups(index)
    own = _names(modules, optimizer)
    if groups != own:  # the order counts: some optimizers have one state for all parameters
        raise ValueError(
            f"the optimizer's groups of parameters are {own}, and in the file {groups}; make it "
            "of the same ones, in the same order"
        )


def _groups(index: dict[str, Any]) -> list[list[str]]:
    encoded, names = index["optimizer"]
    settings = decode(encoded, [torch.empty(0)] * len(names))
    return [group["params"] for group in settings["param_groups"]]


def _load_optimizer(state: State, modules: nn.ModuleDict, optimizer: Any) -> None:
    saved, own = state.copy_of(state.index["optimizer"]), optimizer.state_dict()["param_groups"]
    in_order = [name for group in _names(modules, optimizer) for name in group]
    groups = []
    for group, of_now in zip(saved["param_groups"], own):
        kept = {key: of_now[key] for key in ("params", "param_names") if key in of_now}
        groups.append({**group, **kept})
    of_parameters = {
        in_order.index(parameter): {key: state.copy_of(put) for key, put in of_parameter.items()}
        for parameter, of_parameter in state.index["state"].items()
    }
    optimizer.load_state_dict({"state": of_parameters, "param_groups": groups, **saved["others"]})


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
    path, is_first = Path(path), communicator.mesh.rank == 0
    state, digests, error = None, None, None
    try:
        if runs_edits:
            state = State.of(modules, optimizer, extra if is_first else None)
            digests = state.digests()
    except Exception as problem:  # of any kind: the other ranks wait for the report
        error = problem
    local = [_text(error), digests, optimizer is not None]
    gathered = exchange_json(communicator, local, "what is in a file of trainable modules")
    _raise_reported([of_rank[0] for of_rank in gathered], error)
    _check_alike([of_rank[1] for of_rank in gathered], [of_rank[2] for of_rank in gathered])
    if is_first:
        assert state is not None
        try:
            _write(path, state)
        except Exception as problem:
            error = problem
    state = None
    with _waiting(communicator):
        errors = exchange_json(
            communicator, _text(error), f"the file {path.name} of trainable modules"
        )
    _raise_reported(errors, error)


def _check_alike(digests: list[dict[str, int] | None], have_optimizer: list[bool]) -> None:
    if any(have_optimizer) and not have_optimizer[0]:
        raise agreed(
            ValueError(
                f"save_trainable_modules: ranks {[r for r, h in enumerate(have_optimizer) if h]} "
                "gave an optimizer and rank 0 did not; rank 0's is saved, give it there"
            )
        )
    compared: list[dict[str, int] | None] = []
    for own, has in zip(digests, have_optimizer):
        if own is not None and not has and digests[0] is not None:  # rank 0 alone has an optimizer
            own = {n: h for n, h in digests[0].items() if not n.startswith(_PREFIX)} | own
        compared.append(own)
    refuse_different(compared)


def _write(path: Path, state: State) -> None:
    text = json.dumps(state.index)
    metadata = {"format": "pt", "flex_model": text, "hash": str(site_hash(text))}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, safetensors_of(state.tensors, metadata))


# ---- Loading ----


def load(
    path: str | os.PathLike[str], modules: nn.ModuleDict, optimizer: Any, communicator: Communicator
) -> Any:
    """See ``FlexModel.load_trainable_modules``."""
    path, state, error = Path(path), None, None
    if communicator.mesh.rank == 0:
        try:
            state = _read(path)
        except Exception as problem:  # of any kind: the other ranks wait for the report
            error = problem
    local = [_text(error), None if state is None else state.index, optimizer is not None]
    with _waiting(communicator):
        gathered = exchange_json(communicator, local, f"the file {path.name} of trainable modules")
    _raise_reported([of_rank[0] for of_rank in gathered], error)
    index = gathered[0][1]
    try:
        _check(index, modules, optimizer)
    except Exception as problem:
        error = problem
    where = f"load_trainable_modules: {path}: "
    fits = exchange_json(
        communicator, _text(error, where), "whether a file of trainable modules fits"
    )
    _raise_reported(fits, error)
    loaded = dict(index["tensors"])
    if not any(has_optimizer for _, _, has_optimizer in gathered):
        loaded = {name: d for name, d in loaded.items() if not name.startswith(_OPTIMIZER)}
    sent = [] if state is None else [state.tensors[name] for name in loaded]
    received = from_rank(communicator, 0, sent, [(d[0], d[1]) for d in loaded.values()])
    state = State(index, dict(zip(loaded, received)))
    modules.load_state_dict({name: state.value(put) for name, put in index["modules"].items()})
    if optimizer is not None:
        _load_optimizer(state, modules, optimizer)
    return state.copy_of(index["extra"])


def _read(path: Path) -> State:
    """Read a whole file that ``save`` wrote, and check names, shapes and values by its hashes.

    Raises:
        OSError: there is none, or it can't be read.
        ValueError: another file, or not the whole of it.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(f"load_trainable_modules: there is no file {path}")
    tensors = {}
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            text = metadata["flex_model"]
            if metadata["hash"] != str(site_hash(text)):
                raise ValueError("its header is not what was written")
            index = json.loads(text)
            if index["version"] != _VERSION:
                raise ValueError(f"its version is {index['version']}, not {_VERSION}")
            for name, (dtype, shape, hashed) in index["tensors"].items():
                tensor = file.get_tensor(name)
                if str(tensor.dtype) != dtype:  # one that safetensors has no name for
                    tensor = tensor.clone().view(DTYPE_OF_NAME[dtype]).reshape(shape)
                if list(tensor.shape) != shape or int(values.fingerprint(tensor)[0]) != hashed:
                    raise ValueError(f"{name!r} is not what was written")
                tensors[name] = tensor
    except (SafetensorError, KeyError, TypeError, IndexError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"load_trainable_modules: {path} is not a whole file of save_trainable_modules "
            f"({type(error).__name__}: {error}); take an older one"
        ) from error
    return State(index, tensors)


def _check(index: dict[str, Any], modules: nn.ModuleDict, optimizer: Any) -> None:
    """ValueError where the file does not fit these modules and this optimizer."""
    state, saved = modules.state_dict(), index["modules"]
    missing = [name for name in state if name not in saved]
    unexpected = [name for name in saved if name not in state]
    if missing or unexpected:
        raise ValueError(
            f"not in the file: {missing}; only in the file: {unexpected}; register the modules "
            "that were saved, by the same names"
        )
    for name, tensor in tensors_of(modules).items():
        dtype, shape, _ = index["tensors"].get(_PREFIX + name, ("no tensor", [], 0))
        if [str(tensor.dtype), list(tensor.shape)] != [dtype, shape]:
            raise ValueError(
                f"{name!r} is of {dtype} and shape {tuple(shape)} in the file, and of "
                f"{tensor.dtype} and shape {tuple(tensor.shape)} here; make it as it was saved"
            )
    if optimizer is not None:
        _check_optimizer(index, modules, optimizer)


# ---- Among ranks ----


def _waiting(communicator: Communicator) -> AbstractContextManager[None]:
    """A context for a wait for rank 0's disk; a rank that dies is detected all the same."""
    return communicator.deadline(max(communicator.timeout_s, _FILE_TIMEOUT_S))


def _text(error: Exception | None, where: str = "") -> list[str] | None:
    if error is None:
        return None
    kinds = [kind.__name__ for kind in type(error).__mro__]
    known = next((kind for kind in kinds if kind in _ERRORS), None)
    if known is None:
        return ["RuntimeError", f"{where}{kinds[0]}: {error}"]
    return [known, f"{where}{error}"]


def _raise_reported(errors: list[list[str] | None], cause: Exception | None) -> None:
    """Raise the first error of any rank, on all ranks."""
    found = [(rank, error) for rank, error in enumerate(errors) if error]
    if not found:
        return
    rank, (name, text) = found[0]
    where = "" if len(found) == len(errors) else f" (on rank {rank})"
    section = see("trainable-modules-cannot-be-saved-or-loaded")
    raise agreed(_ERRORS[name](f"{text}{where}; {section}")) from cause

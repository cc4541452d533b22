"""Records on disk: safetensors files, and a JSON manifest that says which batches they hold.

A file is written under another name, synced and renamed, and only then is it in the manifest, which
is written in the same way. So whatever is read is whole, and what a killed run leaves behind is a
prefix of the batches, which the next one goes on from.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flex_model.distributed import values
from flex_model.hooks.core import HookCore
from flex_model.sequential.engine import Batch

_MANIFEST = "manifest.json"
_FORMAT = "flex_model activations"
_VERSION = 1
_SHARD_BYTES = 256 * 2**20
_ASIDE = "aside.part"  # a folder: safetensors writes under names of its own choice beside the file
_LEFTOVERS = (".part", ".safetensors")

_Keys = dict[int, list[tuple[int, str, str]]]  # by batch: call, name, key in the file


class ActivationStore:
    """The records of a sequential run in a folder, by name, batch and call.

    Example::

        store = ActivationStore("activations/", key={"data": "train.txt"})
        sequential.run(flex, batches, weights="checkpoint/", window=8, store=store)
        for tensor in ActivationStore("activations/").tensors("model.layers.7.mlp"):
            ...

    Args:
        folder: Made if it is not there. What it holds of a run that was killed is kept.
        key: What the records depend on besides hooks and batches (data, model): anything that JSON
            can hold. A run that goes on must have the same.
        shard_bytes: Files are closed when they hold this many bytes, and after each window.

    Attributes:
        num_batches: How many batches are there: always the first ones.
        is_complete: Whether their run came to its end.

    Raises:
        ValueError: the folder holds something else, or records with another key. Raised by reading
            too, where a file is not what was written.
    """

    def __init__(
        self, folder: str | Path, *, key: Any = None, shard_bytes: int = _SHARD_BYTES
    ) -> None:
        self.folder = Path(folder)
        self._shard_bytes = shard_bytes
        self._waiting: dict[str, Tensor] = {}
        self._waiting_inputs: list[str] = []
        self._files: dict[str, tuple[Any, _Keys]] = {}
        self._manifest = self._read()
        if self._manifest is None:
            self._manifest = {
                "format": _FORMAT,
                "version": _VERSION,
                "key": json.loads(json.dumps(key)),
                "hooks": None,
                "is_complete": False,
                "batches": [],
                "shards": [],
            }
        elif key is not None and self._manifest["key"] != json.loads(json.dumps(key)):
            raise ValueError(
                f"ActivationStore: {self.folder} holds records with key {self._manifest['key']!r}, "
                f"not {key!r}; give another folder, or delete that one"
            )

    def _read(self) -> Any:
        path = self.folder / _MANIFEST
        if not path.exists():
            others = [p.name for p in self.folder.iterdir()] if self.folder.is_dir() else []
            if any(not name.endswith(_LEFTOVERS) for name in others):
                raise ValueError(
                    f"ActivationStore: {self.folder} holds other files ({others[0]!r}) and no "
                    f"{_MANIFEST}; give a folder of its own"
                )
            return None
        try:
            manifest = json.loads(path.read_bytes())
            is_ours = manifest["format"] == _FORMAT and manifest["version"] == _VERSION
            is_whole = is_ours and _is_whole(manifest)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            is_ours = is_whole = False
        if not is_whole:
            raise ValueError(
                f"ActivationStore: {path} is not of format {_FORMAT!r}, version {_VERSION}; it was "
                "written by something else, or by another release"
                + ", or changed since: its parts contradict each other"
                * is_ours
            )
        return manifest

    # Reading.

    @property
    def num_batches(self) -> int:
        return len(self._manifest["batches"])

    @property
    def is_complete(self) -> bool:
        return bool(self._manifest["is_complete"])

    @property
    def names(self) -> list[str]:
        """Names of the records, sorted."""
        return sorted({name for shard in self._manifest["shards"] for name in shard["names"]})

    def tensors(self, name: str) -> Iterator[Tensor]:
        """The records of one name in batch order, then call order, as ``output_ptr`` has them; one
        at a time, memory-mapped.

        Raises:
            KeyError: no batch has such a record.
        """
        if name not in self.names:
            raise KeyError(f"{self.folder} has no record {name!r}; it has {self.names}")
        for batch in range(self.num_batches):
            yield from self.batch(batch).get(name, [])

    def batch(self, index: int) -> dict[str, list[Tensor]]:
        """The records of one batch, in call order.

        Raises:
            IndexError: the batch isn't there (yet).
        """
        if not 0 <= index < self.num_batches:
            raise IndexError(f"{self.folder} has {self.num_batches} batches, no batch {index}")
        shard = next(s for s in self._manifest["shards"] if s["first"] <= index <= s["last"])
        found: dict[str, list[tuple[int, Tensor]]] = {}
        file, keys = self._opened(shard["file"])
        for call, name, key in keys.get(index, []):
            found.setdefault(name, []).append((call, file.get_tensor(key)))
        return {
            name: [tensor for _, tensor in sorted(calls, key=lambda call: call[0])]
            for name, calls in found.items()
        }

    def _opened(self, file: str) -> tuple[Any, _Keys]:
        """A file, and what it has by batch. One is kept open."""
        from safetensors import SafetensorError, safe_open

        if file not in self._files:
            path = self.folder / file
            keys: _Keys = {}
            try:
                opened = safe_open(str(path), framework="pt")
                for key in list(opened.keys()):
                    batch, call, name = key.split("/", 2)
                    keys.setdefault(int(batch), []).append((int(call), name, key))
            except (SafetensorError, ValueError, OSError) as error:
                raise ValueError(
                    f"ActivationStore: {path} is not a file that a store wrote ({error}); delete "
                    f"{self.folder} and run again"
                ) from error
            self._files = {file: (opened, keys)}
        return self._files[file]

    # Writing.

    def begin(self, hooks: Any) -> None:
        """A run with these hooks goes on. ValueError if the records are those of others."""
        hooks = json.loads(json.dumps(hooks))
        if self.num_batches and self._manifest["hooks"] != hooks:
            raise ValueError(
                f"ActivationStore: {self.folder} holds records of other hooks "
                f"({self._manifest['hooks']}), not of {hooks}; give another folder, or delete it"
            )
        self._manifest["hooks"] = hooks
        self.folder.mkdir(parents=True, exist_ok=True)
        listed = {shard["file"] for shard in self._manifest["shards"]}
        for path in self.folder.iterdir():  # of a run that was killed
            if path.is_dir() and path.name == _ASIDE:
                shutil.rmtree(path)
            elif path.name.endswith(_LEFTOVERS) and path.name not in listed:
                path.unlink()
        self._write_manifest()

    def check(self, index: int, inputs: Any) -> None:
        """ValueError if a batch that is there was made from other inputs."""
        if self._manifest["batches"][index] != hash_of(inputs):
            raise ValueError(
                f"ActivationStore: batch {index} in {self.folder} was made from other inputs than "
                "those given now; give the same batches in the same order, or another folder"
            )

    def append(self, inputs: str, records: Mapping[str, list[Tensor]]) -> None:
        """The next batch; on disk after ``flush``, or when a file is full.

        Args:
            inputs: Their hash.
        """
        index = self.num_batches + len(self._waiting_inputs)
        for name, calls in records.items():
            for call, tensor in enumerate(calls):
                self._waiting[f"{index}/{call}/{name}"] = tensor.contiguous()
        self._waiting_inputs.append(inputs)
        if sum(tensor.nbytes for tensor in self._waiting.values()) >= self._shard_bytes:
            self.flush()

    def flush(self, is_complete: bool = False) -> None:
        """Write what waits; with ``is_complete``, there is no more to come."""
        if self._waiting_inputs:
            first = self.num_batches
            last = first + len(self._waiting_inputs) - 1
            file = _shard_name(first, last)
            self._write_shard(file)
            names = sorted({key.split("/", 2)[2] for key in self._waiting})
            self._manifest["shards"].append(
                {"file": file, "first": first, "last": last, "names": names}
            )
            self._manifest["batches"] += self._waiting_inputs
            self._waiting, self._waiting_inputs = {}, []
        elif self.is_complete or not is_complete:
            return
        self._manifest["is_complete"] = is_complete
        self._write_manifest()

    def _write_shard(self, file: str) -> None:
        from safetensors.torch import save_file

        with self._written_aside(file) as aside:
            save_file(self._waiting, aside)

    def _write_manifest(self) -> None:
        with self._written_aside(_MANIFEST) as aside:
            aside.write_text(json.dumps(self._manifest, indent=1))

    @contextlib.contextmanager
    def _written_aside(self, name: str) -> Iterator[Path]:
        """Where to write a file that then is on the disk under its name, in whole."""
        aside = self.folder / _ASIDE
        aside.mkdir(exist_ok=True)
        yield aside / name
        _sync(aside / name)
        os.replace(aside / name, self.folder / name)
        aside.rmdir()
        _sync(self.folder)


def _is_whole(manifest: Any) -> bool:
    """Whether its files are in the folder and hold the batches one after the other."""
    shards, batches = manifest["shards"], manifest["batches"]
    first = 0
    for shard in shards:
        if shard["first"] != first or not first <= shard["last"] < len(batches):
            return False
        if shard["file"] != _shard_name(first, shard["last"]):  # so it can't leave the folder
            return False
        if not all(isinstance(name, str) for name in shard["names"]):
            return False
        first = shard["last"] + 1
    return (
        isinstance(batches, list)
        and first == len(batches)
        and isinstance(manifest["is_complete"], bool)
        and {"key", "hooks"} <= manifest.keys()
    )


def _shard_name(first: int, last: int) -> str:
    return f"batches-{first:08d}-{last:08d}.safetensors"


class StoredRecords:
    """What one run puts into a store, as a context: what was delivered is on disk at its end,
    however it ends. Only rank 0 writes; how many batches are there is what rank 0 finds.
    """

    def __init__(self, store: ActivationStore, core: HookCore) -> None:
        self._store = store if core.channel.mesh.rank == 0 else None
        self._hashes: dict[int, str] = {}
        if self._store is not None:
            active = [r for r in core.table.registrations if r.index in core.table.active]
            self._store.begin(
                [[r.kind, r.name, r.hook_function.unpack_idx, r.edits] for r in active]
            )
        found = core.channel.exchange(torch.tensor([store.num_batches]))
        self.num_done = int(found[0])

    def __enter__(self) -> StoredRecords:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.flush()

    def missing(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches that are not there; those that are must be the same ones."""
        for index, batch in enumerate(batches):
            if index >= self.num_done:
                self._hashes[index] = hash_of(batch)
                yield batch
            elif self._store is not None:
                self._store.check(index, batch)

    def take(self, batch: Batch) -> None:
        """Put a batch's records into the store rather than into ``output_ptr``."""
        assert batch.hooks is not None
        records, batch.hooks.records = batch.hooks.records, {}
        inputs = self._hashes.pop(batch.index)
        if self._store is not None:
            self._store.append(inputs, records)

    def flush(self, is_complete: bool = False) -> None:
        if self._store is not None:
            self._store.flush(is_complete)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def hash_of(inputs: Any) -> str:
    """Of a batch: its structure, its tensors' values, and plain numbers and strings."""
    digest = hashlib.blake2b(digest_size=16)
    _add(digest, inputs)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        digest.update(f"tensor {tuple(value.shape)} {value.dtype}".encode())
        if value.layout == torch.strided and not value.is_meta:
            digest.update(str(values.fingerprint(value).tolist()).encode())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            digest.update(f"key {key!r}".encode())
            _add(digest, item)
    elif isinstance(value, (list, tuple)):
        digest.update(f"{len(value)} items".encode())
        for item in value:
            _add(digest, item)
    elif value is None or isinstance(value, (bool, int, float, str, bytes)):
        digest.update(repr(value).encode())
    else:
        digest.update(type(value).__qualname__.encode())

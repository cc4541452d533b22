"""Opens a session: makes and locks the folder, and checks that it fits the model."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from flex_model.distributed.communicator import Communicator
from flex_model.distributed.tensor_dicts import exchange_json
from flex_model.errors import agreed
from flex_model.records.store.activation_store import ActivationStore
from flex_model.records.store.files import FolderLock
from flex_model.records.store.manifest import (
    MANIFEST_ASIDE,
    Index,
    Manifest,
    digest_of,
    index_name,
    is_of_batches,
)

SEEN_S = 5.0  # for other hosts of a shared file system to see what rank 0 wrote

# Fields of a configuration that name the model's source, not its properties.
_IGNORED = ("_name_or_path", "transformers_version")


def config_hash(module: nn.Module) -> str | None:
    """Return a hash of the values of ``module.config``; None if there is none."""
    config = getattr(module, "config", None)
    to_dict = getattr(config, "to_dict", None)
    fields = to_dict() if callable(to_dict) else getattr(config, "__dict__", config)
    if not isinstance(fields, Mapping):
        return None
    fields = {str(name): value for name, value in fields.items() if name not in _IGNORED}
    text = json.dumps(fields, sort_keys=True, default=lambda value: type(value).__qualname__)
    return digest_of(text.encode())


def opened(
    store: ActivationStore, communicator: Communicator, config: str | None
) -> tuple[FolderLock | None, Manifest, str]:
    """Return rank 0's lock, the manifest as all ranks see it, and the session's name. Collective.

    Raises:
        ValueError: see ``Session``; on every rank.
        OSError: with one rank.
    """
    if communicator.is_local:
        return _prepared(store, config), store._manifest, uuid.uuid4().hex[:8]
    lock: FolderLock | None = None
    error: str | None = None
    if communicator.mesh.rank == 0:
        try:
            lock = _prepared(store, config)
        except (ValueError, OSError) as problem:
            error = f"{type(problem).__name__}: {problem}"
    try:
        _raise_reported(exchange_json(communicator, error, f"the store {store.folder}"))
        error, number = None, None
        try:
            number = _id_seen(store)
        except (ValueError, OSError) as problem:
            error = f"{type(problem).__name__}: {problem}"
        local = [error, number, uuid.uuid4().hex[:8]]
        gathered = exchange_json(communicator, local, f"the store {store.folder}")
        _raise_reported([one[0] for one in gathered])
        if len({one[1] for one in gathered}) > 1:
            raise agreed(
                ValueError(
                    f"ActivationStore: the ranks do not see the same {store.folder}; give a folder "
                    "on a file system that they share"
                )
            )
    except BaseException:
        if lock is not None:
            lock.release()
        raise
    return lock, store._manifest, gathered[0][2]


def _prepared(store: ActivationStore, config: str | None) -> FolderLock:
    """Lock the folder, and remove the leftovers of a killed process."""
    store.folder.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(store.folder)
    try:
        store.reload()
        manifest = store._manifest
        if not manifest.id:
            manifest = replace(manifest, id=uuid.uuid4().hex)
        if manifest.num_batches and manifest.config != config:
            raise ValueError(
                f"ActivationStore: {store.folder} holds records of a model with another "
                "configuration; give another folder, or delete that one"
            )
        _delete_leftovers(store, manifest)
        replace(manifest, config=config).write(store.folder)
        store.reload()
    except BaseException:
        lock.release()
        raise
    return lock


def _delete_leftovers(store: ActivationStore, manifest: Manifest) -> None:
    listed = set()
    for first, last, digest in manifest.groups:
        index = Index.read(store.folder, first, last, digest)
        listed |= {index_name(first, last), *index.files}
    for path in store.folder.iterdir():
        is_ours = is_of_batches(path.name) or path.name == MANIFEST_ASIDE
        if is_ours and path.name not in listed and not path.is_dir():
            path.unlink()


def _id_seen(store: ActivationStore) -> str | None:
    """Return the id of the store that this rank sees in the folder, after rank 0 has written it."""
    deadline = time.monotonic() + SEEN_S
    store.reload()
    while not store._manifest.id and time.monotonic() < deadline:
        time.sleep(0.05)
        store.reload()
    return store._manifest.id or None


def _raise_reported(errors: list[Any]) -> None:
    texts = list(dict.fromkeys(error for error in errors if error))
    if texts:
        raise agreed(ValueError("; ".join(texts)))

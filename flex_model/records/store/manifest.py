"""The contents of a store: ``manifest.json``, and an index for each group of batches.

The manifest lists the groups, and the hooks and configuration of all; a group exists once the
manifest lists it. Its index is written before, once, and describes the records of each batch and
their layout over the files of the ranks. Names of files are made of numbers, so that none leads
outside of the folder; hashes detect changes.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flex_model import _C
from flex_model.distributed.placement import Shape
from flex_model.distributed.tensor_dicts import DTYPE_OF_NAME
from flex_model.records.store.files import ASIDE, write_whole

if TYPE_CHECKING:
    from flex_model.distributed.gather import TensorSpec


MANIFEST = "manifest.json"
MANIFEST_ASIDE = MANIFEST + ASIDE
FORMAT = "flex_model activations"
VERSION = 3
_MAX_RANKS = 1 << 24


def index_name(first: int, last: int) -> str:
    return f"batches-{first:08d}-{last:08d}.json"


def shard_name(first: int, last: int, session: str, rank: int) -> str:
    """Return the file's name; the session's part keeps a rank that outlives the others from
    overwriting later files.
    """
    return f"batches-{first:08d}-{last:08d}.{session}.rank-{rank:04d}.safetensors"


def is_of_batches(name: str) -> bool:
    """Return whether a file has the name of an index or a shard, finished or not."""
    return name.startswith("batches-")


def digest_of(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=16).hexdigest()


@dataclass(frozen=True)
class Manifest:
    """The manifest of a folder.

    Attributes:
        id: A random number from when the store was begun.
        key, config, hooks: What its records depend on: the user's key, the hash of the model's
            configuration, and the hooks of the first run.
        is_complete: Whether it was closed, and not opened for writing since.
        groups: Consecutive groups of batches: first, last, and the hash of the index.
    """

    id: str
    key: Any
    config: str | None = None
    hooks: Any = None
    is_complete: bool = False
    groups: tuple[tuple[int, int, str], ...] = ()

    @property
    def num_batches(self) -> int:
        return self.groups[-1][1] + 1 if self.groups else 0

    def hooks_of(self, names: Collection[str]) -> list[dict[str, Any]]:
        """Return the hooks with records of these names."""
        return [hook for hook in self.hooks or () if hook["record"] in names]

    def num_whole_dims(self, names: Collection[str], shape: Shape) -> int:
        """Return how many first dims of records are whole: annotations have values for those."""
        selected = [dim % len(shape) for hook in self.hooks_of(names) for dim in hook["dims"]]
        return min(selected, default=len(shape))

    def group_of(self, batch: int) -> int:
        """Return the index in ``groups`` of an existing batch."""
        return bisect.bisect_left(self.groups, batch, key=lambda group: group[1])

    def write(self, folder: Path) -> None:
        fields = {"format": FORMAT, "version": VERSION, **vars(self)}
        write_whole(folder / MANIFEST, [signed(fields)])

    @staticmethod
    def read(folder: Path) -> Manifest | None:
        """Read a folder's manifest; None if there is none.

        Raises:
            ValueError: it is not one, or was changed.
            NotADirectoryError: the folder is a file.
        """
        path, is_ours = folder / MANIFEST, False
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise NotADirectoryError(
                f"ActivationStore: {folder} is a file, or below one; give the path of a folder, "
                "which is made if it does not exist"
            ) from None
        try:
            found = json.loads(text)
            is_ours = found["format"] == FORMAT and found["version"] == VERSION
            if is_ours and _fits_its_hash(found):
                groups = tuple((first, last, digest) for first, last, digest in found["groups"])
                names = ("id", "key", "config", "hooks", "is_complete")
                if _follow_one_another(groups):
                    return Manifest(**{name: found[name] for name in names}, groups=groups)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            pass
        raise ValueError(
            f"ActivationStore: {path} is not of format {FORMAT!r}, version {VERSION}; it was "
            "written by something else, or by another release"
            + ", or changed since: it does not fit its own hash"
            * is_ours
        )


@dataclass
class Index:
    """The index of one group of batches.

    Attributes:
        session: The session that wrote it: eight digits.
        batches: For each: ``inputs`` (their hash, or None) and ``notes`` (annotations that are no
            tensors).
        layouts: All layouts of its records, each once.
        records: ``(batch, name, call, index in ``layouts``)``.
        annotations: ``(batch, name, index in ``layouts``)``: tensors.
        statistics: The names of records whose moments are in the files.
    """

    first: int
    last: int
    session: str
    batches: list[dict[str, Any]] = field(default_factory=list)
    layouts: list[RecordLayout] = field(default_factory=list)
    records: list[tuple[int, str, int, int]] = field(default_factory=list)
    annotations: list[tuple[int, str, int]] = field(default_factory=list)
    statistics: tuple[str, ...] = ()

    @cached_property
    def of_batch(self) -> dict[int, dict[str, list[tuple[str, RecordLayout]]]]:
        """By batch and name: keys in the files, with layouts, in the order of calls."""
        found: dict[int, dict[str, list[tuple[str, RecordLayout]]]] = {}
        for batch, name, call, layout in self.records:
            calls = found.setdefault(batch, {}).setdefault(name, [])
            calls.append((record_key(batch, name, call), self.layouts[layout]))
        return found

    @cached_property
    def annotations_of_batch(self) -> dict[int, dict[str, RecordLayout]]:
        """By batch and name: the layouts of annotations that are tensors."""
        found: dict[int, dict[str, RecordLayout]] = {}
        for batch, name, layout in self.annotations:
            found.setdefault(batch, {})[name] = self.layouts[layout]
        return found

    @property
    def names(self) -> set[str]:
        return {name for _, name, _, _ in self.records}

    @property
    def files(self) -> list[str]:
        """Names of the files with its tensors."""
        ranks = {rank for layout in self.layouts for rank, _ in layout.shards}
        return [shard_name(self.first, self.last, self.session, rank) for rank in sorted(ranks)]

    def to_json(self) -> bytes:
        names = ("first", "last", "session", "batches", "records", "annotations", "statistics")
        fields = {name: getattr(self, name) for name in names}
        layouts = [{**vars(one), "dtype": str(one.dtype)} for one in self.layouts]
        return signed({**fields, "files": self.files, "spreads": layouts})

    @staticmethod
    def read(folder: Path, first: int, last: int, digest: str) -> Index:
        """Read an index; ValueError if the file was changed."""
        path = folder / index_name(first, last)
        try:
            text = path.read_bytes()
            if digest_of(text) != digest:
                raise ValueError("its hash is not the manifest's")
            return _parsed(json.loads(text), first, last)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"ActivationStore: {path} is not what a store wrote ({error}); delete {folder} "
                "and run again"
            ) from error


def record_key(batch: int, name: str, call: int) -> str:
    """Return the key of a record in the files."""
    return f"{batch}/{call}/{name}"


def annotation_key(batch: int, name: str) -> str:
    return f"{batch}/annotation/{name}"


def signed(fields: dict[str, Any]) -> bytes:
    """Return fields as JSON, with a hash of them."""
    text = json.dumps(fields)
    fields = {**fields, "digest": digest_of(_canonical(json.loads(text)))}
    return json.dumps(fields).encode()


def _fits_its_hash(found: dict[str, Any]) -> bool:
    fields = {name: value for name, value in found.items() if name != "digest"}
    return found["digest"] == digest_of(_canonical(fields))


def _canonical(fields: Any) -> bytes:
    return json.dumps(fields, sort_keys=True).encode()


def _follow_one_another(groups: Sequence[tuple[int, int, str]]) -> bool:
    begin = 0
    for first, last, digest in groups:
        if not (_is_count(first) and _is_count(last) and isinstance(digest, str)):
            return False
        if first != begin or last < first:
            return False
        begin = last + 1
    return True


def _parsed(found: Any, first: int, last: int) -> Index:
    """Parse an index. ValueError, TypeError or KeyError where its parts contradict each other."""
    if (found["first"], found["last"]) != (first, last):
        raise ValueError("it is of other batches")
    batches = found["batches"]
    if len(batches) != last - first + 1 or any({"inputs", "notes"} - b.keys() for b in batches):
        raise ValueError("batches are missing")
    layouts = [_record_layout(fields) for fields in found["spreads"]]
    if not re.fullmatch("[0-9a-f]{8}", found["session"], re.ASCII):
        raise ValueError(f"session {found['session']!r}")  # a path outside of the folder, say
    statistics = tuple(map(str, found.get("statistics", ())))
    index = Index(first, last, found["session"], batches, layouts, statistics=statistics)
    num_calls: dict[tuple[int, str], int] = {}
    for batch, name, call, layout in found["records"]:
        _check_place(index, batch, name, layout)
        if call != num_calls.get((batch, name), 0):
            raise ValueError(f"calls of {name!r} in batch {batch} are missing")
        num_calls[batch, name] = call + 1
        index.records.append((batch, name, call, layout))
    for batch, name, layout in found["annotations"]:
        _check_place(index, batch, name, layout)
        index.annotations.append((batch, name, layout))
    return index


def _check_place(index: Index, batch: Any, name: Any, layout: Any) -> None:
    is_there = _is_count(batch) and index.first <= batch <= index.last
    if not (is_there and isinstance(name, str) and _is_count(layout)):
        raise ValueError(f"a record {name!r} of batch {batch}")
    if layout >= len(index.layouts):
        raise ValueError(f"layout {layout} of {len(index.layouts)}")


def _record_layout(fields: Any) -> RecordLayout:
    dtype = DTYPE_OF_NAME[fields["dtype"]]
    shape = _sizes(fields["shape"])
    shards = tuple((rank, _sizes(sizes)) for rank, sizes in fields["shards"])
    boxes = tuple(
        (shard, _sizes(start), _sizes(shard_start), _sizes(sizes))
        for shard, start, shard_start, sizes in fields["boxes"]
    )
    if not all(_is_count(rank) and rank < _MAX_RANKS for rank, _ in shards):
        raise ValueError(f"ranks {[rank for rank, _ in shards]}")
    if len({rank for rank, _ in shards}) != len(shards):
        raise ValueError("a rank has two shards")
    held = sum(math.prod(sizes) for _, sizes in shards)
    if held != math.prod(shape) or not all(_is_count(box[0]) for box in boxes):
        raise ValueError(f"shards of {held} elements for a tensor of shape {shape}")
    # Raises for boxes that leave the tensor, overlap, or omit elements.
    try:
        _C.GatherPlan(list(shape), [list(sizes) for _, sizes in shards], boxes, dtype.itemsize)
    except (OverflowError, IndexError) as error:
        raise ValueError(str(error)) from None
    return RecordLayout(shape, dtype, str(fields["layout"]), shards, boxes)


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(_is_count(value) for value in values):
        raise ValueError(f"sizes {values!r}")
    return tuple(values)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


# A box: its shard (an index of `RecordLayout.shards`), start in full, start in the shard, sizes.
Box = tuple[int, Shape, Shape, Shape]


@dataclass(frozen=True)
class RecordLayout:
    """The ranks that write shards of a record, and where these lie in the full tensor.

    Attributes:
        shape, dtype: Those of the full tensor.
        layout: The layout as text, as ``flex.layouts()`` prints it.
        shards: For each rank that writes: the rank, and the shape of its shard.
        boxes: Where the shards lie in the full tensor, each element once.
    """

    shape: Shape
    dtype: torch.dtype
    layout: str
    shards: tuple[tuple[int, Shape], ...]
    boxes: tuple[Box, ...]

    @staticmethod
    def whole(tensor: Tensor) -> RecordLayout:
        """Return the layout of a tensor that rank 0 has in full."""
        return RecordLayout._of_first(tuple(tensor.shape), tensor.dtype, "whole")

    @staticmethod
    def of(spec: TensorSpec, dtype: torch.dtype) -> RecordLayout:
        """Return the layout of shards, after reduction, of the ranks from which rank 0 gathers."""
        description, full_shape = str(spec.layout), spec.full_shape
        if not spec.axes:
            return RecordLayout._of_first(full_shape, dtype, description)
        mesh = spec.communicator.mesh
        ranks = [mesh.rank_at(place) for place in spec.ranks_of_first]
        shapes = [tuple(sizes) for sizes in spec.plan.shard_sizes]
        boxes = tuple((i, *map(tuple, box)) for i, *box in spec.boxes)
        shards = tuple(zip(ranks, shapes, strict=True))
        return RecordLayout(full_shape, dtype, description, shards, boxes)  # type: ignore[arg-type]

    @staticmethod
    def _of_first(shape: Shape, dtype: torch.dtype, description: str) -> RecordLayout:
        zeros = (0,) * len(shape)
        return RecordLayout(shape, dtype, description, ((0, shape),), ((0, zeros, zeros, shape),))

    @property
    def num_bytes(self) -> int:
        """The size of the full tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_whole(self) -> bool:
        """Whether one shard is the full tensor."""
        return len(self.boxes) == 1 and self.boxes[0][3] == self.shape == self.shards[0][1]


@dataclass(eq=False)
class RecordShard:
    """One rank's shard of a record.

    Attributes:
        tensor: The shard that this rank writes, on the CPU; None if it writes none.
    """

    layout: RecordLayout
    tensor: Tensor | None

    @staticmethod
    def whole(tensor: Tensor) -> RecordShard:
        return RecordShard(RecordLayout.whole(tensor), tensor)

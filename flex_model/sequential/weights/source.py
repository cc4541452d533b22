"""Sources of weights: state dicts, safetensors files and objects of the user's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from flex_model.errors import nearest
from flex_model.integrations import checkpoints


@runtime_checkable
class WeightSource(Protocol):
    """Weights by their names in the model's ``state_dict()``: any object with these methods.

    Example::

        class FromBucket:
            def names(self):
                return index.keys()

            def read(self, name):  # a CPU tensor of the full shape; any dtype
                return download(index[name])

        sequential.run(model, batches, weights=FromBucket())

    ``read`` is called once per name and load, maybe from another thread, never from two at once;
    once more for several names of one weight, whose values must be the same.
    """

    def names(self) -> Iterable[str]: ...
    def read(self, name: str) -> Tensor: ...


class DictWeights:
    """Weights of a state dict. The tensors are not copied.

    Example::

        sequential.run(model, batches, weights=DictWeights(torch.load(path, mmap=True)))
    """

    def __init__(self, state_dict: Mapping[str, Tensor]) -> None:
        self._tensors = dict(state_dict)

    def names(self) -> Iterable[str]:
        """Return the names of the dict."""
        return self._tensors.keys()

    def read(self, name: str) -> Tensor:
        """Return the tensor of the dict itself."""
        return self._tensors[name]


class CheckpointWeights:
    """Weights of safetensors files: memory-mapped, so that reading one copies nothing and takes no
    memory of the process.

    Example::

        weights = CheckpointWeights("checkpoint/", rename=lambda name: f"model.{name}")

    Args:
        path: A ``.safetensors`` file, or a folder: with an index or a ``model.safetensors``, as
            ``save_pretrained`` writes it, or with any number of other ``.safetensors`` files.
        rename: From a name in the model to the name in the files. By default the same, or as
            transformers renames, merges and splits tensors for its own models.

    Raises:
        FileNotFoundError: there is no such file, or no safetensors file in the folder.
        ValueError: a file that is not safetensors, or a name that is in two of them.
    """

    def __init__(self, path: str | Path, *, rename: Callable[[str], str] | None = None) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = Path(path)
        self.is_renamed = rename is not None
        self._rename = rename or (lambda name: name)
        self._files: dict[str, Any] = {}
        of_name: dict[str, str] = {}
        for file in _files_of(self.path):
            try:
                opened = safe_open(str(file), framework="pt")
            except SafetensorError as error:
                raise ValueError(
                    f"CheckpointWeights: {file.name} in {self.path} is not a safetensors file "
                    f"({error}); save the model with save_pretrained or safetensors.torch.save_file"
                ) from error
            for name in opened.keys():  # noqa: SIM118
                if name in of_name:
                    raise ValueError(
                        f"CheckpointWeights: {self.path} has {name!r} in {of_name[name]} and in "
                        f"{file.name}; give one of the files, or remove the other"
                    )
                self._files[name], of_name[name] = opened, file.name

    def names(self) -> Iterable[str]:
        """Return the names in the files."""
        return self._files.keys()

    def has(self, name: str) -> bool:
        """Whether the files have what the model calls ``name``."""
        return self._rename(name) in self._files

    def read(self, name: str) -> Tensor:
        """Return the tensor that the model calls ``name``, in the file's memory: don't write to it.

        Raises:
            ValueError: the files do not have it; the message has the nearest names.
        """
        file_name = self._rename(name)
        if file_name not in self._files:
            raise ValueError(
                f"CheckpointWeights: no {file_name!r} in {self.path}; "
                f"{nearest(file_name, self._files, 'tensor')}"
            )
        tensor: Tensor = self._files[file_name].get_tensor(file_name)
        return tensor


def _files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(
            f"CheckpointWeights: there is no {path}; give a .safetensors file, or a folder as "
            "save_pretrained writes it"
        )
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        if (path / "model.safetensors").is_file():  # others are not of it, as for from_pretrained
            return [path / "model.safetensors"]
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(
                f"CheckpointWeights: {path} has no .safetensors file; save the model with "
                "save_pretrained (files of torch.save are not read)"
            )
        return files
    try:
        shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        is_index = not any(Path(s).is_absolute() or ".." in Path(s).parts for s in shards)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        is_index = False
    if not is_index:
        raise ValueError(
            f"CheckpointWeights: {index} is not an index of safetensors files beside it, which has "
            '{"weight_map": {name: file}}; download the checkpoint again'
        )
    missing = [shard for shard in shards if not (path / shard).is_file()]
    if missing:
        raise FileNotFoundError(
            f"CheckpointWeights: {path} lacks {', '.join(missing)}, which its index lists; "
            "download the checkpoint again"
        )
    return [path / shard for shard in shards]


def as_source(weights: str | Path | WeightSource, model: nn.Module) -> WeightSource:
    """Return the source of ``run(weights=...)``."""
    if isinstance(weights, (str, Path)):
        weights = CheckpointWeights(weights)
    if isinstance(weights, CheckpointWeights):
        return checkpoints.for_model(model, weights, weights.path, is_renamed=weights.is_renamed)
    if isinstance(weights, Mapping):
        return DictWeights(weights)
    if isinstance(weights, WeightSource):
        return weights
    raise TypeError(
        "sequential.run: weights must be None, a path, a WeightSource (with names() and read()), "
        f"or a state dict, got a {type(weights).__name__}"
    )

"""Loads the compiled parts of flex_model and reports what was built and loaded.

`_C` and `_ops` must load. `_cuda` is optional: it is loaded if torch has CUDA and it was built,
with or without a GPU. ``FLEX_MODEL_REQUIRE=cuda`` makes its absence an error; with ``cpu``, the
default, it may be absent, which is a warning where there is a GPU.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import warnings
from pathlib import Path
from typing import Any

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError('flex_model needs torch: run `pip install "torch>=2.11"`') from None

FOLDER = Path(__file__).parent
REQUIRE = ("cpu", "cuda")
REBUILD = "pip install --force-reinstall --no-deps ."

_loaded: dict[str, str] = {}  # name -> "loaded", or the reason why not


class BuildInfo(dict[str, Any]):
    """The versions in use, and the binaries that were built and loaded; prints as a table.

    Keys:
        flex_model, python, torch, torch_cuda, gpu: The versions in use; whether there is a GPU.
        built: Facts of the build (versions, archs, extensions); empty if they were not recorded.
        loaded: `_C`, `_ops` and `_cuda`, each ``"loaded"`` or the reason why it is not.
    """

    def __str__(self) -> str:
        lines = []
        for name, value in self.items():
            if isinstance(value, dict):
                lines += [f"{name}:"] + [f"  {key:14} {_text(item)}" for key, item in value.items()]
            else:
                lines.append(f"{name:16} {_text(value)}")
        return "\n".join(lines)


def build_info() -> BuildInfo:
    """Return versions, the facts of the build, and which binaries were loaded or why not. Local."""
    built = built_facts()
    return BuildInfo(
        flex_model=built.get("flex_model", "unknown"),
        python=platform.python_version(),
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        gpu=torch.cuda.is_available(),
        built=built,
        loaded=dict(_loaded),
    )


def has_cuda_kernels() -> bool:
    """Whether `_cuda` is loaded."""
    return _loaded.get("_cuda") == "loaded"


def load() -> None:
    """Load `_C`, `_ops` and `_cuda`; a one-line ImportError if a required one does not load."""
    require = os.environ.get("FLEX_MODEL_REQUIRE", "cpu")
    if require not in REQUIRE:
        raise ValueError(f"FLEX_MODEL_REQUIRE must be one of {', '.join(REQUIRE)}, got {require!r}")
    if "_ops" not in _loaded:
        _load_engine()
        _load_ops()
    if "_cuda" not in _loaded:
        _loaded["_cuda"] = _load_cuda()
    if require == "cuda" and not has_cuda_kernels():
        raise ImportError(
            "flex_model: FLEX_MODEL_REQUIRE=cuda, but flex_model._cuda is not loaded: "
            + _loaded["_cuda"]
        )
    if _has_idle_gpu():
        warnings.warn(
            "this machine has a GPU, but the CUDA kernels of flex_model are not loaded: "
            f"{_loaded['_cuda']}. Tensors of sharded models on GPUs move through the CPU. To build "
            f"the kernels, run in flex_model's sources: `FLEX_MODEL_CUDA=1 {REBUILD}`",
            stacklevel=3,  # at the import of flex_model
        )


def _has_idle_gpu() -> bool:
    """Whether there is a GPU without our kernels."""
    # NVML counts the GPUs without a CUDA context, so that the process can still be forked.
    is_idle = torch.version.cuda is not None and not has_cuda_kernels()
    return is_idle and torch.cuda.device_count() > 0


def built_facts() -> dict[str, Any]:
    """Return the facts of the build that setup.py recorded."""
    try:
        return json.loads((FOLDER / "_build_config.json").read_text())
    except FileNotFoundError:
        return {}


def _load_engine() -> None:
    try:
        importlib.import_module("flex_model._C")
    except ImportError as error:
        raise ImportError(explain("_C", error)) from None
    _loaded["_C"] = "loaded"


def _load_ops() -> None:
    state = _load_library("_ops", explain("_ops", "it is not built"))
    if state != "loaded":
        raise ImportError(state)
    from flex_model import _ops_fake

    _ops_fake.register()
    _loaded["_ops"] = state


def _load_cuda() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} has no CUDA"
    why = built_facts().get("why_no_cuda") or "no reason is kept"
    return _load_library("_cuda", f"it was not built: {why}")


def _load_library(name: str, why_absent: str) -> str:
    """Return ``"loaded"``, or the reason why not."""
    path = FOLDER / f"{name}.abi3.so"  # not a glob, which could find one of another platform
    if not path.exists():
        return why_absent
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return explain(name, error)
    return "loaded"


def explain(name: str, error: object) -> str:
    """Return one line: the binary, the torch it was built against, what is missing, what to do."""
    text = " ".join(str(error).split())
    symbol = re.search(r"undefined symbol: (\S+)", text)
    if symbol:
        text = f"missing symbol {symbol[1]}"
    elif f"No module named 'flex_model.{name}'" in text:
        text = "it is not built for this Python"
    built = built_facts()
    against = f"torch {built['torch']}, Python {built['python']}" if built else "an unknown torch"
    return (
        f"flex_model.{name} cannot be loaded: {text} (installed: torch {torch.__version__}, Python "
        f"{platform.python_version()}; built against {against}). Torch must be 2.11 or "
        f"later; to build it again, run in flex_model's sources: `{REBUILD}`"
    )


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

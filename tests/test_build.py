"""What was built, what is loaded, and what is said when something is not."""

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

import flex_model
from flex_model import _load

ROOT = Path(__file__).parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def python(*arguments, **environment):
    """Run this Python from the repository, with changes to the environment."""
    paths = [
        str(Path(flex_model.__file__).parents[1]),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=500
    )


def test_build_info_tells_what_was_built_and_loaded():
    info = flex_model.build_info()
    assert info["torch"] == torch.__version__
    assert info["loaded"]["_C"] == info["loaded"]["_ops"] == "loaded"
    assert info["loaded"]["_cuda"]
    assert {"_C", "_ops"} <= set(info["built"]["built"])
    assert info["built"]["torch"]
    for text in ["torch", "loaded:", "_cuda"]:
        assert text in str(info)


def test_one_version():
    assert f'version = "{flex_model.__version__}"' in PYPROJECT


def test_a_cuda_build_is_loaded_where_torch_has_cuda():
    info = flex_model.build_info()
    if "_cuda" not in info["built"]["built"]:
        assert info["built"]["why_no_cuda"]
    elif torch.version.cuda:
        assert info["loaded"]["_cuda"] == "loaded"


@pytest.fixture
def unloaded(monkeypatch, tmp_path):
    """The loader before it has loaded anything, looking into an empty folder."""
    monkeypatch.setattr(_load, "_loaded", {})
    monkeypatch.setattr(_load, "FOLDER", tmp_path)
    return tmp_path


def test_a_missing_library_is_one_clear_line(unloaded):
    with pytest.raises(ImportError) as caught:
        _load._load_ops()
    message = str(caught.value)
    assert "\n" not in message
    for part in [
        "flex_model._ops cannot be loaded: it is not built",
        torch.__version__,
        "make build",
    ]:
        assert part in message


def test_a_broken_library_names_the_missing_symbol(unloaded):
    (unloaded / "_build_config.json").write_text('{"torch": "9.9.9", "python": "3.99"}')
    symbol = "aoti_torch_from_the_future"
    message = _load.explain("_ops", OSError(f"/a/b.so: undefined symbol: {symbol}"))
    assert f"missing symbol {symbol} (installed: torch {torch.__version__}" in message
    assert "built against torch 9.9.9, Python 3.99" in message
    (unloaded / "_ops.abi3.so").write_bytes(b"not a library")
    with pytest.raises(ImportError, match=r"flex_model\._ops cannot be loaded: .*make build"):
        _load._load_ops()


def test_required_cuda_is_an_error_where_it_is_not_loaded(unloaded, monkeypatch):
    monkeypatch.setattr(_load, "_load_engine", lambda: None)
    monkeypatch.setattr(_load, "_load_ops", lambda: None)
    monkeypatch.setenv("FLEX_MODEL_REQUIRE", "cuda")
    with pytest.raises(
        ImportError, match=r"FLEX_MODEL_REQUIRE=cuda, but flex_model\._cuda is not loaded"
    ):
        _load.load()
    monkeypatch.setenv("FLEX_MODEL_REQUIRE", "cpu")
    _load.load()


def test_what_is_required_is_checked_at_import():
    done = python("-c", "import flex_model", FLEX_MODEL_REQUIRE="cuda")
    loaded = flex_model.build_info()["loaded"]["_cuda"] == "loaded"
    assert (done.returncode == 0) == loaded, done.stderr
    if not loaded:
        assert "FLEX_MODEL_REQUIRE=cuda, but" in done.stderr


def test_an_unknown_requirement_is_an_error(monkeypatch):
    monkeypatch.setenv("FLEX_MODEL_REQUIRE", "gpu")
    with pytest.raises(ValueError, match=r"FLEX_MODEL_REQUIRE must be one of cpu, cuda, got 'gpu'"):
        _load.load()


def test_import_needs_no_framework():
    hidden = ["transformers", "fairscale", "megatron", "accelerate", "safetensors", "matplotlib"]
    hide = f"import sys; sys.modules.update(dict.fromkeys({hidden}))"  # None is an ImportError
    done = python("-c", f"{hide}; import flex_model; print('ok')")
    assert done.stdout == "ok\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"FLEX_MODEL_CUDA": "1", "CUDA_HOME": "/nonexistent"}, "FLEX_MODEL_CUDA=1, but "),
        ({"FLEX_MODEL_CUDA": "yes"}, "FLEX_MODEL_CUDA must be auto, 0 or 1, got 'yes'"),
    ],
)
def test_a_build_that_cannot_be_had_stops_with_one_line(environment, message, tmp_path):
    done = python("setup.py", "build", "--build-base", tmp_path, **environment)
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if line.startswith("flex_model: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_sanitized_builds_are_kept_apart():
    done = python("setup.py", "build_ext", "--inplace", FLEX_MODEL_SANITIZE="1")
    assert done.returncode != 0
    assert "FLEX_MODEL_SANITIZE=1 builds into build/sanitize" in done.stderr


@pytest.mark.slow
def test_sdist_has_everything_that_building_takes(tmp_path):
    done = python(
        "setup.py", "-q", "egg_info", "--egg-base", tmp_path, "sdist", "--dist-dir", tmp_path
    )
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.*") if p.is_file()}
    modules = {
        str(p.relative_to(ROOT))
        for p in (ROOT / "flex_model").rglob("*.py*")
        if "__pycache__" not in p.parts
    }
    needed = sources | modules | {"setup.py", "pyproject.toml", "LICENSE", "flex_model/py.typed"}
    assert sources
    assert needed - names == set()
    assert not [name for name in names if re.search(r"\.(so|pyc|log)$|_build_config|^build/", name)]

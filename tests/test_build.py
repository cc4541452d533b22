"""What was built, what is loaded, and what is said when something is not."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from setuptools import Distribution, Extension

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
        "in flex_model's sources: `pip install --force-reinstall",
    ]:
        assert part in message


def test_a_broken_library_names_the_missing_symbol(unloaded):
    (unloaded / "_build_config.json").write_text('{"torch": "9.9.9", "python": "3.99"}')
    symbol = "aoti_torch_from_the_future"
    message = _load.explain("_ops", OSError(f"/a/b.so: undefined symbol: {symbol}"))
    assert f"missing symbol {symbol} (installed: torch {torch.__version__}" in message
    assert "built against torch 9.9.9, Python 3.99" in message
    (unloaded / "_ops.abi3.so").write_bytes(b"not a library")
    with pytest.raises(ImportError, match=r"flex_model\._ops cannot be loaded: .*pip install"):
        _load._load_ops()


# ---- What an import says -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is None, reason="torch without CUDA has no GPU tensors")
def test_an_import_says_once_that_there_is_a_gpu_and_no_kernels(tmp_path):
    package = tmp_path / "flex_model"
    ignore = shutil.ignore_patterns("_cuda*", "__pycache__")
    shutil.copytree(Path(flex_model.__file__).parent, package, ignore=ignore)
    config = json.loads((package / "_build_config.json").read_text())
    config |= {"built": ["_C", "_ops"], "why_no_cuda": "there is no nvcc on PATH"}
    (package / "_build_config.json").write_text(json.dumps(config))
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\ntorch.cuda.device_count = lambda: int(sys.argv[1])\nimport flex_model\n"
        "from flex_model import FlexModel\n"
    )
    done = python(script, 8, PYTHONPATH="")
    assert done.returncode == 0, done.stderr
    (warning,) = [line for line in done.stderr.splitlines() if "Warning" in line]
    assert f"{script}:3: UserWarning: this machine has a GPU, but the CUDA kernels" in warning
    assert "not loaded: it was not built: there is no nvcc on PATH. " in warning
    assert "`FLEX_MODEL_CUDA=1 pip install --force-reinstall" in warning


def test_kernels_that_are_loaded_or_useless_are_not_warned_about(unloaded, monkeypatch):
    monkeypatch.setitem(_load._loaded, "_cuda", "not built")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert not _load._has_idle_gpu()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setitem(_load._loaded, "_cuda", "loaded")
    assert not _load._has_idle_gpu()
    monkeypatch.setitem(_load._loaded, "_cuda", "torch has no CUDA")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert not _load._has_idle_gpu()


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


@pytest.mark.slow
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


def test_an_import_without_torch_says_what_to_install():
    done = python("-c", "import sys; sys.modules['torch'] = None; import flex_model")
    assert done.stderr.splitlines()[-1] == (
        'ImportError: flex_model needs torch: run `pip install "torch>=2.11"`'
    )


# ---- Which CUDA compiler, and for which GPUs -----------------------------------------------------

# What `nvcc --version` of these releases prints; its first three lines are alike.
NVCC = """\
nvcc: NVIDIA (R) Cuda compiler driver
Copyright (c) 2005-2025 NVIDIA Corporation
Built on Wed_Aug_20_01:58:59_PM_PDT_2025
Cuda compilation tools, release {}
Build cuda_{}
"""
BEFORE_B200, WITH_B200 = "8.0;9.0+PTX", "8.0;9.0;10.0+PTX;12.0"
TOO_OLD = "and 12.1 or later is needed; set CUDA_HOME to a newer toolkit"
RELEASES = {
    "11.8, V11.8.89": ("11.8.r11.8/compiler.31833905_0", TOO_OLD),
    "12.1, V12.1.66": ("12.1.r12.1/compiler.32415258_0", BEFORE_B200),
    "12.1, V12.1.105": ("12.1.r12.1/compiler.32688072_0", BEFORE_B200),
    "12.2, V12.2.140": ("12.2.r12.2/compiler.33191640_0", BEFORE_B200),
    "12.3, V12.3.107": ("12.3.r12.3/compiler.33567101_0", BEFORE_B200),
    "12.4, V12.4.131": ("12.4.r12.4/compiler.34097967_0", BEFORE_B200),
    "12.5, V12.5.82": ("12.5.r12.5/compiler.34385749_0", BEFORE_B200),
    "12.6, V12.6.85": ("12.6.r12.6/compiler.35059454_0", BEFORE_B200),
    "12.8, V12.8.93": ("12.8.r12.8/compiler.35583870_0", WITH_B200),
    "12.9, V12.9.86": ("12.9.r12.9/compiler.36037853_0", WITH_B200),
    "13.0, V13.0.88": ("13.0.r13.0/compiler.36424714_0", WITH_B200),
    "13.2, V13.2.78": ("13.2.r13.2/compiler.37668154_0", WITH_B200),
}


@pytest.fixture
def settings(monkeypatch, tmp_path):
    """The functions of setup.py, and a CUDA toolkit without compiler, in an environment that says
    nothing else of CUDA."""
    monkeypatch.chdir(ROOT)  # setup.py does so
    for name in ("FLEX_MODEL_CUDA", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    spec = importlib.util.spec_from_file_location("settings", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "settings", module)
    spec.loader.exec_module(module)
    return module


def make_nvcc(tmp_path, release="12.4, V12.4.131", compile="exit 1"):
    """An nvcc that prints its version, and for the rest runs `compile`."""
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    text = NVCC.format(release, RELEASES[release][0])
    nvcc.write_text(f"#!/bin/sh\n[ $1 = --version ] && echo '{text}' && exit\n{compile}\n")
    nvcc.chmod(0o755)
    return nvcc


@pytest.mark.parametrize("release", RELEASES)
def test_architectures_are_those_that_this_nvcc_knows(settings, tmp_path, monkeypatch, release):
    nvcc = make_nvcc(tmp_path, release)
    found, expected = settings.find_toolkit(), RELEASES[release][1]
    if expected == TOO_OLD:
        assert found == f"nvcc is 11.8, {TOO_OLD}"
        return
    assert (found.nvcc, found.version, found.archs) == (nvcc, release.split(",")[0], expected)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5")
    assert settings.find_toolkit().archs == "7.5"


@pytest.mark.parametrize("archs", ["7.5;9.0a+PTX", "7.5 9.0a+PTX", " 7.5, 9.0a+PTX;"])
def test_architectures_are_written_as_torch_has_them(settings, archs):
    assert settings.Toolkit(Path("nvcc"), "13.0", archs).arch_flags() == [
        "-gencode=arch=compute_75,code=sm_75",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_90a,code=compute_90a",
    ]


def test_a_toolkit_that_is_not_there_is_said(settings, tmp_path, monkeypatch):
    assert settings.find_toolkit() == (
        f"there is no nvcc in {tmp_path}/cuda/bin; install the CUDA toolkit or set CUDA_HOME"
    )
    make_nvcc(tmp_path).write_text("#!/bin/sh\nexit 3\n")
    assert re.match(r"`nvcc --version` failed: .*exit status 3", settings.find_toolkit())
    monkeypatch.setattr(settings, "WANTED", "1")
    with pytest.raises(SystemExit, match="flex_model: FLEX_MODEL_CUDA=1, but `nvcc --version`"):
        settings.choose_cuda()


# It compiles by g++, but no code for the GPUs that nvcc 12.4 does not know.
LIKE_12_4 = """\
for arg; do
  shift
  case $arg in
    *compute_100*) echo "nvcc fatal   : Unsupported gpu architecture 'compute_100'"; exit 1 ;;
    -gencode=*) ;;
    -ccbin=*) by=${arg#*=} ;;
    -Xcompiler=*) set -- "$@" $(echo "${arg#*=}" | tr , ' ') ;;
    *.cu) set -- "$@" -x c++ "$arg" ;;
    *) set -- "$@" "$arg" ;;
  esac
done
exec ${by-c++} "$@"
"""


def build_by_nvcc_12_4(settings, tmp_path, monkeypatch, **environment):
    """Build a `_cuda` of one file. The facts that are recorded, and what the binary needs."""
    make_nvcc(tmp_path, compile=LIKE_12_4)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    source = tmp_path / "one.cu"
    source.write_text('extern "C" int one() { throw 1; }\n')
    monkeypatch.setattr(settings, "WANTED", os.environ.get("FLEX_MODEL_CUDA", "auto"))
    monkeypatch.setattr(settings, "CUDA", settings.choose_cuda())
    extension = Extension(
        "flex_model._cuda",
        [str(source)],
        libraries=["torch_cpu", "torch_cuda"],
        extra_link_args=["-Xcompiler=-Xlinker,--no-as-needed,-Xlinker,-s"],
        py_limited_api=True,
    )
    command = settings.BuildExtensions(Distribution({"ext_modules": [extension]}))
    command.build_lib, command.build_temp = str(tmp_path / "lib"), str(tmp_path / "a b$c")
    stale = tmp_path / "lib" / "flex_model" / "_cuda.abi3.so"
    stale.parent.mkdir(parents=True)
    stale.touch()
    command.ensure_finalized()
    command.run()
    facts = json.loads((stale.parent / "_build_config.json").read_text())
    if not stale.exists():
        return facts, []
    shown = subprocess.run(["readelf", "-d", stale], capture_output=True, text=True, check=True)
    return facts, re.findall(r"NEEDED.*\[((?:libtorch|libstdc).*)\]", shown.stdout)


def test_an_nvcc_of_another_major_version_than_torchs_builds(settings, tmp_path, monkeypatch):
    facts, needed = build_by_nvcc_12_4(settings, tmp_path, monkeypatch, CXX="env c++ -m64")
    assert facts["built"] == ["_cuda"]
    assert (facts["nvcc"], facts["cuda_archs"]) == ("12.4", BEFORE_B200)
    assert (facts["torch"], facts["why_no_cuda"]) == (torch.__version__, "")
    assert needed == ["libtorch_cpu.so", "libtorch_cuda.so", "libstdc++.so.6"]


def test_a_compiler_with_a_runtime_of_its_own_compiles_only(settings, tmp_path, monkeypatch):
    """An error that is raised in one C++ runtime, and caught in another, ends the process."""
    compiler = tmp_path / "static"
    compiler.write_text('#!/bin/sh\nexec c++ -static-libstdc++ "$@"\n')
    compiler.chmod(0o755)
    _, needed = build_by_nvcc_12_4(settings, tmp_path, monkeypatch, CXX=str(compiler))
    assert "libstdc++.so.6" in needed


def test_an_nvcc_that_fails_leaves_cuda_out_loudly(settings, tmp_path, monkeypatch, capfd):
    facts, needed = build_by_nvcc_12_4(
        settings, tmp_path, monkeypatch, TORCH_CUDA_ARCH_LIST=WITH_B200
    )
    reason = (
        "nvcc 12.4 could not build it: nvcc fatal   : Unsupported gpu architecture 'compute_100'"
    )
    assert facts["why_no_cuda"] == reason
    assert (facts["built"], facts["nvcc"], facts["cuda_archs"], needed) == ([], None, None, [])
    assert f"flex_model: WARNING: building without CUDA: {reason}\n" in capfd.readouterr().err


def test_an_nvcc_that_fails_is_an_error_where_cuda_is_required(settings, tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match=r"flex_model\._cuda could not be built: nvcc fatal"):
        build_by_nvcc_12_4(
            settings, tmp_path, monkeypatch, TORCH_CUDA_ARCH_LIST=WITH_B200, FLEX_MODEL_CUDA="1"
        )


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

"""Builds the three binaries of flex_model; metadata is in pyproject.toml.

    flex_model._C     csrc/engine  pybind11, no torch header
    flex_model._ops   csrc/ops     torch stable ABI, CPU
    flex_model._cuda  csrc/cuda    torch stable ABI, kernels by nvcc; a GPU is not needed to build

Environment:
    FLEX_MODEL_CUDA       auto (default): `_cuda` where nvcc fits torch; 1: an error where it does
                          not; 0: never
    TORCH_CUDA_ARCH_LIST  default 8.0;9.0;10.0+PTX
    MAX_JOBS              compilers at once; default min(cores, free GB / 2)
    FLEX_MODEL_SANITIZE   1: with address and undefined-behaviour sanitizers, without CUDA, into
                          build/sanitize
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pybind11
import torch
from setuptools import Extension, setup
from setuptools.command.build import build
from torch.utils import cpp_extension

os.chdir(Path(__file__).parent)  # so that the globs below hold wherever pip starts this file

# The oldest torch that the binaries load under, whichever torch they are compiled against.
STABLE_ABI = ["-DTORCH_TARGET_VERSION=0x020b000000000000ULL"]
WARNINGS = ["-Wall", "-Wextra"]
ARCH_LIST = "8.0;9.0;10.0+PTX"
CONFIG = "_build_config.json"
SANITIZE = os.environ.get("FLEX_MODEL_SANITIZE", "0") == "1"
SANITIZERS = [
    "-fsanitize=address,undefined",
    "-fno-sanitize=vptr",
    "-fno-sanitize-recover=undefined",
]


def find_nvcc() -> Path | None:
    """The nvcc that torch's build helper will call."""
    nvcc = Path(cpp_extension.CUDA_HOME or "nowhere", "bin", "nvcc")
    return nvcc if nvcc.exists() else None


def nvcc_version(nvcc: Path) -> str:
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release ([\d.]+)", text)
    return found[1] if found else "unknown"


def why_no_cuda() -> str:
    """Why `_cuda` cannot be built here; empty if it can."""
    nvcc = find_nvcc()
    if torch.version.cuda is None:
        return f"torch {torch.__version__} has no CUDA; install a CUDA build of torch"
    if nvcc is None:
        home = cpp_extension.CUDA_HOME
        return f"no nvcc (CUDA_HOME is {home}); install the CUDA toolkit or set CUDA_HOME"
    version = nvcc_version(nvcc)
    if version.split(".")[0] != torch.version.cuda.split(".")[0]:
        return (
            f"nvcc is {version}, torch was built with CUDA {torch.version.cuda}; "
            "set CUDA_HOME to a toolkit of that version"
        )
    return ""


def choose_cuda() -> tuple[bool, str]:
    """Whether to build `_cuda`, and if not, why."""
    wanted = os.environ.get("FLEX_MODEL_CUDA", "auto")
    if wanted not in ("auto", "0", "1"):
        sys.exit(f"flex_model: FLEX_MODEL_CUDA must be auto, 0 or 1, got {wanted!r}")
    if SANITIZE:
        return False, "FLEX_MODEL_SANITIZE=1 builds without CUDA"
    if wanted == "0":
        return False, "FLEX_MODEL_CUDA=0"
    reason = why_no_cuda()
    if reason and wanted == "1":
        sys.exit(f"flex_model: FLEX_MODEL_CUDA=1, but {reason}")
    return not reason, reason


def free_gigabytes() -> float:
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return 8.0
    found = re.search(r"MemAvailable:\s*(\d+) kB", text)
    return int(found[1]) / 2**20 if found else 8.0


def default_jobs() -> int:
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, min(cores, int(free_gigabytes() / 2)))


def files(pattern: str) -> list[str]:
    return sorted(str(path) for path in Path("csrc").glob(pattern))


def extensions(with_cuda: bool) -> list[Extension]:
    optimize = ["-O1", "-g", "-fno-omit-frame-pointer", *SANITIZERS] if SANITIZE else ["-O3", "-g0"]
    # Messages and debug lines must not carry the path of the machine that built them.
    cxx = [*optimize, *WARNINGS, "-fvisibility=hidden", f"-ffile-prefix-map={os.getcwd()}/="]
    link = [*(SANITIZERS if SANITIZE else ["-Wl,-s"]), "-Wl,--as-needed"]
    csrc = os.path.abspath("csrc")  # ninja runs elsewhere
    # As system headers, for their warnings are not ours. Torch adds the -std that they need.
    torch_includes = [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]
    # setuptools looks at these to see if there is anything to do; ninja then rebuilds by object.
    headers = [*files("**/*.h"), *files("**/*.cuh"), "setup.py"]

    engine = Extension(
        "flex_model._C",
        files("engine/**/*.cpp"),
        include_dirs=[csrc, os.path.join(csrc, "engine"), pybind11.get_include()],
        extra_compile_args=["-std=c++17", *cxx],
        extra_link_args=link,
        depends=headers,
        language="c++",
    )
    ops = Extension(
        "flex_model._ops",
        files("ops/*.cpp"),
        include_dirs=[csrc],
        library_dirs=cpp_extension.library_paths(),
        libraries=["torch_cpu"],
        extra_compile_args=[*cxx, *STABLE_ABI, *torch_includes],
        extra_link_args=link,
        depends=headers,
        language="c++",
        py_limited_api=True,
    )
    if not with_cuda:
        return [engine, ops]
    cuda = Extension(
        "flex_model._cuda",
        files("cuda/*.cpp") + files("cuda/*.cu"),
        include_dirs=[csrc],
        library_dirs=cpp_extension.library_paths(device_type="cuda"),
        # The runtime is linked statically, so that any of the same major will do beside it.
        libraries=["torch_cpu", "torch_cuda", "cudart_static", "rt", "dl", "pthread"],
        extra_compile_args={
            "cxx": [*cxx, *STABLE_ABI, *torch_includes, "-DUSE_CUDA"],
            "nvcc": ["-O3", "-Xcompiler", "-Wall,-Wextra,-fvisibility=hidden"],
        },
        extra_link_args=link,
        depends=headers,
        language="c++",
        py_limited_api=True,
    )
    return [engine, ops, cuda]


class Build(build):
    def initialize_options(self) -> None:
        super().initialize_options()
        if SANITIZE:
            self.build_base = os.path.join("build", "sanitize")


class BuildExtensions(cpp_extension.BuildExtension):
    """Also records what was built in flex_model/_build_config.json, for ``build_info()``."""

    def finalize_options(self) -> None:
        forced = self.force
        super().finalize_options()
        self.force = forced  # torch always links anew

    def run(self) -> None:
        if SANITIZE and self.inplace:
            sys.exit(
                "flex_model: FLEX_MODEL_SANITIZE=1 builds into build/sanitize: "
                "run `setup.py build`, not --inplace"
            )
        self.force = self.force or self.settings_changed()
        super().run()
        folders = [
            Path(self.build_lib, "flex_model"),
            *([Path("flex_model")] if self.inplace else []),
        ]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            if not WITH_CUDA:  # what an earlier build left there is older than the sources
                for stale in folder.glob("_cuda*.so"):
                    stale.unlink()
            (folder / CONFIG).write_text(json.dumps(self.facts(), indent=2) + "\n")
        print(f"flex_model: built {', '.join(e.name for e in self.extensions)}", file=sys.stderr)

    def settings_changed(self) -> bool:
        """Whether flags or tools are not the last build's; of the linker's, ninja knows nothing."""
        record = Path(self.build_temp, "settings.json")
        settings = [[e.name, e.extra_compile_args, e.extra_link_args] for e in self.extensions]
        text = json.dumps([settings, self.facts(), sys.executable, pybind11.__version__])
        changed = not record.exists() or record.read_text() != text
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(text)
        return changed

    def facts(self) -> dict[str, object]:
        return {
            "flex_model": self.distribution.get_version(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torch_cuda": torch.version.cuda,
            "nvcc": nvcc_version(NVCC) if WITH_CUDA and NVCC else None,
            "cuda_archs": os.environ["TORCH_CUDA_ARCH_LIST"] if WITH_CUDA else None,
            "sanitize": SANITIZE,
            "built": [extension.name.split(".")[-1] for extension in self.extensions],
            "why_no_cuda": WHY_NOT,
        }


WITH_CUDA, WHY_NOT = choose_cuda()
NVCC = find_nvcc()
os.environ.setdefault("TORCH_CUDA_ARCH_LIST", ARCH_LIST)
os.environ.setdefault("MAX_JOBS", str(default_jobs()))
os.environ["PATH"] += os.pathsep + sysconfig.get_path("scripts")  # where pip puts ninja
if WHY_NOT:
    print(f"flex_model: building without CUDA: {WHY_NOT}", file=sys.stderr)

setup(
    ext_modules=extensions(WITH_CUDA),
    cmdclass={"build": Build, "build_ext": BuildExtensions.with_options(use_ninja=True)},
)

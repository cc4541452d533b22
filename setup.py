"""Builds the three binaries of flex_model; metadata is in pyproject.toml.

    flex_model._C     csrc/engine  pybind11, no torch header
    flex_model._ops   csrc/ops     torch stable ABI, CPU
    flex_model._cuda  csrc/cuda    torch stable ABI, kernels by nvcc; a GPU is not needed to build

Of torch only headers are used: it is not imported, and it may be one without CUDA.

Environment:
    FLEX_MODEL_CUDA       auto (default): `_cuda` where nvcc builds it; 1: an error where it does
                          not; 0: never
    CUDA_HOME             the CUDA toolkit; default: the one whose nvcc is on PATH, /usr/local/cuda
    TORCH_CUDA_ARCH_LIST  numbers with dots, "8.0;9.0+PTX"; default by nvcc's version
    MAX_JOBS              compilers at once; default min(cores, free GB / 2)
    FLEX_MODEL_SANITIZE   1: with address and undefined-behaviour sanitizers, without CUDA, into
                          build/sanitize
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

os.chdir(Path(__file__).parent)  # so that the globs below hold wherever pip starts this file

# The oldest torch that the binaries load under, whichever torch's headers they are compiled with.
OLDEST_TORCH = (2, 11)
STABLE_ABI = ["-DTORCH_TARGET_VERSION=0x020b000000000000ULL"]
OLDEST_NVCC = (12, 1)  # the first whose kernels take more than 4 KB of parameters
WARNINGS = ["-Wall", "-Wextra"]
CONFIG = "_build_config.json"
SANITIZE = os.environ.get("FLEX_MODEL_SANITIZE", "0") == "1"
SANITIZERS = [
    "-fsanitize=address,undefined",
    "-fno-sanitize=vptr",
    "-fno-sanitize-recover=undefined",
]


def find_torch() -> tuple[Path, str]:
    """The folder of torch's headers and its version, without importing it. An isolated build takes
    those of the environment that flex_model is installed into.
    """
    where = "from importlib.util import find_spec; print(find_spec('torch').origin)"
    # Packages of the environment are hidden from an isolated build by PYTHONPATH, which -E ignores.
    commands = ([sys.executable, "-c", where], [sys.executable, "-E", "-c", where])
    tries = [subprocess.run(command, capture_output=True, text=True) for command in commands]
    found = [done.stdout.strip() for done in tries if "__init__.py" in done.stdout]
    if not found:
        sys.exit(
            f"flex_model: there is no torch in {sys.prefix}, and the build takes its headers: run "
            '`pip install "torch>=2.11"` first (installers other than pip hide it: build with '
            "--no-build-isolation)"
        )
    folder = Path(found[0]).parent
    version = runpy.run_path(str(folder / "version.py"))["__version__"]
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST_TORCH:
        sys.exit(f"flex_model: torch is {version}; 2.11 or later is needed")
    return folder / "include", version


@dataclass(frozen=True)
class Toolkit:
    """The CUDA compiler and what it compiles for."""

    nvcc: Path
    version: str
    archs: str

    def arch_flags(self) -> list[str]:
        flags = []
        for arch in re.split(r"[;,\s]+", self.archs.strip(";, ")):
            number, _, with_ptx = arch.partition("+")
            number = number.replace(".", "")
            kinds = ["sm", "compute"] if with_ptx else ["sm"]
            flags += [f"-gencode=arch=compute_{number},code={kind}_{number}" for kind in kinds]
        return flags


def find_nvcc() -> Path | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        nvcc = Path(home, "bin", "nvcc")
    else:
        nvcc = Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc")
    return nvcc if nvcc.exists() else None


def release(version_text: str) -> tuple[int, int]:
    """Major and minor version in the output of `nvcc --version`; (0, 0) if there is none."""
    found = re.search(r"release (\d+)\.(\d+)", version_text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def default_archs(nvcc: tuple[int, int]) -> str:
    """A100, H100, B200, RTX 50. PTX serves the other GPUs that are at least as new as it: that of
    10.0 is for Thor (11.0), too.
    """
    return "8.0;9.0+PTX" if nvcc < (12, 8) else "8.0;9.0;10.0+PTX;12.0"


def find_toolkit() -> Toolkit | str:
    """The CUDA compiler, or the reason why `_cuda` cannot be built."""
    nvcc = find_nvcc()
    if nvcc is None:
        home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
        where = f"in {home}/bin" if home else "on PATH"
        return f"there is no nvcc {where}; install the CUDA toolkit or set CUDA_HOME"
    try:
        text = subprocess.run(
            [nvcc, "--version"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        return f"`nvcc --version` failed: {error}"
    version = release(text)
    name = ".".join(map(str, version))
    if version < OLDEST_NVCC:
        return f"nvcc is {name}, and 12.1 or later is needed; set CUDA_HOME to a newer toolkit"
    return Toolkit(nvcc, name, os.environ.get("TORCH_CUDA_ARCH_LIST") or default_archs(version))


def choose_cuda() -> Toolkit | str:
    """The compiler for `_cuda`, or the reason why it is not built."""
    if WANTED not in ("auto", "0", "1"):
        sys.exit(f"flex_model: FLEX_MODEL_CUDA must be auto, 0 or 1, got {WANTED!r}")
    if SANITIZE:
        return "FLEX_MODEL_SANITIZE=1 builds without CUDA"
    if WANTED == "0":
        return "FLEX_MODEL_CUDA=0"
    found = find_toolkit()
    if isinstance(found, str) and WANTED == "1":
        sys.exit(f"flex_model: FLEX_MODEL_CUDA=1, but {found}")
    return found


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


def extensions() -> list[Extension]:
    optimize = ["-O1", "-g", "-fno-omit-frame-pointer", *SANITIZERS] if SANITIZE else ["-O3", "-g0"]
    cxx = ["-std=c++17", *optimize, *WARNINGS, "-fvisibility=hidden"]
    # Torch's libraries are kept though nothing is resolved in them.
    link = ["-Wl,--no-as-needed", *(SANITIZERS if SANITIZE else ["-Wl,-s"])]
    # As system headers, for their warnings are not ours; messages must not carry their path.
    torch_headers = ["-isystem", str(TORCH), f"-ffile-prefix-map={TORCH}/="]

    engine = Extension(
        "flex_model._C",
        files("engine/**/*.cpp"),
        include_dirs=["csrc", "csrc/engine", pybind11.get_include()],
        extra_compile_args=cxx,
        extra_link_args=link,
    )
    ops = Extension(
        "flex_model._ops",
        files("ops/*.cpp"),
        include_dirs=["csrc"],
        libraries=["torch_cpu"],
        extra_compile_args=[*cxx, *STABLE_ABI, *torch_headers],
        extra_link_args=link,
        py_limited_api=True,
    )
    if isinstance(CUDA, str):
        return [engine, ops]
    cuda = Extension(
        "flex_model._cuda",
        files("cuda/*.cpp") + files("cuda/*.cu"),
        include_dirs=["csrc"],
        libraries=["torch_cpu", "torch_cuda"],
        extra_compile_args=[*cxx, *STABLE_ABI, *torch_headers, "-DUSE_CUDA"],
        extra_link_args=["-Xcompiler=-Xlinker,--no-as-needed,-Xlinker,-s"],  # before the objects
        py_limited_api=True,
    )
    return [engine, ops, cuda]


class Build(build):
    def initialize_options(self) -> None:
        super().initialize_options()
        if SANITIZE:
            self.build_base = os.path.join("build", "sanitize")


class BuildExtensions(build_ext):
    """Compiles and links by ninja, which rebuilds what changed. Torch's own BuildExtension refuses
    an nvcc of another major version than torch's, which is no matter here: no CUDA header of torch
    is used, and the runtime is linked statically.

    Records what was built in flex_model/_build_config.json, for ``build_info()``.
    """

    def run(self) -> None:
        if SANITIZE and self.inplace:
            sys.exit(
                "flex_model: FLEX_MODEL_SANITIZE=1 builds into build/sanitize: "
                "run `setup.py build`, not --inplace"
            )
        super().run()
        built = [extension.name.split(".")[-1] for extension in self.extensions]
        folders = [
            Path(self.build_lib, "flex_model"),
            *([Path("flex_model")] if self.inplace else []),
        ]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            if "_cuda" not in built:  # what an earlier build left there is older than the sources
                for stale in folder.glob("_cuda*.so"):
                    stale.unlink()
            (folder / CONFIG).write_text(json.dumps(self.facts(built), indent=2) + "\n")
        print(f"flex_model: built {', '.join(built)}", file=sys.stderr)

    def build_extensions(self) -> None:
        self.why_no_cuda = CUDA if isinstance(CUDA, str) else ""
        for extension in list(self.extensions):
            error = self.make(extension)
            if not error:
                continue
            if extension.name != "flex_model._cuda" or WANTED == "1":
                sys.exit(f"flex_model: {extension.name} could not be built: {error}")
            self.why_no_cuda = f"nvcc {CUDA.version} could not build it: {error}"
            self.extensions.remove(extension)
            print(
                f"flex_model: WARNING: building without CUDA: {self.why_no_cuda}\n"
                "flex_model: FLEX_MODEL_CUDA=1 makes this an error",
                file=sys.stderr,
            )

    def make(self, extension: Extension) -> str:
        """Bring one binary up to date. The first error of the compiler, or an empty string."""
        folder = Path(self.build_temp, extension.name)
        if self.force:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        target = Path(self.get_ext_fullpath(extension.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        (folder / "build.ninja").write_text(self.ninja_file(extension, folder, target))
        jobs = os.environ.get("MAX_JOBS") or str(default_jobs())
        command = ["ninja", "-f", folder / "build.ninja", "-j", jobs]
        path = os.pathsep.join([os.environ["PATH"], sysconfig.get_path("scripts")])  # as pip has it
        environment, lines = {**os.environ, "PATH": path}, []
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as ninja:
            for line in ninja.stdout:
                lines.append(line.rstrip())
                print(lines[-1], flush=True)
        if ninja.returncode == 0:
            return ""
        errors = [line for line in lines if re.search(r"\b(fatal|error|not found)\b", line)]
        return (errors or lines or ["ninja failed"])[0]

    def ninja_file(self, extension: Extension, folder: Path, target: Path) -> str:
        """How ninja makes `target`; where a source is a .cu, nvcc links it."""
        includes = [f"-I{path}" for path in [*extension.include_dirs, *self.compiler.include_dirs]]
        cxx = [*self.compiler.compiler_so_cxx, *includes, *extension.extra_compile_args]
        link = [*self.compiler.linker_so_cxx]
        rules = {"cxx": f"{quoted(cxx)} -MD -MF $out.d -c $in -o $out"}
        if any(source.endswith(".cu") for source in extension.sources):
            # The compiler that CXX names, without what is before it (ccache) or its options.
            named = [word for word in shlex.split(os.environ.get("CXX", "")) if word[0] != "-"]
            nvcc = [str(CUDA.nvcc), *(f"-ccbin={word}" for word in named[-1:])]
            flags = [*CUDA.arch_flags(), "-std=c++17", "-O3", *includes]
            flags.append(f"-Xcompiler=-fPIC,-fvisibility=hidden,{','.join(WARNINGS)}")
            rules["nvcc"] = f"{quoted([*nvcc, *flags])} -MD -MF $out.d -c $in -o $out"
            # nvcc knows where its runtime is, which is static by default; but the C++ runtime is
            # that of the other binaries. A compiler that CXX names may have a static one only, and
            # with that one an error which is raised here ends the process.
            linker = list(itertools.takewhile(lambda word: word[0] != "-", link))[-1]
            link = [str(CUDA.nvcc), "-shared", f"-ccbin={linker}"]
        text = [f"builddir = {escaped(folder)}"]
        for name, command in rules.items():
            text += [f"rule {name}", f"  command = {command}", f"  description = {name} $in"]
            text += ["  deps = gcc", "  depfile = $out.d"]
        text += [
            "rule link",
            f"  command = {quoted([*link, *extension.extra_link_args])} $in $names -o $out",
            "  description = link $out",
            # Torch's libraries are loaded before ours: all that linking takes is their names, so
            # those that are here, or whether torch has CUDA, do not matter.
            "rule name",
            f"  command = {quoted(self.compiler.linker_so_cxx)} -Xlinker -soname=$library"
            " -x c++ /dev/null -o $out",
        ]
        objects, names = [], []
        for source in extension.sources:
            objects.append(escaped(folder / f"{source}.o"))
            rule = "nvcc" if source.endswith(".cu") else "cxx"
            text.append(f"build {objects[-1]}: {rule} {escaped(source)}")
        for library in extension.libraries:
            names.append(folder / f"lib{library}.so")
            text += [f"build {escaped(names[-1])}: name", f"  library = lib{library}.so"]
        text += [
            f"build {escaped(target)}: link {' '.join(objects)} | {' '.join(map(escaped, names))}",
            f"  names = {quoted(map(str, names))}",
        ]
        return "\n".join(text) + "\n"

    def facts(self, built: list[str]) -> dict[str, object]:
        return {
            "flex_model": self.distribution.get_version(),
            "python": platform.python_version(),
            "torch": TORCH_VERSION,
            "nvcc": CUDA.version if "_cuda" in built else None,
            "cuda_archs": CUDA.archs if "_cuda" in built else None,
            "sanitize": SANITIZE,
            "built": built,
            "why_no_cuda": self.why_no_cuda,
        }


def quoted(command: list[str]) -> str:
    return shlex.join(command).replace("$", "$$")


def escaped(path: Path | str) -> str:
    return re.sub(r"([ :$])", r"$\1", str(path))


TORCH, TORCH_VERSION = find_torch()
WANTED = os.environ.get("FLEX_MODEL_CUDA", "auto")
CUDA = choose_cuda()

if __name__ == "__main__":
    if isinstance(CUDA, str):
        print(f"flex_model: building without CUDA: {CUDA}", file=sys.stderr)
    setup(ext_modules=extensions(), cmdclass={"build": Build, "build_ext": BuildExtensions})

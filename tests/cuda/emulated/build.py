"""Compiles csrc/cuda for the CPU, into build/emulated: what changed since the last time.

The sanitizer of undefined behaviour ends the process where it finds some, and gcov counts lines.
"""

import fcntl
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
CSRC = ROOT / "csrc"
FOLDER = ROOT / "build" / "emulated"
KERNELS = sorted((CSRC / "cuda").glob("*.cu"))
RUNTIME = [HERE / "streams.cpp", HERE / "memory.cpp"]
TORCH = [CSRC / "cuda" / "ops.cpp", HERE / "tensors.cpp", HERE / "device.cpp"]
STABLE_ABI = ["-DTORCH_TARGET_VERSION=0x020b000000000000ULL", "-DUSE_CUDA"]
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-pthread", "-fvisibility=hidden", *WARNINGS]
FLAGS += [f"-I{HERE / 'include'}", f"-I{CSRC}"]
UNDEFINED = ["-fsanitize=undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=undefined"]
THREAD = ["-fsanitize=thread"]
# Threads may lose each other's counts, but none that is the first: a line that ran has one. Atomic
# counts would make kernels seven times slower.
COVERAGE = ["--coverage", "-fprofile-update=single"]


def compiler() -> str | None:
    return shutil.which("g++")  # whose gcov is


def torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")  # not imported
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def run(*command: object) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")


def is_new(target: Path, command: list[str]) -> bool:
    """Whether a target was made by this command, and after all files that it was made of."""
    files, made_by = target.with_suffix(".d"), target.with_suffix(".command")
    if not all(file.exists() for file in (target, files, made_by)):
        return False
    made_of = files.read_text().replace("\\\n", " ").split(":", 1)[1].split()
    made_at = target.stat().st_mtime
    return made_by.read_text() == str(command) and all(
        os.path.exists(file) and os.stat(file).st_mtime <= made_at for file in made_of
    )


def compile_one(source: Path, folder: Path, flags: list[str]) -> Path:
    """Compile a source, if needed; return the object."""
    target = folder / f"{source.stem}.o"
    command = [*map(str, [compiler(), *FLAGS, *flags, "-MMD", "-x", "c++", "-c", source])]
    if not is_new(target, command):
        folder.mkdir(parents=True, exist_ok=True)
        target.with_suffix(".gcda").unlink(missing_ok=True)  # counts of other lines
        run(*command, "-o", target)
        target.with_suffix(".command").write_text(str(command))
    return target


def compile_all(sources: list[Path], folder: Path, flags: list[str]) -> list[Path]:
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        return list(threads.map(lambda source: compile_one(source, folder, flags), sources))


def link(target: Path, objects: list[Path], flags: list[str]) -> Path:
    if not target.exists() or any(o.stat().st_mtime > target.stat().st_mtime for o in objects):
        target.unlink(missing_ok=True)  # a process that has loaded it keeps its own
        run(compiler(), "-pthread", *objects, *flags, "-o", target)
    return target


@contextmanager
def one_at_a_time() -> Iterator[None]:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@one_at_a_time()
def program(name: str, sanitizers: list[str]) -> Path:
    """Build the program of ``name``.cpp, which needs no torch."""
    folder = FOLDER / ("threads" if sanitizers == THREAD else "library")
    flags = sanitizers + (COVERAGE if sanitizers != THREAD else [])
    objects = compile_all([*KERNELS, *RUNTIME, HERE / f"{name}.cpp"], folder, flags)
    return link(folder / name, objects, flags)


@one_at_a_time()
def package() -> Path:
    """Build a folder with the package, whose `_cuda` is the emulated one; return the folder."""
    torch = torch_folder()
    includes = [f"-isystem{torch / 'include' / part}" for part in ("", "torch/csrc/api/include")]
    flags = UNDEFINED + COVERAGE
    folder = FOLDER / "library"
    objects = compile_all([*KERNELS, *RUNTIME], folder, flags)
    with_torch = [*flags, *includes]
    objects += compile_all(TORCH[:2], folder, [*with_torch, *STABLE_ABI])
    # Torch's own headers are in C++20 since 2.15; those of the stable ABI are not.
    objects += compile_all(TORCH[2:], folder, [*with_torch, "-std=c++20"])
    libraries = ["-shared", "-Wl,-Bsymbolic", f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10"]
    binary = link(folder / "_cuda.abi3.so", objects, [*flags, *libraries])
    site = FOLDER / "site" / "flex_model"
    site.mkdir(parents=True, exist_ok=True)
    files = {file.name: file for file in (ROOT / "flex_model").iterdir()} | {binary.name: binary}
    files.pop("__pycache__", None)
    for old in set(os.listdir(site)) - {*files, "__pycache__"}:
        (site / old).unlink()
    for name, file in files.items():
        here = site / name
        if not here.exists() or here.readlink() != file:  # the folder may be a copy of another one
            here.unlink(missing_ok=True)
            here.symlink_to(file)
    return site.parent


if __name__ == "__main__":
    print(package())

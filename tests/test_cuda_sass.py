"""The machine code that nvcc makes of the kernels: no GPU is needed."""

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "csrc"
REGISTERS, THREADS = 65536, 128  # of a multiprocessor; of a block


def find_tools():
    """nvcc and nvdisasm, which Triton brings along."""
    folders = [str(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")), os.environ["PATH"]]
    if (triton := importlib.util.find_spec("triton")) is not None and triton.origin is not None:
        folders.append(str(Path(triton.origin).parent / "backends" / "nvidia" / "bin"))
    return [shutil.which(tool, path=os.pathsep.join(folders)) for tool in ("nvcc", "nvdisasm")]


NVCC, NVDISASM = find_tools()
pytestmark = pytest.mark.skipif(not (NVCC and NVDISASM), reason="no nvcc or no nvdisasm")


def output(*command):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@dataclass(frozen=True)
class Kernel:
    name: str
    registers: int  # of a thread
    spilled: int  # bytes of a thread that are in memory for want of registers
    instructions: list[str]  # without the predicates before them


def accesses(instructions):
    """Loads and stores of global memory."""
    return [text for text in instructions if re.match(r"(LD|ST)G?\.", text)]


def name_of(symbol):
    name = output("c++filt", symbol).strip().removeprefix("void ").split("(flex_model")[0]
    return re.sub(r"flex_model::|\(anonymous namespace\)::", "", name).split("(")[0]


def instructions_of(cubin):
    """By symbol."""
    found = {}
    for line in output(NVDISASM, "-c", cubin).splitlines():
        if section := re.match(r"\s*\.section\s+(\S+?),", line):
            instructions = found.setdefault(section[1].removeprefix(".text."), [])
        elif match := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            instructions.append(re.sub(r"^@!?U?P\w+\s+", "", match[1]))
    return found


@functools.cache
def copies_on(architecture, folder):
    """The kernels that copy boxes, compiled for an architecture."""
    found = []
    for source in sorted((SOURCES / "cuda").glob("*.cu")):
        flags = f"-O3 -std=c++17 -arch={architecture} -I{SOURCES} -Xptxas -v".split()
        cubin = folder / f"{source.stem}.cubin"
        log = output(NVCC, *flags, "-cubin", source, "-o", cubin)
        used = re.findall(
            r"Compiling entry function '(\S+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
            r".*?Used (\d+) registers",
            log,
            re.S,
        )
        instructions = instructions_of(cubin) if used else {}
        for symbol, *spilled, registers in used:
            bytes_spilled = sum(map(int, spilled))
            kernel = Kernel(name_of(symbol), int(registers), bytes_spilled, instructions[symbol])
            found += [kernel] * kernel.name.startswith("copy_")
    # Batches; after a barrier or not; hinted or not; widths of chunks, of windows.
    assert len(found) == 2 * 2 * 2 * (5 + 3)
    return found


def blocks_at_once(name):
    text = (SOURCES / "cuda" / "box_copy_kernels.cuh").read_text()
    return int(re.search(rf"\b{name} = (\d+)", text)[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sass")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_all_blocks_of_a_full_grid_run_at_once(architecture, folder):
    """A grid has so many; a block that has to wait for another one would run alone at the end. And
    no register is spilled for that.
    """
    if architecture not in output(NVCC, "--list-gpu-code").split():
        pytest.skip("nvcc does not know it")
    for kernel in copies_on(architecture, folder):
        blocks = blocks_at_once("kWindowBlocks" if "windows" in kernel.name else "kChunkBlocks")
        allocated = -(-kernel.registers // 8) * 8  # in units of 8 per thread
        assert blocks * THREADS * allocated <= REGISTERS, kernel.name
        assert kernel.spilled == 0, kernel.name


def test_loads_see_what_peers_wrote(folder):
    """None goes through the cache of constants, which is not coherent; a barrier, of one wait, is
    over before a copy's accesses.
    """
    copies = {kernel.name: kernel.instructions for kernel in copies_on("sm_90", folder)}
    for name, instructions in copies.items():
        if "AfterBarrier" in name:
            alone = copies[re.sub(r"AfterBarrier<(.*?> ?)>", r"\1", name).replace("  ", " ")]
            (wait,) = [i for i, text in enumerate(instructions) if "BAR.SYNC" in text]
            assert len(accesses(instructions[wait:])) >= len(accesses(alone)), name
        else:
            assert not any("CONSTANT" in access for access in accesses(instructions)), name
            is_store = [access.startswith("ST") for access in accesses(instructions)]
            assert is_store == sorted(is_store), name  # all loads come first

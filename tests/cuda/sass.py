"""The machine code of the kernels: make sass.

python -m tests.cuda.sass [ARCHITECTURE]    sm_90 by default

Columns:
    registers   of a thread
    spilled     bytes of a thread that the compiler puts in memory for want of registers
    loads, stores   of global memory, by bits; ``EF``: they leave the cache first
    size        instructions
    path        the fewest instructions of a thread that copies all its pieces: its runs are long
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "sass"
COLUMNS = ["registers", "spilled", "size", "path", "loads", "stores"]
# A piece is a load and a store, or two loads and a store; a thread has four.
ACCESSES = {"copy_chunks": 8, "copy_windows": 12}


@dataclass(frozen=True)
class Kernel:
    name: str
    registers: int
    spilled: int
    code: list[str]  # instructions, and labels, which end in a colon

    @property
    def instructions(self) -> list[str]:
        return [line for line in self.code if not line.endswith(":")]

    @property
    def size(self) -> int:
        return len(self.instructions)

    @property
    def loads(self) -> list[str]:
        return [kind(i) for i in self.instructions if is_load(i)]

    @property
    def stores(self) -> list[str]:
        return [kind(i) for i in self.instructions if is_store(i)]

    @property
    def path(self) -> int | None:
        """The fewest instructions from the first one to the end, with all accesses of a thread."""
        wanted = ACCESSES.get(self.name.split("<")[0])
        if wanted is None:
            return None
        labels, instructions = {}, []
        for line in self.code:
            if line.endswith(":"):
                labels[line[:-1]] = len(instructions)
            else:
                instructions.append(line)
        reached, places = {(0, 0)}, deque([(0, 0, 1)])
        while places:  # by the number of instructions
            at, accesses, count = places.popleft()
            text = instructions[at]
            operation = without_predicate(text)
            accesses = min(wanted, accesses + is_access(text))
            if operation.startswith("EXIT") and accesses == wanted:
                return count
            jump = re.match(r"(?:BRA|CALL)\S* .*`\((\S+?)\)", operation)
            next_ones = [labels[jump[1]]] if jump else []
            if operation != text or not re.match(r"EXIT|(BRA|CALL)\S* `", operation):
                next_ones.append(at + 1)
            for following in next_ones:
                if (following, accesses) not in reached:
                    reached.add((following, accesses))
                    places.append((following, accesses, count + 1))
        return None


def without_predicate(instruction: str) -> str:
    return re.sub(r"^@!?U?P\w+\s+", "", instruction)


def is_load(instruction: str) -> bool:
    return re.match(r"LDG?\.", without_predicate(instruction)) is not None


def is_access(instruction: str) -> bool:
    return is_load(instruction) or is_store(instruction)


def is_store(instruction: str) -> bool:
    return re.match(r"STG?\.", without_predicate(instruction)) is not None


def kind(instruction: str) -> str:
    """The bits of an access, and its hint to the cache."""
    parts = without_predicate(instruction).split()[0].split(".")
    bits = next(
        (part.lstrip("US") for part in parts if re.fullmatch(r"[US]?(8|16|64|128)", part)), "32"
    )
    return f"{bits} EF" if "EF" in parts else bits


def find_tools() -> tuple[str, str] | None:
    """nvcc and nvdisasm, which Triton brings along; None where one is missing."""
    folders = [str(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")), os.environ["PATH"]]
    if (triton := importlib.util.find_spec("triton")) is not None and triton.origin is not None:
        folders.append(str(Path(triton.origin).parent / "backends" / "nvidia" / "bin"))
    found = [shutil.which(tool, path=os.pathsep.join(folders)) for tool in ("nvcc", "nvdisasm")]
    return (found[0], found[1]) if found[0] and found[1] else None


def architectures() -> list[str]:
    """All that nvcc knows."""
    tools = find_tools()
    return [] if tools is None else output(tools[0], "--list-gpu-code").split()


def output(*command: object) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def name_of(symbol: str) -> str:
    name = output("c++filt", symbol).strip().removeprefix("void ").split("(flex_model")[0]
    return re.sub(r"flex_model::|\(anonymous namespace\)::", "", name).split("(")[0]


def kernels(architecture: str = "sm_90") -> list[Kernel]:
    """Compile the CUDA sources for an architecture, and read what came out."""
    tools = find_tools()
    assert tools is not None
    nvcc, nvdisasm = tools
    FOLDER.mkdir(parents=True, exist_ok=True)
    found = []
    for source in sorted((ROOT / "csrc" / "cuda").glob("*.cu")):
        cubin = FOLDER / f"{source.stem}.cubin"
        flags = [
            "-O3",
            "-std=c++17",
            f"-arch={architecture}",
            f"-I{ROOT / 'csrc'}",
            "-Xptxas",
            "-v",
        ]
        log = output(nvcc, *flags, "-cubin", source, "-o", cubin)
        used = {}
        for symbol, text in re.findall(
            r"Compiling entry function '(\S+)'(.*?registers)", log, re.S
        ):
            spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
            registers = re.search(r"Used (\d+) registers", text)
            assert spilled is not None and registers is not None, text
            used[symbol] = int(registers[1]), sum(map(int, spilled.groups()))
        codes = code_by_symbol(output(nvdisasm, "-c", cubin)) if used else {}
        found += [Kernel(name_of(symbol), *used[symbol], codes[symbol]) for symbol in used]
    return found


def code_by_symbol(text: str) -> dict[str, list[str]]:
    codes: dict[str, list[str]] = {}
    code: list[str] = []
    for line in text.splitlines():
        if section := re.match(r"\s*\.section\s+(\S+?),", line):
            code = codes.setdefault(section[1].removeprefix(".text."), [])
        elif found := re.match(r"(\.L\w+:)|\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            code.append(found[1] or found[2])
    return codes


def main() -> None:
    if find_tools() is None:
        sys.exit("there is no nvcc (CUDA_HOME) or no nvdisasm (Triton has one)")
    print(f"{'kernel':51}", *(f"{name:>9}" for name in COLUMNS[:4]), "", *COLUMNS[4:])
    for kernel in kernels(*sys.argv[1:2]):
        numbers = [
            f"{'-' if (n := getattr(kernel, name)) is None else n:>9}" for name in COLUMNS[:4]
        ]
        accesses = [
            ", ".join(f"{count} x {kind}" for kind, count in Counter(getattr(kernel, name)).items())
            for name in COLUMNS[4:]
        ]
        print(f"{kernel.name:51}", *numbers, "", "; ".join(accesses))


if __name__ == "__main__":
    main()

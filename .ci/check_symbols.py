"""check_symbols.py BINARY...: none needs a C++ symbol of torch, and _C none of torch at all.

So the binaries load under torch versions other than the one they were built against. All take the
process's C++ runtime: an error that one with a runtime of its own raises would end the process.
"""

import re
import subprocess
import sys
from pathlib import Path

CXX = re.compile(
    r"_Z\w*(2at|3c10|5torch|6caffe2)\d"
)  # mangled names in at::, c10::, torch::, caffe2::
ANY = re.compile(r"aoti_torch_|torch_|THP")


def undefined(path: Path) -> list[str]:
    command = ["nm", "--dynamic", "--undefined-only", str(path)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    # A weak symbol (w, v) may stay undefined, so it needs nothing.
    return [line.split()[-1].split("@")[0] for line in lines if line.split()[-2] == "U"]


def main() -> int:
    wrong = 0
    for path in map(Path, sys.argv[1:]):
        symbols = undefined(path)
        found = [name for name in symbols if CXX.search(name)]
        if path.name.startswith("_C."):
            found += [name for name in symbols if ANY.match(name)]
        wrong += len(found)
        print(f"symbols: {path.name}: {len(symbols)} undefined, {len(found)} that must not be")
        for name in found:
            print(f"  {name}; use only torch/csrc/stable headers in _ops and _cuda, none in _C")
        if "__cxa_throw" not in symbols:
            wrong += 1
            print("  __cxa_throw is its own; link it with libstdc++.so (setup.py)")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""The unit tests of the packages that changed against the last commit: those of one process.

`make quick` runs it: flex_model/layouts/rules.py has its tests in tests/layouts, and a changed file
of tests stands for itself. Arguments are passed to pytest.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UNIT = "not ranks and not slow and not grid and not sweep and not hosts"
NO_TESTS = 5  # pytest's status where none was selected
# Where the tests are elsewhere than in the folder of the same name.
PLACES = {
    "flex_model/core": ["tests/compat"],
    "flex_model/traverse": ["tests/compat"],
    "flex_model/utils.py": ["tests/compat"],
    "flex_model/selection": ["tests/parity/test_selection.py", "tests/editing"],
    "flex_model/pytree.py": ["tests/engine"],
    "flex_model/cli.py": ["tests/test_cli.py"],
    "flex_model/layouts": ["tests/layouts", "tests/compat"],
    "csrc/engine": ["tests/engine"],
    "csrc": ["tests/engine", "tests/ops"],
    "docs": ["tests/test_docs.py", "tests/test_architecture.py"],
    "examples": ["tests/test_examples.py"],
}
ALWAYS = ["tests/test_architecture.py", "tests/test_mutations.py", "tests/test_model.py"]


def changed() -> list[str]:
    """The files that differ from the last commit, new ones included."""
    commands = (["diff", "--name-only", "HEAD"], ["ls-files", "--others", "--exclude-standard"])
    outputs = [
        subprocess.run(["git", *one], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for one in commands
    ]
    return [line for output in outputs for line in output.splitlines()]


def tests_of(file: str) -> list[str]:
    path = Path(file)
    if path.match("tests/**/test_*.py") or path.match("tests/test_*.py"):
        return [file]
    for folder in map(str, (path, *path.parents)):
        if folder in PLACES:
            return PLACES[folder]
    if path.parts[0] == "flex_model" and len(path.parts) > 2:
        return [f"tests/{path.parts[1]}"]
    return ["tests/test_errors.py"] if path.parts[0] == "flex_model" else []


def main(arguments: list[str]) -> int:
    files = changed()
    tests = dict.fromkeys(test for file in files for test in tests_of(file))
    paths = [test for test in [*tests, *ALWAYS] if (ROOT / test).exists()]
    print(f"== {len(files)} changed files: {' '.join(paths)}", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-m", UNIT, *arguments, *dict.fromkeys(paths)]
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    return 0 if status == NO_TESTS else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

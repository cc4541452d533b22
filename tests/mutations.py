"""`python tests/mutations.py`: thirty wrong versions of the library, which `make test` finds.

Each mutation is made in a copy of the tree, and the tests that must fail are run there. Those that
pass all the same are listed at the end: a test is missing. Arguments choose mutations by a part of
their name or file. `test_mutations.py` checks that the texts are still there.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "build", "site", "__pycache__", ".*_cache")
FAILED, TIMEOUT_S = 1, 600


class Mutation(NamedTuple):
    """``old``, which is in the file once, is replaced by ``new``: then one of ``tests`` fails."""

    name: str
    file: str
    old: str
    new: str
    tests: str


def read_mutations() -> list[Mutation]:
    """Read `mutations.txt`: blocks of a name, a file, its tests, and lines ``- old`` and ``+ new``.

    Example::

        a selected part that is not put back
        distributed/picked.py
        parity/test_selection.py::test_one_process
        - return into.index_copy(dim, at, part)
        + return into
    """
    found = []
    for block in (ROOT / "tests" / "mutations.txt").read_text().strip().split("\n\n"):
        name, file, tests, *lines = block.split("\n")
        old, new = ("\n".join(line[2:] for line in lines if line[0] == sign) for sign in "-+")
        found.append(Mutation(name, file, old, new, tests))
    return found


MUTATIONS = read_mutations()


def run_tests(tree: Path, tests: str) -> int:
    paths = [f"tests/{test}" for test in tests.split()]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", *paths]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    with (tree / "output.txt").open("w") as output:
        return subprocess.run(
            command, cwd=tree, env=environment, stdout=output, stderr=output, timeout=TIMEOUT_S
        ).returncode


def survives(tree: Path, mutation: Mutation) -> bool:
    """Whether the tests pass with the mutation; anything but a failed test is an error."""
    path = tree / "flex_model" / mutation.file
    before = path.read_text()
    assert before.count(mutation.old) == 1, mutation
    path.write_text(before.replace(mutation.old, mutation.new))
    try:
        status = run_tests(tree, mutation.tests)
    finally:
        path.write_text(before)
    if status not in (0, FAILED):
        sys.exit(f"{mutation.name}: pytest gave {status}\n{(tree / 'output.txt').read_text()}")
    return status == 0


def main(words: list[str]) -> int:
    chosen = [
        one
        for one in MUTATIONS
        if not words or any(word in f"{one.name} {one.file}" for word in words)
    ]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        shutil.copytree(ROOT, tree, ignore=NOT_COPIED)
        if run_tests(tree, " ".join(dict.fromkeys(one.tests for one in chosen))):
            sys.exit(f"without a mutation:\n{(tree / 'output.txt').read_text()}")
        surviving = []
        for one in chosen:
            start = time.monotonic()
            if survives(tree, one):
                surviving.append(one)
            result = "SURVIVES" if one in surviving else "fails"
            print(
                f"{result:8} {time.monotonic() - start:4.0f} s  {one.file}: {one.name}", flush=True
            )
    print(f"{len(chosen) - len(surviving)} of {len(chosen)} mutations fail")
    return bool(surviving)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Prints the lines of csrc/cuda that the emulated build has run since it was compiled, by gcov.

python -m tests.cuda.emulated.coverage    1 if a line was never run that is not in NOT_RUN
"""

import gzip
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from tests.cuda.emulated import build

# By file and text of the line: why the emulation does not run it.
NOT_RUN = {}


def counts_of(objects):
    """How often each line ran, by file and number; templates count together."""
    counts = defaultdict(lambda: defaultdict(int))
    with tempfile.TemporaryDirectory() as folder:
        command = ["gcov", "--json-format", "--preserve-paths", *map(str, objects)]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        for report in Path(folder).glob("*.gcov.json.gz"):
            for file in json.loads(gzip.decompress(report.read_bytes()))["files"]:
                for line in file["lines"]:
                    counts[Path(file["file"])][line["line_number"]] += line["count"]
    return counts


def main():
    objects = sorted((build.FOLDER / "library").glob("*.o"))
    counts, unknown = counts_of([o for o in objects if o.with_suffix(".gcda").exists()]), 0
    for file in sorted((build.CSRC / "cuda").iterdir()):
        lines, text = counts.get(file, {}), file.read_text().splitlines()
        missed = [number for number, count in sorted(lines.items()) if not count]
        if lines:
            print(f"{file.name:20} {1 - len(missed) / len(lines):6.1%} of {len(lines)} lines")
        for number in missed:
            reason = NOT_RUN.get((file.name, text[number - 1].strip()))
            unknown += reason is None
            print(f"  {number}: {text[number - 1].strip()}  # {reason or 'never run'}")
    return 1 if unknown or not counts else 0


if __name__ == "__main__":
    sys.exit(main())

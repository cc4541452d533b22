"""README's Python example runs as it is printed, and what it names is there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_example_runs_as_printed(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    for line in re.findall(r"# prints (.*)", code):
        assert line in done.stdout


@pytest.mark.parametrize("command", ["make demo", "make test"])
def test_the_commands_are_there(command):
    assert command in README
    assert re.search(rf"^{command.split()[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_the_map_names_what_exists():
    block = re.search(r"## Map\n+```\n(.*?)```", README, re.DOTALL).group(1)
    paths = re.findall(r"^(\S+)  ", block, re.MULTILINE)
    assert len(paths) > 10
    for path in paths:
        assert list(ROOT.glob(path.rstrip("/"))), path


def test_it_stays_short():
    assert len(README.splitlines()) < 150

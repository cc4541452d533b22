"""What README names is there. Its example, links and commands: `test_docs`."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


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
    lines = README.splitlines()
    assert len(lines) <= 90
    assert max(map(len, lines)) <= 120

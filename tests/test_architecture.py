"""docs/architecture.md and CONTRIBUTING.md name only files that exist and names they define, and
the tree keeps the rules of CONTRIBUTING.md.
"""

import re
from collections import Counter

import pytest

from doc_pages import ROOT

SOURCES = (".py", ".cpp", ".h", ".cu", ".cuh")
FOLDERS = ("flex_model/", "csrc/", "tests/", "docs/", "benchmarks/")


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_named_paths_exist(page):
    code = re.findall(r"`([^`\n]+)`", (ROOT / page).read_text())
    paths = [text for text in code if text.startswith(FOLDERS)]
    assert paths, page
    for path in paths:
        assert (ROOT / path).exists(), f"{page}: {path}"


def test_named_functions_are_defined_in_their_files():
    text = (ROOT / "docs/architecture.md").read_text()
    places = re.findall(r"((?:`[\w.:]+`, )*`[\w.:]+`) \(`([^`\n]+)`\)", text)
    assert len(places) > 30
    for names, path in places:
        source = (ROOT / path).read_text()
        for name in re.findall(r"\w+(?=`)", names):
            definition = rf"\b(?:def|class) {name}\b|^{name} ?[:=]|^\S.*\b{name}\(.*{{$"
            assert re.search(definition, source, re.M), f"{path} has no {name}"


def sources():
    return [path for folder in ("flex_model", "csrc") for path in (ROOT / folder).rglob("*.*")]


def test_no_file_name_is_there_twice():
    names = Counter(path.name for path in sources() if path.suffix in SOURCES)
    twice = {name for name, count in names.items() if count > 1}
    assert twice == {"__init__.py", "__main__.py"}


def test_no_file_holds_two_ideas():
    """A file of over 500 lines does. The model's is long by its docstrings."""
    long = {
        str(path.relative_to(ROOT))
        for path in sources()
        if path.suffix in SOURCES and len(path.read_text().splitlines()) > 500
    }
    to_be_split = {"flex_model/hooks/core.py"}
    assert long <= {"flex_model/model.py"} | to_be_split

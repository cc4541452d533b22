"""docs/architecture.md and CONTRIBUTING.md name only files that exist and names they define."""

import re

import pytest

from doc_pages import ROOT

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

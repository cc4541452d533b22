"""docs/architecture.md and CONTRIBUTING.md name only files that exist and names they define, and
the tree keeps the rules of CONTRIBUTING.md.
"""

import ast
import importlib.util
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
    assert twice == {"__init__.py"}


def test_no_file_of_the_tests_hides_another():
    """They are imported by name alone, from all folders of tests."""
    names = Counter(path.stem for path in (ROOT / "tests").rglob("*.py"))
    twice = {name for name, count in names.items() if count > 1 and not name.startswith("__")}
    assert twice == set()


def test_no_file_holds_two_ideas():
    """A file of over 700 lines does. The model's is long by its docstrings."""
    long = {
        str(path.relative_to(ROOT))
        for path in sources()
        if path.suffix in SOURCES and len(path.read_text().splitlines()) > 700
    }
    assert long <= {"flex_model/model.py"}


FRAGMENT = re.compile("(Of|That|Those|As|What) |.*of which .*of which", re.DOTALL)


def test_tensors_are_made_on_a_device_that_is_named():
    """By the default device, exchanges and stores would depend on `torch.set_default_device`."""
    made = "arange as_tensor empty eye full linspace ones rand randint randn randperm tensor zeros"
    found = []
    for path in sorted((ROOT / "flex_model").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func)[6:] in made.split():
                is_torchs = ast.unparse(node.func).startswith("torch.")
                if is_torchs and not {"device", None} & {each.arg for each in node.keywords}:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert [one for one in found if "demo.py" not in one] == []


@pytest.mark.parametrize("package", ["fingerprints", "hooks", "layouts"])
def test_docstrings_begin_with_a_sentence(package):
    found = []
    for path in sorted((ROOT / "flex_model" / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                found += [f"{path.name}: {text}"] * bool(FRAGMENT.match(text))
    assert found == []


def assigned_in(source):
    path = ROOT / ".ci/check_assignments.py"
    spec = importlib.util.spec_from_file_location("check_assignments", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [text for _, text in module.check_source(source)]


@pytest.mark.parametrize(
    "statement",
    [
        "other.size = 1",
        "other.size += 1",
        "other.size: int = 1",
        "del other.size",
        "first, other.size = 1, 2",
        "[*other.sizes] = [1, 2]",
        "for other.size in range(2): pass",
        "with open('file') as other.file: pass",
        "self.other.size = 1",
        "setattr(other, 'size', 1)",
        "object.__setattr__(other, 'size', 1)",
        "other = other or Other(); other.size = 1",
    ],
)
def test_assigning_another_objects_attribute_is_found(statement):
    assert len(assigned_in(f"class Owner:\n def method(self, other):\n  {statement}")) == 1
    assert assigned_in(f"def function(self, other):\n {statement}")
    assert assigned_in(f"self = other = Other()\ndef function():\n {statement}")


@pytest.mark.parametrize(
    "statement",
    [
        "self.size = 1",
        "self.sizes[0] = 1",
        "made = Other(); made.size = 1",
        "made = cls.__new__(cls); made.size = 1",
        "made = copy.copy(other); made.size = 1",
        "setattr(self, 'size', 1)",
        "tensor.grad = None",
    ],
)
def test_an_object_assigns_its_own_attributes(statement):
    assert not assigned_in(f"class Owner:\n def method(self, other):\n  {statement}")

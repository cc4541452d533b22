"""The documentation: its code runs, shows what is printed, and its links and commands are there.

``WRITE_DOCS=1 pytest tests/test_docs.py -k run`` writes what blocks print into the pages. How a
page says what runs: `doc_pages`.
"""

import argparse
import ast
import importlib
import inspect
import os
import re
import shlex
import textwrap
import types

import pytest
import torch.distributed as dist

import doc_pages
import scripts
from doc_pages import FENCE, PAGES, ROOT
from flex_model import cli, editing

ALL = {page.name: doc_pages.read(page) for page in PAGES}


def of_ranks(number: int) -> list[str]:
    """Without the recipes, which `test_recipes` runs, each with models of its own."""
    return [
        name
        for name, page in ALL.items()
        if page.is_run and page.ranks == number and page.path.parent.name != "recipes"
    ]


def check_page(name: str, folder) -> None:
    page = ALL[name]
    if page.missing():
        pytest.skip(f"not installed: {', '.join(page.missing())}")
    printed = doc_pages.run(page, folder)
    if dist.is_initialized() and dist.get_rank() > 0:
        return
    if os.environ.get("WRITE_DOCS"):
        doc_pages.write(page, printed)
        return
    for step, found in printed[:-1]:
        assert found == step.text, f"{name}:{step.line} shows something else than is printed"
    for promised in re.findall(r"# prints (.*)", page.code):
        assert promised in printed[-1][1], f"{name} promises {promised!r}"


LONG = "cluster.md"  # it costs a model of a thousand ranks


@pytest.mark.parametrize("name", [name for name in of_ranks(1) if name != LONG])
def test_blocks_run(name, tmp_path):
    check_page(name, tmp_path)


@pytest.mark.slow
def test_blocks_of_a_large_cluster_run(tmp_path):
    check_page(LONG, tmp_path)


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", of_ranks(2))
def test_blocks_run_on_two_ranks(name, tmp_path):
    check_page(name, tmp_path)


NOT_RUN = {
    "cluster.md": ["it makes the world, which tests/integrations/test_slurm.py does"],
    "notebooks.md": ["a script of its own, run by notebook/test_notebook_page"],
    "start.md": ["a script of its own, run by test_the_first_script"],
    "from_nnsight.md": ["nnsight's"] * 4,
    "from_transformerlens.md": ["TransformerLens's"] * 3,
}


def test_every_block_runs_or_says_why_not():
    for name, page in ALL.items():
        left = [step.text for step in page.steps if step.kind == "leave"]
        assert left == NOT_RUN.get(name, []), name
        run = [step for step in page.steps if f"```python\n{step.text}```" in page.text]
        assert page.text.count("```python") == len(run) + len(left), name
        assert all(page.text[: step.span[0]].endswith("```python\n") for step in run), name
        assert {language for language, _ in doc_pages.FENCE.findall(page.text)} <= {
            "",
            "python",
            "text",
        }, name
    assert {page.ranks for page in ALL.values()} == {1, 2}


def test_what_is_shown_is_compared_and_written(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(
        "```python\nx = 1\nprint(x + 1)\n```\n<!-- printed -->\n```text\n3\n```\n"
        "<!-- not run: why -->\n```python\nraise\n```\n"
        "<!-- printed by:\nprint('|', x, '|')\n-->\n| 0 |\n"
    )
    page = doc_pages.read(path)
    printed = doc_pages.run(page, tmp_path)
    shown = [(step.kind, step.text, found) for step, found in printed]
    assert shown == [
        ("compare", "3\n", "2\n"),
        ("compare", "| 0 |\n", "| 1 |\n"),
        ("end", "", "2\n| 1 |\n"),
    ]
    doc_pages.write(page, printed)
    assert [step.text for step in doc_pages.read(path).steps if step.kind == "compare"] == [
        "2\n",
        "| 1 |\n",
    ]


def test_a_page_has_a_place_for_what_it_prints(tmp_path):
    """Not the next block of the page, wherever that is."""
    path = tmp_path / "page.md"
    path.write_text("<!-- printed by:\nprint(1)\n-->\n\nText.\n\n```\n1\n```\n")
    with pytest.raises(ValueError, match=r"page\.md:4: no block or table for what is printed"):
        doc_pages.read(path)


@pytest.mark.slow
def test_the_first_script(tmp_path):
    """docs/start.md: one script, on one process and under torchrun, prints what the page says."""
    page = ALL["start.md"].text
    (script,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "first.py").write_text(script)
    shown = re.findall(r"```text\n\$ (.*?)\n(.*?)```", page, re.DOTALL)
    assert [command.split()[0] for command, _ in shown] == ["python", "torchrun"]
    for command, expected in shown:
        assert scripts.run(tmp_path, *shlex.split(command)) == expected


# ---- Links ---------------------------------------------------------------------------------------

OTHERS = ("CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/results/README.md")
LINKED = [*PAGES, *(ROOT / name for name in OTHERS)]


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def anchors(path) -> set[str]:
    """Of its headings, where GitHub and the site call them alike."""
    found = set()
    text = FENCE.sub("", path.read_text())
    for heading in re.findall(r"^#+ (.*)$", text, re.M):
        plain = re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower()
        on_github, on_site = re.sub(r"\s", "-", plain), re.sub(r"[-\s]+", "-", plain)
        if on_github == on_site and plain.isascii():
            found.add(on_github)
    return found


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text()))
    for target in targets:
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists() and ROOT in [file, *file.parents], f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(file), f"{page.name}: {target}"


def test_every_page_is_in_the_navigation_and_in_the_index():
    named = re.findall(r"[:-] (\w[\w./]*\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    docs = ROOT / "docs"
    pages = sorted(path.relative_to(docs).as_posix() for path in docs.rglob("*.md"))
    assert sorted(named) == pages, "mkdocs.yml: nav has each page of docs/ once"
    linked = re.findall(r"\]\((\w[\w./]*\.md)\)", (docs / "index.md").read_text())
    assert {*linked, "index.md"} == set(pages), "docs/index.md names each page"


def test_pictures_are_small():
    for picture in (ROOT / "docs" / "pictures").iterdir():
        assert picture.stat().st_size < 40_000, picture
        assert any(f"(pictures/{picture.name})" in page.text for page in ALL.values()), picture


# ---- Commands ------------------------------------------------------------------------------------


def commands(text: str) -> list[str]:
    """The lines of blocks, and the code in sentences, that are for a shell."""
    lines = re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    for language, block in doc_pages.FENCE.findall(text):
        if language != "python":
            lines += [line.removeprefix("$ ") for line in block.splitlines()]
    return [re.split(r"\s+[#|>]", line.strip())[0] for line in lines]


class ParsedError(Exception):
    """Instead of running a command."""


@pytest.mark.parametrize("name", ALL)
def test_commands_are_there(name, monkeypatch):
    parse = argparse.ArgumentParser.parse_args

    def only_parse(parser, arguments=None, namespace=None):
        raise ParsedError(parse(parser, arguments, namespace))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", only_parse)
    makefile = (ROOT / "Makefile").read_text()
    for command in commands(ALL[name].text):
        if command.startswith("python -m flex_model "):
            arguments = shlex.split(command)[3:]
            named = len(arguments) == 1  # by the way, without what it takes
            with pytest.raises(SystemExit if named else ParsedError) as caught:
                cli.main(arguments + ["--help"] * named)
            assert not named or caught.value.code == 0, command
        elif command.startswith("make "):
            for target in command.split()[1:]:
                assert "=" in target or re.search(rf"^{target}:", makefile, re.M), command
        elif script := re.search(r"(?:examples|benchmarks)/\w+\.py", command):
            text = (ROOT / script.group()).read_text()
            for option in re.findall(r"--[\w-]+", command[script.end() :]):
                assert f'"{option}"' in text, command


def test_all_ready_edits_are_named():
    named = set(re.findall(r"`(\w+)\(", ALL["editing.md"].text))
    factories = {name for name in editing.__all__ if name.islower()}
    assert factories <= named | {"chain"}, factories - named


# ---- Docstrings ----------------------------------------------------------------------------------

PUBLIC = ("", ".core", ".distributed", ".editing", ".inspection", ".pipelining", ".pytree")
PUBLIC += (".notebook", ".selection", ".sequential", ".traverse", ".visualize")
PUBLIC += (".integrations.slurm",)


def resolve(path: str) -> object:
    """The object of a `:::` line of docs/api.md."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def members(thing: object) -> dict[str, object]:
    """Of a class: what it defines by public names."""
    found = {"": thing}
    if inspect.isclass(thing):
        kinds = (types.FunctionType, property, classmethod, staticmethod)
        own = {k: v for k, v in vars(thing).items() if not k.startswith("_")}
        found |= {name: value for name, value in own.items() if isinstance(value, kinds)}
    return found


@pytest.mark.parametrize("part", PUBLIC)
def test_public_names_have_docstrings_and_are_in_the_reference(part):
    page = ALL["api.md"].text
    if part == ".notebook":
        pytest.importorskip("ipyparallel")
    paths = re.findall(r"^::: (\S+)$", page, re.M)
    shown = [resolve(path) for path in paths if part == ".notebook" or "notebook" not in path]
    module = importlib.import_module(f"flex_model{part}")
    for name in module.__all__:
        thing = getattr(module, name)
        if inspect.ismodule(thing):
            continue
        if not getattr(thing, "__module__", "").startswith("flex_model"):
            assert f"`{name}`" in page, name  # torch's, or a type of annotations
            continue
        assert any(thing is other for other in shown), f"docs/api.md has no ::: for {name}"
        about = thing.__doc__ or ""
        for member, value in members(thing).items():
            said = inspect.getdoc(getattr(thing, member) if member else value)
            assert said or re.search(rf"\b{member}\b", about), f"{name}.{member} says nothing"
            for example in re.findall(r"^Example::\n\n((?:    .*\n|\n)*)", f"{said}\n", re.M):
                ast.parse(textwrap.dedent(example))

"""The pages of the documentation: what their code blocks need, and what they print.

Comments that no reader sees say what is not on the page:

    <!-- ranks: 2 -->            at its top: its blocks run on so many ranks, not on one process
    <!-- hidden: CODE -->        Python that is run here
    <!-- not run: REASON -->     the next block is not run
    <!-- printed -->             the next block is all that was printed since the last such place
    <!-- printed by: CODE -->    the next block or table is what this code prints

The Python blocks of a page run in order in one namespace. A comment ``# prints TEXT`` in one of
them is a promise, too.
"""

import contextlib
import importlib.util
import io
import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OPTIONAL = (
    "accelerate",
    "fairscale",
    "matplotlib",
    "megatron",
    "peft",
    "safetensors",
    "transformers",
)

COMMENT = re.compile(
    r"^<!-- (ranks|hidden|not run|printed by|printed)(?::[ \n](.*?))?\s*-->\n", re.M | re.S
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
TABLE = re.compile(r"(?:^\|.*\n)+", re.M)


@dataclass(frozen=True)
class Step:
    """What is done at one place of a page.

    Attributes:
        kind: ``"run"``, ``"compare"`` (what was printed with what the page shows) or ``"leave"``.
        line: Of the page, where `text` begins.
        text: The code; what is shown; why the block is not run.
        span: Where what is shown lies in the page.
    """

    kind: str
    line: int
    text: str
    span: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Page:
    path: Path
    text: str
    ranks: int
    steps: list[Step]

    @property
    def is_run(self) -> bool:
        return any(step.kind == "run" for step in self.steps)

    @property
    def code(self) -> str:
        return "\n".join(step.text for step in self.steps if step.kind == "run")

    def missing(self) -> list[str]:
        """The optional packages that its code imports and that are not installed."""
        named = set(re.findall(r"^ *(?:from|import) (\w+)", self.code, re.M))
        return [
            name for name in OPTIONAL if name in named and importlib.util.find_spec(name) is None
        ]


def read(path: Path) -> Page:
    text, ranks, steps = path.read_text(), 1, []
    pending = None  # a comment about the block that follows
    found = sorted([*COMMENT.finditer(text), *FENCE.finditer(text)], key=lambda m: m.start())
    inside = 0
    for match in found:
        if match.start() < inside:
            continue
        inside = match.end()
        if match.re is FENCE:
            language = match.group(1)
            if pending == "printed":
                steps.append(_step("compare", text, match.span(2)))
            elif language == "python" and pending is None:
                steps.append(_step("run", text, match.span(2)))
            pending = None
            continue
        word, body = match.groups()
        if word == "ranks":
            ranks = int(body)
        elif word == "hidden":
            steps.append(_step("run", text, match.span(2)))
        elif word == "not run":
            steps.append(Step("leave", _line(text, match.end()), body))
            pending = word
        else:
            if word == "printed by":
                steps.append(_step("run", text, match.span(2)))
            table = TABLE.match(text, match.end())
            if table:
                steps.append(_step("compare", text, table.span()))
            elif not FENCE.match(text, match.end()):
                line = _line(text, match.end())
                raise ValueError(f"{path.name}:{line}: no block or table for what is printed")
            pending = None if table else "printed"
    return Page(path, text, ranks, steps)


def _step(kind: str, text: str, span: tuple[int, int]) -> Step:
    return Step(kind, _line(text, span[0]), text[slice(*span)], span)


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def run(page: Page, folder: Path) -> list[tuple[Step, str]]:
    """Run its blocks in ``folder``, where examples/ and benchmarks/ are to be found.

    Returns:
        What was printed, for each place that shows it; and for the page's end, as a step of its
        own. Collective where the page has ranks.
    """
    from flex_model import FlexModel

    for name in ("examples", "benchmarks"):
        with contextlib.suppress(FileExistsError):
            (folder / name).symlink_to(ROOT / name)
    _destroy_fairscale_groups()
    scope: dict = {"__name__": "page"}
    everything, printed, since = [], [], io.StringIO()
    back = Path.cwd()
    os.chdir(folder)
    try:
        with warnings.catch_warnings():
            for step in page.steps:
                if step.kind == "run":
                    # Lines are counted as in the page, for tracebacks.
                    code = compile("\n" * (step.line - 1) + step.text, str(page.path), "exec")
                    with contextlib.redirect_stdout(since):
                        exec(code, scope)
                elif step.kind == "compare":
                    everything.append(since.getvalue())
                    lines = since.getvalue().splitlines()
                    printed.append((step, "".join(line.rstrip() + "\n" for line in lines)))
                    since = io.StringIO()
    finally:
        os.chdir(back)
        for value in list(scope.values()):
            if isinstance(value, FlexModel):
                value.restore()
    everything.append(since.getvalue())
    return [*printed, (Step("end", 0, ""), "".join(everything))]


def _destroy_fairscale_groups() -> None:
    """A test before may have left them in this process, where there can be one set."""
    with contextlib.suppress(ImportError):
        from fairscale.nn.model_parallel import initialize

        if initialize.model_parallel_is_initialized():
            initialize.destroy_model_parallel()


def write(page: Page, printed: list[tuple[Step, str]]) -> None:
    """Put what was printed into the page."""
    text = page.text
    for step, found in reversed(printed):
        if step.kind == "compare":
            text = text[: step.span[0]] + found + text[step.span[1] :]
    page.path.write_text(text)

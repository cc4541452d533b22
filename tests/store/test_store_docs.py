"""docs/store.md: its code runs as it is printed."""

import contextlib
import io
import re
from pathlib import Path

import pytest

pytest.importorskip("safetensors")
TEXT = (Path(__file__).parents[2] / "docs" / "store.md").read_text()


def test_the_code_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names, blocks = {}, re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == 3
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in blocks:
            exec(compile(block, "docs/store.md", "exec"), names)
    expected = [line for block in blocks for line in re.findall(r"# prints (.*)", block)]
    assert printed.getvalue().splitlines() == expected

"""docs/visualize.md runs as it is printed, and its text and plots are what comes out."""

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "visualize.md").read_text()


def test_the_page_runs_as_printed(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib").use("Agg")
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    scope = {}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, "visualize.md", "exec"), scope)  # one scope, as in a session
    scope["flex"].restore()
    shown, timeline = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert out.getvalue().startswith(shown)
    assert timeline.split()[:9] == out.getvalue()[len(shown) :].split()[:9]
    written = {file.name for file in tmp_path.iterdir()}
    assert written == {"map.html", "induction.svg", "patching.svg", "lens.svg"}
    # What the plots show: head 2 of layer 1; the patch counts where 15 was read, and then told.
    assert scope["scores"].argmax() == 6
    effects = scope["effects"]
    assert effects.argmax(1).tolist() == [5, 5, 10]
    assert scope["words"][-1][6:-1] == [str(token) for token in (3, 19, 11, 2, 15)]
    assert torch.equal(scope["logits"].argmax(-1)[0, 6:-1], scope["tokens"][0, 1:6])


def test_its_pictures_are_small_and_there():
    pictures = re.findall(r"!\[[^]]+\]\((.+?)\)", PAGE)
    assert len(pictures) == 4
    for picture in pictures:
        assert (DOCS / picture).stat().st_size < 40_000, picture

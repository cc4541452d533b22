"""docs/notebooks.md: its cells are those of the example, which run; so does its script."""

import re

import pytest

import scripts
from doc_pages import FENCE, ROOT

pytest.importorskip("ipyparallel")
kernels = pytest.importorskip("kernels")
import nbformat

PAGE = (ROOT / "docs" / "notebooks.md").read_text()
EXAMPLE = ROOT / "examples" / "notebook.ipynb"


def test_the_cells_of_the_page_are_in_the_example():
    written = [cell.source.strip() for cell in nbformat.read(EXAMPLE, 4).cells]
    shown = [code.strip() for language, code in FENCE.findall(PAGE) if not language]
    assert len(shown) > 4
    assert not (missing := [code for code in shown if code not in written]), missing
    assert not any(cell.get("outputs") for cell in nbformat.read(EXAMPLE, 4).cells)


@pytest.mark.grid
def test_the_example_runs_and_finds_the_induction_head(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    with kernels.marked(tmp_path) as mark:
        cells = [cell for cell in nbformat.read(EXAMPLE, 4).cells if cell.cell_type == "code"]
        with kernels.started(EXAMPLE.parent) as notebook:
            shown, pictures = "", 0
            for cell in cells:
                run = notebook.cell(cell.source)
                assert not kernels.error_of(run), kernels.error_of(run)
                shown += kernels.text_of(run)
                pictures += sum("image/png" in x.get("data", {}) for x in run.outputs)
        assert kernels.wait_until_none_left(mark) == []
    assert pictures == 2 and re.search(r"pattern 3 +16 x 4 x 64 x 64 +float32", shown), shown
    before, after = re.search(r"loss ([\d.]+), without the head ([\d.]+)", shown).groups()
    assert float(after) > 2 * float(before)


@pytest.mark.grid
def test_the_script_runs_and_leaves_no_process(tmp_path):
    (code,) = [code for language, code in FENCE.findall(PAGE) if language == "python"]
    (tmp_path / "script.py").write_text(code)
    with kernels.marked(tmp_path) as mark:
        assert "torch.Size([4, 16])" in scripts.run(tmp_path, "python", "script.py")
        assert kernels.wait_until_none_left(mark) == []

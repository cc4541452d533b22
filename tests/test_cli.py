"""``python -m flex_model``: what its commands share, and ``demo``."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from flex_model import cli
from flex_model.diagnostics.progress_bar import progress

ROOT = Path(__file__).parents[1]
COMMANDS = ("demo", "inspect", "doctor", "harvest")


def run(folder, *arguments):
    """The command as a user types it, away from the repository."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "-m", "flex_model", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_screen_and_shows_an_example_that_is_right(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    help_text = capsys.readouterr().out
    assert len(help_text.splitlines()) <= 24
    told = " ".join(help_text.split())
    example = told.rpartition("example: python -m flex_model ")[2].partition(" > ")[0]
    options = cli.make_parser().parse_args(shlex.split(example))
    assert options.command == command and callable(options.run)
    assert "--json" in told
    assert told.count("layers.") == told.count("model.layers.")  # as causal models have them


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    told = capsys.readouterr().out
    assert all(f"    {command}" in told for command in COMMANDS)


@pytest.mark.slow
def test_the_demo_finds_the_same_on_one_process_and_on_two(tmp_path):
    done = run(tmp_path, "demo", "--json", "--html", "map.html")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["is_equal"] and told["ranks"] == [1, 2] and told["induction_head"] == [1, 2]
    assert len(told["largest_differences"]) == 7
    assert all(difference < 1e-9 for difference in told["largest_differences"].values())
    for losses in told["losses"]:
        without = losses["without layer 1, head 2"] - losses["all heads"]
        control = losses["without layer 1, head 3"] - losses["all heads"]
        assert losses["all heads"] < 0.01 and without > 2 and abs(control) < 0.01
    scores = told["induction_scores"]
    assert scores[1][2] > 0.9 and sum(map(sum, scores)) - scores[1][2] < 0.5
    page = (tmp_path / "map.html").read_text()
    assert "zero(heads=2, num_heads=4)" in page and '"ranks":[0,1]' in page


@pytest.mark.slow
def test_the_demo_shows_the_picture_and_the_numbers(tmp_path):
    done = run(tmp_path, "demo", "--ranks", "1")
    assert done.returncode == 0, done.stderr
    hook = "forward-pre; edits: zero(heads=2, num_heads=4); groups: ablations; float64 4 x 32 x 128"
    assert hook in done.stdout
    assert "the induction head: layer 1, head 2" in done.stdout
    assert done.stdout.endswith("all 7 tensors are equal (float64, up to 1e-09)\n")


def test_a_page_that_can_not_be_written_is_told_at_once(tmp_path, capsys):
    assert cli.main(["demo", "--html", str(tmp_path / "nowhere" / "map.html")]) == 1
    assert "No such file or directory" in capsys.readouterr().err


def test_inspect_as_json(capsys):
    assert cli.main(["inspect", "models:mlp", "--dp", "2", "--input", "4,6:float64", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["title"].startswith("MLP  float64 4 x 6 [dp S(0), tp R]")
    (fc1,) = [module for module in told["modules"] if module["name"] == "fc1"]
    assert fc1 == {
        "name": "fc1",
        "class": "Linear",
        "can_be_hooked": True,
        "input": {
            "full_shape": [4, 6],
            "local_shapes": [[2, 6], [2, 6]],
            "dtype": "float64",
            "layout": "dp S(0), tp R",
        },
        "output": {
            "full_shape": [4, 8],
            "local_shapes": [[2, 8], [2, 8]],
            "dtype": "float64",
            "layout": "dp S(0), tp R",
        },
    }


def test_progress_is_for_terminals(capsys, monkeypatch):
    pytest.importorskip("tqdm")
    assert list(progress([1, 2], "things", is_shown=True)) == [1, 2]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert list(progress([1, 2], "things", is_shown=True)) == [1, 2]
    assert "things:   0%" in capsys.readouterr().err
    assert list(progress([1, 2], "things", is_shown=False)) == [1, 2]
    assert capsys.readouterr().err == ""

"""The examples run as a user runs them, and say that they are equal to the unsharded model."""

import ast
import re
from pathlib import Path

import pytest

import scripts
from tiers import grid_but

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run(tmp_path, script: str, *args: str, num_processes: int = 1) -> str:
    """Run an example in a folder of its own and return what it printed."""
    arguments = [str(EXAMPLES / script), *args]
    if num_processes == 1:
        return scripts.run(tmp_path, "python", *arguments)
    return scripts.run(tmp_path, "torchrun", "--nproc-per-node", str(num_processes), *arguments)


def second_copy_losses(output: str) -> dict[str, float]:
    """The column "loss" of the table that induction_heads.py prints."""
    rows = [line.split("│")[1:-1] for line in output.splitlines() if line.startswith("│")]
    return {row[0].strip(): float(row[4]) for row in rows}


def check_induction_heads(output: str, tmp_path: Path) -> None:
    assert output.splitlines()[-1] == "all activations equal to the unsharded model"
    assert (tmp_path / "heads.png").read_bytes().startswith(b"\x89PNG")
    losses = second_copy_losses(output)
    # The model copies; without its best induction head it does so clearly worse.
    assert losses["clean"] < 1.0
    increase = losses["best head zeroed"] - losses["clean"]
    assert increase > 0.3
    assert increase > 3 * abs(losses["control head zeroed"] - losses["clean"])


@pytest.mark.grid
def test_induction_heads_on_one_process(tmp_path):
    pytest.importorskip("transformers")
    output = run(tmp_path, "induction_heads.py", "--out", "heads.png", "--batch", "8")
    check_induction_heads(output, tmp_path)


@pytest.mark.slow
def test_induction_heads_on_two_processes(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")  # transformers loads no model in shards without it
    output = run(tmp_path, "induction_heads.py", "--out", "heads.png", num_processes=2)
    check_induction_heads(output, tmp_path)


@pytest.mark.grid
def test_experts(tmp_path):
    pytest.importorskip("transformers")
    outputs = [run(tmp_path, "experts.py", num_processes=n).splitlines() for n in (1, 2)]
    one, two = (
        [line for line in output if line.startswith(("│", "language"))] for output in outputs
    )
    assert one == two
    assert all(output[-1].startswith("routes and ablation equal") for output in outputs)
    assert (tmp_path / "experts.png").read_bytes().startswith(b"\x89PNG")
    share = int(re.search(r"(\d+)% of its tokens", one[0]).group(1))
    language = int(re.match(r"language (\d)", one[0]).group(1))
    clean, ablated, around = map(float, one[1 + language].split("│")[2:5])
    assert share > 30
    assert clean + 0.1 < around < ablated  # its next best experts know a part of it


@pytest.mark.grid
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_sparse_autoencoder_recovers_the_loss(tmp_path, num_processes):
    pytest.importorskip("transformers")
    output = run(tmp_path, "train_sae.py", "--epochs", "2", num_processes=num_processes)
    clean, spliced, mean = map(
        float, re.findall(r"loss (\S+), with the autoencoder (\S+), the mean (\S+)", output)[0]
    )
    assert mean > clean + 1 and spliced >= clean
    assert (mean - spliced) / (mean - clean) > 0.9
    assert float(re.findall(r"(\S+)% of the loss recovered", output)[0]) > 90
    assert (tmp_path / "sae.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", grid_but([1, 2], 2))
def test_steering_changes_the_text(tmp_path, num_processes):
    pytest.importorskip("transformers")
    if num_processes > 1:
        pytest.importorskip("accelerate")
    output = run(tmp_path, "steering_generate.py", num_processes=num_processes)
    assert output.splitlines()[-1] == "the same tokens as the unsharded model"
    text = dict(line.split(maxsplit=1) for line in output.splitlines())
    assert text["before"] == text["before"].lower()
    assert text["steered"] == text["steered"].upper()


def check_recipes(lines: list[str]) -> None:
    """Of one run of recipes.py."""
    before, after = map(float, re.findall(r"loss (\S+), without it (\S+)", lines[1])[0])
    assert after > before + 0.1
    written, steered = re.findall(r"'([^']+)'", lines[2])
    assert written == written.lower() and steered == steered.upper()
    patched = re.findall(r"(\S+)@(\d+)", lines[4])
    # The token's own position holds it, until the induction head moves it to the last one.
    assert [place for _, place in patched] == ["15", "15", "30", "30"]
    assert all(float(share) > 0.9 for share, _ in patched)
    known = [float(share) for share, _ in re.findall(r"(\S+)@(\d+)", lines[6])]
    assert known[0] < 0.1 and known[-1] > 0.9


@pytest.mark.grid
def test_recipes_on_one_process(tmp_path):
    pytest.importorskip("transformers")
    check_recipes(run(tmp_path, "recipes.py").splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--pipeline"]], ids=["tensor parallel", "pipeline"])
def test_recipes_on_two_processes(tmp_path, options):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    lines = run(tmp_path, "recipes.py", *options, num_processes=2).splitlines()
    assert lines[-1] == "equal to the unsharded model"
    check_recipes(lines[7:-1])


def test_recipes_are_short():
    functions = ast.parse((EXAMPLES / "recipes.py").read_text()).body
    recipes = ["ablate_induction_head", "steer", "patch_heat_map", "logit_lens"]
    lengths = {
        function.name: function.end_lineno - function.lineno + 1
        for function in functions
        if isinstance(function, ast.FunctionDef) and function.name in recipes
    }
    assert len(lengths) == 4 and max(lengths.values()) < 25


@pytest.mark.slow
def test_fsdp2(tmp_path):
    pytest.importorskip("transformers")
    output = run(tmp_path, "fsdp2.py", num_processes=2)
    assert output.splitlines()[-1] == "equal to the unsharded model"


@pytest.mark.slow
def test_pipeline_of_a_llama(tmp_path):
    pytest.importorskip("transformers")
    output = run(tmp_path, "pipeline_llama.py", num_processes=2)
    assert output.count("ScheduleGPipe") == output.count("Schedule1F1B") == 8
    assert output.splitlines()[-1].endswith("equal to the unsplit model's")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "batches", "window", "mib", "most_mib"),
    [(6, 4, 2, 265, 170), pytest.param(16, 16, 8, 700, 250, marks=pytest.mark.grid)],
)
def test_harvest_of_a_model_larger_than_its_memory(
    tmp_path, layers, batches, window, mib, most_mib
):
    pytest.importorskip("transformers")
    sizes = {"--layers": layers, "--batches": batches, "--window": window}
    options = [str(part) for option in sizes.items() for part in option]
    output = run(tmp_path, "harvest_sequential.py", "--quiet", *options)
    facts = {line[:16].strip(): line[16:] for line in output.splitlines()}
    assert int(facts["model"].split()[0]) > mib
    assert int(facts["peak memory"].split()[0]) <= most_mib
    assert facts["layer loads"] == f"{2 * layers} for {batches} batches"
    assert output.splitlines()[-1] == "equal to the full forward"


@pytest.mark.slow
def test_training_script_saves_a_model_that_loads(tmp_path):
    transformers = pytest.importorskip("transformers")
    output = run(tmp_path, "train_induction_model.py", "--steps", "3", "--out", "model")
    assert "induction score" in output
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert model.config.vocab_size == len(tokenizer) == 240


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_no_path_of_a_machine(script):
    assert not any(folder in script.read_text() for folder in ("/work", "/root", "/home", "/tmp"))

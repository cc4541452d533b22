"""The Hugging Face rows of the parity table under the oldest release that is supported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "transformers-5.17"
# It takes huggingface_hub < 2, which takes httpx; all else is as in requirements/test.txt.
PACKAGES = [
    "transformers==5.17.0",
    "huggingface_hub>=1.5,<2",
    "httpx<1",
    "httpcore<2",
    "certifi",
    "idna",
]
CASES = ("hf-llama-2", "hf-llama-4")  # its own column layers need even widths


@pytest.fixture(scope="module")
def environment():
    """With the packages on the path; installed once, away from the environment's own."""
    if not (FOLDER / "transformers").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--target", str(FOLDER), *PACKAGES], check=True, timeout=300)
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PARITY_ROWS")
    variables = {name: value for name, value in os.environ.items() if name not in launcher}
    path = [str(FOLDER), str(ROOT), variables.get("PYTHONPATH", "")]
    return variables | {"PYTHONPATH": os.pathsep.join(filter(None, path))}


@pytest.mark.slow
def test_it_is_that_release(environment):
    code = "import transformers; print(transformers.__version__)"
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert found.stdout.decode().strip() == "5.17.0", found.stderr.decode()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_table(environment, name):
    tests = str(ROOT / "tests" / "parity" / "test_frameworks.py")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "slow or not slow", tests]
    finished = subprocess.run(
        [*command, "-k", f"[{name}] and not read"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=700,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "1 passed" in finished.stdout

"""Memory: bounded by the window and two targets, whatever the model's size."""

import json
import sys
from pathlib import Path

import pytest

import scripts

HERE = Path(__file__).parent
MIB = 2**20


def python(*arguments):
    command = [sys.executable, "big_llama.py", *map(str, arguments)]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)  # the default allocator
        return scripts.finished(HERE, *command, timeout_s=500).stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "windows"), [(6, [4]), pytest.param(16, [8, 4], marks=pytest.mark.grid)]
)
def test_less_than_200_mib_for_layers_of_45(tmp_path, layers, windows):
    pytest.importorskip("transformers")
    python("make", tmp_path, layers)
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert size > 44 * layers * MIB
    expected = json.loads(python("full", tmp_path))
    for window in windows:
        found = json.loads(python("run", tmp_path, window))
        assert found["bytes"] <= 200 * MIB, found["bytes"] / MIB
        assert len(found["loads"]) == layers and set(found["loads"].values()) == {8 // window}
        assert found["logits"] == expected["logits"]
        assert found["records"] == expected["records"]
        assert (found["threads"], found["hooks"]) == (1, 0)
        print(window, round(found["bytes"] / MIB), "MiB", found["read"] / MIB)

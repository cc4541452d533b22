"""Files made by hand as vLLM writes them."""

import base64
import fcntl
import io

import numpy
import pytest
import torch

from flex_model import FlexModel, HookFunction
from flex_model.integrations.vllm_files import read_hidden_states, read_routed_experts
from mixtures import NUM_EXPERTS, TOP_K, make

save_file = pytest.importorskip("safetensors.torch").save_file


def written(tmp_path, **changes):
    """A request's file, as ExampleHiddenStatesConnector saves it."""
    states = torch.randn(5, 3, 4).bfloat16()
    tensors = {"hidden_states": states, "token_ids": torch.arange(5), **changes}
    path = tmp_path / "request-0.safetensors"
    save_file(tensors, path)
    return path, states


def test_hidden_states_have_the_names_of_modules(tmp_path):
    path, states = written(tmp_path)
    (tmp_path / "request-0.safetensors.lock").touch()
    found = read_hidden_states(path, [0, 2, 36])
    assert list(found) == ["token_ids", "model.embed_tokens", "model.layers.1", "model.layers.35"]
    assert found["token_ids"].tolist() == [0, 1, 2, 3, 4]
    for i, name in enumerate(list(found)[1:]):
        assert torch.equal(found[name], states[:, i])
    assert "h.1" in read_hidden_states(path, [1, 2, 3], layer="h.{}")


def test_what_is_no_such_file_is_refused(tmp_path):
    path, _ = written(tmp_path)
    for ids in ([1, 2], [1, 1, 2], [1, 3, 2]):
        with pytest.raises(ValueError, match=r"has 3 layers, got layer_ids"):
            read_hidden_states(path, ids)
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="still being written by vLLM"):
            read_hidden_states(path, [1, 2, 3])
    path, _ = written(tmp_path, token_ids=torch.arange(4))
    with pytest.raises(ValueError, match=r"not a file of vLLM's .*'token_ids': \(4,\)"):
        read_hidden_states(path, [1, 2, 3])
    path.write_text("{}")
    with pytest.raises(ValueError, match="not a safetensors file"):
        read_hidden_states(path, [1, 2, 3])


def encoded(array):
    file = io.BytesIO()
    numpy.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


BLOCKS = ["model.layers.0.mlp", "model.layers.1.mlp"]


def test_routed_experts_are_replayed():
    pytest.importorskip("transformers")
    chosen = [numpy.random.default_rng(i).permutation(NUM_EXPERTS)[:TOP_K] for i in range(14)]
    served = numpy.stack(chosen).reshape(7, 2, TOP_K).astype("uint8")
    routes = read_routed_experts([served[:3], encoded(served[3:])], BLOCKS)
    with FlexModel(make("Qwen3Moe"), {}) as flex, torch.no_grad():
        for name in BLOCKS:
            routing = flex.routing(name)
            flex.register_forward_hook(routing.replay(routes[name]))
            flex.register_forward_hook(HookFunction(routing.load))
        flex(torch.arange(7)[None], use_cache=False)
        for i, name in enumerate(BLOCKS):
            counts = numpy.bincount(served[:, i].ravel(), minlength=NUM_EXPERTS)
            load = flex.output_ptr[flex.routing(name).load][0]
            assert load.diagonal().tolist() == counts.tolist()


@pytest.mark.parametrize(
    "requests, message",
    [
        ([None], "expected an array of integers"),
        (["no base64 of a file"], "expected an array of integers"),
        ([numpy.zeros((2, 2, 2))], "expected an array of integers"),
        ([numpy.zeros((2, 2, 2), "int16"), numpy.zeros((2, 2, 3), "int16")], "same layers and k"),
        ([numpy.zeros((2, 3, 2), "int16")], "3 layers from expert 0 on, for 2 blocks"),
        ([numpy.full((2, 2, 2), -1, "int16")], "2 layers from expert -1 on"),
    ],
)
def test_routes_of_another_kind_are_refused(requests, message):
    with pytest.raises(ValueError, match=message):
        read_routed_experts(requests, BLOCKS)

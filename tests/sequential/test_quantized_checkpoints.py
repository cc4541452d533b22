"""Quantised checkpoints: run with the numbers of ``from_pretrained``, or refused before a batch."""

import json

import pytest
import torch
import torch.distributed as dist
from families import TEXTS
from test_engine import assert_equal, assert_nothing_left
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import quantized_layers
from flex_model import FlexModel, HookFunction, sequential
from quantized_folders import DEQUANTISED, REFUSED, fp8, from_pretrained, llama, plain, read, write

pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
BATCHES = [batch | {"use_cache": False} for batch in TEXTS]
EDITED, SEEN = "model.layers.0.self_attn", "model.layers.1.mlp"
WEIGHT = "model.layers.1.self_attn.q_proj.weight"


def mix(module, x, save_ctx, modules):
    return x.flip(-1) + x.roll(1, 1)


def hooked(model):
    flex = FlexModel(model, {})
    flex.register_forward_hook(HookFunction(EDITED, editing_function=mix))
    flex.register_forward_hook(HookFunction(SEEN))
    return flex


def outputs_and_records(model):
    """Of an ordinary loop."""
    records = []
    with torch.no_grad(), hooked(model) as flex:
        outputs = []
        for batch in BATCHES:
            outputs.append(flex(**batch).logits)
            records += flex.output_ptr[SEEN]
    return outputs, records


@pytest.fixture(params=DEQUANTISED)
def folder(request, tmp_path):
    DEQUANTISED[request.param](tmp_path)
    return tmp_path


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_run_equals_a_loop_over_from_pretrained(folder, device):
    outputs, records = outputs_and_records(from_pretrained(folder))
    with hooked(plain(folder, device)) as flex:
        found = sequential.run(flex, BATCHES, weights=folder, window=3, device="cpu")
        assert_equal([one.logits for one in found], outputs)
        assert_equal(flex.output_ptr[SEEN], records)
    assert set(found.loads.values()) == {2}  # 4 batches, 3 at a time
    assert_nothing_left(flex.module)


def refused(model, weights, match, error=ValueError):
    """Before the first batch is asked for."""

    def batches():
        raise AssertionError("a batch was asked for")
        yield

    with pytest.raises(error, match=match):
        sequential.run(model, batches(), weights=weights)
    assert_nothing_left(model)


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_computes_with_more_than_its_weights_is_refused(tmp_path, name, device):
    make, match = REFUSED[name]
    make(tmp_path)
    refused(plain(tmp_path, device), tmp_path, match)


def test_without_its_package_a_checkpoint_is_refused(tmp_path):
    """By the configuration alone: names and dtypes are those of a plain checkpoint."""
    fp8(tmp_path, quant_method="torchao")
    refused(plain(tmp_path), tmp_path, r"quantised \(torchao\).*save a dequantised copy once")
    write(tmp_path, read(tmp_path), quant_method="someone's own")
    refused(plain(tmp_path, "cpu"), tmp_path / "model.safetensors", r"\(someone's own\)")
    write(tmp_path, read(tmp_path), load_in_4bit=True)
    refused(plain(tmp_path), tmp_path, "an unknown method")


COMPRESSED = {
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "format": "pack-quantized",
    "config_groups": {"all": {"weights": {"num_bits": 4, "type": "int"}, "targets": ["Linear"]}},
}
GROUP = COMPRESSED["config_groups"]["all"]
OTHER = {"weights": {"num_bits": 8, "type": "int"}, "targets": ["re:.*mlp"]}


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"quantization_status": "frozen"}, "quantization_status is 'frozen'"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "its weights are sparse"),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        ({"config_groups": {"all": GROUP, "mlp": OTHER}}, "its layers have 2 schemes"),
        ({"config_groups": {"all": {"targets": ["Linear"]}}}, "no quantisation of weights"),
        ({"config_groups": {}}, "its layers have 0 schemes"),
        ({"format": "nvfp4-pack-quantized"}, "its format is 'nvfp4-pack-quantized'"),
        (
            {"config_groups": {"all": GROUP | {"input_activations": {"num_bits": 8}}}},
            "quantises activations",
        ),
    ],
)
def test_settings_of_compressed_tensors_that_weights_alone_do_not_have(tmp_path, settings, match):
    fp8(tmp_path)
    write(tmp_path, read(tmp_path), **(COMPRESSED | settings))
    refused(llama().to("meta"), tmp_path, match)


def without(name):
    return lambda state: state.pop(name)


def put(name, value):
    return lambda state: state.update({name: value})


EXPERTS = "model.layers.1.mlp.experts"


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize(
    ("make", "change", "match"),
    [
        (fp8, without(f"{WEIGHT}_scale_inv"), rf"'{WEIGHT}' has no scales"),
        (fp8, put(f"{WEIGHT}_g_idx", torch.zeros(32)), "_g_idx' is beside a quantised weight"),
        (fp8, put(WEIGHT, torch.zeros(32, 32, dtype=torch.bfloat16)), "has no quantised tensor"),
        (
            DEQUANTISED["fp8 of experts"],
            without(f"{EXPERTS}.2.up_proj.weight_scale_inv"),
            rf"'{EXPERTS}.2.up_proj.weight' has no scales",
        ),
        (
            DEQUANTISED["mxfp4"],
            without(f"{EXPERTS}.down_proj_scales"),
            rf"'{EXPERTS}.down_proj' has no scales",
        ),
    ],
)
def test_scales_that_miss_or_have_no_use_known(tmp_path, make, change, match, device):
    make(tmp_path)
    state = read(tmp_path)
    change(state)
    write(tmp_path, state)
    refused(plain(tmp_path, device), tmp_path, match)


def test_smaller_blocks_at_an_edge_are_refused(tmp_path):
    """transformers would divide 48 rows with two scales into 24 and 24, not 32 and 16."""
    fp8(tmp_path, block=32)
    refused(plain(tmp_path), tmp_path, r"has smaller blocks than \(32, 32\) at an edge")


def test_other_ways_to_a_quantised_checkpoint(tmp_path):
    fp8(tmp_path)
    model = plain(tmp_path)
    renamed = sequential.CheckpointWeights(tmp_path, rename=lambda name: name)
    refused(model, renamed, "rename=... reads each tensor as it is stored")
    refused(quantized_layers.Model().to("meta"), tmp_path, "Model is not a model of transformers")
    outputs, _ = outputs_and_records(from_pretrained(tmp_path))
    for weights in (tmp_path / "model.safetensors", sequential.CheckpointWeights(tmp_path)):
        with hooked(model) as flex:
            found = sequential.run(flex, BATCHES, weights=weights)
        assert_equal([one.logits for one in found], outputs)
    (tmp_path / "config.json").unlink()  # the model's own configuration has it, too
    with hooked(model) as flex:
        found = sequential.run(flex, BATCHES, weights=tmp_path)
    assert_equal([one.logits for one in found], outputs)
    (tmp_path / "config.json").write_text("{")
    refused(model, tmp_path, "config.json is no JSON")


def test_a_statement_for_a_part_of_the_model(tmp_path):
    fp8(tmp_path)
    model = plain(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    stated = config.pop("quantization_config") | {"quant_method": "quark"}
    config["text_config"] = {"quantization_config": stated}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(model, tmp_path, r"quantised \(quark\)")


@pytest.mark.ranks(2)
def test_ranks_of_a_sharded_model_equal_from_pretrained(tmp_path):
    if dist.get_rank() == 0:
        fp8(tmp_path)
    dist.barrier()
    model = plain(tmp_path)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
    plan["mlp.down_proj"] = RowwiseParallel()
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    site = "model.layers.1.mlp.up_proj"

    def flip(module, x, save_ctx, modules):
        return x.flip(-1) * 2

    whole = from_pretrained(tmp_path)
    whole.get_submodule(site).register_forward_hook(lambda m, a, out: out.flip(-1) * 2)
    flex = FlexModel(model, {}, tensor_parallel_size=2)
    flex.register_forward_hook(HookFunction(site, editing_function=flip))
    found = sequential.run(flex, BATCHES, weights=tmp_path, window=2, device="cpu")
    flex.restore()
    with torch.no_grad():
        for one, batch in zip(found, BATCHES, strict=True):
            expected = whole(**batch).logits
            torch.testing.assert_close(one.logits, expected, rtol=0.02, atol=0.02)

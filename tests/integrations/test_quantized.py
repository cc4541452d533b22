"""Models of quantised and compressed weights, with hooks; their weights, read and not written."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing import assert_close

import models
import quantized_layers
from flex_model import FlexModel, HookFunction, sequential
from oracle import watch
from quantized_layers import KINDS, READABLE, UNKNOWN, Int4Linear, Packed, build
from shared_edits import mixing_ends as edit

BATCH = models.random(4, 8, dtype=torch.float32)
WEIGHT = "blocks.0.up.weight"


def unhooked(kind):
    """Output, input's gradient, and what hooks of torch see: an edit, a record, a gradient."""
    model = build(kind)
    seen = {
        "act": watch(model, "blocks.0.act", edit),
        "gradient": watch(model, "blocks.0.act", edit, "full_backward"),
        "up": watch(model, "blocks.1.up"),
    }
    batch = BATCH.clone().requires_grad_()
    output = model(batch)
    (output * BATCH).sum().backward()
    return output.detach(), batch.grad, seen


def hooked(flex):
    """The same, by hooks of ``flex``."""
    flex.register_forward_hook(HookFunction("blocks.0.act", editing_function=edit))
    flex.register_full_backward_hook(
        HookFunction("blocks.0.act", editing_function=edit, output_name="gradient")
    )
    flex.register_forward_hook(HookFunction("blocks.1.up"))


def check_whole_batch(kind, flex, records, **tolerance):
    """Hooks of ``flex`` on the whole batch see and edit what torch's hooks do."""
    output, gradient, seen = unhooked(kind)
    hooked(flex)
    batch = BATCH.clone().requires_grad_()
    ours = flex(batch)
    (ours * BATCH).sum().backward()
    assert_close(ours.detach(), output, **tolerance)
    assert_close(batch.grad, gradient, **tolerance)
    assert_close(records["blocks.0.act"], seen["act"], **tolerance)
    assert_close(records["blocks.1.up"], seen["up"], **tolerance)
    assert_close(records["gradient"], seen["gradient"], **tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_on_quantised_layers_see_and_edit_as_torchs_hooks(kind):
    records = {}
    check_whole_batch(kind, FlexModel(build(kind), records), records, rtol=0, atol=0)


def computed_by(layer):
    """The weight with which a layer computes: its output for unit vectors, without its bias."""
    size = layer.in_features
    with torch.no_grad():
        return (layer(torch.eye(size)) - layer.bias).T


@pytest.mark.parametrize("kind", READABLE)
def test_a_quantised_weight_is_read_as_the_values_its_layer_computes_with(kind):
    model = build(kind)
    flex = FlexModel(model)
    full = flex.get_module_parameter(WEIGHT, (32, 16))
    assert type(full) is torch.Tensor and full.dtype == torch.float32
    before = {name: tensor.clone() for name, tensor in flex.iterate_parameters()}
    assert torch.equal(before[WEIGHT], full)
    model.blocks[0].up.num_experts = 32  # as if its rows were experts
    assert torch.equal(flex.get_module_parameter(WEIGHT, experts=[7, 3]), full[[7, 3]])
    with pytest.raises(ValueError, match=r"experts= is for .* it is packed"):
        flex.get_module_parameter(WEIGHT, experts=[7, 3], raw=True)
    flex(BATCH)  # bitsandbytes moves scales, compressed-tensors unpacks
    assert torch.equal(flex.get_module_parameter(WEIGHT), full)
    # bitsandbytes' 8 bits quantise the inputs of the layer, too.
    tolerance = 2e-2 if kind == "bitsandbytes 8 bits" else 1e-6
    assert_close(computed_by(model.blocks[0].up), full, rtol=0, atol=tolerance)
    assert_close(
        full, models.seeded(quantized_layers.Model).blocks[0].up.weight.detach(), atol=0.1, rtol=0
    )


@pytest.mark.parametrize("kind", KINDS)
def test_raw_is_the_packed_weight_itself(kind):
    model = build(kind)
    flex = FlexModel(model)
    raw = flex.get_module_parameter(WEIGHT, raw=True)
    layer = model.blocks[0].up
    own = layer.weight if "weight" in layer._parameters else layer.weight_packed
    assert raw is not own and raw.dtype == own.dtype and raw.shape == own.shape
    if hasattr(raw, "dequantize") and type(own.data) is not torch.Tensor:
        assert type(raw) is type(own.data)
        assert torch.equal(raw.dequantize(), own.dequantize())
    else:
        assert torch.equal(raw.float(), own.detach().float())
    assert WEIGHT in [name.removesuffix("_packed") for name, _ in flex.iterate_parameters(raw=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_weight_is_not_written_to(kind):
    model = build(kind)
    flex = FlexModel(model)
    raw = flex.get_module_parameter(WEIGHT, raw=True)
    for full in (torch.zeros(32, 16), torch.zeros(raw.shape)):
        with pytest.raises(ValueError, match=rf"{WEIGHT}' is packed \(.*can't be written"):
            flex.set_module_parameter(WEIGHT, full)
    assert torch.equal(model(BATCH), build(kind)(BATCH))
    flex.set_module_parameter("blocks.0.up.bias", torch.ones(32))  # not packed
    assert torch.equal(flex.get_module_parameter("blocks.0.up.bias"), torch.ones(32))


@pytest.mark.parametrize("kind", UNKNOWN)
def test_bytes_are_never_returned_as_values(kind):
    flex = FlexModel(build(kind))
    with pytest.raises(ValueError, match=r"is packed \(torch.u?int8 in a Int.Linear.*raw=True"):
        flex.get_module_parameter(WEIGHT)
    with pytest.raises(ValueError, match="raw=True"):
        list(flex.iterate_parameters())


def test_integers_that_are_values_are_read_as_before():
    model = nn.Module()
    model.table = nn.Parameter(torch.arange(6).view(2, 3), requires_grad=False)
    model.scales = nn.Module()  # a child's tensors are not beside it
    model.scales.scale = nn.Parameter(torch.ones(2))
    flex = FlexModel(model)
    assert torch.equal(flex.get_module_parameter("table"), torch.arange(6).view(2, 3))
    flex.set_module_parameter("table", torch.ones(2, 3))
    assert torch.equal(flex.get_module_parameter("table"), torch.ones(2, 3, dtype=torch.int64))


# ---- float8 of transformers ----------------------------------------------------------------------


def in_blocks(rows, columns, block):
    """A layer of float8 in blocks, and its values, block by block."""
    from transformers.integrations.finegrained_fp8 import FP8Linear

    layer = FP8Linear(columns, rows, block_size=block)
    layer.weight.data.copy_(models.random(rows, columns, dtype=torch.float32))
    scales = layer.weight_scale_inv.data
    if block is None:
        scales.fill_(0.375)
        return layer, layer.weight.float() * 0.375
    scales.copy_(1 + models.random(*scales.shape, seed=3, dtype=torch.float32).abs())
    full = layer.weight.detach().float()
    for row in range(rows):
        for column in range(columns):
            full[row, column] *= scales[row // block[0], column // block[1]]
    return layer, full


@pytest.mark.parametrize(
    "rows, columns, block", [(8, 12, (4, 4)), (7, 10, (4, 3)), (3, 5, (8, 8)), (6, 4, None)]
)
def test_float8_in_blocks_is_read_with_the_scale_of_each_block(rows, columns, block):
    layer, full = in_blocks(rows, columns, block)
    flex = FlexModel(layer)
    assert torch.equal(flex.get_module_parameter("weight", (rows, columns)), full)
    assert flex.get_module_parameter("weight", raw=True).dtype == torch.float8_e4m3fn
    with pytest.raises(ValueError, match=r"float8 in blocks.*can't be written"):
        flex.set_module_parameter("weight", full)


def test_float8_with_the_scales_of_another_part_is_refused():
    layer, _ = in_blocks(8, 12, (4, 4))
    layer.weight = nn.Parameter(layer.weight.detach()[:4])
    with pytest.raises(ValueError, match=r"1, 3\) blocks of \(4, 4\) here.*\(2, 3\).*raw=True"):
        FlexModel(layer).get_module_parameter("weight")


# ---- Ranks ---------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_outliers_of_a_batch_are_not_those_of_its_parts():
    """bitsandbytes' 8 bits may treat units by the largest value of all rows."""
    flex = FlexModel(build("bitsandbytes 8 bits"), data_parallel_size=2)
    flex.register_forward_hook(HookFunction("blocks.0.act"))
    with pytest.raises(ValueError, match="over the data-parallel ranks is not known"):
        flex(BATCH.chunk(2)[dist.get_rank()])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["torchao int8", "bitsandbytes 4 bits"])
def test_the_parts_of_a_weight_are_whole_only_where_it_is_stated_to_be(kind):
    model, records = build(kind), {}
    flex = FlexModel(model, records, tensor_parallel_size=2, output_ranks="all")
    handle = flex.register_forward_hook(HookFunction("blocks.0.up"))
    with pytest.raises(ValueError, match="is not known"):
        flex(BATCH)
    flex.annotate_layout("", kind="parameter", tp=Replicate())
    flex.annotate_layout("blocks.0.up.weight", kind="parameter", tp=Shard(0))
    with pytest.raises(ValueError, match="is not known"):
        flex(BATCH)
    handle.remove()
    flex = FlexModel(model, records, tensor_parallel_size=2, output_ranks="all")
    flex.annotate_layout("", kind="parameter", tp=Replicate())
    check_whole_batch(kind, flex, records)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", UNKNOWN[1:])
def test_a_replicated_weight_of_half_as_many_bytes_is_not_taken_for_a_shard(kind):
    flex = FlexModel(build(kind), tensor_parallel_size=2)
    with pytest.raises(ValueError, match=r"is not known(?s:.)*tp=Replicate\(\)"):
        flex.get_module_parameter(WEIGHT, raw=True)
    with pytest.raises(ValueError, match="is packed"):
        flex.get_module_parameter(WEIGHT)
    with pytest.raises(ValueError, match=r"is not known(?s:.)*tp=Replicate\(\)"):
        flex.get_module_parameter("blocks.0.up.bias")
    flex.register_forward_hook(HookFunction("blocks.0.up"))
    with pytest.raises(ValueError, match="is not known"):
        flex(BATCH)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dim", [0, 1])
def test_shards_that_unpack_themselves_are_read_as_the_whole_weight(dim):
    whole = build("a tensor that unpacks itself").blocks[0].up.weight.detach()
    part = whole.part(dim, dist.get_rank(), 2)
    model = build("a tensor that unpacks itself")
    local = DTensor.from_local(part, models.mesh(1, 2)["tp"], [Shard(dim)], run_check=False)
    assert type(local.to_local()) is Packed
    model.blocks[0].up.weight = nn.Parameter(local, requires_grad=False)
    flex = FlexModel(model)
    assert torch.equal(flex.get_module_parameter(WEIGHT, (32, 16)), whole.dequantize())
    with pytest.raises(ValueError, match=r"a part of it, packed \(Packed\)"):
        flex.get_module_parameter(WEIGHT, raw=True)
    with pytest.raises(ValueError, match="can't be written"):
        flex.set_module_parameter(WEIGHT, whole.dequantize())
    assert torch.equal(model.blocks[0].up.weight.to_local().dequantize(), part.dequantize())


@pytest.mark.ranks(2)
def test_float8_sharded_with_its_blocks_is_read_as_the_whole_weight():
    layer, full = in_blocks(8, 12, (2, 4))
    rank = dist.get_rank()
    layer.weight = nn.Parameter(layer.weight.detach().chunk(2)[rank].contiguous())
    layer.weight_scale_inv = nn.Parameter(layer.weight_scale_inv.detach().chunk(2)[rank])
    flex = FlexModel(layer, tensor_parallel_size=2)
    assert torch.equal(flex.get_module_parameter("weight", (8, 12)), full)
    assert flex.get_module_parameter("weight", raw=True).shape == (8, 12)


@pytest.mark.ranks(2)
def test_float8_sharded_by_fsdp_is_not_unpacked_shard_by_shard():
    layer, _ = in_blocks(8, 12, (3, 4))  # rank 1's first row is of the first rank's last block
    mesh = models.mesh(2, 1)["dp"]
    for name in ("weight", "weight_scale_inv"):
        own = getattr(layer, name).detach()
        bits = own.view(torch.uint8) if own.element_size() == 1 else own
        part = distribute_tensor(bits, mesh, [Shard(0)])
        if own.element_size() == 1:
            bits_here = part.to_local().view(own.dtype)
            part = DTensor.from_local(bits_here, mesh, [Shard(0)], run_check=False)
        setattr(layer, name, nn.Parameter(part, requires_grad=False))
    flex = FlexModel(layer)
    with pytest.raises(ValueError, match=r"FSDP shards it, and its scales.*raw=True"):
        flex.get_module_parameter("weight")
    assert flex.get_module_parameter("weight", raw=True).shape == (8, 12)


@pytest.mark.ranks(2)
def test_a_rank_that_can_not_unpack_fails_on_all():
    layer, _ = in_blocks(8, 12, (4, 4))
    if dist.get_rank() == 1:
        layer.weight_scale_inv = nn.Parameter(torch.ones(1, 3))
    flex = FlexModel(layer, data_parallel_size=2)
    with pytest.raises(Exception, match=r"rank 1.*2, 3.* blocks of"):
        flex.get_module_parameter("weight")
    assert flex.get_module_parameter("weight", raw=True).shape == (8, 12)  # and goes on


@pytest.mark.ranks(2)
def test_replicas_that_differ_in_their_scales_are_an_error():
    layer, full = in_blocks(8, 12, (4, 4))
    flex = FlexModel(layer, data_parallel_size=2)
    assert torch.equal(flex.get_module_parameter("weight"), full)
    if dist.get_rank() == 1:
        layer.weight_scale_inv.data += 1
    with pytest.raises(ValueError, match="data-parallel ranks hold different values"):
        flex.get_module_parameter("weight")


# ---- Sequential runs -----------------------------------------------------------------------------


def sequentially(model, state):
    """Run the model on ``meta``, its weights read from a state dict, block by block."""
    flex = FlexModel(copy.deepcopy(model).to("meta"), records := {})
    flex.register_forward_hook(HookFunction("blocks.0.act", editing_function=edit))
    weights = sequential.DictWeights(state)
    with torch.no_grad():
        (output,) = sequential.run(flex, [BATCH], ["re:blocks.[0-9]$"], weights=weights)
    return output, records


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_sequential_run_of_quantised_layers_is_that_of_the_model(kind):
    output, _, seen = unhooked(kind)
    model = build(kind)
    ours, records = sequentially(model, model.state_dict())
    assert_close(ours, output, rtol=0, atol=0)
    assert_close(records["blocks.0.act"], seen["act"], rtol=0, atol=0)


@pytest.mark.parametrize("kind", [*UNKNOWN, "float8"])
def test_a_sequential_run_does_not_drop_the_scales_of_its_weights(kind):
    plain = models.seeded(quantized_layers.Model)
    state = plain.state_dict()
    if kind == "float8":
        state[WEIGHT] = (state[WEIGHT] * 4).to(torch.float8_e4m3fn)
        unscaled = dict(state)
        state[f"{WEIGHT}_scale_inv"] = torch.full((1, 1), 0.25)
    else:
        state = build(kind).state_dict()
    with pytest.raises(ValueError, match=r"blocks.0.up.weight' is quantised in the weights"):
        sequentially(plain, state)
    if kind == "float8":  # float8 without scales is what it is
        ours, _ = sequentially(plain, unscaled)
        plain.load_state_dict(unscaled)
        watch(plain, "blocks.0.act", edit)
        assert torch.equal(ours, plain(BATCH))


def test_the_layers_made_by_hand_pack_what_they_say():
    linear = models.seeded(nn.Linear, 16, 32)
    for dim in (0, 1):
        packed = Int4Linear(linear, dim)
        assert packed.weight.numel() * 2 == linear.weight.numel()
        assert_close(packed(torch.eye(16)), linear(torch.eye(16)), atol=0.05, rtol=0)

"""Units of experts: records and edits, against experts written by hand, row by row."""

import copy
import types

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from counted_traffic import counting, hosts, take
from experts_by_hand import ByHand
from flex_model import (
    ActivationStore,
    FlexModel,
    HookError,
    HookFunction,
    HookMismatchError,
    Select,
)
from mixtures import BLOCK, FAMILIES, NUM_EXPERTS, TOKENS, TOP_K, make, sharded
from tiers import grid_but

pytest.importorskip("transformers")

EXPERTS = f"{BLOCK}.experts"


def mixed(module, full, *_):
    """An edit that mixes rows of all ranks, and units of all."""
    return full + 0.5 * full.flip(0) - 0.25 * full.flip(-1)


def mixed_of(experts):
    def edit(units, indices):
        chosen = torch.isin(indices, torch.tensor(experts))
        return units.clone().masked_scatter(chosen[..., None], mixed(None, units[chosen]))

    return edit


EDITS = {
    "all": (None, lambda units, indices: mixed(None, units)),
    "two experts": (Select(experts=[5, 2]), mixed_of([2, 5])),
    "one expert": (Select(experts=-1), mixed_of([NUM_EXPERTS - 1])),
}


def gradients(model):
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def run(model, tokens=TOKENS):
    logits = model(tokens).logits
    logits.square().mean().backward()
    return logits


def is_close(one, other, times=2e-5):
    assert_close(one, other, rtol=0, atol=times * float(other.detach().abs().max()))


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_records(family, implementation):
    """The model's own numbers stay, bit for bit."""
    model, records = make(family), {}
    model.set_experts_implementation(implementation)
    reference = copy.deepcopy(model)
    hand = ByHand.put_in(reference.get_submodule(EXPERTS))
    run(reference)
    plain = model(TOKENS).logits
    flex = FlexModel(model, records)
    experts = flex.experts(EXPERTS)
    for name in ("units", "outputs", "indices", "weights"):
        flex.register_forward_hook(HookFunction(getattr(experts, name), output_name=name))
    select = Select(experts=[6, 1])
    for name in ("units", "weights", "indices"):
        hook = HookFunction(getattr(experts, name), output_name=f"{name} of two", select=select)
        flex.register_forward_hook(hook)
    assert_close(flex(TOKENS).logits, plain, rtol=0, atol=0)
    for name in ("units", "outputs", "indices", "weights"):
        (found,) = records[name]
        is_close(found, getattr(hand, name).detach())
        if f"{name} of two" in records:
            chosen = (hand.indices == 1) | (hand.indices == 6)
            assert torch.equal(records[f"{name} of two"][0], found[chosen])
    tokens = experts.tokens_of([6, 1], records["indices"][0])
    assert torch.equal(tokens, chosen.nonzero()[:, 0])
    for name in ("units", "weights"):
        hook = HookFunction(getattr(experts, name), output_name=f"{name}.grad")
        flex.register_full_backward_pre_hook(hook)
    is_close(run(flex), plain)
    is_close(records["units.grad"][0], hand.edited.grad)
    is_close(records["weights.grad"][0], hand.weights.grad)
    with torch.autocast("cpu", torch.bfloat16):  # each forward is compared with the model's own
        run(flex)
    assert records["units"][0].shape == hand.units.shape
    flex.restore()
    assert_close(model(TOKENS).logits, plain, rtol=0, atol=0)
    assert not hasattr(model.get_submodule(EXPERTS), "slots")


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("family", FAMILIES)
def test_edits(family, edit):
    """Outputs and gradients; also where layers are recomputed, by when the edit is removed."""
    select, by_hand = EDITS[edit]
    reference = make(family)
    ByHand.put_in(reference.get_submodule(EXPERTS), edit=by_hand)
    expected = run(reference)
    for use_reentrant in (None, False, True):
        model = make(family)
        if use_reentrant is not None:
            model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
            model.train()
        flex = FlexModel(model, {})
        units = flex.experts(EXPERTS).units
        handle = flex.register_forward_hook(HookFunction(units, None, mixed, select=select))
        logits = flex(TOKENS).logits
        handle.remove()
        is_close(logits, expected)
        logits.square().mean().backward()
        for name, one in gradients(reference).items():
            is_close(gradients(model)[name], one)


KINDS = ["tp", "ep", "ep all_reduce", "ep of fsdp", "dp", "fsdp"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("edit", grid_but(["all", "two experts"], "all"))
def test_edits_of_shards(kind, edit, tmp_path):
    model, (select, by_hand) = make("Mixtral"), EDITS[edit]
    reference = copy.deepcopy(model)
    hand = ByHand.put_in(reference.get_submodule(EXPERTS), edit=by_hand)
    is_split = kind in ("dp", "fsdp", "ep of fsdp")
    flex = sharded(kind, model, tmp_path)
    experts = flex.experts(EXPERTS)
    flex.register_forward_hook(HookFunction(experts.units, None, mixed, select=select))
    flex.register_full_backward_pre_hook(
        HookFunction(experts.units, output_name="grad", select=Select(experts=3))
    )
    flex.register_forward_hook(HookFunction(experts.indices))
    for tokens in (TOKENS, TOKENS, TOKENS.flip(1), TOKENS):  # other routes: other numbers of rows
        reference.zero_grad()
        flex.zero_grad()
        expected = run(reference, tokens)
        logits = run(flex, tokens.chunk(2)[dist.get_rank()] if is_split else tokens)
        is_close(logits, expected.chunk(2)[dist.get_rank()] if is_split else expected)
        for name, one in gradients(reference).items():
            is_close(flex.get_module_gradient(name), one, 1e-4)
        if dist.get_rank() == 0:
            units, chosen = hand.units.detach(), slice(None)
            if select is not None:
                chosen = torch.isin(hand.indices, torch.tensor([2, 5]))
            is_close(flex.output_ptr[experts.units][0], units[chosen])
            assert torch.equal(flex.output_ptr[experts.indices][0], hand.indices)
            is_close(flex.output_ptr["grad"][0], hand.edited.grad[hand.indices == 3], 1e-4)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("edits", grid_but([None, mixed], mixed))
def test_rows_of_one_of_sixteen_experts_are_what_moves(edits, monkeypatch):
    made, num_experts = counting(monkeypatch), 16
    half = TOKENS.repeat(4, 4).chunk(2)[dist.get_rank()]
    model = make("Mixtral", num_local_experts=num_experts, intermediate_size=512)
    moved = {}
    with hosts("a host of each"):
        flex = FlexModel(DistributedDataParallel(model), {}, data_parallel_size=2)
        experts = flex.experts(EXPERTS)
        for expert in (None, *range(num_experts)):
            hooks = [HookFunction(experts.units, None, edits)]
            if expert is not None:
                chosen = Select(experts=expert)
                hooks = [HookFunction(experts.units, None, edits, select=chosen)]
                hooks.append(HookFunction(experts.indices))
            handles = [flex.register_forward_hook(hook) for hook in hooks]
            with torch.no_grad():
                flex(half)
                take(made, ["a", "b"])
                flex(half)
            moved[expert] = sum(take(made, ["a", "b"])[0])
            if expert is not None and dist.get_rank() == 0:
                indices = flex.output_ptr[experts.indices][0]
                rows = flex.output_ptr[experts.units][0]
                assert len(experts.tokens_of(expert, indices)) == len(rows)
            for handle in handles:
                handle.remove()
    whole = moved.pop(None)
    assert whole > 0, moved
    assert sum(moved.values()) < num_experts * 0.1 * whole


def test_what_is_refused():
    flex = FlexModel(model := make("Qwen3Moe"), {})
    experts = flex.experts(EXPERTS)
    of_three = Select(experts=3)
    for site, kind in (
        (BLOCK, "forward"),
        (experts.units, "forward_pre"),
        (BLOCK, "full_backward"),
    ):
        with pytest.raises(ValueError, match=r"on a module of flex\.experts"):
            flex._register(HookFunction(site, select=of_three), kind)
    with pytest.raises(IndexError, match="8 is out of range"):
        flex.register_forward_hook(HookFunction(experts.units, select=Select(experts=[8])))
    with pytest.raises(TypeError, match="only units"):
        Select(experts=3, rows=1)
    wrong = HookFunction(experts.indices, None, lambda module, full, *_: full.flip(0), record=False)
    with flex.register_forward_hook(wrong), pytest.raises(HookError, match=r"of flex\.routing"):
        flex(TOKENS)
    flex.register_forward_hook(HookFunction(experts.units))
    down = model.get_submodule(EXPERTS).down_proj
    with torch.no_grad():
        own = model(TOKENS).logits
    own_forward = model.get_submodule(EXPERTS).forward

    def scaled(hidden, *args):
        return own_forward(hidden, *args) * (1 + (len(hidden) == TOKENS.numel()))

    model.get_submodule(EXPERTS).forward = scaled
    with pytest.raises(HookError, match=r"not the output of its forward \(they differ by"):
        flex(TOKENS)
    del model.get_submodule(EXPERTS).forward
    assert_close(flex(TOKENS).logits, own, rtol=0, atol=0)
    assert down is model.get_submodule(EXPERTS).down_proj


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["ep", "dp"])
def test_another_implementation_is_an_error_on_every_rank(kind, tmp_path):
    flex = sharded(kind, make("Mixtral"), tmp_path, timeout=20)
    tokens = TOKENS.chunk(2)[dist.get_rank()] if kind == "dp" else TOKENS
    names = "expected the experts' implementation 'grouped_mm' or 'eager', got 'batched_mm', "
    names += r".*set_experts_implementation\('grouped_mm'\)"
    flex.set_experts_implementation("batched_mm")
    with pytest.raises(ValueError, match=names):
        flex.experts(EXPERTS)
    flex.set_experts_implementation("eager")
    flex.register_forward_hook(HookFunction(flex.experts(EXPERTS).units))
    flex.set_experts_implementation("batched_mm")
    with pytest.raises(HookError, match=names):
        flex(tokens)
    if kind == "dp":  # rank 1's own: rank 0 hears of it
        flex.set_experts_implementation("batched_mm" if dist.get_rank() else "eager")
        with pytest.raises(HookError, match=names):
            flex(tokens)
    flex.set_experts_implementation("eager")
    flex(tokens)


def test_weights_and_outputs_are_edited():
    reference = make("Qwen3Moe")
    hand = ByHand.put_in(reference.get_submodule(EXPERTS))
    flex = FlexModel(make("Qwen3Moe"), {})
    experts = flex.experts(EXPERTS)
    block = {}
    flex.module.get_submodule(EXPERTS).register_forward_hook(
        lambda module, args, output: block.update(output=output)
    )
    with torch.enable_grad():
        reference(TOKENS)
    flex.register_forward_hook(HookFunction(experts.outputs, None, mixed))
    flex.register_forward_hook(
        HookFunction(
            experts.weights, None, lambda module, full, *_: 1 - full, select=Select(experts=4)
        )
    )
    flex(TOKENS)
    weights = torch.where(hand.indices == 4, 1 - hand.weights, hand.weights)
    is_close(block["output"], (mixed(None, hand.outputs) * weights[..., None]).sum(1))


@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch's grouped_mm has no float32 on shapes"
)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", grid_but(["tp", "dp"], "tp"))
def test_dry_runs(kind, tmp_path):
    model = make("Mixtral")
    tokens = TOKENS if kind == "tp" else TOKENS.chunk(2)[dist.get_rank()]
    flex = sharded(kind, copy.deepcopy(model), tmp_path)
    flex.set_experts_implementation("grouped_mm")
    name = flex.experts(EXPERTS).units
    with flex.register_forward_hook(HookFunction(name)):
        (row,) = flex.dry_run(tokens)
        assert row.full_shape == (24, TOP_K, 48)
    hook = HookFunction(name, select=Select(experts=0))
    with flex.register_forward_hook(hook), pytest.raises(HookError, match="depends on values"):
        flex.dry_run(tokens)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_of_some_experts(kind, tmp_path):
    model, generator = make("Mixtral"), torch.Generator().manual_seed(4)
    reference = copy.deepcopy(model)
    run(reference)
    flex = sharded(kind, model, tmp_path)
    run(flex, TOKENS if kind in ("tp", "ep", "ep all_reduce") else TOKENS.chunk(2)[dist.get_rank()])
    for leaf in ("gate_up_proj", "down_proj"):
        name = f"{EXPERTS}.{leaf}"
        own = reference.get_parameter(name)
        for experts in (3, [6, 1], slice(-3, None), [0]):
            rows = [experts] if isinstance(experts, int) else experts
            assert torch.equal(flex.get_module_parameter(name, experts=experts), own[rows])
            is_close(flex.get_module_gradient(name, experts=experts), own.grad[rows], 1e-4)
        new = torch.randn(2, *own.shape[1:], generator=generator)
        flex.set_module_parameter(name, new, experts=[6, 1])
        own.data[[6, 1]] = new
        assert torch.equal(flex.get_module_parameter(name), own)
    with pytest.raises(IndexError, match="experts: 8 is out of range, there are 8"):
        flex.get_module_parameter(name, experts=[8])
    with pytest.raises(ValueError, match="of these experts, got"):
        flex.set_module_parameter(name, new, experts=[1])
    with pytest.raises(ValueError, match="its module has no num_experts"):
        flex.get_module_parameter("lm_head.weight", experts=[1])
    with pytest.raises(HookMismatchError, match=r"experts \[0\].*experts \[1\]"):
        flex.get_module_parameter(name, experts=[dist.get_rank()])


def twice(module, full, *_):
    return full * 2 + full.flip(0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["ep", "dp"])
@pytest.mark.parametrize("settings", [{}, {"edit_on": "rank0"}])
def test_a_store_of_rows(kind, settings, tmp_path):
    """Numbers of rows that differ by batch, recorded and edited."""
    model, expected = make("Mixtral"), []
    batches = [TOKENS, TOKENS.flip(1), TOKENS % 3]
    reference = copy.deepcopy(model)

    def edited(units, indices):
        rows = units[indices == 3]
        expected.append(rows.detach())
        return units.masked_scatter((indices == 3)[..., None], twice(None, rows))

    ByHand.put_in(reference.get_submodule(EXPERTS), edit=edited)

    store = ActivationStore(tmp_path / "store")
    flex = sharded(kind, model, tmp_path / "model", store, **settings)
    name = flex.experts(EXPERTS).units
    flex.register_forward_hook(HookFunction(name, None, twice, select=Select(experts=3)))
    for batch in batches:
        logits = reference(batch).logits
        if kind == "dp":
            batch, logits = (one.chunk(2)[dist.get_rank()] for one in (batch, logits))
        is_close(flex(batch).logits, logits, 1e-4)
    flex.restore()
    dist.barrier()
    if dist.get_rank() == 0:
        found = list(store.tensors(name))
        assert len(found) == 3 and len({len(one) for one in found}) > 1
        for one, rows in zip(found, expected):
            is_close(one, rows)
    dist.barrier()


@pytest.mark.ranks(2)
def test_a_rank_without_rows():
    """All tokens of rank 1, and none of rank 0, go to expert 1; none at all goes to expert 0."""
    flex = FlexModel(DistributedDataParallel(make("Mixtral")), {}, data_parallel_size=2)
    units, routing = flex.experts(EXPERTS).units, flex.routing(BLOCK)

    def choose(module, full, *_):
        own, other = full.index_fill(1, torch.tensor([0, 1]), -torch.inf).chunk(2)
        return torch.cat([own, other.index_fill(1, torch.tensor([1]), torch.inf)])

    flex.register_forward_hook(HookFunction(routing.choice, None, choose, record=False))
    for expert in (0, 1):
        for kind in ("forward", "full_backward_pre"):
            edit = twice if kind == "forward" else None
            name, select = f"{kind} {expert}", Select(experts=expert)
            flex._register(HookFunction(units, None, edit, output_name=name, select=select), kind)
    for _ in range(2):
        flex(TOKENS.chunk(2)[dist.get_rank()]).logits.square().mean().backward()
        if dist.get_rank() == 0:
            shapes = {
                name: [tuple(one.shape) for one in flex.output_ptr[name]]
                for name in ("forward 0", "forward 1", "full_backward_pre 1")
            }
            assert shapes == {
                "forward 0": [(0, 48)],
                "forward 1": [(12, 48)],
                "full_backward_pre 1": [(12, 48)],
            }


@pytest.mark.ranks(2)
def test_experts_that_are_units_of_fsdp2():
    """Whose weights are whole only in their forward."""
    model, rank = make("Mixtral"), dist.get_rank()
    reference = copy.deepcopy(model)
    ByHand.put_in(reference.get_submodule(EXPERTS), edit=EDITS["all"][1])
    expected = run(reference).chunk(2)[rank]
    for layer in model.model.layers:
        fully_shard(layer.mlp.experts)
    flex = FlexModel(fully_shard(model), {}, data_parallel_size=2)
    flex.register_forward_hook(HookFunction(flex.experts(EXPERTS).units, None, mixed))
    is_close(run(flex, TOKENS.chunk(2)[rank]), expected)
    for name in (f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"):
        is_close(flex.get_module_gradient(name), reference.get_parameter(name).grad, 1e-4)


def kernel_forward(block, hidden):
    """A stand-in for ``MegaBlocksMoeMLP``, which reads weights and calls no module."""
    rows, experts = hidden.flatten(0, 1), block.experts
    scores, indices = F.linear(rows, block.router.weight, block.router.bias).topk(TOP_K)
    by_hand = ByHand(experts)
    return by_hand(rows, indices, scores.softmax(-1)).view_as(hidden), scores


class Mxfp4Block(torch.nn.Module):
    """A stand-in for the block of mxfp4, whose class has such a forward."""

    forward = kernel_forward

    def __init__(self, block):
        super().__init__()
        self.router, self.experts = block.router, block.experts


@pytest.mark.parametrize("what", ["hub", "mxfp4"])
@pytest.mark.parametrize("where", ["router", "experts", "routing", "gradient"])
def test_a_kernel_that_bypasses_modules(where, what):
    """Stand-ins, by what the hub and mxfp4 leave of the block: an error at each run."""
    model = make("GptOss")
    plain = model(TOKENS).logits
    block = model.get_submodule(BLOCK)
    if what == "hub":
        block.forward = types.MethodType(kernel_forward, block)
    else:
        model.set_submodule(BLOCK, Mxfp4Block(block))
    flex = FlexModel(model, records := {})
    is_close(flex(TOKENS).logits, plain)
    name = f"{BLOCK}.experts" if where == "gradient" else f"{BLOCK}.{where}"
    name = flex.routing(BLOCK).indices if where == "routing" else name
    kind = "full_backward" if where == "gradient" else "forward"
    handle = flex._register(HookFunction(name), kind)
    flex.register_forward_hook(HookFunction(f"{BLOCK}"))
    for _ in range(2):
        with pytest.raises(
            HookError, match=rf"{BLOCK}.*kernel.*experts_implementation='grouped_mm'"
        ):
            flex(TOKENS)
    handle.remove()
    flex(TOKENS)
    assert len(records[BLOCK]) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_faulty", [False, True])
def test_verify_finds_a_gradient_of_weights_that_is_not_summed(is_faulty, tmp_path, monkeypatch):
    from transformers.distributed import expert_parallel as ep

    class Old(ep.AllReduceEP):
        """As transformers had it (its issue 48687): the gradient of the weights is not summed."""

        def __call__(self, hidden, indices, weights):
            group, own = self.ep_mesh.get_group(), self.num_local_experts
            hidden = ep._AllReduceBackward.apply(hidden, group)
            others = indices // own != self.ep_mesh.get_local_rank()
            local = torch.where(others, own, indices % own)
            made = self.experts_forward(hidden, local, weights.masked_fill(others, 0))
            return ep._AllReduceForward.apply(made, group)

    kind = Old if is_faulty else ep.AllReduceEP
    monkeypatch.setitem(ep.EPImplementationInterface._global_mapping, "auto", kind)
    model = make("Mixtral")
    flex = sharded("ep", copy.deepcopy(model), tmp_path)
    hook = HookFunction(f"{BLOCK}.gate", unpack_idx=1, output_name="weights.grad")
    with flex.register_full_backward_pre_hook(hook):
        report = flex.verify(model, TOKENS, loss=lambda output: output.logits.square().mean())
        assert report.is_equal is not is_faulty
        if is_faulty:
            assert report.first_difference.name == f"{BLOCK}.gate"
            with pytest.raises(ValueError, match=rf"{BLOCK}\.gate.*ranks"):
                run(flex)

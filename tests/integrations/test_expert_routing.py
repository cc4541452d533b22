"""Routing of mixtures of experts: records and edits, against the same done to a gate by hand."""

import copy
import functools
import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from flex_model import (
    ActivationStore,
    FlexModel,
    HookError,
    HookFunction,
    HookMismatchError,
    editing,
)
from flex_model.editing import ExpertLoad
from mixtures import BLOCK, FAMILIES, NUM_EXPERTS, TOKENS, TOP_K, gate_of, make, sharded
from tiers import grid_but

pytest.importorskip("transformers")


def chosen_by_hand(model, choose):
    """Make the gate of a block choose the experts ``choose(scores)``, in plain torch."""
    gate, topk = gate_of(model), torch.topk

    def forward(*args):
        def chosen(scores, k, dim=-1, **others):
            if scores.dim() != 2 or scores.shape[-1] != NUM_EXPERTS:
                return topk(scores, k, dim, **others)
            indices = choose(scores.detach())
            return scores.gather(-1, indices), indices

        torch.topk = chosen
        try:
            return type(gate).forward(gate, *args)
        finally:
            torch.topk = topk

    gate.forward = forward


def best(scores):
    return scores.topk(TOP_K, sorted=False).indices


ROUTES = torch.rand(TOKENS.numel(), NUM_EXPERTS, generator=torch.Generator().manual_seed(1))
ROUTES = ROUTES.argsort()[:, :TOP_K]
BIAS = torch.linspace(-1, 1, NUM_EXPERTS)
EDITS = {
    "replay": (lambda routing: routing.replay([ROUTES]), lambda scores: ROUTES),
    "forbid": (
        lambda routing: routing.forbid([-1, 2]),
        lambda scores: best(scores.index_fill(-1, torch.tensor([7, 2]), -torch.inf)),
    ),
    "force": (
        lambda routing: routing.force(5),
        lambda scores: best(scores.index_fill(-1, torch.tensor([5]), 1e9)),
    ),
    "bias": (lambda routing: routing.bias(BIAS), lambda scores: best(scores + BIAS)),
}


def outputs_and_gradients(model, tokens=TOKENS, call=None):
    """The block's output, and the gradients of its gate and of what is in front of it."""
    found = []
    handle = model.get_submodule(BLOCK).register_forward_hook(
        lambda module, args, output: found.append(
            (output if isinstance(output, torch.Tensor) else output[0]).detach()
        )
    )
    (call or model)(tokens).logits.square().mean().backward()
    handle.remove()
    gate = gate_of(model).weight
    return found[0], gate.grad, model.model.embed_tokens.weight.grad


@pytest.mark.parametrize("family", FAMILIES)
def test_records_are_what_the_experts_get(family):
    model, records, inputs = make(family), {}, []
    flex = FlexModel(model, records)
    routing = flex.routing(BLOCK)
    plain = model(TOKENS).logits
    experts = model.get_submodule(f"{BLOCK}.experts")
    experts.register_forward_pre_hook(lambda module, args: inputs.append(args))
    for name in ("scores", "choice", "indices", "weights"):
        hook = HookFunction(getattr(routing, name), output_name=name)
        flex.register_forward_hook(hook)
    for name in ("scores", "weights"):
        hook = HookFunction(getattr(routing, name), output_name=f"{name}.grad")
        flex.register_full_backward_pre_hook(hook)
    logits = flex(TOKENS).logits
    assert_close(logits, plain, rtol=0, atol=0)
    ((_, indices, weights),) = inputs
    weights.retain_grad()
    logits.square().mean().backward()
    assert_close([records["indices"], records["weights"]], [[indices], [weights.detach()]])
    assert records["scores"][0].shape == records["choice"][0].shape == (24, NUM_EXPERTS)
    assert_close(records["scores"][0].gather(1, indices), records["choice"][0].gather(1, indices))
    assert_close(records["weights.grad"], [weights.grad])
    if family in ("DeepseekV3", "Glm4Moe"):  # whose weights are of scores without bias
        assert "scores.grad" not in records
    else:
        chosen = torch.zeros(24, NUM_EXPERTS).scatter(1, indices, 1) == 1
        assert torch.equal(records["scores.grad"][0] != 0, chosen)
    flex.restore()
    assert_close(model(TOKENS).logits, plain, rtol=0, atol=0)
    assert not hasattr(model.get_submodule(BLOCK), "routing")
    assert "forward" not in vars(gate_of(model))


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("family", FAMILIES)
def test_edits_equal_those_by_hand(family, edit):
    """Outputs and gradients, bit for bit; also where layers are recomputed in backward, by when the
    edit has been removed.
    """
    make_edit, choose = EDITS[edit]
    reference = make(family)
    chosen_by_hand(reference, choose)
    expected = outputs_and_gradients(reference)
    assert not torch.equal(expected[0], outputs_and_gradients(make(family))[0])
    for use_reentrant in (None, False, True):
        model = make(family)
        if use_reentrant is not None:
            model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
            model.train()
        flex = FlexModel(model, records := {})
        routing = flex.routing(BLOCK)
        flex.register_forward_hook(HookFunction(routing.indices))
        handle = flex.register_forward_hook(make_edit(routing))
        found = outputs_and_gradients(model, call=functools.partial(called_once, flex, handle))
        assert_close(found, expected, rtol=0, atol=0)
        assert len(records[routing.indices]) == 1


def called_once(flex, handle, tokens):
    output = flex(tokens)
    handle.remove()
    return output


def test_edits_of_scores_and_weights():
    """Scores are as if the gate had computed them; weights are edited alone."""
    flex = FlexModel(make("Mixtral"), records := {})
    routing = flex.routing(BLOCK)
    for name in (routing.scores, routing.indices, routing.weights):
        flex.register_forward_hook(HookFunction(name))

    def run(site, edit):
        with flex.register_forward_hook(HookFunction(site, None, edit, record=False)):
            output = flex(TOKENS).logits
        return *(records[name][0] for name in (routing.indices, routing.weights)), output

    flex(TOKENS)
    (scores,), indices = records[routing.scores], records[routing.indices][0]
    found = run(routing.scores, lambda module, full, *_: 1 - full)
    values, expected = (1 - scores).topk(TOP_K)
    assert_close(found[:2], (expected, values / values.sum(-1, keepdim=True)))
    doubled = run(routing.weights, lambda module, full, *_: full * 2)
    by_hand = make("Mixtral")
    gate_of(by_hand).register_forward_hook(lambda gate, args, out: (out[0], out[1] * 2, out[2]))
    assert_close(doubled[2], by_hand(TOKENS).logits, rtol=0, atol=0)
    assert torch.equal(doubled[0], indices)


def test_two_wraps_and_a_copy():
    model = make("Qwen3Moe")
    plain = model(TOKENS).logits
    flexes = [FlexModel(model, {}) for _ in range(2)]
    routings = [flex.routing(BLOCK) for flex in flexes]
    copied = copy.deepcopy(model)
    for flex, routing in zip(flexes, routings):
        flex.register_forward_hook(HookFunction(routing.indices))
    flexes[0].restore()
    flexes[1].register_forward_hook(routings[1].forbid(0))
    flexes[1](TOKENS)
    assert not (flexes[1].output_ptr[routings[1].indices][0] == 0).any()
    gate_of(model).weight.data.zero_()
    assert_close(copied(TOKENS).logits, plain, rtol=0, atol=0)
    flexes[1].restore()
    assert "forward" not in vars(gate_of(model))


@pytest.mark.parametrize("what", ["model.layers.1", BLOCK, f"{BLOCK}.gate"])
def test_a_compiled_model(what):
    model = make("Qwen3Moe")
    plain = model(TOKENS).logits
    model.get_submodule(what).compile(backend="eager")
    with torch.no_grad():
        model(TOKENS)
        flex = FlexModel(model, {})
        routing = flex.routing(BLOCK)
        assert_close(flex(TOKENS).logits, plain, rtol=0, atol=0)
        with flex.register_forward_hook(routing.replay(ROUTES)):
            flex.register_forward_hook(HookFunction(routing.indices))
            flex(TOKENS)
        assert torch.equal(flex.output_ptr[routing.indices][0], ROUTES)
        assert_close(flex(TOKENS).logits, plain, rtol=0, atol=0)
    torch.compiler.reset()


def test_a_store_is_replayed_batch_by_batch(tmp_path):
    pytest.importorskip("safetensors")
    model, batches = make("Mixtral"), [TOKENS, TOKENS.flip(1)[:2]]
    with FlexModel(model, store := ActivationStore(tmp_path)) as flex, torch.no_grad():
        routing = flex.routing(BLOCK)
        flex.register_forward_hook(HookFunction(routing.indices))
        expected = [flex(batch).logits for batch in batches]
    with FlexModel(model) as flex, torch.no_grad():
        routing = flex.routing(BLOCK)
        for batch, chosen, logits in zip(batches, store.tensors(routing.indices), expected):
            with flex.register_forward_hook(routing.replay(chosen)):
                assert_close(flex(batch).logits, logits, rtol=0, atol=0)
                with flex.register_forward_hook(routing.replay(chosen.flip(0))):
                    assert not torch.equal(flex(batch).logits, logits)


def test_generation_with_a_cache():
    flex = FlexModel(make("Qwen3Moe"), {})
    routing = flex.routing(BLOCK)
    flex.register_forward_hook(HookFunction(routing.indices))
    flex.register_forward_hook(routing.forbid(3))
    flex.generate(TOKENS, max_new_tokens=3, do_sample=False, pad_token_id=0)
    found = flex.output_ptr[routing.indices]
    assert [tuple(one.shape) for one in found] == [(24, TOP_K), (4, TOP_K), (4, TOP_K)]
    assert not any((one == 3).any() for one in found)


class Gate(torch.nn.Module):
    """A gate of another kind in the place of a model's own."""

    def __init__(self, gate, how):
        super().__init__()
        self.gate, self.how, self.num_experts = gate, how, gate.num_experts

    def forward(self, hidden):
        logits, weights, indices = self.gate(hidden)
        if self.how == "sorts":
            return logits, weights, logits.argsort(-1, descending=True)[:, :TOP_K]
        if self.how == "chooses twice":
            return logits, weights, torch.topk(logits, TOP_K).indices
        return logits, weights, indices.flip(-1)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("sorts", "does not choose by one topk"),
        ("chooses twice", "two topk"),
        ("copies", "does not choose by one topk"),
    ],
)
def test_other_gates_are_refused(how, says):
    model = make("Qwen3Moe")
    block = model.get_submodule(BLOCK)
    block.gate = Gate(block.gate, how)
    flex = FlexModel(model, {})
    hook, says = HookFunction(flex.routing(BLOCK).indices), rf"{says}.*the inputs of its experts"
    with flex.register_forward_hook(hook), pytest.raises(HookError, match=says):
        flex(TOKENS)
    flex.register_forward_pre_hook(HookFunction(f"{BLOCK}.experts", unpack_idx=1))
    flex(TOKENS)
    assert flex.output_ptr[f"{BLOCK}.experts"][0].shape == (24, TOP_K)


def test_what_is_refused():
    flex = FlexModel(make("DeepseekV3"))
    routing = flex.routing(BLOCK)
    with pytest.raises(IndexError, match="8 is out of range"):
        routing.forbid([0, 8])
    with pytest.raises(ValueError, match="expected 8 finite values"):
        routing.bias([0.0, 1.0])
    with pytest.raises(TypeError, match=r"expected integers \(tokens, k\), got list"):
        routing.replay([ROUTES, ROUTES])
    with pytest.raises(TypeError, match=r"got torch.float32 of \(24, 2\)"):
        routing.replay(ROUTES.float())
    with pytest.raises(ValueError, match="0 to 7, got 0 to 8"):
        routing.replay(ROUTES + (ROUTES == 7))
    wrong = HookFunction(routing.indices, None, lambda module, full, *_: full + 8)
    read = HookFunction(routing.load, None, lambda module, full, *_: full + 1)
    for hook, says in {
        routing.replay(
            ROUTES[:-1]
        ): r"given indices are \(23, 2\), and those of this call \(24, 2\)",
        routing.forbid([1, 2, 3, 5, 6, 7]): "fewer than 2 experts left",
        routing.force([1, 2, 3]): "more than 2 experts are forced",
        wrong: "hook on indices returned",
        read: "nothing is computed from load",
    }.items():
        with flex.register_forward_hook(hook), pytest.raises(HookError, match=says):
            flex(TOKENS)


@pytest.mark.ranks(2)
def test_other_edits_on_another_rank():
    flex = FlexModel(DistributedDataParallel(make("Mixtral")), data_parallel_size=2, timeout=20)
    forbidden = flex.routing("model.layers.0.mlp").forbid(dist.get_rank())
    flex.register_forward_hook(forbidden)
    with pytest.raises(HookMismatchError, match=r"rank 0 .*forbid\(\[0\]\).*forbid\(\[1\]\)"):
        flex(TOKENS.chunk(2)[dist.get_rank()])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", grid_but(["tp", "ep", "dp", "fsdp"], "ep", "fsdp"))
@pytest.mark.parametrize(("family", "edit"), [("Mixtral", "replay"), ("Glm4Moe", "forbid")])
def test_edits_of_shards(kind, family, edit, tmp_path):
    edits_of_shards(kind, family, edit, tmp_path)


def edits_of_shards(kind, family, edit, tmp_path):
    """Each data-parallel rank takes its own rows of the whole batch's routes."""
    model, rank = make(family), dist.get_rank()
    make_edit, choose = EDITS[edit]
    reference, weights = copy.deepcopy(model), []
    chosen_by_hand(reference, choose)
    gate_of(reference).register_forward_hook(lambda gate, args, out: weights.append(out[1]))
    gate_of(reference).register_forward_hook(lambda gate, args, out: out[1].retain_grad())
    output, gate, embedding = outputs_and_gradients(reference)
    tokens = TOKENS
    if kind not in ("tp", "ep"):
        num_ranks = dist.get_world_size()
        tokens, output = tokens.chunk(num_ranks)[rank], output.chunk(num_ranks)[rank]
    flex = sharded(kind, model, tmp_path)
    model = flex.module.module if kind == "dp" else flex.module
    routing = flex.routing(BLOCK)
    flex.register_forward_hook(make_edit(routing))
    flex.register_forward_hook(HookFunction(routing.indices))
    flex.register_full_backward_pre_hook(HookFunction(routing.weights))
    for _ in range(2):  # the second is not followed
        flex.zero_grad()
        found = outputs_and_gradients(model, tokens, flex)
        found = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in found]
        for one, whole in zip(found, [output, gate, embedding], strict=True):
            assert_close(one, whole, rtol=0, atol=2e-5 * float(whole.abs().max()))
        if rank == 0:
            assert_close(flex.output_ptr[routing.weights], [weights[0].grad])
            if edit == "replay":
                assert torch.equal(flex.output_ptr[routing.indices][0], ROUTES)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["tp", "dp"])
def test_a_replayed_record_gives_the_same_bits(kind, tmp_path):
    """The records of one FlexModel, on every rank, replayed by another one of the same model."""
    model = make("DeepseekV3")
    tokens = TOKENS if kind == "tp" else TOKENS.chunk(2)[dist.get_rank()]
    flex = sharded(kind, model, tmp_path, output_ranks="all")
    routing = flex.routing(BLOCK)
    with torch.no_grad(), flex.register_forward_hook(HookFunction(routing.indices)):
        expected = flex(tokens).logits
        with flex.register_forward_hook(routing.replay(ROUTES)):
            assert not torch.equal(flex(tokens).logits, expected)
        flex(tokens)
    record = flex.output_ptr[routing.indices]
    assert record[0].shape == (24, TOP_K)
    with torch.no_grad(), flex.register_forward_hook(routing.replay(record)):
        assert_close(flex(tokens).logits, expected, rtol=0, atol=0)


def counted_by_hand(model, batches):
    pairs, chosen = torch.zeros(NUM_EXPERTS, NUM_EXPERTS, dtype=torch.int64), []
    handle = gate_of(model).register_forward_hook(
        lambda module, args, output: chosen.extend(output[2].tolist())
    )
    with torch.no_grad():
        for batch in batches:
            model(batch)
    handle.remove()
    for of_token in chosen:
        for one, other in itertools.product(of_token, of_token):
            pairs[one, other] += 1
    return pairs


def test_load_of_one_process():
    model = make("GptOss")
    batches = [TOKENS, TOKENS[:2].flip(1)]
    expected = counted_by_hand(model, batches)
    (found,) = editing.expert_load(FlexModel(model), batches, [BLOCK]).values()
    assert torch.equal(found.pairs, expected)
    assert found.counts.sum() == 36 * TOP_K
    shares = (expected.diagonal() / (36 * TOP_K)).tolist()
    assert found.entropy == pytest.approx(-sum(p * math.log(p) for p in shares if p))
    assert ExpertLoad(torch.eye(NUM_EXPERTS)).entropy == pytest.approx(math.log(NUM_EXPERTS))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["tp", "dp"])
def test_load_of_all_ranks(kind, tmp_path):
    model, batches = make("Mixtral"), [TOKENS, TOKENS[:2].flip(1)]
    expected = counted_by_hand(model, batches)
    if kind in ("dp", "fsdp"):
        batches = [batch.chunk(2)[dist.get_rank()] for batch in batches]
    flex = sharded(kind, model, tmp_path)
    (found,) = editing.expert_load(flex, batches, [BLOCK]).values()
    assert torch.equal(found.pairs, expected)
    flex.set_experts_implementation("batched_mm")
    flex.register_forward_hook(HookFunction(flex.routing(BLOCK).load))
    (row,) = flex.dry_run(batches[0])
    assert row.full_shape == (NUM_EXPERTS, NUM_EXPERTS)
    assert max(row.forward.bytes_by_rank, default=0) <= 2 * 4 * NUM_EXPERTS**2

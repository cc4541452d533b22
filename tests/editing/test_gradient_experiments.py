"""Edge scores by integrated gradients, and the Jacobian lens: beside plain torch, and sharded."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close

import models
import pipelines
from flex_model import FlexModel, HookFunction, HookMismatchError, editing
from tiers import grid_but

pytest.importorskip("transformers")
TOKENS = torch.randint(64, (2, 6), generator=torch.Generator().manual_seed(0))
OTHER = torch.randint(64, (2, 6), generator=torch.Generator().manual_seed(1))
HEADS = [
    editing.Site(f"model.layers.{i}.self_attn.o_proj", "input", {"heads": h, "num_heads": 4})
    for i in range(2)
    for h in range(4)
]
MLP = [editing.Site(f"model.layers.{i}.mlp") for i in range(2)]
READERS = [
    *(editing.Site(f"model.layers.{i}.input_layernorm", "input") for i in range(2)),
    editing.Site("model.layers.1.post_attention_layernorm", "input", {"positions": [2, 5]}),
    editing.Site("model.norm", "input"),
]
STEPS = 3


def metric(logits):
    return (logits[:, -1, 3] - logits[:, 2, 5]).square().mean()


def hooked(model, sites, tokens, embeddings=None):
    """The tensors at sites, with their gradients kept; and the embeddings."""
    seen = {}

    def keep(name, tensor):
        tensor = tensor * 1  # as a reader has it, beside the others
        if tensor.requires_grad:
            tensor.retain_grad()
        seen[name] = tensor
        return tensor

    handles = []
    for name, side in {(site.module, site.side) for site in sites}:
        module = model.get_submodule(name)
        handles.append(
            module.register_forward_pre_hook(lambda m, a, n=name: (keep(n, a[0]), *a[1:]))
            if side == "input"
            else module.register_forward_hook(lambda m, a, out, n=name: keep(n, out))
        )

    def embed(module, args, output):
        seen["embeddings"] = output if embeddings is None else embeddings.requires_grad_()
        return seen["embeddings"]

    handles.append(model.model.embed_tokens.register_forward_hook(embed))
    metric(model(tokens).logits).backward()
    for handle in handles:
        handle.remove()
    return seen


def by_hand(model):
    """One forward and one backward for each step; one edge after another."""
    clean, corrupted = (hooked(model, [*HEADS, *MLP], tokens) for tokens in (TOKENS, OTHER))
    scores = torch.zeros(len(HEADS) + 2, len(READERS), dtype=torch.float64)
    start, end = corrupted["embeddings"].detach(), clean["embeddings"].detach()
    for step in range(1, STEPS + 1):
        seen = hooked(model, READERS, OTHER, start + (end - start) * step / STEPS)
        for j, reader in enumerate(READERS):
            grad = seen[reader.module].grad.clone()
            if "positions" in reader.where:
                grad[:, [0, 1, 3, 4]] = 0
            layer = (0, 1, 1, 2)[j]
            for i, site in enumerate([*HEADS, *MLP]):
                change = (clean[site.module] - corrupted[site.module]).detach()
                own = i // 4 if i < 8 else i - 8
                is_before = own < layer or (own == 1 and j == 2 and i < 8)
                if i < 8:
                    weight = model.get_submodule(site.module).weight
                    head = slice(8 * (i % 4), 8 * (i % 4) + 8)
                    change = change[..., head] @ weight[:, head].T
                scores[i, j] += is_before * (change * grad).sum().item() / STEPS
    return scores


def scores_of(flex, mine=lambda rows: rows):
    sites = [*HEADS, *MLP]
    return editing.integrated_gradients(
        flex,
        mine(TOKENS),
        [mine(OTHER)],
        sites,
        [*READERS[:-1], READERS[-1].module],  # by its name: its input
        metric,
        embedding="model.embed_tokens",
        steps=STEPS,
    )


def lens_of(flex, mine=lambda rows: rows, **settings):
    layers = {0: "model.embed_tokens", 3: "model.layers.0"}
    batches = [mine(TOKENS), {"input_ids": mine(OTHER)}]
    settings = {"positions": slice(1, -1), "batch": 5, **settings}
    return editing.jacobian_lens(flex, batches, layers, "model.layers.1", **settings)


def sharded(name, model):
    """The FlexModel of a sharded Llama, and this rank's rows."""
    if name == "tp":
        model = models.tensor_parallel_llama(model, models.mesh(1, 2)["tp"])
        return FlexModel(model, {}, tensor_parallel_size=2), lambda rows: rows
    if name == "ddp":
        model = models.TWO_RANKS[name].shard(model)
    else:
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=models.mesh(2, 1)["dp"])
    return FlexModel(model, {}, data_parallel_size=2), models.TWO_RANKS[name].my_rows


def test_edges_are_those_of_one_pass_after_another():
    model = models.llama().double()
    with FlexModel(copy.deepcopy(model), {}) as flex:
        flex.module.lm_head.weight.grad = before = torch.ones(64, 32).double()
        found = scores_of(flex)
        assert flex.module.lm_head.weight.grad is before and not flex.hook_functions
        flex.wrapped_module_requires_grad(False)
        assert_close(scores_of(flex), found)
    expected = by_hand(model)
    assert (expected != 0).sum() > 20 and expected.abs().max() > 1e-5
    assert_close(found, expected)


def test_branches_beside_each_other_have_no_edge():
    """Those of one layer of GPT-NeoX, whose attention and MLP read the same stream."""
    import transformers

    config = transformers.GPTNeoXConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4,
    )  # fmt: skip
    flex = FlexModel(transformers.GPTNeoXForCausalLM(config).eval().double(), {})
    layers = [f"gpt_neox.layers.{i}" for i in range(2)]
    found = editing.integrated_gradients(
        flex,
        TOKENS,
        OTHER,
        ["gpt_neox.embed_in", *(f"{name}.attention.dense" for name in layers)],
        [f"{name}.post_attention_layernorm" for name in layers],
        metric,
        embedding="gpt_neox.embed_in",
    )
    assert found.ne(0).tolist() == [[True, True], [False, True], [False, False]]


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"batch": 0}, "batch must be a positive number of units, got 0"),
        ({"batches": []}, "batches is empty"),
        ({"layers": {2: "lm_head"}}, "'model.layers.1' does not depend on 'lm_head'"),
        ({"layers": {1: "model.layers.1"}}, "is one of the layers"),
        ({"positions": torch.ones(2, 6) > 0}, "jacobian_lens: a mask .* no rectangular part"),
        ({"layers": ["model.layers.0"]}, "layers must be a mapping"),
        ({"steps": 0}, "steps must be a positive number of points, got 0"),
        ({"clean": TOKENS[:1]}, "differ in shape"),
    ],
)
def test_wrong_arguments(wrong, message):
    flex = FlexModel(models.llama().double(), {})
    settings = {"batches": [TOKENS], "layers": {0: "model.layers.0"}, "target": "model.layers.1"}
    settings["positions"], call = slice(None), editing.jacobian_lens
    if wrong.keys() & {"steps", "clean"}:
        settings = {"clean": TOKENS, "corrupted": OTHER, "metric": metric}
        settings |= {"senders": MLP, "receivers": READERS, "embedding": "model.embed_tokens"}
        call = editing.integrated_gradients
    with pytest.raises((TypeError, ValueError), match=message):
        call(flex, **{**settings, **wrong})
    assert not flex.hook_functions


@pytest.mark.filterwarnings("ignore::FutureWarning")  # other names of one method
def test_recomputed_layers():
    model = models.llama().double().train()
    expected = scores_of(FlexModel(copy.deepcopy(model), {}))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_close(scores_of(FlexModel(model, {})), expected)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="runs without gradients"):
        scores_of(FlexModel(model, {}))


def test_edges_of_a_mask():
    flex, mask = FlexModel(models.llama().double(), {}), torch.arange(12).reshape(2, 6) % 5 != 0

    def edge(sender=None, reader=None):
        sites = [editing.Site("model.layers.0.mlp", where={"positions": sender})]
        readers = [editing.Site("model.norm", "input", {"positions": reader})]
        arguments = TOKENS, OTHER, sites, readers, metric
        return editing.integrated_gradients(flex, *arguments, embedding="model.embed_tokens")

    for kind in ("sender", "reader"):
        assert_close(edge(**{kind: mask}) + edge(**{kind: ~mask}), edge())
        assert not edge(**{kind: mask}).allclose(edge())


def test_the_inputs_keep_their_graph_and_gradients():
    flex = FlexModel(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double(), {})
    prompt = models.random(2, 5, 8).requires_grad_()
    hidden = prompt.sin()
    editing.attribution_patching(flex, hidden, prompt, ["0"], torch.sum)
    editing.jacobian_lens(flex, [hidden], {0: "0"}, "2", positions=slice(None), batch=3)
    assert prompt.grad is None
    hidden.sum().backward()


@pytest.mark.ranks(2)
def test_inputs_of_one_rank_that_do_not_fit_are_an_error_on_every_rank():
    flex, mine = sharded("ddp", models.llama().double())
    rank = torch.distributed.get_rank()
    layers, settings = {0: "model.layers.0"}, {"positions": slice(None)}
    batches, other = [mine(TOKENS)] * (2 - rank), mine(OTHER)[:, rank:]
    with pytest.raises(HookMismatchError, match="rank 0: True; rank 1: False"):
        editing.jacobian_lens(flex, batches, layers, "model.layers.1", **settings)
    with pytest.raises(ValueError, match=r"differ in shape: .*\(on rank 1\)"):
        editing.attribution_patching(flex, mine(TOKENS), other, ["model.layers.0"], metric)
    lens_of(flex, mine)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", grid_but(["tp", "ddp", "fsdp2"], "tp"))
def test_sharded(name):
    model = models.llama().double()
    alone = FlexModel(copy.deepcopy(model), {}, process_group=pipelines.alone_group())
    expected, lens = scores_of(alone), lens_of(alone)
    flex, mine = sharded(name, model)
    for _ in range(2):
        assert_close(scores_of(flex, mine), expected)
    found = lens_of(flex, mine)
    assert found.num_prompts == lens.num_prompts == 4
    assert_close(found.J, lens.J)
    metric(flex(mine(TOKENS)).logits).backward()  # training goes on


BACKWARDS = {
    "attribution_patching": lambda flex, mine, folder: editing.attribution_patching(
        flex, mine(TOKENS), mine(OTHER), ["model.layers.0"], metric
    ),
    "integrated_gradients": lambda flex, mine, folder: scores_of(flex, mine),
    "jacobian_lens": lambda flex, mine, folder: lens_of(flex, mine),
    "fingerprint": lambda flex, mine, folder: flex.fingerprint(
        folder, mine(TOKENS), loss=lambda output: metric(output.logits)
    ),
    "verify": lambda flex, mine, folder: flex.verify(
        models.llama().double(), mine(TOKENS), loss=lambda output: metric(output.logits)
    ),
}


@pytest.mark.parametrize("name", BACKWARDS)
def test_a_hook_that_may_step_an_optimizer_is_refused(name, tmp_path):
    flex = FlexModel(models.llama().double(), {})
    weight = flex.module.lm_head.weight
    handle = weight.register_post_accumulate_grad_hook(lambda weight: weight.data.zero_())
    with pytest.raises(ValueError, match=rf"^{name}: .* on 'lm_head.weight', .* remove it by"):
        BACKWARDS[name](flex, lambda rows: rows, tmp_path)
    assert weight.ne(0).any() and not flex.hook_functions
    handle.remove()
    BACKWARDS[name](flex, lambda rows: rows, tmp_path)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", BACKWARDS)
def test_sums_that_fsdp_keeps_between_micro_batches_are_refused(name, tmp_path):
    flex, mine = sharded("fsdp2", models.llama().double())
    with flex.register_hook(HookFunction("lm_head.weight")):  # is none that is refused
        BACKWARDS[name](flex, mine, tmp_path / "before")
    gradients = []
    for is_interrupted in (False, True):
        for is_last, rows in enumerate((TOKENS, OTHER)):
            flex.module.set_requires_gradient_sync(bool(is_last))
            metric(flex(mine(rows)).logits).backward()
            if is_interrupted and not is_last:
                for has_sync in (False, True):
                    flex.module.set_requires_gradient_sync(has_sync)
                    with pytest.raises(ValueError, match=rf"^{name}: .* before the first micro-"):
                        BACKWARDS[name](flex, mine, tmp_path / "between")
        gradients.append(flex.get_module_gradient("model.embed_tokens.weight"))
        flex.zero_grad()
    assert_close(*gradients)
    BACKWARDS[name](flex, mine, tmp_path / "after")


class Mixed(nn.Module):
    """A model of tokens whose positions are in this dim."""

    def __init__(self, dim):
        super().__init__()
        self.dim, self.embed, self.norm = dim, nn.Embedding(64, 8), nn.LayerNorm(8)
        self.layer = models.seeded(nn.Linear, 8, 8)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.norm(x + self.layer(x).cumsum(self.dim).tanh())


def of_positions_in(dim):
    torch.manual_seed(0)
    flex = FlexModel(Mixed(dim).double(), {}, batch_dim=1 - dim)
    names = {"embed": "output", "layer": "output", "norm": "input", "": "output"}
    dims = {"dims": {"rows": 1 - dim, "positions": dim}}
    embed, layer, norm, end = (editing.Site(name, side, dims) for name, side in names.items())
    tokens, other = (one.transpose(1, dim) for one in (TOKENS, OTHER))
    scores = editing.integrated_gradients(
        flex,
        tokens,
        other,
        [embed, layer],
        [norm],
        lambda output: output.transpose(1, dim)[:, 3:, 2].square().sum(),
        embedding=embed,
        steps=STEPS,
        output=end,
    )
    lens = editing.jacobian_lens(flex, [tokens], {0: embed}, end, positions=slice(1, 5), batch=3)
    return scores, lens.J


def test_rows_may_be_in_another_dim():
    assert_close(of_positions_in(0), of_positions_in(1))


def test_the_lens_is_the_mean_jacobian(tmp_path):
    model = models.llama().double()
    with FlexModel(model, {}) as flex:
        found = lens_of(flex)
    expected = {layer: torch.zeros(32, 32).double() for layer in (0, 3)}
    for tokens in [*TOKENS, *OTHER]:
        for layer, name in ((0, "model.embed_tokens"), (3, "model.layers.0")):

            def of(value, name=name, tokens=tokens):
                seen = []
                put = model.get_submodule(name).register_forward_hook(lambda *_: value)
                read = model.model.layers[1].register_forward_hook(lambda m, a, y: seen.append(y))
                model(tokens[None])
                put.remove(), read.remove()
                return seen[0][0, 1:-1].sum(0)

            values = []
            hook = model.get_submodule(name).register_forward_hook(
                lambda m, a, y, values=values: values.append(y)
            )
            model(tokens[None])
            hook.remove()
            jacobian = torch.autograd.functional.jacobian(of, values[0].detach())
            expected[layer] += jacobian[:, 0, 1:-1].mean(1) / 4
    assert_close(found.J, {layer: one.float() for layer, one in expected.items()})
    found.save(tmp_path / "lens.pt")
    content = torch.load(tmp_path / "lens.pt", weights_only=True)
    assert content["source_layers"] == [0, 3] and content["d_model"] == 32
    assert content["n_prompts"] == 4 and content["J"][3].shape == (32, 32)

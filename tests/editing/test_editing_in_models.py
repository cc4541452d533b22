"""Ready edits in a model on one process: while it generates, lenses, patching beside plain torch
hooks. `test_editing` has the shardings.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import models
from flex_model import FlexModel, HookError, editing
from flex_model.editing.patch_batches import described


@pytest.fixture
def flex():
    pytest.importorskip("transformers")
    return FlexModel(models.llama(), {})


TOKENS = torch.randint(64, (3, 5), generator=torch.Generator().manual_seed(0))
OTHER = torch.randint(64, (3, 5), generator=torch.Generator().manual_seed(1))


def test_positions_while_generating(flex):
    lengths, settings = [], {"max_new_tokens": 3, "do_sample": False}

    def note(module, full, save_ctx, modules):
        lengths.append(int((full == 7).all(-1).sum(-1)[0]))

    def counts(**where):
        lengths.clear()
        edit = editing.clamp(7.0, 7.0, **where) | note
        with flex.register_forward_hook(edit.at("model.layers.0")):
            flex.generate(TOKENS, **settings)
        return list(lengths)

    assert counts() == [5, 1, 1]
    assert counts(positions="last") == [1, 1, 1]
    assert counts(positions=slice(2, None)) == [3, 0, 0]
    with pytest.raises(HookError, match="calls of one position"):
        counts(positions=3)


def test_lens_of_other_models():
    pytest.importorskip("transformers")
    flex = FlexModel(models.gpt2(), {})
    names = ["transformer.ln_f.weight", "transformer.ln_f.bias"]
    settings = {"norm": names[0], "norm_bias": names[1], "eps": 1e-5}
    lens = editing.logit_lens("lm_head.weight", kind="layer", **settings)
    best = editing.logit_lens(
        "lm_head.weight",
        kind=lambda hidden, weight, bias: nn.functional.layer_norm(hidden, (32,), weight, bias),
        keep=lambda logits: logits.argmax(-1),
        positions="last",
        name="best",
        **settings,
    )
    with flex.register_forward_hook((lens | best).at("transformer.h.1")):
        mask = torch.ones_like(TOKENS)
        settings = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
        text = flex.generate(TOKENS, attention_mask=mask, **settings)
    read = lens.take(flex)["transformer.h.1"]
    assert [tuple(logits.shape) for logits in read] == [(3, 5, 64), (3, 1, 64), (3, 1, 64)]
    assert_close(torch.cat(best.take(flex)["transformer.h.1"], 1), text[:, 5:])
    assert_close(read[0], flex(TOKENS).logits, rtol=1e-6, atol=1e-8)
    assert lens.take(flex) == {}


# ---- Experiments ---------------------------------------------------------------------------------


def metric(logits):
    return logits[:, -1, 3].mean() - logits[:, 2, 5].square().mean()


def by_hand(model, tokens, edits=(), kept=None):
    """A run with plain torch hooks: ``edits`` are (module, function of its tensor)."""
    handles = []
    for name, function in edits:
        module = model.get_submodule(name.removesuffix(".input"))
        if name.endswith(".input"):
            hook = module.register_forward_pre_hook(lambda m, a, f=function: (f(a[0]), *a[1:]))
        else:
            hook = module.register_forward_hook(lambda m, a, out, f=function: f(out))
        handles.append(hook)
    try:
        return metric(model(tokens).logits)
    finally:
        for handle in handles:
            handle.remove()


def keeping(store, name):
    def keep(tensor):
        store[name] = tensor
        if tensor.requires_grad:
            tensor.retain_grad()
        return tensor

    return name, keep


def test_activation_and_attribution_patching(flex):
    model, layers = flex.module, ["model.layers.0", "model.layers.1"]
    parameter = model.lm_head.weight
    parameter.grad = before = torch.ones_like(parameter)
    found = editing.activation_patching(flex, TOKENS, [OTHER], layers, metric)
    estimated = editing.attribution_patching(flex, {"input_ids": TOKENS}, OTHER, layers, metric)
    assert parameter.grad is before and before.eq(1).all()
    assert model.model.norm.weight.grad is None
    assert not flex.hook_functions and not flex.output_ptr

    clean, corrupted = {}, {}
    values = [by_hand(model, TOKENS, [keeping(clean, name) for name in layers])]
    values.append(by_hand(model, OTHER, [keeping(corrupted, name) for name in layers]))
    assert_close([found.clean, found.corrupted], [value.item() for value in values])
    values[1].backward()
    for i, name in enumerate(layers):
        change = (clean[name] - corrupted[name]) * corrupted[name].grad
        assert_close(estimated.values[i], change.sum((0, 2)))
        for position in range(5):

            def put(full, name=name, position=position):
                full = full.clone()
                full[:, position] = clean[name][:, position]
                return full

            assert_close(
                found.values[i, position].item(), by_hand(model, OTHER, [(name, put)]).item()
            )
    assert_close(
        found.recovered, (found.values - values[1].item()) / (values[0] - values[1]).item()
    )


def test_attribution_of_a_mask_and_of_repeated_positions(flex):
    clean, corrupted, name = {}, {}, "model.layers.0"
    mask = torch.arange(15).reshape(3, 5) % 4 != 0
    probe = nn.Linear(64, 1).double()

    def measure(logits):
        return probe(logits).square().mean()

    wheres = {"positions": mask, "units": slice(3, 20)}, {"positions": [4, 1, -1, 0, 2]}
    sites = [editing.Site(name, where=where) for where in wheres]
    found = editing.attribution_patching(flex, TOKENS, OTHER, sites, measure).values
    assert probe.weight.grad is None
    by_hand(flex.module, TOKENS, [keeping(clean, name)])
    by_hand(flex.module, OTHER, [keeping(corrupted, name), keeping(out := {}, "lm_head")])
    measure(out["lm_head"]).backward()
    change = (clean[name] - corrupted[name]) * corrupted[name].grad
    masked = (change * mask[..., None])[..., 3:20].sum((0, 2))
    assert_close(found, torch.stack([masked, change.sum((0, 2))[[4, 1, 4, 0, 2]]]))
    repeated = editing.attribution_patching(flex, TOKENS, OTHER, sites[1:], measure)
    assert repeated.positions == (4, 1, 4, 0, 2)


def test_tokens_are_not_taken_for_rows():
    layers = nn.Linear(8, 8), nn.Flatten(0, 1), nn.Linear(8, 8), nn.Unflatten(0, (-1, 5))
    flex, x = FlexModel(nn.Sequential(*layers).double(), {}), models.random(3, 5, 8)

    def patching(**settings):
        settings["positions"] = ["every"] * 2
        return editing.activation_patching(flex, x, -x, ["2"], total, **settings)

    def total(output):
        return output[:, :, 0].sum()

    assert_close(patching().recovered, torch.ones(1, 2).double())
    with pytest.raises(HookError, match=r"\(30, 8\) of '2' should have 6 rows at dim 0; choose a"):
        patching(batch=2)


def test_a_capture_is_of_a_site():
    flex, kept = FlexModel(models.mlp(), {}), editing.capture()
    flex.register_forward_hook(kept.at("fc1"))
    x = models.random(4, 6)
    for _ in range(2):
        assert flex.verify(models.mlp(), x, edits=True).is_equal
        flex(x)
    flex.register_forward_hook(kept.at("fc2"))
    with pytest.raises(HookError, match="make one per module"):
        flex(x)


def test_a_map_is_not_resumed_in_another_experiment(tmp_path):
    flex = FlexModel(nn.Sequential(nn.Linear(8, 1200), nn.Linear(1200, 8)).double(), {})
    x, file = models.random(2, 5, 8), tmp_path / "map.json"

    def patching(first, metric=torch.sum, **settings):
        site = editing.Site("0", where={"units": torch.arange(1200).ge(first)})
        return editing.activation_patching(flex, x, -x, [site], metric, resume=file, **settings)

    patching(500)
    with pytest.raises(ValueError, match="another experiment, with other sites"):
        patching(600)
    flex.create_hook_group("ablated", "1", editing_function=editing.zero(units=3))
    with pytest.raises(ValueError, match="another experiment, with other hooks"):
        patching(500, groups="ablated")
    with pytest.raises(ValueError, match="another experiment, with other metric, weights or hooks"):
        patching(500, lambda output: 1.004 * output.sum())
    assert described({"x": x, "flag": True}) != described({"x": x, "flag": False})


def test_batches_of_patches_and_an_interrupted_map(flex, tmp_path):
    """Rows of one forward carry patches of other sites, positions, heads and units."""
    file, calls, failing = tmp_path / "map.json", [], []
    heads = [
        editing.Site("model.layers.1.self_attn.o_proj", "input", {"heads": i, "num_heads": 4})
        for i in range(4)
    ]
    units = editing.Site("model.layers.0.mlp", "output", {"units": [3, 5]})
    sites = ["model.layers.0", *heads, units, "model.layers.1"]
    flex.module.register_forward_hook(lambda *_: calls.append(1))
    expected = editing.activation_patching(flex, TOKENS, [OTHER], sites, metric)
    assert len(calls) == 2 + 7 * 5

    def may_fail(logits):
        if failing and len(calls) > 4:
            raise KeyboardInterrupt
        return metric(logits)

    def run(**settings):
        calls.clear()
        return editing.activation_patching(
            flex, {"input_ids": TOKENS}, [OTHER], sites, may_fail, resume=file, **settings
        )

    failing.append(True)
    with pytest.raises(KeyboardInterrupt):
        run(batch=8)
    failing.clear()
    found = run(batch=6)
    assert len(calls) == 2 + 4  # 16 of 35 patches were kept
    assert_close(found.values, expected.values)
    assert_close([found.clean, found.corrupted], [expected.clean, expected.corrupted])
    assert_close(run().values, expected.values, rtol=0, atol=1e-12)
    assert len(calls) == 2
    with pytest.raises(ValueError, match="values of another experiment, with other positions"):
        run(positions=[1])
    with pytest.raises(ValueError, match="another experiment, with other metric, weights or hooks"):
        editing.activation_patching(
            flex, TOKENS, OTHER, sites, lambda logits: metric(logits) + 1, resume=file
        )
    for text in ("", "{}", "[1]"):
        (tmp_path / "damaged").write_text(text)
        with pytest.raises(ValueError, match="damaged is no file of patched runs, or is damaged"):
            editing.activation_patching(
                flex, TOKENS, OTHER, sites, metric, resume=tmp_path / "damaged"
            )
    for path in (tmp_path / "no" / "folder", tmp_path):
        calls.clear()
        with pytest.raises(ValueError, match=r"resume: rank 0 can't read and write .* give a file"):
            editing.activation_patching(flex, TOKENS, OTHER, sites, metric, resume=path)
        assert not calls
    rows = editing.Site("model.layers.0", where={"rows": 0})
    with pytest.raises(ValueError, match="leave rows= out"):
        editing.activation_patching(flex, TOKENS, OTHER, [rows], metric, batch=2)
    editing.activation_patching(flex, TOKENS, OTHER, [rows], metric)


class Patches(nn.Module):
    """A model of images of 3 channels: its layers have 4 positions, its head 2."""

    def __init__(self):
        super().__init__()
        self.embed, self.first, self.last = nn.Linear(12, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, images):  # (rows, 3, 4, 4)
        tokens = images.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).flatten(3)
        tokens = self.first(self.embed(tokens.flatten(1, 2))).tanh()
        return self.last(tokens[:, :2])


def test_positions_are_those_of_the_sites():
    flex, calls = FlexModel(Patches().double(), {}), []
    flex.module.register_forward_hook(lambda *_: calls.append(1))
    clean, corrupted = models.random(2, 3, 4, 4), models.random(2, 3, 4, 4, seed=1)

    def patching(*sites, **settings):
        calls.clear()
        return editing.activation_patching(flex, clean, corrupted, sites, torch.sum, **settings)

    found, batched = patching("embed", "first"), patching("embed", "first", batch=3)
    assert len(calls) == 2 + 3 and found.positions == batched.positions == (0, 1, 2, 3)
    estimated = editing.attribution_patching(flex, clean, corrupted, ["embed", "first"], torch.sum)
    assert found.values.shape == estimated.values.shape == (2, 4)
    assert_close(batched.values, found.values)
    assert_close(patching("first", positions=range(4)).values, found.values[1:])
    named = r"same number of positions, got 4 at the output of 'embed', 2 at the input of 'last'"
    sites = "embed", editing.Site("last", "input")
    with pytest.raises(ValueError, match=rf"{named}; call it once .*, or give positions="):
        patching(*sites)
    with pytest.raises(ValueError, match=rf"{named}; .*, or select as many in each where="):
        editing.attribution_patching(flex, clean, corrupted, sites, torch.sum)
    assert patching(*sites, positions=[0, 1]).values.shape == (2, 2)


def test_path_patching(flex):
    model = flex.module
    first, second = (f"model.layers.{i}.self_attn.o_proj" for i in range(2))
    sender = editing.Site(first, "input", {"heads": 2, "num_heads": 4})
    receiver = editing.Site("model.layers.1.mlp", "input")
    frozen = [editing.Site(name, "input") for name in (first, second)]
    before, after = editing.path_patching(flex, TOKENS, OTHER, sender, [receiver], frozen, metric)

    base, other, held = {}, {}, {}
    names = (f"{first}.input", f"{second}.input")
    expected = by_hand(model, TOKENS, [keeping(base, name) for name in names])
    assert_close(before, expected.item())
    by_hand(model, OTHER, [keeping(other, names[0])])

    def send(full):
        full = base[names[0]].clone()
        full[..., 16:24] = other[names[0]][..., 16:24]
        return full

    freeze = [(names[0], send), (names[1], lambda full: base[names[1]])]
    by_hand(model, TOKENS, [*freeze, keeping(held, "model.layers.1.mlp.input")])
    received = ("model.layers.1.mlp.input", lambda full: held["model.layers.1.mlp.input"])
    assert_close(after, by_hand(model, TOKENS, [received]).item())
    assert after != before

    _, along_all = editing.path_patching(flex, TOKENS, OTHER, sender, [receiver], [], metric)
    by_hand(model, TOKENS, [freeze[0], keeping(held, "model.layers.1.mlp.input")])
    assert_close(along_all, by_hand(model, TOKENS, [received]).item())


def test_other_hooks_in_experiments(flex):
    hook = editing.scale(2.0).at("model.layers.0")
    flex.register_forward_hook(hook)
    flex.update_hook_groups(hook, "doubled")

    def clean(**settings):
        sites = ["model.layers.1"]
        return editing.activation_patching(
            flex, TOKENS, OTHER, sites, metric, positions=["last"], **settings
        ).clean

    found = clean(), clean(groups=["doubled"])
    with pytest.raises(ValueError, match="in group 'doubled' would get the copies"):
        editing.activation_patching(
            flex, TOKENS, OTHER, ["model.layers.1"], metric, batch=2, groups="doubled"
        )
    model = flex.restore()
    doubled = by_hand(model, TOKENS, [("model.layers.0", lambda full: 2 * full)])
    assert_close(found, (by_hand(model, TOKENS).item(), doubled.item()))


class Looped(nn.Module):
    def __init__(self):
        super().__init__()
        self.start, self.block, self.end = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, inputs):
        hidden = self.start(inputs)
        return self.end(self.block(self.block(hidden)))


@pytest.mark.parametrize(
    "experiment, sites, settings",
    [
        (editing.activation_patching, [["block"]], {}),
        (editing.attribution_patching, [["block"]], {}),
        (editing.attribution_patching, [["start"]], {"output": "block"}),
        (editing.path_patching, ["block", ["end"], ["end"]], {}),
        (editing.path_patching, ["start", ["block"], ["end"]], {}),
        (editing.path_patching, ["start", ["end"], ["block"]], {}),
        (editing.integrated_gradients, [["block"], ["end"]], {"embedding": "start"}),
        (editing.integrated_gradients, [["start"], ["block"]], {"embedding": "start"}),
        (editing.jacobian_lens, [{0: "block"}, "end"], {"positions": slice(None)}),
        (editing.jacobian_lens, [{0: "start"}, "block"], {"positions": slice(None)}),
    ],
)
def test_modules_that_are_called_several_times_are_refused(experiment, sites, settings):
    flex, (x, y) = FlexModel(Looped(), {}), torch.randn(2, 2, 4, 8)
    is_lens = experiment is editing.jacobian_lens
    arguments = ([x], *sites) if is_lens else (x, y, *sites, torch.sum)
    with pytest.raises(ValueError, match="'block' is called 2 times in one forward; choose"):
        experiment(flex, *arguments, **settings)
    assert not flex.hook_functions and not flex.output_ptr


@pytest.mark.parametrize("is_hooked", [False, True])
def test_all_are_the_hooks_of_the_user(flex, is_hooked):
    if is_hooked:
        flex.register_forward_hook(hook := editing.scale(2.0).at("model.layers.0"))
        flex.update_hook_groups(hook, "named")
    sender = editing.Site("model.layers.0.mlp", where={"units": slice(4)})
    receivers = [editing.Site("model.layers.1.mlp", "input")]
    frozen = ["model.layers.1.self_attn"]
    layers = ["model.layers.0", "model.layers.1"]
    streams = [editing.Site("model.norm", "input")]
    runs = TOKENS, OTHER
    for experiment in (
        partial(editing.path_patching, flex, *runs, sender, receivers, frozen, metric),
        lambda **groups: (
            editing.activation_patching(flex, *runs, layers, metric, **groups).values,
            editing.attribution_patching(flex, *runs, layers, metric, **groups).values,
        ),
        partial(
            editing.integrated_gradients, flex, *runs, [layers[0]], streams, metric,
            embedding="model.embed_tokens",
        ),
    ):  # fmt: skip
        assert_close(experiment(groups="all"), experiment(groups=["named"] * is_hooked))
    if is_hooked:
        assert flex.get_hook_function_groups(hook) == {"all", "named"}
        with pytest.raises(ValueError, match="in group 'all' would get the copies"):
            editing.activation_patching(flex, *runs, layers, metric, batch=2, groups="all")


def test_what_experiments_refuse(flex):
    site = ["model.layers.1"]

    def fails(logits):
        raise KeyError("no such answer")

    with pytest.raises(HookError, match="the metric failed on rank 0: KeyError"):
        editing.activation_patching(flex, TOKENS, OTHER, site, fails)
    with pytest.raises(HookError, match="no such answer"):
        editing.attribution_patching(flex, TOKENS, OTHER, site, fails)
    with pytest.raises(ValueError, match="layers"):
        editing.activation_patching(flex, TOKENS, OTHER, ["model.layers.7"], metric)
    with pytest.raises(ValueError, match="one number"):
        editing.attribution_patching(flex, TOKENS, OTHER, site, lambda logits: logits.mean(0))
    with pytest.raises(TypeError, match="expected a Site"):
        editing.activation_patching(flex, TOKENS, OTHER, [3], metric)
    counted = editing.Site(*site, where={"positions": [2], "of": "sequence"})
    with pytest.raises(ValueError, match="counts positions in one call; leave out of="):
        editing.attribution_patching(flex, TOKENS, OTHER, [counted], metric)
    flex.wrapped_module_requires_grad(False)
    with pytest.raises(ValueError, match="no gradient reaches the metric"):
        editing.attribution_patching(flex, TOKENS, OTHER, site, metric)
    flex.module.lm_head.weight.requires_grad_()
    with pytest.raises(ValueError, match="no gradient reaches 'model"):
        editing.attribution_patching(flex, TOKENS, OTHER, site, metric)
    assert not flex.hook_functions and not flex.output_ptr


def test_edits_without_gradients(flex):
    edit = editing.zero(units=[1, 5], positions=2) | editing.noise(0.1, seed=1)
    flex.register_forward_hook(edit.at("model.layers.0"))
    expected = flex(TOKENS).logits
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            assert_close(flex(TOKENS).logits, expected.detach())

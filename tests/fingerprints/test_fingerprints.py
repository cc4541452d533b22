"""Folders of fingerprints, and their comparison on one process."""

import copy
import re
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import browser
import flex_model
import frameworks
import models
from flex_model import FlexModel, HookFunction, cli
from flex_model.distributed.placement import Shard
from flex_model.fingerprints import fingerprint_folder
from flex_model.fingerprints.fingerprint_folder import read_run
from flex_model.fingerprints.summary import NUM_SAMPLES, positions

X = models.random(4, 5, 6)


def loss(output):
    return output.square().mean()


def fingerprint(folder, model, *inputs, **settings):
    with FlexModel(model) as flex:
        flex.fingerprint(folder, *inputs, **settings)
    return folder


@pytest.fixture
def pair(tmp_path):
    """Two runs; the second one's fc2 has another bias."""
    other = models.mlp()
    other.fc2.bias.data[3] += 1e-3
    return (
        fingerprint(tmp_path / "a", models.mlp(), X, loss=loss),
        fingerprint(tmp_path / "b", other, X, loss=loss),
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["tp", "ddp", "fsdp2", "dtensor"])
@pytest.mark.parametrize("tensors", [False, True])
def test_a_sharded_run_has_the_fingerprint_of_the_unsharded_one(name, tensors, tmp_path):
    way, group = models.TWO_RANKS[name], dist.new_group([0])
    if dist.get_rank() == 0:
        own = FlexModel(models.mlp().requires_grad_(True), process_group=group)
        own.fingerprint(tmp_path / "a", X, loss=loss, tensors=tensors)
        own.restore()
    flex = FlexModel(way.shard(models.mlp()), **way.sizes)
    flex.fingerprint(tmp_path / "b", way.my_rows(X), loss=loss, tensors=tensors)
    found = flex.verify(tmp_path / "a", way.my_rows(X), loss=loss)
    assert found.first is None and not found.differences and not found.unmatched, found
    assert all(one.grad is None for one in flex.module.parameters())
    if dist.get_rank() == 0:
        saved = flex_model.compare(tmp_path / "a", tmp_path / "b")
        assert saved == found and len(saved.rows) == 6 * 4 - 2 + 8  # X has no gradient
        assert {one.kind for one in saved.rows} >= {"forward_pre", "full_backward", "tensor"}


class Scores(nn.Linear):
    """As the routers of mixtures: float32 scores of bfloat16 activations."""

    def forward(self, x):
        return nn.functional.linear(x.float(), self.weight.float())


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.router, self.out = Scores(64, 8, bias=False), nn.Linear(64, 8)

    def forward(self, x):
        x = x + self.down(self.up(x).relu())
        return self.out(x) * self.router(x).softmax(-1).to(x)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_module_of_another_dtype_inherits_what_its_inputs_differ_by(dtype, tmp_path):
    """The float32 model runs under autocast: its sums are float32, of bfloat16 parts."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model, x = models.seeded(Mixed).to(dtype), models.random(4, 6, 64).to(dtype)
    way, group = models.TWO_RANKS["dtensor"], dist.new_group([0])
    one = FlexModel(model, process_group=group) if dist.get_rank() == 0 else None
    flex = FlexModel(parallelize_module(copy.deepcopy(model), way.mesh["tp"], plan))
    weight = flex.module.router.weight.data
    mixed = torch.autocast("cpu", torch.bfloat16, dtype == torch.float32, cache_enabled=False)
    with mixed, torch.no_grad():
        if one is not None:
            one.fingerprint(tmp_path, x)
            one.restore()
        found = flex.verify(tmp_path, x)
        assert found.first is None and max(row.ulps for row in found.rows) > 1e3, found
        report = flex.verify(model, x)
        assert report.is_equal, report
        weight[3] *= 2
        first = flex.verify(tmp_path, x).first
        assert (first.name, first.kind) == ("router", "forward")
        assert flex.verify(model, x).first_difference.name == "router"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["tp", "ddp"])
def test_a_second_fingerprint_reuses_the_proofs_of_the_first(name, tmp_path):
    way = models.TWO_RANKS[name]
    flex = FlexModel(way.shard(models.mlp()), **way.sizes)
    rows = way.my_rows(X)
    for folder in ("a", "b"):
        flex.fingerprint(tmp_path / folder, rows, loss=loss)
        recorder = flex._core.recorder
    assert recorder.core.tracking.num_followed == 1
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in flex.module.modules())
    flex.fingerprint(tmp_path / "long", way.my_rows(X.repeat(2, 1, 1)), loss=loss)
    flex.fingerprint(tmp_path / "c", rows, loss=loss)
    assert recorder.core.tracking.num_followed == 2 and flex._core.recorder is recorder
    if dist.get_rank() == 0:
        a, *others = (read_run(tmp_path / folder) for folder in "abc")
        for other in others:
            for one, again in zip(a.sites, other.sites, strict=True):
                assert (one.key, one.layout, one.splits) == (again.key, again.layout, again.splits)
                assert torch.equal(one.moments, again.moments)
                assert torch.equal(one.sample, again.sample)
    # Another model, other sites: a recorder of its own.
    next(one for one in flex.module.modules() if isinstance(one, nn.Linear)).more = nn.Identity()
    flex.fingerprint(tmp_path / "a", rows)
    assert recorder.core.is_closed and not flex._core.recorder.core.is_closed
    last = flex._core.recorder
    flex.restore()
    assert last.core.is_closed


def test_a_refused_site_does_not_hold_the_tensors_of_the_forward(tmp_path):
    class Named(nn.Module):
        def forward(self, x):
            return "no tensor"

    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.named, self.second = nn.Linear(6, 8), Named(), nn.Linear(8, 3)

        def forward(self, x):
            hidden = self.first(x)
            self.named(hidden)
            of_hidden = weakref.ref(hidden)
            output = self.second(hidden)
            del hidden
            self.is_held = of_hidden() is not None
            return output

    model = Dropping().double()
    folder = fingerprint(tmp_path / "a", model, X)
    assert list(read_run(folder).refused) == ["forward of named"] and not model.is_held


def test_a_gate_has_its_own_forward_after_each_fingerprint(tmp_path):
    pytest.importorskip("transformers")
    model = frameworks.huggingface_model("mixtral").float().eval()
    tokens, block = torch.arange(12).reshape(2, 6), model.model.layers[0].mlp
    with FlexModel(model) as flex:
        for folder in ("a", "b"):
            flex.fingerprint(tmp_path / folder, tokens, use_cache=False)
            assert "forward" not in vars(block.gate) and not hasattr(block, "routing")
            assert "routing" in {one.kind for one in read_run(tmp_path / folder).sites}
    assert not flex_model.compare(tmp_path / "a", tmp_path / "b").unmatched


@pytest.mark.ranks(2)
def test_inputs_that_are_split_over_ranks_are_kept_in_full(tmp_path):
    flex = FlexModel(nn.Sequential(nn.Tanh()), **models.TWO_RANKS["tp"].sizes)
    flex.annotate_layout("", kind="forward_pre", tp=Shard(2))
    flex.fingerprint(tmp_path / "a", X.chunk(2, 2)[dist.get_rank()])
    if dist.get_rank() == 0:
        assert torch.equal(read_run(tmp_path / "a").inputs[0][0], X)


@pytest.mark.ranks(2)
def test_runs_of_single_ranks_are_refused(tmp_path):
    way = models.TWO_RANKS["ddp"]
    flex = FlexModel(way.shard(models.mlp()), dp_batch="local", **way.sizes)
    with pytest.raises(ValueError, match="without dp_batch"):
        flex.fingerprint(tmp_path, way.my_rows(X))


@pytest.mark.ranks(2)
def test_a_loss_that_fails_on_one_rank_is_an_error_on_all_ranks(tmp_path):
    way = models.TWO_RANKS["tp"]
    flex = FlexModel(way.shard(models.mlp().requires_grad_()), **way.sizes)

    def failing(output):
        if dist.get_rank() == 1:
            raise LookupError("no label")
        return loss(output)

    with pytest.raises(RuntimeError, match=r"no label \(on rank 1\)"):
        flex.fingerprint(tmp_path, X, loss=failing)


@pytest.mark.ranks(2)
def test_an_error_on_rank_0_alone_is_raised_on_all_ranks(tmp_path, monkeypatch):
    """Only rank 0 compares and writes: the other one would wait for it."""
    way = models.TWO_RANKS["tp"]
    flex = FlexModel(way.shard(models.mlp()), **way.sizes)
    flex.fingerprint(tmp_path / "a", X, tensors=True)

    def part(full):
        raise LookupError("no such part")

    with pytest.raises(RuntimeError, match="no such part"):
        flex.verify(tmp_path / "a", X, names={"fc1": ("fc1", part)})
    with pytest.raises(ValueError, match=r"\['fc3'\] in names match no site of A"):
        flex.verify(tmp_path / "a", X, names={"fc3": "fc1"})

    def full_disk(path, chunks, syncs):
        raise OSError("no space left")

    monkeypatch.setattr(fingerprint_folder, "write_whole", full_disk)
    with pytest.raises(OSError, match="no space left"):
        flex.fingerprint(tmp_path / "b", X, loss=loss, tensors=True)


def test_gradients_are_compared_in_the_order_of_the_backward(tmp_path):
    class Halved(nn.Module):
        def forward(self, x):
            return x / 2 + x.detach() / 2 if self.is_wrong else x * 1

    right, wrong = models.mlp(), models.mlp()
    right.act, wrong.act = Halved(), Halved()
    right.act.is_wrong, wrong.act.is_wrong = False, True
    runs = [
        fingerprint(tmp_path / name, one, X, loss=loss)
        for name, one in (("a", right), ("b", wrong))
    ]
    first = flex_model.compare(*runs).first
    assert (first.name, first.kind, first.inherited) == ("act", "full_backward", 0)


class FusedAttention(models.Attention):
    """Computes what it inherits in one operation, which rounds in another order."""

    def forward(self, hidden, *, causal):
        batch, length, _ = hidden.shape
        split = (batch, length, -1, self.head_size)
        q, k, v = (proj(hidden).view(split).transpose(1, 2) for proj in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.o(mixed.transpose(1, 2).reshape(batch, length, -1)), None


def test_a_bias_is_compared_at_the_scale_of_what_its_gradient_sums(tmp_path):
    """Softmax is blind to the bias of the keys: its gradient is rounding, but for a defect."""
    x, other = models.random(4, 6, 8), models.block()
    other.attn.__class__ = FusedAttention
    runs = [
        fingerprint(tmp_path / name, one, x, loss=loss)
        for name, one in (("a", models.block()), ("b", other))
    ]
    found = flex_model.compare(*runs)
    (of_keys,) = [row for row in found.rows if row.name == "attn.k.bias"]
    assert found.first is None and 0 < of_keys.ulps < 10, found
    for name in ("attn.k.bias", "attn.v.bias", "mlp.fc1.bias"):
        with other.get_parameter(name).register_hook(lambda gradient: gradient * 1.001 + 1e-9):
            defect = fingerprint(tmp_path / "c", other, x, loss=loss)
        assert flex_model.compare(runs[0], defect).first.name == name


class Masked(nn.Module):
    """Attention with parameters and modules of its own: scores that are masked by a number."""

    def __init__(self, fill, scale=0.25, softmax=None):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.b_K, self.softmax = nn.Parameter(torch.randn(2, 8)), softmax or nn.Softmax(-1)
        self.fill, self.scale, self.parts = fill, scale, 1

    def forward(self, x):
        scores = self.q(x) @ (self.k(x) + self.b_K.flatten()).transpose(1, 2) * self.scale
        scores = scores.masked_fill(torch.ones(x.shape[1:2] * 2).triu(1).bool(), self.fill)
        mixed = (self.softmax(scores) @ self.v(x)).chunk(self.parts, -1)
        weights = self.o.weight.chunk(self.parts, 1)  # as row parallel layers sum
        return x + sum(part @ weight.t() for part, weight in zip(mixed, weights))


@pytest.mark.parametrize("fill", [-1e4, -1e9, torch.finfo(torch.float32).min, -torch.inf])
def test_masks_are_no_scale_of_scores(fill, tmp_path):
    """Layers share their softmax, too: the layer whose scores differ is the one that calls it."""
    softmax = nn.Softmax(-1)
    model = models.seeded(lambda: nn.Sequential(*(Masked(fill, softmax=softmax) for _ in "abc")))
    x, (rounded, wrong) = models.random(2, 6, 16).float(), (copy.deepcopy(model) for _ in "ab")
    rounded[0].parts, wrong[1].scale = 2, 0.2501
    a = fingerprint(tmp_path / "a", model, x, loss=loss)
    b = fingerprint(tmp_path / "b", rounded, x, loss=loss)
    assert flex_model.compare(a, b).is_equal and not torch.equal(model(x), rounded(x))
    first = flex_model.compare(a, fingerprint(tmp_path / "c", wrong, x)).first
    assert (first.name, first.call, first.module) == ("0.softmax", 1, "1")
    with FlexModel(wrong, {}) as flex:
        flex.register_forward_pre_hook(HookFunction("0.softmax"))
        assert not flex.verify(model, x).is_equal


def test_a_lost_gradient_or_call_is_a_difference(tmp_path):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.head, self.unused, self.calls = *(nn.Linear(6, 6) for _ in "abc"), 2

        def forward(self, x):
            return self.head(x), [self.fc(x) for _ in range(self.calls)]

    model, x = models.seeded(Twice), X.float()
    frozen, once = (copy.deepcopy(model) for _ in "ab")
    frozen.head.weight.requires_grad_(False)
    once.calls = 1
    a = fingerprint(tmp_path / "a", model, x, loss=lambda out: loss(out[0]))
    assert flex_model.compare(a, fingerprint(tmp_path / "b", model, x)).is_equal  # without a loss
    b = fingerprint(tmp_path / "c", frozen, x, loss=lambda out: loss(out[0]))
    assert flex_model.compare(a, b).lost == ("tensor of head.weight, call 0",)
    assert cli.main(["compare", str(a), str(b)]) == 1
    with FlexModel(once) as flex, pytest.raises(AssertionError, match="2 are lost in B, such as f"):
        flex.verify(a, x, raise_on_difference=True)


def test_large_integers_and_conjugates_are_equal_to_themselves(tmp_path):
    class Spectrum(nn.Module):
        def forward(self, seconds):
            return torch.fft.rfft(seconds % 86400 / 86400).conj()

    x = torch.randint(1_600_000_000, 1_760_000_000, (64, 50))
    runs = [fingerprint(tmp_path / one, Spectrum(), x, tensors=one == "b") for one in "ab"]
    assert flex_model.compare(*runs).is_equal
    expected = Spectrum()(x).resolve_conj()
    assert torch.equal(read_run(runs[1]).sites[-1].read_full(), expected)
    x[63, 49] += 1  # not among the values that are kept
    other = fingerprint(tmp_path / "c", Spectrum(), x)
    assert flex_model.compare(runs[0], other).first.kind == "forward_pre"


def test_two_runs_are_compared_by_the_command_line(pair, capsys, tmp_path):
    a, b = map(str, pair)
    assert cli.main(["compare", a, a]) == 0
    assert "0 of" in capsys.readouterr().out
    assert cli.main(["compare", a, b, "--html", str(tmp_path / "page.html")]) == 1
    out = capsys.readouterr().out
    assert "the first: forward of fc2, call 0, computed by fc2" in out
    assert cli.main(["compare", a, str(tmp_path)]) == 1
    assert "has no whole fingerprint" in capsys.readouterr().err


def test_the_most_different_values_are_listed_with_their_positions(pair):
    first = flex_model.compare(*pair).first
    assert (first.name, first.kind, first.call) == ("fc2", "forward", 0)
    for position, theirs, ours, *_ in first.positions:
        assert position[-1] == 3
        assert float(ours) - float(theirs) == pytest.approx(1e-3)


def test_the_page_shows_the_first_difference(pair, tmp_path):
    page = tmp_path / "page.html"
    found = flex_model.compare(*pair)
    found.show(page)
    with browser.opened() as opened:
        opened.open(page)
        assert opened.evaluate("document.querySelector('h2').textContent") == "fc2"
        assert opened.evaluate("document.querySelectorAll('.site').length") == len(found.rows)
        rows = "[...document.querySelectorAll('td')].map(e => e.textContent)"
        assert opened.evaluate(rows)[0].endswith(", 3]")
        opened.evaluate("document.querySelectorAll('.site')[0].click()")
        assert opened.evaluate("document.querySelector('h2').textContent") == "(the model)"


def test_an_interrupted_run_is_no_run_and_a_new_one_replaces_the_last(tmp_path):
    class Stops(nn.Module):
        def forward(self, x):
            raise KeyboardInterrupt

    folder = fingerprint(tmp_path / "a", models.mlp(), X, tensors=True)
    assert len(list((folder / "tensors").iterdir())) == len(read_run(folder).sites) == 12
    model = models.mlp()
    model.out = Stops()
    with pytest.raises(KeyboardInterrupt):
        fingerprint(folder, model, X, tensors=True)
    with pytest.raises(ValueError, match="interrupted; run flex"):
        read_run(folder)
    fingerprint(folder, models.mlp(), X)
    assert not list((folder / "tensors").iterdir())
    assert flex_model.compare(folder, folder).is_equal
    (folder / "mine.txt").write_text("")
    with pytest.raises(ValueError, match="has other files"):
        fingerprint(folder, models.mlp(), X)


def test_a_damaged_file_is_an_error(pair):
    file = pair[1] / "run.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match="can't be read"):
        flex_model.compare(*pair)


class Fused(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.qkv = nn.Linear(6, 12, bias=False).double()
        self.qkv.weight.data = torch.cat([part.weight.data for part in parts])
        self.out = nn.Linear(12, 3).double()

    def forward(self, x):
        return self.out(self.qkv(x))


class Apart(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            [models.seeded(nn.Linear, 6, 6, bias=False, seed=i).double() for i in range(2)]
        )
        self.head = nn.Linear(12, 3).double()

    def forward(self, x):
        return self.head(torch.cat([one(x) for one in self.layers], -1))


def test_parts_of_a_fused_projection_are_compared_by_names(tmp_path):
    model = Apart()
    fused = Fused(model.layers)
    fused.out.load_state_dict(model.head.state_dict())
    fused.qkv.weight.data[7] *= 2
    a = fingerprint(tmp_path / "a", model, X)
    b = fingerprint(tmp_path / "b", fused, X, tensors=True)
    names = {
        "layers.0": ("qkv", lambda full: full[..., :6]),
        "layers.1": ("qkv", lambda full: full[..., 6:]),
        "head": "out",
    }
    found = flex_model.compare(a, b, names)
    assert (found.first.name, found.first.kind) == ("layers.1", "forward")
    assert not found.unmatched and len(found.rows) == 8
    assert found.differences[0] is found.first
    for wrong, error in (
        ({**names, "layer.0": "qkv"}, r"ValueError: compare: \['layer.0'\] in names match no site"),
        ({"head": 3}, "TypeError: compare: names must be a dict .* got 'head': 3"),
        ({"head": ("out", 3)}, "TypeError: compare: names must be a dict .* got 'head'"),
        ("head", "TypeError: compare: names must be a dict .* got str"),
    ):
        with pytest.raises((ValueError, TypeError)) as raised:
            flex_model.compare(a, b, wrong)
        assert re.match(error, f"{raised.typename}: {raised.value}")
    # Without full tensors there are no parts; that is said, not guessed.
    fingerprint(b, fused, X)
    found = flex_model.compare(a, b, names)
    assert sum("without tensors=True" in one for one in found.unmatched) == 2


def test_gradients_of_what_has_other_parts_are_not_compared(tmp_path):
    first = nn.Linear(6, 6).double()
    model = nn.Sequential(first, Apart())
    fused = nn.Sequential(first, Fused(model[1].layers))
    fused[1].out.load_state_dict(model[1].head.state_dict())
    names = {
        "1.layers.0": ("1.qkv", lambda full: full[..., :6]),
        "1.layers.1": ("1.qkv", lambda full: full[..., 6:]),
        "1.head": "1.out",
    }
    a = fingerprint(tmp_path / "a", model.requires_grad_(), X, loss=loss)
    b = fingerprint(tmp_path / "b", fused.requires_grad_(), X, loss=loss, tensors=True)
    found = flex_model.compare(a, b, names)
    assert found.is_equal and not found.differences
    assert sum("is of other parts, too" in one for one in found.unmatched) == 4


def test_patterns_of_names():
    def renamed(name, names):
        return flex_model.fingerprints.comparison.partner_of(name, names, "forward")

    patterns = {"layers.*.mlp": "decoder.*.ffn", "layers.*": "decoder.*"}
    assert renamed("layers.3.mlp.fc1", patterns) == ("decoder.3.ffn.fc1", None)
    assert renamed("layers.3.attn", patterns) == ("decoder.3.attn", None)
    assert renamed("embed", patterns) == ("embed", None)
    assert renamed("fc1", {"": "module"}) == ("module.fc1", None)
    assert renamed("module.fc1", {"module": ""}) == ("fc1", None)
    with pytest.raises(ValueError, match=r"differ in their number of \*"):
        renamed("layers.3", {"layers.*": "decoder"})


class Silent(nn.Module):
    def forward(self, x):
        pass


def test_other_inputs_shapes_and_dtypes_are_told(tmp_path):
    a = fingerprint(tmp_path / "a", models.mlp(), X)
    for name, x, kind in (("b", X + 1, "forward_pre"), ("c", X[:2], "shape")):
        first = flex_model.compare(a, fingerprint(tmp_path / name, models.mlp(), x)).first
        assert (first.name, first.kind) == ("", kind)
    broken = models.mlp()
    broken.fc1.weight.data[2, 1] = torch.nan
    b = fingerprint(tmp_path / "f", broken, X)
    for runs in ((a, b), (b, a)):
        first = flex_model.compare(*runs).first
        assert (first.name, first.ulps) == ("fc1", torch.inf)
    assert flex_model.compare(b, b).first is None
    for model, names in ((nn.Tanh(), {"": "other"}), (Silent(), None)):
        b = fingerprint(tmp_path / "g", model, X)
        with pytest.raises(ValueError, match="no site of A but the input is in B; give names="):
            flex_model.compare(a, b, names)
    # Of a run in another dtype, values are compared, in units of the coarser one.
    single = fingerprint(tmp_path / "d", models.mlp().float(), X.float())
    assert flex_model.compare(a, single).first is None
    model = models.mlp()
    model.act = nn.Sequential()
    model.act.forward = lambda x: x.tanh().float()
    model.fc2.forward = lambda x: nn.functional.linear(x.double(), model.fc2.weight, model.fc2.bias)
    first = flex_model.compare(a, fingerprint(tmp_path / "e", model, X)).first
    assert (first.name, first.kind) == ("act", "dtype")


def test_positions_depend_on_the_shape_alone():
    for shape in ((64, 1000), (4, 512, 1024), (3, 777, 96)):
        chosen = positions(shape, torch.device("cpu"))
        assert len(chosen) == NUM_SAMPLES and (chosen.diff() >= 0).all()
        for size in shape[1:]:  # as good as random ones
            counts = (chosen % size).bincount(minlength=size)
            expected = 1 - (1 - 1 / size) ** NUM_SAMPLES
            assert (counts > 0).float().mean() > expected - 0.05


def test_inputs_that_a_file_cannot_hold_are_given_again(tmp_path):
    class Boxed(nn.Module):
        def forward(self, box):
            return box.rows * 2

    class Box:
        rows = X

    class Other:
        rows = X + 1

    a = fingerprint(tmp_path / "a", Boxed(), Box())
    with FlexModel(Boxed()) as flex:
        with pytest.raises(ValueError, match=r"give them: flex.verify\(folder, \*inputs\)"):
            flex_model.compare(a, flex)
        assert flex.verify(a, Box()).is_equal
        with pytest.raises(ValueError, match=r"record .* with tensors=True"):
            flex_model.compare(a, flex, own=True)
        with pytest.raises(AssertionError, match="differs"):
            flex.verify(a, Other(), raise_on_difference=True)


def test_few_bytes_are_kept_of_large_activations(tmp_path):
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(3)))
    folder = fingerprint(tmp_path / "a", model, torch.randn(512, 1024))
    size = sum(file.stat().st_size for file in folder.iterdir())
    recorded = read_run(folder).num_bytes
    inputs = 512 * 1024 * 4
    assert recorded == 8 * inputs and (size - inputs) < 0.01 * recorded


def test_a_copy_of_the_model_is_not_named(tmp_path):
    model = models.block().float()
    x = models.random(2, 7, 8).float()
    a = fingerprint(tmp_path / "a", model, x, tensors=True)
    with FlexModel(copy.deepcopy(model)) as flex:
        assert flex_model.compare(a, flex, own=True).is_equal

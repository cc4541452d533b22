"""layouts(), dry_run() and verify(): against what real runs settle, cost and compute."""

import copy
import functools
import importlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.testing import assert_close

import frameworks
import models
from counted_traffic import payloads_of
from flex_model import FlexModel, HookFunction
from flex_model.errors import HookError, HookMismatchError
from flex_model.hooks.registration import describe_hook
from flex_model.inspection import verify
from shared_edits import double
from tiers import on_ranks


def hooks_everywhere(flex, pair):
    """A looking and an editing hook at every site, of forward and backward kinds."""
    for i, (what, name) in enumerate(pair.sites.items()):
        edit = double if i % 2 else None
        for kind, register in (
            ("forward", flex.register_forward_hook),
            ("forward_pre", flex.register_forward_pre_hook),
            ("full_backward_pre", flex.register_full_backward_pre_hook),
        ):
            if kind == "forward_pre" and what in ("outside", "root", "shared by all rows"):
                continue
            if kind == "full_backward_pre" and what == "root":
                continue  # its output may be a model output without a graph of its own
            register(HookFunction(name, None, edit, output_name=f"{name} {kind}"))


def tensors(model):
    """Of its state; Megatron's has other things too."""
    return [item for item in model.state_dict().items() if isinstance(item[1], torch.Tensor)]


def settled(flex):
    return {(row.name, row.kind): row for row in flex.layouts()}


TWO = [
    "hf-llama-2",
    "native-tp-2",
    "native-dtensor-2",
    "fairscale-2",
    "ddp-2",
    "megatron-tp-2",
    "megatron-sp-2",
]
FOUR = ["tp-fsdp2-4", "hsdp-4", "hf-tp-fsdp-4", "fairscale-ddp-4"]
ROWS = on_ranks(2, "native-sp-2", "fsdp2-2", grid=TWO, timeout=200)
ROWS += on_ranks(4, grid=FOUR, timeout=200)


@pytest.mark.parametrize("name", ROWS)
def test_a_dry_run_tells_what_a_run_settles(name, tmp_path):
    """Layouts before are layouts after; costs are those that a run counts."""
    with frameworks.quiet(), frameworks.CASES[name].build(tmp_path) as pair:
        pair.oracle(*pair.inputs, **pair.keywords)
        pair.start()
        model = pair.shard()
        records = {}
        flex = FlexModel(model, records, **pair.sizes)
        hooks_everywhere(flex, pair)
        inputs = tuple(pair.rows(full) for full in pair.inputs)
        before = {key: value.clone() for key, value in tensors(model)}
        state = torch.get_rng_state()

        dry = flex.dry_run(*inputs, **pair.keywords)  # draws and records nothing

        assert not records and torch.equal(torch.get_rng_state(), state)
        for key, value in tensors(model):
            assert type(value) is type(before[key])
            assert torch.equal(frameworks.full_tensor(value), frameworks.full_tensor(before[key]))
        assert all(row.source == "not run yet" for row in flex.layouts())

        communicator = flex._core.communicator
        for _ in range(2):  # what the first one has to find out, the second one knows
            start = communicator.sequence
            output = frameworks.tensor_of(flex(*inputs, **pair.keywords))
            counted = communicator.sequence - start, payloads_of(communicator)
            output.sum().backward()
        found = settled(flex)
        for row in dry:
            real = found[row.name, row.kind]
            assert row.calls, row
            if row.layout is None:
                assert "values" in row.source, row
                # Of Megatron's attention a run knows more: what edits before it have settled.
                is_megatron = name.startswith("megatron")
                assert is_megatron or real.source == "equal values on all ranks", (row, real)
                continue
            assert (row.full_shape, row.local_shapes, row.dtype) == (
                real.full_shape,
                real.local_shapes,
                real.dtype,
            ), (row, real)
            if not (row.kind == "full_backward_pre" and str(row.layout.tp) == "R"):
                assert row.layout == real.layout, (
                    f"{row.name} {row.kind}: {row.layout}, {real.layout}"
                )
        if all(row.layout is not None for row in dry):
            assert (dry.forward.headers, dry.forward.payloads) == counted
        # Functions can be called where shapes tell the layout, and these are right.
        unknown = {describe_hook(r.name, r.kind, r.unpack_idx) for r in dry if r.layout is None}
        assert {finding.hook for finding in dry.findings} <= unknown
        assert {finding.level for finding in dry.findings} <= {"not checked"}
        assert str(dry).count("\n") == len(dry) + 5 + str(dry.findings).count("Finding(")
        assert str(flex.layouts()).count("\n") == len(dry) + 1
        flex.restore()


class Tables(nn.Module):
    """Fills containers of its own while it runs."""

    def __init__(self):
        super().__init__()
        self.cache, self.lists, self.held = {}, {"of": [[]]}, models.Parallelism("one")

    def forward(self, x):
        number = x.shape[1]
        if number not in self.cache:
            self.cache[number] = torch.arange(number) * 1.0
            self.lists["of"][0].append(torch.ones(number))
            object.__setattr__(self.held, "bias", torch.ones(number))
        return x + self.cache[number] + self.lists["of"][0][-1] + self.held.bias


def test_a_dry_run_leaves_containers_of_modules_as_they_were():
    x, model = models.random(2, 5), nn.Sequential(Tables(), nn.BatchNorm1d(5).double())
    flex = FlexModel(model, {})
    flex.register_forward_hook(HookFunction("0"))
    flex.dry_run(x)
    assert not model[0].cache and not model[1].num_batches_tracked
    assert_close(model[0](x), Tables()(x))


def test_runs_beside_that_of_the_user_leave_its_cache_and_inputs_alone():
    transformers = pytest.importorskip("transformers")
    model = models.llama()
    tokens, cache = torch.arange(8).reshape(1, 8), transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens, past_key_values=cache)
        flex = FlexModel(model, {})
        flex.register_forward_hook(HookFunction("model.layers.0"))
        flex.dry_run(tokens[:, :3], past_key_values=cache)
        assert flex.verify(copy.deepcopy(model), tokens[:, :3], past_key_values=cache).is_equal
        assert cache.get_seq_length() == 8
        model(tokens[:, :3], past_key_values=cache)

    class InPlace(nn.Module):
        def forward(self, x):
            return x.mul_(3)

    flex = FlexModel(nn.Sequential(InPlace(), nn.Tanh()), {})
    assert flex.verify(copy.deepcopy(flex.module), models.random(2, 3)).is_equal


@pytest.mark.ranks(2)
def test_a_dry_run_without_hooks_costs_nothing():
    flex = FlexModel(models.mlp(), {}, tensor_parallel_size=2)
    dry = flex.dry_run(models.random(4, 6))
    assert dry == [] and str(dry) == "no hooks are registered"
    assert dry.forward.is_nothing and dry.backward.is_nothing


@pytest.mark.ranks(2)
@pytest.mark.parametrize("settings", [{}, {"gradient_as_bucket_view": True, "static_graph": True}])
def test_a_dry_run_after_a_step_of_ddp(settings):
    """DDP prepares its buckets anew in the forward after the first backward: not on shapes."""
    twin, x = models.mlp().requires_grad_(), models.random(4, 5, 6)
    model = nn.parallel.DistributedDataParallel(models.mlp().requires_grad_(), **settings)
    with FlexModel(model, {}) as flex:
        flex.register_forward_hook(HookFunction("fc1"))
        rows = x.chunk(2)[dist.get_rank()]
        for _ in range(3):
            for one, batch in ((flex, rows), (twin, x)):
                one.zero_grad()
                one(batch).square().mean().backward()
            (row,) = flex.dry_run(rows)
            assert row.full_shape == (4, 5, 8)
            assert_close(flex.get_module_gradient("fc1.weight"), twin.fc1.weight.grad)


# ---- verify --------------------------------------------------------------------------------------


@pytest.mark.ranks(2, timeout=200)
@pytest.mark.parametrize(
    "name",
    [
        "native-sp-2",
        "fsdp2-2",
        *(
            pytest.param(n, marks=pytest.mark.grid)
            for n in ("hf-llama-2", "fairscale-2", "ddp-2", "fsdp1-2")
        ),
    ],
)
def test_verify_finds_equal_what_is_equal_and_names_the_first_that_is_not(name, tmp_path):
    with frameworks.quiet(), frameworks.CASES[name].build(tmp_path) as pair:
        pair.oracle(*pair.inputs, **pair.keywords)
        pair.start()
        model = pair.shard()
        flex = FlexModel(model, {}, **pair.sizes)
        inputs = tuple(pair.rows(full) for full in pair.inputs)
        reference = pair.oracle if dist.get_rank() == 0 else None

        report = flex.verify(reference, *inputs, **pair.keywords)
        assert report.is_equal, report
        assert {row.result for row in report.rows} == {verify.EQUAL}, report
        assert len(report.rows) > 6

        broken = pair.sites["row output"]
        if dist.get_rank() == 0:
            module = pair.oracle.get_submodule(broken)
            with torch.no_grad():
                module.weight[0] += 1.0
        report = flex.verify(reference, *inputs, **pair.keywords)
        first = report.first_difference
        assert (first.name, first.kind) == (broken, "forward"), report
        assert first.max_abs > 1e-3
        with pytest.raises(AssertionError, match=f"the first that differs: forward of {broken}"):
            flex.verify(reference, *inputs, raise_on_difference=True, **pair.keywords)
        flex.restore()


@pytest.mark.ranks(2)
def test_verify_compares_gradients_and_leaves_the_model_s_own():
    """Under data parallelism the loss is the mean over rows; wrong gradients are found."""
    reference = models.mlp()
    model = nn.parallel.DistributedDataParallel(models.mlp())
    flex = FlexModel(model, records := {}, data_parallel_size=2)
    edits = []
    for name, register in (
        ("fc1", flex.register_full_backward_pre_hook),
        ("fc1", flex.register_forward_hook),
        ("fc2", flex.register_full_backward_hook),
    ):
        kind = register.__name__
        register(HookFunction(name, None, lambda *a: edits.append(a), output_name=name + kind))
    x = models.random(4, 5, 6)
    rows = x.chunk(2)[dist.get_rank()]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)

    report = flex.verify(reference, rows, loss=lambda output: output.square().mean())
    assert report.is_equal, report
    assert {row.kind for row in report.rows} == {"forward", "full_backward", "full_backward_pre"}
    assert not edits and not records
    assert all((parameter.grad == 3.0).all() for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in reference.parameters())

    of_forward = flex.verify(reference, rows)
    assert [row.kind for row in of_forward.rows] == ["forward"]
    wrong = flex.verify(reference, rows, loss=lambda output: output.square().sum())
    assert {row.kind for row in wrong.rows if row.differs} == {"full_backward", "full_backward_pre"}
    assert wrong.first_difference.kind == "full_backward", wrong  # backward runs from the end


class Columns(nn.Module):
    """This rank's half of a Linear's outputs; it states no sizes."""

    def __init__(self, whole):
        super().__init__()
        self.weight = nn.Parameter(whole.weight.detach().chunk(2)[dist.get_rank()].clone())

    def forward(self, x):
        return x @ self.weight.T


@pytest.mark.ranks(2)
def test_verify_lists_sites_whose_layout_is_not_known():
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Tanh(), nn.Linear(6, 16, bias=False).double(), nn.GELU())
    model = nn.Sequential(nn.Tanh(), Columns(whole[1]), nn.GELU())
    flex = FlexModel(model, {}, tensor_parallel_size=2)
    report = flex.verify(whole, models.random(2, 6))
    results = {row.name: row.result for row in report.rows}
    assert results.pop("0") == verify.EQUAL
    assert results == dict.fromkeys(["1", "2", ""], verify.NOT_RESOLVED)
    assert "1 of 4 sites are equal" in str(report)
    flex.annotate_layout("1.weight", kind="parameter", tp=Shard(0))
    assert flex.verify(whole, models.random(2, 6)).is_equal
    flex.restore()


@pytest.mark.ranks(2)
def test_verify_places_tensors_as_the_user_states_them():
    whole = nn.Sequential(nn.Tanh(), nn.Linear(6, 16, bias=False).double())
    whole[1].weight.data = models.random(16, 6)
    model = nn.Sequential(nn.Tanh(), Columns(whole[1]))
    with FlexModel(model, {}, tensor_parallel_size=2) as flex:
        flex.register_forward_hook(HookFunction("1", placements={"tp": Shard(1)}))
        assert flex.verify(whole, models.random(2, 6)).is_equal
    with FlexModel(whole, {}, data_parallel_size=2, batch_dim=1) as flex:
        flex.register_forward_hook(HookFunction("1"))
        rows = models.random(3, 4, 6).chunk(2, 1)[dist.get_rank()]
        twin = copy.deepcopy(whole)
        assert flex.verify(twin, rows).is_equal


@pytest.mark.ranks(2)
def test_a_reference_that_fails_is_an_error_on_every_rank():
    flex = FlexModel(models.TWO_RANKS["tp"].shard(models.mlp()), tensor_parallel_size=2)
    with pytest.raises(HookError, match="rank 0: verify: the reference failed"):
        flex.verify(nn.Linear(3, 3, dtype=torch.float64), models.random(4, 6))
    with pytest.raises(HookError, match="rank 0 needs the unsharded model"):
        flex.verify(None, models.random(4, 6))
    assert flex.verify(models.mlp(), models.random(4, 6)).is_equal


@pytest.mark.ranks(2)
def test_wrong_arguments_of_verify_are_errors_on_every_rank_at_once():
    flex = FlexModel(models.TWO_RANKS["tp"].shard(models.mlp()), tensor_parallel_size=2)
    x = models.random(4, 6)
    for settings, error, match in (
        ({"rtol": "1e-3"}, ValueError, "rtol must be a number of at least 0, got '1e-3'"),
        ({"atol": None}, ValueError, "atol must be a number of at least 0, got None"),
        ({"atol": -1.0}, ValueError, "atol must be a number of at least 0, got -1.0"),
        ({"reference_timeout": "1h"}, ValueError, "reference_timeout must be a number"),
        ({"loss": "mse"}, TypeError, "loss must be a function of the output or None, got 'mse'"),
    ):
        with pytest.raises(error, match=match):
            flex.verify(models.mlp(), x, **settings)
    assert flex.verify(models.mlp(), x, rtol=1).is_equal


def without_out(model):
    model.forward = lambda x: model.fc2(model.act(model.fc1(model.inp(x))))
    return model


@pytest.mark.ranks(2)
def test_verify_finds_nothing_equal_that_was_not_compared():
    """Sites that the reference lacks, or does not call, and models in which no layout is known."""
    way, x = models.TWO_RANKS["tp"], models.random(4, 6)
    flex = FlexModel(way.shard(models.mlp()), {}, tensor_parallel_size=2)
    for name in ("fc2", "out"):
        flex.register_forward_hook(HookFunction(name))
    skips, lacks = (without_out(models.mlp()) for _ in range(2))
    del lacks.out
    for reference, result in ((skips, verify.CALLS), (lacks, verify.NOT_IN_REFERENCE)):
        report = flex.verify(reference, x)
        assert [row.result for row in report.rows] == [verify.EQUAL, result], report
        with pytest.raises(AssertionError, match=f"forward of out {result}"):
            flex.verify(reference, x, raise_on_difference=True)
    flex.restore()
    with FlexModel(models.mlp(), {}, tensor_parallel_size=2) as unknown:
        report = unknown.verify(models.mlp(), x)
    assert {row.result for row in report.rows} == {verify.NOT_RESOLVED} and not report.is_equal


# ---- What can't be run on shapes -----------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_fsdp_that_shapes_can_t_follow_is_an_error_and_still_runs(kind):
    model = models.mlp(dtype=torch.float32)
    if kind == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    else:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        model = fully_shard(model, mesh=models.mesh(2, 1)["dp"], mp_policy=policy)
    flex = FlexModel(model, records := {}, data_parallel_size=2)
    flex.register_forward_hook(HookFunction("fc1"))
    x = models.random(2, 6, dtype=torch.float32) + dist.get_rank()
    message = "FSDP1 gathers" if kind == "fsdp1" else "FSDP2 with mixed precision"
    with frameworks.quiet(), pytest.raises(HookError, match=message):
        flex.dry_run(x)
    with frameworks.quiet():
        flex(x)
    assert flex.layouts()[0].full_shape == (4, 8)
    assert dist.get_rank() or records["fc1"][0].shape == (4, 8)


@functools.lru_cache
def positions(rows, dtype):
    return torch.zeros(rows, 1, dtype=dtype)


class AsksForValues(nn.Module):
    """Its control flow depends on values; it keeps tensors, and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6, dtype=torch.float64)
        self.asks = False
        self.kept = None
        self.calls = 0

    def forward(self, x):
        x = nn.functional.dropout(self.fc(x), 0.5)
        x = x + positions(x.shape[0], x.dtype)
        self.kept, self.calls = x, self.calls + 1
        if self.asks and x.sum() > 0:
            return x * 2
        return x


@pytest.mark.ranks(2)
def test_control_flow_on_values_is_an_error_that_names_layouts():
    model = models.seeded(AsksForValues)
    flex = models.replicas(FlexModel(model, {}, tensor_parallel_size=2))
    flex.register_forward_hook(HookFunction("fc", editing_function=double))
    model.asks = dist.get_rank() == 1
    with pytest.raises(HookError, match=r"rank 1: dry_run: .* values, and call flex.layouts\(\)"):
        flex.dry_run(models.random(4, 6))
    model.asks = False
    assert (model.kept, model.calls) == (None, 0)
    assert flex.dry_run(models.random(4, 6))[0].full_shape == (4, 6)
    assert (model.kept, model.calls) == (None, 0)


class Branches(models.MLP):
    """Calls another module on each rank."""

    def __init__(self):
        super().__init__()
        self.other = nn.ReLU()

    def forward(self, x):
        act = self.other if dist.get_rank() else self.act
        return self.out(self.fc2(act(self.fc1(self.inp(x)))))


@pytest.mark.ranks(2)
def test_ranks_that_call_other_hooks_differ():
    flex = FlexModel(models.seeded(Branches).double(), {}, data_parallel_size=2)
    for name in ("act", "other"):
        flex.register_forward_hook(HookFunction(name))
    with pytest.raises(HookMismatchError, match="which called 1 sites"):
        flex.dry_run(models.random(4, 6))


# ---- One process ---------------------------------------------------------------------------------


def test_what_a_model_keeps_out_of_reach_is_an_error_where_it_is_used():
    kept = {}

    class Keeps(nn.Linear):
        def forward(self, x):
            return super().forward(x) + kept.setdefault("offset", torch.ones(6))

    flex = FlexModel(models.seeded(Keeps, 6, 6))
    x = torch.ones(4, 6)
    flex.dry_run(x)
    with pytest.raises(AssertionError, match="Please convert all Tensors to FakeTensors first"):
        flex(x)
    kept.clear()
    assert type(flex(x)) is torch.Tensor


def test_on_one_process_nothing_is_moved():
    model = models.seeded(AsksForValues)
    flex = FlexModel(model, records := {})
    flex.register_forward_hook(HookFunction("fc"))
    flex.register_full_backward_pre_hook(HookFunction("", None, double, output_name="grad"))
    state = torch.get_rng_state()
    dry = flex.dry_run(models.random(4, 6))
    assert torch.equal(torch.get_rng_state(), state) and not records and model.kept is None
    assert [(row.full_shape, row.calls) for row in dry] == [((4, 6), 1), ((4, 6), 1)]
    assert dry.forward.payloads == dry.forward.headers == dry.backward.headers == 0
    assert [row.source for row in flex.layouts()] == ["not run yet"] * 2

    flex(models.random(4, 6)).sum().backward()
    assert [(row.full_shape, row.dtype) for row in flex.layouts()] == [((4, 6), torch.float64)] * 2
    with flex.active():
        flex(models.random(2, 6))
        flex(models.random(3, 6))
    row = flex.layouts()[0]
    assert (row.full_shape, row.num_shapes) == ((3, 6), 2)
    assert "3 x 6 (last of 2)" in str(flex.layouts())


def test_verify_on_one_process_without_hooks_is_about_all_modules():
    reference, model = models.block(), models.block()
    x = models.random(2, 5, 8)
    with FlexModel(model) as flex:
        report = flex.verify(reference, x)
        assert report.is_equal and len(report.rows) == len(list(model.modules())), report
        with torch.no_grad():
            model.norm.weight.add_(1.0)
        assert not flex.verify(reference, x).is_equal


# ---- python -m flex_model inspect ----------------------------------------------------------------


class Silent(nn.Module):
    """Each rank has other weights, and nothing says how they are split."""

    def __init__(self):
        super().__init__()
        self.inp, self.act = nn.Linear(6, 4), nn.Tanh()
        with torch.no_grad():
            self.inp.weight.add_(dist.get_rank())

    def forward(self, x):
        return self.act(self.inp(x))


def by_dtensors():
    """Sharded over the ranks of the world, for `inspect`."""
    model, mesh = frameworks.decoder(), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return frameworks.parallelized(model, "tp", mesh)


def test_inspect_prints_the_tree_of_a_function_s_model(capsys):
    cli = importlib.import_module("flex_model.cli")
    place = f"{__file__}:by_dtensors"
    assert cli.main(["inspect", place, "--tp", "2", "--input", "2,8:int64"]) == 0
    out = capsys.readouterr().out
    assert (
        "wk  Linear  float64 2 x 8 x 32 [dp R, tp R] -> float64 2 x 8 x 16 [dp R, tp S(2)]" in out
    )
    assert "core  Core  float64 2 x 8 x 8 x 4 [dp R, tp S(1)]" in out
    assert "0 to 1  DecoderLayer" in out and not dist.is_initialized()
    assert cli.main(["inspect", place, "--tp", "2"]) == 1
    assert "give --input" in capsys.readouterr().err


def test_inspect_does_not_guess(capsys):
    cli = importlib.import_module("flex_model.cli")
    given = ["--tp", "2", "--input", "4,6"]
    assert cli.main(["inspect", f"{__file__}:Silent", *given]) == 0
    out = capsys.readouterr().out
    unknown = "float32 4 x 4 per rank, layout known after a run"
    assert f"inp  Linear  float32 4 x 6 [dp R, tp R] -> {unknown}" in out
    assert f"act  Tanh  {unknown}" in out


@pytest.mark.parametrize("is_tied", [False, True])
def test_inspect_of_a_hugging_face_config_needs_no_weights(is_tied, tmp_path, capsys):
    pytest.importorskip("transformers")
    config = models.llama().config
    config.tie_word_embeddings = is_tied
    config.save_pretrained(tmp_path)
    cli = importlib.import_module("flex_model.cli")
    assert cli.main(["inspect", str(tmp_path), "--tp", "2", "--dp", "2"]) == 0
    out = capsys.readouterr().out
    assert "0 to 1  LlamaDecoderLayer" in out
    assert "down_proj" in out and "[dp S(0), tp S(2)] -> " in out
    assert "known after a run" not in out
    assert cli.main(["inspect", str(tmp_path), "--tp", "3"]) == 1
    assert "3 tensor-parallel ranks do not divide num_attention_heads 4" in capsys.readouterr().err


def test_inspect_shows_the_class_that_the_config_names(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    whisper = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 64}
    whisper |= {"num_mel_bins": 8, "max_source_positions": 10, "pad_token_id": 0}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    cli = importlib.import_module("flex_model.cli")
    for kind, config, given, shown in (
        ("BertModel", transformers.BertConfig(**sizes, num_attention_heads=4), [], "pooler  Bert"),
        ("LlamaForSequenceClassification", models.llama().config, ["1,8:int64"], "score  Linear"),
        (
            "ViTModel",
            transformers.ViTConfig(**sizes, num_attention_heads=4, image_size=8, patch_size=4),
            ["2,3,8,8"],
            "embeddings  ViTEmbeddings  float32 2 x 3 x 8 x 8 -> float32 2 x 5 x 32",
        ),
        (
            "WhisperForConditionalGeneration",
            transformers.WhisperConfig(**whisper, **heads),
            ["2,8,20"],
            "encoder  WhisperEncoder  float32 2 x 8 x 20 -> float32 2 x 10 x 32",
        ),
    ):
        config.architectures = [kind]
        config.save_pretrained(tmp_path / kind)
        arguments = ["inspect", str(tmp_path / kind)]
        for shape in given:
            arguments += ["--input", shape]
        assert cli.main(arguments) == 0
        out = capsys.readouterr().out
        assert out.startswith(kind) and shown in out, out
    assert cli.main(["inspect", str(tmp_path / "ViTModel")]) == 1
    assert "reads pixel_values, whose shape is not known; give --input" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "is not a folder, a .json file, or module:function"),
        (["nowhere.json"], "there is no nowhere.json"),
        (["models:nothing"], "has no function 'nothing'"),
        (["models:mlp", "--tp", "0"], "must be an int of at least 1"),
        (["models:mlp", "--dp", "3", "--input", "4,6"], "give multiples of 3"),
    ],
)
def test_what_inspect_refuses(arguments, message, capsys):
    assert importlib.import_module("flex_model.cli").main(["inspect", *arguments]) == 1
    assert message in capsys.readouterr().err

"""Models split into stages: each against the same model whole, in the same run."""

import copy
import gc
import inspect
import pickle
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from flex_model import TraceError, pipelining, pytree
from flex_model.pipelining import (
    ModulePipe,
    PassThrough,
    Pipe,
    PipeInfo,
    PipelineStage,
    PipeSequential,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    SplitPoint,
    TrivialLossWrapper,
    annotate_split_points,
    pipe_split,
    pipeline,
)
from models import SIZES, random, seeded
from tiers import grid_but

BEGINNING, END = SplitPoint.BEGINNING, SplitPoint.END
CPU = torch.device("cpu")


# ---- Models ----------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x, shift=None):
        y = self.fc2(torch.tanh(self.fc1(x)))
        return x + y if shift is None else x + y * shift


class Tower(nn.Module):
    """Blocks between a stem and a head; ``kind`` says what the forward does beside."""

    def __init__(self, kind="plain", layers=4, width=16):
        super().__init__()
        self.kind = kind
        self.inp = nn.Linear(5, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, 3)

    def forward(self, x, shift=None):
        hidden = first = self.inp(x)
        for layer in self.layers:
            if self.kind == "relu":
                hidden = layer(hidden, shift).relu()
            elif self.kind == "twice":
                hidden = layer(layer(hidden, shift), shift)
            elif self.kind == "pair":
                hidden = layer(hidden, hidden + 1)
            else:
                hidden = layer(hidden, shift)
        if self.kind == "skip":
            hidden = hidden + first
        if self.kind == "dict":
            return {"logits": self.out(self.norm(hidden)), "norm": hidden.norm()}
        return self.out(self.norm(hidden))


SMALL = SIZES | {"num_hidden_layers": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "llama": ("Llama", SMALL, "model.layers"),
    "llama-eager": ("Llama", {**SMALL, "attn_implementation": "eager"}, "model.layers"),
    "llama-tied": ("Llama", {**SMALL, "tie_word_embeddings": True}, "model.layers"),
    "mistral": ("Mistral", {**SMALL, "sliding_window": 4}, "model.layers"),
    "qwen2": ("Qwen2", SMALL, "model.layers"),
    "qwen3": ("Qwen3", {**SMALL, "head_dim": 8}, "model.layers"),
    "mixtral": ("Mixtral", {**SMALL, "num_local_experts": 4}, "model.layers"),
    "gemma": ("Gemma", {**SMALL, "head_dim": 8}, "model.layers"),
    "gemma2": ("Gemma2", {**SMALL, "head_dim": 8, "sliding_window": 4}, "model.layers"),
    "gemma3": ("Gemma3", {**SMALL, "head_dim": 8, "sliding_window": 4}, "model.layers"),
    "gpt2": ("GPT2", GPT2, "transformer.h"),
    "gpt-neox": ("GPTNeoX", SMALL, "gpt_neox.layers"),
    "opt": ("OPT", {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32}, "model.decoder.layers"),
}


def family(name):
    """A random model, in float64 if its kernels take that, and the name of its list of blocks."""
    transformers = pytest.importorskip("transformers")
    kind, settings, blocks = FAMILIES[name]
    head = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    config = {"Gemma3": "Gemma3TextConfig"}.get(kind, f"{kind}Config")
    settings = dict(settings)
    attention = settings.pop("attn_implementation", None)
    made = getattr(transformers, config)(**settings)
    if attention:
        made._attn_implementation = attention
    model = seeded(getattr(transformers, head), made).eval()
    return (model if name == "mixtral" else model.double()), blocks


def tokens(rows=4, length=8, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 64, (rows, length), generator=generator)


def padded(rows=4, length=8):
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[rows // 2, -3:] = 0
    mask[-1, -1:] = 0
    return mask


def leaves(output):
    return pytree.flatten(output)[0]


def assert_equal(got, expected):
    got, expected = leaves(got), leaves(expected)
    assert len(got) == len(expected)
    for ours, theirs in zip(got, expected):
        assert_close(ours, theirs, rtol=0, atol=0)


def snapshot(model):
    """What a split could change about a model."""
    return {
        name: (
            type(module),
            module.training,
            {key: id(value) for key, value in module.__dict__.items() if key != "_modules"},
            {
                key: [*value]
                for key, value in module.__dict__.items()
                if "_hooks" in key or key in ("_parameters", "_buffers", "_modules")
            },
            {key: value.clone() for key, value in module._buffers.items() if value is not None},
        )
        for name, module in model.named_modules()
    }


def assert_untouched(model, before):
    after = snapshot(model)
    assert after.keys() == before.keys()
    for name in before:
        assert after[name][:4] == before[name][:4], name
        assert_close(after[name][4], before[name][4], rtol=0, atol=0)


# ---- "modules" -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_stages_of_hugging_face_models_equal_the_model(name):
    model, blocks = family(name)
    before = snapshot(model)
    split = {f"{blocks}.1": BEGINNING, f"{blocks}.2": END}
    pipe = pipeline(model, (tokens(),), {"attention_mask": padded()}, split_spec=split)
    assert isinstance(pipe, ModulePipe) and pipe.num_stages == 3
    assert_untouched(model, before)
    with torch.no_grad():
        for rows, length in [(4, 8), (3, 8), (2, 11), (1, 5)]:
            ids, mask = tokens(rows, length), padded(rows, length)
            expected = model(ids, attention_mask=mask, use_cache=False).logits
            assert_equal(pipe(ids, attention_mask=mask), expected)
        expected = model(ids, use_cache=False).logits
        assert_equal(pipe(ids), expected)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma"])
def test_stages_keep_names_types_and_parameters(name):
    model, blocks = family(name)
    pipe = pipeline(model, (tokens(),), split_spec={f"{blocks}.2": BEGINNING})
    held = {}
    for index in range(2):
        stage = pipe.get_stage_module(index)
        assert type(stage) is type(model) and stage is not model
        for path, module in stage.named_modules():
            if not isinstance(module, PassThrough):
                assert type(module) is type(model.get_submodule(path)), path
        for path, parameter in stage.named_parameters(remove_duplicate=False):
            assert parameter is model.get_parameter(path)
            held.setdefault(path, set()).add(index)
        owned = {int(path.split(f"{blocks}.")[1].split(".")[0]) for path in held if blocks in path}
        assert owned == {0, 1} if index == 0 else {0, 1, 2, 3}
        for path in stage.state_dict():
            assert path in model.state_dict()
    assert set(held) == {path for path, _ in model.named_parameters(remove_duplicate=False)}
    assert all(len(stages) == 1 for stages in held.values())  # by name
    tied = {
        "gpt2": [{0: "transformer.wte.weight", 1: "lm_head.weight"}],
        "gemma": [{0: "model.embed_tokens.weight", 1: "lm_head.weight"}],
    }
    assert pipe.replicated_params == tied.get(name, [])


def test_where_a_list_is_split():
    model = seeded(Tower)
    x = random(4, 5, dtype=torch.float32)
    points = {"layers.0": BEGINNING, "layers.1": BEGINNING, "layers.2": END, "layers.3": END}
    pipe = pipeline(model, (x,), split_spec=points, method="modules")
    assert pipe.num_stages == 5
    owned = [
        sorted(
            {
                name.split(".weight")[0]
                for name in dict(stage.named_parameters())
                if "weight" in name
            }
        )
        for stage in map(pipe.get_stage_module, range(5))
    ]
    fcs = [[f"layers.{i}.fc1", f"layers.{i}.fc2"] for i in range(4)]
    assert owned == [["inp"], fcs[0], fcs[1] + fcs[2], fcs[3], ["norm", "out"]]
    assert_equal(pipe(x), model(x))
    same = {"layers.1": END, "layers.2": BEGINNING}
    assert pipeline(model, (x,), split_spec=same, method="modules").num_stages == 2


@pytest.mark.parametrize("kind", ["plain", "relu", "dict"])
def test_plain_models(kind):
    model = seeded(Tower, kind)
    x, shift = random(4, 5, dtype=torch.float32), random(4, 1, dtype=torch.float32)
    split = {"layers.1": BEGINNING, "layers.3": BEGINNING}
    pipe = pipeline(model, (x,), {"shift": shift}, split_spec=split, method="modules")
    assert_equal(pipe(x, shift=shift), model(x, shift=shift))
    assert_equal(pipe(x[:3]), model(x[:3]))
    expected, got = copy.deepcopy(model), pipe(x, shift=shift)
    leaves(expected(x, shift=shift))[0].sum().backward()
    leaves(got)[0].sum().backward()
    for name, parameter in expected.named_parameters():
        assert_close(model.get_parameter(name).grad, parameter.grad, rtol=0, atol=0)


@pytest.mark.parametrize("point", ["1", "2", "3", "4"])
def test_a_bare_sequential(point):
    model = nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
    )
    before, x = snapshot(model), random(6, 4, dtype=torch.float32)
    pipe = pipeline(model, (x,), split_spec={point: BEGINNING}, method="modules")
    assert_untouched(model, before)  # BatchNorm has counted nothing
    first, second = map(pipe.get_stage_module, range(2))
    assert isinstance(first, nn.Sequential) and len(first) == 5
    hidden = first(x).detach().requires_grad_()  # a leaf, as a schedule receives it
    expected = copy.deepcopy(model)(x)
    got = second(hidden)
    assert_close(got, expected, rtol=0, atol=0)
    got.sum().backward()
    assert hidden.grad is not None


def test_training_with_dropout_is_split_and_random_models_are_refused():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Linear(8, 2))
    x = random(6, 4, dtype=torch.float32)
    state = torch.get_rng_state()
    pipe = pipeline(model, (x,), split_spec={"2": BEGINNING}, method="modules")
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(0)
    expected = model(x)
    torch.manual_seed(0)
    assert_equal(pipe(x), expected)

    class Noise(nn.Module):
        def forward(self, x):
            return x + torch.randn_like(x)

    model = nn.Sequential(nn.Linear(4, 4), Noise(), nn.Linear(4, 4))
    with pytest.raises(ValueError, match="random numbers other than by dropout"):
        pipeline(model, (x,), split_spec={"1": BEGINNING}, method="modules")


def test_what_a_stage_takes():
    model, blocks = family("llama")
    pipe = pipeline(
        model, (tokens(),), {"attention_mask": padded()}, split_spec={f"{blocks}.2": BEGINNING}
    )
    first, second = (inspect.signature(pipe.get_stage_module(i).forward) for i in range(2))
    assert first == inspect.signature(model.forward)
    names = list(second.parameters)
    assert names[0] == "hidden_states" and {"attention_mask", "position_ids"} <= set(names)
    hidden = pipe.get_stage_module(0)(tokens(), attention_mask=padded())
    assert isinstance(hidden, torch.Tensor) and hidden.shape == (4, 8, 32)
    with pytest.raises(TypeError, match="takes the hidden state"):
        pipe.get_stage_module(1)()
    positions = torch.arange(8).expand(4, 8) + 3
    with torch.no_grad():
        expected = model(tokens(), position_ids=positions, use_cache=False).logits
        assert_equal(pipe(tokens(), position_ids=positions), expected)
        ids = tokens()
        loss, logits = pipe(ids, labels=ids)  # the tuple of a ModelOutput's tensors
        expected = model(ids, labels=ids, use_cache=False)
        assert_equal((loss, logits), (expected.loss, expected.logits))


@pytest.mark.parametrize("kind", ["plain", "checkpointed"])
def test_a_keyword_used_between_blocks_that_the_example_did_not_have(kind):
    class Scaled(Tower):
        def forward(self, x, scale=None):
            hidden = self.inp(x)
            for layer in self.layers:
                if self.kind == "checkpointed":
                    hidden = checkpoint(layer, hidden, use_reentrant=False)
                else:
                    hidden = layer(hidden)
                if scale is not None:
                    hidden = hidden * scale
            return self.out(self.norm(hidden))

    model = seeded(Scaled, kind).double()
    x, scale = random(4, 5), random(4, 1)
    split = {"layers.1": BEGINNING, "layers.2": END}
    pipe = pipeline(model, (x,), split_spec=split, method="modules")
    for given in (scale, None):
        answers = [each(x, scale=given) for each in (pipe, model)]
        assert_equal(*answers)
        assert_equal(*[torch.autograd.grad(y.sum(), list(model.parameters())) for y in answers])


def test_inputs_by_keyword_reach_every_stage():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**SMALL)
    model = seeded(transformers.LlamaForSequenceClassification, config).eval()
    split = {"model.layers.2": BEGINNING}
    with pytest.raises(ValueError, match=r"mb_kwargs=\{'input_ids': ...\}"):  # finds the padding
        pipeline(model, (tokens(),), split_spec=split)
    pipe = pipeline(model, (), {"input_ids": tokens()}, split_spec=split)
    ids = tokens()
    ids[0, 5:] = 0
    with torch.no_grad():
        assert_equal(pipe(input_ids=ids), model(input_ids=ids, use_cache=False).logits)


def test_a_module_in_front_of_the_blocks_that_every_stage_needs():
    class Conditioned(Tower):
        def __init__(self):
            super().__init__()
            self.time = nn.Linear(1, 16)

        def forward(self, x, time):
            return super().forward(x, self.time(time))

    model, x, time = seeded(Conditioned), torch.randn(4, 5), torch.randn(4, 1)
    split = {"layers.2": BEGINNING}
    pipe = pipeline(model, (x,), {"time": time}, split_spec=split, method="modules")
    assert_equal(pipe(x, time=time), model(x, time))
    assert pipe.replicated_params == [
        {0: "time.weight", 1: "time.weight"},
        {0: "time.bias", 1: "time.bias"},
    ]
    with pytest.raises(ValueError, match="input 'time'"):
        pipeline(model, (x, time), split_spec=split, method="modules")


@pytest.mark.parametrize(
    "kind, message",
    [
        ("skip", "skip connection"),
        ("twice", "not run once each, in order"),
        ("pair", "is given 2 tensors that depend on the blocks before it"),
    ],
)
def test_what_cannot_be_split_is_refused(kind, message):
    with pytest.raises(ValueError, match=message) as error:
        pipeline(
            seeded(Tower, kind),
            (torch.randn(4, 5),),
            split_spec={"layers.2": BEGINNING},
            method="modules",
        )
    assert "can be split" in str(error.value) or "It has no ModuleList" in str(error.value)


READS = {
    "bool": lambda tensor: bool(tensor.any()),
    "tolist": lambda tensor: any(map(any, tensor.tolist())),
    "numpy": lambda tensor: tensor.numpy().any(),
}


@pytest.mark.parametrize("read", READS)
def test_a_decision_by_a_value_that_later_stages_lack_is_refused(read):
    class Masked(Tower):
        def forward(self, x):
            is_padded = READS[read](x == 0)  # not so in the example
            return super().forward(x, x.new_zeros(len(x), 1) if is_padded else None)

    model, x = seeded(Masked), torch.randn(4, 5)
    split = {"layers.2": BEGINNING}
    with pytest.raises(ValueError, match=r"needs the model's input 'x'.*give it by keyword"):
        pipeline(model, (x,), split_spec=split, method="modules")
    pipe = pipeline(model, (), {"x": x}, split_spec=split, method="modules")
    x[0, 0] = 0
    assert_equal(pipe(x=x), model(x))


def test_sizes_of_the_example_that_are_equal_by_chance_are_refused():
    class Steps(Tower):
        def __init__(self):
            super().__init__()
            self.inp = nn.Embedding(64, 16)

        def forward(self, ids):
            hidden = self.inp(ids).transpose(0, 1)
            for layer in self.layers:
                hidden = layer(hidden, torch.arange(ids.shape[1])[:, None, None])
            return self.out(self.norm(hidden))

    model, split = seeded(Steps), {"layers.2": BEGINNING}
    with pytest.raises(ValueError, match="run with the sizes of the example only"):
        pipeline(model, (tokens(4, 4),), split_spec=split, method="modules")
    by_keyword = pipeline(model, (), {"ids": tokens(4, 4)}, split_spec=split, method="modules")
    pipe = pipeline(model, (tokens(4, 5),), split_spec=split, method="modules")
    for ids in (tokens(1, 6), tokens(5, 1)):
        assert_equal(pipe(ids), model(ids))
        assert_equal(by_keyword(ids=ids), model(ids))


def test_keywords_with_which_later_stages_lack_something_are_refused():
    class Padded(Tower):
        def __init__(self):
            super().__init__()
            self.inp = nn.Embedding(64, 16)

        def forward(self, ids, mask=None, scale=None):
            mask = ids != 0 if mask is None else mask
            output = super().forward(ids, mask[..., None])
            return output if scale is None else output * scale

    model, ids = seeded(Padded), tokens()
    split, mask = {"layers.2": BEGINNING}, torch.ones(4, 8, dtype=torch.bool)
    pipe = pipeline(model, (ids,), {"mask": mask}, split_spec=split, method="modules")
    assert_equal(pipe(ids, mask=mask, scale=3), model(ids, mask, 3))
    with pytest.raises(RuntimeError, match="needs input ids, which it does not have"):
        pipe(ids)
    pipe = pipeline(model, (), {"ids": ids}, split_spec=split, method="modules")
    assert_equal(pipe(ids=ids), model(ids))


def test_calls_that_the_example_was_not_like_are_refused():
    class Optional(Tower):
        def __init__(self):
            super().__init__()
            self.extra = nn.Linear(16, 16)

        def forward(self, x, shift=None, more=False):
            hidden = self.inp(x)
            for layer in self.layers:
                hidden = layer(hidden, shift)
                hidden = self.extra(hidden) if more else hidden
            return self.out(self.norm(hidden))

    model, x, shift = seeded(Optional), torch.randn(4, 5), torch.randn(4, 1)
    split = {"layers.2": BEGINNING}
    pipe = pipeline(model, (x,), {"shift": shift}, split_spec=split, method="modules")
    with pytest.raises(TypeError, match="give it by keyword"):  # stage 1 would lack the shift
        pipe(x, shift)
    with pytest.raises(RuntimeError, match="'extra', which another stage has"):
        pipe(x, more=True)
    with pytest.raises(RuntimeError, match="sizes do not follow from the example's"):
        pipe(torch.randn(4, 2, 5))
    assert_equal(pipe(x, shift=shift), model(x, shift))
    for y, kwargs in ((x, {"more": True}), (torch.randn(4, 2, 5), {})):
        pipe = pipeline(model, (y,), kwargs, split_spec=split, method="modules")
        assert_equal(pipe(y, **kwargs), model(y, **kwargs))


@pytest.mark.filterwarnings("ignore:`isinstance.treespec")  # torch's, about its own specs
def test_stages_can_be_pickled():
    model, x = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]), torch.ones(2, 4)
    pipe = pipeline(model, (x,), split_spec={"1": BEGINNING}, method="modules")
    stage = pipe.get_stage_module(1)
    assert_equal(pickle.loads(pickle.dumps(stage))(x), stage(x))


def test_a_stage_keeps_no_other_stages_weights_alive():
    model, blocks = family("llama")
    pipe = pipeline(model, (tokens(),), split_spec={f"{blocks}.2": BEGINNING})
    stage = pipe.get_stage_module(1)
    foreign = weakref.ref(model.model.layers[0].mlp.up_proj.weight)
    own = weakref.ref(model.model.layers[3].mlp.up_proj.weight)
    del model, pipe
    gc.collect()
    assert foreign() is None and own() is not None
    assert isinstance(stage.model.embed_tokens, PassThrough)


@pytest.mark.parametrize("name", ["norm", "layers", "layers.1.fc1"])
def test_a_point_outside_of_a_list(name):
    with pytest.raises(ValueError, match=r"What can be split: 'layers.0' to 'layers.3'"):
        pipeline(
            seeded(Tower), (torch.randn(4, 5),), split_spec={name: BEGINNING}, method="modules"
        )


def test_outputs_that_only_other_stages_have_are_refused():
    model, blocks = family("llama")
    with pytest.raises(ValueError, match="output_hidden_states"):
        pipeline(
            model,
            (tokens(),),
            {"output_hidden_states": True},
            split_spec={f"{blocks}.2": BEGINNING},
        )


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["plain", "relu"])
def test_checkpointed_calls(kind, reentrant):
    class Checkpointed(Tower):
        def forward(self, x):
            hidden = self.inp(x)
            for layer in self.layers:
                hidden = checkpoint(layer, hidden, use_reentrant=reentrant)
                hidden = hidden.relu() if self.kind == "relu" else hidden
            return self.out(self.norm(hidden))

    model, x = seeded(Checkpointed, kind), torch.randn(4, 5)
    expected = copy.deepcopy(model)
    expected(x).sum().backward()
    pipe = pipeline(model, (x,), split_spec={"layers.2": BEGINNING}, method="modules")
    if reentrant:  # gradients would be wrong: such checkpoints run their block without
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            pipe(x).sum().backward()
        return
    pipe(x).sum().backward()
    for name, parameter in expected.named_parameters():
        assert_close(model.get_parameter(name).grad, parameter.grad)


def test_a_model_on_meta():
    with torch.device("meta"):
        model, x = Tower(), torch.zeros(4, 5)
    for method in ("modules", "trace"):
        pipe = pipeline(model, (x,), split_spec={"layers.2": BEGINNING}, method=method)
        held = pipe.get_stage_module(1).get_parameter("layers.3.fc1.weight")
        assert held is model.layers[3].fc1.weight
        assert leaves(pipe(x))[0].shape == (4, 3)


def test_interleaved_runs_of_one_stage_do_not_mix():
    model = seeded(Tower)
    x, y = torch.randn(4, 5), torch.randn(3, 5)
    pipe = pipeline(model, (x,), split_spec={"layers.2": BEGINNING}, method="modules")
    first, second = map(pipe.get_stage_module, range(2))
    hidden_x, hidden_y = first(x), first(y)
    out_y, out_x = second(hidden_y), second(hidden_x)
    (out_x.sum() * 2).backward(retain_graph=True)
    assert_equal((out_x, out_y), (model(x), model(y)))


# ---- "trace" ---------------------------------------------------------------------------------


def test_a_traced_split_is_torchs_and_leaves_the_model_alone():
    model, x = seeded(Tower), torch.randn(4, 5)
    before, split = snapshot(model), {"layers.2": BEGINNING}
    for _ in range(2):  # torch's own pipeline() fails the second time
        pipe = pipeline(model, (x,), split_spec=split, method="trace")
        assert isinstance(pipe, Pipe) and pipe.num_stages == 2
        assert_untouched(model, before)
        assert not any(hasattr(module, "_orig_forward") for module in model.modules())
        assert_equal(pipe(x), model(x))
    own = {id(parameter) for parameter in model.parameters()}
    assert {id(p) for i in range(2) for p in pipe.get_stage_module(i).parameters()} == own
    assert isinstance(pipe.info(), PipeInfo)
    assert isinstance(pipeline(model, (x,), split_spec=split), Pipe)  # auto


def test_split_policy_and_pipe_split():
    class Marked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = self.first(x)
            pipe_split()
            return self.second(x)

    x = torch.randn(2, 4)
    assert pipeline(Marked(), (x,)).num_stages == 2
    assert pipeline(PipeSequential(nn.Linear(4, 4), nn.Linear(4, 4)), (x,)).num_stages == 2
    annotated = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    annotate_split_points(annotated, {"1": BEGINNING})
    assert pipeline(annotated, (x,)).num_stages == 2

    def policy(graph_module):
        node = next(n for n in graph_module.graph.nodes if "linear" in n.name)
        with graph_module.graph.inserting_after(node):
            graph_module.graph.call_function(torch.ops.pippy._pipe_split.default)
        graph_module.recompile()
        return graph_module

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = pipeline(model, (x,), split_policy=policy)
    assert pipe.num_stages == 2
    assert_equal(pipe(x), model(x))
    wrapped = TrivialLossWrapper(model, F.mse_loss)
    split = {"module.1": BEGINNING}
    pipe = pipeline(wrapped, (x, x), split_spec=split)
    assert_equal(pipe(x, x), wrapped(x, x))
    modules = pipeline(wrapped, (x,), {"targets": x}, split_spec=split, method="modules")
    assert_equal(modules(x, targets=x), wrapped(x, x))
    for made in (pipe, modules):
        assert made.has_loss_and_backward is False and made.loss_spec is None


def test_a_wrong_trace_is_an_error():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.runs = nn.Linear(4, 4), nn.Linear(4, 4), 0

        def forward(self, x):
            self.runs += 1  # traced once, as a constant
            return self.second(self.first(x) * (1 + torch.compiler.is_exporting()))

    with pytest.raises(TraceError, match="do not compute what the model computes"):
        pipeline(Counting(), (torch.randn(2, 4),), split_spec={"second": BEGINNING}, method="trace")


def test_rotary_models_trace_rightly_or_not_at_all():
    """Torch 2.11 can't trace them."""
    model, blocks = family("llama")
    before = snapshot(model)
    try:
        pipe = pipeline(model, (tokens(),), split_spec={f"{blocks}.2": BEGINNING}, method="trace")
    except TraceError as raised:
        pipe, error = None, str(raised)
    if pipe is None:
        assert 'method="modules"' in error
    else:
        with torch.no_grad():
            assert_equal(pipe(tokens()), model(tokens(), use_cache=False).logits)
    assert_untouched(model, before)
    assert model.config.use_cache


def test_traced_tied_weights_are_the_models_own():
    model, blocks = family("gpt2")
    pipe = pipeline(model, (tokens(),), split_spec={f"{blocks}.2": BEGINNING}, method="trace")
    assert len(pipe.replicated_params) == 1
    own = {id(parameter) for parameter in model.parameters()}
    assert {id(p) for i in range(2) for p in pipe.get_stage_module(i).parameters()} == own
    with torch.no_grad():
        assert_equal(pipe(tokens()), model(tokens(), use_cache=False).logits)


def test_what_does_not_trace():
    class Branching(Tower):
        def forward(self, x, shift=None):
            return super().forward(x if x.sum().item() > 0 else -x, shift)

    model, x, split = seeded(Branching), torch.randn(4, 5), {"layers.2": BEGINNING}
    before = snapshot(model)
    with pytest.raises(TraceError, match='method="modules"'):
        pipeline(model, (x,), split_spec=split, method="trace")
    with pytest.raises(TraceError, match="could not trace"):
        pipeline(model, (x,))
    assert_untouched(model, before)
    with pytest.warns(UserWarning, match='split with method="modules" instead'):
        pipe = pipeline(model, (), {"x": x}, split_spec=split)
    assert isinstance(pipe, ModulePipe)
    assert_equal(pipe(x=-x), model(-x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipeline(model, (), {"x": x}, split_spec=split, method="modules")
    with pytest.raises(ValueError, match="Nor can it be traced"):
        pipeline(model, (x,), split_spec={"norm": BEGINNING})


# ---- Errors and objects ----------------------------------------------------------------------


def test_wrong_arguments():
    model, args = seeded(Tower), (torch.randn(4, 5),)
    for method in ("auto", "trace", "modules"):
        with pytest.raises(ValueError, match=r"'layers.7'.*nearest names: 'layers"):
            pipeline(model, args, split_spec={"layers.7": BEGINNING}, method=method)
    for settings in ({"mb_kwargs": 3}, {"split_spec": ["layers.2"]}, {"split_policy": "half"}):
        ((name, value),) = settings.items()
        with pytest.raises(TypeError, match=rf"{name} is a .*got {type(value).__name__}"):
            pipeline(model, args, **settings)
    with pytest.raises(ValueError, match="needs a split_spec"):
        pipeline(model, args, method="modules")


def test_a_hook_of_torchs_is_the_models_own():
    model, x = seeded(Tower), torch.randn(4, 5)
    torch.nn.utils.weight_norm(model.layers[3].fc1)
    pipe = pipeline(model, (x,), split_spec={"layers.2": BEGINNING}, method="modules")
    assert_equal(pipe(x), model(x))


def test_the_pipe_itself(capsys):
    model, x = seeded(Tower), torch.randn(4, 5)
    pipe = pipeline(model, (x,), split_spec={"layers.2": BEGINNING}, method="modules")
    for index in (-1, 2):
        with pytest.raises(ValueError, match="stages 0 to 1"):
            pipe.get_stage_module(index)
    with pytest.raises(AttributeError, match="nothing was traced"):
        pipe.split_gm  # noqa: B018
    info = pipe.info()
    assert isinstance(info, PipeInfo) and info.num_stages == 2
    assert sum(node.op == "call_module" for node in info.graph.nodes) == 2
    assert not info.has_loss_and_backward
    pipe.print_readable()
    assert "layers.0" in capsys.readouterr().out
    pipe.train()
    assert all(module.training for module in pipe.get_stage_module(0).modules())


def test_torchs_names_are_torchs_objects():
    from torch.distributed import pipelining as theirs

    of_torch = set(theirs.__all__) & set(pipelining.__all__) - {"pipeline"}
    assert {"Pipe", "PipelineStage", "SplitPoint", "pipe_split"} < of_torch
    for name in of_torch:
        assert getattr(pipelining, name) is getattr(theirs, name)


# ---- Under schedules, on two ranks -----------------------------------------------------------


def cross_entropy(output, target):
    logits = output[-1] if isinstance(output, tuple) else output
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def train_both(model, split, args, kwargs, target, schedule_class, chunks=4, method="modules"):
    """Output and losses of a scheduled step, and all gradients, against the model as a whole."""
    rows = args[0].shape[0] // chunks
    whole = copy.deepcopy(model)
    expected = leaves(whole(*args, **kwargs))[0]
    loss = cross_entropy(expected, target)
    loss.backward()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    small = {name: value[:rows] for name, value in kwargs.items()}
    pipe = pipeline(model, tuple(a[:rows] for a in args), small, split_spec=split, method=method)
    mine = range(rank, pipe.num_stages, world_size)
    stages = [pipe.build_stage(index, CPU) for index in mine]
    one = schedule_class in (ScheduleGPipe, Schedule1F1B)
    schedule = schedule_class(stages[0] if one else stages, chunks, loss_fn=cross_entropy)
    is_last = stages[-1].is_last
    if method == "trace":  # the first stage alone takes the model's keyword arguments
        kwargs = kwargs if rank == 0 else {}
    for _ in range(2):
        model.zero_grad()
        losses = []
        given = {"target": target, "losses": losses} if is_last else {}
        output = schedule.step(*(args if rank == 0 else ()), **kwargs, **given)
    if is_last:
        assert_close(output, expected, rtol=1e-6, atol=1e-6)
        assert_close(torch.stack(losses).mean(), loss)
    tied = {name for names in pipe.replicated_params for name in names.values()}
    for stage in stages:
        for name, parameter in stage.submod.named_parameters():
            if name not in tied:
                assert_close(
                    parameter.grad, whole.get_parameter(name).grad, rtol=0, atol=1e-6, msg=name
                )
    for names in pipe.replicated_params if method == "modules" else ():
        mine = {stage.stage_index: stage.submod for stage in stages}
        total = torch.zeros_like(whole.get_parameter(names[0]))
        for index, name in names.items():
            if index in mine:
                total += mine[index].get_parameter(name).grad
        dist.all_reduce(total)
        assert_close(total, whole.get_parameter(names[0]).grad, rtol=0, atol=1e-6)


# At which layers each begins a stage.
SCHEDULES = {
    ScheduleGPipe: (2,),
    Schedule1F1B: (2,),
    ScheduleInterleaved1F1B: (1, 2, 3),
    ScheduleInterleavedZeroBubble: (1, 2, 3),
}


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize(
    "schedule_class", grid_but(SCHEDULES, Schedule1F1B, ScheduleInterleaved1F1B)
)
@pytest.mark.parametrize(
    ("name", "method"),
    [("llama", "modules"), ("gpt2", "modules"), ("plain", "modules"), ("plain", "trace")],
)
def test_a_scheduled_step_equals_the_model(name, method, schedule_class):
    model, blocks = (seeded(Tower).double(), "layers") if name == "plain" else family(name)
    split = {f"{blocks}.{point}": BEGINNING for point in SCHEDULES[schedule_class]}
    args, kwargs, target = (tokens(8),), {"attention_mask": padded(8)}, tokens(8, seed=2)
    if name == "plain":
        args, kwargs, target = (random(8, 5),), {}, torch.arange(8) % 3
    train_both(model, split, args, kwargs, target, schedule_class, method=method)


@pytest.mark.ranks(2, timeout=60)
def test_a_traced_model_trains_where_a_mask_crosses():
    model, blocks = family("gpt2")
    model.config.use_cache = False
    split = {f"{blocks}.2": BEGINNING}
    args, kwargs = (tokens(8),), {"attention_mask": padded(8)}
    train_both(model, split, args, kwargs, tokens(8, seed=2), Schedule1F1B, method="trace")


@pytest.mark.ranks(2, timeout=60)
def test_stages_take_any_size():
    model, blocks = family("llama")
    rank = dist.get_rank()
    pipe = pipeline(model, (tokens(1),), split_spec={f"{blocks}.2": BEGINNING})
    for rows, length in [(4, 8), (6, 5)]:  # a new stage each: torch remembers sizes there
        stage = pipe.build_stage(rank, CPU)
        assert isinstance(stage, PipelineStage)
        schedule, ids = ScheduleGPipe(stage, 2), tokens(rows, length)
        mask = padded(rows, length)
        output = schedule.eval(*((ids,) if rank == 0 else ()), attention_mask=mask)
        if rank == 1:
            assert_close(output, model(ids, attention_mask=mask).logits, rtol=0, atol=1e-12)

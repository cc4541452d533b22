"""Attention patterns rebuilt beside any kernel, against those that eager attention returns."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close

import models
import pipelines
import stand_in_kernels
from flex_model import FlexModel, HookError, HookFunction, HookMismatchError
from tiers import grid_but

pytest.importorskip("transformers")

# Of torch and transformers, when flex_attention runs on a CPU.
pytestmark = [
    pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

LAYER = "model.layers.1.self_attn"


@pytest.fixture(autouse=True)
def flash_attn():
    with stand_in_kernels.flash_attn():
        yield


PATTERN = f"{LAYER}.attention_pattern"
TOKENS = torch.randint(64, (4, 10), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(TOKENS)
MASK[[0, 2], :3] = 0  # padded at the left
SIZES = models.SIZES | {"num_hidden_layers": 2, "head_dim": 8}
FAMILIES = {
    "Llama": {},
    "Qwen3": {},  # norms of queries and keys
    "Gemma2": {"sliding_window": 4, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 4},
    "GptOss": {
        "sliding_window": 4,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
}
FLASH = "flash_attention_2"  # a stand-in
KERNELS = {
    "Llama": ("eager", "sdpa", "flex_attention", FLASH),
    "Qwen3": ("eager", "sdpa"),
    "Gemma2": ("eager", "flex_attention", FLASH),
    "GptOss": ("eager",),  # the only one with sinks on a CPU
}


def make(family, kernel, dtype=torch.float32):
    import transformers

    config = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family])
    config._attn_implementation = "eager"
    model_class = getattr(transformers, f"{family}ForCausalLM")
    model = models.seeded(model_class, config).to(dtype).eval()
    model.config._attn_implementation = kernel  # of flash-attn also where it is not installed
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(3))
    return model


def mix(module, full, save_ctx, modules):
    """Every pattern depends on those of all rows, heads and queries, and sums to one."""
    return (full + full.flip(1) + full.flip(0) + full.mean(2, keepdim=True)) / 4


def mixed_by_hand(model, queries):
    """Make one layer compute attention with mixed patterns, in plain torch; return a list to which
    its backward appends their gradient.
    """
    import transformers

    layer = model.get_submodule(LAYER)

    def attend(module, query, key, value, mask, scaling, **others):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        pattern = torch.softmax(query @ key.mT * scaling + mask, -1)
        changed = pattern.clone()
        changed[:, :, queries] = mix(None, pattern[:, :, queries], None, None)
        if changed.requires_grad:
            changed.register_hook(gradients.append)
        return (changed @ value).transpose(1, 2).contiguous(), changed

    gradients: list[torch.Tensor] = []
    transformers.AttentionInterface.register("mixed by hand", attend)
    layer.config = copy.deepcopy(layer.config)
    layer.config._attn_implementation = "mixed by hand"
    return gradients


CASES = [
    pytest.param(family, kernel, marks=pytest.mark.grid if kernel == "flex_attention" else [])
    for family, kernels in KERNELS.items()
    for kernel in kernels
]


@pytest.mark.parametrize(("family", "kernel"), CASES)
def test_patterns_equal_eager_ones(family, kernel):
    with torch.no_grad():
        expected = make(family, "eager")(TOKENS, attention_mask=MASK, output_attentions=True)
        model, records = make(family, kernel), {}
        plain = model(TOKENS, attention_mask=MASK).logits
        with FlexModel(model, records) as flex:
            pattern = flex.attention(LAYER, heads=[1, 3], queries=[4, 9], output_name="pattern")
            flex.register_forward_hook(pattern)
            assert_close(flex(TOKENS, attention_mask=MASK).logits, plain, rtol=0, atol=0)
        assert_close(model(TOKENS, attention_mask=MASK).logits, plain, rtol=0, atol=0)
    (found,) = records["pattern"]
    wanted = expected.attentions[1][:, [1, 3]][:, :, [4, 9]]
    assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    assert [name for name, _ in model.named_modules() if name.endswith("attention_pattern")] == []
    assert model.get_submodule(LAYER).config is model.config


@pytest.mark.parametrize(
    ("kernel", "queries"),
    [
        ("sdpa", None),
        ("sdpa", "last"),
        ("eager", slice(2, 7)),
        ("eager", [8, 0]),
        pytest.param("flex_attention", [8, 0], marks=pytest.mark.slow),  # it is compiled
        (FLASH, [8, 0]),
    ],
)
def test_an_edit_replaces_the_result_of_its_queries(kernel, queries):
    chosen = slice(None) if queries is None else [-1] if queries == "last" else queries
    reference = make("Llama", "eager")
    mixed_by_hand(reference, chosen)
    with torch.no_grad():
        expected = reference(TOKENS).logits
        flex = FlexModel(make("Llama", kernel))
        flex.register_forward_hook(flex.attention(LAYER, mix, queries=queries))
        assert_close(flex(TOKENS).logits, expected, rtol=1e-5, atol=1e-5)


def test_gradients_of_patterns():
    reference = make("Llama", "eager")
    gradients = mixed_by_hand(reference, slice(None))
    reference(TOKENS).logits.square().sum().backward()
    records = {}
    model = make("Llama", "sdpa")
    flex = FlexModel(model, records)
    flex.register_forward_hook(flex.attention(LAYER, mix, record=False))
    flex.register_full_backward_pre_hook(flex.attention(LAYER, output_name="gradient"))
    flex(TOKENS).logits.square().sum().backward()
    assert_close(model.model.embed_tokens.weight.grad, reference.model.embed_tokens.weight.grad)
    assert_close(records["gradient"], gradients, rtol=1e-4, atol=1e-6)


def test_generation_with_a_cache():
    expected = {}
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    text = make("Llama", "eager").generate(
        TOKENS,
        attention_mask=MASK,
        output_attentions=True,
        return_dict_in_generate=True,
        **settings,
    )
    flex = FlexModel(make("Llama", "sdpa"), expected)
    flex.register_forward_hook(flex.attention(LAYER, queries="last", output_name="pattern"))
    assert_close(flex.generate(TOKENS, attention_mask=MASK, **settings), text.sequences)
    assert len(expected["pattern"]) == 4
    for found, step in zip(expected["pattern"], text.attentions):
        assert_close(found, step[1][:, :, -1:], rtol=1e-5, atol=1e-6)


def test_what_is_refused():
    flex = FlexModel(make("Llama", "sdpa"))
    with pytest.raises(ValueError, match=r"no module.*nearest"):
        flex.attention("model.layers.1.attn")
    with pytest.raises(TypeError, match="queries: expected an int"):
        flex.attention(LAYER, queries="first")
    flex.register_forward_hook(flex.attention(LAYER, heads=4, queries=[1]))
    with pytest.raises(IndexError, match="4 is out of range"):
        flex(TOKENS)
    flex.restore()
    flex = FlexModel(make("Llama", "sdpa"))
    flex.register_forward_hook(flex.attention(LAYER, queries=[9, -1]))
    with pytest.raises(ValueError, match="repeat an index"):
        flex(TOKENS)
    other = make("Llama", "sdpa")
    other.config._attn_implementation = "mine"
    with pytest.raises(ValueError, match="set_attn_implementation"):
        FlexModel(other).attention(LAYER)


def test_two_wraps_of_a_model():
    model = make("Llama", "sdpa")
    config = model.get_submodule(LAYER).config
    flexes = [FlexModel(model, {}) for _ in range(2)]
    for flex in flexes:
        flex.register_forward_hook(flex.attention(LAYER, queries="last"))
    flexes[0].restore()
    with torch.no_grad():
        flexes[1](TOKENS)
    assert flexes[1].output_ptr[PATTERN][0].shape == (4, 4, 1, 10)
    flexes[1].restore()
    assert model.get_submodule(LAYER).config is config


@pytest.mark.parametrize("wraps", [1, 2])
def test_other_queries_once_no_hook_is_registered(wraps):
    model = make("Llama", "sdpa").requires_grad_(False)
    first, last = (FlexModel(model, {}) for _ in range(2)) if wraps == 2 else [FlexModel(model)] * 2
    hook = first.attention(LAYER, queries="last")
    handle = first.register_forward_hook(hook, groups="off")
    with pytest.raises(ValueError, match=r"queries=None, .*computed for queries='last'"):
        last.attention(LAYER)
    handle.remove()
    last.register_forward_hook(last.attention(LAYER))
    last(TOKENS)
    assert last.output_ptr[PATTERN][0].shape == (4, 4, 10, 10)
    with pytest.raises(ValueError, match=r"queries='last', .*computed for queries=None"):
        first.register_forward_hook(hook)
    first(TOKENS)


def test_a_pattern_that_is_not_the_layers_is_refused():
    """A kernel of the model's own that scales in another way."""
    import transformers

    model = make("Llama", "sdpa")
    flex = FlexModel(model)
    flex.register_forward_hook(flex.attention(LAYER))
    sdpa = transformers.AttentionInterface._global_mapping["sdpa"]

    def sharper(module, query, *args, **kwargs):
        return sdpa(module, query * 1.2, *args, **kwargs)

    transformers.AttentionInterface.register("sdpa", sharper)
    try:
        with torch.no_grad(), pytest.raises(HookError, match="gives another result"):
            flex(TOKENS)
    finally:
        transformers.AttentionInterface.register("sdpa", sdpa)


def hooked(flex, queries):
    records = flex.output_ptr
    pattern = flex.attention(LAYER, mix, heads=[3, 0, 1], queries=queries, output_name="pattern")
    flex.register_forward_hook(pattern)
    flex.register_forward_hook(HookFunction("model.layers.0.self_attn.o_proj"))
    flex.register_full_backward_pre_hook(
        flex.attention(LAYER, queries=queries, output_name="gradient")
    )
    flex.register_full_backward_pre_hook(HookFunction("model.layers.0", output_name="upstream"))
    return records


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", grid_but(["tp", "dp"], "tp"))
@pytest.mark.parametrize(
    ("family", "kernel", "queries"),
    [
        ("Llama", "sdpa", None),
        ("Llama", "eager", [7, 2]),
        ("Llama", FLASH, [7, 2]),
        ("Qwen3", "sdpa", slice(2, 9, 3)),
    ],
)
def test_patterns_of_shards(kind, family, kernel, queries):
    with stand_in_kernels.flash_attn():
        check_patterns_of_shards(kind, family, kernel, queries)


def check_patterns_of_shards(kind, family, kernel, queries):
    rank = dist.get_rank()
    # Eager attention of padding is NaN in float64: its softmax is of float32.
    dtype, rounding = torch.float64, {"rtol": 1e-6, "atol": 1e-8}
    if kernel == "eager":
        dtype, rounding = torch.float32, {"rtol": 1e-4, "atol": 1e-6}
    model = make(family, kernel, dtype)
    whole = FlexModel(copy.deepcopy(model), {}, process_group=pipelines.alone_group())
    inputs, sizes = {"input_ids": TOKENS, "attention_mask": MASK}, {}
    expected = hooked(whole, queries)
    output = whole(**inputs).logits
    output.square().mean().backward()
    if kind == "tp":
        model = models.tensor_parallel_llama(model, init_device_mesh("cpu", (2,)))
    else:
        sizes = {"data_parallel_size": 2}
        inputs = {name: tensor.chunk(2)[rank] for name, tensor in inputs.items()}
        output = output.chunk(2)[rank]
    flex = FlexModel(model, {}, **sizes)
    found = hooked(flex, queries)
    for _ in range(2):  # the second is not followed
        logits = flex(**inputs).logits
        assert_close(logits, output, **rounding)
        logits.square().mean().backward()
        if rank == 0:
            assert_close(found, expected, **rounding)
    flex.restore()


@pytest.mark.ranks(2)
def test_other_queries_on_another_rank():
    model = models.tensor_parallel_llama(make("Llama", "sdpa"), init_device_mesh("cpu", (2,)))
    flex = FlexModel(model, timeout=20)
    queries = [1, 2 + dist.get_rank()]
    flex.register_forward_hook(flex.attention(LAYER, mix, queries=queries))
    with pytest.raises(HookMismatchError, match=r"rank 0 .*queries=\[1, 2\].*queries=\[1, 3\]"):
        flex(TOKENS)

"""The first difference of two runs: a defect in one module of a sharded copy is named there."""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import flex_model
import frameworks
from flex_model import FlexModel
from tiers import grid_but

pytest.importorskip("transformers")

FAMILIES = ("llama", "mixtral")


def local(parameter):
    """The rank's own values, also of a DTensor."""
    values = parameter.data
    return values.to_local() if hasattr(values, "to_local") else values


@contextlib.contextmanager
def kept(*parameters):
    before = [local(one).clone() for one in parameters]
    try:
        yield
    finally:
        for one, values in zip(parameters, before):
            local(one).copy_(values)


# ---- Defects: each is in one module while its context lasts, and yields the modules to name ------


@contextlib.contextmanager
def norm_epsilon(layers, rounded, at, draw):
    layer, name = layers[at], f"model.layers.{at}"
    norm_name = ("input_layernorm", "post_attention_layernorm")[draw(2)]
    norm = getattr(layer, norm_name)
    before, norm.variance_epsilon = norm.variance_epsilon, 1e-3
    yield [f"{name}.{norm_name}"]
    norm.variance_epsilon = before


@contextlib.contextmanager
def transposed_shard(layers, rounded, at, draw):
    layer, name = layers[at], f"model.layers.{at}"
    part = "qkvo"[draw(4)] + "_proj"
    weight = getattr(layer.self_attn, part).weight
    with kept(weight):
        if dist.get_rank() == 1:
            shard = local(weight)
            shard.copy_(shard.t().reshape(shard.shape).clone())
        yield [f"{name}.self_attn.{part}"]


@contextlib.contextmanager
def layer_in_bf16(layers, rounded, at, draw):
    layer, name = layers[at], f"model.layers.{at}"

    def cast(value, dtype):
        floats = torch.is_tensor(value) and value.is_floating_point()
        return value.to(dtype) if floats else value

    def before(module, args, kwargs):
        rows = {key: cast(one, torch.bfloat16) for key, one in kwargs.items()}
        rows["position_embeddings"] = tuple(
            cast(one, torch.bfloat16) for one in kwargs["position_embeddings"]
        )
        return tuple(cast(one, torch.bfloat16) for one in args), rows

    def after(module, args, output):
        return cast(output, torch.float32)

    handles = [
        rounded[at].register_forward_pre_hook(before, with_kwargs=True),
        rounded[at].register_forward_hook(after),
    ]
    layers[at] = rounded[at]
    yield [one for one, _ in layer.named_modules(prefix=name)]
    layers[at] = layer
    for handle in handles:
        handle.remove()


@contextlib.contextmanager
def wrong_rotary_base(layers, rounded, at, draw):
    layer, name = layers[at], f"model.layers.{at}"

    def before(module, args, kwargs):
        cos, _ = kwargs["position_embeddings"]
        size = cos.shape[-1] // 2
        frequencies = 20000.0 ** (-torch.arange(size) / size)
        angles = torch.arange(cos.shape[1])[:, None] * frequencies
        angles = torch.cat([angles, angles], -1).expand_as(cos)
        return args, {**kwargs, "position_embeddings": (angles.cos(), angles.sin())}

    handle = layer.self_attn.register_forward_pre_hook(before, with_kwargs=True)
    yield [f"{name}.self_attn"]
    handle.remove()


@contextlib.contextmanager
def swapped_experts(layers, rounded, at, draw):
    layer, name = layers[at], f"model.layers.{at}"
    experts = layer.mlp.experts
    with kept(experts.gate_up_proj, experts.down_proj):
        one, other = draw(4), draw(3)
        other += other >= one
        for weight in (local(experts.gate_up_proj), local(experts.down_proj)):
            weight[[one, other]] = weight[[other, one]]
        yield [f"{name}.mlp.experts"]


class Biased(TorchFunctionMode):
    def __init__(self, expert):
        super().__init__()
        self.expert = expert

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if func is F.linear:
            out = out + 0.05 * (torch.arange(out.shape[-1]) == self.expert)
        return out


@contextlib.contextmanager
def router_bias(layers, rounded, at, draw):
    layer, name = layers[at], f"model.layers.{at}"
    gate, expert = layer.mlp.gate, draw(4)
    own = gate.forward

    def forward(hidden):
        with Biased(expert):
            return own(hidden)

    gate.forward = forward
    yield [f"{name}.mlp.gate", f"{name}.mlp"]  # the block's, where tokens change their expert
    del gate.forward


DEFECTS = [
    ("llama", norm_epsilon),
    ("llama", transposed_shard),
    ("llama", layer_in_bf16),
    ("llama", wrong_rotary_base),
    ("mixtral", swapped_experts),
    ("mixtral", router_bias),
]


def loaded(family, folder, dtype=torch.float32):
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    how = {"distributed_config": DistributedConfig(tp_size=2)} if dist.is_initialized() else {}
    return AutoModelForCausalLM.from_pretrained(
        folder / family, dtype=dtype, attn_implementation="eager", **how
    ).eval()


def tokens(seed):
    return torch.randint(48, (4, 6), generator=torch.Generator().manual_seed(seed))


def prepare(folder, numbers, **settings):
    """Save the models, and the fingerprints of their unsharded runs on some tokens."""
    for family in FAMILIES:
        frameworks.huggingface_model(family).float().save_pretrained(folder / family)
        with FlexModel(loaded(family, folder)) as flex:
            for number in numbers:
                run = folder / f"{family} {number}"
                flex.fingerprint(run, tokens(number), use_cache=False, **settings)


@pytest.fixture
def few(tmp_path):
    prepare(tmp_path, range(1), tensors=True)
    return tmp_path


@pytest.fixture
def many(tmp_path, number):
    prepare(tmp_path, range(number))
    return tmp_path


def check_defects(folder, numbers, own):
    wrong = []
    for family in FAMILIES:
        model, rounded = loaded(family, folder), loaded(family, folder, torch.bfloat16)
        with FlexModel(model) as flex:
            for number in numbers:
                generator = torch.Generator().manual_seed(number)

                def draw(n, generator=generator):
                    return int(torch.randint(n, (), generator=generator))

                for _, defect in [one for one in DEFECTS if one[0] == family]:
                    with defect(
                        model.model.layers, rounded.model.layers, draw(2), draw
                    ) as culprits:
                        run = folder / f"{family} {number}"
                        first = flex_model.compare(run, flex, own=own).first
                    if first is None or not {first.name, first.module} & set(culprits):
                        wrong.append((number, defect.__name__, str(first)[:200]))
    assert not wrong, wrong


def check_clean(folder, numbers, own):
    for family in FAMILIES:
        with FlexModel(loaded(family, folder)) as flex:
            for number in numbers:
                found = flex_model.compare(folder / f"{family} {number}", flex, own=own)
                assert found.first is None and not found.unmatched, found


@pytest.mark.ranks(2, timeout=180)
@pytest.mark.parametrize("own", grid_but([False, True], False))
def test_a_defect_is_named_where_it_is(few, own):
    check_clean(few, range(1), own)
    check_defects(few, range(1), own)


@pytest.mark.slow
@pytest.mark.ranks(2, timeout=600)
@pytest.mark.parametrize("number", grid_but([2, 10], 2))
def test_defects_are_named(many, number):
    check_defects(many, range(number), own=False)  # six in each


@pytest.mark.slow
@pytest.mark.ranks(2, timeout=600)
@pytest.mark.parametrize("number", grid_but([3, 30], 3))
def test_nothing_is_named_in_clean_runs(many, number):
    check_clean(many, range(number), own=False)  # of two models

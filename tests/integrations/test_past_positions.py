"""Positions that count in the sequence, where a cache holds those before the call."""

import threading

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import frameworks
import models
from flex_model import FlexModel, HookError, HookFunction, HookMismatchError, Select, editing

transformers = pytest.importorskip("transformers")

LENGTH, NEW = 6, 4
SETTINGS = {"max_new_tokens": NEW, "do_sample": False}
POSITIONS = [2, 5, 7, 8, 20]  # of the prompt, of what is generated, and of what never comes


def llama():
    return models.llama(pad_token_id=0, eos_token_id=None)


def tensor_parallel():
    return models.tensor_parallel_llama(llama(), models.mesh(1, 2)["tp"])


def prompts(num_rows=4):
    return torch.randint(1, 64, (num_rows, LENGTH), generator=torch.Generator().manual_seed(1))


def mixed(module, part, save_ctx, modules):
    """An edit of the positions that mixes units."""
    mixer = torch.randn(32, 32, generator=torch.Generator().manual_seed(2), dtype=part.dtype)
    return part @ mixer / 4


def by_select(positions):
    select = Select(positions=positions, of="sequence")
    return HookFunction("model.layers.0", editing_function=mixed, select=select)


def ready(positions):
    direction = torch.randn(32, generator=torch.Generator().manual_seed(3))
    return editing.steer(direction, 4.0, positions=positions, of="sequence").at("model.layers.0")


def expected(hook, tokens, positions):
    """Tokens of the unsharded model, computed anew for each token under torch's hooks."""
    model = llama()

    def edit(module, args, output):
        hidden = output[0] if isinstance(output, tuple) else output
        chosen = [one for one in positions if one < hidden.shape[1]]
        hidden = hidden.clone()
        if hook is ready:
            direction = torch.randn(32, generator=torch.Generator().manual_seed(3))
            hidden[:, chosen] += 4.0 * direction.to(hidden)
        else:
            hidden[:, chosen] = mixed(None, hidden[:, chosen], None, None)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    model.model.layers[0].register_forward_hook(edit)
    for _ in range(NEW):
        with torch.no_grad():
            logits = model(tokens, use_cache=False).logits[:, -1]
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], 1)
    return tokens


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("hook", [by_select, ready])
def test_positions_of_the_sequence_are_edited_in_the_call_that_has_them(hook, cache):
    records = {}
    with FlexModel(llama(), records) as flex:
        flex.register_forward_hook(hook(POSITIONS))
        tokens = flex.generate(prompts(), **SETTINGS, cache_implementation=cache)
    assert torch.equal(tokens, expected(hook, prompts(), POSITIONS))
    assert not torch.equal(tokens, expected(hook, prompts(), []))


def test_records_have_the_positions_of_each_call():
    whole, parts = {}, {}
    for records, settings in ((whole, {}), (parts, {"positions": slice(4, 8), "of": "sequence"})):
        with FlexModel(llama(), records) as flex:
            select = Select(**settings) if settings else None
            flex.register_forward_hook(HookFunction("model.layers.0", select=select))
            flex.generate(prompts(), **SETTINGS)
    assert [one.shape[1] for one in parts["model.layers.0"]] == [2, 1, 1, 0]
    every = torch.cat(whole["model.layers.0"], 1)
    assert torch.equal(torch.cat(parts["model.layers.0"], 1), every[:, 4:8])


def gradients(hook, recomputes):
    model = llama()
    if recomputes:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    with FlexModel(model) as flex:
        flex.register_forward_hook(hook)
        logits = flex(prompts(), use_cache=False).logits
        logits.square().sum().backward()
    return [logits.detach(), *(one.grad for one in model.parameters())]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
@pytest.mark.parametrize("recomputes", [False, True])
def test_without_a_cache_they_are_positions_of_the_call(recomputes):
    select = Select(positions=[2, 5])
    in_call = HookFunction("model.layers.0", editing_function=mixed, select=select)
    found = gradients(by_select(POSITIONS), recomputes)
    torch.testing.assert_close(found, gradients(in_call, recomputes))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("hook", [by_select, ready])
@pytest.mark.parametrize("edit_on", ["all", "rank0"])
def test_on_tensor_parallel_ranks(hook, edit_on):
    records = {}
    with FlexModel(tensor_parallel(), records, edit_on=edit_on) as flex:
        flex.register_forward_hook(hook(POSITIONS))
        head = Select(positions=slice(4, 8), units=[3, 20], of="sequence")
        flex.register_forward_hook(HookFunction("model.layers.1.self_attn.q_proj", select=head))
        tokens = flex.generate(prompts(), **SETTINGS)
    assert torch.equal(tokens, expected(hook, prompts(), POSITIONS))
    if frameworks.rank() == 0:
        shapes = [tuple(one.shape) for one in records["model.layers.1.self_attn.q_proj"]]
        assert shapes == [(4, 2, 2), (4, 1, 2), (4, 1, 2), (4, 0, 2)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("edit_on", ["all", "rank0"])
def test_gradients_on_tensor_parallel_ranks(edit_on):
    """Of an edit that mixes the units of all ranks."""
    site, found = "model.layers.1.self_attn.q_proj", []

    def in_torch(module, args, output):
        edited = output.clone()
        edited[:, [2, 5]] = mixed(None, output[:, [2, 5]], None, None)
        return edited

    for is_sharded in (False, True):
        model = tensor_parallel() if is_sharded else llama()
        embeds = model.get_input_embeddings()(prompts()).detach().requires_grad_()
        flex = FlexModel(model, edit_on=edit_on) if is_sharded else None
        if flex is None:
            model.get_submodule(site).register_forward_hook(in_torch)
        else:
            select = Select(positions=POSITIONS, of="sequence")
            flex.register_forward_hook(HookFunction(site, editing_function=mixed, select=select))
        logits = (flex or model)(inputs_embeds=embeds, use_cache=False).logits
        logits.square().sum().backward()
        of_weight = model.get_submodule(site).weight.grad
        of_weight = of_weight.full_tensor() if is_sharded else of_weight
        found.append([logits.detach(), embeds.grad, of_weight])
        if flex is not None:
            flex.restore()
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("hook", [by_select, ready])
def test_on_data_parallel_ranks(hook):
    rows = prompts().chunk(2)[frameworks.rank()]
    with FlexModel(DistributedDataParallel(llama())) as flex:
        flex.register_forward_hook(hook(POSITIONS))
        tokens = flex.generate(rows, **SETTINGS)
    assert torch.equal(tokens, expected(hook, rows, POSITIONS))


def test_what_can_t_be_counted_is_an_error():
    with pytest.raises(ValueError, match="count from the first token"):
        Select(positions="last", of="sequence")
    with pytest.raises(ValueError, match="needs positions="):
        Select(units=3, of="sequence")
    with pytest.raises(ValueError, match="expected 'call' or 'sequence'"):
        Select(positions=3, of="prompt")
    with FlexModel(llama()) as flex:
        hook = HookFunction("model.layers.0", select=Select(positions=3, of="sequence"))
        with pytest.raises(ValueError, match="can't count positions of the sequence"):
            flex.register_full_backward_hook(hook)
        flex.register_full_backward_hook(
            HookFunction("model.layers.1", select=Select(positions=3))
        ).remove()
        flex.register_forward_hook(hook)
        cache = flex(prompts()).past_key_values
        with pytest.raises(HookError, match=r"a cache and gradients; run it under torch.no_grad"):
            flex(prompts()[:, :1], past_key_values=cache)
        with torch.no_grad():
            flex(prompts(), past_key_values=flex(prompts()).past_key_values)
    with FlexModel(llama()) as flex, torch.no_grad():
        select = Select(positions=0, of="sequence")
        hook = flex.register_forward_hook(HookFunction("lm_head", select=select))
        with pytest.raises(ValueError, match="the tensor has 1, and the forward 6"):
            flex.generate(prompts(), max_new_tokens=1)
        hook.remove()
        flex.register_forward_hook(HookFunction("lm_head", select=Select(positions="last")))
        flex.generate(prompts(), max_new_tokens=1)
    with FlexModel(nn.Sequential(nn.Identity())) as flex:
        select = Select(positions=1, of="sequence")
        hook = flex.register_forward_hook(HookFunction("0", select=select))
        with pytest.raises(HookError, match="is not a model of transformers"):
            flex(torch.zeros(2, 3, 4))
        hook.remove()
        flex.register_forward_hook(HookFunction("0", select=Select(positions="last")))
        flex(torch.zeros(2, 3, 4))


@pytest.mark.ranks(2)
def test_data_parallel_ranks_at_other_places_are_an_error():
    model = llama()
    rank = frameworks.rank()
    with torch.no_grad():
        cache = model(prompts()[:2, : 3 + rank], use_cache=True).past_key_values
        flex = FlexModel(DistributedDataParallel(model))
        flex.register_forward_hook(ready(POSITIONS))
        with pytest.raises(HookMismatchError, match="the start of a forward"):
            flex(prompts()[:2, :1], past_key_values=cache)
        flex.restore()


def of_sequence(positions, **names):
    select = Select(positions=positions, of="sequence")
    return HookFunction("model.layers.0", select=select, **names)


def lengths(records):
    return [part.shape[1] for part in records["model.layers.0"]]


@torch.no_grad()
def test_a_teacher_in_an_editing_function_has_positions_of_its_own():
    """Also where the student holds it as a module: a call of its whole input has no past."""
    student, teacher = llama(), llama()
    student.teacher, tokens, seen = teacher, prompts(2), []
    with FlexModel(teacher, records := {}) as flex_teacher, FlexModel(student, {}) as flex:
        flex_teacher.register_forward_hook(of_sequence([0, 1, LENGTH + 1]))

        def edit(module, full, save_ctx, modules):
            flex_teacher(tokens[:, : full.shape[1]])
            seen.append(lengths(records))
            return full

        select = Select(positions=slice(0, 100), of="sequence")
        flex.register_forward_hook(HookFunction("model.layers.1", None, edit, select=select))
        flex.generate(tokens, **SETTINGS)
    assert seen == [[2]] + [[1]] * (NEW - 1)


@torch.no_grad()
def test_logits_of_a_longer_prompt():
    """A prompt of one token has the logits of all of its positions, a longer one of the last."""
    with FlexModel(llama()) as flex:
        select = Select(positions=[0], of="sequence")
        flex.register_forward_hook(HookFunction("lm_head", select=select))
        flex.generate(prompts(1)[:, :1], **SETTINGS)
        with pytest.raises(ValueError, match=rf"the tensor has 1, and the forward {LENGTH}"):
            flex.generate(prompts(1), **SETTINGS)


@torch.no_grad()
def test_a_model_whose_cache_holds_no_positions_generates_with_other_hooks():
    """Wrong before: once any selection had counted, no wrapped Mamba generated."""
    Select(positions=[0], of="sequence")
    config = transformers.MambaConfig(
        vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=2, eos_token_id=None
    )
    model, tokens = transformers.MambaForCausalLM(config).eval(), prompts(2)
    expected = model.generate(tokens, **SETTINGS)
    with FlexModel(model, records := {}) as flex:
        flex.register_forward_hook(HookFunction("backbone.layers.1"))
        assert torch.equal(flex.generate(tokens, **SETTINGS), expected)
        assert len(records["backbone.layers.1"]) == NEW
        select = Select(positions=[LENGTH], of="sequence")
        flex.register_forward_hook(HookFunction("backbone.layers.0", select=select))
        with pytest.raises(HookError, match=r"holds states, not positions.*pass use_cache=False"):
            flex.generate(tokens, **SETTINGS)
        with flex.active([]):
            assert torch.equal(flex.generate(tokens, **SETTINGS), expected)
        flex.generate(tokens, **SETTINGS, use_cache=False)
    assert [part.shape[1] for part in records["backbone.layers.0"]] == [0, 1, 1, 1]


@torch.no_grad()
def test_a_cache_whose_first_layer_holds_no_positions():
    """Wrong before, silently: the length of a MiniMax's cache was that of its linear layer 0."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    counts = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    config = transformers.MiniMaxConfig(**sizes, **counts, **layers, eos_token_id=None)
    model = transformers.MiniMaxForCausalLM(config).eval()
    with FlexModel(model, records := {}) as flex:
        flex.register_forward_hook(of_sequence(slice(LENGTH - 1, LENGTH + 2)))
        flex.generate(prompts(2), **SETTINGS)
        assert lengths(records) == [1, 1, 1, 0]
        cache = flex(prompts(2)).past_key_values
        cache.update(*torch.zeros(2, 2, 2, 1, 8), layer_idx=2)  # as that of a cross attention
        with pytest.raises(HookError, match=r"holds states, not positions"):
            flex(prompts(2)[:, :1], None, None, cache)


@torch.no_grad()
def test_a_part_that_generates_is_wrapped_itself():
    """As BLIP-2 calls its language model's ``generate``."""
    outer, select = nn.ModuleDict({"language_model": llama()}), of_sequence([LENGTH]).select
    for model, name in (outer, "language_model.model"), (outer["language_model"], "model"):
        with FlexModel(model, records := {}) as flex:
            flex.register_forward_hook(
                HookFunction(f"{name}.layers.0", output_name="model.layers.0", select=select)
            )
            with flex.active():
                outer["language_model"].generate(prompts(2), **SETTINGS)
        assert lengths(records) == [0, 1, 0, 0]


class Chat(nn.Module):
    """Keeps its cache between turns."""

    def __init__(self):
        super().__init__()
        self.lm = llama()
        self.cache = transformers.DynamicCache(config=self.lm.config)

    def forward(self, tokens):
        return self.lm(tokens, past_key_values=self.cache).logits


@torch.no_grad()
def test_a_module_that_keeps_the_cache_is_refused():
    """Wrong before, silently: each turn began at position 0."""
    chat, hook = Chat(), of_sequence([0])
    with FlexModel(chat) as flex:
        flex.register_forward_hook(HookFunction("lm.model.layers.0", select=hook.select))
        with pytest.raises(HookError, match=r"Chat is not a model of transformers; wrap the part"):
            flex(prompts(2))
    chat = Chat()
    with FlexModel(chat.lm, records := {}) as flex:
        flex.register_forward_hook(hook)
        with flex.active():
            for turn in prompts(2).chunk(2, 1):
                chat(turn)
    assert lengths(records) == [1, 0]


@torch.no_grad()
def test_two_models_over_one_have_the_positions_of_its_forward():
    model, tokens, others = llama(), prompts(2), {}
    with FlexModel(model, records := {}) as flex, FlexModel(model, others) as other:
        other.register_forward_hook(of_sequence([LENGTH]))
        flex.register_forward_hook(of_sequence([LENGTH]))
        flex.register_forward_pre_hook(of_sequence([LENGTH + 1], output_name="later"))
        with other.active(), flex.active():
            model.generate(tokens, max_new_tokens=3, do_sample=False)
    assert lengths(records) == lengths(others) == [0, 1, 0]
    assert [part.shape[1] for part in records["later"]] == [0, 0, 1]


def test_two_threads_have_positions_of_their_own():
    found = {}

    def generate(name, length):
        with torch.no_grad(), FlexModel(llama(), records := {}) as flex:
            flex.register_forward_hook(of_sequence([length]))
            both.wait()
            flex.generate(prompts(2)[:, :length], max_new_tokens=3, do_sample=False)
            found[name] = lengths(records)

    both = threading.Barrier(2)
    threads = [threading.Thread(target=generate, args=(n, n)) for n in (3, LENGTH)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {3: [0, 1, 0], LENGTH: [0, 1, 0]}


@pytest.mark.ranks(2)
def test_lengths_of_data_parallel_ranks_may_differ_where_no_hook_counts():
    """Wrong before: once any selection had counted, ranks compared lengths in every forward."""
    Select(positions=[0], of="sequence")
    model, records = nn.Sequential(nn.Identity(), Pooled()), {}
    rank = torch.distributed.get_rank()
    x = torch.arange(2.0 * (5 + rank)).view(2, -1)
    with FlexModel(model, records, data_parallel_size=2, output_ranks="all") as flex:
        flex.register_forward_hook(HookFunction("1"))
        flex(x)
    expected = [torch.arange(2.0 * length).view(2, -1).mean(1, keepdim=True) for length in (5, 6)]
    torch.testing.assert_close(records["1"], [torch.cat(expected)])


class Pooled(nn.Module):
    def forward(self, x):
        return x.mean(1, keepdim=True)

"""Settled edits: after its first call the dispatcher calls a function by itself."""

import concurrent.futures
import contextlib
import itertools
import random
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import models
from flex_model import FlexModel, HookError, HookFunction, HookMismatchError, Select, sequential
from flex_model.integrations import torch_private

NUM_LAYERS = 3


class Layer(nn.Module):
    """Writes in place to the tensor that its hook has replaced, as residual streams do."""

    def __init__(self, transposes):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.hooked = nn.Identity()
        self.transposes = transposes

    def forward(self, x):
        hidden = self.linear(x)
        hidden = self.hooked(hidden.transpose(0, 1) if self.transposes else hidden)
        hidden = (hidden.transpose(0, 1) if self.transposes else hidden) * 1
        return hidden.add_(1)


class Model(nn.Module):
    def __init__(self, transposes, recomputes):
        super().__init__()
        self.layers = nn.ModuleList(Layer(transposes) for _ in range(NUM_LAYERS))
        self.double()
        self.recomputes = recomputes

    def forward(self, x):
        for layer in self.layers:
            if self.recomputes and torch.is_grad_enabled():
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return x


def same(module, full, save_ctx, modules):
    return full


def nothing(module, full, save_ctx, modules):
    return None


def scaled(module, full, save_ctx, modules):
    return full * 1.5


def in_place(module, full, save_ctx, modules):
    full[..., 0] += 1


def turned(module, full, save_ctx, modules):
    return full.flip(0).mT.contiguous().mT


def counted(module, full, save_ctx, modules):
    save_ctx.calls = getattr(save_ctx, "calls", 0) + 1
    return full + save_ctx.calls


def keeps_the_tensor(module, full, save_ctx, modules):
    save_ctx.kept = [*getattr(save_ctx, "kept", []), full]
    return full.sin()


def keeps_the_result(module, full, save_ctx, modules):
    result = full.cos()
    save_ctx.kept = [*getattr(save_ctx, "kept", []), result.detach()]
    return result


def returns_what_lives_on(module, full, save_ctx, modules):
    kept, key = save_ctx.__dict__.setdefault("directions", {}), (full.shape, full.dtype)
    if key not in kept:
        kept[key] = torch.ones(2, *full.shape, dtype=full.dtype)
    return kept[key][1]


def draws(module, full, save_ctx, modules):
    return full + torch.rand(full.shape, dtype=full.dtype)


def trains(module, full, save_ctx, modules):
    return modules["probe"](full)


EDITS = (
    same, nothing, scaled, in_place, turned, counted, keeps_the_tensor, keeps_the_result,
    returns_what_lives_on, draws, trains,
)  # fmt: skip
MODES = (torch.no_grad, torch.inference_mode, torch.enable_grad)


def run(program, num_modes):
    """Run a program twice; return all that it makes. ``num_modes``: the number of dispatch modes
    that the dispatcher sees; with one, it leaves an edit to Python.
    """
    edits, mode, recomputes, transposes, seed = program
    torch.manual_seed(seed)
    model, probe = Model(transposes, recomputes), nn.Linear(4, 4).double()
    records = {}
    with mock.patch.object(torch_private.FOR_DISPATCHER, "num_dispatch_modes", num_modes):
        flex = FlexModel(model, records)
    flex.register_trainable_module("probe", probe)
    for name, edit in edits:
        shape = random.Random(seed).choice([None, (None, 3, 4)])
        flex.register_forward_hook(HookFunction(name, shape, edit))
    made, x = [], torch.randn(3, 3, 4, dtype=torch.float64)
    for _ in range(2):
        with mode():
            out = flex(x)
        if out.requires_grad:
            out.square().sum().backward()
        made += [out, *(one for name in records for one in records[name])]
        made += getattr(flex.save_ctx, "kept", [])
    made += [p.grad for p in [*model.parameters(), *probe.parameters()] if p.grad is not None]
    flex.restore()
    return [tensor.detach().clone() for tensor in made]


@pytest.mark.parametrize("num_programs", [100, pytest.param(1000, marks=pytest.mark.grid)])
def test_any_choice_of_path_for_each_call_gives_the_same_numbers(num_programs):
    chosen = random.Random(0)
    names = [f"layers.{i}.hooked" for i in range(NUM_LAYERS)]
    for seed in range(num_programs):
        edits = [
            (name, chosen.choice(EDITS)) for name in names for _ in range(chosen.randint(0, 1))
        ]
        program = (
            edits, chosen.choice(MODES), chosen.random() < 0.3, chosen.random() < 0.3, seed,
        )  # fmt: skip
        assert_paths_are_alike(run, program, chosen)


def assert_paths_are_alike(run, program, chosen):
    """The dispatcher's results, and those of paths chosen call by call, are those of Python."""
    by_python = run(program, lambda: 1)
    for num_modes in (lambda: 0, lambda: chosen.randint(0, 1)):
        result = run(program, num_modes)
        assert len(result) == len(by_python), program
        for one, other in zip(result, by_python):
            assert torch.equal(one, other), program


def wrapped(edit, **settings):
    model, records = nn.Sequential(nn.Identity(), nn.Identity()), {}
    flex = FlexModel(model, records)
    for name in ("0", "1"):
        flex.register_forward_hook(HookFunction(name, None, edit, **settings))
    return flex, records


@contextlib.contextmanager
def never_by_python(flex):
    with mock.patch.object(
        type(flex._runner.core.executor.function), "run", side_effect=AssertionError
    ) as run_by_python:
        yield run_by_python


@pytest.mark.parametrize("mode", MODES)
def test_a_settled_edit_is_called_by_the_dispatcher(mode):
    flex, _ = wrapped(scaled)
    with mode():
        with never_by_python(flex) as run_by_python, pytest.raises(HookError):
            flex(torch.ones(2))  # the first call is Python's
        assert run_by_python.called
        flex(torch.ones(2))
        with never_by_python(flex):
            assert flex(torch.ones(2)).tolist() == [2.25, 2.25]


@pytest.mark.parametrize("edit", [same, nothing])
@pytest.mark.parametrize("mode", MODES)
def test_the_model_goes_on_with_its_own_tensor_where_none_was_written(mode, edit):
    """A copy of an inference tensor has another version than other copies."""
    flex, records = wrapped(edit)
    with mode():
        x = torch.ones(2)
        assert all(flex(x) is x for _ in range(3))
    assert records["0"][0] is not x


def test_a_settled_edit_of_a_sequential_run_has_the_batches_own_save_ctx():
    flex, _ = wrapped(counted)
    x = torch.zeros(2)
    with torch.no_grad():
        assert [flex(x)[0].item() for _ in range(2)] == [1 + 2, 3 + 4]
        found = sequential.run(flex, [x, x], targets=["1"], window=2)
        assert [out[0].item() for out in found] == [5 + 6, 5 + 6]
        assert flex(x)[0].item() == 5 + 6


class Later:
    """Begins to draw in its third call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, module, full, save_ctx, modules):
        self.calls += 1
        return full + torch.rand(2) if self.calls > 2 else full


@pytest.mark.parametrize("edit", [same, scaled])
def test_a_settled_edit_sees_tensors_of_torch_func(edit):
    torch.manual_seed(0)
    model, x = Model(False, False), torch.randn(3, 4, dtype=torch.float64)
    ones = torch.ones_like(x)

    def results(run):
        gradient = torch.func.grad(lambda x: run(x).square().sum())(x)
        tangent = torch.func.jvp(run, (x,), (ones,))[1]
        return gradient, tangent, torch.func.vmap(lambda row: run(row[None])[0])(x)

    for layer in model.layers:
        handle = layer.hooked.register_forward_hook(lambda m, args, x: edit(m, x * 1, None, None))
        layer.handle = handle
    expected = results(model)
    for layer in model.layers:
        layer.handle.remove()
    with FlexModel(model) as flex, torch.no_grad():
        for i in range(NUM_LAYERS):
            hook = HookFunction(f"layers.{i}.hooked", editing_function=edit, record=False)
            flex.register_forward_hook(hook)
        for _ in range(3):
            flex(x)
        with torch.enable_grad():
            torch.testing.assert_close(results(flex), expected)


@pytest.mark.parametrize("mode", MODES)
def test_a_function_that_begins_to_draw_late_is_an_error(mode):
    flex, _ = wrapped(Later())
    with mode():
        flex(torch.zeros(2))
        with pytest.raises(HookError, match=r"draws random numbers.*draws=True.*torch\.Generator"):
            flex(torch.zeros(2))


def test_a_draw_by_another_thread_is_named_in_the_error():
    """It changes the one generator that both have."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:

        def waits(module, full, save_ctx, modules):
            pool.submit(other).result()
            return full * 1.5

        other = bool
        flex, _ = wrapped(waits)
        flex(torch.zeros(2))
        other = partial(torch.rand, 1)
        match = r"another thread of this process drew.*generator of its own \(torch\.Generator\(\)"
        with pytest.raises(HookError, match=match):
            flex(torch.zeros(2))
        other = partial(torch.rand, 1, generator=torch.Generator())
        flex(torch.zeros(2))


def test_a_function_that_says_so_may_draw_late():
    drawn = []
    for _ in range(2):
        torch.manual_seed(7)
        flex, _ = wrapped(Later(), draws=True)
        flex(torch.zeros(2))
        drawn.append(flex(torch.zeros(2)))
        torch.rand(3)
    assert drawn[0].abs().sum() > 0
    assert torch.equal(*drawn)


def test_another_function_may_draw_when_it_replaces_one_that_does_not():
    flex, _ = wrapped(scaled)
    flex(torch.zeros(2))
    function = next(iter(flex.get_group_hook_functions("all")))
    function.editing_function = draws
    assert flex(torch.zeros(2)).abs().sum() > 0
    function.editing_function = None
    assert flex(torch.zeros(2)).abs().sum() == 0


def refusals():
    def raises(module, full, save_ctx, modules):
        raise KeyError("missing")

    def of_another_shape(module, full, save_ctx, modules):
        return full[:1]

    def of_another_type(module, full, save_ctx, modules):
        return 3

    def resized(module, full, save_ctx, modules):
        full.resize_(1)

    return raises, of_another_shape, of_another_type, resized


@pytest.mark.parametrize("wrong", refusals())
@torch.no_grad()
def test_errors_are_those_of_the_first_call(wrong):
    messages = []
    for num_right in (0, 3):
        calls = iter(range(9))

        def edit(*args, calls=calls, num_right=num_right):
            return None if next(calls) < num_right else wrong(*args)

        flex, records = wrapped(edit)
        with pytest.raises((HookError, TypeError, ValueError)) as raised:
            flex(torch.ones(2)), flex(torch.ones(2)), flex(torch.ones(2))
        messages.append((type(raised.value), str(raised.value).replace("'1'", "'0'")))
        assert flex._runner.core.communicator.edit_of == ""
        assert all(len(found) <= 1 for found in records.values())
    assert messages[0] == messages[1]


@torch.no_grad()
def test_a_settled_function_must_not_run_the_model():
    def runs_a_part(module, full, save_ctx, modules):
        save_ctx.calls = getattr(save_ctx, "calls", 0) + 1
        return flex.module[0](full) if save_ctx.calls > 3 else full

    flex, _ = wrapped(runs_a_part)
    flex(torch.ones(2))
    with pytest.raises(HookError, match="is run inside an editing function"):
        flex(torch.ones(2))


@torch.no_grad()
def test_another_shape_than_expected_is_an_error_in_any_call():
    flex = FlexModel(nn.Sequential(nn.Identity()), {})
    flex.register_forward_hook(HookFunction("0", (None, 2)))
    for rows in (1, 2, 3):
        flex(torch.ones(rows, 2))
    for other in ((1, 3), (2,), (1, 1, 2)):
        with pytest.raises(ValueError, match="expected"):
            flex(torch.ones(other))


@pytest.mark.ranks(2)
def test_an_edit_that_keeps_nothing_changes_nothing_in_later_calls_either():
    """A reference of our own to the tensor counted as the function's."""
    flex = FlexModel(models.mlp(), data_parallel_size=2)
    flex.register_forward_hook(HookFunction("fc1", None, nothing))
    rows = models.random(4, 6).chunk(2)[dist.get_rank()]
    with mock.patch.object(type(flex._core.communicator), "note_edit") as noted:
        for _ in range(3):
            flex(rows).sum().backward()
    assert noted.call_args_list == [mock.call("")] * 3
    flex.restore()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("drawing", [(0, 1), (1,)])
def test_a_late_draw_is_an_error_on_every_rank(drawing):
    def edit(module, full, save_ctx, modules):
        save_ctx.calls = getattr(save_ctx, "calls", 0) + 1
        is_late = save_ctx.calls > 2 and dist.get_rank() in drawing
        return full + torch.rand_like(full) if is_late else full * 2

    with FlexModel(models.mlp(), data_parallel_size=2, timeout=20) as flex:
        flex.register_forward_hook(HookFunction("fc1", None, edit))
        rows = models.random(4, 6).chunk(2)[dist.get_rank()]
        flex(rows)
        flex(rows)
        with pytest.raises(HookError, match=r"fc1.*draws random numbers.*draws=True"):
            flex(rows)


# ---- On several ranks: the header and the shards of a settled edit travel in one round -----------


SELECTIONS = (None, Select(units=[5, 0, 2]), Select(rows=slice(1, 3), dtype=torch.float32))


def run_on_ranks(program, num_modes):
    """``run``, of a sharded model; also on ranks that differ in ``num_modes``."""
    edits, mode, how, output_ranks, seed = program
    torch.manual_seed(seed)
    parallelism, records = models.TWO_RANKS[how], {}
    with mock.patch.object(torch_private.FOR_DISPATCHER, "num_dispatch_modes", num_modes):
        flex = FlexModel(
            parallelism.shard(models.mlp()),
            records,
            output_ranks=output_ranks,
            timeout=60,
            **parallelism.sizes,
        )
    for name, edit, select, records_it in edits:
        flex.register_forward_hook(HookFunction(name, None, edit, select=select, record=records_it))
    made = []
    for step in range(3):
        with mode():
            out = flex(parallelism.my_rows(models.random(4, 6, seed=seed % 7)))
        if out.requires_grad:
            (out.square().sum() * (step + 1)).backward()
        made += [out, *(one for name in records for one in records[name])]
        made += getattr(flex.save_ctx, "kept", [])
    made += [p.grad for p in flex.module.parameters() if p.grad is not None]
    flex.restore()
    return [tensor.detach().clone() for tensor in made]


@pytest.mark.ranks(2, timeout=600)
@pytest.mark.parametrize("num_programs", [12, pytest.param(500, marks=pytest.mark.grid)])
def test_any_choice_of_path_on_each_rank_gives_the_same_numbers(num_programs):
    chosen, of_rank = random.Random(0), random.Random(dist.get_rank())
    of_any_shape = [edit for edit in EDITS if edit is not trains]
    for seed in range(num_programs):
        edits = [
            (
                name, chosen.choice(of_any_shape), chosen.choice(SELECTIONS), chosen.random() < 0.7,
            )
            for name in ("inp", "fc1", "act", "fc2") for _ in range(chosen.randint(0, 1))
        ]  # fmt: skip
        how, ranks = chosen.choice(("tp", "dp", "dtensor")), chosen.choice(("rank0", "all"))
        program = (edits, chosen.choice(MODES), how, ranks, seed)
        assert_paths_are_alike(run_on_ranks, program, of_rank)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["fc1", "fc2"])
def test_elements_that_are_only_read_in_another_dtype_are_not_rounded(name, mode):
    parallelism, x = models.TWO_RANKS["tp"], models.random(4, 6)
    with FlexModel(parallelism.shard(models.mlp()), tensor_parallel_size=2) as flex, mode():
        expected = flex(x)
        flex.register_forward_hook(
            HookFunction(name, None, same, select=Select(dtype=torch.float32))
        )
        assert all(torch.equal(flex(x), expected) for _ in range(3))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["fc1", "fc2"])  # one is sharded along tp, the other is not
@pytest.mark.parametrize("settings", [{}, {"expected_shape": (None, None)}])
def test_ranks_call_a_settled_edit_without_python(name, settings):
    parallelism, records = models.TWO_RANKS["tp"], {}
    x, oracle = models.random(4, 6), models.mlp()
    oracle.get_submodule(name).register_forward_hook(lambda m, args, out: out * 1.5)
    sharded = parallelism.shard(models.mlp())
    with FlexModel(sharded, records, tensor_parallel_size=2) as flex, torch.no_grad():
        flex.register_forward_hook(HookFunction(name, editing_function=scaled, **settings))
        flex(x), flex(x)
        with never_by_python(flex):
            torch.testing.assert_close(flex(x + 1), oracle(x + 1))
        assert [len(found) for found in records.values()] == [1] * (dist.get_rank() == 0)
        torch.testing.assert_close(flex(x[:2]), oracle(x[:2]))  # another key


@contextlib.contextmanager
def on_two_ranks(of_fc1):
    """A FlexModel with two edits, and its input."""
    sharded = models.TWO_RANKS["tp"].shard(models.mlp())
    with FlexModel(sharded, tensor_parallel_size=2, timeout=20) as flex, torch.no_grad():
        flex.register_forward_hook(HookFunction("fc1", None, of_fc1))
        flex.register_forward_hook(HookFunction("act", None, scaled))
        yield flex, models.random(4, 6)


@pytest.mark.ranks(2)
def test_ranks_that_differ_in_a_settled_call_raise_before_its_edit_is_used():
    with on_two_ranks(scaled) as (flex, x):
        flex(x), flex(x)
        used = []
        flex.module.act.register_forward_hook(lambda m, args, out: used.append(out))

        def skips(module, args, output):  # one rank reaches another hook's call
            if dist.get_rank() == 1:
                flex.module.act(output)
                used.clear()

        flex.module.inp.register_forward_hook(skips)
        with pytest.raises(HookMismatchError, match=r"different places.*(fc1.*act|act.*fc1)"):
            flex(x)
        assert not used


@pytest.mark.ranks(2)
@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1)])
def test_a_settled_function_that_raises_on_some_ranks_is_an_error_on_all(failing):
    def edit(module, full, save_ctx, modules):
        save_ctx.calls = getattr(save_ctx, "calls", 0) + 1
        if save_ctx.calls == 4 and dist.get_rank() in failing:
            raise KeyError("missing")
        return full * 2

    with on_two_ranks(edit) as (flex, x):
        flex(x), flex(x), flex(x)
        with pytest.raises(HookError, match=f"rank {failing[0]}: .*fc1.*raised KeyError"):
            flex(x)
        flex(x)


@pytest.mark.ranks(2)
def test_an_edit_on_some_ranks_only_is_an_error_on_all_where_it_is_settled():
    def edit(module, full, save_ctx, modules):
        save_ctx.calls = getattr(save_ctx, "calls", 0) + 1
        return None if save_ctx.calls == 4 and dist.get_rank() == 1 else full * 2

    with on_two_ranks(edit) as (flex, x):
        flex(x), flex(x), flex(x)
        with pytest.raises(HookMismatchError, match="run edits that do not do the same"):
            flex(x)


@pytest.mark.ranks(2)
def test_a_replicated_tensor_that_is_not_contiguous_is_edited_in_every_call():
    sharded = models.TWO_RANKS["tp"].shard(models.mlp())
    model = nn.Sequential(sharded, Transposed())
    twin, strides, x = nn.Sequential(models.mlp(), Transposed()), [], models.random(4, 6)

    def edit(module, full, save_ctx, modules):
        strides.append(full.stride())
        return full.cumsum(0)

    with FlexModel(model, tensor_parallel_size=2, timeout=20) as flex, torch.no_grad():
        flex.register_forward_hook(HookFunction("1", None, edit))
        for _ in range(4):
            torch.testing.assert_close(flex(x), twin(x).cumsum(0))
    assert len(set(strides)) == 1  # as of the model's own


class Transposed(nn.Module):
    def forward(self, x):
        return x.mT


class TransposedInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.hooked = nn.Identity()

    def forward(self, x):
        return self.hooked(x.mT).add_(1)


@pytest.mark.parametrize("mode", MODES)
def test_the_model_may_change_what_a_function_returned(mode):
    """Memory that numpy has, a part that is the whole, and elements that are one in memory."""
    array = np.ones((4, 4), np.float32)
    rows, x = torch.from_numpy(array), models.random(4, 4).float()
    selected = Select(dtype=torch.float32)
    for edit, select in (
        (lambda m, full, c, d: torch.from_numpy(array), None),
        (lambda m, full, c, d: rows, selected),
        (lambda m, full, c, d: full.new_ones(1, 4).expand(4, 4), None),
    ):
        flex = FlexModel(TransposedInPlace(), {})
        flex.register_forward_hook(HookFunction("hooked", None, edit, select=select))
        with mode():
            for _ in range(3):
                assert flex(x).eq(2).all()
        assert (array == 1).all()


@pytest.mark.parametrize("num_dense", [0, 2])
def test_a_sparse_result_is_refused_in_every_call(num_dense):
    calls = itertools.count()

    def edit(module, full, save_ctx, modules):
        return full * 2 if next(calls) < num_dense else full.to_sparse()

    flex = FlexModel(nn.Sequential(nn.Linear(4, 4)), {})
    flex.register_forward_hook(HookFunction("0", None, edit))
    for _ in range(num_dense):
        flex(torch.ones(2, 4))
    with pytest.raises(HookError, match=r"of layout torch\.sparse_coo; expected"):
        flex(torch.ones(2, 4))

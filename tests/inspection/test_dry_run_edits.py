"""dry_run() calls editing functions on shapes: what it finds, at which line, and what it leaves as
it was.
"""

import contextlib
import copy
import functools
import inspect
import re
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import models
from flex_model import FlexModel, HookError, HookFunction, Select, editing
from flex_model.inspection import Finding

ERROR, WARNING, NOT_CHECKED = "error", "warning", "not checked"
X = models.random(4, 6)
THRESHOLD = torch.tensor(2.0, dtype=torch.float64)
UNITS = torch.tensor([0, 2])


def line_of(function):
    """Of the comment ``# here``, else of the function."""
    lines, first = inspect.getsourcelines(function)
    return first + next((i for i, line in enumerate(lines) if "# here" in line), 0)


def found_in(flex, hook, x=X, kind="forward"):
    """The findings of one hook; nothing of them is left behind."""
    with getattr(flex, f"register_{kind}_hook")(hook):
        dry = flex.dry_run(x)
    assert all(row.findings == tuple(dry.findings) for row in dry if row.edits)
    for finding in dry.findings:
        assert str(finding) in str(dry)
    return dry.findings


# ---- Bad ones: (level, problem, words) and the function ------------------------------------------


def wrong_shape(module, full, save_ctx, modules):
    if full.dim() == 2:
        return full[:, :1]
    return full


def wrong_dtype(module, full, save_ctx, modules):
    scaled = full.float() * 2
    return scaled


def wrong_device(module, full, save_ctx, modules):
    return torch.empty_like(full, device="meta")


def a_tuple(module, full, save_ctx, modules):
    return (full * 2,)


def no_such_attribute(module, full, save_ctx, modules):
    return full.cosine()  # here


def shapes_that_differ(module, full, save_ctx, modules):
    def inner(value):
        return value @ torch.ones(3, 3, dtype=value.dtype)  # here

    return inner(full)


def through_numpy(module, full, save_ctx, modules):
    found = full.detach().numpy()  # here
    found[:] = 0
    return full


def leaf_in_place(module, full, save_ctx, modules):
    modules["probe"].weight.mul_(2)  # here


def saved_and_overwritten(module, full, save_ctx, modules):
    found = full.exp()
    found += 1
    return found


def collective(module, full, save_ctx, modules):
    dist.all_reduce(full)  # here


def functional_collective(module, full, save_ctx, modules):
    from torch.distributed import _functional_collectives as functional

    return functional.all_reduce(full, "sum", dist.group.WORLD)  # here


def swallowed_collective(module, full, save_ctx, modules):
    with contextlib.suppress(Exception):
        dist.barrier()  # here


def object_collective(module, full, save_ctx, modules):
    dist.all_gather_object([None, None], 1)  # here


def no_such_module(module, full, save_ctx, modules):
    return modules["prob"](full)  # here


def no_such_module_attribute(module, full, save_ctx, modules):
    return modules.prob(full)  # here


def exits(module, full, save_ctx, modules):
    raise SystemExit(3)  # here


def asks_for_a_number(module, full, save_ctx, modules):
    if full.abs().max() > 3:  # here
        return full * 0
    return full.nothing


def asks_for_item(module, full, save_ctx, modules):
    save_ctx.norm = full.norm().item()  # here


def size_by_values(module, full, save_ctx, modules):
    return full[full > 0].sum() * full  # here


BAD = {
    wrong_shape: (ERROR, "result", r"shape \(4, 1\); expected shape \(4, 8\)"),
    wrong_dtype: (ERROR, "result", "dtype torch.float32; expected dtype torch.float64"),
    wrong_device: (ERROR, "result", "device meta; expected device cpu"),
    a_tuple: (ERROR, "result", "returned a tuple"),
    no_such_attribute: (ERROR, "raises", "AttributeError: 'Tensor' object has no attribute"),
    shapes_that_differ: (ERROR, "raises", "RuntimeError"),
    exits: (ERROR, "raises", "SystemExit: 3"),
    leaf_in_place: (ERROR, "raises", "a leaf Variable that requires grad"),
    saved_and_overwritten: (ERROR, "raises", "its backward raises: .*inplace.*write to a clone"),
    no_such_module: (ERROR, "raises", "KeyError: 'prob'"),
    no_such_module_attribute: (ERROR, "raises", "'prob'"),
    asks_for_a_number: (NOT_CHECKED, "depends on values", "not checked from here on"),
    asks_for_item: (NOT_CHECKED, "depends on values", "not checked from here on"),
    through_numpy: (NOT_CHECKED, "depends on values", r"numpy\(\) needs values"),
    size_by_values: (NOT_CHECKED, "depends on values", "not checked from here on"),
}


def make_flex(model=None, **settings):
    flex = FlexModel(model or models.mlp(), {}, **settings)
    flex.register_trainable_module("probe", models.seeded(lambda: nn.Linear(8, 8).double()))
    return flex


@functools.cache
def found_in_bad():
    flex = make_flex()
    for edit in BAD:
        hook = HookFunction("fc1", editing_function=edit, output_name=edit.__name__)
        flex.register_forward_hook(hook)
    dry = flex.dry_run(X)
    for finding in dry.findings:
        assert str(finding) in str(dry)
    return {row.findings[0].function: row.findings for row in dry}


@pytest.mark.parametrize("edit", BAD)
def test_each_kind_is_found_with_its_file_and_line(edit):
    (finding,) = found_in_bad()[edit.__name__]
    level, problem, words = BAD[edit]
    assert (finding.level, finding.problem) == (level, problem), finding
    assert re.search(words, finding.message), finding.message
    assert (finding.file, finding.line) == (__file__, line_of(edit)), finding
    assert finding.function == edit.__name__ and "'fc1'" in finding.hook


#: A run is ended by `exits`.
RAISE = [e for e, (level, *_) in BAD.items() if level == ERROR and e is not exits]


@pytest.mark.parametrize("edit", RAISE)
def test_what_is_an_error_is_one_in_a_run(edit):
    flex = make_flex()
    flex.register_forward_hook(HookFunction("fc1", editing_function=edit))
    with pytest.raises((HookError, RuntimeError, ValueError)):
        flex(X).sum().backward()


# ---- Good ones -----------------------------------------------------------------------------------


def prints(module, full, save_ctx, modules):
    print(f"norm {full.norm():.3f}", full)


def uses_a_module(module, full, save_ctx, modules):
    return modules["probe"](full) + full.flip(-1)


def uses_real_values(module, full, save_ctx, modules):
    if THRESHOLD.item() > 1 and float(THRESHOLD) > 1 and float(THRESHOLD.numpy()) > 1:
        full[UNITS] = full[UNITS] * torch.tensor(2.0).item() * THRESHOLD
        return full
    return full.tolist()


def in_place(module, full, save_ctx, modules):
    full[:, 0] += 2 * full[:, 1]


def random_by_torch(module, full, save_ctx, modules):
    return full + torch.randn_like(full) + torch.randn(8, generator=torch.Generator())


def constant(module, full, save_ctx, modules):
    return torch.zeros_like(full)


def nothing(module, full, save_ctx, modules):
    save_ctx.seen = full.detach().clone()


def transforms(module, full, save_ctx, modules):
    gradient = torch.func.grad(lambda value: value.square().sum())(full)
    halves = torch.func.vmap(lambda row: row / 2)(full)
    return copy.deepcopy(full.detach()) + gradient + halves


GOOD = [
    prints,
    transforms,
    uses_a_module,
    uses_real_values,
    in_place,
    random_by_torch,
    constant,
    nothing,
]


def test_nothing_is_found_in_what_is_right():
    flex = make_flex()
    places = {"forward": "fc1", "forward_pre": "act", "full_backward": "act"}
    for kind in ("forward", "forward_pre", "full_backward", "full_backward_pre"):
        for edit in GOOD:
            name, key = places.get(kind, "fc1"), f"{kind} {edit.__name__}"
            hook = HookFunction(name, editing_function=edit, output_name=key)
            getattr(flex, f"register_{kind}_hook")(hook)
    dry = flex.dry_run(X)
    assert "editing functions: nothing found" in str(dry), dry
    dry.raise_if_wrong(warnings=True)
    for off in (torch.no_grad, torch.inference_mode):  # then no gradient is there for hooks
        with off():
            assert {finding.problem for finding in flex.dry_run(X).findings} == {"not called"}
    flex(X).sum().backward()


def test_a_compiled_function_is_not_compiled_for_shapes():
    compiled = []
    twice = torch.compile(lambda value: value * 2, backend=lambda *args: compiled.append(args))

    def edit(module, full, save_ctx, modules):
        return twice(full)

    assert found_in(make_flex(), HookFunction("fc1", editing_function=edit)) == []
    assert not compiled


def test_a_deep_copy_has_the_same_fake_mode():
    """Torch's own copies the mode too, and later frees memory twice."""

    def edit(module, full, save_ctx, modules):
        leaf = full.detach().requires_grad_()
        twin = copy.deepcopy({"leaf": leaf})["leaf"]
        assert twin is not leaf and twin.requires_grad and twin.fake_mode is full.fake_mode
        copy.deepcopy(full)  # here

    flex = make_flex()
    (finding,) = found_in(flex, HookFunction("fc1", editing_function=edit))
    assert "Only Tensors created explicitly" in finding.message and finding.line == line_of(edit)


def test_ready_edits_pass():
    torch.manual_seed(0)
    kept, vector, matrix = editing.capture(), torch.randn(8).double(), torch.randn(2, 8).double()
    flex = make_flex()
    with flex.register_forward_hook(kept.at("fc1")):
        flex(X)
    edits = [
        editing.zero(units=[1, 3]),
        editing.zero(),
        editing.mean(over="rows", dims={"rows": 0}),
        editing.mean(vector, units=slice(2, 5)),
        editing.resample(dims={"rows": 0}),
        editing.resample(kept, seed=3),
        editing.noise(0.1),
        editing.noise(0.1, seed=4, rows=[0, 2]),
        editing.scale(2.0) | uses_a_module,
        editing.clamp(-1.0, 1.0, units=7),
        editing.clamp(5.0, 5.0),
        editing.steer(vector, 0.5, rows=[-1]),
        editing.project_out(vector),
        editing.project_onto(matrix),
        editing.capture(),
        editing.patch(kept),
        editing.patch(kept, units=[0]),
        editing.splice("probe"),
        editing.splice("probe", add=True, rows=[0]),
        editing.splice("probe", error=True),
    ]
    lens = editing.logit_lens("out.weight", kind="none").at("fc2")
    hooks = [edit.at("fc1", output_name=str(i)) for i, edit in enumerate(edits)] + [lens]
    for hook in hooks:
        flex.register_forward_hook(hook)
    assert flex.dry_run(X).findings == []


def test_what_is_wrong_in_and_beside_ready_edits_is_found():
    edit = editing.zero(units=[0]) | wrong_shape
    (finding,) = found_in(make_flex(), edit.at("fc1"))
    assert finding.problem == "result" and "wrong_shape" in finding.function
    (finding,) = found_in(make_flex(), editing.zero(units=[9]).at("fc1"))
    assert finding.problem == "raises" and "units: 9 is out of range" in finding.message


# ---- What hooks have besides ---------------------------------------------------------------------


def test_the_selected_part_and_full_parameters_are_given():
    flex = make_flex()
    select = Select(units=[5, 1], dtype=torch.float32)
    hook = HookFunction("fc1", select=select, parameters=["out.weight"])

    def edit(module, full, save_ctx, modules):
        weight = hook.parameters["out.weight"]
        assert (full.shape, full.dtype) == ((4, 2), torch.float32)
        assert (weight.shape, weight.dtype) == ((5, 6), torch.float64)
        hook.parameters["fc1.weight"]  # here

    hook.editing_function = edit
    (finding,) = found_in(flex, hook)
    assert finding.problem == "raises" and finding.line == line_of(edit)
    assert "KeyError: 'fc1.weight'" in finding.message


def test_several_tensors_of_one_hook():
    def good(module, fulls, save_ctx, modules):
        hidden, weights = fulls
        hidden[:, 0] += weights[:, 0].sum()
        return None, weights * hidden.mean()

    def wrong_second(module, fulls, save_ctx, modules):
        return fulls[0], fulls[1][:, :2]

    def wrong_number(module, fulls, save_ctx, modules):
        return fulls[0] + 1

    flex = FlexModel(models.block(), {})
    edits = (good, wrong_second, wrong_number)
    for edit in edits:
        hook = HookFunction("attn", None, edit, (0, 1), output_name=edit.__name__)
        flex.register_forward_hook(hook)
    dry = flex.dry_run(models.random(2, 4, 8))
    assert [(f.function.rpartition(".")[2], f.problem, f.line) for f in dry.findings] == [
        ("wrong_second", "result", line_of(wrong_second)),
        ("wrong_number", "result", line_of(wrong_number)),
    ]
    assert all("(0, 1)" in finding.hook for finding in dry.findings)
    assert [len(row.findings) for row in dry] == [0, 0, 1, 1, 1, 1]


def test_what_may_come_of_a_function_not_followed_is_no_error():
    flex = make_flex()

    def second(module, full, save_ctx, modules):
        return full / save_ctx.norm  # here

    flex.register_forward_hook(HookFunction("inp", editing_function=asks_for_item))
    flex.register_forward_hook(HookFunction("fc1", editing_function=second))
    _, later = flex.dry_run(X).findings
    assert (later.level, later.problem, later.line) == (NOT_CHECKED, "raises", line_of(second))
    assert "may come of asks_for_item of the forward hook on 'inp'" in later.message
    flex(X)


def test_calls_come_in_the_order_of_a_run_and_share_save_ctx():
    flex = make_flex()

    def first(module, full, save_ctx, modules):
        save_ctx.order = [*getattr(save_ctx, "order", []), module]
        save_ctx.total = save_ctx.total + full.sum()

    def last(module, full, save_ctx, modules):
        return full * save_ctx.order.index(flex.module.fc1) + save_ctx.total

    def backward(module, full, save_ctx, modules):
        return full * len(save_ctx.order)

    flex.register_full_backward_pre_hook(HookFunction("inp", editing_function=backward))
    flex.register_forward_hook(HookFunction("out", editing_function=last))
    flex.register_forward_hook(HookFunction("fc1", None, first, output_name="first"))
    flex.save_ctx.total = total = torch.ones((), dtype=torch.float64)
    dry = flex.dry_run(X)
    assert dry.findings == [], dry
    assert vars(flex.save_ctx) == {"total": total} and total == 1
    flex(X).sum().backward()


TRACE = torch.zeros(8, dtype=torch.float64)


def test_the_model_and_save_ctx_are_left_as_they_were():
    flex, calls = make_flex(), []
    flex.register_trainable_module("norm", nn.BatchNorm1d(8).double())
    total = torch.zeros((), dtype=torch.float64)
    seen, table = [], {"key": {}}
    flex.save_ctx.seen, flex.save_ctx.total, flex.save_ctx.table = seen, total, table
    state = {k: v.clone() for k, v in flex.state_dict().items()}
    generator = torch.get_rng_state()

    def edit(module, full, save_ctx, modules):
        calls.append(full.shape)  # of its own: this stays
        TRACE.add_(full.mean(0))
        module.cached = full
        save_ctx.seen.append(full)
        flex.save_ctx.total += full.detach().sum()
        save_ctx.table["key"]["inner"] = full
        modules["norm"].train()(full).sum().backward()
        modules["norm"].cached = full
        full.mul_(modules["norm"].weight)
        torch.manual_seed(3)
        return full + TRACE

    assert found_in(flex, HookFunction("fc1", editing_function=edit)) == []

    assert calls == [(4, 8)]
    assert not hasattr(flex.module.fc1, "cached")
    assert vars(flex.save_ctx) == {"seen": seen, "total": total, "table": table}
    assert not seen and table == {"key": {}} and total == 0 and not total.requires_grad
    assert not TRACE.any() and TRACE.grad_fn is None and TRACE._version == 0
    assert not hasattr(flex.trainable_modules["norm"], "cached")
    for name, value in flex.state_dict().items():
        assert torch.equal(value, state[name]), name
    every = [*flex.module.parameters(), *flex.trainable_modules.parameters()]
    assert all(parameter.grad is None for parameter in every)
    assert torch.equal(torch.get_rng_state(), generator)
    assert not flex.output_ptr


def test_each_function_is_called_once():
    flex, calls = FlexModel(models.Twice().double(), {}), []
    hook = HookFunction("fc", editing_function=lambda m, full, *_: calls.append(full.shape))
    flex.register_forward_hook(hook)
    (row,) = flex.dry_run(X)
    assert row.calls == 2 and calls == [(4, 6)]


@pytest.mark.parametrize("use", [lambda full, kept: kept, torch.add, torch.Tensor.copy_])
def test_a_kept_tensor_without_values_is_an_error_in_a_run(use):
    kept = []

    def edit(module, full, save_ctx, modules):
        kept.append(full.detach())
        return use(full, kept[0])

    flex = make_flex()
    flex.register_forward_hook(HookFunction("fc1", editing_function=edit))
    assert flex.dry_run(X).findings == []
    with pytest.raises(HookError, match=r"without values|FakeTensor"):
        flex(X)
    kept.clear()
    flex(X)


def test_what_was_captured_in_a_run_outlives_a_dry_run():
    flex, kept = make_flex(), editing.capture()
    flex.register_forward_hook(kept.at("fc1"))
    flex.register_forward_hook(editing.patch(kept).at("fc1", output_name="patched"))
    flex(X)
    before = kept.of(None)
    assert flex.dry_run(2 * X).findings == []
    assert kept.of(None) is before


def test_the_model_inside_of_an_edit():
    flex = make_flex()

    def direct(module, full, save_ctx, modules):
        return flex.module(X)  # here

    def in_groups(module, full, save_ctx, modules):
        return flex(X, groups=())  # here

    def hooked_part(module, full, save_ctx, modules):
        return module(X)  # here

    flex(X)
    for edit in (direct, in_groups, hooked_part):
        (finding,) = found_in(flex, HookFunction("fc1", editing_function=edit))
        assert (finding.level, finding.problem) == (ERROR, "raises"), finding
        assert (finding.file, finding.line) == (__file__, line_of(edit))


def test_what_is_not_reached_is_said_to_be_not_checked():
    flex = make_flex()
    flex.module.requires_grad_(False)
    flex.register_full_backward_hook(HookFunction("fc1", editing_function=wrong_shape))
    dry = flex.dry_run(X)
    (finding,) = dry.findings
    assert (finding.level, finding.problem) == (NOT_CHECKED, "not called")
    assert "1 not checked" in str(dry) and "does not call it" in finding.message
    dry.raise_if_wrong(warnings=True)


def test_raise_if_wrong_names_every_line():
    flex = make_flex()
    flex.register_forward_hook(HookFunction("fc1", editing_function=wrong_shape))
    flex.register_forward_hook(HookFunction("fc2", editing_function=exits))
    flex.register_forward_hook(HookFunction("out", editing_function=asks_for_item))
    dry = flex.dry_run(X)
    assert [isinstance(finding, Finding) for finding in dry.findings] == [True] * 3
    lines = rf"(?s){line_of(wrong_shape)}: error: .*{line_of(exits)}: error: "
    with pytest.raises(HookError, match=lines) as caught:
        dry.raise_if_wrong()
    assert "2 problems" in str(caught.value) and "depends on" not in str(caught.value)


class AsCallable:
    def __call__(self, module, full, save_ctx, modules):
        return full[:1]


def test_functions_of_any_kind_are_named():
    def with_more(extra, module, full, save_ctx, modules):
        return full[:extra]

    for edit, line in (
        (AsCallable(), line_of(AsCallable.__call__)),
        (functools.partial(with_more, 1), line_of(with_more)),
        (AsCallable().__call__, line_of(AsCallable.__call__)),
        (lambda m, x, ctx, mods: x[:1], inspect.currentframe().f_lineno),
    ):
        (finding,) = found_in(make_flex(), HookFunction("fc1", editing_function=edit))
        assert (finding.problem, finding.file, finding.line) == ("result", __file__, line)


# ---- On several ranks ----------------------------------------------------------------------------


def uses_its_weight(module, full, save_ctx, modules):
    width = module.weight.shape[-1]  # may be asked
    return full @ module.weight[:, :width].T  # here


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["tp", "dtensor", "fsdp2"])
def test_sharded_weights_are_named(name):
    way = models.TWO_RANKS[name]
    model = models.mlp(width=8)
    flex = make_flex(way.shard(model), **way.sizes)
    x = way.my_rows(models.random(4, 8))
    with flex.register_forward_hook(HookFunction("fc1", editing_function=uses_its_weight)):
        dry = flex.dry_run(x)
    (finding,) = dry.findings
    assert finding.problem == "sharded weight" and finding.line == line_of(uses_its_weight)
    assert finding.level == (WARNING if name == "fsdp2" else ERROR)
    assert "HookFunction(parameters=['fc1.weight'])" in finding.message
    with pytest.raises(HookError, match=r"1 problems .*\n.*sharded weight"):
        dry.raise_if_wrong(warnings=True)
    if name == "fsdp2":
        dry.raise_if_wrong()
    hook = HookFunction("fc1", parameters=["fc1.weight", "inp.weight"])

    def edit(module, full, save_ctx, modules):
        assert hook.parameters["fc1.weight"].shape == (8, 8)
        return full @ hook.parameters["fc1.weight"].T

    hook.editing_function = edit
    assert found_in(flex, hook, x) == []


def wrong_on_one(module, full, save_ctx, modules):
    if dist.get_rank() == 1:
        return full[:1]
    return full * 2


@pytest.mark.ranks(2)
def test_findings_are_the_same_on_every_rank():
    way = models.TWO_RANKS["tp"]
    flex = make_flex(way.shard(models.mlp()), **way.sizes)

    def own_collective(module, full, save_ctx, modules):
        return flex.get_module_parameter("inp.weight")  # here

    edits = {
        wrong_on_one: "result",
        collective: "collective",
        functional_collective: "collective",
        swallowed_collective: "collective",
        object_collective: "collective",
        own_collective: "raises",
    }
    for edit in edits:
        hook = HookFunction("fc1", editing_function=edit, output_name=edit.__name__)
        flex.register_forward_hook(hook)
    dry = flex.dry_run(X)
    assert [finding.problem for finding in dry.findings] == list(edits.values())
    for finding, edit in zip(dry.findings, edits):
        assert finding.level == ERROR and finding.file == __file__
        assert finding.line == line_of(edit), finding
    assert "c10d.allreduce_ is a collective" in str(dry)
    with pytest.raises(HookError, match="6 problems in editing functions"):
        dry.raise_if_wrong()
    assert not flex.output_ptr
    flex.restore()  # `own_collective` holds it


@pytest.mark.ranks(2)
def test_only_rank_0_is_looked_at_where_only_it_edits():
    way = models.TWO_RANKS["tp"]
    flex = make_flex(way.shard(models.mlp()), edit_on="rank0", **way.sizes)
    assert found_in(flex, HookFunction("fc1", editing_function=wrong_on_one)) == []
    (finding,) = found_in(flex, HookFunction("fc1", editing_function=wrong_shape))
    assert (finding.level, finding.problem) == (ERROR, "result")
    assert isinstance(flex.save_ctx, Namespace)


@pytest.mark.ranks(2)
def test_a_layout_that_shapes_do_not_tell_is_not_checked():
    model = models.tensor_parallel(models.mlp(), dist.group.WORLD, states_sizes=False)
    flex = make_flex(model, tensor_parallel_size=2)
    (finding,) = found_in(flex, HookFunction("fc1", editing_function=wrong_shape))
    assert (finding.level, finding.problem) == (NOT_CHECKED, "not called")
    hook = HookFunction("fc1", editing_function=wrong_shape, parameters=["fc1.weight"])
    with pytest.raises(ValueError, match=r"fc1\.weight"):
        found_in(flex, hook)


def test_the_page_lists_every_problem():
    page = (Path(__file__).parents[2] / "docs" / "checks.md").read_text()
    problems = {problem for _, problem, _ in BAD.values()}
    problems |= {"sharded weight", "collective", "not called"}
    assert problems <= set(re.findall(r"`([a-z ]+)`", page))

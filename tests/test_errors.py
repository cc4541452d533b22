"""What a user can get wrong: an error at once, on every rank, that says what to do.

Messages are pinned by their key words: the operation, what was expected, what was got.
"""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import flex_model.distributed as fm_dist
import models
from flex_model import FlexModel, HookFunction
from flex_model.distributed.agreement import check_equal
from flex_model.errors import HookError, HookMismatchError, TraceError, text_of
from shared_edits import double
from tiers import ways

BATCH = models.random(4, 6)


def wrapped(*hooks):
    flex = FlexModel(models.mlp())
    for hook in hooks:
        flex.register_forward_hook(hook)
    return flex


def test_the_kinds_of_errors():
    assert issubclass(HookError, RuntimeError)
    assert issubclass(HookMismatchError, HookError)
    assert issubclass(TraceError, Exception)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), LookupError("")])
def test_the_text_of_an_error_without_a_message(error):
    assert text_of(error) == type(error).__name__


# ---- Names and arguments -------------------------------------------------------------------------

PARAMETER = r"(?s)'fc1.wieght'.*'fc1.weight'"
GROUP = r"(?s)'atention'.*'attention'"
MODULE = r"(?s)'cf1'.*'fc1'"
OTHER_KINDS = ("forward_pre", "full_backward", "full_backward_pre")

# What is refused, of a FlexModel with these hooks, and the words that say why.
REFUSED = [
    *[
        (
            lambda f, k=kind: getattr(f, f"register_{k}_hook")(HookFunction("cf1")),
            ValueError,
            MODULE,
        )
        for kind in ("forward", *OTHER_KINDS)
    ],
    (lambda f: f.register_hook(HookFunction("fc1.wieght")), ValueError, PARAMETER),
    (lambda f: f.get_module_parameter("fc1.wieght"), ValueError, PARAMETER),
    (lambda f: f.set_module_parameter("fc1.wieght", torch.zeros(8, 6)), ValueError, PARAMETER),
    (lambda f: f.get_module_gradient("fc1.wieght"), ValueError, PARAMETER),
    (
        lambda f: f.register_forward_hook(HookFunction("act", parameters=("fc1.wieght",))),
        ValueError,
        PARAMETER,
    ),
    (lambda f: f(BATCH, groups=["atention"]), ValueError, GROUP),
    (lambda f: f(BATCH, groups="atention"), ValueError, GROUP),
    (lambda f: f.active(["atention"]).__enter__(), ValueError, GROUP),
    (lambda f: f.get_group_hook_functions("atention"), ValueError, GROUP),
    (lambda f: f.remove_hook_groups("fc1", "atention"), ValueError, GROUP),
    (lambda f: f.update_hook_groups("cf1", "g"), ValueError, MODULE),
    (lambda f: f.create_hook_group("g", "cf1"), ValueError, MODULE),
    (lambda f: f.create_hook_group("g", "cf1", hook_type="full_backward"), ValueError, MODULE),
    (lambda f: f.create_hook_group("g", nn.Conv2d), ValueError, "Conv2d"),
    (
        lambda f: f.create_hook_group("g", "fc1", hook_type="sideways"),
        ValueError,
        r"(?s)full_backward_pre.*sideways",
    ),
    (
        lambda f: f.create_hook_group("g", "fc", hook_type="full_backward"),
        ValueError,
        "output_name",
    ),
    (lambda f: f.remove_hook_groups("fc1", "all"), ValueError, "all"),
    (lambda f: f.remove_hook_groups("fc2", "attention"), ValueError, "'attention'"),
    (lambda f: f.get_hook_function_groups(HookFunction("fc1")), ValueError, "fc1"),
    *[
        (
            lambda f, k=kind: getattr(f, f"register_{k}_hook")(HookFunction("fc1")),
            ValueError,
            r"(?s)fc1.*output_name",
        )
        for kind in OTHER_KINDS
    ],
    (lambda f: f.register_forward_hook(lambda *args: None), TypeError, "HookFunction"),
    (lambda f: f.register_backward_hook(HookFunction("fc1")), TypeError, "call register_full_back"),
    (lambda f: FlexModel("model"), TypeError, r"nn.Module"),
    (lambda f: FlexModel(models.mlp(), edit_on="rank1"), ValueError, r"(?s)edit_on.*rank1"),
    (lambda f: FlexModel(models.mlp(), output_ranks="some"), ValueError, r"(?s)output_ranks.*some"),
    (lambda f: FlexModel(models.mlp(), tensor_parallel_size=2), ValueError, "size"),
    (lambda f: FlexModel(models.mlp(), data_parallel_size=3), ValueError, "size"),
    (lambda f: FlexModel(models.mlp(), pipeline_parallel_size=0), ValueError, "size"),
    (lambda f: f.get_module_parameter(3), TypeError, "name of a parameter must be a str, got int"),
    (lambda f: f.get_module_gradient(None), TypeError, "name of a parameter must be a str"),
    (lambda f: f.run_until(3, BATCH), TypeError, "name of a module must be a str, got int"),
    (lambda f: f.get_group_hook_functions(3), TypeError, "group name must be a str, got int"),
    (lambda f: f.remove_hook_groups("fc1", 3), TypeError, "group name must be a str, got int"),
    (lambda f: f.get_hook_function_groups("fc1"), TypeError, "expected a HookFunction, got str"),
    (lambda f: HookFunction("fc1", parameters=3), TypeError, r"parameters must be names.* got 3"),
    (lambda f: HookFunction("fc1", parameters=["a", 3]), TypeError, "parameters must be names"),
    (lambda f: HookFunction("fc1", unpack_idx=-2), ValueError, r"unpack_idx.*-2"),
]


@pytest.mark.parametrize("call, error, match", REFUSED)
def test_what_is_refused_and_leaves_the_hooks_as_they_were(call, error, match):
    hook = HookFunction("fc1")
    flex = wrapped(hook, HookFunction("fc2"))
    flex.update_hook_groups(hook, "attention")
    with pytest.raises(error, match=match):
        call(flex)
    assert set(flex.get_hook_function_groups(hook)) == {"all", "attention"}
    flex(BATCH, groups=["attention"])
    flex.register_full_backward_hook(HookFunction("fc1", output_name="fc1.grad"))


@pytest.mark.ranks(2)
def test_what_is_no_group_and_no_mesh_is_refused():
    for name, match in (("process_group", "new_group"), ("device_mesh", "init_device_mesh")):
        with pytest.raises(TypeError, match=rf"{name} must be a .* got str; .*{match}"):
            FlexModel(models.mlp(), **{name: "world"})


@pytest.mark.ranks(2)
def test_a_name_that_no_trainable_module_can_have_is_refused_before_anything_is_sent():
    flex, probe = FlexModel(models.mlp(), tensor_parallel_size=2), nn.Linear(2, 2)
    nn.init.constant_(probe.weight, dist.get_rank())
    for name, kind in ((3, TypeError), ("", ValueError), ("a.b", ValueError), ("keys", ValueError)):
        with pytest.raises(kind, match=r"register_trainable_module.*name"):
            flex.register_trainable_module(name, probe)
    assert (probe.weight == dist.get_rank()).all()
    flex.register_trainable_module("probe", probe)
    flex.register_trainable_module("probe", nn.Linear(3, 3))  # in its place
    flex.restore()


# ---- Sizes and shapes ----------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("tp", "dp"), [(2, 2), (4, 1), (1, 3)])
def test_sizes_that_do_not_multiply_to_the_world(tp, dp):
    with pytest.raises(ValueError, match=rf"(?s){tp}.*{dp}.*2"):
        FlexModel(models.mlp(), {}, tensor_parallel_size=tp, data_parallel_size=dp)


@pytest.mark.parametrize(
    "site, shape",
    [
        *[("fc1", one) for one in [(None, 16), (None, 12), (None, 4), (5, 8), (None, None, 8)]],
        *[("fc1", one) for one in [(None, 8, None), (8,)]],
        *[("fc2", one) for one in [(None, 12), (8, None)]],
    ],
)
@pytest.mark.parametrize("way", ways("one", "tp"))
def test_a_contradicted_expected_shape_names_the_site_on_every_rank(way, site, shape):
    """fc1 gives half of 8 columns; fc2 is replicated, so no dim of it can be larger."""
    flex = FlexModel(way.shard(models.mlp()), **way.sizes)
    handle = flex.register_forward_hook(HookFunction(site, shape))
    names = rf"(?s){site}.*expected_shape|expected_shape.*{site}"
    with pytest.raises(ValueError, match=names) as error:
        flex(BATCH)
    if way is models.ONE_RANK:
        assert {"fc1": "(4, 8)", "fc2": "(4, 6)"}[site] in str(error.value)
    handle.remove()
    flex.register_forward_hook(HookFunction("fc1", (None, 8)))
    flex(BATCH)


@pytest.mark.parametrize("index", [1, 7])
@pytest.mark.parametrize("edit", [None, double])
@pytest.mark.parametrize("way", ways("one", "tp"))
def test_an_unpack_idx_out_of_range_names_the_site_and_what_there_is(way, edit, index):
    flex = FlexModel(models.mlp(), **way.sizes)
    handle = flex.register_forward_hook(HookFunction("fc1", None, edit, index))
    with pytest.raises(IndexError, match=rf"fc1.*unpack_idx {index} is out.*1 tensor") as caught:
        flex(BATCH)
    assert isinstance(caught.value, HookError)
    handle.remove()
    flex(BATCH)


class Tensorless(nn.Module):
    def forward(self, x):
        return {"text": "no tensor here", "number": 3}


@pytest.mark.parametrize("edit", [None, lambda module, full, save_ctx, modules: full])
def test_an_output_without_tensors_names_the_site(edit):
    flex = FlexModel(nn.ModuleDict({"silent": Tensorless()}))
    flex.register_forward_hook(HookFunction("silent", editing_function=edit))
    with pytest.raises((HookError, ValueError), match=r"(?s)silent"), flex.active():
        flex.module["silent"](BATCH)


@pytest.mark.ranks(2)
def test_an_output_without_tensors_on_one_rank_is_an_error_on_both():
    class Fickle(nn.Module):
        def forward(self, x):
            return x if dist.get_rank() == 0 else None

    flex = FlexModel(nn.Sequential(Fickle()), tensor_parallel_size=2, timeout=5)
    flex.register_forward_hook(HookFunction("0"))
    start = time.monotonic()
    with pytest.raises((HookError, ValueError), match="0"):
        flex(BATCH)
    assert time.monotonic() - start < 4


# ---- What an editing function returns ------------------------------------------------------------

# What is returned, and the words for what was expected and what was got.
BAD_RETURNS = {
    "shape": (lambda full: full[:, :3], "shape (4, 8)", "shape (4, 3)"),
    "more dims": (lambda full: full[None], "shape (4, 8)", "shape (1, 4, 8)"),
    "transposed": (lambda full: full.T, "shape (4, 8)", "shape (8, 4)"),
    "scalar": (lambda full: full.sum(), "shape (4, 8)", "shape ()"),
    "dtype": (lambda full: full.float(), "float64", "float32"),
    "device": (lambda full: full.to("meta"), "cpu", "meta"),
    "number": (lambda full: 3.0, "Tensor", "float"),
    "tuple": (lambda full: (full,), "Tensor", "tuple"),
    "array": (lambda full: full.detach().numpy(), "Tensor", "ndarray"),
    "text": (lambda full: "text", "Tensor", "str"),
}


def bad_edit(name):
    def my_edit(module, full, save_ctx, modules):
        return BAD_RETURNS[name][0](full)

    return my_edit


@pytest.mark.parametrize("edit_on", ["all", "rank0"])
@pytest.mark.parametrize("name", BAD_RETURNS)
@pytest.mark.parametrize("way", ways("one", "tp"))
def test_a_bad_return_names_hook_module_expected_and_got_on_every_rank(way, name, edit_on):
    flex = FlexModel(way.shard(models.mlp()), **way.sizes, edit_on=edit_on)
    handle = flex.register_forward_hook(HookFunction("fc1", (None, 8), bad_edit(name)))
    with pytest.raises(HookError) as error:
        flex(BATCH)
    _, expected, got = BAD_RETURNS[name]
    for word in ("my_edit", "'fc1'", expected, got):
        assert word in str(error.value)
    handle.remove()
    exact = {"rtol": 0, "atol": 0} if way is models.ONE_RANK else {}
    torch.testing.assert_close(flex(BATCH), models.mlp()(BATCH), **exact)


# ---- An editing function that raises -------------------------------------------------------------


def failing_edit(when):
    def my_edit(module, full, save_ctx, modules):
        if when():
            raise ArithmeticError("the edit went wrong")
        return full * 2

    return my_edit


def test_an_exception_in_an_edit_is_the_cause_of_a_hook_error():
    fails = [True]
    flex = FlexModel(models.mlp())
    edit = failing_edit(lambda: fails[0])
    flex.register_forward_hook(HookFunction("fc1", editing_function=edit))
    with pytest.raises(HookError, match=r"(?s)fc1.*went wrong|went wrong.*fc1") as error:
        flex(BATCH)
    assert isinstance(error.value.__cause__, ArithmeticError)
    fails[0] = False
    flex(BATCH)


def test_a_tensor_without_values_has_no_record():
    with torch.device("meta"):
        model, batch = models.mlp(), torch.empty(4, 6, dtype=torch.float64)
    flex = FlexModel(model, records := {})

    def negated(module, full, save_ctx, modules):
        return -full

    for edit, advice in ((None, "dry_run[(]...[)], or"), (negated, "record=False")):
        refused = pytest.raises(HookError, match=f"'fc1': the tensor is on .*'meta'.*{advice}")
        with flex.register_forward_hook(HookFunction("fc1", None, edit)), refused:
            flex(batch)
    flex.register_forward_hook(HookFunction("fc1", None, negated, record=False))
    assert flex(batch).is_meta and not records


def test_a_hook_without_function_does_not_blame_one(monkeypatch):
    def fail(tensor):
        raise MemoryError("no room")

    monkeypatch.setattr("flex_model.records.records.owned_copy", fail)
    flex = FlexModel(models.mlp(), {})
    flex.register_full_backward_hook(HookFunction("fc2"))
    with pytest.raises(HookError, match="'fc2': reading the tensor raised MemoryError: no room"):
        flex(BATCH).sum().backward()


KINDS = ["forward", "forward_pre", "full_backward", "full_backward_pre"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize(
    "kind, site, width",
    [("forward", "act", 8), ("forward", "out", 5), ("forward_pre", "fc2", 8)]
    + [("full_backward", "act", 8), ("full_backward_pre", "act", 8)],
)
def test_an_exception_on_one_rank_is_an_error_on_all_within_two_seconds(
    kind, site, width, bad_rank
):
    """The other rank is in the model's own collectives by then; the next run works."""
    fails = [True]
    parallelism = models.TWO_RANKS["tp"]
    flex = FlexModel(parallelism.shard(models.mlp()), tensor_parallel_size=2)
    edit = failing_edit(lambda: fails[0] and dist.get_rank() == bad_rank)
    getattr(flex, f"register_{kind}_hook")(HookFunction(site, (None, width), edit))
    start = time.monotonic()
    with pytest.raises(HookError, match=r"went wrong") as error:
        flex(BATCH).sum().backward()
    assert time.monotonic() - start < 2
    assert f"rank {bad_rank}" in str(error.value)
    assert site in str(error.value)
    if dist.get_rank() == bad_rank:
        assert isinstance(error.value.__cause__, ArithmeticError)

    fails[0] = False
    flex.zero_grad()
    flex(BATCH).sum().backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("site", ["fc1", "fc2"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_on_one_rank_leaves_no_collective_of_dtensors_to_it_alone(kind, site):
    """The gradient of what fc1 is given is still to be summed over the ranks."""
    fails = [True]
    flex = FlexModel(models.TWO_RANKS["dtensor"].shard(models.mlp()), timeout=5)
    edit = failing_edit(lambda: fails[0] and dist.get_rank() == 1)
    getattr(flex, f"register_{kind}_hook")(HookFunction(site, editing_function=edit))
    with pytest.raises(HookError, match=rf"rank 1: .*{site}.*went wrong"):
        flex(BATCH).sum().backward()
    fails[0] = False
    flex.zero_grad()
    flex(BATCH).sum().backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("site", ["fc1", "fc2"])
def test_ddp_works_on_after_an_edit_of_a_gradient_failed(site):
    def fails_on_rank_1(module, full, save_ctx, modules):
        if dist.get_rank() == 1:
            raise ArithmeticError("went wrong")

    flex = FlexModel(nn.parallel.DistributedDataParallel(models.mlp()))
    with (
        flex.register_full_backward_pre_hook(HookFunction(site, None, fails_on_rank_1)),
        pytest.raises(HookError, match="went wrong"),
    ):
        flex(BATCH).sum().backward()
    flex.zero_grad()
    flex(BATCH).sum().backward()  # torch's reducer had come to its end
    gradients = [parameter.grad.clone() for parameter in flex.parameters()]
    flex.restore()
    alone = models.mlp()
    alone(BATCH).sum().backward()
    for gradient, parameter in zip(gradients, alone.parameters()):
        torch.testing.assert_close(gradient, parameter.grad)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("site", ["fc1", "fc2", "out"])
@pytest.mark.parametrize("name", ["fsdp2", "ddp"])
def test_a_failed_edit_of_a_gradient_is_raised_at_the_end_of_the_backward(name, site):
    """FSDP2 and DDP finish theirs, and call hooks on parameters in the next one."""
    calls, fails = [], [True]
    parallelism = models.TWO_RANKS[name]

    def double(module, full, save_ctx, modules):
        calls.append(1)
        return full * 2

    flex = FlexModel(parallelism.shard(models.mlp()), **parallelism.sizes)
    failing = failing_edit(lambda: fails[0] and dist.get_rank() == 1)
    flex.register_full_backward_hook(HookFunction(site, editing_function=failing))
    names = ["inp.weight", "fc1.weight", "fc2.weight", "out.weight"]
    for parameter_name in names:
        flex.register_hook(HookFunction(parameter_name, editing_function=double))
    with pytest.raises(HookError, match="went wrong"):
        flex(parallelism.my_rows(BATCH)).mean().backward()
    for fails[0] in (False, True, False):
        flex.zero_grad()
        calls.clear()
        if fails[0]:
            with pytest.raises(HookError, match="went wrong"):
                flex(parallelism.my_rows(BATCH)).mean().backward()
            continue
        flex(parallelism.my_rows(BATCH)).mean().backward()
        assert len(calls) == len(names)
    oracle = models.mlp()
    getattr(oracle, site).register_full_backward_hook(lambda m, grads, _: (grads[0] * 2,))
    oracle(BATCH).mean().backward()
    for parameter_name in names:
        gradient = flex.get_module_gradient(parameter_name)
        torch.testing.assert_close(gradient, 2 * oracle.get_parameter(parameter_name).grad)
    flex.restore()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("edits", [False, True])
def test_hooks_that_run_in_another_order_are_an_error(edits):
    class Crossed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Identity(), nn.Identity()

        def forward(self, x):
            if dist.get_rank() == 0:
                return self.second(self.first(x))
            return self.first(self.second(x))

    flex = FlexModel(Crossed(), tensor_parallel_size=2, timeout=5)
    for site in ("first", "second"):
        flex.register_forward_hook(HookFunction(site, editing_function=double if edits else None))
    with pytest.raises(HookMismatchError, match=r"(?s)first.*second|second.*first"):
        flex(BATCH)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("edits", [False, True])
def test_two_wraps_that_run_in_another_order_are_an_error(edits):
    """Alike in all but their tensors, before and after a run that all make."""
    wraps = []
    for _ in range(2):
        wraps.append(models.replicas(FlexModel(models.mlp(), tensor_parallel_size=2, timeout=5)))
        wraps[-1].register_forward_hook(HookFunction("fc1", None, double if edits else None))
    for _ in range(2):
        for i in (0, 1) if dist.get_rank() == 0 else (1, 0):
            both = r"different FlexModels: .*of FlexModel \d+; .*of FlexModel \d+"
            with pytest.raises(HookMismatchError, match=both):
                wraps[i](BATCH)
        for wrap in wraps:
            wrap(BATCH)
    for wrap in wraps:
        wrap.restore()


@pytest.mark.ranks(2, timeout=20)
@pytest.mark.parametrize("edits", [False, True])
def test_a_late_rank_is_named_and_the_users_groups_go_on(edits):
    """After that the wrapper raises on every rank alike, and restore() does not wait."""
    hook = HookFunction("0", editing_function=double if edits else None)
    flex = FlexModel(nn.Sequential(nn.Identity()), tensor_parallel_size=2, timeout=1)
    flex.register_forward_hook(hook)
    flex(BATCH)
    start = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(HookError, match="rank 1"):
            flex(BATCH)
        assert time.monotonic() - start < 3
    else:
        time.sleep(3)
    with pytest.raises(HookError):
        flex(BATCH)
    start = time.monotonic()
    flex.restore()
    del flex
    assert time.monotonic() - start < 2
    dist.barrier()
    with FlexModel(nn.Sequential(nn.Identity()), tensor_parallel_size=2) as again:
        again.register_forward_hook(hook)
        assert torch.equal(again(BATCH), 2 * BATCH if edits else BATCH)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("failing", [(1,), (0, 1)])
def test_an_exception_of_the_model_keeps_its_type_and_is_a_hook_error_on_other_ranks(failing):
    fails, rank = [True], dist.get_rank()

    class Picky(nn.Module):
        def forward(self, x):
            if fails[0] and rank in failing:
                raise KeyError("mine")
            return x

    flex = FlexModel(nn.Sequential(nn.Identity(), Picky()), tensor_parallel_size=2, timeout=30)
    flex.register_forward_hook(HookFunction("0"))
    start = time.monotonic()
    for _ in range(2):
        with pytest.raises(KeyError if rank in failing else HookError, match="mine"):
            flex(BATCH)
    assert time.monotonic() - start < 10
    fails[0] = False
    flex(BATCH)


class MuteError(Exception):
    def __str__(self):
        raise ValueError


@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.ranks(2))])
@pytest.mark.parametrize("is_model", [True, False])
def test_an_exception_without_a_text_is_named_by_its_class(number, is_model):
    is_failing = number == 1 or dist.get_rank() == 1

    def fails(*args):
        if is_failing:
            raise MuteError

    model = nn.Sequential(nn.Identity(), nn.Identity())
    flex = FlexModel(model, tensor_parallel_size=number, timeout=30)
    flex.register_forward_hook(HookFunction("0", editing_function=None if is_model else fails))
    if is_model:
        model[1].register_forward_hook(fails)
    kind, text = (MuteError, None) if is_model and is_failing else (HookError, "Mute")
    with pytest.raises(kind, match=text):
        flex(BATCH)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_a_rank_that_has_registered_no_hooks_never_comes_and_is_named(transport):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEX_MODEL_TRANSPORT", transport)
        flex = FlexModel(models.mlp(), tensor_parallel_size=2, timeout=30)
    if dist.get_rank() == 0:
        flex.register_forward_hook(HookFunction("fc1"))
        start = time.monotonic()
        with pytest.raises(HookMismatchError, match=r"rank 1 has registered no hooks"):
            flex(BATCH)
        assert 4 < time.monotonic() - start < 10
    else:
        flex(BATCH)  # goes through: nothing is asked of it
    dist.barrier()
    flex.register_forward_hook(HookFunction("fc2"))
    with pytest.raises(HookError, match="has registered no hooks"):  # as rank 0 said
        flex(BATCH)
    flex.restore()


@pytest.mark.ranks(2)
def test_a_rank_that_has_removed_its_hooks_never_comes_and_is_named():
    """The other one waited for the whole timeout, and said that it was missing."""
    flex = models.replicas(FlexModel(models.mlp(), tensor_parallel_size=2, timeout=10))
    handle = flex.register_forward_hook(HookFunction("fc1"))
    flex(BATCH)
    if dist.get_rank() == 0:
        with pytest.raises(HookMismatchError, match=r"rank 1 has registered no hooks"):
            flex(BATCH)
    else:
        handle.remove()
        flex(BATCH)
    dist.barrier()
    flex.restore()


@pytest.mark.ranks(2)
def test_a_rank_may_register_its_hooks_a_little_later():
    flex = models.replicas(FlexModel(models.mlp(), tensor_parallel_size=2, timeout=30))
    if dist.get_rank() == 1:
        time.sleep(1)
    flex.register_forward_hook(HookFunction("fc1"))
    flex(BATCH)
    flex.restore()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_transforms_of_functions_are_named_on_several_ranks(transport, monkeypatch):
    monkeypatch.setenv("FLEX_MODEL_TRANSPORT", transport)
    flex = models.replicas(FlexModel(models.mlp(), tensor_parallel_size=2))
    flex.register_forward_hook(HookFunction("act", editing_function=lambda m, x, s, ms: x.flip(-1)))
    expected = flex(BATCH)
    full = BATCH.clone().requires_grad_()

    def batched_gradient():
        part = fm_dist.scatter_tensor_parallel(full, 0, flex.fmps).sum(0)
        torch.autograd.grad(part, full, torch.eye(6, dtype=full.dtype), is_grads_batched=True)

    for transform in (
        lambda: torch.func.vmap(flex)(BATCH),
        lambda: torch.func.vmap(flex.module)(BATCH[:, None]),
        lambda: torch.func.grad(lambda x: flex(x).sum())(BATCH),
        lambda: torch.func.jvp(flex, (BATCH,), (BATCH,)),
        batched_gradient,
    ):
        with pytest.raises(
            HookError, match=r"transforms of torch\.func .* use torch\.autograd and"
        ):
            transform()
        assert torch.equal(flex(BATCH), expected)


@pytest.mark.ranks(2)
def test_a_text_that_no_encoding_has_is_told_on_every_rank():
    """It left the other rank waiting, and the FlexModel unusable."""

    def edit(module, full, save_ctx, modules):
        if dist.get_rank() == 1:
            raise ValueError("no vector for the token \ud83d")

    flex = FlexModel(models.mlp(), data_parallel_size=2)
    flex.register_forward_hook(HookFunction("fc1", editing_function=edit))
    for _ in range(2):
        with pytest.raises(HookError, match=r"no vector for the token \\ud83d"):
            flex(models.random(2, 6))
    flex.restore()


def test_settings_that_are_nan_are_equal():
    check_equal([float("nan"), float("nan")], "pad_value")

"""Suspended runs against plain loops over the batches: the same bits."""

import contextlib
import contextvars
import copy
import itertools
import random
import signal
import threading
import time
from argparse import Namespace

import pytest
import torch
from families import tensors_of
from greenlet import GreenletExit
from torch import nn
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

import models
from flex_model import FlexModel, HookFunction, sequential
from flex_model.sequential.suspension import ThreadState
from models import torch_hooks

# Not in the test that uses it: an operator whose library is freed breaks the import of torch's
# inductor, which the first flex_attention of a process does.
LIBRARY = torch.library.Library("flex_model_test", "DEF")


def assert_equal(found, expected):
    found, expected = tensors_of(found), tensors_of(expected)
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected):
        assert torch.equal(one, other)


def assert_nothing_left(module):
    assert torch_hooks(module) == []
    assert [t.name for t in threading.enumerate() if t.name.startswith("flex_model")] == []


def halve(module, x, save_ctx, modules):
    return x * 0.5


def blocks(num=3, width=6):
    return models.seeded(lambda: nn.Sequential(*(nn.Linear(width, width) for _ in range(num))))


class Stack(nn.Module):
    """Blocks in a ModuleList; ``order`` says which ones are called, ``stops`` ends early."""

    def __init__(self, num=4, order=None, stops=False):
        super().__init__()
        self.blocks = nn.ModuleList(blocks(num))
        self.order, self.stops = order or range(num), stops

    def forward(self, x):
        for i in self.order:
            x = self.blocks[i](x).tanh()
            if self.stops and x.sum() > 0:
                break
        return x


BATCHES = [models.random(rows, 6, seed=rows, dtype=torch.float32) for rows in (2, 3, 1, 5, 4)]


@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize("window", [None, 1, 2])
@pytest.mark.parametrize("per_step", [1, 3])
@pytest.mark.parametrize(
    "settings",
    [{}, {"order": (2, 0, 0, 3, 0, 2)}, {"stops": True}, {"stops": True, "order": [0, 1, 2] * 3}],
    ids=["straight", "repeated", "early exit", "loop of its own length"],
)
def test_any_control_flow(settings, window, per_step, is_loaded):
    model = Stack(**settings)
    loading = {"weights": model.state_dict(), "device": "cpu"} if is_loaded else {}
    empty = copy.deepcopy(model).to("meta") if is_loaded else model
    outputs = sequential.run(empty, BATCHES, window=window, targets_per_step=per_step, **loading)
    for output, batch in zip(outputs, BATCHES):
        assert torch.equal(output, model(batch))
    assert len(outputs) == len(BATCHES)
    assert_nothing_left(empty)


def test_targets_inside_targets_and_a_shared_one():
    model = nn.Sequential(Stack(2), Stack(3), blocks(1))
    model.add_module("again", model[0])
    names = ["0", "1", "0.blocks.1", "1.blocks.0", "1.blocks.2"]
    ended = []
    outputs = sequential.run(
        model, BATCHES, names, window=2, on_target_end=lambda name, i: ended.append((name, i))
    )
    for output, batch in zip(outputs, BATCHES):
        assert torch.equal(output, model(batch))
    of_first_window = [name for name, indices in ended if indices == [0, 1]]
    assert of_first_window == [
        "0.blocks.1",
        "0",
        "1.blocks.0",
        "1.blocks.2",
        "1",
        "0.blocks.1",
        "0",
    ]


def test_at_most_256_batches_are_in_a_window():
    """All of them were, so a generator was read to its end before the first output."""
    model, read = nn.Sequential(*blocks(2)), itertools.count()
    weights = sequential.DictWeights(model.state_dict())
    batches = (torch.full((1, 6), float(next(read))) for _ in range(300))
    expected = [model(torch.full((1, 6), float(i))) for i in range(300)]
    reads = []

    def on_output(index, output):
        reads.append(next(copy.copy(read)))
        return output

    result = sequential.run(
        model, batches, targets=["0", "1"], weights=weights, prefetch=0, on_output=on_output
    )
    assert_equal(result, expected)
    assert result.loads == {"0": 2, "1": 2}
    assert reads[0] == 256


@pytest.mark.parametrize("prefetch", [None, 0, 1])
def test_layer_by_layer_with_a_bounded_window(prefetch):
    """``prefetch`` is None without weights to load."""
    model = Stack(3)
    weights = sequential.DictWeights(model.state_dict())
    loading = {} if prefetch is None else {"prefetch": prefetch, "weights": weights}
    calls, under_way = [], []
    for i, block in enumerate(model.blocks):
        block.register_forward_hook(lambda m, a, o, i=i: calls.append((i, len(a[0]))))

    def batches():
        for i, batch in enumerate(BATCHES):
            under_way.append(i)
            yield batch

    delivered = []

    def on_output(index, output):
        delivered.append((index, len(under_way)))
        return index * 10

    result = sequential.run(model, batches(), window=2, on_output=on_output, **loading)
    assert result == [0, 10, 20, 30, 40]
    assert [block for block, _ in calls] == [0, 0, 1, 1, 2, 2] * 2 + [0, 1, 2]
    if prefetch:  # one batch more is asked for, so that its first weights can be read ahead
        assert delivered == [(0, 3), (1, 3), (2, 5), (3, 5), (4, 5)]
    else:
        assert delivered == [(0, 2), (1, 2), (2, 4), (3, 4), (4, 5)]


def test_arguments_of_every_kind_and_a_call_of_ones_own():
    model = Stack(2)
    x = BATCHES[0]
    outputs = sequential.run(model, [x, (x,), [x], {"x": x}])
    assert all(torch.equal(output, model(x)) for output in outputs)
    assert outputs.save_ctxs == [Namespace()] * 4
    doubled = sequential.run(model, [x], call=lambda model, batch: model(model(batch)))
    assert torch.equal(doubled[0], model(model(x)))
    assert sequential.run(model, []) == []


# ---- what torch keeps per thread and per process ----------------------------------------------


class Plain(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Counting(TorchDispatchMode):
    """Adds, to all that is made under it, how many it has seen."""

    def __init__(self):
        super().__init__()
        self.num_calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_calls += 1
        return func(*args, **(kwargs or {}))


variable = contextvars.ContextVar("variable", default="the caller's")


@contextlib.contextmanager
def variable_set():
    token = variable.set("the batch's")
    try:
        yield
    finally:
        variable.reset(token)


@contextlib.contextmanager
def changed_values():
    """Set by functions, and not set back."""
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch._C._set_fwd_grad_enabled(False)
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.float16)
    torch.set_autocast_cache_enabled(False)
    yield


def kept_tensors():
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t)


CONTEXTS = {
    "nothing": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference": torch.inference_mode,
    "no inference": lambda: torch.inference_mode(False),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "other autocast": lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
    "no autocast": lambda: torch.autocast("cpu", enabled=False),
    "device": lambda: torch.device("meta"),
    "function mode": Plain,
    "dispatch mode": Counting,
    "no functions": torch._C.DisableTorchFunctionSubclass,
    "saved tensors": kept_tensors,
    "no saved tensors": lambda: torch.autograd.graph.disable_saved_tensors_hooks("not here"),
    "replication": implicit_replication,
    "threads": lambda: torch.autograd.set_multithreading_enabled(False),
    "views": lambda: torch.autograd._force_original_view_tracking(True),
    "attention": lambda: sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]),
    "variable": variable_set,
    "values": changed_values,
}


def state_of_thread():
    """What code can ask for, besides our own ThreadState."""
    return (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch._C._is_fwd_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        str(torch.get_default_device()),
        torch.empty(0).device.type,
        torch._C._is_torch_function_enabled(),
        [type(mode) for mode in torch.overrides._get_current_function_mode_stack()],
        [type(mode) for mode in _python_dispatch._get_current_dispatch_mode_stack()],
        [mode.num_calls for mode in _python_dispatch._get_current_dispatch_mode_stack()][1:],
        torch._C._autograd._top_saved_tensors_default_hooks(True) is None,
        torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
        torch._C._get_dtensor_allow_implicit_replication(),
        torch._C._is_multithreading_enabled(),
        torch._C._is_view_replay_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        str(torch._C._dispatch_tls_local_include_set()),
        str(torch._C._dispatch_tls_local_exclude_set()),
        torch._C._functorch.get_dynamic_layer_stack_depth(),
        variable.get(),
    )


class Entering(nn.Module):
    """Calls its blocks in contexts of the batch's own, one inside the other."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(blocks(3))

    def forward(self, x, contexts):
        seen = []
        with contextlib.ExitStack() as stack:
            for block, context in zip(self.blocks, contexts):
                stack.enter_context(context())
                if x.is_inference() and not torch.is_inference_mode_enabled():
                    x = x.clone()
                x = block(x.float())
                seen.append(state_of_thread())
        return x, seen


@pytest.mark.parametrize("outer", [n for n in CONTEXTS if n not in ("values", "dispatch mode")])
def test_what_torch_keeps_per_thread_is_each_batchs_own(outer):
    model = Entering()
    names = list(CONTEXTS)
    batches = []
    for i, step in itertools.product(range(len(names)), (1, 5)):
        chosen = [names[(i + j * step) % len(names)] for j in range(3)]
        if not {"saved tensors", "no saved tensors"} <= {outer, *chosen}:  # torch refuses both
            batches.append((BATCHES[0], [CONTEXTS[name] for name in chosen]))
    before = ThreadState.now()
    with CONTEXTS[outer]():
        inside = ThreadState.now()
        expected = []
        for batch in batches:
            expected.append(model(*batch))
            inside.restore()  # what "values" has left behind
            torch.set_default_dtype(torch.float32)
            assert ThreadState.now() == inside
        found = sequential.run(model, batches)
        assert ThreadState.now() == inside
        assert_equal([x for x, _ in found], [x for x, _ in expected])
    assert ThreadState.now() == before
    for (one, seen), (other, expected_seen) in zip(found, expected):
        assert seen == expected_seen
        assert (one.dtype, one.requires_grad, one.is_inference()) == (
            other.dtype,
            other.requires_grad,
            other.is_inference(),
        )


def test_what_autocast_has_cast_is_each_batchs_own():
    model = Stack(3)

    def call(model, batch):
        dtype = torch.float16 if len(batch) == 5 else torch.bfloat16
        with torch.set_grad_enabled(len(batch) != 3), torch.autocast("cpu", dtype):
            return model(batch)

    gradients, found = [], sequential.run(model, BATCHES * 9, call=call)
    expected = [call(model, batch) for batch in BATCHES * 9]
    assert_equal(found, expected)
    for outputs in (found, expected):
        model.zero_grad()
        sum(output.float().sum() for output in outputs if output.requires_grad).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("window", [None, 2, 1])
def test_batches_of_a_generator_are_run_in_its_contexts(window):
    model = Stack(3)

    def batches():
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            yield from BATCHES

    before = ThreadState.now()
    found = sequential.run(model, batches(), window=window)
    assert ThreadState.now() == before
    assert_equal(found, [model(batch) for batch in batches()])
    assert not any(output.requires_grad for output in found)


@pytest.mark.parametrize("kind", [Namespace, type("Batch", (), {})])
def test_batches_of_any_class_in_one_memory_are_found(kind):
    class Read(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, batch):
            return self.b(self.a(batch.x))

    def batches():
        memory = torch.zeros(2, 6)
        for i in range(3):
            batch = kind()
            batch.x = memory.fill_(i)
            yield (batch,)

    with torch.no_grad(), pytest.raises(ValueError, match="batch 0 was changed by reading a later"):
        sequential.run(Read(), batches(), targets=["a", "b"], window=3)


@pytest.mark.parametrize("what", ["dict", "tensor", "memory"])
def test_batches_that_are_one_object_are_read_one_at_a_time(what):
    model = Stack(3)

    def batches():
        batch = {"x": torch.empty(2, 6)}
        for i in range(3):
            value = models.random(2, 6, seed=i, dtype=torch.float32)
            batch["x"] = value if what == "dict" else batch["x"].copy_(value)
            yield {"x": torch.from_numpy(batch["x"].numpy())} if what == "memory" else batch

    with torch.no_grad():
        expected = [model(**batch) for batch in batches()]
        loading = {"weights": model.state_dict()}
        for settings in ({}, {"window": 2}, {"window": 1} | loading):
            with pytest.raises(ValueError, match="batch 0 was changed by reading a later one"):
                sequential.run(model, batches(), **settings)
        for settings in ({}, {"prefetch": 0} | loading):
            assert_equal(sequential.run(model, batches(), window=1, **settings), expected)
        batch = next(batches())
        assert_equal(sequential.run(model, [batch] * 3), [model(**batch)] * 3)


def test_a_copy_of_the_model_is_made_inside_a_batch():
    model = Stack(3)
    outputs = sequential.run(model, BATCHES, call=lambda m, batch: copy.deepcopy(m)(m(batch)))
    assert_equal(outputs, [model(model(batch)) for batch in BATCHES])


class Known(nn.Linear):
    """Sets an attribute, also where it is compiled."""

    def forward(self, x):
        self.is_called = True
        return super().forward(x)


class Noted(nn.Module):
    """A block that reads an attribute and sets two."""

    def __init__(self):
        super().__init__()
        self.linear, self.mask, self.calls = Known(6, 6), None, 0

    def forward(self, x):
        self.mean, self.calls = x.mean(), self.calls + 1
        return x + self.linear(x * self.mask)


class KeepsInAttributes(nn.Module):
    """Sets attributes of its blocks and reads those that they set; some batches set none."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(models.seeded(Noted) for _ in range(3))

    def forward(self, x):
        if len(x) != 1:
            for block in self.blocks:
                block.mask = x[:1].sign()
        self.skip = x
        for block in self.blocks:
            x = block(x)
        x, is_there = x + self.skip, hasattr(self, "skip")
        del self.skip
        means = torch.stack([block.mean for block in self.blocks])
        return x, means, torch.tensor([is_there, hasattr(self, "skip")])


@pytest.mark.parametrize("window", [None, 2, 1])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_attributes_that_a_batch_sets_are_its_own(window, is_compiled):
    methods = nn.Module.__setattr__, nn.Module.__delattr__
    model, other = KeepsInAttributes(), KeepsInAttributes()
    if is_compiled:
        for block in model.blocks:
            block.linear.compile(backend="eager", fullgraph=True)
    with torch.no_grad():  # torch warns where it compiles for a leaf with a gradient
        found = sequential.run(model, BATCHES, window=window)
        assert_equal(found, [other(batch) for batch in BATCHES])
    assert [(block.calls, block.linear.is_called) for block in model.blocks] == [(5, True)] * 3
    for block, expected in zip(model.blocks, other.blocks):
        assert torch.equal(block.mask, expected.mask) and torch.equal(block.mean, expected.mean)
    assert (nn.Module.__setattr__, nn.Module.__delattr__) == methods


def test_transforms_of_functions_are_suspended():
    model = Stack(3)

    def of_samples(model, batch):
        def loss(x):
            return model(x).square().sum()

        return torch.func.vmap(torch.func.grad(loss))(batch), model(batch)

    for found, batch in zip(sequential.run(model, BATCHES, call=of_samples), BATCHES):
        assert_equal(found, of_samples(model, batch))


def test_derivatives_in_forward_mode_are_not_those_of_other_batches():
    model = Stack(3)

    def call(model, batch):
        return torch.func.jvp(model, (batch,), (batch.cos(),))

    for found, batch in zip(sequential.run(model, BATCHES, call=call, window=1), BATCHES):
        assert_equal(found, call(model, batch))
    with pytest.raises(RuntimeError, match=r"forward-mode.*window=1"):
        sequential.run(model, BATCHES, call=call)
    assert_equal(call(model, BATCHES[0]), call(Stack(3), BATCHES[0]))


def test_replaced_parameters_are_not_those_of_other_batches():
    model = Stack(3)

    def call(model, batch):
        parameters = {name: p * len(batch) for name, p in model.named_parameters()}
        return torch.func.functional_call(model, parameters, (batch,))

    for output, batch in zip(sequential.run(model, BATCHES, call=call, window=1), BATCHES):
        assert torch.equal(output, call(model, batch))
    with pytest.raises(RuntimeError, match=r"with functional_call.*window=1"):
        sequential.run(model, BATCHES, call=call)

    def mixed(model, batch):  # calls that are equally deep in C
        nothing = {}
        return call(model, batch) if len(batch) == 3 else model(*(batch,), **nothing)

    with pytest.raises(RuntimeError, match=r"with functional_call.*window=1"):
        sequential.run(model, BATCHES, call=mixed)
    assert torch.equal(model(BATCHES[0]), Stack(3)(BATCHES[0]))


def test_settings_that_the_callers_callbacks_change_are_the_callers():
    model, seen = Entering(), []
    batches = [(x, [CONTEXTS["enable_grad"]]) for x in BATCHES]

    def change(index, output):
        seen.append(torch.is_grad_enabled())
        torch.set_grad_enabled(False)
        return output[1]

    try:
        found = sequential.run(model, batches, window=5, on_output=change)
        assert not torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)
    assert seen == [True] + [False] * 4
    assert found == [model(*batch)[1] for batch in batches]


def test_targets_inside_an_operator_are_refused():
    """Its C++ frames could not be left in any other order than they were entered."""
    model = Stack(2)
    LIBRARY.define("blocks(Tensor x) -> Tensor")
    LIBRARY.impl("blocks", lambda x: Stack.forward(model, x), "CompositeImplicitAutograd")
    model.forward = torch.ops.flex_model_test.blocks
    with pytest.raises(RuntimeError, match=r"'blocks.0' is called by way of compiled code"):
        sequential.run(model, BATCHES)
    outer = nn.ModuleList([model])
    outer.forward = lambda x: model(x)
    for output, batch in zip(sequential.run(outer, BATCHES, ["0"]), BATCHES):
        assert torch.equal(output, model(batch))
    assert_nothing_left(model)


def test_random_numbers_do_not_depend_on_the_window():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6))
    ones = torch.ones(4, 6)
    torch.manual_seed(3)
    first = model(ones)
    runs = []
    for window in (1, 2, None):
        torch.manual_seed(3)
        runs.append(sequential.run(model, [ones] * 3, ["1", "3"], window=window))
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other))
    assert torch.equal(runs[0][0], first)  # as a plain call does
    assert not torch.equal(runs[0][0], runs[0][1])
    assert not torch.equal(runs[0][1], runs[0][2])
    again = sequential.run(model, [ones] * 3, ["1", "3"])
    assert not torch.equal(again[0], runs[0][0])  # the caller's state went on


def test_a_run_without_random_numbers_leaves_the_state():
    before = torch.get_rng_state()
    sequential.run(Stack(), BATCHES)
    assert torch.equal(before, torch.get_rng_state())


def test_modes_of_the_caller_reach_the_batches():
    from torch.utils.flop_counter import FlopCounterMode

    model = Stack()
    with FlopCounterMode(display=False) as counter, torch.device("meta"):
        made = sequential.run(model, BATCHES[:1], call=lambda m, b: (m(b), torch.ones(1)))
    assert counter.get_total_flops() > 0
    assert made[0][1].is_meta


# ---- what goes wrong ---------------------------------------------------------------------------


class Failing(Stack):
    """Raises in one of the blocks, for batches of one number of rows."""

    def __init__(self, rows, error, at=2):
        super().__init__(3)
        self.log = []
        model = self

        def fail(module, args):
            if len(args[0]) == rows:
                raise error

        self.blocks[at].register_forward_pre_hook(fail)
        self.forward = lambda x: model.logged(x)

    def logged(self, x):
        try:
            return Stack.forward(self, x)
        finally:
            self.log.append(len(x))


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("kind", [KeyError, SystemExit, GreenletExit])
def test_an_exception_reaches_the_caller_with_its_batch(window, kind):
    error = kind("of the model")
    model = Failing(BATCHES[2].shape[0], error)
    with pytest.raises(kind) as caught:
        sequential.run(model, BATCHES, window=window)
    assert caught.value is error and error.batch_index == 2
    started = BATCHES if window is None else BATCHES[:4]
    assert sorted(model.log) == sorted(len(batch) for batch in started)  # all were left in order
    model.blocks[2]._forward_pre_hooks.clear()
    assert_nothing_left(model)
    assert len(sequential.run(model, BATCHES)) == 5


def test_an_error_of_the_batches_and_of_on_output():
    def batches():
        yield BATCHES[0]
        raise OSError("no more data")

    def on_output(index, output):
        raise LookupError("of on_output")

    model = Stack()
    with pytest.raises(OSError, match="no more data"):
        sequential.run(model, batches())
    with pytest.raises(LookupError, match="of on_output"):
        sequential.run(model, BATCHES, on_output=on_output)
    assert_nothing_left(model)


def interrupt_main_thread_after(seconds):
    def interrupt():
        time.sleep(seconds)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt, name="interrupter")
    thread.start()
    return thread


# An interruption inside of a weak reference's callback goes no further.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("is_loaded", [True, False], ids=["loaded", "in memory"])
def test_ctrl_c_at_any_moment_leaves_nothing(is_loaded):
    pytest.importorskip("safetensors")
    model = Entering()
    chosen = ["autocast", "inference", "device"], ["saved tensors", "no_grad", "function mode"]
    batches = [(x, [CONTEXTS[name] for name in chosen[len(x) % 2]]) for x in BATCHES * 3]
    expected, state = [model(*batch)[0].detach() for batch in batches], model.state_dict()
    found = {"mine": [1]}
    flex = FlexModel(copy.deepcopy(model).to("meta") if is_loaded else model, found)
    flex.register_forward_hook(HookFunction("blocks.2"))
    settings = {"weights": state} if is_loaded else {}
    before = [id(parameter) for parameter in flex.module.parameters()]
    handler, thread, generator = (
        signal.getsignal(signal.SIGINT),
        ThreadState.now(),
        torch.get_rng_state(),
    )
    hooks, chance, num_interrupted = len(torch_hooks(flex.module)), random.Random(0), 0
    for _ in range(60):
        with contextlib.suppress(KeyboardInterrupt):
            interrupter = interrupt_main_thread_after(chance.uniform(0, 0.02))
            try:
                outputs = sequential.run(flex, batches, window=2, **settings)
                assert all(torch.equal(one, other) for (one, _), other in zip(outputs, expected))
            except KeyboardInterrupt:
                num_interrupted += 1
            interrupter.join()  # the interruption may still be to come
        assert [id(parameter) for parameter in flex.module.parameters()] == before
        assert len(torch_hooks(flex.module)) == hooks
        assert not any(t.name.startswith("flex_model") for t in threading.enumerate())
        assert found["mine"] == [1]
        assert signal.getsignal(signal.SIGINT) is handler
        assert ThreadState.now() == thread
        assert torch.equal(torch.get_rng_state(), generator)
    assert num_interrupted > 5


class InterruptedAtItsEnd(torch.autograd.graph.saved_tensors_hooks):
    def __exit__(self, *exc_info):
        raise KeyboardInterrupt


def test_ctrl_c_at_the_end_of_a_context_of_saved_tensors():
    def call(model, batch):
        with InterruptedAtItsEnd(lambda t: t, lambda t: t):
            return model(batch)

    before = ThreadState.now()
    with pytest.raises(KeyboardInterrupt):
        sequential.run(Stack(3), BATCHES, call=call)
    assert ThreadState.now() == before


def test_a_model_that_swallows_its_end_is_ended():
    class Stubborn(Stack):
        def forward(self, x):
            for block in self.blocks:
                with contextlib.suppress(BaseException):
                    x = block(x)
            if len(x) == 3:
                raise ArithmeticError("the second batch")
            return x

    model = Stubborn(3)
    with pytest.raises(ArithmeticError):
        sequential.run(model, BATCHES)
    assert_nothing_left(model)


def test_wrong_arguments():
    model = Stack()
    for match, settings in (
        ("matches no module of Stack; nearest names: 'blocks'", {"targets": ["block"]}),
        ("window must be a whole number of at least 1, got 0", {"window": 0}),
        ("targets_per_step must be", {"targets_per_step": 0}),
        ("prefetch must be", {"prefetch": -1}),
        ("'none', 'cpu' or 'disk', got 'gpu'", {"offload_activations": "gpu"}),
        ("device 'vulkan' can't be used", {"device": torch.device("vulkan")}),
        (r"'re:\(' is not a regular expression", {"targets": ["re:("]}),
    ):
        with pytest.raises(ValueError, match=match):
            sequential.run(model, BATCHES, **settings)
    for match, settings in (
        ("targets must be names.* got 3, a int", {"targets": 3}),
        ("targets must be names.* got 3, a int", {"targets": ["Stack", 3]}),
        ("call must be a function or None, got str", {"call": "forward"}),
        ("on_output must be a function", {"on_output": []}),
        ("on_target_end must be a function", {"on_target_end": 3}),
        ("batches must be an iterable, got int", {"batches": 3}),
        (r"iterable of batches, got one dict; of one batch: \[batch\]", {"batches": {"x": 3}}),
        ("expected an nn.Module or a FlexModel, got str", {"model": "Stack"}),
        ("device must be a str, a torch.device or None, got list", {"device": ["cpu"]}),
    ):
        with pytest.raises(TypeError, match=match):
            sequential.run(**{"model": model, "batches": BATCHES, **settings})


def test_matching_modules():
    model = nn.Sequential(Stack(2), Stack(3))
    match = sequential.match_modules
    assert match(model, ["Stack"]) == set(model)
    assert match(model, ["0.blocks.1", "1"]) == {model[0].blocks[1], model[1]}
    assert match(model, [r"re:.*blocks\.1$"]) == {model[0].blocks[1], model[1].blocks[1]}
    assert match(model, ["re:Lin"]) == {m for m in model.modules() if isinstance(m, nn.Linear)}
    assert match(model, ["nothing"]) == set()
    assert match(model, "Stack") == set(model)  # not its letters

"""Release 0.1.0's functions: ``flex_model.distributed`` and ``flex_model.utils``.

Values and gradients are compared with an unsharded computation that mixes the shards (a Linear over
the gathered dim), so a missing sum or a wrong factor shows.
"""

import functools
import gc
import io
import logging
import socket
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

import flex_model.distributed as fm_dist
import models
import scripts
from flex_model import HookError, HookMismatchError
from flex_model.compat import parallel_state
from flex_model.distributed import process_groups
from flex_model.utils import setup_logger
from tests.ops.test_ops import same_bits

DTYPES = [
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


def state(tp=1, pp=1, dp=1, **settings):
    return fm_dist.initialize_distributed_state(nn.Identity(), tp, pp, dp, **settings)


def values(dtype, *shape):
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


# ---- Names -------------------------------------------------------------------------------------


def test_every_name_of_the_original_is_there():
    for name in fm_dist.__all__:
        assert getattr(fm_dist, name).__name__ == name
        assert name in dir(fm_dist)
    assert len(fm_dist.__all__) == 21
    with pytest.raises(AttributeError, match="no attribute 'all_gather'"):
        fm_dist.all_gather  # noqa: B018


@pytest.mark.slow
def test_the_names_are_not_imported_before_they_are_used():
    code = """
        import sys
        import flex_model
        import flex_model.distributed as fm_dist
        names = ("mappings", "strategies", "stage_transfers")
        loaded = [f"flex_model.compat.{name}" in sys.modules for name in names]
        fm_dist.unity
        print(*loaded, "flex_model.compat.mappings" in sys.modules)
    """
    assert scripts.run_code(code).stdout.split() == ["False", "False", "False", "True"]


@pytest.mark.slow
def test_a_launcher_is_enough():
    """As in 0.1.0: under torchrun nobody needs to call init_process_group."""
    code = """
        import os, torch, torch.distributed as dist, flex_model.distributed as fm_dist
        fmps = fm_dist.initialize_distributed_state(torch.nn.Identity(), 2, 1, 1)
        mine = torch.tensor([fmps.get_tensor_parallel_rank()])
        print(fm_dist.all_gather_tensor_parallel(mine, 0, fmps).tolist(), flush=True)
        dist.barrier()
        os._exit(0)  # gloo's threads abort an orderly exit now and then
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with ThreadPoolExecutor() as threads:
        run = functools.partial(threads.submit, scripts.run_code, code, **common)
        ranks = [run(RANK=str(rank)) for rank in range(2)]
    assert [rank.result().stdout for rank in ranks] == ["[0, 1]\n"] * 2


# ---- One process -------------------------------------------------------------------------------


def test_one_process_needs_no_launcher():
    fmps = state()
    assert not dist.is_initialized()
    for get in ("local", "subset"):
        assert getattr(fmps, f"get_{get}_rank")() == 0
        assert getattr(fmps, f"get_{get}_world_size")() == 1
    for axis in ("tensor", "pipeline", "data"):
        assert getattr(fmps, f"get_{axis}_parallel_rank")() == 0
        assert getattr(fmps, f"get_{axis}_parallel_world_size")() == 1
        assert getattr(fmps, f"get_{axis}_parallel_group")() is None
    assert fmps.get_subset_process_group() is None


@pytest.mark.parametrize("kind", ["tensor", "data"])
def test_on_one_process_every_function_is_the_identity(kind):
    fmps = state()
    tensor = torch.ones(3, 4, requires_grad=True)
    for name in ("all_gather", "scatter"):
        result = getattr(fm_dist, f"{name}_{kind}_parallel")(tensor, -1, fmps)
        assert torch.equal(result, tensor)
        assert result.requires_grad
    assert fm_dist.all_gather_tensor_parallel(tensor, 0, fmps) is not tensor
    assert getattr(fm_dist, f"broadcast_{kind}_parallel")(tensor, fmps) is tensor
    assert fm_dist.unity(tensor, fmps) is tensor


def test_on_one_process_a_stage_sends_to_itself():
    fmps = state()
    fm_dist.batch_isend_irecv_pipeline_parallel(fmps, [], [], [], [])
    received = torch.zeros(3)
    fm_dist.batch_isend_irecv_pipeline_parallel(fmps, [received], [0], [torch.ones(3)], [0])
    assert torch.equal(received, torch.ones(3))
    tensor = torch.ones(2)
    gathered = fm_dist.gather_pipeline_parallel_tensor_dicts(fmps, {"a": tensor})
    tensor.zero_()
    assert torch.equal(gathered["a"], torch.ones(2))


def test_sizes_must_multiply_to_the_number_of_ranks():
    with pytest.raises(
        ValueError, match=r"= 6, but the process group has 1 rank; give sizes that multiply to 1"
    ):
        state(tp=3, dp=2)
    with pytest.raises(TypeError, match=r"expected an nn\.Module, got dict"):
        fm_dist.initialize_distributed_state({}, 1, 1, 1)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda f: fm_dist.all_gather_tensor_parallel([1], 0, f),
            TypeError,
            "expected a dense torch.Tensor, got list",
        ),
        (
            lambda f: fm_dist.all_gather_data_parallel(torch.ones(2), None, f),
            TypeError,
            "dim must be an int, got None",
        ),
        (
            lambda f: fm_dist.scatter_tensor_parallel(torch.ones(2), -2, f),
            IndexError,
            "dim -2 is out of range",
        ),
        (lambda f: fm_dist.broadcast_data_parallel(None, f), TypeError, "got NoneType"),
        (
            lambda f: fm_dist.batch_isend_irecv_pipeline_parallel(f, [], [], [torch.ones(1)], [1]),
            ValueError,
            "send rank 1 is out of range; ranks are stages of the pipeline, 0 to 0",
        ),
        (
            lambda f: fm_dist.gather_pipeline_parallel_tensor_dicts(f, {"a": [1]}),
            HookError,
            "'a': expected a dense torch.Tensor, got list",
        ),
    ],
)
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call(state())


@pytest.mark.parametrize("fmps", [None, nn.Identity()], ids=["not initialised", "a module"])
def test_what_is_no_state_is_named(fmps):
    x, routing = torch.ones(2), fm_dist.ActivationTensorAllToAllRoutingStrategy
    calls = {"routing of an activation": lambda: routing.initialize(fmps, x, None)}
    for name, args in {
        "all_gather_tensor_parallel": (x, 0, fmps),
        "all_gather_data_parallel": (x, 0, fmps),
        "scatter_tensor_parallel": (x, 0, fmps),
        "scatter_data_parallel": (x, 0, fmps),
        "broadcast_tensor_parallel": (x, fmps),
        "broadcast_data_parallel": (x, fmps),
        "batch_isend_irecv_pipeline_parallel": (fmps, [], [], [], []),
        "gather_pipeline_parallel_tensor_dicts": (fmps, {}),
    }.items():
        calls[name] = functools.partial(getattr(fm_dist, name), *args)
    for name, call in calls.items():
        with pytest.raises(TypeError, match=f"{name}: fmps must be a ParallelState, got .*initial"):
            call()


# ---- Gather and scatter --------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind, axis", [("tensor", "tp"), ("data", "dp")])
@pytest.mark.parametrize("dim, sizes", [(0, [2, 2]), (1, [4, 3]), (-1, [1, 3]), (0, [0, 3])])
def test_gather_and_scatter_undo_each_other(kind, axis, dim, sizes):
    fmps = state(**{axis: 2})
    shape = [2, 3, 5]
    shape[dim] = sum(sizes)
    for dtype in DTYPES:
        full = values(dtype, *shape)
        shard = full.split(sizes, dim)[dist.get_rank()]  # not contiguous for dim > 0
        gathered = getattr(fm_dist, f"all_gather_{kind}_parallel")(shard, dim, fmps)
        same_bits(gathered, full)
        mine = getattr(fm_dist, f"scatter_{kind}_parallel")(gathered, dim, fmps)
        same_bits(mine, shard)
        mine.zero_()
        same_bits(gathered, full)  # a shard is not a view of the full tensor


@pytest.mark.ranks(4)
@pytest.mark.parametrize("total, parts", [(8, [2, 2, 2, 2]), (10, [3, 3, 3, 1]), (5, [2, 2, 1, 0])])
def test_scatter_alone_splits_as_chunk_does(total, parts):
    fmps, rank = state(tp=4), dist.get_rank()
    full = models.random(total, 2)
    assert torch.equal(fm_dist.scatter_tensor_parallel(full, 0, fmps), full.split(parts)[rank])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind, axis", [("tensor", "tp"), ("data", "dp")])
@pytest.mark.parametrize("sizes", [[3, 3], [4, 2]])
def test_gradients_of_an_edit_that_mixes_shards(kind, axis, sizes):
    """Upstream, trainable and downstream gradients are those of the unsharded computation.

    Over dp the loss is the mean over ranks, and upstream gradients are right after the average.
    """
    fmps, rank = state(**{axis: 2}), dist.get_rank()
    dim = 0 if axis == "dp" else 1
    shape = (6, 4) if axis == "dp" else (4, 6)
    mix = models.seeded(nn.Linear, 6, 6).double()
    full = models.random(*shape).requires_grad_()
    weight = models.random(*shape, seed=5)

    def edit(tensor, layer):
        return layer(tensor.transpose(0, 1)).transpose(0, 1) if axis == "dp" else layer(tensor)

    (edit(full.tanh(), mix).sin() * weight).sum().backward()
    expected, expected_mix = full.grad, mix.weight.grad

    mine = models.seeded(nn.Linear, 6, 6).double()
    shard = full.detach().split(sizes, dim)[rank].clone().requires_grad_()
    gathered = getattr(fm_dist, f"all_gather_{kind}_parallel")(shard.tanh(), dim, fmps)
    part = getattr(fm_dist, f"scatter_{kind}_parallel")(edit(gathered, mine), dim, fmps)
    # over dp the ranks' losses are averaged, so each rank's counts dp times as much
    scale = 2 if axis == "dp" else 1
    (scale * (part.sin() * weight.split(sizes, dim)[rank])).sum().backward()
    assert_close(shard.grad / scale, expected.split(sizes, dim)[rank])
    assert_close(mine.weight.grad, expected_mix)


@pytest.mark.ranks(2)
def test_the_graph_outlives_the_state():
    fmps = state(tp=2)
    shard = torch.ones(2, 1, requires_grad=True)
    part = fm_dist.scatter_tensor_parallel(
        fm_dist.all_gather_tensor_parallel(shard, 1, fmps) * 3, 1, fmps
    )
    del fmps
    part.sum().backward()
    assert torch.equal(shard.grad, torch.full((2, 1), 3.0))


@pytest.mark.ranks(2)
def test_what_the_ranks_do_differently_is_an_error_on_every_rank():
    rank = dist.get_rank()
    fmps = state(tp=2)
    with pytest.raises(HookMismatchError, match=r"dim 0 of a tensor.*dim 1 of a tensor"):
        fm_dist.all_gather_tensor_parallel(torch.ones(2, 2), rank, fmps)
    with pytest.raises(HookMismatchError, match="different dtypes"):
        fm_dist.all_gather_tensor_parallel(torch.ones(2, dtype=DTYPES[rank]), 0, fmps)
    with pytest.raises(HookMismatchError, match="different numbers of dims"):
        fm_dist.all_gather_tensor_parallel(torch.ones([2] * (rank + 1)), 0, fmps)
    with pytest.raises(ValueError, match=r"\[2, 3\] along dim 0.*only that dim may differ"):
        fm_dist.all_gather_tensor_parallel(torch.ones(2 + rank, 2), 1, fmps)
    with pytest.raises(HookMismatchError, match="different shapes"):
        fm_dist.broadcast_tensor_parallel(torch.ones(2 + rank), fmps)
    assert fm_dist.all_gather_tensor_parallel(torch.ones(1), 0, fmps).shape == (2,)


# ---- Broadcast -----------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind, axis", [("tensor", "tp"), ("data", "dp")])
def test_broadcast_writes_in_place(kind, axis):
    fmps = state(**{axis: 2})
    for dtype in DTYPES:
        full = values(dtype, 2, 3)
        tensor = full.clone() if dist.get_rank() == 0 else torch.zeros(3, 2, dtype=dtype).t()
        result = getattr(fm_dist, f"broadcast_{kind}_parallel")(tensor, fmps)
        assert result is tensor
        same_bits(result, full)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("given", [True, False])
def test_broadcast_gives_the_first_rank_the_gradient(given):
    """``given``: whether rank 1's own tensor needs a gradient; rank 0's does."""
    rank = dist.get_rank()
    for kind, axis, expected in (("tensor", "tp", 6.0), ("data", "dp", 6.0 + 12.0)):
        fmps = state(**{axis: 2})
        tensor = torch.full((2,), 3.0 * (1 - rank), requires_grad=rank == 0 or given)
        result = getattr(fm_dist, f"broadcast_{kind}_parallel")(tensor, fmps)
        assert_close(result, torch.full((2,), 3.0), check_stride=False)
        # tp ranks compute the same loss, dp ranks each their own
        factor = 1 + rank if axis == "dp" else 1
        (factor * result**2).sum().backward()
        if rank == 0:
            assert torch.equal(tensor.grad, torch.full((2,), expected))
        elif given:
            assert torch.equal(tensor.grad, torch.zeros(2))


# ---- Pipelines -----------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_stages_exchange_tensors():
    fmps = state(pp=2)
    me = fmps.get_pipeline_parallel_rank()
    peer = 1 - me
    sent = [values(dtype, 3, 4).t() for dtype in DTYPES] + [torch.empty(0), torch.ones(2) * me]
    received = [torch.zeros(3, 4, dtype=dtype).t() for dtype in DTYPES]
    received += [torch.ones(0), torch.zeros(2)]
    kept = torch.zeros(2)
    fm_dist.batch_isend_irecv_pipeline_parallel(
        fmps,
        [*received, kept],
        [peer] * len(received) + [me],
        [*sent, torch.full((2,), 7.0)],
        [peer] * len(sent) + [me],
    )
    for one, other in zip(received[:-1], sent[:-1], strict=True):
        same_bits(one, other)
    assert torch.equal(received[-1], torch.ones(2) * peer)
    assert torch.equal(kept, torch.full((2,), 7.0))


@pytest.mark.ranks(2)
def test_the_first_stage_gets_the_tensors_of_all():
    fmps = state(pp=2)
    stage = fmps.get_pipeline_parallel_rank()
    assert fm_dist.gather_pipeline_parallel_tensor_dicts(fmps, {}) == {}

    def tensors(of_stage):
        named = {f"{of_stage}/{dtype}": values(dtype, 2, 3 + of_stage).t() for dtype in DTYPES}
        return named | {
            f"{of_stage}/scalar ä": torch.tensor(0.5),
            f"{of_stage}/none": torch.empty(0, 3),
        }

    mine = tensors(stage)
    gathered = fm_dist.gather_pipeline_parallel_tensor_dicts(fmps, mine)
    if stage == 1:
        assert gathered == {}
        return
    expected = tensors(0) | tensors(1)
    assert list(gathered) == list(expected)
    for name, tensor in expected.items():
        same_bits(gathered[name], tensor)
    mine["0/torch.float64"].zero_()
    same_bits(gathered["0/torch.float64"], expected["0/torch.float64"])  # a copy


@pytest.mark.ranks(2)
def test_what_a_stage_gives_wrongly_is_an_error_on_every_rank():
    fmps = state(pp=2)
    stage = fmps.get_pipeline_parallel_rank()
    with pytest.raises(ValueError, match=r"'b' on the stages \[0, 1\]; rename them"):
        fm_dist.gather_pipeline_parallel_tensor_dicts(
            fmps, {f"a{stage}": torch.ones(1), "b": torch.ones(1)}
        )
    wrong = {0: {"a": torch.ones(1)}, 1: {"b": [torch.ones(1)]}}[stage]
    with pytest.raises(
        HookError, match=r"rank 1: gather_pipeline.*'b': expected a dense torch\.Tensor, got list"
    ):
        fm_dist.gather_pipeline_parallel_tensor_dicts(fmps, wrong)
    gathered = fm_dist.gather_pipeline_parallel_tensor_dicts(fmps, {f"a{stage}": torch.ones(1)})
    assert len(gathered) == (2 if stage == 0 else 0)


# ---- Groups --------------------------------------------------------------------------------------


@pytest.mark.ranks(4)
def test_groups_of_two_axes():
    """(pp, tp) = (2, 2): group ranks are not global ranks (defect 4 of the original)."""
    fmps, rank = state(tp=2, pp=2), dist.get_rank()
    stage, place = divmod(rank, 2)
    assert (fmps.get_pipeline_parallel_rank(), fmps.get_tensor_parallel_rank()) == (stage, place)
    assert (fmps.get_subset_rank(), fmps.get_local_rank(), fmps.get_local_world_size()) == (
        rank,
        rank,
        4,
    )
    assert dist.get_process_group_ranks(fmps.get_tensor_parallel_group()) == [
        2 * stage,
        2 * stage + 1,
    ]
    assert dist.get_process_group_ranks(fmps.get_pipeline_parallel_group()) == [place, place + 2]
    assert dist.get_process_group_ranks(fmps.get_data_parallel_group()) == [rank]
    assert dist.get_rank(fmps.get_pipeline_parallel_group()) == stage
    assert fmps.get_subset_process_group() is dist.group.WORLD

    tensor = fm_dist.broadcast_tensor_parallel(torch.tensor([rank]), fmps)
    assert tensor.item() == 2 * stage
    received = torch.zeros(1, dtype=torch.int64)
    fm_dist.batch_isend_irecv_pipeline_parallel(
        fmps, [received], [1 - stage], [torch.tensor([rank])], [1 - stage]
    )
    assert received.item() == (rank + 2) % 4
    gathered = fm_dist.gather_pipeline_parallel_tensor_dicts(
        fmps, {f"rank {rank}": torch.tensor([rank])}
    )
    expected = {f"rank {r}": torch.tensor([r]) for r in (rank, rank + 2)} if stage == 0 else {}
    assert gathered == expected


@pytest.mark.ranks(4)
def test_a_model_on_some_of_the_ranks():
    rank = dist.get_rank()
    pair = dist.new_group([1, 3])  # all ranks call it, and two have one group more than the others
    if rank in (1, 3):
        fmps = state(dp=2, process_group=pair)
        assert (fmps.get_local_rank(), fmps.get_subset_rank()) == (rank // 2, rank)
        assert fmps.get_subset_process_group() is pair
        assert fmps.get_data_parallel_group() is pair
        full = fm_dist.all_gather_data_parallel(torch.tensor([rank]), 0, fmps)
        assert full.tolist() == [1, 3]
        state(tp=2, dp=2).get_data_parallel_group()  # made by two ranks, and not counted
    else:
        with pytest.raises(ValueError, match="not a member of the process_group"):
            state(dp=2, process_group=pair)
    everyone = dist.new_group([0, 1, 2, 3], timeout=timedelta(seconds=20))
    # torch's own names for such groups would now differ between members
    total = torch.ones(1)
    dist.all_reduce(total, group=state(tp=2, dp=2).get_tensor_parallel_group())
    assert total.item() == 2
    dist.all_reduce(total, group=state(dp=2, tp=2).get_data_parallel_group())
    assert total.item() == 4
    dist.destroy_process_group(everyone)
    dist.destroy_process_group(pair) if rank in (1, 3) else None


@pytest.mark.ranks(4)
def test_a_member_that_does_not_come_to_a_new_group_is_named():
    if dist.get_rank() == 1:
        fmps = parallel_state.ParallelState(state(tp=2, dp=2).mesh, timeout_s=1.0)
        before = dict(parallel_state._torch_groups)
        parallel_state._torch_groups.clear()
        with pytest.raises(HookError, match=r"global ranks? \[3\]"):
            fmps.get_data_parallel_group()
        parallel_state._torch_groups.update(before)


@pytest.mark.ranks(2)
def test_states_share_groups_and_leave_nothing():
    gc.collect()  # a wrapper of a test before may still hold its groups, in a cycle
    before = len(process_groups._groups)
    states = [state(tp=2), state(dp=2), state(tp=2)]
    for fmps in states:
        fm_dist.all_gather_data_parallel(torch.ones(1), 0, fmps)
        fm_dist.all_gather_tensor_parallel(torch.ones(1), 0, fmps)
    alone = {id(fmps.get_pipeline_parallel_group()) for fmps in states}
    assert len(alone) == 1
    assert len(process_groups._groups) <= before + 1
    gone = weakref.ref(states[0])
    del states, fmps
    gc.collect()
    assert gone() is None
    assert len(process_groups._groups) == before


# ---- Strategies ----------------------------------------------------------------------------------


@pytest.mark.ranks(4)
@pytest.mark.parametrize("expected", [(None, 5), (3, 5)], ids=["None", "global batch"])
def test_activations_are_gathered_over_both_axes(expected):
    fmps = state(tp=2, dp=2)
    row, column = fmps.get_data_parallel_rank(), fmps.get_tensor_parallel_rank()
    route = fm_dist.ActivationTensorAllToAllRoutingStrategy
    full = models.random(3, 5)

    def part(tensor):
        return tensor.split([1, 2])[row].split([2, 3], 1)[column]

    strategy = route.initialize(fmps, None, expected)  # what comes first decides nothing
    for scale in (1, 2):
        shard = part(full * scale).clone().requires_grad_()
        gathered = strategy.execute_prologue(shard)
        assert torch.equal(gathered, full * scale)
        edited = strategy.execute_epilogue(gathered * gathered.sum())
        assert_close(edited, part(full * scale * full.sum() * scale))
        edited.sum().backward()
        whole = (full * scale).requires_grad_()
        (whole * whole.sum()).sum().backward()
        assert_close(
            shard.grad, part(whole.grad)
        )  # for a mean over dp: ranks' losses as they are, times dp
    with pytest.raises(
        ValueError, match=r"expected a tensor of shape \(3, 5\), as its prologue gave, got \(2, 5\)"
    ):
        strategy.execute_epilogue(full[:2])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["Parameter", "Activation"])
def test_tensor_parallel_routing(kind):
    name = {"Parameter": "ParameterTensorParallel", "Activation": "ActivationTensorAllToAll"}[kind]
    route = getattr(fm_dist, f"{name}RoutingStrategy")
    fmps, rank = state(tp=2), dist.get_rank()
    full = models.random(4, 7)
    shard = full.split([4, 3], 1)[rank]
    strategy = route.initialize(fmps, shard, (None, 7))
    assert isinstance(strategy, fm_dist.BaseRoutingStrategy)
    assert torch.equal(strategy.execute_epilogue(strategy.execute_prologue(shard)), shard)
    replicated = route.initialize(fmps, full, (None, None))
    assert torch.equal(replicated.execute_epilogue(replicated.execute_prologue(full)), full)
    with pytest.raises(ValueError, match="says 999 along dim 1, but the ranks hold"):
        route.initialize(fmps, shard, (None, 999)).execute_prologue(shard)
    with pytest.raises(ValueError, match="hold different values"):
        route.initialize(fmps, shard, None).execute_prologue(full + rank)


def test_routing_on_one_process():
    route = fm_dist.ActivationTensorAllToAllRoutingStrategy
    tensor = torch.ones(2, 3)
    strategy = route.initialize(state(), tensor, (None, 3))
    assert strategy.execute_prologue(None) is None
    assert strategy.execute_epilogue(strategy.execute_prologue(tensor)) is tensor
    with pytest.raises(ValueError, match="has 1 dims, the tensor has 2"):
        route.initialize(state(), tensor, (None,))
    own = fm_dist.BaseRoutingStrategy(lambda t: t + 1, lambda t: t - 1)
    assert torch.equal(own.execute_epilogue(own.execute_prologue(tensor)), tensor)


@pytest.mark.parametrize("kind", ["CPUPinned", "CPUPaged", "GPU"])
def test_an_offloaded_tensor_is_a_copy(kind):
    records = {}
    strategy = getattr(fm_dist, f"{kind}MemoryOffloadStrategy").initialize("site", records)
    assert isinstance(strategy, fm_dist.BaseOffloadStrategy)
    tensor = torch.ones(2, requires_grad=True)
    assert strategy.execute(tensor) is None
    with torch.no_grad():
        tensor.zero_()
    strategy.execute(tensor)
    assert_close(records, {"site": [torch.ones(2), torch.zeros(2)]})
    assert not records["site"][0].requires_grad


def test_what_keeps_nothing_and_what_is_no_function():
    records = {}
    fm_dist.NullMemoryOffloadStrategy.initialize("site", records).execute(torch.ones(2))
    assert records == {}
    strategy = fm_dist.NonValidatedFunctionStrategy.initialize(lambda a, b=1: a + b)
    assert strategy.execute(2, b=3) == 5
    with pytest.raises(TypeError, match="expected a function, got int"):
        fm_dist.NonValidatedFunctionStrategy.initialize(3)


# ---- The logger ----------------------------------------------------------------------------------


@pytest.fixture
def library_logger():
    logger = logging.getLogger("flex_model")
    before = list(logger.handlers), logger.level, logger.propagate
    yield logger
    logger.handlers[:], logger.level, logger.propagate = before
    logger.manager._clear_cache()


def test_setup_logger_leaves_the_root_logger_alone(library_logger, monkeypatch):
    root = logging.getLogger()
    before = list(root.handlers), root.level
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    setup_logger("warning")
    setup_logger("Debug")
    assert (list(root.handlers), root.level) == before
    assert len(library_logger.handlers) == 1
    logging.getLogger("flex_model.compat.parallel_state").debug("hello")
    assert "[flex_model.compat.parallel_state rank 0 " in written.getvalue()
    assert written.getvalue().count("hello") == 1
    for level in ("loud", 10):
        expected = rf"FLEX_MODEL_LOG .* must be one of debug, .*critical.*got {level!r}"
        with pytest.raises(ValueError, match=expected):
            setup_logger(level)


@pytest.mark.ranks(2)
def test_log_messages_tell_the_rank():
    logger = logging.getLogger("flex_model")
    try:
        setup_logger("debug")
        logger.handlers[-1].setStream(written := io.StringIO())
        logger.info("hello")
        assert f"[flex_model rank {dist.get_rank()} " in written.getvalue()
    finally:
        logger.handlers.pop()
        logger.setLevel(logging.NOTSET)
        logger.propagate = True


@pytest.mark.slow
def test_the_environment_sets_the_level_at_import():
    code = """
        import flex_model.distributed as fm_dist, torch, logging
        fm_dist.initialize_distributed_state(torch.nn.Identity(), 1, 1, 1)
        print(logging.getLogger("flex_model").level, logging.getLogger().handlers)
    """
    done = scripts.run_code(code, FLEXMODEL_DEBUG="debug")
    assert done.stdout.split() == ["10", "[]"]
    assert "ParallelState(pp 1 x dp 1 x tp 1" in done.stderr
    assert scripts.run_code(code, FLEXMODEL_DEBUG="").stderr == ""

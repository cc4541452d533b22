"""Every transport moves the same bytes to the same places: compared with torch's own split and with
each other, bit for bit, on random plans of small and of large tensors.
"""

import contextlib
import os
import random
import time
import traceback
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import models
from flex_model import _C, FlexModel, HookFunction
from flex_model.distributed import memory
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.gather import TensorSpec
from flex_model.distributed.header import Header
from flex_model.distributed.mesh import GRID, Mesh
from flex_model.distributed.placement import Shard, ShardLayout
from flex_model.distributed.rendezvous import Rendezvous
from flex_model.distributed.transports.transport import Gathered
from flex_model.errors import HookError
from tests.ops.test_ops import as_bytes, random_tensor, same_bits
from tiers import grid_but

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.bool,
    torch.int8,
    torch.int64,
    torch.uint8,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
# The environment of each: hosts may be named, to have several on one machine.
SETTINGS = {
    "shared_memory": {"FLEX_MODEL_TRANSPORT": "shared_memory"},
    "gloo": {"FLEX_MODEL_TRANSPORT": "gloo"},
    "full arena": {"FLEX_MODEL_SHARED_MEMORY_LIMIT": "1"},
    "a host of each": {"FLEX_MODEL_HOST": "host{rank}"},
    "two hosts": {"FLEX_MODEL_HOST": "host{half}"},
    "interleaved hosts": {"FLEX_MODEL_HOST": "host{parity}"},
}
NAMES = {
    "shared_memory": "shared_memory",
    "gloo": "gloo",
    "full arena": "shared_memory",
    "a host of each": "shared_memory inside a host, gloo between hosts",
    "two hosts": "shared_memory inside a host, gloo between hosts",
    "interleaved hosts": "shared_memory inside a host, gloo between hosts",
}


@contextlib.contextmanager
def transport(name, dp=1, timeout=30.0):
    """A communicator over the world with one transport."""
    rank, mesh = dist.get_rank(), Mesh.from_sizes(dist.get_world_size() // dp, 1, dp)
    places = {"rank": rank, "half": rank // 2, "parity": rank % 2}
    settings = {key: value.format(**places) for key, value in SETTINGS.get(name, {}).items()}
    with mock.patch.dict(os.environ, settings):
        communicator = Communicator(mesh, timeout)
        try:
            yield communicator
        finally:
            communicator.close()


def uneven(total, count, choose):
    cuts = sorted(choose.randint(0, total) for _ in range(count - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total])]


def cases(dp, tp, large):
    """Full tensors with a layout and the sizes of the parts: (full, layout, dp parts, tp parts)."""
    choose, generator = random.Random(large), torch.Generator().manual_seed(7)
    for i, dtype in enumerate(DTYPES):
        shape = [choose.randint(0, 7) for _ in range(3)]
        shape[choose.randrange(3)] = (300_000 if i % 2 else 100_000) if large else 5
        shape = [max(n, 1) for n in shape] if large else shape
        dp_dim, tp_dim = choose.randrange(3), choose.randrange(3)
        layout = ShardLayout(Shard(dp_dim), Shard(tp_dim))
        dp_parts = uneven(shape[dp_dim], dp, choose)
        of_dp = dp_parts if dp_dim == tp_dim else [shape[tp_dim]]
        tp_parts = [uneven(n, tp, choose) for n in of_dp]
        yield (
            random_tensor(shape, dtype, generator),
            layout,
            dp_parts,
            tp_parts * (dp // len(tp_parts)),
        )


def shards_of(full, layout, dp_parts, tp_parts):
    rows = full.split(dp_parts, layout.dp.dim)
    return [part for row, sizes in zip(rows, tp_parts) for part in row.split(sizes, layout.tp.dim)]


def sharded_cases(communicator, large):
    """Full tensors, with their specs and this rank's shards, not contiguous, as a model's may be;
    and as ``Gathered``, some of them twice.
    """
    mesh = communicator.mesh
    for i, (full, *parts) in enumerate(cases(mesh.dp_size, mesh.tp_size, large)):
        shards = shards_of(full, *parts)
        shapes = [tuple(shard.shape) for shard in shards]
        spec = TensorSpec.of(communicator, parts[0], shapes, full.dtype)
        mine, places = shards[mesh.group_rank], mesh.ranks_along(spec.axes, place=0)
        yield full, spec, mine, Gathered(spec.plan, places, mine, 1 + i % 2)


def check_gathered(communicator, some):
    """Gather tensors together, of ``(full, Gathered)``."""
    fulls = communicator.gather_to_first(("dp", "tp"), [gathered for _, gathered in some])
    assert (fulls is None) == (communicator.mesh.group_rank != 0)
    if fulls is not None:
        expected = [full for full, gathered in some for _ in range(gathered.num_copies)]
        for full, got in zip(expected, fulls, strict=True):
            same_bits(got, full)


def moves_every_way(communicator, large):
    """All that a communicator does with a tensor, against what torch's split says."""
    mesh, rank = communicator.mesh, communicator.mesh.group_rank
    moved = []
    for full, spec, mine, gathered in sharded_cases(communicator, large):
        wanted = rank % 3  # each rank another number of copies
        for num_read in range(3):  # and of those that it may share
            num_read = min((num_read + rank) % 3, wanted)
            copies = communicator.all_gather(spec.axes, mine, spec.plan, wanted, num_read)
            assert len(copies) == wanted
            for copy in copies:
                same_bits(copy, full)
                as_bytes(copy).zero_()  # nobody else sees that
        moved.append((full, gathered))
        on_first = spec.gather_to_first(mine)
        assert (on_first is None) == (rank != 0)
        if on_first is not None:
            same_bits(on_first, full)
        like = torch.zeros_like(mine, memory_format=torch.contiguous_format)
        back = spec.scatter_from_first(full.clone() if rank == 0 else None, like)
        same_bits(back, mine.contiguous())
        same_bits(spec.slice(full), mine.contiguous())
        same_bits(communicator.broadcast(full if rank == 0 else None, torch.zeros_like(full)), full)
        if full.dtype in (torch.float32, torch.bfloat16):
            generator = torch.Generator().manual_seed(len(moved))
            sizes = len(mesh.stage_ranks), 70_001 if large else 3, 3
            terms = torch.randn(sizes, generator=generator).to(full.dtype)
            total = terms[0].clone()
            for term in terms[1:]:  # another order would give other bits
                total += term
            same_bits(communicator.all_reduce_sum(("dp", "tp"), terms[rank]), total)
    check_gathered(communicator, moved)
    rows = communicator.exchange(torch.arange(20_000) + rank)
    assert torch.equal(rows, torch.arange(20_000) + torch.arange(len(mesh.stage_ranks))[:, None])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["shared_memory", "gloo", "full arena", "a host of each"])
@pytest.mark.parametrize("large", [False, True])
def test_two_ranks(name, large):
    with transport(name) as communicator:
        assert communicator.transport(GRID).name == NAMES[name]
        moves_every_way(communicator, large)


@pytest.mark.grid
@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("dp", [1, 2])
def test_four_ranks(name, dp):
    with transport(name, dp) as communicator:
        assert communicator.transport(GRID).name == NAMES[name]
        moves_every_way(communicator, large=False)
        moves_every_way(communicator, large=dp == 2)


@pytest.mark.ranks(4)
def test_groups_of_two_axes_take_turns():
    """Sub-groups of dp and of tp, and the whole, on one arena."""
    with transport("shared_memory", dp=2) as communicator:
        rank = communicator.mesh.group_rank
        dp, tp = divmod(rank, 2)
        for round_ in range(20):
            size = 50_000 * (1 + round_ % 3)
            for axes, sum_ in (("tp",), 4 * dp + 1), (("dp",), 2 * tp + 2), (("dp", "tp"), 6):
                got = communicator.all_reduce_sum(axes, torch.full((size,), float(rank)))
                assert torch.equal(got, torch.full((size,), float(sum_)))


@pytest.mark.ranks(2)
def test_memory_is_used_again():
    with transport("shared_memory") as communicator:
        shapes = [(1 << 20,), (1 << 20,)]
        plan = TensorSpec.of(communicator, ShardLayout(tp=Shard(0)), shapes, torch.float32).plan
        shard = torch.ones(1 << 20)
        for _ in range(5):
            communicator.all_gather(("tp",), shard, plan)
        held = _C.arena_bytes()[0]
        for _ in range(50):
            communicator.all_gather(("tp",), shard, plan)
        assert _C.arena_bytes()[0] == held


def roll(full):
    """Mixes shards: every value goes to another rank's part."""
    return full.roll(full.shape[-1] // 2, -1) * 2


def write(full):
    full.copy_(roll(full.clone()))


def write_untold(full):
    """By a way that no version counter tells."""
    full.data.numpy()[:] = roll(full.data).numpy()
    return full.clone()


def write_and_return_another(full):
    edited = roll(full)
    full.data.zero_()
    return edited


def look(full):
    return None


# Those that a version counter tells come last: from then on the hook has memory of its own.
WAYS = [roll, look, roll, write_untold, roll, write_and_return_another, roll, write, roll, write]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("keeps", [False, True])
def test_edits_that_write_to_their_tensor_now_and_then(keeps):
    """What a hook sees may be memory of all ranks until it writes there: records, tensors that it
    keeps and other ranks are as if each had its own.
    """
    torch.manual_seed(1)
    weight = torch.randn(4096, 3)
    x = torch.randn(8, 40, 3)
    rows = weight.chunk(2)[dist.get_rank()]

    class Columns(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(rows.clone())

        def forward(self, x):
            return x @ self.weight.t()

    kept, number = [], 0

    def edit(module, full, save_ctx, modules):
        if keeps:
            kept.append(full)
        return WAYS[number % len(WAYS)](full)

    with transport("shared_memory"):
        flex = FlexModel(torch.nn.Sequential(Columns()), {}, tensor_parallel_size=2)
        flex.annotate_layout("0.weight", kind="parameter", tp=Shard(0))
        flex.register_forward_hook(
            HookFunction("0", expected_shape=(None, None, 4096), editing_function=edit)
        )
        for number in range(2 * len(WAYS)):
            whole = (x + number) @ weight.t()
            got = flex(x + number).detach()
            edited = whole if WAYS[number % len(WAYS)] is look else roll(whole)
            assert torch.equal(got, edited.chunk(2, -1)[dist.get_rank()])
            records = flex.output_ptr.get("0", [])
            assert len(records) == int(dist.get_rank() == 0)
            assert all(torch.equal(record, whole) for record in records)
            for record in records:
                record.fill_(-1)  # the user's own
        for i, full in enumerate(kept):
            whole = (x + i) @ weight.t()
            way = WAYS[i % len(WAYS)]
            if way is write_and_return_another:
                whole = torch.zeros_like(whole)
            elif way in (write, write_untold):
                whole = roll(whole)
            assert torch.equal(full, whole)
        flex.restore()


@pytest.mark.ranks(2)
def test_gradients_of_edits_of_memory_that_ranks_share():
    """Of an edit that mixes shards and keeps its tensor for backward, against the whole weight."""
    torch.manual_seed(1)
    whole = torch.randn(4096, 3, dtype=torch.float64, requires_grad=True)
    part = torch.nn.Linear(3, 2048, bias=False, dtype=torch.float64)
    part.weight.data = whole.data.chunk(2)[dist.get_rank()].clone()

    def edit(module, full, save_ctx, modules):
        return full * roll(full).sin()

    with transport("shared_memory"):
        flex = FlexModel(torch.nn.Sequential(part), {}, tensor_parallel_size=2)
        flex.annotate_layout("0.weight", kind="parameter", tp=Shard(0))
        flex.register_forward_hook(
            HookFunction("0", expected_shape=(None, 4096), editing_function=edit)
        )
        for _ in range(4):  # from the second on in shared memory
            x = torch.randn(64, 3, dtype=torch.float64)
            full = x @ whole.t()
            assert 0 < _C.worthwhile_view_bytes() <= full.nbytes
            edited = full * roll(full).sin()
            expected = torch.autograd.grad((edited**3).sum(), whole)[0].chunk(2)[dist.get_rank()]
            got = flex(x)
            torch.testing.assert_close(got, edited.chunk(2, -1)[dist.get_rank()])
            part.weight.grad = None
            (got**3).sum().backward()
            torch.testing.assert_close(part.weight.grad, expected)
        flex.restore()


@pytest.mark.ranks(2)
def test_settings_that_make_no_sense_are_named_on_every_rank():
    for settings, message in (
        ({"FLEX_MODEL_TRANSPORT": "pigeon"}, r"(?s)FLEX_MODEL_TRANSPORT.*'pigeon'"),
        ({"FLEX_MODEL_SHARED_MEMORY_LIMIT": "much"}, r"(?s)SHARED_MEMORY_LIMIT.*'much'"),
    ):
        SETTINGS["wrong"] = settings if dist.get_rank() == 1 else {}  # on one rank only
        with pytest.raises(HookError, match=message), transport("wrong"):
            pass
    SETTINGS["wrong"] = {
        "FLEX_MODEL_TRANSPORT": "shared_memory",
        "FLEX_MODEL_HOST": f"host{dist.get_rank()}",
    }
    with pytest.raises(HookError, match=r"(?s)shared_memory.*2 hosts"), transport("wrong"):
        pass
    with transport("shared_memory") as communicator:  # and the next group works
        assert communicator.exchange(torch.ones(1)).sum() == 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["shared_memory", "gloo", "a host of each"])
def test_a_rank_that_does_not_come_is_named(name):
    with transport(name, timeout=1.0) as communicator:
        communicator.exchange(torch.ones(1))
        start = time.monotonic()
        if communicator.mesh.group_rank == 0:
            with pytest.raises(HookError, match=r"(?s)waited 1 s.*missing: rank 1 \(global rank 1"):
                communicator.check_consistency(Header("tensor", site=7), "the meeting place")
            assert time.monotonic() - start < 2.5
            dist.barrier()
        else:
            dist.barrier()  # the user's own group still works

            def meet(times):  # gloo gives what a rank sent before it left
                for _ in range(times):
                    communicator.check_consistency(Header("tensor", site=7), "the meeting place")

            with pytest.raises(HookError, match=r"(?s)waited 1 s at the meeting place"):
                meet(1 if name == "shared_memory" else 2)
        with pytest.raises(HookError, match="can't be used any more"):
            communicator.check_consistency(Header("tensor", site=7), "the meeting place")


@pytest.mark.ranks(2)
def test_memory_offered_to_a_peer_that_never_came_is_not_given_out_again():
    """It may come yet, and write."""
    given = []
    lease = memory.empty

    def empty(sizes, dtype):
        tensor = lease(sizes, dtype)
        given.append(tensor.data_ptr())
        return tensor

    with transport("shared_memory", timeout=0.5) as communicator:
        communicator.exchange(torch.ones(1))
        shapes = [(100_000,), (100_000,)]
        plan = TensorSpec.of(communicator, ShardLayout(tp=Shard(0)), shapes, torch.float32).plan
        if communicator.mesh.group_rank == 0:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(memory, "empty", empty)
                with pytest.raises(HookError, match="missing: rank 1"):
                    communicator.all_gather(("tp",), torch.ones(100_000), plan)
            (offered,) = given
            again = [empty([200_000], torch.float32) for _ in range(3)]
            assert offered not in {tensor.data_ptr() for tensor in again}
            del again[:]  # this memory is
            assert empty([200_000], torch.float32).data_ptr() in given[1:-1]
        dist.barrier()


@pytest.mark.ranks(2, alone=True)
def test_a_group_may_be_collected_while_another_is_made(monkeypatch):
    """It was the last one, so it closed the pool and the connection of the one in the making."""
    layer = torch.nn.Linear(64, 64, bias=False).requires_grad_(False)
    first = [FlexModel(layer, data_parallel_size=2, timeout=5)]
    all_gather = Rendezvous.all_gather

    def collected(self, *args):
        texts = all_gather(self, *args)
        while first:
            first.pop().restore()
        return texts

    monkeypatch.setattr(Rendezvous, "all_gather", collected)
    whole = models.random(1024, 64).float()
    mine = slice(512 * dist.get_rank(), 512 * dist.get_rank() + 512)
    with FlexModel(layer, {}, data_parallel_size=2, timeout=20) as flex:
        assert not first
        edit = HookFunction("", editing_function=lambda m, full, s, ms: full + full.flip(0))
        flex.register_forward_hook(edit)
        flex.annotate_layout("", dp=Shard(0))
        for _ in range(2):
            full = whole @ layer.weight.T
            torch.testing.assert_close(flex(whole[mine]), (full + full.flip(0))[mine])
        assert _C.arena_bytes()[0]  # on both


@pytest.mark.ranks(2)
def test_tensors_that_do_not_fit_their_plan():
    with transport("shared_memory", timeout=10.0) as communicator:
        communicator.exchange(torch.ones(1))
        shapes = [(100,), (100,)]
        plan = TensorSpec.of(communicator, ShardLayout(tp=Shard(0)), shapes, torch.float32).plan
        size = 99 if communicator.mesh.group_rank == 0 else 100
        error, message = (ValueError, "400 bytes") if size == 99 else (HookError, "ValueError")
        with pytest.raises(error, match=message):
            communicator.all_gather(("tp",), torch.ones(size), plan)


@pytest.mark.ranks(2)
def test_a_forked_child_of_a_rank_is_refused_and_its_parent_goes_on():
    records = {}
    flex = models.replicas(FlexModel(models.mlp(), records, tensor_parallel_size=2))
    flex.register_forward_hook(HookFunction("fc1", editing_function=lambda m, x, s, d: x * 2))
    batch = models.random(4, 6)
    expected = flex(batch)
    pid = os.fork()
    if pid == 0:
        try:
            with pytest.raises(HookError, match=r"forked.*run the model in the parent"):
                flex(batch)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    assert torch.equal(flex(batch), expected)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert torch.equal(flex(batch), expected)
    flex.restore()


def mixing(module, full, save_ctx, modules):
    """Over rows and over features: over both axes of the mesh."""
    features = models.random(full.shape[-1], full.shape[-1], seed=3).to(full.dtype)
    rows = models.random(full.shape[0], full.shape[0], seed=4).to(full.dtype)
    return full + 0.5 * full @ features - 0.5 * rows @ full


def run_hooked(parallelism, batch, **settings):
    """Records, output and gradients of a model with hooks that look, edit and edit gradients."""
    records = {}
    flex = FlexModel(parallelism.shard(models.mlp()), records, **parallelism.sizes, **settings)
    flex.register_forward_hook(HookFunction("inp", editing_function=mixing))
    flex.register_forward_hook(HookFunction("fc1", editing_function=mixing))
    flex.register_forward_hook(HookFunction("fc2"))
    flex.register_full_backward_hook(
        HookFunction("act", output_name="act.grad", editing_function=mixing)
    )
    output = flex(parallelism.my_rows(batch))
    output.square().mean().backward()
    gradients = [parameter.grad for parameter in flex.parameters()]
    assert all(gradient is not None for gradient in gradients)
    flex.restore()
    return [*records.get("inp", []), *records.get("fc1", []), *records.get("fc2", []),
            *records.get("act.grad", []), output.detach(), *gradients]  # fmt: skip


OF_MODELS = [{}, {"edit_on": "rank0"}, {"output_ranks": "all"}]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("settings", grid_but(OF_MODELS, {"edit_on": "rank0"}), ids=str)
def test_a_model_with_hooks_gives_the_same_bits_by_every_transport(settings):
    parallelism = models.FOUR_RANKS["tp x dp"]
    results = {}
    for name in SETTINGS:
        if name == "wrong":
            continue
        with transport(name, dp=2):
            results[name] = run_hooked(parallelism, models.random(8, 6), **settings)
    expected = results.pop("gloo")
    records = 4 if dist.get_rank() == 0 or "output_ranks" in settings else 0
    assert len(expected) == records + 1 + len(list(models.mlp().parameters()))
    for name, tensors in results.items():
        for got, tensor in zip(tensors, expected, strict=True):
            assert torch.equal(got, tensor), name

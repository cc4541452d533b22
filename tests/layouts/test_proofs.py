"""What followed forwards prove, against the unsharded model: a proven layout puts the shards of
every module's tensors together to the full ones, and where a proof is due there is one.
"""

import math
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import frameworks
import models
from flex_model import FlexModel, HookFunction
from flex_model.distributed.mesh import Mesh
from flex_model.distributed.placement import Replicate, Shard
from flex_model.layouts.statements import statement_of
from followed import follow, unsharded

R = Replicate()
ROWS = (Shard(0), R)
WHOLE = (R, R)


def mesh_of(**sizes):
    return Mesh.from_sizes(**sizes)


def compare(found, expected, unknown=()):
    """All that is proven is right, and only ``unknown`` is not."""
    lost = {name for name, tensors in found.items() if any(t is None for t in tensors)}
    assert lost == set(unknown)
    for name, tensors in found.items():
        for full, whole in zip(tensors, expected[name]):
            if full is not None:
                assert_close(full, whole, msg=lambda text, name=name: f"{name}: {text}")


def sharded_and_not(parallelism, model, batch):
    sharded = parallelism.shard(model)
    mesh = mesh_of(tp_size=parallelism.tp, dp_size=parallelism.dp)
    mine = parallelism.my_rows(batch)
    placements = [ROWS if parallelism.dp > 1 else WHOLE]
    found, follower, _ = follow(sharded, mesh, [mine], placements)
    return {clean(name): value for name, value in found.items()}, follower


def clean(name):
    return name.removeprefix("module").lstrip(".")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("make", ["mlp", "block"])
@pytest.mark.parametrize("name", ["tp", "dp", "ddp", "fsdp2", "dtensor"])
def test_every_tensor_of_a_model_is_proven(name, make, inference):
    if inference and name in ("fsdp2", "dtensor"):
        return  # torch's own views of parameters need gradients
    model = getattr(models, make)()
    batch = models.random(4, 6) if make == "mlp" else models.random(4, 3, 8)
    with torch.inference_mode(inference):
        expected = unsharded(model, [batch])
        found, _ = sharded_and_not(models.TWO_RANKS[name], model, batch)
    compare(found, expected)


@pytest.mark.ranks(4)
def test_every_tensor_of_a_model_over_rows_and_columns_is_proven():
    model, batch = models.block(), models.random(4, 3, 8)
    expected = unsharded(model, [batch])
    found, _ = sharded_and_not(models.FOUR_RANKS["tp x dp"], model, batch)
    compare(found, expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rows", [2, 4])
@pytest.mark.parametrize("length", [1, 2, 4])
def test_positions_and_masks_as_long_as_the_batch(rows, length):
    """One row a rank, one token, and sizes that coincide."""
    model = models.gpt2(layers=1)
    tokens = frameworks.tokens(rows, length=length)
    expected = unsharded(model, [tokens])
    mine = tokens.chunk(2)[dist.get_rank()]
    found, _, _ = follow(model, mesh_of(dp_size=2), [mine], [ROWS])
    known = {name for name, tensors in found.items() if None not in tensors}
    for name in known:
        for full, whole in zip(found[name], expected[name]):
            assert_close(full, whole)
    assert {"transformer.h.0.attn.c_attn", "transformer.h.0.mlp", "lm_head"} <= known


class Composites(nn.Module):
    """Operations that torch makes of others, the first half of which write to their tensor."""

    def __init__(self, column):
        super().__init__()
        self.column = column
        self.multiplied, self.subtracted, self.clipped = (nn.Identity() for _ in range(3))
        self.joined, self.swapped = nn.Identity(), nn.Identity()
        self.turned, self.cast, self.taken, self.sorted = (nn.Identity() for _ in range(4))
        self.leaky, self.outer, self.pooled = (nn.Identity() for _ in range(3))
        self.slope = nn.PReLU().double()

    def forward(self, x):
        h = self.column(x)
        self.turned(h.mT)
        self.cast(h.to(torch.float32).type_as(h))
        self.taken(torch.take_along_dim(h, x.argsort(0)[:, :1], 0))
        self.sorted(h.msort())
        self.leaky(self.slope(h))
        self.outer(torch.outer(x[0], h[0]))
        self.pooled(nn.functional.adaptive_max_pool1d(h.t()[:, None], 2))
        self.multiplied(self.column(x).multiply_(2))
        self.subtracted((self.column(x).sum(-1, keepdim=True) * x).subtract_(1))
        self.clipped(self.column(x).clip_(0, 1))
        self.joined(torch._C._nn.flatten_dense_tensors([x, x * 2]))
        return self.swapped(self.column(x).swapdims(0, 1))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("inference", [False, True])
def test_composites_are_followed_by_their_steps(inference):
    """Failed under inference_mode: their steps ran unseen, what they wrote in place, too."""
    with torch.inference_mode(inference):
        x, linear = models.random(4, 6), models.seeded(nn.Linear, 6, 8).double()
        column = models.ColumnLinear(linear, dist.group.WORLD)
        column.in_features, column.out_features = 6, 8
        expected = unsharded(Composites(linear), [x])
        found, _, _ = follow(Composites(column), mesh_of(tp_size=2), [x], [WHOLE])
    compare(found, expected, unknown=["subtracted"])  # a partial sum less 1 on each rank


class OwnUnit(nn.Module):
    """Reads another unit on each rank."""

    def __init__(self, column):
        super().__init__()
        self.column, self.unit = column, nn.Identity()

    def forward(self, x):
        h = self.column(x)
        self.unit(h.select(1, dist.get_rank()))
        return h


@pytest.mark.ranks(2)
def test_an_index_of_each_ranks_own_along_a_split_dim_is_not_known():
    """It was an error without a message."""
    x, linear = models.random(4, 6), models.seeded(nn.Linear, 6, 8).double()
    column = models.ColumnLinear(linear, dist.group.WORLD)
    column.in_features, column.out_features = 6, 8
    expected = unsharded(OwnUnit(linear), [x])
    found, _, _ = follow(OwnUnit(column), mesh_of(tp_size=2), [x], [WHOLE])
    compare(found, expected, unknown=["unit"])


class Heads(nn.Module):
    """A column layer of which each rank has so many features."""

    def __init__(self, linear, mine):
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach()[mine].clone())
        self.bias = nn.Parameter(linear.bias.detach()[mine].clone())
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("share, is_all", [((8, 4), True), ((4, 2), False)])
def test_unevenly_split_whole_heads(share, is_all):
    """Each share was taken for a weight that all ranks have."""
    linear, x = models.seeded(nn.Linear, 6, 12).double(), models.random(4, 6)
    mine = linear.weight.new_zeros(12, dtype=torch.bool)
    start = sum(share[: dist.get_rank()])
    mine[start : start + share[dist.get_rank()]] = True
    model = nn.Sequential(Heads(linear, mine), models.ColumnLinear(linear, dist.group.WORLD))
    model[1].in_features, model[1].out_features = 6, 12  # so that the model's layers state
    model = nn.ModuleList(model)
    model.forward = lambda x: (model[0](x), model[1](x))
    found, _, _ = follow(model, mesh_of(tp_size=2), [x], [WHOLE])
    if is_all:
        assert_close(found["0"], [linear(x)])
    else:
        assert found["0"] == [None]


class Pieces(nn.Module):
    """Each rank goes on with its piece, and with the next rank's."""

    def __init__(self, cut, place, count):
        super().__init__()
        self.cut, self.place, self.count = cut, place, count
        self.mine, self.doubled, self.others = (nn.Identity() for _ in range(3))

    def forward(self, x):
        if self.count == 1:
            self.others(x)
            return self.doubled(self.mine(x) * 2)
        pieces = self.cut(x, self.count)
        self.others(pieces[(self.place + 1) % self.count])
        return self.doubled(self.mine(pieces[self.place]) * 2)


CUTS = {
    "chunk": lambda x, n: x.chunk(n, -1),
    "tensor_split": lambda x, n: x.tensor_split(n, -1),
    "split": lambda x, n: x.split((4, 2), -1),
    "slices": lambda x, n: (x[..., :4], x[..., 4:]),
    "narrow": lambda x, n: (x.narrow(-1, 0, 4), x.narrow(-1, 4, 2)),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", CUTS)
def test_pieces_of_a_whole_tensor_are_its_shards(name, inference):
    """Each rank's own was taken for a tensor that all have."""
    with torch.inference_mode(inference):
        x = models.random(4, 6)
        expected = unsharded(Pieces(CUTS[name], 0, 1), [x])
        model = Pieces(CUTS[name], dist.get_rank(), 2)
        found, _, _ = follow(model, mesh_of(tp_size=2), [x], [WHOLE])
    compare(found, expected, unknown=["others"])


class Doubled(torch.Tensor):
    """A tensor that has ``F.dropout`` mean something else."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.dropout:
            return super().__torch_function__(torch.mul, types, (args[0], 2))
        return super().__torch_function__(func, types, args, kwargs)


class Dropout(nn.Module):
    def forward(self, x):
        return F.dropout(x.as_subclass(Doubled), training=False)


@pytest.mark.ranks(2)
def test_functions_that_tensors_override_are_theirs():
    _, _, output = follow(Dropout(), mesh_of(tp_size=2), [torch.ones(2)], [WHOLE])
    assert output.tolist() == [2, 2]


class Misleading(nn.Module):
    """Tensors that ranks hold alike, or that sizes alone would misplace."""

    def __init__(self, group):
        super().__init__()
        self.column = models.ColumnLinear(models.seeded(nn.Linear, 6, 8).double(), group)
        self.column.in_features, self.column.out_features = 6, 8
        self.zeros, self.largest, self.counts = nn.Identity(), nn.Identity(), nn.Identity()
        self.read, self.unwritten = nn.Identity(), nn.Identity()

    def forward(self, x):
        h = self.column(x)
        self.zeros(torch.zeros(4, 4, dtype=h.dtype))  # as wide as the shard of a split tensor
        self.largest(h.argmax(-1))
        self.counts(torch.arange(4))
        self.read(x * h.detach().max().item())
        self.unwritten(torch.empty_like(x))
        return h


@pytest.mark.ranks(2)
def test_what_only_looks_replicated_is_not_known():
    """Each was taken for replicated where the ranks' values were equal."""
    model = Misleading(dist.group.WORLD)
    mesh = mesh_of(tp_size=2)
    found, _, _ = follow(model, mesh, [models.random(4, 6)], [WHOLE])
    known = {name for name, tensors in found.items() if None not in tensors}
    assert known == {"", "column", "counts"}  # as many numbers as on one process


@pytest.mark.ranks(2)
def test_layers_that_state_nothing_are_not_known_until_they_are_stated():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            linear = models.seeded(nn.Linear, 6, 8).double()
            part = linear.weight.detach().chunk(2)[dist.get_rank()]
            self.up = nn.Linear(6, 4, bias=False).double()
            self.up.weight = nn.Parameter(part.clone())
            self.act = nn.Tanh()

        def forward(self, x):
            return self.act(self.up(x))

    x = models.random(5, 6)
    full = (x @ models.seeded(nn.Linear, 6, 8).double().weight.t()).tanh()
    mesh = mesh_of(tp_size=2)
    found, _, _ = follow(Bare(), mesh, [x], [WHOLE])
    assert set(found) == {"", "up", "act"} and all(f == [None] for f in found.values())
    states = statement_of("up.weight", "parameter", 0, Shard(0), None, None, None)
    found, _, _ = follow(Bare(), mesh, [x], [WHOLE], [states])
    assert_close(found["act"][0], full)


class SharedKeys(nn.Module):
    """Each head of the keys is repeated for two heads of queries."""

    columns, rows = ("k",), ("o",)

    def __init__(self):
        super().__init__()
        self.head_size = 4
        self.k, self.o = nn.Linear(6, 8), nn.Linear(16, 6)
        self.act = nn.Identity()

    def forward(self, x):
        batch, length, _ = x.shape
        k = self.k(x).view(batch, length, -1, self.head_size).transpose(1, 2)
        k = self.act(torch.repeat_interleave(k, repeats=2, dim=1))
        return self.o(k.transpose(1, 2).reshape(batch, length, -1))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["dtensor", "ddp"])
def test_one_head_a_rank_that_is_repeated(name):
    """The one and its copies were joined by a view that fits the dim before as well."""
    model, batch = models.seeded(SharedKeys).double(), models.random(4, 3, 6)
    expected = unsharded(model, [batch])
    found, _ = sharded_and_not(models.TWO_RANKS[name], model, batch)
    compare(found, expected)


@pytest.mark.ranks(2)
def test_rank_dependent_numbers_are_not_known():
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.scaled, self.mine, self.all = nn.Identity(), nn.Identity(), nn.Identity()

        def forward(self, x):
            rank = dist.get_rank()
            self.scaled(x * (rank + 1))
            mine = self.mine(x[:, rank * 3 : rank * 3 + 3])
            self.all(x[:, :3])
            return mine

    x = models.random(4, 6)
    found, follower, _ = follow(Shifted(), mesh_of(tp_size=2), [x], [WHOLE])
    assert found["scaled"] == [None]
    assert_close(found["mine"][0], x)  # consecutive ranges of all ranks make the whole
    assert_close(found[""][0], x)
    assert follower.proofs.placements(None) == (R, None)


@pytest.mark.ranks(2)
def test_what_ranks_run_differently_is_not_known_until_the_module_ends():
    class Branches(nn.Module):
        def forward(self, x):
            return x.sin() if dist.get_rank() else x.cos().abs()

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.branches, self.before, self.after = Branches(), nn.Tanh(), nn.Tanh()

        def forward(self, x):
            h = self.before(x)
            self.branches(h)
            return self.after(h)

    x = models.random(4, 6)
    found, _, _ = follow(Both(), mesh_of(tp_size=2), [x], [WHOLE])
    assert found["branches"] == [None]
    assert_close(found["after"][0], x.tanh().tanh())


READS = {
    "numpy": lambda x: torch.from_numpy(x.numpy().copy()),
    "list": lambda x: torch.tensor(x.tolist()),
    "items": lambda x: torch.tensor([[one.item() for one in row] for row in x]),
    "tensors": lambda x: torch.tensor([list(row) for row in x]),
    "by name": lambda x: torch.tensor(data=[list(row) for row in x]),
    "as_tensor": lambda x: torch.as_tensor([list(row) for row in x]),
    "new_tensor": lambda x: x.new_tensor([list(row) for row in x]),
    "Tensor": lambda x: torch.Tensor([list(row) for row in x]),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", READS)
def test_numbers_that_are_equal_on_all_ranks_may_be_of_their_own_parts(how):
    class Read(nn.Module):
        def __init__(self):
            super().__init__()
            self.whole, self.part = nn.Identity(), nn.Identity()

        def forward(self, x, part):
            self.whole(READS[how](x))
            self.part(READS[how](part))
            return self.whole(torch.tensor([1.0, 2.0]))

    for placement in (R, Shard(1), None):
        inputs = [torch.zeros(2, 4), torch.zeros(2, 4)]
        found, _, _ = follow(Read(), mesh_of(tp_size=2), inputs, [WHOLE, (R, placement)])
        before, after = found["whole"]
        assert before is not None
        assert (found["part"] == [None]) == (after is None) == (placement != R)


class Kinds(nn.Module):
    """It makes its tables in the order of a set, as models with two kinds of attention do."""

    def __init__(self, kinds):
        super().__init__()
        self.kinds, self.last = kinds, nn.Tanh()
        for kind in kinds:
            self.register_buffer(kind, models.random(6, seed=len(kind)))

    def forward(self, x):
        tables = {kind: self.get_buffer(kind).cos() for kind in self.kinds}
        return self.last(x * tables["sliding"])


@pytest.mark.ranks(2)
def test_ranks_that_run_in_the_order_of_a_set_are_advised():
    model = Kinds(["full", "sliding"][:: -1 if dist.get_rank() else 1])
    flex = FlexModel(model, {}, tensor_parallel_size=2)
    flex.annotate_layout(re.compile("full|sliding"), kind="parameter", tp=Replicate())
    flex.register_forward_hook(HookFunction("last", editing_function=lambda *_: None))
    with pytest.raises(
        ValueError, match=r"lost at mul\.Tensor of tensors that differ.*PYTHONHASHSEED=0"
    ):
        flex(models.random(4, 6))


@pytest.mark.ranks(2)
def test_nan_is_one_number_on_all_ranks():
    class Filled(nn.Module):
        def __init__(self):
            super().__init__()
            self.full, self.masked = nn.Identity(), nn.Identity()

        def forward(self, x):
            self.full(torch.full(x.shape, math.nan))
            self.masked(x.masked_fill(x > 0, math.nan))

    x = models.random(4, 6)
    mine = x.chunk(2)[dist.get_rank()]
    found, _, _ = follow(Filled(), mesh_of(dp_size=2), [mine], [ROWS])
    assert torch.equal(found["full"][0].isnan(), torch.ones(4, 6, dtype=torch.bool))
    assert_close(found["masked"][0], x.masked_fill(x > 0, math.nan), equal_nan=True)


class Chosen(nn.Module):
    """Rows of a mask by their positions, as transformers has it."""

    def __init__(self):
        super().__init__()
        self.mask, self.rows, self.shared = nn.Identity(), nn.Identity(), nn.Identity()

    def forward(self, x, mask, table):
        rows = torch.arange(x.shape[0])
        columns = torch.arange(x.shape[1])
        chosen = mask[rows[:, None, None, None], columns[None, None, None, :]]
        self.mask(chosen.expand(-1, -1, x.shape[1], -1).double())
        self.rows(x.index_select(0, rows))
        self.shared(table[rows])  # of the unsharded program's rows a rank has other ones
        return x


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rows", [2, 6])
def test_positions_of_rows_choose_them(rows):
    """Was refused: of a batch with padding in data parallelism, so every hook behind its mask."""
    batch, table = models.random(rows, 3), models.random(8, 3, seed=4)
    mask = models.random(rows, 3, seed=3) > 0
    expected = unsharded(Chosen(), [batch, mask, table])
    mine = [full.chunk(2)[dist.get_rank()] for full in (batch, mask)]
    found, _, _ = follow(Chosen(), mesh_of(dp_size=2), [*mine, table], [ROWS, ROWS, WHOLE])
    assert found["shared"] == [None]
    for name in ("mask", "rows"):
        assert_close(found[name], expected[name])


@pytest.mark.ranks(2)
def test_dropout_is_placed_as_what_it_drops_from():
    class Drops(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout()

        def forward(self, x):
            return self.drop(x).sign()

    for mesh, placement in ((mesh_of(dp_size=2), ROWS), (mesh_of(tp_size=2), WHOLE)):
        torch.manual_seed(0)
        _, follower, output = follow(Drops(), mesh, [models.random(4, 3)], [placement])
        assert follower.placements(follower.value(output)) == placement


class Counted(nn.Module):
    """Rows counted in plain numbers, joined with other dims."""

    def __init__(self):
        super().__init__()
        self.joined, self.kept = nn.Identity(), nn.Identity()

    def forward(self, x):
        rows, length, width = map(int, x.shape)
        self.joined(x.reshape(rows * length, width))
        self.kept(x.reshape(rows, length, 3, -1))
        return x


@pytest.mark.ranks(2)
def test_plain_numbers_of_rows_are_not_those_of_the_unsharded_program():
    """``rows * length`` was taken for a size of the unsharded program, and the view refused, as all
    of DTensors' under data parallelism. Where the rows stand, their number is that of all rows.
    """
    x = models.random(4, 5, 6)
    mine = x.chunk(2)[dist.get_rank()]
    found, _, _ = follow(Counted(), mesh_of(dp_size=2), [mine], [ROWS])
    compare(found, unsharded(Counted(), [x]))


class Share(nn.Module):
    """A piece of the sequence, of which the size is computed."""

    def __init__(self, rank, parts):
        super().__init__()
        self.rank, self.parts, self.before, self.after = rank, parts, nn.Identity(), nn.Identity()

    def forward(self, x):
        length = x.shape[1] // self.parts
        mine = self.before(x[:, self.rank * length : (self.rank + 1) * length])
        self.after(mine.reshape(-1, length, x.shape[2], 1))
        return x


@pytest.mark.ranks(2)
def test_a_size_divided_by_the_number_of_ranks_may_be_a_share():
    """It was taken for what the unsharded program passes, so that rows seemed to be split."""
    x = models.random(1, 6, 4)
    expected = unsharded(Share(0, 1), [x])
    found, _, _ = follow(Share(dist.get_rank(), 2), mesh_of(tp_size=2), [x], [WHOLE])
    compare(found, expected, unknown=["after"])


class Narrowed(Share):
    """A piece of one token, by a call whose dim is the same number."""

    def forward(self, x):
        length = x.shape[1] // self.parts
        mine = self.before(x.narrow(1, self.rank * length, length))
        self.after(mine + torch.arange(mine.shape[2]))
        return x


@pytest.mark.ranks(2)
def test_a_size_is_known_by_its_place_among_the_numbers_of_a_call():
    """Was refused: the length of 1 might be the dim."""
    x = models.random(1, 2, 4)
    expected = unsharded(Narrowed(0, 1), [x])
    found, _, _ = follow(Narrowed(dist.get_rank(), 2), mesh_of(tp_size=2), [x], [WHOLE])
    compare(found, expected)


class Padded(nn.Module):
    """A gather of parts that may be uneven: the ranks exchange their sizes."""

    def __init__(self, parts):
        super().__init__()
        self.parts, self.padded, self.whole = parts, nn.Identity(), nn.Identity()

    def forward(self, x):
        sizes = [torch.zeros(1, dtype=torch.long) for _ in range(self.parts)]
        if self.parts > 1:
            dist.all_gather(sizes, torch.tensor([x.shape[0]]))
        else:
            sizes[0] += x.shape[0]
        padded = x.new_zeros(max(int(size) for size in sizes), *x.shape[1:])
        padded[: x.shape[0]] = x
        padded = self.padded(padded * x.new_ones(1))
        parts = [torch.empty_like(padded) for _ in sizes]
        if self.parts > 1:
            dist.all_gather(parts, padded)
        else:
            parts = [padded]
        self.whole(torch.cat([part[: int(size)] for part, size in zip(parts, sizes)]))
        return x


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rows", [(2, 2), (2, 1)])
def test_zeros_of_a_size_that_is_read_are_known_once_all_are_written(rows):
    """Were refused. Of uneven parts zeros are left on some ranks."""
    x = models.random(sum(rows), 3)
    expected = unsharded(Padded(1), [x])
    mine = x.split(rows)[dist.get_rank()]
    found, _, _ = follow(Padded(2), mesh_of(tp_size=2), [mine], [(R, Shard(0))])
    compare(found, expected, unknown=() if rows == (2, 2) else ("padded",))


class StatedHeads(nn.Module):
    """One head a rank, of a size that the module states."""

    def __init__(self, heads):
        super().__init__()
        self.heads, self.head_dim = heads, 4
        for name in ("viewed", "flexible", "divided", "unflattened", "joined", "added"):
            setattr(self, name, nn.Identity())

    def forward(self, x):
        rows, length = x.shape[:2]
        heads = self.viewed(x.view(rows, length, self.heads, 4))
        self.flexible(x.view(rows, length, -1, 4))
        self.divided(x.reshape(rows, length, self.heads, -1))
        self.unflattened(x.unflatten(dim=-1, sizes=(self.heads, 4)))
        self.joined(heads.reshape(rows, length, self.heads * 4))
        self.added(x[:, 0].reshape(x.shape[0], 1, self.heads * 4))  # the last size is no head's
        return x


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rows, length", [(2, 3), (1, 1)])
def test_heads_of_a_stated_size(rows, length):
    """Were refused, but for a view with -1: their features may be split as well."""
    x = models.random(rows, length, 8)
    expected = unsharded(StatedHeads(2), [x])
    mine = x.chunk(2, -1)[dist.get_rank()].contiguous()
    found, _, _ = follow(StatedHeads(1), mesh_of(tp_size=2), [mine], [(R, Shard(2))])
    lost = {name for name in found if found[name] == [None]}
    compare(found, expected, unknown=lost & {"joined", "added"})


class InPlace(nn.Module):
    """Results that torch or the model changes after they were made."""

    def __init__(self):
        super().__init__()
        self.quantile, self.copied, self.turned = nn.Identity(), nn.Identity(), nn.Identity()
        self.rnn = nn.RNN(6, 4, batch_first=True).double()
        nn.init.constant_(self.rnn.weight_hh_l0, 0.1)
        nn.init.constant_(self.rnn.weight_ih_l0, 0.2)
        nn.init.zeros_(self.rnn.bias_hh_l0)
        nn.init.zeros_(self.rnn.bias_ih_l0)

    def forward(self, x):
        self.quantile(x.quantile(0.4, 1))  # squeezes its result in place
        blank = torch.empty(x.shape).double()
        blank[:, :1], blank[:, 1:] = x[:, :1] * 2, x[:, 1:]
        self.copied(blank)
        self.turned((x * 2).transpose_(1, 2).unsqueeze_(1))
        self.rnn(x)
        return x


@pytest.mark.ranks(2)
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("rows", [2, 4])
def test_views_in_place_copies_of_blank_tensors_and_recurrent_layers(rows, inference):
    """Were refused: of the layers, one row a rank."""
    with torch.inference_mode(inference):
        x = models.random(rows, 5, 6)
        expected = unsharded(InPlace(), [x])
        mine = x.chunk(2)[dist.get_rank()]
        found, _, _ = follow(InPlace(), mesh_of(dp_size=2), [mine], [ROWS])
    compare(found, expected)


@pytest.mark.ranks(2)
def test_a_view_by_numbers_does_not_tell_one_row_from_other_dims_of_size_1():
    """Was the second dim: the median's view of (1, row, 1, length) drops the first one."""

    class Median(nn.Module):
        def __init__(self):
            super().__init__()
            self.median = nn.Identity()

        def forward(self, x):
            return self.median(x.quantile(0.5, 0))

    mine = models.random(3, 2, 1).chunk(2, 1)[dist.get_rank()]
    found, _, _ = follow(Median(), mesh_of(dp_size=2), [mine], [(Shard(1), R)])
    assert found["median"] == [None]


class SortedRows(nn.Module):
    """Rows in the order of a key, and back, as mixtures of experts have them."""

    def __init__(self, invert):
        super().__init__()
        self.invert, self.sorted, self.back = invert, nn.Identity(), nn.Identity()

    def forward(self, x):
        order = x.detach()[:, 0].sort()[1]
        return self.back(self.sorted(x[order].cumsum(0))[self.invert(order)])


def inverse(order, places=None):
    inverse = torch.empty_like(order)
    inverse[order if places is None else places] = torch.arange(order.shape[0])
    return inverse


INVERSES = {
    "of a sort": inverse,
    "of argsort": lambda order: inverse(order.argsort()),
    "of stable": lambda order: inverse(order.sort(stable=True)[1]),
    "of another": lambda order: inverse(order, order * 0 + order.sort()[0]),
    "of half": lambda order: inverse(order, (order // 2 * 2).clamp(max=4)),
    "added": lambda order: torch.empty_like(order).index_put_(
        (order,), torch.arange(order.shape[0]), accumulate=True
    ),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", INVERSES)
def test_an_inverse_order_is_written_whole(how):
    """What the ranks have in common may be written to a tensor that was empty. Was refused."""
    x = models.random(6, 4)
    model = SortedRows(INVERSES[how])
    is_known = how.startswith("of") and how not in ("of half", "of another")
    if not is_known:
        model.invert = lambda order: INVERSES[how](order).clamp(0, 5)
    found, _, _ = follow(model, mesh_of(tp_size=2), [x], [WHOLE])
    if is_known:
        compare(found, unsharded(model, [x]))
    else:
        assert found["back"] == [None]


@pytest.mark.ranks(2)
def test_an_order_of_each_ranks_own_rows():
    mine = models.random(6, 4).chunk(2)[dist.get_rank()]
    found, _, _ = follow(SortedRows(inverse), mesh_of(dp_size=2), [mine], [ROWS])
    assert found["sorted"] == found["back"] == [None]


class Expanded(nn.Module):
    """A plain number to which a tensor is expanded, which is a rank's number of heads as well: that
    of the groups of a router, and that of the heads themselves.
    """

    def __init__(self, heads):
        super().__init__()
        self.heads, self.shared, self.own = heads, nn.Identity(), nn.Identity()
        self.groups, self.scores, self.biased = nn.Identity(), nn.Identity(), nn.Identity()

    def forward(self, x, scores, bias):
        chosen = (x > 0).double().unsqueeze(-1).expand(-1, -1, 2)
        self.groups(chosen.reshape(len(x), -1) * 2)
        self.own(bias.expand(-1, self.heads, -1) * 2)
        self.biased(scores + bias.expand(-1, self.heads, -1).exp())


@pytest.mark.ranks(2)
def test_a_number_of_groups_may_be_that_of_the_rank_s_heads():
    x, scores, bias = models.random(5, 3), models.random(5, 4, 6, seed=2), models.random(5, 1, 6)
    expected = unsharded(Expanded(4), [x, scores, bias])
    mine = scores.chunk(2, 1)[dist.get_rank()]
    placements = [WHOLE, (R, Shard(1)), WHOLE]
    found, _, _ = follow(Expanded(2), mesh_of(tp_size=2), [x, mine, bias], placements)
    compare(found, expected, unknown=["own"])


class SizesOfShares(nn.Module):
    """Whole tensors with sizes that split dims have on a rank, and shares that a call shows."""

    def __init__(self, heads, features, rank=0):
        super().__init__()
        self.heads, self.head_dim, self.features, self.rank = heads, 4, features, rank
        for name in ("joined", "kept", "keys", "places", "encoded", "divided"):
            setattr(self, name, nn.Identity())

    def forward(self, x, whole, uneven):
        rows, length = x.shape[:2]
        heads = x.view(rows, length, self.heads, 4).transpose(1, 2)
        self.joined(heads.flatten(0, 1))
        kept, keys = torch.zeros(rows, 4, 4), torch.zeros(rows, 4, self.heads * 4)
        kept[:, 0], keys[:, 0] = whole[:, -1], x[:, -1]
        self.kept(kept.sum(1))
        self.keys(keys * 2)
        count = self.heads * 4
        self.places(torch.arange(count, dtype=torch.float64) + self.rank * count)
        self.encoded(F.one_hot((whole > 0).long(), 3))
        self.divided(uneven.view(rows, -1, self.features // 2, 2))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("inference", [False, True])
def test_sizes_of_shares_are_settled_by_what_a_tensor_meets(inference):
    """Were refused: where one head is joined with the rows, a cache of zeros gets one position."""
    x, whole, uneven = (
        models.random(2, 4, 8),
        models.random(2, 4, 4, seed=2),
        models.random(2, 3, 6),
    )
    rank, widths = dist.get_rank(), (4, 2)
    expected = unsharded(SizesOfShares(2, 6), [x, whole, uneven])
    mine = [x.chunk(2, -1)[rank].contiguous(), whole, uneven.split(widths, -1)[rank].contiguous()]
    sharded = SizesOfShares(1, widths[rank], rank)
    placements = [(R, Shard(2)), WHOLE, (R, Shard(2))]
    with torch.inference_mode(inference):
        found, _, _ = follow(sharded, mesh_of(tp_size=2), mine, placements)
    compare(found, expected)

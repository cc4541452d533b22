"""What followed forwards prove, against the unsharded model: a proven layout puts the shards of
every module's tensors together to the full ones, and where a proof is due there is one.
"""

import math
import re
from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard as DTensorShard
from torch.testing import assert_close

import frameworks
import models
from flex_model import FlexModel, HookFunction
from flex_model.distributed.mesh import Mesh
from flex_model.distributed.placement import Replicate, Shard
from flex_model.layouts.statements import statement_of
from followed import Sites, follow, unsharded

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


def check_lines(whole, full, model, mine, placements, unknown=(), **sizes):
    """``model``, given ``mine`` on this rank, against ``whole``, given the ``full`` tensors."""
    expected = unsharded(whole, full)
    found, _, _ = follow(model, mesh_of(**sizes), mine, placements)
    compare(found, expected, unknown)


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
@pytest.mark.parametrize("make", ["mlp", "block"])
@pytest.mark.parametrize(
    "name, inference",  # torch's own views of the parameters of the last two need gradients
    [(name, False) for name in models.TWO_RANKS] + [(name, True) for name in ("tp", "dp", "ddp")],
)
def test_every_tensor_of_a_model_is_proven(name, make, inference):
    model = getattr(models, make)()
    batch = models.random(4, 6) if make == "mlp" else models.random(4, 3, 8)
    with torch.inference_mode(inference):
        expected = unsharded(model, [batch])
        found, _ = sharded_and_not(models.TWO_RANKS[name], model, batch)
    compare(found, expected)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.layer(self.layer(x).tanh()).tanh())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dim", [0, 1])
def test_a_module_of_fsdp2_that_is_called_twice(dim):
    """It fills the memory of the weights again, along dim 1 by ``torch.cat``; what was behind was
    refused."""
    model, x = models.seeded(Twice).double(), models.random(4, 4)
    expected = unsharded(model, [x])
    where = {"shard_placement_fn": lambda p: DTensorShard(dim if p.ndim > 1 else 0)}
    for part in (model.layer, model):
        fully_shard(part, mesh=models.mesh(2, 1)["dp"], **where)
    compare(follow(model, mesh_of(dp_size=2), [x.chunk(2)[dist.get_rank()]], [ROWS])[0], expected)


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


def columns_of(linear):
    """The rank's columns; says how many there are in all."""
    column = models.ColumnLinear(linear, dist.group.WORLD)
    column.in_features, column.out_features = linear.in_features, linear.out_features
    return column


def composites(m, x):
    """Operations that torch makes of others, the first half of which write to their tensor."""
    h = m.column(x)
    m.turned(h.mT)
    m.cast(h.to(torch.float32).type_as(h))
    m.taken(torch.take_along_dim(h, x.argsort(0)[:, :1], 0))
    m.sorted(h.msort())
    m.leaky(m.slope(h))
    m.outer(torch.outer(x[0], h[0]))
    m.pooled(nn.functional.adaptive_max_pool1d(h.t()[:, None], 2))
    m.multiplied(m.column(x).multiply_(2))
    m.subtracted((m.column(x).sum(-1, keepdim=True) * x).subtract_(1))
    m.clipped(m.column(x).clip_(0, 1))
    m.joined(torch._C._nn.flatten_dense_tensors([x, x * 2]))
    return m.swapped(m.column(x).swapdims(0, 1))


OF_COMPOSITES = (
    "turned cast taken sorted leaky outer pooled multiplied subtracted clipped joined swapped"
)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("inference", [False, True])
def test_composites_are_followed_by_their_steps(inference):
    """Failed under inference_mode: their steps ran unseen, what they wrote in place, too."""
    with torch.inference_mode(inference):
        x, linear = models.random(4, 6), models.seeded(nn.Linear, 6, 8).double()
        whole, mine = (
            Sites(composites, OF_COMPOSITES, column=column, slope=nn.PReLU().double())
            for column in (linear, columns_of(linear))
        )
        unknown = ["subtracted"]  # a partial sum less 1 on each rank
        check_lines(whole, [x], mine, [x], [WHOLE], unknown, tp_size=2)


@pytest.mark.ranks(2)
def test_an_index_of_each_ranks_own_along_a_split_dim_is_not_known():
    """It was an error without a message."""

    def own_unit(m, x):
        h = m.column(x)
        m.unit(h.select(1, dist.get_rank()))
        return h

    x, linear = models.random(4, 6), models.seeded(nn.Linear, 6, 8).double()
    whole = Sites(own_unit, "unit", column=linear)
    model = Sites(own_unit, "unit", column=columns_of(linear))
    check_lines(whole, [x], model, [x], [WHOLE], ["unit"], tp_size=2)


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
    beside = columns_of(linear)  # so that the model's layers state
    model = Sites(lambda m, x: (m.heads(x), m.beside(x)), heads=Heads(linear, mine), beside=beside)
    found, _, _ = follow(model, mesh_of(tp_size=2), [x], [WHOLE])
    if is_all:
        assert_close(found["heads"], [linear(x)])
    else:
        assert found["heads"] == [None]


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

    def pieces(m, x):
        cut, rank = CUTS[name](x, 2), dist.get_rank()
        m.others(cut[1 - rank])
        return m.doubled(m.mine(cut[rank]) * 2)

    with torch.inference_mode(inference):
        x = models.random(4, 6)
        found, _, _ = follow(Sites(pieces, "mine doubled others"), mesh_of(tp_size=2), [x], [WHOLE])
    expected = {"mine": [x], "doubled": [2 * x], "": [2 * x], "others": []}
    compare(found, expected, unknown=["others"])


class Doubled(torch.Tensor):
    """A tensor that has ``F.dropout`` mean something else."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.dropout:
            return super().__torch_function__(torch.mul, types, (args[0], 2))
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.ranks(2)
def test_functions_that_tensors_override_are_theirs():
    model = Sites(lambda m, x: F.dropout(x.as_subclass(Doubled), training=False))
    _, _, output = follow(model, mesh_of(tp_size=2), [torch.ones(2)], [WHOLE])
    assert output.tolist() == [2, 2]


@pytest.mark.ranks(2)
def test_what_only_looks_replicated_is_not_known():
    """Each was taken for replicated where the ranks' values were equal."""

    def misleading(m, x):
        h = m.column(x)
        m.zeros(torch.zeros(4, 4, dtype=h.dtype))  # as wide as the shard of a split tensor
        m.largest(h.argmax(-1))
        m.counts(torch.arange(4))
        m.read(x * h.detach().max().item())
        m.unwritten(torch.empty_like(x))
        return h

    column = columns_of(models.seeded(nn.Linear, 6, 8).double())
    model = Sites(misleading, "zeros largest counts read unwritten", column=column)
    found, _, _ = follow(model, mesh_of(tp_size=2), [models.random(4, 6)], [WHOLE])
    known = {name for name, tensors in found.items() if None not in tensors}
    assert known == {"", "column", "counts"}  # as many numbers as on one process


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [torch.zeros, torch.empty])
def test_a_size_of_what_a_rank_makes_as_wide_as_its_shard_may_be_a_share(make):
    def viewed(m, x):
        h = m.column(x)
        return h.view(4, make(4, 4).shape[1], 1)

    x, whole = models.random(4, 6), models.seeded(nn.Linear, 6, 8).double()
    model = Sites(viewed, column=columns_of(whole))
    found, _, _ = follow(model, mesh_of(tp_size=2), [x], [WHOLE])
    assert_close(found[""][0], whole(x)[..., None])


@pytest.mark.ranks(2)
def test_layers_that_state_nothing_are_not_known_until_they_are_stated():
    x, whole = models.random(5, 6), models.random(8, 6)
    up = nn.Linear(6, 4, bias=False).double()
    up.weight = nn.Parameter(whole.chunk(2)[dist.get_rank()].clone())
    bare, mesh = nn.Sequential(up, nn.Tanh()), mesh_of(tp_size=2)
    found, _, _ = follow(bare, mesh, [x], [WHOLE])
    assert set(found) == {"", "0", "1"} and all(f == [None] for f in found.values())
    states = statement_of("0.weight", "parameter", 0, Shard(0), None, None, None)
    found, _, _ = follow(bare, mesh, [x], [WHOLE], [states])
    assert_close(found["1"][0], (x @ whole.t()).tanh())


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
    def shifted(m, x):
        rank = dist.get_rank()
        m.scaled(x * (rank + 1))
        return m.mine(x[:, rank * 3 : rank * 3 + 3])

    x = models.random(4, 6)
    found, follower, _ = follow(Sites(shifted, "scaled mine"), mesh_of(tp_size=2), [x], [WHOLE])
    assert found["scaled"] == [None]
    assert_close(found["mine"][0], x)  # consecutive ranges of all ranks make the whole
    assert_close(found[""][0], x)
    assert follower.proofs.placements(None) == (R, None)


@pytest.mark.ranks(2)
def test_what_ranks_run_differently_is_not_known_until_the_module_ends():
    def both(m, x):
        h = m.before(x)
        m.branches(h)
        return m.after(h)

    branches = Sites(lambda m, x: x.sin() if dist.get_rank() else x.cos().abs())
    model = Sites(both, branches=branches, before=nn.Tanh(), after=nn.Tanh())
    x = models.random(4, 6)
    found, _, _ = follow(model, mesh_of(tp_size=2), [x], [WHOLE])
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
    "an amount": lambda x: torch.tensor(F.pad(torch.ones(1), (x[0, 0].long(), 0)).tolist()),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", READS)
def test_numbers_that_are_equal_on_all_ranks_may_be_of_their_own_parts(how):
    def read(m, x, part):
        m.whole(READS[how](x))
        m.part(READS[how](part))
        return m.whole(torch.tensor([1.0, 2.0]))

    for placement in (R, Shard(1), None):
        inputs, model = [torch.zeros(2, 4), torch.zeros(2, 4)], Sites(read, "whole part")
        found, _, _ = follow(model, mesh_of(tp_size=2), inputs, [WHOLE, (R, placement)])
        before, after = found["whole"]
        assert before is not None
        assert (found["part"] == [None]) == (after is None) == (placement != R)


def tables_of_copies(m, x):
    m.site(x)
    m.copies(torch.arange(6)[:, None].repeat(1, x.shape[1].__index__()))


@pytest.mark.ranks(2)
def test_copies_along_tp_are_whole_also_where_as_many_as_a_rank_has_features():
    """Positions of patches, as Qwen2-VL makes them."""
    model = Sites(tables_of_copies, "site copies")
    found, _, _ = follow(model, mesh_of(tp_size=2), [models.random(4, 3)], [(R, Shard(1))])
    assert_close(found["copies"], [torch.arange(6)[:, None].repeat(1, 3)])


class Rotary(nn.Module):
    """A rotary embedding with a table for each kind of layer, as of Gemma 3."""

    def __init__(self):
        super().__init__()
        self.cos = nn.Identity()

    def forward(self, positions, kind):
        return self.cos((positions * len(kind)).cos())


class InOrder(nn.Module):
    def __init__(self, kinds):
        super().__init__()
        self.kinds, self.rotary = kinds, Rotary()

    def forward(self, x):
        tables = {kind: self.rotary(x, kind=kind) for kind in self.kinds}
        return x * tables["full"] + tables["sliding"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("edits", [False, True])
@pytest.mark.parametrize("name", ["rotary", "rotary.cos"])
def test_calls_of_other_kinds_on_data_parallel_ranks_are_not_joined(name, edits):
    edit = (lambda m, full, s, ms: full.flip(0)) if edits else None
    model = InOrder(["full", "sliding"])
    flex = FlexModel(model, {}, data_parallel_size=2)
    flex.register_forward_hook(HookFunction(name, editing_function=edit))
    flex(models.random(2, 6))
    model.kinds = model.kinds[:: -1 if dist.get_rank() else 1]
    with pytest.raises(ValueError, match=r"different arguments.*PYTHONHASHSEED=0"):
        flex(models.random(2, 6))


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


@cache
def table():
    return torch.arange(6).double()


@pytest.mark.ranks(2)
def test_a_table_in_a_cache_is_named():
    """As patch coordinates of DINOv3: nothing shows how what was made before is placed."""
    model = Sites(lambda m, x: m.last(m.rope(table()[None].cos()) * x), "rope last")
    table()
    with FlexModel(model, {}, data_parallel_size=2) as flex:
        flex.register_forward_hook(HookFunction("last"))
        lost = r"unsqueeze of a tensor of shape \(6,\) that no operation of this forward made"
        with pytest.raises(ValueError, match=rf"lost at {lost}.*in a cache or a global"):
            flex(models.random(2, 6))
    with FlexModel(model, {}, data_parallel_size=2) as flex:
        flex.register_forward_hook(HookFunction("last"))
        flex.annotate_layout("rope", kind="forward", dp=Replicate())
        flex(models.random(2, 6))
        assert flex.layouts()[0].layout.dp == Shard(0)
    table.cache_clear()
    with FlexModel(model, {}, data_parallel_size=2) as flex:
        flex.register_forward_hook(HookFunction("last"))
        for rows in (2, 3):
            flex(models.random(rows, 6))
        assert flex.layouts()[0].layout.dp == Shard(0)


@pytest.mark.ranks(2)
def test_tables_that_transformers_caches_for_the_process():
    """A plain forward has filled them; two rows are as many as patches in a line."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "patch_size": 4}
    images = models.random(4, 3, 8, 8)
    for name, extra in (("DINOv3ViT", {}), ("Beit", {"use_relative_position_bias": True})):
        config = getattr(transformers, f"{name}Config")
        config = config(**sizes, **extra, num_attention_heads=2, image_size=8)
        model = models.seeded(getattr(transformers, f"{name}Model"), config).double().eval()
        want = model(images).last_hidden_state
        with FlexModel(model, found := {}, data_parallel_size=2, output_ranks="all") as flex:
            flex.register_forward_hook(HookFunction("", unpack_idx=0))
            flex(images.chunk(2)[dist.get_rank()])
        assert_close(found[""][0], want)


@pytest.mark.ranks(2)
def test_numbers_that_are_joined_may_be_of_rows():
    """They are the same on all ranks, and as many as a rank's tokens: which, only the model knows.
    Each rank's tokens show it.
    """

    def placed(m, x):
        tokens = x.flatten(0, 1)
        places = torch.cat([torch.arange(3) for _ in x.tolist()]).double()
        m.own(places * 2)
        m.beside(tokens * places[:, None])
        m.fewer(torch.cat([torch.arange(3)] * 3).double())

    x = models.random(4, 3, 6)
    mine = x.chunk(2)[dist.get_rank()]
    model = Sites(placed, "own beside fewer")
    check_lines(model, [x], model, [mine], [ROWS], ["own"], dp_size=2)


@pytest.mark.ranks(2)
def test_a_buffer_that_shards_are_written_into_is_named():
    """A cache of keys: of how its heads are split, only the user knows."""
    model = Sites(lambda m, x: m.last(m.keys.index_copy_(2, m.at, x) * 1), "last")
    model.register_buffer("keys", torch.zeros(2, 1, 8, 4).double())
    model.register_buffer("at", torch.arange(3))
    for is_stated in (False, True):
        with FlexModel(model, records := {}, tensor_parallel_size=2, output_ranks="all") as flex:
            flex.annotate_layout(re.compile("^$"), kind="forward_pre", tp=Shard(1))
            flex.annotate_layout("", kind="parameter", tp=Replicate())
            flex.register_forward_hook(HookFunction("last"))
            if is_stated:
                flex.annotate_layout("keys", kind="parameter", tp=Shard(1))
                flex(models.random(2, 1, 3, 4, seed=dist.get_rank()))
                assert records["last"][0].shape == (2, 2, 8, 4)
                continue
            lost = r"index_copy_ of shards into the whole buffer 'keys'"
            advised = r"annotate_layout[(]'keys', kind='parameter', tp=Shard"
            with pytest.raises(ValueError, match=rf"lost at {lost}.*{advised}"):
                flex(models.random(2, 1, 3, 4, seed=dist.get_rank()))


@pytest.mark.ranks(2)
def test_nan_is_one_number_on_all_ranks():
    def filled(m, x):
        m.full(torch.full(x.shape, math.nan))
        m.masked(x.masked_fill(x > 0, math.nan))

    x = models.random(4, 6)
    mine = x.chunk(2)[dist.get_rank()]
    found, _, _ = follow(Sites(filled, "full masked"), mesh_of(dp_size=2), [mine], [ROWS])
    assert torch.equal(found["full"][0].isnan(), torch.ones(4, 6, dtype=torch.bool))
    assert_close(found["masked"][0], x.masked_fill(x > 0, math.nan), equal_nan=True)


def chosen(m, x, mask, table):
    """Rows of a mask by their positions, as transformers has it."""
    rows = torch.arange(x.shape[0])
    columns = torch.arange(x.shape[1])
    chosen = mask[rows[:, None, None, None], columns[None, None, None, :]]
    m.mask(chosen.expand(-1, -1, x.shape[1], -1).double())
    m.rows(x.index_select(0, rows))
    m.behind(mask[rows[:, None], torch.tensor([0, 2])])
    m.shared(table[rows])  # of the unsharded program's rows a rank has other ones
    if x.shape[0] < 3:  # a rank's only row was repeated, taken for as many rows as the others
        m.beside(mask[rows, torch.tensor([0, 2])])
    return x


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rows", [2, 6])
def test_positions_of_rows_choose_them(rows):
    """Was refused: of a batch with padding in data parallelism, so every hook behind its mask."""
    batch, table = models.random(rows, 3), models.random(8, 3, seed=4)
    mask = models.random(rows, 3, seed=3) > 0
    model = Sites(chosen, "mask rows behind beside shared")
    expected = unsharded(model, [batch, mask, table])
    mine = [full.chunk(2)[dist.get_rank()] for full in (batch, mask)]
    found, _, _ = follow(model, mesh_of(dp_size=2), [*mine, table], [ROWS, ROWS, WHOLE])
    assert found["shared"] == [None] and found.get("beside", [None]) == [None]
    for name in ("mask", "rows", "behind"):
        assert_close(found[name], expected[name])


@pytest.mark.ranks(2)
def test_dropout_is_placed_as_what_it_drops_from():
    model = Sites(lambda m, x: m.drop(x).sign(), drop=nn.Dropout())
    for mesh, placement in ((mesh_of(dp_size=2), ROWS), (mesh_of(tp_size=2), WHOLE)):
        torch.manual_seed(0)
        _, follower, output = follow(model, mesh, [models.random(4, 3)], [placement])
        assert follower.placements(follower.recorder.value(output)) == placement


@pytest.mark.ranks(2)
def test_plain_numbers_of_rows_are_not_those_of_the_unsharded_program():
    """``rows * length`` was taken for a size of the unsharded program, and the view refused, as all
    of DTensors' under data parallelism. Where the rows stand, their number is that of all rows.
    """

    def counted(m, x):
        rows, length, width = map(int, x.shape)
        m.joined(x.reshape(rows * length, width))
        m.kept(x.reshape(rows, length, 3, -1))
        return x

    x, model = models.random(4, 5, 6), Sites(counted, "joined kept")
    check_lines(model, [x], model, [x.chunk(2)[dist.get_rank()]], [ROWS], dp_size=2)


def share(m, x):
    """A piece of the sequence, of which the size is computed."""
    length = x.shape[1] // m.parts
    mine = m.before(x[:, m.rank * length : (m.rank + 1) * length])
    m.after(mine.reshape(-1, length, x.shape[2], 1))
    return x


def narrowed(m, x):
    """A piece of one token, by a call whose dim is the same number."""
    length = x.shape[1] // m.parts
    mine = m.before(x.narrow(1, m.rank * length, length))
    m.after(mine + torch.arange(mine.shape[2]))
    return x


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "lines, length, unknown",
    [
        (share, 6, ["after"]),  # taken for what the unsharded program passes: rows seemed split
        (narrowed, 2, []),  # was refused: the length of 1 might be the dim
    ],
)
def test_sizes_that_are_divided_by_the_number_of_ranks(lines, length, unknown):
    x = models.random(1, length, 4)
    whole = Sites(lines, "before after", rank=0, parts=1)
    model = Sites(lines, "before after", rank=dist.get_rank(), parts=2)
    check_lines(whole, [x], model, [x], [WHOLE], unknown, tp_size=2)


def padded(m, x):
    """A gather of parts that may be uneven: the ranks exchange their sizes."""
    sizes = [torch.zeros(1, dtype=torch.long) for _ in range(2)]
    dist.all_gather(sizes, torch.tensor([x.shape[0]]))
    padded = x.new_zeros(max(int(size) for size in sizes), *x.shape[1:])
    padded[: x.shape[0]] = x
    padded = m.padded(padded * x.new_ones(1))
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    m.whole(torch.cat([part[: int(size)] for part, size in zip(parts, sizes)]))
    return x


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rows", [(2, 2), (2, 1)])
def test_zeros_of_a_size_that_is_read_are_known_once_all_are_written(rows):
    """Were refused. Of uneven parts zeros are left on some ranks."""
    x = models.random(sum(rows), 3)
    mine = x.split(rows)[dist.get_rank()]
    model = Sites(padded, "padded whole")
    found, _, _ = follow(model, mesh_of(tp_size=2), [mine], [(R, Shard(0))])
    unknown = () if rows == (2, 2) else ("padded",)
    compare(found, {name: [x] for name in ("padded", "whole", "")}, unknown)


def stated_heads(m, x):
    """Heads of a size that the module states."""
    rows, length = x.shape[:2]
    heads = m.viewed(x.view(rows, length, m.heads, 4))
    m.flexible(x.view(rows, length, -1, 4))
    m.divided(x.reshape(rows, length, m.heads, -1))
    m.unflattened(x.unflatten(dim=-1, sizes=(m.heads, 4)))
    m.joined(heads.reshape(rows, length, m.heads * 4))
    m.added(x[:, 0].reshape(x.shape[0], 1, m.heads * 4))  # the last size is no head's
    return x


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rows, length", [(2, 3), (1, 1)])
def test_heads_of_a_stated_size(rows, length):
    """Were refused, but for a view with -1: their features may be split as well."""
    x, names = models.random(rows, length, 8), "viewed flexible divided unflattened joined added"
    whole, sharded = (Sites(stated_heads, names, heads=n, head_dim=4) for n in (2, 1))
    expected = unsharded(whole, [x])
    mine = x.chunk(2, -1)[dist.get_rank()].contiguous()
    found, _, _ = follow(sharded, mesh_of(tp_size=2), [mine], [(R, Shard(2))])
    lost = {name for name in found if found[name] == [None]}
    compare(found, expected, unknown=lost & {"joined", "added"})


def in_place(m, x):
    """Results that torch or the model changes after they were made."""
    m.quantile(x.quantile(0.4, 1))  # squeezes its result in place
    blank = torch.empty(x.shape).double()
    blank[:, :1], blank[:, 1:] = x[:, :1] * 2, x[:, 1:]
    m.copied(blank)
    m.turned((x * 2).transpose_(1, 2).unsqueeze_(1))
    m.rnn(x)
    return x


@pytest.mark.ranks(2)
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("rows", [2, 4])
def test_views_in_place_copies_of_blank_tensors_and_recurrent_layers(rows, inference):
    """Were refused: of the layers, one row a rank."""
    with torch.inference_mode(inference):
        x, rnn = models.random(rows, 5, 6), models.seeded(nn.RNN, 6, 4, batch_first=True).double()
        model = Sites(in_place, "quantile copied turned", rnn=rnn)
        check_lines(model, [x], model, [x.chunk(2)[dist.get_rank()]], [ROWS], dp_size=2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("width", [1, 8])
def test_a_view_by_numbers_does_not_tell_one_row_from_other_dims_of_size_1(width):
    """Was the second dim: the median's view of (1, row, width, length) drops the first one."""

    def median(m, x):
        joined = x.flatten(1, 2)  # a split dim as wide as the view's second one
        return m.median(joined.unflatten(1, (x.shape[1], -1)).quantile(0.5, 0))

    mine = models.random(3, 2, width).chunk(2, 1)[dist.get_rank()]
    model = Sites(median, "median")
    found, _, _ = follow(model, mesh_of(dp_size=2), [mine], [(Shard(1), R)])
    assert found["median"] == [None]


def empty(m, x):
    return torch.empty(x.shape[0], m.heads, 8, 4, dtype=x.dtype)


def blank_caches(m, x):
    """Keys in caches that ``torch.empty`` made, a few positions at a time. What was never written
    is not shown: it holds anything.
    """
    keys = x.view(*x.shape[:2], m.heads, 4).transpose(1, 2)
    by_slices, by_places, by_copies = (empty(m, x) for _ in range(3))
    for positions in (torch.arange(3), torch.arange(3, x.shape[1])):
        start, stop = int(positions[0]), int(positions[-1]) + 1
        by_slices[:, :, start:stop] = keys[:, :, positions]
        by_places[:, :, positions] = keys[:, :, positions]
        by_copies.index_copy_(2, positions, keys[:, :, positions])
        for one in (by_slices, by_places, by_copies):
            m.read(one[:, :, :stop])
    return x


def blank_caches_that_are_not_known(m, x):
    first, keys = slice(3), x.view(*x.shape[:2], m.heads, 4).transpose(1, 2)
    constant, of_ranks, mixed = (empty(m, x) for _ in range(3))
    constant[:, :, first] = m.table
    m.lost(constant[:, :, first])
    of_ranks[:, :, m.rank : m.rank + 3] = keys[:, :, first]
    m.lost(of_ranks[:, :, first])
    mixed[:, :, first] = keys[:, :, first]
    m.read(mixed)
    mixed[:, :, 4:5] = x[:, :1, : m.heads, None].expand(-1, -1, -1, 4).transpose(1, 2).flip(0)
    m.lost(mixed)
    return x


@pytest.mark.ranks(2)
@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_a_blank_tensor_that_is_written_in_part_is_placed_as_what_is_written(axis):
    """Was refused, where one of zeros was known: caches of Megatron's static inference."""
    x, is_tp = models.random(4, 5, 8), axis == "tp"
    mine = x.chunk(2, 2 if is_tp else 0)[dist.get_rank()].contiguous()
    given = mesh_of(**{f"{axis}_size": 2}), [mine], [(R, Shard(2)) if is_tp else ROWS]
    heads = {"heads": 1 if is_tp else 2, "head_dim": 4}
    found, _, _ = follow(Sites(blank_caches, "read", **heads), *given)
    expected = unsharded(Sites(blank_caches, "read", heads=2), [x])
    assert_close(found["read"], expected["read"])
    model = Sites(blank_caches_that_are_not_known, "read lost", **heads)
    model.rank, model.table = dist.get_rank() * is_tp, models.random(3, 4)
    found, _, _ = follow(model, *given)
    constant, of_ranks, mixed = found["lost"]
    assert constant is None and mixed is None and (of_ranks is None) == is_tp
    assert [one.shape for one in found["read"]] == [(4, 2, 8, 4)]


def sorted_rows(m, x):
    """Rows in the order of a key, and back, as mixtures of experts have them."""
    order = x.detach()[:, 0].sort()[1]
    return m.back(m.sorted(x[order].cumsum(0))[m.invert(order)])


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
    model = Sites(sorted_rows, "sorted back", invert=INVERSES[how])
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
    model = Sites(sorted_rows, "sorted back", invert=inverse)
    found, _, _ = follow(model, mesh_of(dp_size=2), [mine], [ROWS])
    assert found["sorted"] == found["back"] == [None]


@pytest.mark.ranks(2)
def test_a_number_of_groups_may_be_that_of_the_rank_s_heads():
    """A plain number to which a tensor is expanded, which is a rank's number of heads as well: that
    of the groups of a router, and that of the heads themselves.
    """

    def expanded(m, x, scores, bias):
        chosen = (x > 0).double().unsqueeze(-1).expand(-1, -1, 2)
        m.groups(chosen.reshape(len(x), -1) * 2)
        m.own(bias.expand(-1, m.heads, -1) * 2)
        m.biased(scores + bias.expand(-1, m.heads, -1).exp())

    x, scores, bias = models.random(5, 3), models.random(5, 4, 6, seed=2), models.random(5, 1, 6)
    whole, sharded = (Sites(expanded, "groups own biased", heads=n) for n in (4, 2))
    mine = [x, scores.chunk(2, 1)[dist.get_rank()], bias]
    placements = [WHOLE, (R, Shard(1)), WHOLE]
    check_lines(whole, [x, scores, bias], sharded, mine, placements, ["own"], tp_size=2)


def sizes_of_shares(m, x, whole, uneven):
    """Whole tensors with sizes that split dims have on a rank, and shares that a call shows."""
    rows, length = x.shape[:2]
    heads = x.view(rows, length, m.heads, 4).transpose(1, 2)
    m.joined(heads.flatten(0, 1))
    kept, keys = torch.zeros(rows, 4, 4), torch.zeros(rows, 4, m.heads * 4)
    kept[:, 0], keys[:, 0] = whole[:, -1], x[:, -1]
    m.kept(kept.sum(1))
    m.keys(keys * 2)
    count = m.heads * 4
    m.places(torch.arange(count, dtype=torch.float64) + m.rank * count)
    m.encoded(F.one_hot((whole > 0).long(), 3))
    m.divided(uneven.view(rows, -1, m.features // 2, 2))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("inference", [False, True])
def test_sizes_of_shares_are_settled_by_what_a_tensor_meets(inference):
    """Were refused: where one head is joined with the rows, a cache of zeros gets one position."""
    x, uneven = models.random(2, 4, 8), models.random(2, 3, 6)
    whole = models.random(2, 4, 4, seed=2)
    rank, widths = dist.get_rank(), (4, 2)
    all_of, sharded = (
        Sites(sizes_of_shares, "joined kept keys places encoded divided", head_dim=4, **own)
        for own in (
            {"heads": 2, "features": 6, "rank": 0},
            {"heads": 1, "features": widths[rank], "rank": rank},
        )
    )
    mine = [x.chunk(2, -1)[rank].contiguous(), whole, uneven.split(widths, -1)[rank].contiguous()]
    placements = [(R, Shard(2)), WHOLE, (R, Shard(2))]
    with torch.inference_mode(inference):
        check_lines(all_of, [x, whole, uneven], sharded, mine, placements, tp_size=2)

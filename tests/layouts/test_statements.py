"""What users state of layouts: it completes proofs, and is an error against one."""

import math
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing import assert_close

import models
import pipelines
from flex_model import FlexModel, HookError, HookFunction, HookMismatchError
from shared_edits import mixing_features

BATCH = models.random(4, 6)


def by_hand():
    """An MLP whose layers state nothing, split over the ranks; and the whole one."""
    model = models.mlp()
    group = models.mesh(1, 2)["tp"].get_group()
    return models.tensor_parallel(model, group, states_sizes=False), model


def check_every_site(flex, model, sites=("inp", "fc1", "act", "fc2", "out")):
    """Of each site, what is read and what is edited, against the whole model."""
    for site in sites:
        records, edited = flex.output_ptr, site != "out"
        handle = flex.register_forward_hook(HookFunction(site, editing_function=mixing_features))
        output = flex(BATCH)
        handle.remove()
        with FlexModel(model, oracle := {}, process_group=pipelines.alone_group()) as whole:
            whole.register_forward_hook(HookFunction(site, editing_function=mixing_features))
            assert_close(output, whole(BATCH), msg=site if edited else None)
        if dist.get_rank() == 0:
            assert_close(records[site], oracle[site], msg=site)


@pytest.mark.ranks(2)
def test_weights_that_are_stated_settle_all_that_is_made_of_them():
    sharded, model = by_hand()
    with FlexModel(sharded, {}, tensor_parallel_size=2) as flex:
        flex.register_forward_hook(HookFunction("act"))
        with pytest.raises(ValueError, match=r"'act'.*not known.*lost at fc1\.bias") as error:
            flex(BATCH)
        assert "flex.annotate_layout('act', kind='forward', tp=Shard(1))" in str(error.value)
    with FlexModel(sharded, {}, tensor_parallel_size=2) as flex:
        check_every_site(models.state_layouts(flex, model), model)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["annotate_layout", "placements", "expected_shape", "parameter"])
def test_stated_shards_that_are_equal_on_all_ranks_warn_once(how):
    """A replicated tensor that was stated to be shards gave a record twice as wide."""
    with FlexModel(models.mlp(), {}, tensor_parallel_size=2) as flex:
        if how == "annotate_layout":
            flex.annotate_layout("act", tp=Shard(1))
        placements = {"tp": Shard(1)} if how == "placements" else None
        shape = (None, 16) if how == "expected_shape" else None
        if how != "parameter":
            flex.register_forward_hook(HookFunction("act", shape, placements=placements))

        def use():
            if how == "parameter":
                flex.get_module_parameter("fc1.weight", (16, None))
            else:
                flex(BATCH)

        with pytest.warns(UserWarning, match=r"split along dim \d along tp, but the parts of all"):
            use()
        use()  # warnings are errors
        flex.annotate_layout("out.bias", kind="parameter", tp=Shard(0))
        flex.module.out.bias.data.zero_()
        flex.get_module_parameter("out.bias")  # equal parts of zeros show nothing


@pytest.mark.ranks(2)
def test_a_hook_states_its_own_tensor():
    sharded, model = by_hand()
    whole = model.act(model.fc1(model.inp(BATCH)))
    with FlexModel(sharded, {}, tensor_parallel_size=2) as flex:
        flex.register_forward_hook(HookFunction("act", (None, 8), placements={"tp": Shard(1)}))
        flex(BATCH)
        if dist.get_rank() == 0:
            assert_close(flex.output_ptr["act"], [whole])


class Fused(nn.Module):
    """One column layer of a q and a k of other widths, each split over the ranks."""

    def __init__(self, rank=None):
        super().__init__()
        weight = models.random(6, 4)
        if rank is not None:
            q, k = weight.split((4, 2))
            weight = torch.cat([q.chunk(2)[rank], k.chunk(2)[rank]])
        self.qk = nn.Linear(4, len(weight), bias=False)
        self.qk.weight = nn.Parameter(weight)

    def forward(self, x):
        return self.qk(x)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["parameter", "forward"])
def test_fused_parts_of_unequal_sizes(kind):
    x = models.random(3, 4)
    flex = FlexModel(Fused(dist.get_rank()), {}, tensor_parallel_size=2)
    name, dim = ("qk.weight", 0) if kind == "parameter" else ("qk", 1)
    flex.annotate_layout(name, kind=kind, tp=Shard(dim), part_sizes=(4, 2))
    flex.register_forward_hook(HookFunction("qk", (None, 6), mixing_features))
    flex(x)
    if dist.get_rank() == 0:
        assert_close(flex.output_ptr["qk"], [Fused()(x).detach()])
    flex.restore()


@pytest.mark.ranks(2)
def test_parts_of_a_layer_that_states_its_sizes():
    """The sizes stand for consecutive shards, until the user states parts."""
    x, whole, sharded = models.random(3, 4), Fused(), Fused(dist.get_rank())
    sharded.qk.out_features = 6
    with FlexModel(sharded, records := {}, tensor_parallel_size=2, timeout=20) as flex:
        flex.annotate_layout("qk.weight", kind="parameter", tp=Shard(0), part_sizes=(4, 2))
        flex.register_forward_hook(HookFunction("qk", None, mixing_features))
        flex.register_hook(HookFunction("qk.weight", output_name="gradient"))
        made = flex(x)
        made.square().sum().backward()
        found = flex.get_module_parameter("qk.weight")
        expected = mixing_features(None, whole(x), None, None)
        shares = [part.chunk(2, 1)[dist.get_rank()] for part in expected.split((4, 2), 1)]
        assert_close(made, torch.cat(shares, 1))
        flex.set_module_parameter("qk.weight", 2 * whole.qk.weight.detach())
        assert_close(sharded.qk.weight, 2 * Fused(dist.get_rank()).qk.weight)
    if dist.get_rank() == 0:
        expected.square().sum().backward()
        assert_close(records["qk"], [whole(x).detach()])
        assert_close(found, whole.qk.weight.detach())
        assert_close(records["gradient"], [whole.qk.weight.grad])


@pytest.mark.ranks(2)
def test_a_statement_against_a_proof_is_an_error():
    mesh = init_device_mesh("cpu", (2,))
    plan = {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}
    model = parallelize_module(models.mlp(), mesh, plan)
    with FlexModel(model, {}, tensor_parallel_size=2, timeout=20) as flex:
        with pytest.raises(ValueError, match=r"fc1\.weight.*its layer states.*split along dim 0"):
            flex.annotate_layout("fc1.weight", kind="parameter", tp=Replicate())
        flex.register_forward_hook(HookFunction("inp"))
        flex(BATCH)
        flex.annotate_layout("inp", kind="forward", tp=Shard(1))
        with pytest.raises(ValueError, match=r"'inp'.*made it.*replicated") as error:
            flex(BATCH)
        assert "leave the statement out" in str(error.value)
    with FlexModel(model, {}, tensor_parallel_size=2, timeout=20) as flex:
        flex.register_forward_hook(HookFunction("inp", placements={"tp": Partial()}))
        with pytest.raises(ValueError, match=r"'inp': it is stated to be a partial sum along tp"):
            flex(BATCH)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["forward", "forward_pre"])
def test_an_index_that_no_tensor_has_is_an_error(kind):
    """Such a statement was ignored without a word."""
    sharded, _ = by_hand()
    with FlexModel(sharded, {}, tensor_parallel_size=2) as flex:
        flex.register_forward_hook(HookFunction("inp"))
        flex.annotate_layout("act", kind=kind, index=3, tp=Shard(1))
        with pytest.raises(ValueError, match=r"'act'.*index=3, but 'act' has 1 tensors there"):
            flex(BATCH)


@pytest.mark.ranks(2)
def test_a_dim_that_the_tensor_lacks_is_an_error():
    """It was a bare IndexError, or one about boxes of ranks that overlap."""
    sharded, _ = by_hand()
    with FlexModel(sharded, {}, tensor_parallel_size=2, timeout=20) as flex:
        handle = flex.register_forward_hook(HookFunction("act", placements={"tp": Shard(2)}))
        with pytest.raises(ValueError, match=r"'act'.*along dim 2 along tp, but it has 2 dims"):
            flex(BATCH)
        handle.remove()
        flex.annotate_layout("fc1.weight", kind="parameter", tp=Shard(2))
        with pytest.raises(
            ValueError, match=r"fc1\.weight.*along dim 2 along tp, but it has 2 dims"
        ):
            flex.get_module_parameter("fc1.weight")
        flex.register_forward_hook(HookFunction("act"))
        with pytest.raises(ValueError, match=r"'act'.*not known"):
            flex(BATCH)
        flex.annotate_layout("act", tp=Shard(2))
        with pytest.raises(ValueError, match=r"\('act'.*has 2 dims, and is not split along dim 2"):
            flex(BATCH)


@pytest.mark.ranks(2)
def test_sizes_that_are_stated_are_checked():
    sharded, _ = by_hand()
    with FlexModel(sharded, {}, tensor_parallel_size=2) as flex:
        flex.register_forward_hook(HookFunction("act"))
        flex.annotate_layout("act", tp=Shard(1), sizes=(None, 9))
        with pytest.raises(ValueError, match=r"sizes \(None, 9\) are stated.*shape \(4, 8\)"):
            flex(BATCH)


@pytest.mark.ranks(2)
def test_part_sizes_of_another_sum_are_an_error():
    """Of equal parts only their number was taken: rows came out in another order."""
    sharded, _ = by_hand()
    with FlexModel(sharded, {}, tensor_parallel_size=2) as flex:
        flex.register_forward_hook(HookFunction("act"))
        flex.annotate_layout("act", tp=Shard(1), part_sizes=(8, 8))
        with pytest.raises(ValueError, match=r"sizes \(None, 16\) are stated.*shape \(4, 8\)"):
            flex(BATCH)
    with FlexModel(Fused(dist.get_rank()), {}, tensor_parallel_size=2) as flex:
        flex.annotate_layout("qk.weight", kind="parameter", tp=Shard(0), part_sizes=(4, 4, 4))
        flex.register_forward_hook(HookFunction("qk"))
        with pytest.raises(ValueError, match="not known"):
            flex(models.random(3, 4))
        with pytest.raises(ValueError, match=r"the stated sizes \(12,\) contradict"):
            flex.get_module_parameter("qk.weight")
        with pytest.raises(ValueError, match="part_sizes are 6 together"):
            flex.annotate_layout("qk", tp=Shard(1), sizes=(None, 8), part_sizes=(4, 2))


@pytest.mark.ranks(2)
def test_ranks_that_state_other_things_are_an_error():
    sharded, model = by_hand()
    with FlexModel(sharded, {}, tensor_parallel_size=2, timeout=10) as flex:
        models.state_layouts(flex, model)
        flex.register_forward_hook(HookFunction("fc1"))
        if dist.get_rank() == 1:
            flex.annotate_layout("fc1", tp=Shard(1))
        with pytest.raises(HookError, match="hooks"):
            flex(BATCH)


def test_wrong_statements_are_refused_where_they_are_made():
    flex = FlexModel(models.mlp())
    with pytest.raises(ValueError, match="no module of MLP matches"):
        flex.annotate_layout("fc9", tp=Shard(0))
    with pytest.raises(ValueError, match="no parameter of MLP matches"):
        flex.annotate_layout("fc1", kind="forward", tp=Shard(0)) or flex.annotate_layout(
            "fc1.bais", kind="parameter", tp=Shard(0)
        )
    with pytest.raises(ValueError, match="states nothing"):
        flex.annotate_layout("fc1")
    with pytest.raises(ValueError, match="part_sizes are the full sizes"):
        flex.annotate_layout("fc1", tp=Replicate(), part_sizes=(2, 4))
    with pytest.raises(ValueError, match="kind must be one of"):
        flex.annotate_layout("fc1", kind="backward", tp=Shard(0))
    with pytest.raises(TypeError, match="pattern must be"):
        flex.annotate_layout(1, tp=Shard(0))
    flex.annotate_layout(re.compile("^fc1$"), tp=Shard(0))
    flex.annotate_layout(nn.Linear, kind="parameter", tp=Replicate())


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.is_shared = nn.Linear(4, 4), True

    def forward(self, x, mask):
        return self.fc(x) @ mask if self.is_shared else self.fc(x) * mask


class NamedInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.site = nn.Identity()

    def forward(self, x, **named):
        for one in named.values():
            x = x * one.reshape(len(one), -1).sum(1, keepdim=True)
        return self.site(x).sin()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("labels", (3,)),
        ("start_positions", (3,)),
        ("position_ids", (3, 3)),
        ("labels", (3, 3)),
        ("input_ids", (3, 3)),
        ("attention_mask", (3, 3)),
    ],
)
def test_an_input_that_holds_rows_by_its_name(name, shape):
    """Equal on all ranks, and as long as their rows: only its name says what it is."""
    rows = torch.arange(math.prod(shape)).reshape(shape) + 1.0
    found = []
    for group, parts in ((pipelines.alone_group(), 1), (None, 2)):
        x = models.random(6, 4).chunk(parts)[dist.get_rank() % parts].requires_grad_()
        sizes = {"data_parallel_size": parts} | ({"process_group": group} if group else {})
        with FlexModel(NamedInputs(), records := {}, **sizes) as flex:
            flex.register_forward_hook(HookFunction("site", editing_function=mixing_features))
            flex.register_full_backward_pre_hook(HookFunction("site", output_name="gradient"))
            flex(x, **{name: rows.repeat(2 // parts, *[1] * (len(shape) - 1))}).mean().backward()
        found.append((records, x.grad))
    (expected, whole), (records, gradient) = found
    assert_close(gradient, 2 * whole.chunk(2)[dist.get_rank()])
    if dist.get_rank() == 0:
        assert_close(records, expected)
    with FlexModel(NamedInputs(), {}, data_parallel_size=2) as flex:
        flex.register_forward_hook(HookFunction("site"))
        with pytest.raises(ValueError, match="'other' has the same values"):
            flex(x, other=rows)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ["scale", "attention_mask"])
def test_an_input_that_only_some_data_parallel_ranks_were_given(name):
    """Of other ranks' rows it says nothing; the tensor-parallel ranks must all have it."""
    dp, tp = divmod(dist.get_rank(), 2)
    scale = torch.cat([models.random(3, 3, seed=3), torch.ones(3, 3).double() / 3])
    bias, found = models.random(6, 1, seed=4), []
    for group, parts in ((pipelines.alone_group(), 1), (None, 2)):
        x = models.random(6, 4).chunk(parts)[dp % parts].requires_grad_()
        named = {"bias": bias.chunk(parts)[dp % parts], name: scale.chunk(parts)[dp % parts]}
        named = named if parts == 1 or dp == 0 else {"bias": named["bias"]}
        sizes = {"data_parallel_size": 2, "tensor_parallel_size": 2} if parts == 2 else {}
        with FlexModel(NamedInputs(), records := {}, process_group=group, **sizes) as flex:
            flex.register_forward_hook(HookFunction("site", editing_function=mixing_features))
            flex.register_full_backward_pre_hook(HookFunction("site", output_name="gradient"))
            for _ in range(2):
                flex(x, **named).mean().backward()
        found.append((records, x.grad))
    (expected, whole), (records, gradient) = found
    assert_close(gradient, 2 * whole.chunk(2)[dp])
    if dist.get_rank() == 0:
        assert_close(records, expected)
    with FlexModel(NamedInputs(), {}, data_parallel_size=2, tensor_parallel_size=2) as flex:
        flex.register_forward_hook(HookFunction("site"))
        with pytest.raises(HookMismatchError, match=f"different places: .*input '{name}'"):
            flex(x, **(named if tp == 0 else {}))


class StateAndMask(nn.Module):
    """As recurrent layers are given zeros for each row, and attention a mask for all rows."""

    def __init__(self):
        super().__init__()
        self.fc, self.table = nn.Linear(6, 6), nn.Embedding(3, 6)
        self.state, self.mixed = nn.Linear(6, 6), nn.Identity()

    def forward(self, x, state, mask, position_ids):
        h = self.fc(x) + self.table(position_ids) + self.state(state)[0][:, None]
        return self.mixed((h @ h.mT + mask.cos()).softmax(-1) @ h)


@pytest.mark.ranks(2)
def test_an_input_of_equal_values_has_rows_where_it_meets_rows():
    """Zeros of which each rank has as many as it has rows were taken for those of all rows."""
    x, mask, positions = models.random(6, 3, 6), models.random(1, 3, 3), torch.arange(3)[None]
    states, rank = models.random(2, 1, 6).expand(2, 6, 6).clone(), dist.get_rank()
    of_all, own = (x, states, mask, positions), (x.chunk(2)[rank], states[:, :3], mask, positions)
    edited = dict.fromkeys(("table", "mixed"), mixing_features)
    for name, settings in {"": {}, "state": {"batch_dim": {"state": 1}}}.items():
        edits = edited | ({name: mixing_features} if name else {})
        found = []
        for group, parts, inputs in ((pipelines.alone_group(), 1, of_all), (None, 2, own)):
            sizes = settings | {"data_parallel_size": parts}
            model = models.seeded(StateAndMask).double()
            with FlexModel(model, records := {}, process_group=group, **sizes) as flex:
                for site, edit in edits.items():
                    flex.register_forward_hook(HookFunction(site, editing_function=edit))
                    of_backward = HookFunction(site, output_name=f"{site}.grad")
                    flex.register_full_backward_pre_hook(of_backward)
                flex(*inputs).square().mean().backward()
            found.append(records)
        if rank == 0:
            assert_close(found[1], found[0])
    with FlexModel(models.seeded(StateAndMask).double(), {}, data_parallel_size=2) as flex:
        flex.register_forward_hook(HookFunction("state"))
        with pytest.raises(ValueError, match=r"'state'.*batch_dim=.*\{'state': 1\} or .*None"):
            flex(*own)


@pytest.mark.ranks(2)
def test_an_input_that_may_hold_rows_or_not_is_asked_for():
    """A mask as long as the rank's rows, the same on all ranks."""
    model, rank = models.seeded(TwoInputs).double(), dist.get_rank()
    x, mask = models.random(8, 4), models.random(4, 4, seed=3)
    with FlexModel(model, {}, data_parallel_size=2) as flex:
        flex.register_forward_hook(HookFunction("fc"))
        with pytest.raises(ValueError, match=r"'mask' has the same values.*batch_dim=.*'mask'"):
            flex(x.chunk(2)[rank], mask)
    for is_shared in (True, False):
        model.is_shared, statement = is_shared, {"mask": None if is_shared else 0}
        with FlexModel(model, {}, data_parallel_size=2, batch_dim=statement) as flex:
            flex.register_forward_hook(HookFunction("fc", editing_function=mixing_features))
            flex.register_forward_hook(HookFunction("", output_name="whole"))
            flex(x.chunk(2)[rank], mask)
            records = flex.output_ptr
        if rank == 0:
            edited = mixing_features(None, model.fc(x), None, None)
            expected = edited @ mask if is_shared else edited * torch.cat([mask, mask])
            assert_close(records["whole"], [expected.detach()])
    with pytest.raises(TypeError, match="batch_dim must be"):
        FlexModel(model, data_parallel_size=2, batch_dim="x")


class Listed(nn.Module):
    def __init__(self, join):
        super().__init__()
        self.join, self.fc = join, models.seeded(nn.Linear, 4, 6)

    def forward(self, tensors):
        return self.fc(self.join(tensors))


@pytest.mark.ranks(2)
def test_a_list_of_tensors_with_rows():
    model, records = Listed(sum).double(), {}
    wholes = [models.random(4, 4, seed=seed).requires_grad_() for seed in (0, 1)]
    mine = [one.detach().chunk(2)[dist.get_rank()].clone().requires_grad_() for one in wholes]
    expected = model(wholes)
    expected.flip(0).sin().square().mul(torch.arange(4.0)[:, None]).mean().backward()
    with FlexModel(model, records, data_parallel_size=2, batch_dim={"tensors": 0}) as flex:
        flex.register_forward_hook(HookFunction("fc", editing_function=lambda *a: a[1].flip(0)))
        output = flex(mine)
        assert_close(output, expected.flip(0).chunk(2)[dist.get_rank()])
        factors = torch.arange(4.0).chunk(2)[dist.get_rank()][:, None]
        output.sin().square().mul(factors).mean().backward()
    for one, whole in zip(mine, wholes):
        assert_close(one.grad, 2 * whole.grad.chunk(2)[dist.get_rank()])
    if dist.get_rank() == 0:
        assert_close(records["fc"], [expected])


@pytest.mark.ranks(2)
def test_a_list_may_hold_rows_in_each_tensor_or_one_row_in_each():
    rows, images = [models.random(2, 4)] * 2, [models.random(3, 4)] * 2
    for given, join, setting, sizes in (
        (rows, sum, {"batch_dim": {"tensors": 0}}, (4, 6)),
        (images, torch.stack, {"dp_batch": "local"}, (2, 3, 6)),
    ):
        model = Listed(join).double()
        with FlexModel(model, {}, data_parallel_size=2) as flex:
            flex.register_forward_hook(HookFunction("fc"))
            with pytest.raises(ValueError, match=r"'tensors' is a list.*batch_dim=.*dp_batch="):
                flex(given)
        with FlexModel(model, {}, data_parallel_size=2, **setting) as flex:
            flex.register_forward_hook(HookFunction("fc"))
            flex(given)
            if dist.get_rank() == 0:
                assert [one.shape for one in flex.output_ptr["fc"]] == [sizes]


class Branches(nn.Module):
    """Another number of rows where an attribute of the class says so."""

    is_short = False

    def __init__(self):
        super().__init__()
        self.fc = nn.Identity()

    def forward(self, x):
        return self.fc(x[:1] if self.is_short else x)


@pytest.mark.ranks(2)
def test_control_flow_that_no_key_shows():
    """A shape that the followed forward had not is an error; always followed, it is right."""
    model = Branches()
    for follow in ("new", "always"):
        with FlexModel(model, {}, tensor_parallel_size=2, follow=follow) as flex:
            flex.register_forward_hook(HookFunction("fc"))
            Branches.is_short = False
            flex(BATCH)
            Branches.is_short = True
            if follow == "new":
                with pytest.raises(HookError, match=r'use FlexModel.*follow="always"'):
                    flex(BATCH)
            else:
                flex(BATCH)
                if dist.get_rank() == 0:
                    assert_close(flex.output_ptr["fc"], [BATCH[:1]])

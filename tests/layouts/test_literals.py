"""Numbers that equal a rank's number of rows: literals in the source are the unsharded program's,
too. All that is right here was refused before.
"""

import importlib.util
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import models
from flex_model import FlexModel, HookFunction
from flex_model.distributed.placement import Replicate, Shard
from followed import follow, unsharded
from test_proofs import ROWS, compare, mesh_of

TWO = [2]  # the number of each rank's rows

needs_positions = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="Python 3.10 does not tell which call a line makes"
)


class Made(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make, self.after = make, nn.Identity()

    def forward(self, x):
        return self.after(self.make(x))


def followed(make):
    """What is proven of a model whose ranks have two rows each, and the unsharded model's."""
    x, model = models.random(4, 6), Made(make)
    mine = x.chunk(2)[dist.get_rank()]
    found, _, _ = follow(model, mesh_of(dp_size=2), [mine], [ROWS])
    return found, (lambda: unsharded(model, [x]))


def whole(*shape):
    """A tensor that all ranks have."""
    return torch.ones(*shape).double().cumsum(-1)


LITERALS = {
    "repeated": lambda x: whole(3).repeat_interleave(2),
    "of a function": lambda x: torch.repeat_interleave(whole(3), 2, dim=-1),
    "every second": lambda x: whole(6)[::2],
    "a slice": lambda x: whole(6)[2:],
    "an index": lambda x: whole(6)[2],
    "split": lambda x: whole(6).split(2)[1],  # by a function in Python
    "padded": lambda x: F.pad(whole(3), (2, 2)),
    "a table": lambda x: torch.ones(6, 2).double(),
    "positions": lambda x: torch.arange(2),
    "copies": lambda x: whole(3).repeat(
        1,
        2,
    ),
    "rows repeated": lambda x: x.repeat(1, 2),
    "rows of it": lambda x: x.repeat_interleave(2, -1),
    "a power": lambda x: (x**2, int(x.shape[0]))[0],
    "a factor": lambda x: (int(x.shape[0]), 2 * x)[1],
}


@needs_positions
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", LITERALS)
def test_literals_are_the_unsharded_programs(name):
    found, expected = followed(LITERALS[name])
    compare(found, expected())


def in_a_variable(x, n=2):
    return x.repeat_interleave(n, -1)


VARIABLES = {
    "a default": lambda x: in_a_variable(whole(3)),
    "passed on": lambda x: in_a_variable(whole(3), 2),
    "a global": lambda x: whole(3).repeat_interleave(TWO[0]),
    "a size": lambda x: whole(3).repeat_interleave(int(x.shape[0])),
    "either": lambda x: whole(3).repeat_interleave(2 if x.ndim > 2 else TWO[0]),
    "both": lambda x: torch.ones(2, TWO[0]),
    "inside": lambda x: whole(3).repeat_interleave(max(2, TWO[0])),
    "computed": lambda x: whole(3).repeat_interleave(TWO[0] * 1 + 0 * 2),
    "unpacked": lambda x: whole(3).repeat_interleave(*TWO),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", VARIABLES)
def test_numbers_in_variables_may_be_a_ranks_own(name):
    found, _ = followed(VARIABLES[name])
    assert found["after"] == [None]


@pytest.mark.ranks(2)
def test_a_literal_may_split_other_rows():
    """Each rank's two rows stay two rows; the unsharded program's four become two."""
    found, expected = followed(lambda x: x.view(2, -1))
    assert expected()["after"][0].shape == (2, 12)
    assert found["after"] == [None]


SOURCE = """
def make(x):
    return x.new_ones({ones}).repeat_interleave({number})
"""


@pytest.mark.ranks(2)
@pytest.mark.parametrize("ones, change", [(3, None), (4, "number"), (5, "name")])
def test_only_the_source_of_the_running_code_counts(tmp_path, ones, change):
    """A graph that was traced on a rank has its sizes as literals, and no file; a file may have
    been changed since it was imported.
    """
    path = tmp_path / f"made_{dist.get_rank()}_{change}.py"
    path.write_text(SOURCE.format(ones=ones, number=2))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if change == "number":
        path.write_text(SOURCE.format(ones=ones, number=3))
    elif change == "name":
        path.write_text(SOURCE.format(ones=ones, number=2).replace("make", "made"))
    found, expected = followed(module.make)
    is_known = change is None and sys.version_info >= (3, 11)
    compare(found, expected(), unknown=() if is_known else ("after", ""))


@pytest.mark.ranks(2)
def test_code_without_a_file_may_have_a_ranks_sizes():
    names = {}
    exec(SOURCE.format(ones=6, number=2), names)
    found, _ = followed(names["make"])
    assert found["after"] == [None]


@pytest.mark.ranks(2)
def test_along_tp_a_literal_may_be_a_share():
    """The source of a layer for one rank may have its number of heads."""
    mine = models.random(3, 4).chunk(2, -1)[dist.get_rank()]
    model, split = Made(lambda x: torch.ones(3, 2)), (Replicate(), Shard(1))
    found, _, _ = follow(model, mesh_of(tp_size=2), [mine], [split])
    assert found["after"] == [None]


class Turned(nn.Module):
    """Features are multiplied by pairs of equal factors, as rotary positions are."""

    columns = rows = ()  # that tensor parallelism would split

    def __init__(self):
        super().__init__()
        self.fc, self.site = nn.Linear(6, 6).double(), nn.Identity()

    def forward(self, x):
        return self.site(self.fc(x) * whole(3).repeat_interleave(2)).sin()


def mixed(module, full, save_ctx, modules):
    return full + 0.5 * full.flip(0) * full.sum(-1, keepdim=True)


@needs_positions
@pytest.mark.ranks(2)
def test_an_edit_behind_a_literal():
    """Forward and backward, with two rows a rank."""
    model, x, ddp = models.seeded(Turned), models.random(4, 6), models.TWO_RANKS["ddp"]
    sharded = ddp.shard(model)
    model.site.register_forward_hook(lambda module, args, out: mixed(module, out, None, None))
    expected = model(x)
    expected.mean().backward()
    with FlexModel(sharded, {}, **ddp.sizes) as flex:
        flex.register_forward_hook(HookFunction("site", None, mixed))
        output = flex(ddp.my_rows(x))
        output.mean().backward()
    assert_close(output, ddp.my_rows(expected))
    for name, gradient in ddp.full_gradients(model, sharded).items():
        assert_close(gradient, model.get_parameter(name).grad)

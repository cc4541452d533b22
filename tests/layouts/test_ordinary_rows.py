"""What models do with rows every day, under data parallelism: rows picked by an index, loops over
them, tables that all rows share, numbers and branches of a rank's own. Edits before and behind mix
rows and features; forward and backward equal the unsharded twin's.
"""

import contextlib
import inspect
import re
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import models
import ordinary_lines
from flex_model import FlexModel, HookError, HookFunction
from flex_model.distributed.placement import Shard
from ordinary import (
    LENGTH,
    SITES,
    WIDTH,
    around,
    check,
    mixing_all,
    mixing_features,
    on_ranks,
    twin,
)
from ordinary_lines import kinds

ROWS = (1, 2, 3, LENGTH, WIDTH, 7)  # of a rank
BOTH = dict.fromkeys(SITES, mixing_all)


def batch(rows, seed=2):
    return models.random(2 * rows, LENGTH, WIDTH, seed=seed)


NAMES = [
    name
    for name, lines in inspect.getmembers(ordinary_lines, inspect.isfunction)
    if "model" in inspect.signature(lines).parameters
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", NAMES)
def test_ordinary_lines(name):
    """With every number of rows that some other size equals."""
    # Inside vmap and in a backward a single row does not show which dim it is, nor does a number
    # of copies.
    lines = getattr(ordinary_lines, name)

    def make():
        model = around(lines)
        if name == "packed":
            model.lstm = models.seeded(nn.LSTM, WIDTH, WIDTH, batch_first=True).double()
        return model

    for rows in ROWS[name in ("vmapped_grad", "forces", "ensemble", "batch_indices") :]:
        try:
            check(make, batch(rows), BOTH)
        except Exception as error:
            error.add_note(f"with {rows} rows a rank") if hasattr(error, "add_note") else None
            raise


def view_of_all_sizes(model, h):
    rows, length, width = h.shape
    return h.reshape(rows * length, width).view(rows, length, 2, -1).transpose(1, 2).flatten(-2)


@pytest.mark.ranks(2)
def test_sizes_are_spelled_out():
    for rows in ROWS:
        check(lambda: around(view_of_all_sizes, LENGTH * WIDTH // 2), batch(rows), BOTH)


# ---- What a rank's rows decide -------------------------------------------------------------------


def scaled(model, h):
    return h / h.shape[0] ** 0.5


def scaled_by_a_tensor(model, h):
    return h * torch.tensor(1.0 / len(h), dtype=h.dtype)


def centred(model, h):
    """By the mean of this rank's rows, as BatchNorm has it."""
    return h - h.detach().mean().item()


def branching(model, h):
    """Ranks take different ways: their rows have other signs."""
    if h.detach().sum() > 0:
        return h.flip(-1) * 2
    return (h + 1).cumsum(1)


def repeated(model, h):
    """One rank takes more steps than the other."""
    for _ in range(1 + 2 * int(h.detach().sum() > 0)):
        h = (h * 1.5).tanh()
    return h


def skipping(model, h):
    """A layer that one rank leaves out, with a call of a module in it."""
    return h + model.fc(h) if h.detach().sum() > 0 else h * 2


OWN = ["scaled", "scaled_by_a_tensor", "centred", "branching", "repeated", "skipping"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", OWN)
def test_numbers_and_branches_of_a_ranks_own(name):
    """The placement is right whatever the numbers are: hooks see what the ranks hold together."""
    lines, edits = globals()[name], dict.fromkeys(SITES, mixing_features)
    for rows in (1, 2, 3):
        check(lambda: around(lines), signed(rows), edits, is_own=True)


def signed(rows):
    """Rows of which the first rank's have a large sum and the other's a small one."""
    x, model = batch(rows), around(scaled)
    direction = model.fc.weight.detach().sum(0)
    return x + torch.tensor([3.0, -3.0]).repeat_interleave(rows)[:, None, None] * direction


# ---- Rows that meet rows of other ranks ----------------------------------------------------------


def by_a_function(x):
    return models.Gather.apply(x, dist.group.WORLD, 0, True)


def by_torch(x):
    with old_names():
        return torch.cat(torch.distributed.nn.functional.all_gather(x.contiguous()))


def functional(x):
    with old_names():
        return funcol.all_gather_tensor_autograd(x.contiguous(), 0, dist.group.WORLD)


@contextlib.contextmanager
def old_names():
    """Which every supported torch has; newer ones warn of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


GATHERS = {"a Function": by_a_function, "torch.distributed.nn": by_torch, "functional": functional}


class Contrastive(nn.Module):
    """Two views of each row, told from all other rows'. ``gather``: None on one rank.

    ``is_local``: a rank's loss is of its own rows against all; else of all against all.
    """

    def __init__(self, gather, is_local):
        super().__init__()
        self.fc, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.before, self.gathered = nn.Identity(), nn.Identity()
        self.gather, self.is_local = gather, is_local

    def forward(self, x):
        one = self.before(self.fc(x).mean(1))
        other = self.other(x).mean(1)
        all_others = self.gathered(other if self.gather is None else self.gather(other))
        start = 0
        if self.gather is not None and self.is_local:
            start = dist.get_rank() * len(one)
        elif self.gather is not None:
            one = self.gather(one)
        return F.cross_entropy(one @ all_others.T, start + torch.arange(len(one)))[None]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize("gather", GATHERS)
def test_a_contrastive_loss_over_all_ranks(gather, is_local):
    """What is gathered is one tensor that all ranks have; its gradient is the ranks' mean."""
    for rows in (1, 3, WIDTH):
        x = batch(rows)
        edits = dict.fromkeys(("before", "gathered"), mixing_all)
        alone = models.seeded(Contrastive, None, is_local).double()
        ours = models.seeded(Contrastive, GATHERS[gather], is_local).double()
        expected_loss, expected = twin(alone, [x], edits, torch.sum)
        loss, found = on_ranks(ours, x.chunk(2)[dist.get_rank()], edits, torch.sum)
        dist.all_reduce(loss)
        assert_close(loss / 2, expected_loss)
        for name, tensor in expected.items():
            assert_close(found[name], tensor, msg=lambda text, name=name: f"{name}: {text}")


class Normed(nn.Module):
    """A norm over all ranks' rows between two layers."""

    def __init__(self, norm):
        super().__init__()
        self.fc, self.norm, self.head = nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, 4)
        self.before, self.behind = nn.Identity(), nn.Identity()

    def forward(self, x):
        h = self.before(self.fc(x))
        return self.head(self.behind(self.norm(h.mT).mT))


class SyncedNorm(nn.Module):
    """What SyncBatchNorm computes in training, which is on GPUs only in torch."""

    def forward(self, h):
        all_reduce = torch.distributed.nn.functional.all_reduce
        ranks, number = dist.get_world_size(), h.shape[0] * h.shape[2]
        with old_names():
            mean = all_reduce(h.sum((0, 2)) / number) / ranks
            squares = all_reduce((h - mean[:, None]).square().sum((0, 2))) / (number * ranks)
        return (h - mean[:, None]) / (squares[:, None] + 1e-5).sqrt()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rows", [1, 3])
def test_batch_norm_in_eval_mode(rows):
    def make():
        model = models.seeded(Normed, nn.BatchNorm1d(WIDTH)).double().eval()
        model.norm.running_mean.copy_(models.random(WIDTH))
        return model

    check(make, batch(rows), BOTH)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_norm_over_all_ranks_rows_in_training(rows):
    """Its statistics are sums over the ranks: rows stay rows, forward and backward."""
    norm = nn.BatchNorm1d(WIDTH, affine=False, track_running_stats=False)
    x = batch(rows)
    whole, expected = twin(models.seeded(Normed, norm).double(), [x], BOTH)
    model = models.seeded(Normed, SyncedNorm()).double()
    output, found = on_ranks(model, x.chunk(2)[dist.get_rank()], BOTH)
    assert_close(output, whole.chunk(2)[dist.get_rank()])
    for name, tensor in expected.items():
        assert_close(found[name], tensor, msg=lambda text, name=name: f"{name}: {text}")


class NormOfPairs(nn.BatchNorm1d):
    def forward(self, h):
        one, other = super().forward(torch.cat([h, h.sin()])).chunk(2)
        return one - other


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, NormOfPairs])
@pytest.mark.parametrize("rows", [2, 3])
def test_batch_norm_in_training_is_each_ranks_own(rows, kind):
    edits = dict.fromkeys(SITES, mixing_features)

    def make():
        norm = kind(WIDTH, track_running_stats=False)
        return models.seeded(Normed, norm).double()

    check(make, batch(rows), edits, is_own=True)


@pytest.mark.ranks(2)
def test_an_encoder_that_packs_rows_without_their_padding():
    """In eval mode torch sets the padding to zero, in the forward that is followed, too."""
    layer = models.seeded(nn.TransformerEncoderLayer, WIDTH, 2, 8, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).double().eval()

    def encoded(model, h):
        padding = torch.arange(LENGTH) >= 2 + kinds(h)[:, :1]
        with warnings.catch_warnings():  # torch's, of nested tensors
            warnings.simplefilter("ignore", UserWarning)
            return encoder(h, src_key_padding_mask=padding)

    whole, x, records = around(encoded).eval(), batch(3), {}
    mine = x.chunk(2)[dist.get_rank()]
    with torch.no_grad(), FlexModel(whole, records, data_parallel_size=2, timeout=20) as flex:
        expected = encoded(whole, whole.fc(x))
        assert (expected == 0).any()
        flex.register_forward_hook(HookFunction("behind", editing_function=mixing_all))
        edited = whole.head(mixing_all(None, expected, None, None)).chunk(2)[dist.get_rank()]
        for _ in range(2):
            assert_close(flex(mine), edited)
            assert_close(records.get("behind", [expected])[0], expected)


# ---- What stays refused --------------------------------------------------------------------------


def sorted_behind_a_mask(model, h):
    """All that a mask picks."""
    made, mask = h * 2, kinds(h) == 1
    made[mask] = h[mask].sort(0).values
    return made


def back_by_another_order(model, h):
    one, other = h.detach()[:, :2, 0].unbind(1)
    return h[one.argsort()][other.argsort().argsort()]


def written_in_another_order(model, h):
    made = h * 2
    made[h.detach()[:, 0, 0].argsort()] = h.sin()
    return made


def written_from_other_rows(model, h):
    made = torch.zeros_like(h)
    for i in range(len(h)):
        made[i] = h[len(h) - 1 - i]
    return made


def chosen_in_another_order(model, h):
    order = h.detach()[:, 0, 0].argsort()
    made = torch.zeros_like(h)
    made[order] = h[order, kinds(h).sum(1) % LENGTH][:, None] + torch.zeros_like(h[order])
    return made


def rows_of_two_kinds(model, h):
    """As many in both tensors: one's are in two blocks on each rank, the other's are not."""
    rows, last = torch.arange(2 * len(h)), kinds(h).sum(1).repeat_interleave(2) % LENGTH
    return torch.cat([h, h.sin()])[rows, last][:, None]


def picked_by_rows_of_another_kind(model, h):
    both = torch.cat([h, h.sin()])
    both[kinds(h).repeat_interleave(2, 0)[:, 0] == 1] *= 2
    return both


def written_by_two_masks(model, h):
    """As many on each rank, but not in each block."""
    both = torch.cat([h, h.sin()])
    mask = kinds(both)[:, 0] == kinds(both)[0, 0]
    made = both * 2
    made[mask] = both[(mask.long() * 1).bool()]
    return made


def values_of_a_sparse_tensor(model, h):
    values = model.tables["steps"][0].clone()
    change = ordinary_lines.sparse(model.groups, values)
    values += h.detach().sum()
    return h @ change.to_dense()[:WIDTH, :WIDTH]


def tokens_of_blocks(model, h):
    """One block's rows have more tokens than the other's."""
    both, lengths = torch.cat([h, h.sin()]), [4] * len(h) + [2] * len(h)
    return torch.cat([row[:length] for row, length in zip(both, lengths)])


REFUSED = {
    "tokens of blocks": tokens_of_blocks,
    "a sum by the number of own rows": lambda model, h: h.sum(0) / h.shape[0],
    "a product by the number of own elements": lambda model, h: (
        torch.einsum("rld,rle->de", h, h) / h.numel()
    ),
    "values of a sparse tensor": values_of_a_sparse_tensor,
    "a sparse tensor as long as the rows": lambda model, h: (
        F.pad(h[:, 0], (0, 2)) + ordinary_lines.sparse(model.groups, model.groups, len(h))
    )[:, :WIDTH],
    "sparse rows": lambda model, h: h.flatten(1).to_sparse().to_dense().view_as(h),
    "rows of two kinds": rows_of_two_kinds,
    "picked by rows of another kind": picked_by_rows_of_another_kind,
    "written by two masks": written_by_two_masks,
    "sorted behind a mask": sorted_behind_a_mask,
    "back by another order": back_by_another_order,
    "written in another order": written_in_another_order,
    "written from other rows": written_from_other_rows,
    "chosen in another order": chosen_in_another_order,
    "chunks beside each other": lambda model, h: torch.cat(h.chunk(3), 1),
    "halves turned round": lambda model, h: torch.cat([one.flip(0) for one in h.split(2)]),
    "sorted": lambda model, h: h.sort(0).values,
    "argsorted": lambda model, h: h[h.detach()[:, 0, 0].argsort()],
    "turned round": lambda model, h: h.flip(0),
    "restrided": lambda model, h: (h * 2).as_strided_(h.shape, (LENGTH * WIDTH, 1, LENGTH)),
    "rolled": lambda model, h: h.roll(1, 0),
    "in a circle": lambda model, h: F.pad(h.transpose(0, 2), (1, 0), "circular").transpose(0, 2),
    "shuffled": lambda model, h: h[torch.randperm(h.shape[0])],
    "the best": lambda model, h: h.topk(2, 0).values,
    "masked": lambda model, h: h[h.detach()[:, 0, 0] > h.detach()[:, 0, 0].min()],
    "unique": lambda model, h: h.detach().unique(dim=0),
    "the first": lambda model, h: h[:2],
    "all but the first": lambda model, h: h[1:],
    "rows times rows": lambda model, h: (h.flatten(1) @ h.flatten(1).T)[..., None] * h[0, 0],
    "distances": lambda model, h: torch.cdist(h.flatten(1), h.flatten(1))[..., None] * h[0, 0],
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", REFUSED)
def test_rows_in_another_order_or_number_are_refused(name):
    """With what to do first: each data-parallel rank may have its own."""
    x = batch(3).chunk(2)[dist.get_rank()]
    with FlexModel(around(REFUSED[name]), {}, data_parallel_size=2, timeout=20) as flex:
        flex.register_forward_hook(HookFunction("behind", None, mixing_features))
        with pytest.raises((ValueError, HookError), match=re.escape('dp_batch="local"')) as error:
            flex(x)
    text = str(error.value)
    assert "forward hook on 'behind'" in text
    assert text.index("dp_batch=") < (text + "annotate_layout").index("annotate_layout")


SINGLE = {
    "a learned row behind": lambda model, h: torch.cat([h[:, :4], model.table[None]]),
    "a row of a table behind": lambda model, h: torch.cat([h[:, 0], model.table[:1]]),
    "a row of zeros in front": lambda model, h: torch.cat([torch.zeros(1, WIDTH), h[:, 0].float()]),
    "one row's indices": lambda model, h: h[:, 0].gather(1, model.groups[None, :3]),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", SINGLE)
def test_one_row_beside_the_only_row_of_a_rank_is_refused(name):
    """It is one beside all rows of the batch, too."""
    model = around(lambda model, h: model.behind(SINGLE[name](model, h)).sum() + h)
    with FlexModel(model, {}, data_parallel_size=2, timeout=20) as flex:
        flex.register_forward_hook(HookFunction("behind"))
        with pytest.raises((ValueError, HookError), match=r"hook on .behind.: .* is not known"):
            flex(batch(1).chunk(2)[dist.get_rank()])


HALVES = {
    "chunk": lambda h: h.chunk(2),
    "split": lambda h: h.split(len(h) // 2),
    "slices": lambda h: (h[: len(h) // 2], h[len(h) // 2 :]),
    "vsplit": lambda h: torch.vsplit(h, 2),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rows", [2, 4])
@pytest.mark.parametrize("name", HALVES)
def test_halves_of_a_ranks_rows_beside_each_other_are_refused(name, rows):
    """The halves of the whole batch have other rows, also where a half is one row."""
    x = batch(rows).chunk(2)[dist.get_rank()]
    model = around(lambda model, h: torch.cat(HALVES[name](h), 1))
    with FlexModel(model, {}, data_parallel_size=2, timeout=20) as flex:
        flex.register_forward_hook(HookFunction("behind", None, mixing_features))
        with pytest.raises(ValueError, match=r"forward hook on 'behind'.*is not known"):
            flex(x)


def sized(h, make):
    return make(len(h), 1, WIDTH).shape[0]


def viewed(model, h):
    return model.table.repeat(len(h), 1).view(-1, len(h), WIDTH).shape[1]


def recurrent(model, h):
    weight = torch.cat([model.fc.weight, model.fc.weight.T, model.fc.weight])
    zeros, state = h.new_zeros(len(h), 4, WIDTH), h.new_zeros(1, len(h), WIDTH)
    return torch.gru(zeros, state, [weight, weight], False, 1, 0.0, False, False, True)[0]


COUNTED = {  # with the number of a rank's rows
    "zeros of rows": (3, lambda model, h: h.new_zeros(len(h), LENGTH, WIDTH) + model.table[0]),
    "zeros of one row": (1, lambda model, h: torch.zeros(len(h), 4, WIDTH) + model.table),
    "as many as all rows": (1, lambda model, h: torch.zeros(len(h), WIDTH) + model.table[:2]),
    "what a recurrent layer makes of zeros": (1, recurrent),
    "joined copies": (3, lambda model, h: torch.cat([model.table[None]] * len(h))),
    "stacked copies": (3, lambda model, h: torch.stack([model.table] * len(h))),
    "copies, one by one": (3, lambda m, h: torch.stack([m.table * 2 for _ in range(h.shape[0])])),
    "pairs": (3, lambda model, h: torch.cat([model.table[:1], model.table[1:2].sin()] * len(h))),
    "pairs, by size": (2, lambda m, h: torch.stack([m.table, m.table.sin()] * h.shape[0])),
    "copies in turn": (2, lambda model, h: model.table.repeat_interleave(len(h), 0)),
    "three a row": (2, lambda model, h: torch.zeros(len(h) * 3, WIDTH)),
    "three of the only row": (1, lambda model, h: torch.zeros(len(h) * 3, WIDTH)),
    "three a row, by int": (2, lambda model, h: torch.zeros(int(h.shape[0]) * 3, WIDTH)),
    "repeated": (2, lambda model, h: model.table.repeat(len(h), 1)),
    "joined tables": (2, lambda model, h: torch.cat([model.table] * len(h))),
    "the only row's table": (1, lambda model, h: torch.cat([model.table] * len(h))),
    "a list": (2, lambda model, h: torch.tensor([1.0, 2.0, 3.0] * len(h))),
    "as many as tokens": (2, lambda model, h: torch.zeros(int((kinds(h) < 9).sum()), WIDTH)),
    "of a table": (2, lambda model, h: model.table[torch.arange(len(h) * 2) % 3]),
    "tiled": (2, lambda model, h: torch.tile(h, (1, h.shape[0], 1))),
    "packed": (1, lambda model, h: h.view(1, -1, WIDTH)),
    "by a size of zeros": (1, lambda model, h: h[:, 0].view(sized(h, torch.zeros), 1, WIDTH)),
    "by a size of a view": (2, lambda model, h: h[:, 0].view(-1, viewed(model, h), WIDTH)),
    "by a size of a blank": (1, lambda model, h: h[:, 0].view(sized(h, torch.empty), 1, WIDTH)),
    "packed, unflattened": (1, lambda model, h: h.unflatten(0, (1, -1))),
    "two blocks": (1, lambda model, h: torch.cat([h, -h]).view(2, -1, LENGTH, WIDTH)),
    "two blocks, by len": (1, lambda model, h: torch.cat([h, -h]).view(2, len(h), LENGTH, WIDTH)),
    "two blocks, unflattened": (1, lambda model, h: torch.cat([h, -h]).unflatten(0, (2, -1))),
    "three blocks": (1, lambda model, h: h.repeat(3, 1, 1).view(3, -1, LENGTH, WIDTH)),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", COUNTED)
def test_what_a_rank_has_by_its_number_of_rows_is_refused(name):
    """Where a site holds it as it is: the unsharded program has a larger one, or another dim."""
    rows, lines = COUNTED[name]
    with FlexModel(around(lines), {}, data_parallel_size=2, timeout=20) as flex:
        flex.register_forward_hook(HookFunction("behind", None, mixing_features))
        with pytest.raises(ValueError, match=r"forward hook on 'behind'.*is not known"):
            flex(batch(rows).chunk(2)[dist.get_rank()])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", REFUSED)
def test_the_advice_for_rows_in_another_order_or_number(name):
    make, x = lambda: around(REFUSED[name]), batch(3).chunk(2)[dist.get_rank()]
    model, seen, records = make(), [], {}

    def see(module, args, output):
        seen.append(output.detach())

    model.behind.register_forward_hook(see)
    torch.manual_seed(0)
    expected = model(x)
    torch.manual_seed(0)
    settings = {"data_parallel_size": 2, "dp_batch": "local"}
    with FlexModel(make(), records, timeout=20, **settings) as flex:
        flex.register_forward_hook(HookFunction("behind"))
        assert_close(flex(x), expected)
    assert_close(records["behind"], seen)


@pytest.mark.ranks(2)
def test_the_advice_for_rows_in_blocks_is_right():
    """Stated as consecutive rows, they were recorded in another order than the twin's."""
    model = around(lambda model, h: torch.cat([h, h.sin()]).flip(0).flip(0))
    x, records, settings = batch(3), {}, {"data_parallel_size": 2, "output_ranks": "all"}
    _, expected = twin(model, [x], dict.fromkeys(SITES, mixing_features))
    with FlexModel(model, records, **settings, timeout=20) as flex:
        flex.register_forward_hook(HookFunction("before", None, mixing_features))
        flex.register_forward_hook(HookFunction("behind"))
        with pytest.raises(ValueError, match=r"lost at flip, beside rows in 2 parts") as error:
            flex(x.chunk(2)[dist.get_rank()])
        (line,) = re.findall(r"flex\.annotate_layout\(.*dp=Shard\(0.*\)(?=  #)", str(error.value))
        eval(line, {"flex": flex, "Shard": Shard})
        flex(x.chunk(2)[dist.get_rank()])
    assert_close(records["behind"][0], expected["behind"])


@pytest.mark.ranks(2)
def test_the_advice_for_an_input_of_an_encoder_that_ran_before():
    """``generate`` of transformers passes features of images, of which a row has several."""

    class Beside(nn.Module):
        def forward(self, x, features):
            return x + features.unflatten(0, (len(x), 2)).sum(1)

    rank, settings = dist.get_rank(), {"data_parallel_size": 2, "timeout": 20}
    x, features = batch(3)[:, 0].chunk(2)[rank], batch(6)[:, 1].chunk(2)[rank]
    with FlexModel(Beside(), {}, **settings) as flex:
        flex.register_forward_hook(HookFunction(""))
        text = r"(?s)lost at input 'features', tensor 1.* call the forward itself.*dp_batch="
        with pytest.raises(ValueError, match=text):
            flex(x, features)


@pytest.mark.ranks(2)
def test_a_state_of_rows_that_an_earlier_run_left_in_an_attribute():
    """As RecurrentGemma leaves one for its decoding; whether it is of these rows is not known."""

    def lines(model, h):
        model.state = h * 2 if model.state is None else h + model.state
        return model.state

    x, model = batch(3).chunk(2)[dist.get_rank()], around(lines)
    model.state = None
    with torch.no_grad():
        model(x)
        with FlexModel(model, {}, data_parallel_size=2, timeout=20) as flex:
            flex.register_forward_hook(HookFunction("behind"))
            with pytest.raises(ValueError, match=r"'state' is a state .* set it to None"):
                flex(x)
            model.state = None
            flex(x)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", [name for name in REFUSED if name not in ("unique", "shuffled")])
def test_rows_before_they_are_put_in_another_order(name):
    """What comes behind, and how the loss is made of it, does not matter."""
    check_before = dict.fromkeys(("before",), mixing_features)
    make, x = lambda: around(REFUSED[name]), batch(3)
    _, expected = twin(make(), list(x.chunk(2)), check_before)
    _, found = on_ranks(make(), x.chunk(2)[dist.get_rank()], check_before)
    for one, tensor in expected.items():
        assert_close(found[one], tensor, msg=lambda text, one=one: f"{one}: {text}")

"""Programs written by hand: a few for each known way to a wrong number.

They are of the same form as the random ones, so they replay and shrink alike. The names begin with
the number of the class: 1 equal values taken for one value; 2 rows looked for in dim 0; 3 a layout
remembered by shape, and ties at size 1; 4 the order of parts; 5 gradients, which may be partial
where the activation is whole; 6 state.
"""

from directed import CLASSES, SPLIT, column, directed, row, with_layers

__all__ = ["CLASSES"]

# ---- 1: equal values -----------------------------------------------------------------------------

for weights in ("zero", "tiled"):
    for layers in ("bare", "states"):
        with_layers(
            f"1 {weights} weights, {layers}",
            layers,
            "h = self.s(self.l(x))",
            "forward s, forward s mixing, full_backward s, parameter l.weight",
            column("l", init=weights),
            output=SPLIT,
        )
with_layers(
    "1 symmetric weights",
    "bare",
    "h = self.s(self.l(x))",
    "forward s, parameter l.weight",
    column("l", outer=8, init="symmetric"),
    output=SPLIT,
    same_rows=True,
)
for layers in ("bare", "states"):
    with_layers(
        f"1 equal partial sums, {layers}",
        layers,
        "h = reduce_from(self.s(F.linear(self.l(x), self.d.weight)))",
        "forward s, forward s elementwise, full_backward s",
        column("l", init="tiled"),
        row("d", init="tiled"),
    )

# ---- 2: rows looked for in dim 0 -----------------------------------------------------------------

for data in ("ddp", "fsdp2", "dp"):
    directed(
        f"2 a transpose with one row a rank, {data}",
        data,
        "h = self.s(self.l(x).transpose(0, 1))",
        "forward s, forward s mixing, full_backward s",
        init=("self.l = linear(8, 8, seed=1)",),
        output="S B/dp 8",
        batches=((1, 3),),
    )
directed(
    "2 positions first, as long as the rank's rows",
    "ddp",
    "m = self.s(self.p(shared))\nh = self.l(x) + m",
    "forward s, forward_pre p, forward_pre l",
    init=("self.l = linear(8, 8, seed=1)", "self.p = fill(nn.Embedding(8, 8), 4)"),
    arguments=(("shared", "S", "positions", 0), ("x", "B/dp S 8", "float", 0)),
    batches=((2, 2),),
)

# ---- 3: a layout remembered by its shape, and ties at size 1 -------------------------------------

HEADS = """q = self.l(x).view(rows, length, -1, 2).transpose(1, 2)
a = self.s(torch.bmm(q.flatten(0, 1), q.flatten(0, 1).mT))
h = torch.bmm(a.softmax(-1), q.flatten(0, 1)).view_as(q)
h = self.d(h.transpose(1, 2).flatten(2))"""
for batches in (((1, 4), (2, 4)), ((2, 4), (1, 4), (3, 4))):
    with_layers(
        f"3 heads joined with a batch that changes, {batches[0][0]} first",
        "states",
        HEADS,
        "forward s, forward s mixing, full_backward s",
        column("l"),
        row("d"),
        batches=batches,
    )
directed(
    "3 a split dim that changes with the length",
    "bare",
    """if length > 4:
        h = gather(self.s(take_part(x, 1)), 1)
    else:
        h = gather(self.s(take_part(x, 2)), 2)""",
    "forward s",
    batches=((2, 4), (2, 8)),
    run="no_grad",
)
with_layers(
    "3 a gather in eval only",
    "states",
    """h = self.l(x)
    if not self.training:
        h = take_part(self.s(gather(h, 2)), 2)
    else:
        h = self.s(h)""",
    "forward s",
    column("l"),
    output=SPLIT,
    batches=((2, 4, "train"), (2, 4, "eval")),
)
ATTENTION = """q = self.l(x).view(rows, length, -1, 4).transpose(1, 2)
a = self.s((q @ q.mT).softmax(-1))
h = self.t((a @ q).transpose(1, 2).reshape(rows, length, -1))
h = self.d(h)"""
for run in ("eval", "inference"):
    with_layers(
        f"3 as many heads as ranks and one row, {run}",
        "states",
        ATTENTION,
        "forward s, forward t, forward s mixing",
        column("l"),
        row("d"),
        batches=((1, 5),),
        run=run,
    )
with_layers(
    "3 a transpose of one row and one token",
    "states",
    "h = self.l(x)\nt = self.t(h.transpose(0, 2))\nh = self.s(h)",
    "forward s, forward t, full_backward s",
    column("l", outer=2),
    output="B/dp S 2/tp",
    batches=((1, 1),),
)

# ---- 4: the order of parts -----------------------------------------------------------------------

for parts, spelled in ((2, "gate; up"), (3, "q; k; v")):
    for stated in (False, True):
        with_layers(
            f"4 [{spelled}] after a custom operation" + ", stated" * stated,
            "states",
            f"""f = self.s(custom.double(self.l(x)))
            h = sum(f.chunk({parts}, -1))""",
            "forward s, forward s mixing",
            column("l", outer=4 * parts, parts=parts),
            output="B/dp S 4/tp",
            is_stated=stated,
            sites=(("s", f"B/dp S {parts}*4/tp"),),
        )

# ---- 5: gradients --------------------------------------------------------------------------------

for layers in ("bare", "states"):
    with_layers(
        f"5 a column layer copied to outside, {layers}",
        layers,
        "h = self.d(self.l(self.s(copy_to(x + self.p))))",
        "full_backward s, full_backward_pre s, full_backward l, full_backward s mixing",
        column("l", copies=False),
        row("d"),
        init=("self.p = nn.Parameter(weight(8, seed=7))",),
        parameters=(("p", "8", False),),
    )
with_layers(
    "5 a layer that states nothing beside layers that do",
    "states",
    "h = self.d(self.m(self.l(x)))",
    "parameter m.weight, parameter m.weight elementwise, full_backward m",
    column("l", inner=8),
    row("d"),
    init=(
        "class Bare(nn.Module):\n            forward = lambda self, h: h * self.weight",
        "self.m = Bare()",
        "self.m.weight = nn.Parameter(my_part(weight(8, seed=5), 0))",
    ),
    parameters=(("m.weight", "8/tp", False),),
)
with_layers(
    "5 a partial gradient, output_ranks all",
    "states x ddp",
    "h = self.d(self.l(self.s(copy_to(self.e(x)))))",
    "full_backward_pre s, full_backward s, full_backward e",
    column("l", copies=False),
    row("d"),
    init=("self.e = linear(8, 8, seed=9)",),
    ranks=4,
    output_ranks="all",
)

# ---- 6: state ------------------------------------------------------------------------------------

directed(
    "6 an edit on one process under inference_mode, the input made before",
    "one",
    "h = self.s(x)",
    "forward_pre s elementwise, forward s elementwise, forward_pre s mixing",
    run="inference",
    ranks=1,
)

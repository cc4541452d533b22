"""Class 3: a layout remembered by its shape, and ties at size 1."""

from directed import SPLIT, column, directed, row, with_layers

HEADS = """q = self.l(x).view(rows, length, -1, 2).transpose(1, 2)
a = self.s(torch.bmm(q.flatten(0, 1), q.flatten(0, 1).mT))
h = torch.bmm(a.softmax(-1), q.flatten(0, 1)).view_as(q)
h = self.d(h.transpose(1, 2).flatten(2))"""
for layers in ("states", "bare", "plan"):
    made = (column("l"), row("d"))
    if layers == "plan":
        made = (("self.l = linear(8, 8, seed=1)", ()), ("self.d = linear(8, 8, seed=2)", ()))
    plan = (("l", "column"), ("d", "row")) if layers == "plan" else ()
    for batches in (((1, 4), (2, 4)), ((2, 4), (1, 4), (3, 4))):
        with_layers(
            f"3 heads joined with a batch that changes, {batches[0][0]} first, {layers}",
            layers,
            HEADS,
            "forward s, forward s mixing, full_backward s",
            *made,
            batches=batches,
            plan=plan,
        )
directed(
    "3 rows flattened under sequence parallelism, the batch changes",
    "bare",
    "h = self.s(take_part(x, 1).flatten(0, 1))",
    "forward s, forward s mixing",
    output="B/dp*S/tp 8",
    batches=((1, 4), (2, 4)),
    run="no_grad",
)
with_layers(
    "3 sequence parallel for long inputs only",
    "states",
    """h = self.d(self.l(x))
    if length > 4:
        h = gather(self.s(take_part(h, 1)), 1)
    else:
        h = self.s(h)""",
    "forward s, full_backward s",
    column("l"),
    row("d"),
    batches=((2, 4), (2, 8)),
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
for layers in ("bare", "states"):
    for then, length in (("the same sizes", 4), ("longer", 8)):
        with_layers(
            f"3 a gradient that is zero in the first step, then {then}, {layers}",
            layers,
            "h = self.d(self.l(self.s(copy_to(x + self.p)))) * float(not self.training)",
            "full_backward_pre s, full_backward s",
            column("l", copies=False),
            row("d"),
            init=("self.p = nn.Parameter(weight(8, seed=7))",),
            parameters=(("p", "8", False),),
            batches=((2, 4, "train"), (2, length, "eval")),
        )
ATTENTION = """q = self.l(x).view(rows, length, -1, 4).transpose(1, 2)
a = self.s((q @ q.mT).softmax(-1))
h = self.t((a @ q).transpose(1, 2).reshape(rows, length, -1))
h = self.d(h)"""
for layers in ("states", "bare", "plan"):
    made = (column("l"), row("d"))
    if layers == "plan":
        made = (("self.l = linear(8, 8, seed=1)", ()), ("self.d = linear(8, 8, seed=2)", ()))
    for run in ("eval", "inference"):
        with_layers(
            f"3 as many heads as ranks and one row, {layers}, {run}",
            layers,
            ATTENTION,
            "forward s, forward t, forward s mixing",
            *made,
            batches=((1, 5),),
            plan=(("l", "column"), ("d", "row")) if layers == "plan" else (),
            run=run,
        )
    with_layers(
        f"3 one column and one token a rank, {layers}",
        layers,
        "h = self.s(self.l(x).transpose(1, 2))",
        "forward s, full_backward s",
        column("l", outer=2) if layers != "plan" else ("self.l = linear(8, 2, seed=1)", ()),
        output="B/dp 2/tp S",
        batches=((1, 1),),
        plan=(("l", "column"),) if layers == "plan" else (),
    )
with_layers(
    "3 view(rows, -1, heads) with one row",
    "states",
    "h = self.s(self.l(x).transpose(1, 2).reshape(rows, -1, length))",
    "forward s, forward s mixing",
    column("l"),
    output="B/dp 8/tp S",
    batches=((1, 1), (1, 2)),
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

# ---- 6: state ------------------------------------------------------------------------------------

directed(
    "6 an edit on one process under inference_mode, the input made before",
    "one",
    "h = self.s(x)",
    "forward_pre s elementwise, forward s elementwise, forward_pre s mixing",
    run="inference",
    ranks=1,
)

"""Classes 1 and 4: equal values taken for one value, and the order of parts."""

from directed import SPLIT, column, directed, row, with_layers

# ---- 1: equal values -----------------------------------------------------------------------------

for weights in ("constant", "zero", "tiled"):
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
with_layers(
    "1 LoRA's zero B",
    "states",
    "h = self.l(x) + self.s(self.b(F.linear(copy_to(x), copy_to(self.a))))",
    "forward s, forward s mixing, full_backward s",
    column("l"),
    column("b", inner=2, init="zero", copies=False),
    init=("self.a = nn.Parameter(weight(2, 8, seed=5))",),
    parameters=(("a", "2 8", False),),
    output=SPLIT,
)
directed(
    "1 equal halves, split by hand",
    "bare",
    "h = self.s(take_part(torch.cat([x, x], 2), 2))",
    "forward s, forward s mixing",
    output="B/dp S 16/tp",
    run="no_grad",
)
for factory in (
    "torch.zeros(h.shape, dtype=h.dtype)",
    "h.new_zeros(h.shape)",
    "torch.full(h.shape, 0.5, dtype=h.dtype)",
    "torch.ones(h.shape, dtype=h.dtype)",
    "torch.zeros_like(h)",
):
    for layers in ("states", "bare", "plan"):
        by_hand = layers != "plan"
        layer = column("l") if by_hand else ("self.l = linear(8, 8, seed=1)", ())
        with_layers(
            f"1 {factory.split('(')[0]} of a split tensor's size, {layers}",
            layers,
            f"h = self.l(x)\nz = self.s({factory})\nh = h + z",
            "forward s, forward s elementwise",
            layer,
            output=SPLIT,
            plan=() if by_hand else (("l", "column"),),
        )
directed(
    "1 a mask of ones cut for sequence parallelism",
    "bare",
    """m = self.s(torch.ones(length // tp, dtype=torch.float64))
    h = take_part(x, 1) * m.view(1, -1, 1)""",
    "forward s",
    output="B/dp S/tp 8",
    run="no_grad",
)
for operation in ("argmax(2)", "topk(1, 2).indices", "amax(2)"):
    directed(
        f"1 local {operation.split('(')[0]} over a split dim",
        "bare",
        f"""h = take_part(x * 0 + torch.arange(8.0, dtype=torch.float64), 2)
        i = self.s(h.{operation})
        h = gather(h, 2)""",
        "forward s",
        run="no_grad",
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
    with_layers(
        f"1 equal partial gradients, {layers}",
        layers,
        "h = self.d(self.l(self.s(copy_to(x + self.p))))",
        "full_backward_pre s, full_backward s",
        column("l", init="tiled", copies=False),
        row("d", init="tiled"),
        init=("self.p = nn.Parameter(weight(8, seed=7))",),
        parameters=(("p", "8", False),),
    )
    with_layers(
        f"1 a partial sum rounded to integers, {layers}",
        layers,
        """q = F.linear(self.l(x), self.d.weight)
        i = self.s((q * 3).round().long())
        h = reduce_from(q)""",
        "forward s",
        column("l", init="tiled"),
        row("d", init="tiled"),
    )
    with_layers(
        f"5 a partial sum cast to integers, {layers}",
        layers,
        """q = F.linear(self.l(x), self.d.weight)
        i = self.s((q * 3).long())
        h = reduce_from(q)""",
        "forward s",
        column("l"),
        row("d"),
    )

# ---- 4: the order of parts -----------------------------------------------------------------------

for parts, spelled in ((2, "gate; up"), (3, "q; k; v")):
    for layers in ("bare", "states"):
        for stated in (False, True):
            with_layers(
                f"4 [{spelled}] after a custom operation, {layers}" + ", stated" * stated,
                layers,
                f"""f = self.s(custom.double(self.l(x)))
                h = sum(f.chunk({parts}, -1))""",
                "forward s, forward s mixing",
                column("l", outer=4 * parts, parts=parts),
                output="B/dp S 4/tp",
                is_stated=stated,
                sites=(("s", f"B/dp S {parts}*4/tp"),),
            )

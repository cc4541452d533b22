"""Class 5: gradients, which may be partial where the activation is whole."""

from directed import column, row, with_layers

for layers in ("bare", "states"):
    GATHERED = """h = gather_and_reduce(take_part(x + self.p, 1), 1)
    h = self.s(h)
    h = self.d(self.t(self.l(h)))"""
    for init in ("", "tiled"):
        with_layers(
            f"5 a gather whose backward reduces, {layers}{', ' * bool(init)}{init}",
            layers,
            GATHERED,
            "full_backward s, full_backward_pre s, full_backward t, full_backward_pre s mixing",
            column("l", copies=False, init=init),
            row("d", init=init),
            init=("self.p = nn.Parameter(weight(8, seed=7))",),
            parameters=(("p", "8", False),),
        )
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
        f"5 a reduction by hand, {layers}",
        layers,
        "h = reduce_from(self.s(F.linear(self.l(x), self.d.weight)))",
        "forward s, full_backward s, full_backward_pre s, full_backward_pre s elementwise",
        column("l"),
        row("d"),
    )
    with_layers(
        f"5 parameters of a column layer, {layers}",
        layers,
        "h = self.d(self.l(x))",
        "parameter l.weight, parameter l.bias, parameter d.weight, parameter l.weight elementwise, "
        "parameter l.bias mixing",
        column("l", bias=True),
        row("d"),
    )
    with_layers(
        f"5 a norm's partial gradient, {layers}",
        layers,
        "h = gather(self.n(take_part(self.d(self.l(x)), 1)), 1)",
        "parameter n.weight, parameter n.weight elementwise",
        column("l"),
        row("d"),
        init=("self.n = SplitNorm(8, 5, copies=False)",),
        parameters=(("n.weight", "8", True),),
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
for data in ("states x dp", "states x ddp"):
    with_layers(
        f"5 a partial gradient, output_ranks all, {data}",
        data,
        "h = self.d(self.l(self.s(copy_to(self.e(x)))))",
        "full_backward_pre s, full_backward s, full_backward e",
        column("l", copies=False),
        row("d"),
        init=("self.e = linear(8, 8, seed=9)",),
        ranks=4,
        output_ranks="all",
    )

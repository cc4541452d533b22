"""Class 2: rows looked for in dim 0 under data parallelism."""

from directed import X, directed

LINEAR = (("self.l = linear(8, 8, seed=1)"),)
for data in ("ddp", "fsdp2", "dp"):
    directed(
        f"2 a transpose with one row a rank, {data}",
        data,
        "h = self.s(self.l(x).transpose(0, 1))",
        "forward s, forward s mixing, full_backward s",
        init=LINEAR,
        output="S B/dp 8",
        batches=((1, 3),),
    )
    directed(
        f"2 sequence first, {data}",
        data,
        "h = self.s(self.l(x))",
        "forward s, forward l, full_backward s",
        init=LINEAR,
        arguments=(("x", "S B/dp 8", "float", 0),),
        output="S B/dp 8",
    )
SHARED = {
    "a mask (S, S)": "m = self.s(torch.ones(length, length).tril().double())",
    "positions (S,)": "m = self.s(torch.arange(length).double()).view(1, -1)",
    "zeros (S, D)": "m = self.s(torch.zeros(length, 8, dtype=torch.float64)).sum(1).view(1, -1)",
    "an embedding of positions": "m = self.s(self.p(torch.arange(length))).sum(1).view(1, -1)",
    "token types of one row": "m = self.s(self.p(torch.zeros(1, length).long())).sum(2)",
}
for name, line in SHARED.items():
    for run in ("eval", "inference"):
        directed(
            f"2 {name}, as long as the rank's rows, {run}",
            "ddp",
            f"{line}\nh = self.l(x) + m.sum(0).view(1, -1, 1)",
            "forward s, forward s elementwise",
            init=(*LINEAR, *(["self.p = fill(nn.Embedding(8, 8), 4)"] if "self.p" in line else [])),
            batches=((2, 2),),
            run=run,
        )
ARGUMENTS = {
    "a mask (S, S)": (("shared", "S S", "float", 0), "shared.sum(0)"),
    "a mask of ones (S, S)": (("shared", "S S", "ones", 0), "shared.sum(0)"),
    "positions (S,)": (("shared", "S", "positions", 0), "shared.double()"),
}
for name, (argument, text) in ARGUMENTS.items():
    for data in ("ddp", "fsdp2"):
        directed(
            f"2 {name} passed in, as long as the rank's rows, {data}",
            data,
            f"m = self.s(shared)\nh = self.l(x) + {text}.view(1, -1, 1)",
            "forward s, forward_pre s",
            init=LINEAR,
            arguments=(*X, argument),
            batches=((2, 2),),
        )
directed(
    "2 positions first, as long as the rank's rows",
    "ddp",
    "m = self.s(self.p(shared))\nh = self.l(x) + m",
    "forward s, forward_pre p, forward_pre l",
    init=(*LINEAR, "self.p = fill(nn.Embedding(8, 8), 4)"),
    arguments=(("shared", "S", "positions", 0), *X),
    batches=((2, 2),),
)
directed(
    "2 zeros of the rows' size",
    "ddp",
    "m = self.s(torch.zeros(x.shape, dtype=x.dtype))\nh = self.l(x) + m",
    "forward s, forward s elementwise",
    init=LINEAR,
)
RARE = {  # of t, (length, rows, 8)
    "tril": ("t.transpose(0, 1).tril().transpose(0, 1)", "S B/dp 8"),
    "cummax": ("t.cummax(0).values", "S B/dp 8"),
    "logcumsumexp": ("t.logcumsumexp(0)", "S B/dp 8"),
    "unfold": ("t.unfold(2, 4, 4)", "S B/dp 2 4"),
    "median": ("t.median(2).values", "S B/dp"),
    "kthvalue": ("t.kthvalue(1, 2).values", "S B/dp"),
    "renorm": ("t.renorm(2, 1, 1.5)", "S B/dp 8"),
    "im2col": ("F.unfold(t.permute(0, 2, 1).unsqueeze(2), (1, 1))", "S 8 B/dp"),
    "group_norm": ("F.group_norm(t.flatten(0, 1), 2).unflatten(0, t.shape[:2])", "S B/dp 8"),
    "interpolate": ("F.interpolate(t, scale_factor=2)", "S B/dp 16"),
    "fft": ("torch.fft.fft(t, dim=2).real", "S B/dp 8"),
    "cdist": ("torch.cdist(t[:, :, None], t[:, :, None] + 1)", "S B/dp 1 1"),
    "grid_sample": (
        "F.grid_sample(t.permute(1, 0, 2)[:, None], torch.zeros(rows, 2, 4, 2).double(),"
        " align_corners=True).permute(1, 2, 3, 0)",
        "1 2 4 B/dp",
    ),
    "an RNN": ("self.r(t)[0]", "S B/dp 4"),
}
for name, (text, shape) in RARE.items():
    directed(
        f"2 {name}, rows not first",
        "ddp",
        f"t = self.l(x).transpose(0, 1)\nh = self.s({text})",
        "forward s, full_backward_pre s",
        init=(*LINEAR, *(["self.r = fill(nn.RNN(8, 4), 5)"] if "self.r" in text else [])),
        output=shape,
        batches=((3, 2),),
    )
COMPOSITE = {
    "flatten": ("t.flatten(1)", "S B/dp*8"),
    "layer_norm": ("F.layer_norm(t, (8,))", "S B/dp 8"),
    "rms_norm": ("F.rms_norm(t, (8,))", "S B/dp 8"),
    "narrow": ("t.narrow(2, 0, 4)", "S B/dp 4"),
    "view_as": ("t.contiguous().view_as(t.contiguous())", "S B/dp 8"),
    "reshape_as": ("t.reshape_as(t)", "S B/dp 8"),
    "unflatten": ("t.unflatten(2, (2, 4))", "S B/dp 2 4"),
    "einsum": ("torch.einsum('sbd,ed->sbe', t, self.l.weight)", "S B/dp 8"),
    "dropout": ("F.dropout(t, 0.5, training=False)", "S B/dp 8"),
    "conv1d": (
        "F.conv1d(t.permute(2, 1, 0).mT, self.l.weight[:length, :length, None])",
        "8 S B/dp",
    ),
    "swapaxes": ("t.swapaxes(0, 2)", "8 B/dp S"),
    "movedim": ("t.movedim(2, 0)", "8 S B/dp"),
    "an LSTM": ("self.r(t)[0]", "S B/dp 4"),
    "a TransformerEncoderLayer": ("self.r(t)", "S B/dp 8"),
}
MODULES = {
    "an LSTM": "self.r = fill(nn.LSTM(8, 4), 5)",
    "a TransformerEncoderLayer": (
        "self.r = fill(nn.TransformerEncoderLayer(8, 2, 6, dropout=0.0), 5)"
    ),
}
for name, (text, shape) in COMPOSITE.items():
    directed(
        f"2 {name} under inference_mode, rows not first",
        "ddp",
        f"t = self.l(x).transpose(0, 1)\nh = self.s({text})",
        "forward s, forward s mixing",
        init=(*LINEAR, *([MODULES[name]] if name in MODULES else [])),
        output=shape,
        batches=((3, 2),),
        run="inference",
    )

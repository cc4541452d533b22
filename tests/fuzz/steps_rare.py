"""Operations that models rarely use: along dims that no axis splits, rows in dim 0 or elsewhere."""

from program import Argument, Atom, State, Value, need, operation


def has_no_ties(c):
    """Whether no gradient depends on which of equal elements is taken: those of equal tokens, rows
    or weights are equal or not as sums are rounded.
    """
    is_drawn = c.program.weights == "normal" and not c.program.same_rows
    is_drawn &= all(argument.kind != "ids" for argument in c.arguments)
    return is_drawn or not c.program.has_gradients


@operation(weight=3)
def rare_along(c, s):
    """Along one whole dim, which keeps its size."""
    need(s.is_float)
    dim = c.choose(s.free())
    forms = [f"h.logcumsumexp({dim})", f"h.cumprod({dim})", f"torch.fft.fft(h, dim={dim}).real"]
    forms += [f"h.diff(dim={dim}, prepend=h[{':, ' * dim}:1])"]
    if has_no_ties(c):
        forms.append(f"h.cummax({dim}).values")
    c.add(f"h = {c.choose(forms)}")
    c.site(s.made())
    return s.made()


@operation(weight=3)
def rare_reduction(c, s):
    """Over one whole dim, which goes."""
    need(s.is_float and s.ndim > 2)
    dim = c.choose(s.free())
    forms = [f"h.unfold({dim}, 1, 1).sum({dim})", f"h.nanmean({dim})"]
    if has_no_ties(c):
        forms += [f"h.median({dim}).values", f"h.kthvalue(1, {dim}).values"]
        forms += [f"h.max({dim}).values", f"h.quantile(0.5, {dim})"]
    c.add(f"h = {c.choose(forms)}")
    dims = s.dims[:dim] + s.dims[dim + 1 :]
    if "unfold" in c.forward[-1]:
        dims = (*dims, (Atom(1),))
    state = s.made(dims)
    c.site(state)
    return state


@operation(weight=1)
def renorm(c, s):
    """Each slice of a dim is scaled by its norm, over all other dims."""
    need(s.is_float)
    dim = c.choose(range(s.ndim))
    need(all(s.is_free(d) for d in range(s.ndim) if d != dim))
    c.add(f"h = h.renorm(2, {dim}, 1.5)")
    c.site(s.made())
    return s.made()


@operation(weight=2)
def triangle(c, s):
    """Of the last two dims, both whole."""
    need(s.is_float and s.ndim > 2 and s.is_free(s.ndim - 1) and s.is_free(s.ndim - 2))
    c.add(f"h = {c.choose(['h.tril()', 'h.triu()', 'h.tril(1)', 'h.rot90(2, (-2, -1))'])}")
    c.site(s.made())
    return s.made()


@operation(weight=2)
def over_channels(c, s):
    """Modules that take (rows, channels, length), the last two whole."""
    need(s.is_float and s.ndim == 3 and s.is_free(1) and s.is_free(2) and s.is_literal(2))
    width = s.width(2)
    forms = {
        "F.interpolate(h, scale_factor=2)": 2 * width,
        "F.pad(h, (1, 1))": width + 2,
        "F.adaptive_avg_pool1d(h, 2)": 2,
        "F.max_pool1d(h, 2)": width // 2,
        "F.instance_norm(h)": width,
        "F.group_norm(h, 1)": width,
        "torch.cdist(h, h)": s.dims[1],
        "torch.bmm(h, h.mT)": s.dims[1],
        "F.avg_pool1d(h, 2)": width // 2,
        "F.conv1d(h.transpose(0, 1).reshape(-1, 1, h.shape[-1]), torch.ones(1, 1, 1).double())"
        ".view(h.shape[1], h.shape[0], -1).transpose(0, 1)": width,
    }
    text = c.choose(forms)
    need(width > 1 and width <= 16)
    after = forms[text]
    c.add(f"h = {text}")
    state = s.with_dim(2, *(after if isinstance(after, tuple) else (Atom(after),)))
    c.site(state)
    return state


@operation(weight=2)
def recurrent(c, s):
    """An RNN of torch's, rows first or sequence first."""
    need(s.is_float and s.ndim == 3 and s.dim_of("tp") is None and s.is_free(2) and s.is_literal(2))
    width = s.width(2)
    need(width <= 8 and not (s.dim_of("dp") not in (None, 0, 1)))
    batch_first = s.dim_of("dp") != 1
    if s.dim_of("dp") is None:
        batch_first = c.choose([True, False])
    need(all(s.dims[d] != (Atom(1),) for d in (0, 1)))
    kind = c.choose(["LSTM", "GRU", "RNN"])
    layer = c.make("r", f"fill(nn.{kind}({width}, 4, batch_first={batch_first}), {c.uid}0)")
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind] * 4
    for name, dims in {
        "weight_ih_l0": (gates, width),
        "weight_hh_l0": (gates, 4),
        "bias_ih_l0": (gates,),
        "bias_hh_l0": (gates,),
    }.items():
        c.parameter(f"r{c.uid}.{name}", [(Atom(n),) for n in dims])
    c.add(f"h, _ = {layer}(h)")
    state = s.with_dim(2, Atom(4))
    c.site(state)
    return state


@operation(weight=1)
def encoder_layer(c, s):
    """torch's own transformer block."""
    need(s.is_float and s.ndim == 3 and s.dim_of("tp") is None and s.is_free(2) and s.is_literal(2))
    width = s.width(2)
    need(width in (4, 8) and s.dim_of("dp") in (None, 0, 1))
    batch_first = s.dim_of("dp") != 1
    text = f"nn.TransformerEncoderLayer({width}, 2, 6, dropout=0.0, batch_first={batch_first})"
    layer = c.make("b", f"fill({text}, {c.uid}0)")
    sizes = {
        "self_attn.in_proj_weight": (3 * width, width),
        "self_attn.in_proj_bias": (3 * width,),
        "self_attn.out_proj.weight": (width, width),
        "self_attn.out_proj.bias": (width,),
        "linear1.weight": (6, width),
        "linear1.bias": (6,),
        "linear2.weight": (width, 6),
        "linear2.bias": (width,),
        **{f"norm{i}.{leaf}": (width,) for i in (1, 2) for leaf in ("weight", "bias")},
    }
    for name, dims in sizes.items():
        c.parameter(f"b{c.uid}.{name}", [(Atom(n),) for n in dims])
    c.add(f"h = {layer}(h)")
    c.site(s.made())
    return s.made()


@operation(weight=0)
def raw(c, s):
    """Lines of a program written by hand: arguments, modules, statements, what is true of them.

    The one choice is a dict as pairs.
    """
    parts = dict(c.choose([c.choices[0]] if c.choices else []))
    c.arguments += [
        Argument(n, dims(d), kind, high) for n, d, kind, high in parts.get("arguments", ())
    ]
    c.init += parts.get("init", ())
    c.outer += parts.get("outer", ())
    c.forward += parts.get("forward", ())
    for name, shape, is_partial in parts.get("parameters", ()):
        c.parameter(name, dims(shape), is_partial)
    c.plan |= dict(parts.get("plan", ()))
    c.sites |= {name: Value(dims(shape)) for name, shape in parts.get("sites", ())}
    c.needs_follow |= bool(parts.get("follow"))
    return State(dims(parts["output"])) if "output" in parts else s


def dims(text):
    """Dims as text: "B/dp S 4/tp*2" is rows over dp, length, four heads over tp of size 2."""
    return tuple(
        tuple(
            Atom(int(size) if size.isdigit() else size, axis)
            for size, _, axis in (atom.partition("/") for atom in dim.split("*"))
        )
        for dim in text.split()
    )

"""Operations with weights: what splits ``h`` over tp and makes it whole again."""

from dataclasses import replace

from program import Atom, need, operation, tidy

# ---- Linear layers -------------------------------------------------------------------------------


def inner_width(c, s):
    """Of the last dim, which must be whole."""
    need(s.is_float and s.is_free(s.ndim - 1))
    return s.width(s.ndim - 1)


@operation(weight=5)
def column(c, s):
    """Some output features on each rank."""
    inner = inner_width(c, s)
    need(s.dim_of("tp") is None)
    sizes = [(4, 2), (8, 1), (2, 4), (4, 1), (2, 2)]
    if c.program.layers in ("states", "bare"):
        sizes += [(3, 2), (5, 1), (3, 4)]
    units, unit = c.choose([(n, u) for n, u in sizes if n >= c.program.tp])
    need(units % c.program.tp == 0 or c.is_by_hand)
    return column_of(c, s, inner, units, unit, c.choose([True, False]))


def column_of(c, s, inner, units, unit, bias, init=None, name="l", var="h", into="h"):
    init = c.init_of_weight() if init is None else init
    last = tidy((Atom(units, c.tp), Atom(unit)))
    seed = f"{c.uid}{len(c.init)}"
    is_dtensor = False
    if c.program.layers in ("states", "bare"):
        copies = c.choose([True, True, False])
        layer = c.make(
            name,
            f"Column({inner}, {units * unit}, seed={seed}, bias={bias}, unit={unit}, "
            f"init={init!r}, copies={copies})",
        )
        c.add(f"{into} = {layer}({var if copies else f'copy_to({var})'})")
    else:
        layer = c.make(
            name, f"linear({inner}, {units * unit}, seed={seed}, bias={bias}, init={init!r})"
        )
        c.add(f"{into} = {layer}({var})")
        if c.tp:
            is_dtensor = c.program.layers == "dtensor"
            c.plan[f"{name}{c.uid}"] = "column dtensor" if is_dtensor else "column"
    c.parameter(f"{name}{c.uid}.weight", (last, (Atom(inner),)))
    if bias:
        c.parameter(f"{name}{c.uid}.bias", (last,))
    state = s.with_dim(s.ndim - 1, *last, is_dtensor=is_dtensor)
    if into == "h":
        c.site(state)
    return state


@operation(weight=4, dtensor=True)
def row(c, s):
    """Some input features on each rank: makes ``h`` whole, or splits it along the sequence."""
    need(s.is_float)
    last = s.dims[-1]
    need(s.is_literal(s.ndim - 1) and s.dim_of("dp") != s.ndim - 1)
    inner = s.width(s.ndim - 1)
    if c.tp:
        need(last[0].axis == "tp")
        need(c.is_by_hand or c.divides(last[0]))
    unit = inner // last[0].size
    outer, bias = c.program.width, c.choose([True, False])
    whole = s.with_dim(s.ndim - 1, Atom(outer), is_dtensor=False)
    init, seed = c.init_of_weight(), f"{c.uid}7"
    c.parameter(f"l{c.uid}.weight", ((Atom(outer),), last))
    if bias:
        c.parameter(f"l{c.uid}.bias", ((Atom(outer),),))
    if c.program.layers not in ("states", "bare"):
        layer = c.make("l", f"linear({inner}, {outer}, seed={seed}, bias={bias}, init={init!r})")
        c.add(f"h = {layer}(h)")
        if c.tp:
            dims = [d for d in range(s.ndim - 1) if len(s.dims[d]) == 1 and can_split(c, s, d)]
            to = c.choose([None, None, *dims])
            c.plan[f"l{c.uid}"] = "row" if to is None else f"row to {to}"
            if to is not None:
                whole = whole.with_dim(to, Atom(s.dims[to][0].size, "tp"))
        c.site(whole)
        return whole
    endings = ["reduce_from", "reduce_from", "functional_sum", "sum_in_two_steps", "outside"]
    ending = c.choose([*endings, "alternating"])
    is_inside = ending not in ("outside", "alternating")
    layer = c.make(
        "l",
        f"Row({inner}, {outer}, seed={seed}, bias={bias and is_inside}, unit={unit}, "
        f"init={init!r}, ending={ending if is_inside else 'nn.Identity()'})",
    )
    c.add(f"h = {layer}(h)")
    if not is_inside and bias:
        del c.parameters[f"l{c.uid}.bias"]
    if ending == "outside":
        c.site(whole, "q", is_partial=True)
        c.add("h = reduce_from(h)")
    elif ending == "alternating":  # an attribute decides whether the site is before the sum
        c.init += [f"self.a{c.uid} = nn.Identity()", f"self.n{c.uid} = 0"]
        c.add(
            f"self.n{c.uid} += 1",
            f"if self.n{c.uid} % 2:",
            f"    h = reduce_from(self.a{c.uid}(h))",
            "else:",
            f"    h = self.a{c.uid}(reduce_from(h))",
        )
    c.site(whole)
    return whole


def can_split(c, s, dim):
    return s.is_free(dim) and c.divides(s.dims[dim][0])


@operation(weight=3)
def plain_linear(c, s):
    """A layer that every rank has whole."""
    inner = inner_width(c, s)
    outer, bias, init = c.choose([8, 6, 4]), c.choose([True, False]), c.init_of_weight()
    state = s.with_dim(s.ndim - 1, Atom(outer))
    c.parameter(f"l{c.uid}.weight", ((Atom(outer),), (Atom(inner),)))
    if s.dim_of("tp") is not None:  # each rank uses it on its part
        bias = False
        c.init.append(
            f"self.w{c.uid} = nn.Parameter(weight({outer}, {inner}, seed={c.uid}0, init={init!r}))"
        )
        c.parameters[f"w{c.uid}"] = c.parameters.pop(f"l{c.uid}.weight")
        c.add(f"h = F.linear(h, copy_to(self.w{c.uid}))")
    else:
        layer = c.make("l", f"linear({inner}, {outer}, seed={c.uid}0, bias={bias}, init={init!r})")
        c.add(f"h = {layer}(h)")
        if bias:
            c.parameter(f"l{c.uid}.bias", ((Atom(outer),),))
    c.site(state)
    return state


@operation(weight=2)
def lora(c, s):
    """A column layer beside a low-rank one whose B is zero, as LoRA starts."""
    need(c.tp and c.program.layers in ("states", "bare") and s.dim_of("tp") is None)
    inner = inner_width(c, s)
    c.add("low = copy_to(h)")
    state = column_of(c, s, inner, 4, 2, False, into="wide")
    init = c.choose(["zero", "normal"])
    c.init += [
        f"self.a{c.uid} = nn.Parameter(weight(2, {inner}, seed={c.uid}8))",
        f"self.b{c.uid} = Column(2, 8, seed={c.uid}9, bias=False, unit=2, init={init!r}, "
        "copies=False)",
    ]
    c.parameter(f"a{c.uid}", ((Atom(2),), (Atom(inner),)))
    c.parameter(f"b{c.uid}.weight", ((Atom(4, c.tp), Atom(2)), (Atom(2),)))
    c.add(f"low = self.b{c.uid}(F.linear(low, copy_to(self.a{c.uid})))")
    c.site(state, "s", "low")
    c.add("h = wide + low")
    c.site(state, "t")
    return state


@operation(weight=2)
def fused_column(c, s):
    """[gate; up] or [q; k; v] in one weight: a rank has a piece of each part."""
    need(c.program.layers in ("states", "bare", "") and s.dim_of("tp") is None)
    inner = inner_width(c, s)
    parts, units = c.choose([2, 3]), c.choose([4, 8])
    need(units % c.program.tp == 0)
    last = (Atom(parts), Atom(units, c.tp))
    bias, init = c.choose([True, False]), c.init_of_weight()
    layer = c.make(
        "l",
        f"Column({inner}, {parts * units}, seed={c.uid}0, bias={bias}, parts={parts}, "
        f"init={init!r})",
    )
    c.parameter(f"l{c.uid}.weight", (last, (Atom(inner),)))
    if bias:
        c.parameter(f"l{c.uid}.bias", (last,))
    c.add(f"h = {layer}(h)")
    fused = s.with_dim(s.ndim - 1, *last)
    c.site(fused)
    if c.choose([True, False]):
        c.add("h = " + c.choose(["F.silu(h)", "h * 2", "h.tanh()"]))
        c.site(fused, "t")
    state = s.with_dim(s.ndim - 1, Atom(units, c.tp))
    if parts == 2:
        split = c.choose(["h.chunk(2, -1)", f"h.split({c.size_text(state, -1)}, dim=-1)"])
        c.add(f"gate, up = {split}", "h = F.silu(gate) * up")
    else:
        c.add("q, k, v = h.chunk(3, -1)", "h = q * k.tanh() + v")
    c.site(state, "g")
    return state


# ---- Norms ---------------------------------------------------------------------------------------


@operation(weight=3)
def norm(c, s):
    width = inner_width(c, s)
    need(width > 1)
    kind = c.choose(["LayerNorm", "RMSNorm", "functional"])
    if kind == "functional":
        c.add(f"h = F.layer_norm(h, ({width},))")
    elif s.dim_of("tp") is None:
        layer = c.make("n", f"fill(nn.{kind}({width}), {c.uid}0)")
        c.parameter(f"n{c.uid}.weight", ((Atom(width),),))
        if kind == "LayerNorm":
            c.parameter(f"n{c.uid}.bias", ((Atom(width),),))
        c.add(f"h = {layer}(h)")
    elif (
        c.program.layers == "plan" and s.dim_of("tp") == 1 and s.is_leading(1, "tp") and s.ndim == 3
    ):
        layer = c.make("n", f"fill(nn.{kind}({width}), {c.uid}0)")
        c.plan[f"n{c.uid}"] = "sequence"
        c.parameter(f"n{c.uid}.weight", ((Atom(width),),))
        if kind == "LayerNorm":
            c.parameter(f"n{c.uid}.bias", ((Atom(width),),))
        c.add(f"h = {layer}(h)")
    else:
        copies = c.choose([True, False]) or not c.program.has_gradients
        layer = c.make("n", f"SplitNorm({width}, {c.uid}0, copies={copies})")
        c.parameter(f"n{c.uid}.weight", ((Atom(width),),), is_partial=not copies)
        c.add(f"h = {layer}(h)")
    c.site(s.made())
    return s.made()


# ---- Between whole and split ---------------------------------------------------------------------


@operation(weight=4)
def split_by_hand(c, s):
    """Sequence parallelism and its like: from here on each rank has a part of a dim."""
    need(c.tp and s.is_float and s.dim_of("tp") is None)
    dims = [d for d in range(s.ndim) if len(s.dims[d]) == 1 and can_split(c, s, d)]
    dim = c.choose(dims)
    state = s.with_dim(dim, Atom(s.dims[dim][0].size, "tp"))
    size = c.size_text(state, dim)
    form = c.choose(["function", "narrow", "slice", "chunk"])
    if form == "function":
        c.add(f"h = take_part(h, {dim})")
    elif form == "narrow":
        c.add(f"h = copy_to(h).narrow({dim}, tp_rank * ({size}), {size})")
    elif form == "slice":
        where = ":, " * dim + f"tp_rank * ({size}) : (tp_rank + 1) * ({size})"
        c.add(f"h = copy_to(h)[{where}]")
    else:
        c.add(f"h = copy_to(h).chunk(tp, {dim})[tp_rank]")
    c.site(state)
    return replace(state, is_fresh=form == "function")


@operation(weight=4)
def gather_by_hand(c, s):
    """All parts on every rank."""
    need(c.tp and s.is_float and not s.is_dtensor)
    dim = s.dim_of("tp")
    need(dim is not None and s.is_leading(dim, "tp"))
    atom, *others = s.dims[dim]
    state = s.with_dim(dim, Atom(atom.size), *others)
    forms = ["function", "zeros"]
    if c.divides(atom):
        forms += ["even", "even"]
        if not c.program.has_gradients:
            forms += ["functional", "functional"]
    form = c.choose(forms)
    need(form == "function" or c.divides(atom))
    # `gather` cuts by shares of the dim, so whole heads of uneven number go as elements do.
    need(c.divides(atom) or len(others) == 0)
    if form == "zeros":
        size = c.size_text(s, dim)
        index = ":, " * dim + f"tp_rank * ({size}) : (tp_rank + 1) * ({size})"
        sizes = [f"h.shape[{d}]" for d in range(s.ndim)]
        sizes[dim] += " * tp"
        c.add(f"z = h.new_zeros({', '.join(sizes)})", f"z[{index}] = h", "h = z")
        c.site(state, "z", is_partial=True)
        c.add("h = reduce_from(h)")
    elif form == "functional":
        c.add(f"h = gather_tensor(h, {dim})")
    elif form == "even":
        c.add(f"h = gather_even(h, {dim})")
    else:
        c.add(f"h = gather(h, {dim})")
    c.site(state)
    return state


@operation(weight=2)
def sequence_parallel_mlp(c, s):
    """Megatron's: gather, column, row, reduce-scatter, on a tensor split along a dim."""
    need(c.tp and c.program.layers in ("states", "bare"))
    dim = s.dim_of("tp")
    need(
        dim is not None and dim < s.ndim - 1 and len(s.dims[dim]) == 1 and c.divides(s.dims[dim][0])
    )
    inner = inner_width(c, s)
    init = c.init_of_weight()
    wide = tidy((Atom(4, c.tp), Atom(2)))
    c.init += [
        f"self.u{c.uid} = Column({inner}, 8, seed={c.uid}0, bias=False, unit=2, init={init!r}, "
        "copies=False)",
        f"self.d{c.uid} = Row(8, {inner}, seed={c.uid}2, bias=False, unit=2, "
        f"ending=lambda h: reduce_and_scatter(h, {dim}))",
    ]
    c.parameter(f"u{c.uid}.weight", (wide, (Atom(inner),)))
    c.parameter(f"d{c.uid}.weight", ((Atom(inner),), wide))
    whole = s.with_dim(dim, Atom(s.dims[dim][0].size))
    c.add(f"h = gather_and_reduce(h, {dim})")
    c.site(whole, "w")
    c.add(f"h = self.u{c.uid}(h).relu()")
    c.site(whole.with_dim(s.ndim - 1, *wide), "m")
    c.add(f"h = self.d{c.uid}(h)")
    c.site(s.made())
    return s.made()


@operation(weight=2)
def reduce_split(c, s):
    """A sum over the dim that tp splits, then over the ranks."""
    need(c.tp and s.is_float and not s.is_dtensor)
    dim = s.dim_of("tp")
    need(dim is not None and all(a.axis != "dp" for a in s.dims[dim]) and s.ndim > 2)
    kind = c.choose(["sum", "mean", "keepdim"] + ["max"] * (not c.program.has_gradients))
    if kind == "max":
        c.add(f"h = h.amax({dim}, keepdim=True)", "h = max_over_ranks(h)")
        state = s.with_dim(dim, Atom(1))
        c.site(state)
        return state
    need(kind != "mean" or all(atom.axis != "tp" or c.divides(atom) for atom in s.dims[dim]))
    c.add(f"h = h.{'mean' if kind == 'mean' else 'sum'}({dim}, keepdim={kind == 'keepdim'})")
    if kind == "mean":
        c.add("h = h / tp")
    if kind == "keepdim":
        state = s.with_dim(dim, Atom(1))
    else:
        state = s.made(s.dims[:dim] + s.dims[dim + 1 :])
    c.site(state, "q", is_partial=True)
    forms = ["reduce_from", "functional_sum", "sum_in_two_steps"]
    if not c.program.has_gradients:
        forms.append("sum_in_place")
    c.add(f"h = {c.choose(forms)}(h)")
    c.site(state)
    return state


@operation(weight=2)
def weighted_by_rank(c, s):
    """Each rank takes its share of a whole tensor: a partial sum made with the rank's number."""
    need(c.tp and s.is_float and s.dim_of("tp") is None)
    c.add("h = copy_to(h) * ((tp_rank + 1) / (tp * (tp + 1) / 2))")
    c.site(s.made(), "q", is_partial=True)
    c.add("h = reduce_from(h)")
    c.site(s.made())
    return s.made()


@operation(weight=2)
def attention(c, s):
    """Projections, heads, attention in one of its spellings, and the way back."""
    need(s.is_float and s.ndim == 3 and s.dim_of("tp") is None and inner_width(c, s))
    need(s.dim_of("dp") != 1 and all(len(atoms) == 1 for atoms in s.dims))
    need(c.program.layers != "dtensor")
    inner, head = s.width(2), 2
    # Where both axes split a dim, 4 heads a rank and more have parts of parts.
    most = 16 if min(c.program.tp, c.program.dp) > 1 else 4
    heads = c.choose([n for n in (1, 2, 4, 8, 16) if n % c.program.tp == 0 and n <= most])
    init = c.init_of_weight()
    names = "qkv"
    for name in names:
        column_of(c, s, inner, heads, head, False, init, name, "h", name)
    split = tidy((Atom(heads, c.tp),))
    rows, length, _ = s.dims
    four = s.made((rows, split, length, (Atom(head),)))
    text = c.atoms_text(split)
    # One head a rank can't be told from its features, but by a module that states their number.
    stated = f"self.m{c.uid}(t)"
    views = [f"t.view(rows_, n, {n}, {head}).transpose(1, 2)" for n in ("-1", text)]
    spelled = c.choose([*views, *[stated] * 4])
    if spelled == stated:
        c.init.append(f"self.m{c.uid} = Heads({text}, {head})")
    c.is_ambiguous |= spelled != stated and heads == c.program.tp > 1
    c.add("rows_, n = h.shape[:2]")
    c.add(f"q, k, v = ({spelled} for t in (q, k, v))")
    c.site(four, "y", "k")
    causal = c.choose([True, False])
    form = c.choose(["manual", "sdpa", "einsum", "bmm"])
    if form == "sdpa":
        c.add(f"h = F.scaled_dot_product_attention(q, k, v, is_causal={causal})")
    else:
        scores = s.made((rows, split, length, length))
        if form == "manual":
            c.add("a = q @ k.transpose(-1, -2) / 1.5")
        elif form == "einsum":
            c.add("a = torch.einsum('bhqd,bhkd->bhqk', q, k)")
        else:
            c.add("a = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT)")
            scores = s.made(((*rows, *split), length, length))
        if causal:
            mask = c.choose(
                [
                    "torch.full((n, n), -50.0, dtype=torch.float64).triu(1)",
                    "torch.full_like(a, -50.0).triu(1)",
                    "torch.zeros(n, n).masked_fill(torch.ones(n, n).triu(1).bool(), -50.0)",
                ]
            )
            c.add(f"mask = {mask}")
            if "full_like" not in mask:
                c.site(s.made((length, length)), "x", "mask")
            c.add("a = a + mask")
        c.add("a = a.softmax(-1)")
        c.site(scores, "a", "a")
        if form == "bmm":
            c.add("h = torch.bmm(a, v.flatten(0, 1)).view_as(v)")
        elif form == "einsum":
            c.add("h = torch.einsum('bhqk,bhkd->bhqd', a, v)")
        else:
            c.add("h = a @ v")
    c.site(four, "h")
    back = c.choose(["h.transpose(1, 2).reshape(rows_, n, -1)", "h.transpose(1, 2).flatten(2)"])
    c.add(f"h = {back}")
    state = s.with_dim(2, *split, Atom(head))
    c.site(state)
    return state

"""Operations that move elements: reshapes, transposes, cuts, joins, reductions, gathers."""

from dataclasses import replace

from program import ROWS, Atom, need, operation, tidy


@operation(weight=4, dtensor=True)
def elementwise(c, s):
    need(s.is_float)
    forms = ["h.tanh()", "F.gelu(h)", "F.silu(h)", "h * 2", "h + 0.5", "F.relu(h)", "h.sin() * h"]
    if not s.is_dtensor:
        forms += [
            "h.masked_fill(h < 0, 0.1)",
            "torch.where(h > 0, h, h * 0.1)",
            "h - h.detach() / 2",
        ]
        forms += ["F.dropout(h, 0.0)", "h.clamp(-1, 1)", "h.pow(2)", "h.float().double()", "-h"]
    text = c.choose(forms)
    if "float" in text:
        need(not c.program.has_gradients)
        text = "h.half().double()"
    c.add(f"h = {text}")
    c.site(s.made())
    return s.made()


@operation(weight=2)
def module_elementwise(c, s):
    need(s.is_float)
    layer = c.make("e", c.choose(["nn.GELU()", "nn.Tanh()", "nn.Dropout(0.0)", "nn.Softplus()"]))
    c.add(f"h = {layer}(h)")
    return s.made()


# ---- Views ---------------------------------------------------------------------------------------


@operation(weight=4, dtensor=True)
def split_dim(c, s):
    """One dim into two: heads out of features, or what was joined apart."""
    options = []
    for dim, atoms in enumerate(s.dims):
        options += [(dim, "at", i) for i in range(1, len(atoms))]
        if len(atoms) == 1 and isinstance(atoms[0].size, int):
            size = atoms[0].size
            options += [(dim, "into", n) for n in (1, 2, 4) if size % n == 0 and n <= size]
    dim, how, number = c.choose(options)
    atoms = s.dims[dim]
    if how == "at":
        first, second = atoms[:number], atoms[number:]
    else:
        (atom,) = atoms
        need(atom.axis != "tp" or number % c.program.tp == 0)
        first, second = (Atom(number, atom.axis),), (Atom(atom.size // number),)
    dims = s.dims[:dim] + (first, second) + s.dims[dim + 1 :]
    state = s.made(dims, is_fresh=False)
    c.is_ambiguous |= first[-1].axis == "tp" and first[-1].size == c.program.tp
    if c.choose([True, False]) and not s.is_dtensor:
        sizes = c.sizes_text(s, (first, second))
        c.add(f"h = h.unflatten({dim}, ({', '.join(sizes)}))")
    else:
        c.add(f"h = {view(c, dims, s)}")
    c.site(state)
    return state


@operation(weight=4, dtensor=True)
def join_dims(c, s):
    """Two neighbours into one: heads into features, tokens into rows, heads with the batch."""
    dim = c.choose(range(s.ndim - 1))
    need(s.ndim > 2)
    joined = s.dims[dim] + s.dims[dim + 1]
    if s.is_dtensor:
        need(joined[0].axis == "tp" or s.dim_of("tp") not in (dim, dim + 1))
    dims = s.dims[:dim] + (joined,) + s.dims[dim + 2 :]
    state = s.made(dims, is_fresh=False)
    if c.choose([True, False]):
        c.add(f"h = h.flatten({dim}, {dim + 1})")
    else:
        c.add(f"h = {view(c, dims, s)}")
    c.site(state)
    return state


def view(c, dims, s):
    sizes = ", ".join(c.sizes_text(s, dims))
    return c.choose([f"h.reshape({sizes})", f"h.contiguous().view({sizes})"])


@operation(weight=4, dtensor=True)
def transpose(c, s):
    need(s.ndim > 1)
    first, second = c.choose([(a, b) for a in range(s.ndim) for b in range(s.ndim) if a < b])
    order = list(range(s.ndim))
    order[first], order[second] = order[second], order[first]
    forms = [f"h.transpose({first}, {second})"]
    if not s.is_dtensor:
        forms += [f"h.swapaxes({first}, {second})", f"h.permute({', '.join(map(str, order))})"]
        if (first, second) == (s.ndim - 2, s.ndim - 1):
            forms.append("h.mT")
    c.add(f"h = {c.choose(forms)}")
    state = replace(s, dims=tuple(s.dims[d] for d in order), is_fresh=False)
    c.site(state)
    return state


@operation(weight=1)
def movedim(c, s):
    need(s.ndim > 2)
    source, target = c.choose([(0, s.ndim - 1), (s.ndim - 1, 0), (1, 0), (0, 1)])
    dims = list(s.dims)
    dims.insert(target, dims.pop(source))
    c.add(f"h = h.movedim({source}, {target})")
    state = replace(s, dims=tuple(dims), is_fresh=False)
    c.site(state)
    return state


@operation(weight=1)
def unsqueeze(c, s):
    dim = c.choose(range(s.ndim + 1))
    need(s.ndim < 5)
    form = c.choose([f"h.unsqueeze({dim})", "h[None]", "h[..., None]"])
    dim = {"h[None]": 0, "h[..., None]": s.ndim}.get(form, dim)
    c.add(f"h = {form}")
    state = replace(s, dims=s.dims[:dim] + ((Atom(1),),) + s.dims[dim:], is_fresh=False)
    c.site(state)
    return state


# ---- Cuts ----------------------------------------------------------------------------------------


@operation(weight=3)
def select(c, s):
    """One index of a whole dim; the dim goes."""
    need(s.ndim > 2)
    dim = c.choose(s.free())
    index = c.choose([0, -1])
    c.add("h = " + c.choose([f"h.select({dim}, {index})", f"h[{':, ' * dim}{index}]"]))
    state = replace(s, dims=s.dims[:dim] + s.dims[dim + 1 :], is_fresh=False)
    c.site(state)
    return state


@operation(weight=3)
def narrow(c, s):
    """The first or last of a whole dim; the dim stays."""
    dim = c.choose(s.free())
    index = ":, " * dim
    forms = [f"h.narrow({dim}, 0, 1)", f"h[{index}:1]", f"h[{index}-1:]"]
    size = 1
    if s.is_literal(dim) and s.width(dim) > 2 and s.width(dim) % 2 == 0:
        half = s.width(dim) // 2
        halves = [f"h.narrow({dim}, {half}, {half})", f"h[{index}:{half}]", f"h[{index}::2]"]
        halves += [f"h.chunk(2, {dim})[1]", f"h.split({half}, {dim})[0]"]
        if c.choose([True, True, False]):
            forms, size = halves, half
    c.add(f"h = {c.choose(forms)}")
    state = replace(s.with_dim(dim, Atom(size)), is_fresh=False)
    c.site(state)
    return state


@operation(weight=2)
def halves(c, s):
    """Both halves of a dim that is whole, or of which each rank has a piece of each half."""
    options = [d for d in s.free(literal=True) if s.width(d) % 2 == 0]
    options += [d for d in range(s.ndim) if s.dims[d][0] == Atom(2) and len(s.dims[d]) > 1]
    dim = c.choose(sorted(set(options)))
    atoms = s.dims[dim]
    rest = atoms[1:] if atoms[0] == Atom(2) and len(atoms) > 1 else (Atom(s.width(dim) // 2),)
    c.add(f"a, b = {c.choose([f'h.chunk(2, {dim})', f'h.tensor_split(2, {dim})'])}")
    state = s.with_dim(dim, *rest)
    c.site(replace(state, is_fresh=False), "a", "a")
    c.add("h = " + c.choose(["a * b", "a + 2 * b", "a.sigmoid() * b"]))
    c.site(state)
    return state


# ---- Joins ---------------------------------------------------------------------------------------


@operation(weight=2)
def concatenate(c, s):
    """With something like it, along any dim: along a split one each rank has a piece of each."""
    dim = c.choose(range(s.ndim))
    need(all(atom.axis != "dp" for atom in s.dims[dim]))
    need(not s.is_literal(dim) or s.width(dim) <= 8)
    c.add(f"h = torch.cat([h, {c.choose(['h * 2', '-h', 'h'])}], {dim})")
    state = s.with_dim(dim, Atom(2), *s.dims[dim])
    c.site(state)
    return state


@operation(weight=1)
def stack(c, s):
    dim = c.choose(range(s.ndim + 1))
    need(s.ndim < 4)
    c.add(f"h = torch.stack([h, h * 2], {dim})")
    state = s.made(s.dims[:dim] + ((Atom(2),),) + s.dims[dim:])
    c.site(state)
    return state


@operation(weight=2)
def keep(c, s):
    """Note a residual, which `residual` adds."""
    need(c.kept is None)
    c.kept = s
    c.add("kept = h")
    return replace(s, is_fresh=False)


@operation(weight=6)
def residual(c, s):
    need(c.kept is not None and c.kept.dims == s.dims and c.kept.is_dtensor == s.is_dtensor)
    c.add("h = h + kept")
    c.kept = None
    c.site(s.made())
    return s.made()


# ---- Reductions and orders -----------------------------------------------------------------------


@operation(weight=3)
def reduce_whole(c, s):
    """Over a dim that no axis splits."""
    need(s.ndim > 2)
    dim = c.choose(s.free())
    kind = c.choose(["sum", "mean", "amax", "logsumexp", "prod", "norm"])
    stays = c.choose([True, False])
    c.add(f"h = h.{kind}(dim={dim}, keepdim={stays})")
    state = s.with_dim(dim, Atom(1)) if stays else s.made(s.dims[:dim] + s.dims[dim + 1 :])
    c.site(state)
    return state


@operation(weight=3)
def along_whole(c, s):
    """An operation along a dim that no axis splits, which keeps its size."""
    dim = c.choose(s.free())
    forms = [f"h.softmax({dim})", f"h.log_softmax({dim})", f"h.cumsum({dim})", f"h.flip({dim})"]
    forms += [f"h.roll(1, {dim})", f"h.sort({dim}).values", f"F.normalize(h, dim={dim})"]
    c.add(f"h = {c.choose(forms)}")
    c.site(s.made())
    return s.made()


@operation(weight=2)
def indices(c, s):
    """Integers out of floats, as a site beside ``h``; ties come out alike on one process."""
    dim = c.choose(s.free())
    kind = c.choose(["argmax", "topk", "round", "argsort", "sign"])
    state = s
    if kind == "argmax":
        need(s.ndim > 1)
        state = s.made(s.dims[:dim] + s.dims[dim + 1 :], is_float=False)
        c.add(f"i = h.argmax({dim})")
    elif kind == "topk":
        state = s.with_dim(dim, Atom(1), is_float=False)
        c.add(f"i = h.topk(1, {dim}).indices")
    elif kind == "argsort":
        c.add(f"i = h.argsort({dim})")
    else:
        c.add("i = (h * 3).round().long()" if kind == "round" else "i = (h > 0.3).int()")
    c.site(replace(state, is_float=False), "i", "i")
    if state.dims == s.dims:
        c.add("h = h + i * 0.25")
        c.site(s.made())
        return s.made()
    return s


# ---- Gathers and scatters ------------------------------------------------------------------------


@operation(weight=2)
def gathers(c, s):
    """Along a dim that no axis splits, with indices that all ranks have."""
    dim = c.choose([d for d in s.free(literal=True) if s.width(d) > 1])
    size, index = s.width(dim), ":, " * dim
    half = size // 2
    kind = c.choose(["index_select", "list", "gather", "take_along", "tensor"])
    state = s.with_dim(dim, Atom(half))
    if kind == "index_select":
        c.add(f"i = torch.arange({size} - 1, -1, -1)[:{half}]", f"h = h.index_select({dim}, i)")
    elif kind == "list":
        c.add(f"h = h[{index}[{', '.join(str(i) for i in range(half))}]]")
    elif kind == "tensor":
        c.add(f"i = torch.arange({half})", f"h = h[{index}i]")
    elif kind == "gather":
        c.add(f"i = h.narrow({dim}, 0, {half}).argsort({dim})", f"h = h.gather({dim}, i)")
    else:
        c.add(f"i = h.argsort({dim}).narrow({dim}, 0, {half})")
        c.add(f"h = torch.take_along_dim(h, i, {dim})")
    c.site(state)
    return state


@operation(weight=2)
def scatters(c, s):
    """Into a tensor from a factory, along a dim that no axis splits."""
    dim = c.choose([d for d in s.free(literal=True) if s.width(d) > 1])
    size = s.width(dim)
    zeros = c.choose(
        ["torch.zeros_like(h)", "torch.zeros(h.shape, dtype=h.dtype)", "h.new_zeros(h.shape)"]
    )
    c.add(f"z = {zeros}")
    if c.choose([True, False]):
        c.site(s.made(), "z", "z")
        if not c.program.has_gradients:
            c.add("z = z.clone()")
    kind = c.choose(["index_add", "index_copy", "scatter", "scatter_add"])
    if kind.startswith("index"):
        c.add(f"i = torch.arange({size} - 1, -1, -1)", f"h = z.{kind}({dim}, i, h)")
    else:
        c.add(f"i = h.argsort({dim})", f"h = z.{kind}({dim}, i, h)")
    c.site(s.made())
    return s.made()


@operation(weight=1)
def by_row_number(c, s):
    """``h[arange(rows), 0]``: pairs of indices, as a classifier picks its token."""
    need(s.ndim == 3 and len(s.dims[0]) == 1 and s.dims[0][0].size == ROWS and s.is_free(1))
    c.add("h = h[torch.arange(rows), 0]")
    state = s.made((s.dims[0], s.dims[2]))
    c.site(state)
    return state


@operation(weight=1)
def repeat(c, s):
    dim = c.choose(range(s.ndim))
    need(not s.is_literal(dim) or s.width(dim) <= 8)
    need(all(atom.axis != "dp" for atom in s.dims[dim]))
    if c.choose([True, False]):
        c.add(f"h = h.repeat_interleave(2, {dim})")
        state = s.with_dim(dim, *s.dims[dim], Atom(2))
    else:
        times = ["1"] * s.ndim
        times[dim] = "2"
        c.add(f"h = h.repeat({', '.join(times)})")
        state = s.with_dim(dim, Atom(2), *s.dims[dim])
    c.site(state)
    return state


@operation(weight=1)
def einsum_weights(c, s):
    """A weight of its own for each head."""
    dims = [d for d in range(s.ndim - 1) if len(s.dims[d]) == 1 and s.is_literal(d)]
    last = s.ndim - 1
    need(s.is_free(last) and s.is_literal(last) and s.ndim < 5)
    dim = c.choose(dims)
    (heads,) = s.dims[dim]
    inner = s.width(last)
    need(heads.axis != "dp" and (not heads.axis or c.divides(heads)))
    need(heads.axis == "tp" or s.dim_of("tp") is None)  # else its gradient is a partial sum
    need(heads.axis != "tp" or c.program.layers != "plan")  # a plain split parameter, unstated
    c.init.append(
        f"self.w{c.uid} = nn.Parameter("
        + ("my_part(" if heads.axis == "tp" else "(")
        + f"weight({heads.size}, {inner}, 2, seed={c.uid}0)"
        + (", 0))" if heads.axis == "tp" else "))")
    )
    c.parameter(f"w{c.uid}", (tidy((heads,)), (Atom(inner),), (Atom(2),)))
    letters = "abcde"[:last]
    head = letters[dim]
    c.add(f"h = torch.einsum('{letters}x,{head}xy->{letters}y', h, self.w{c.uid})")
    state = s.with_dim(last, Atom(2))
    c.site(state)
    return state

"""Operations on memory and on what is not followed: factories, in-place, caches, custom, numpy."""

from dataclasses import replace

from program import LENGTH, ROWS, Atom, need, operation


@operation(weight=4)
def factory(c, s):
    """A constant as large as ``h``, made of its sizes."""
    need(s.is_float)
    shape = c.choose(["h.shape", "[*h.shape]", "h.size()"])
    text = c.choose(
        [
            f"torch.zeros({shape}, dtype=torch.float64)",
            f"torch.ones({shape}, dtype=torch.float64)",
            f"torch.full({shape}, 0.5, dtype=torch.float64)",
            f"h.new_zeros({shape})",
            f"h.new_full({shape}, 2.0)",
            "torch.ones_like(h)",
        ]
    )
    c.add(f"z = {text}")
    c.site(s.made(), "z", "z")
    c.add(f"h = h {c.choose(['+', '*'])} (z + 0.5)")
    c.site(s.made())
    return s.made()


@operation(weight=3)
def vector(c, s):
    """Positions or a mask as long as one dim of ``h``, made of its local size."""
    need(s.is_float)
    dim = c.choose([d for d in range(s.ndim) if not any(a.axis == "dp" for a in s.dims[d])])
    need(s.is_free(dim))
    text = c.choose(
        [
            f"torch.arange(h.shape[{dim}], dtype=torch.float64)",
            f"torch.ones(h.shape[{dim}], dtype=torch.float64)",
            f"torch.arange(h.shape[{dim}]).double() / 4",
            f"torch.ones(h.shape[{dim}], h.shape[{dim}]).tril().sum(0).double()",
        ]
    )
    c.add(f"p = {text}")
    c.site(s.made((s.dims[dim],)), "p", "p")
    c.add(f"h = h + 0.1 * p.view({', '.join(['-1' if d == dim else '1' for d in range(s.ndim)])})")
    c.site(s.made())
    return s.made()


@operation(weight=2)
def positions(c, s):
    """An embedding of arange(length), shared by all rows."""
    dims = [d for d in range(s.ndim - 1) if s.dims[d] == (Atom(LENGTH),)]
    need(s.is_float and s.is_free(s.ndim - 1) and s.is_literal(s.ndim - 1))
    need(s.dim_of("tp") is None)
    dim, width = c.choose(dims), s.width(s.ndim - 1)
    table = c.make("p", f"fill(nn.Embedding(8, {width}), {c.uid}0)")
    c.parameter(f"p{c.uid}.weight", ((Atom(8),), (Atom(width),)))
    if c.choose([True, True, False]):
        c.add(f"p = {table}(torch.arange(h.shape[{dim}]))")
        c.site(s.made((s.dims[dim], s.dims[-1])), "s", "p")
    else:  # as BERT's token types: one row for all
        c.add(f"p = {table}(torch.zeros(1, h.shape[{dim}]).long())")
        c.site(s.made(((Atom(1),), s.dims[dim], s.dims[-1])), "s", "p")
    sizes = ["1"] * s.ndim
    sizes[dim], sizes[-1] = "-1", str(width)
    c.add(f"h = h + p.view({', '.join(sizes)})")
    return s.made()


@operation(weight=2)
def split_positions(c, s):
    """Positions of this rank's part of a dim: an arange from the rank's own start."""
    need(c.tp and s.is_float and not s.is_dtensor)
    dim = s.dim_of("tp")
    need(dim is not None and len(s.dims[dim]) == 1 and c.divides(s.dims[dim][0]))
    size = c.size_text(s, dim)
    c.add(f"p = torch.arange({size}, dtype=torch.float64) + tp_rank * ({size})")
    c.site(s.made((s.dims[dim],)), "p", "p")
    c.add(f"h = h + 0.1 * p[{', '.join([':' if d == dim else 'None' for d in range(s.ndim)])}]")
    c.site(s.made())
    return s.made()


# ---- In place ------------------------------------------------------------------------------------


@operation(weight=3)
def in_place(c, s):
    """What is written in place is ``h`` itself, or seen through a view of it."""
    need(s.is_float)
    c.add("h = h.clone()" if not s.is_fresh or c.program.has_gradients else "h = h * 1")
    dim = c.choose([None, *s.free()])
    if dim is None:
        plain = ["h.mul_(1.5)", "h.add_(0.25)", "h.tanh_()", "F.relu_(h)", "h.neg_()"]
        made_of_others = ["h.multiply_(1.5)", "h.subtract_(0.25)", "h.clip_(-1, 1)"]
        c.add(c.choose(plain + made_of_others))
    else:
        index = ":, " * dim
        c.add(
            c.choose(
                [
                    f"h[{index}0] = 0",
                    f"h[{index}:1] *= 2",
                    f"h.select({dim}, 0).add_(1)",
                    f"h.transpose(0, {dim})[:1].mul_(3)" if dim == 0 else f"h[{index}-1] = 1.5",
                    f"h.narrow({dim}, 0, 1).fill_(0.5)",
                ]
            )
        )
    c.site(s.made())
    return s.made()


@operation(weight=2)
def written_view(c, s):
    """A view that is a site, then written through: only what reads it may be hooked."""
    need(s.is_float and s.ndim > 1)
    c.add("h = h.clone()", "v = " + c.choose(["h.transpose(0, 1)", "h.view(h.shape)", "h[:1]"]))
    text = c.forward[-1]
    dims = (s.dims[1], s.dims[0]) + s.dims[2:] if "transpose" in text else s.dims
    if "[:1]" not in text:
        c.site(s.made(dims), "v", "v")
        c.read_only.add(f"v{c.uid}")
    else:
        need(s.is_free(0))
    c.add(c.choose(["v.mul_(2)", "v += 0.5", "v.sin_()"]))
    c.site(s.made())
    return s.made()


@operation(weight=2)
def piecewise(c, s):
    """torch.empty, written in pieces."""
    need(s.is_float)
    dim = c.choose([d for d in s.free(literal=True) if s.width(d) > 1])
    index = ":, " * dim
    empty = c.choose(
        ["torch.empty_like(h)", "h.new_empty(h.shape)", "torch.empty(h.shape).double()"]
    )
    c.add(f"o = {empty}", f"o[{index}:1] = h[{index}:1] * 2", f"o[{index}1:] = h[{index}1:] + 1")
    c.add("h = o")
    c.site(s.made())
    return s.made()


@operation(weight=2)
def cache(c, s):
    """Keys kept in a buffer from call to call: each run adds to what the run before wrote."""
    need(s.is_float and s.ndim == 3 and all(len(a) == 1 for a in s.dims))
    need(s.dims[0][0].size == ROWS and s.dims[1] == (Atom(LENGTH),) and s.is_literal(2))
    need(len({batch.rows for batch in c.program.batches}) == 1 and not s.is_dtensor)
    need(c.program.layers != "dtensor")
    width = c.size_text(s, 2)
    c.init.append(f"self.register_buffer('c{c.uid}', None)")
    c.init.append(f"self.at{c.uid} = 0")
    c.add(
        f"if self.c{c.uid} is None:",
        f"    self.c{c.uid} = torch.zeros(rows, 4, {width}, dtype=torch.float64)",
        f"self.c{c.uid}[:, self.at{c.uid} % 4] = h.detach()[:, -1]",
        f"self.at{c.uid} += 1",
        f"h = h + self.c{c.uid}.sum(1, keepdim=True)",
    )
    c.site(s.made())
    return s.made()


@operation(weight=1)
def numpy_round_trip(c, s):
    need(s.is_float)
    c.add("o = torch.from_numpy(np.tanh(h.detach().numpy()))")
    c.site(s.made(), "o", "o")
    c.add("h = h + o")
    c.site(s.made())
    return s.made()


@operation(weight=1)
def python_numbers(c, s):
    """A tensor made of numbers that were read from one; all ranks along tp read the same."""
    need(s.is_float and s.dim_of("tp") is None)
    c.add("o = torch.tensor(h.detach().flatten(0, -2).sum(-1).tolist(), dtype=torch.float64)")
    dims = (tuple(atom for dim in s.dims[:-1] for atom in dim),) if s.ndim > 1 else None
    need(dims and s.is_free(s.ndim - 1))
    c.site(s.made(dims), "o", "o")
    c.add("h = h + 0.1 * o.view(*h.shape[:-1], 1)")
    c.site(s.made())
    return s.made()


@operation(weight=2)
def custom(c, s):
    """An operation that no library has a rule for."""
    need(s.is_float)
    name = c.choose(["custom.double", "custom.with_own_backward", "custom.Cube.apply"])
    c.add(f"h = {name}(h)")
    c.site(s.made())
    return s.made()


@operation(weight=1)
def checkpointed(c, s):
    """A block that is computed again in the backward."""
    need(s.is_float and c.program.has_gradients)
    layer = c.make("k", "nn.Tanh()")
    reentrant = c.choose(["False", "False", "True"])
    c.add(f"h = checkpoint(lambda t: {layer}(t * 1.5), h, use_reentrant={reentrant})")
    c.site(s.made())
    return s.made()


@operation(weight=1)
def branch(c, s):
    """Control flow that depends on values which all ranks share."""
    need(c.tp and c.program.dp == 1 and s.dim_of("tp") is None and s.is_float)
    c.needs_follow = True
    # Not 0 or an integer: the sum of what a norm or a softmax returns is one, up to its rounding.
    c.add("if h.sum() > 0.7:", "    h = h * 2", "else:", "    h = h.flip(-1) + 1")
    c.site(s.made())
    return s.made()


@operation(weight=1)
def eval_only(c, s):
    """A step that depends on the mode or the length, which a key of layouts must hold."""
    need(s.is_float)
    test = c.choose(["self.training", "length > 2" if "x2" not in str(c.choices) else "rows > 1"])
    need(test != "length > 2" or any("length =" in line for line in c.forward))
    c.add(f"if {test}:", "    h = h * 2")
    c.site(s.made())
    return replace(s.made(), is_fresh=False)

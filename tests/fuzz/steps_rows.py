"""Ordinary code on rows: picked by an index, looped over, looked up in tables that all rows share,
classified, and told from the rows of other ranks.
"""

from program import LENGTH, ROWS, Atom, need, operation


def rows_first(c, s, ndim=None):
    """Rows alone in dim 0, and no part of them elsewhere."""
    need(s.is_float and not s.is_dtensor and s.dims[0][0].size == ROWS and len(s.dims[0]) == 1)
    need(ndim is None or s.ndim == ndim)


@operation(weight=3)
def picked(c, s):
    """One position of each row, as heads that classify by the last word do."""
    rows_first(c, s)
    need(s.ndim > 2 and s.dims[1] == (Atom(LENGTH),))
    c.add(f"at = torch.full((rows,), {c.choose(['h.shape[1] - 1', '0'])})")
    c.add(c.choose(["h = h[torch.arange(h.shape[0]), at]", "h = h[torch.arange(rows), at]"]))
    state = s.made(s.dims[:1] + s.dims[2:])
    c.site(state)
    return state


@operation(weight=3)
def by_values(c, s):
    """One position of each row, by its values, which all ranks along tp have."""
    rows_first(c, s)
    need(s.ndim > 2 and s.dims[1] == (Atom(LENGTH),) and s.dim_of("tp") is None)
    c.add("at = (h.detach() > 0).flatten(1).sum(1) % h.shape[1]")
    c.add("h = h[torch.arange(h.shape[0]), at]")
    state = s.made(s.dims[:1] + s.dims[2:])
    c.site(state)
    return state


@operation(weight=3)
def over_rows(c, s):
    """A loop over rows, and what it made joined again."""
    rows_first(c, s)
    need(s.ndim > 1)
    body = c.choose(["row * 1.5", "row.tanh() + 1", "row * 0.5"])
    form = c.choose(["for row in h", "for row in h.unbind(0)", "h.split(1)", "h.chunk(rows)"])
    if form.startswith("for"):
        c.add(f"h = torch.stack([{body} {form}])")
    elif c.choose([True, False]):
        c.add(f"h = torch.cat([{body} for row in {form}])")
    else:
        c.add(f"h = torch.stack([({body}).squeeze(0) for row in {form}])")
    c.site(s.made())
    return s.made()


@operation(weight=3)
def shared_table(c, s):
    """One-hot vectors, an index or a sum by an index that all rows share, and a table."""
    rows_first(c, s)
    dim = c.choose([d for d in range(1, s.ndim) if s.is_free(d)])
    index = f"(torch.arange(h.shape[{dim}]) % 3)"
    kinds = "(h.detach() > 0).long()"
    forms = [
        f"h + torch.zeros_like(h).index_add({dim}, {index} % h.shape[{dim}], h)",
        f"h + h.index_select({dim}, {index} % h.shape[{dim}])",
        f"h * F.one_hot({kinds}, 3).double().sum(-1)",
        f"h + F.one_hot({kinds}, 3).double() @ torch.arange(3).double()",
        f"h + torch.arange(3).double()[{kinds}]",
        f"h.scatter_add({dim}, torch.zeros_like(h).long(), h * 0.5)",
    ]
    c.add(f"h = {c.choose(forms)}")
    c.site(s.made())
    return s.made()


@operation(weight=2)
def classified(c, s):
    """A head on the mean or the last position, and a loss of each row."""
    rows_first(c, s, 3)
    need(s.is_free(1) and s.is_free(2) and s.is_literal(2) and s.dim_of("tp") is None)
    width = s.width(2)
    layer = c.make("l", f"linear({width}, 4, seed={c.uid}0)")
    c.parameter(f"l{c.uid}.weight", ((Atom(4),), (Atom(width),)))
    c.parameter(f"l{c.uid}.bias", ((Atom(4),),))
    c.add("h = " + c.choose(["h.mean(1)", "h[:, -1]", "h[torch.arange(rows), h.shape[1] - 1]"]))
    c.add(f"h = {layer}(h)")
    state = s.made((s.dims[0], (Atom(4),)))
    c.site(state)
    loss = "F.cross_entropy(h, h.detach().argmax(-1), reduction='none')"
    c.add(f"h = h + {loss}[:, None]")
    c.site(state, "t")
    return state


@operation(weight=2)
def func_grad(c, s):
    """The slope of an energy of ``h``, by torch.func."""
    need(s.is_float and not s.is_dtensor)
    c.add("h = torch.func.grad(lambda t: (t.sin() * t).sum())(h)")
    c.site(s.made())
    return s.made()


@operation(weight=2)
def contrastive(c, s):
    """Each row against all ranks' rows, which are gathered; the features that are gathered are a
    tensor that all ranks have.
    """
    rows_first(c, s)
    need(s.dim_of("tp") is None and s.ndim > 1)
    need(all(len(set(batch.rows)) == 1 for batch in c.program.batches))
    need(all(s.is_free(d) for d in range(1, s.ndim)))
    c.add("f = h.flatten(1).mean(1, keepdim=True)", "g = gather_rows(f)")
    c.site(s.made(((Atom(ROWS),), (Atom(1),))), "g", "g")
    form = c.choose(["(f @ g.T).logsumexp(1)", "(f - g.T).square().mean(1)"])
    c.add(f"f = {form}", f"h = h + 0.1 * f.view(-1, {', '.join(['1'] * (s.ndim - 1))})")
    c.site(s.made())
    return s.made()

"""Operations that call: modules of several tensors, decoding loops, collectives less often met."""

from program import LENGTH, ROWS, Atom, need, operation


@operation(weight=2)
def several_tensors(c, s):
    """A module whose output is a tuple with a dict in it: ``unpack_idx`` counts its tensors."""
    need(s.is_float)
    layer = c.make("t", "Several()")
    c.add(f"h, more = {layer}(h, other=h * 2)", "h = h + more['sum'] * more['none'].shape[0]")
    state = s.made()
    c.site(state)
    return state


@operation(weight=2)
def decoding_loop(c, s):
    """Token by token, with a cache that is passed in and out and grows."""
    need(s.is_float and s.ndim == 3 and s.dims[1] == (Atom(LENGTH),) and not s.is_dtensor)
    need(s.dims[0][0].size == ROWS and len(s.dims[0]) == 1)
    c.init.append(f"self.d{c.uid} = nn.Identity()")
    c.add(
        "kept_tokens, tokens = None, []",
        "for token in h.split(1, 1):",
        "    kept_tokens = token if kept_tokens is None else torch.cat([kept_tokens, token], 1)",
        f"    tokens.append(self.d{c.uid}(kept_tokens).mean(1, keepdim=True))",
        "h = torch.cat(tokens, 1)",
    )
    c.site(s.made())
    return s.made()


@operation(weight=2)
def ring(c, s):
    """Each rank gets the part of the next: the whole is rolled along the split dim."""
    need(c.tp and not c.program.has_gradients and s.is_float and not s.is_dtensor)
    dim = s.dim_of("tp")
    need(dim is not None and len(s.dims[dim]) == 1 and s.is_literal(dim))
    need(c.divides(s.dims[dim][0]))
    c.add(f"h = next_part(h, {dim}, {s.width(dim) // c.program.tp})")
    c.site(s.made())
    return s.made()


@operation(weight=3)
def all_to_all(c, s):
    """From a split along one dim to a split along another, as between heads and sequence."""
    need(c.tp and not c.program.has_gradients and s.is_float and not s.is_dtensor)
    source = s.dim_of("tp")
    need(source is not None and len(s.dims[source]) == 1 and c.divides(s.dims[source][0]))
    targets = [d for d in s.free() if len(s.dims[d]) == 1 and c.divides(s.dims[d][0])]
    target = c.choose(targets)
    state = s.with_dim(source, Atom(s.dims[source][0].size))
    state = state.with_dim(target, Atom(s.dims[target][0].size, "tp"))
    c.add(f"h = swap_parts(h, {source}, {target})")
    c.site(state)
    return state


@operation(weight=1)
def broadcast(c, s):
    """Rank 0's tensor in place of one that all have."""
    need(c.tp and not c.program.has_gradients and s.is_float and s.dim_of("tp") is None)
    c.add("h = from_rank_0(h)")
    c.site(s.made())
    return s.made()

"""Where a model starts: which arguments it has."""

from dataclasses import replace

from program import LENGTH, ROWS, Argument, Atom, State, operation


@operation(weight=0)
def start(c, _):
    """Which arguments the model has; the first statement of `forward` notes their sizes."""
    forms = ["x", "x", "x", "x2", "seq", "seq", "ids", "ids", "positions", "positions"]
    form = c.choose([*forms, "mask"])
    dp = "dp" if c.program.dp > 1 else ""
    rows, length, width = (Atom(ROWS, dp),), (Atom(LENGTH),), (Atom(c.program.width),)
    x = Argument("x", (rows, length, width))
    if form == "x2":
        x = Argument("x", (rows, width))
    if form == "seq":
        x = Argument("x", (length, rows, width))
    if form in ("ids", "positions"):
        x = Argument("ids", (rows, length), "ids", 8)
    c.arguments = [x]
    name = x.name
    dim = 1 if form == "seq" else 0
    c.add(f"rows = {name}.shape[{dim}]")
    if form != "x2":
        c.add(f"length = {name}.shape[{1 - dim}]")
    if form == "positions":
        positions = Argument("positions", (length,), "positions")
        c.arguments = [positions, x] if c.choose([True, False]) else [x, positions]
    if form == "mask":
        mask = Argument("mask", (length, length), c.choose(["float", "ones"]))
        c.arguments.append(mask)
    dims = x.dims
    if x.kind == "ids":
        vocab = c.choose(["whole", "split"]) if c.tp and c.is_by_hand else "whole"
        init = c.init_of_weight()
        dims = (*x.dims, width)
        embedding_dims = ((Atom(8, c.tp if vocab == "split" else ""),), width)
        if vocab == "split":
            table = f"VocabEmbedding(8, {c.program.width}, seed={c.uid}0, init={init!r})"
            layer = c.make("l", table)
        else:
            table = f"fill(nn.Embedding(8, {c.program.width}), {c.uid}0, {init!r})"
            layer = c.make("l", table)
        c.parameter(f"l{c.uid}.weight", embedding_dims)
        c.add(f"h = {layer}(ids)")
    else:
        c.add("h = x")
    state = State(dims)
    if form == "positions":
        table = c.make("p", f"fill(nn.Embedding(8, {c.program.width}), {c.uid}5)")
        c.parameter(f"p{c.uid}.weight", ((Atom(8),), width))
        c.add(f"h = h + {table}(positions)")
    if form == "mask":
        c.site(State(mask.dims), "x", "mask")
        c.add("h = h + mask.sum(0)[:, None]")
    c.site(state)
    return replace(state, is_fresh=x.kind == "ids")

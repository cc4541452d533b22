"""How a program of a known class is written by hand, in the form of the random ones."""

from __future__ import annotations

import inspect
import re
from typing import Any

from program import MODES, Batch, Program, Step

CLASSES: dict[str, Program] = {}

X = (("x", "B/dp S 8", "float", 0),)
ONE, TWO = ((1, 4),), ((2, 4),)


def directed(
    name: str,
    mode: str,
    forward: str,
    hooks: str,
    *,
    output: str = "B/dp S 8",
    init: tuple[str, ...] = (),
    parameters: tuple[tuple, ...] = (),
    arguments: tuple[tuple, ...] = X,
    batches: tuple[tuple, ...] = TWO,
    plan: tuple[tuple[str, str], ...] = (),
    run: str = "eval",
    ranks: int = 2,
    output_ranks: str = "rank0",
    is_stated: bool = False,
    sites: tuple[tuple[str, str], ...] = (),
    **fields: Any,
) -> None:
    """Add a program. ``forward``: statements on ``x`` that leave ``h``; ``hooks``: "kind site
    doing", each its own cell. ``batches``: (rows of each rank, length, mode).
    """
    layers, data = MODES[mode]
    tp = (ranks // 2 if data else ranks) if layers else 1
    dp = ranks // tp
    lines = tuple(inspect.cleandoc(forward).splitlines())
    first = next(argument for argument in arguments if "B" in argument[1])
    row_dim = [dim.split("/")[0] for dim in first[1].split()].index("B")
    sizes = (f"rows = {first[0]}.shape[{row_dim}]",)
    if "S" in first[1].split():
        sizes += (f"length = {first[0]}.shape[{first[1].split().index('S')}]",)
    identities = tuple(f"self.{s} = nn.Identity()" for s in identity_sites(lines, init))
    parts = {
        "arguments": arguments,
        "init": init + identities,
        "forward": sizes + lines,
        "parameters": parameters,
        "plan": plan,
        "output": output,
        "sites": sites,
    }
    step = Step("raw", 0, (tuple(parts.items()),))
    cells = []
    for hook in hooks.split(", "):
        kind, site, *doing = hook.split(" ")
        cells.append(
            {
                "hooks": (
                    {"kind": kind, "site": site, "doing": " ".join(doing) or "read", "leaf": 0},
                ),
                "edit_on": "all",
                "output_ranks": output_ranks,
                "is_stated": is_stated,
            }
        )
    of = tuple(
        Batch((rows,) * dp if isinstance(rows, int) else rows, length, *mode)
        for rows, length, *mode in batches
    )
    CLASSES[name] = Program(mode, tp, dp, (step,), of, run=run, cells=tuple(cells), **fields)


def identity_sites(lines: tuple[str, ...], init: tuple[str, ...]) -> list[str]:
    """Names called as ``self.name(`` that ``init`` does not make."""
    made = {line.split(" = ")[0].removeprefix("self.") for line in init}
    called = re.findall(r"self\.(\w+)\(", "\n".join(lines))
    return [name for name in dict.fromkeys(called) if name not in made]


def column(name: str, outer: int = 8, inner: int = 8, **settings: Any) -> tuple[tuple, tuple]:
    """The line that makes a column layer, and its parameters."""
    settings = {"bias": False} | settings
    text = ", ".join(f"{key}={value!r}" for key, value in settings.items())
    line = f"self.{name} = Column({inner}, {outer}, seed=1, {text})"
    parts = settings.get("parts", 1)
    dim = f"{parts}*{outer // parts}/tp"
    params = [(f"{name}.weight", f"{dim} {inner}", False)]
    if settings["bias"]:
        params.append((f"{name}.bias", dim, False))
    return line, tuple(params)


def row(name: str, inner: int = 8, **settings: Any) -> tuple[str, tuple]:
    settings = {"bias": False} | settings
    text = ", ".join(f"{key}={value!r}" for key, value in settings.items())
    line = f"self.{name} = Row({inner}, 8, seed=3, {text})"
    return line, ((f"{name}.weight", f"8 {inner}/tp", False),)


def with_layers(
    name: str, mode: str, forward: str, hooks: str, *layers: tuple, **more: Any
) -> None:
    init = tuple(layer[0] for layer in layers)
    parameters = tuple(parameter for layer in layers for parameter in layer[1])
    extra = more.pop("init", ())
    parameters += more.pop("parameters", ())
    directed(name, mode, forward, hooks, init=init + extra, parameters=parameters, **more)


SPLIT = "B/dp S 8/tp"  # what a column layer gives

"""The form of a program: steps on tensors whose true layout is known, and the module they write.

A program is data (`Program`, kept as JSON): a mode, a mesh, batches, and steps. Each step is the
name of an operation and the choices that were drawn for it. `write` turns it into the text of one
``nn.Module``, the same for the unsharded model and for every rank: its helpers (parts.py) are
no-ops where there is one rank. While it writes, it keeps the true layout of the tensor ``h``:
each dim is a row of atoms, and an atom may be split over a mesh axis. Heads joined with the batch
are then ``(B on dp, heads on tp)`` in one dim, a fused ``[gate; up]`` is ``(2, width on tp)``. A
view keeps the atoms, and what a rank must hold of a full tensor is a slice of atoms (`local_part`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch

ROWS, LENGTH = "B", "S"  # sizes that differ from batch to batch
VERDICTS = ("right", "refused", "wrong", "crash", "hang", "invalid")
RIGHT, REFUSED, WRONG, CRASH, HANG, INVALID = VERDICTS
BAD = (WRONG, CRASH, HANG)

#: How layers are split over tp, and rows over dp.
MODES = {
    "one": ("", ""),
    "states": ("states", ""),
    "bare": ("bare", ""),
    "plan": ("plan", ""),
    "dtensor": ("dtensor", ""),
    "dp": ("", "plain"),
    "ddp": ("", "ddp"),
    "fsdp2": ("", "fsdp2"),
    "states x dp": ("states", "plain"),
    "states x ddp": ("states", "ddp"),
    "bare x ddp": ("bare", "ddp"),
    "plan x fsdp2": ("plan", "fsdp2"),
    "plan x dp": ("plan", "plain"),
    "dtensor x fsdp2": ("dtensor", "fsdp2"),
}


class IllegalStepError(Exception):
    """A step that would not be right on shards where it stands."""


def need(condition: Any) -> None:
    if not condition:
        raise IllegalStepError


class Atom(NamedTuple):
    """A factor of a dim's size: a number, `ROWS` or `LENGTH`, and the mesh axis that splits it."""

    size: int | str
    axis: str = ""


Dims = tuple[tuple[Atom, ...], ...]


@dataclass(frozen=True)
class State:
    """What is known of ``h``. ``is_fresh``: it may be written in place."""

    dims: Dims
    is_float: bool = True
    is_fresh: bool = False
    is_dtensor: bool = False

    @property
    def ndim(self) -> int:
        return len(self.dims)

    def dim_of(self, axis: str) -> int | None:
        for dim, atoms in enumerate(self.dims):
            if any(atom.axis == axis for atom in atoms):
                return dim
        return None

    def is_free(self, dim: int) -> bool:
        return all(not atom.axis for atom in self.dims[dim])

    def is_literal(self, dim: int) -> bool:
        return all(isinstance(atom.size, int) for atom in self.dims[dim])

    def free(self, literal: bool = False) -> list[int]:
        dims = range(self.ndim)
        return [d for d in dims if self.is_free(d) and (self.is_literal(d) or not literal)]

    def width(self, dim: int) -> int:
        """The full size of a dim that is the same in every batch."""
        need(self.is_literal(dim))
        return math.prod(atom.size for atom in self.dims[dim])  # type: ignore[misc]

    def is_leading(self, dim: int, axis: str) -> bool:
        """Whether ranks of ``axis`` hold consecutive ranges of the dim."""
        return self.dims[dim][0].axis == axis

    def with_dim(self, dim: int, *atoms: Atom, **changes: Any) -> State:
        dims = list(self.dims)
        dims[dim] = tidy(atoms)
        return replace(self, dims=tuple(dims), is_fresh=True, **changes)

    def made(self, dims: Any = None, **changes: Any) -> State:
        """The state of a new tensor, of these dims."""
        dims = self.dims if dims is None else tuple(tidy(atoms) for atoms in dims)
        return replace(self, **{"dims": dims, "is_fresh": True} | changes)


def tidy(atoms: Any) -> tuple[Atom, ...]:
    """Without factors of 1, but for one that stands alone."""
    atoms = tuple(Atom(*atom) for atom in atoms)
    return tuple(atom for atom in atoms if atom.size != 1) or (Atom(1),)


# ---- Programs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """How many rows each data-parallel rank has, and the length. ``mode``: "train" or "eval" for
    this batch alone.
    """

    rows: tuple[int, ...]
    length: int
    mode: str = ""

    @property
    def sizes(self) -> dict[str, int]:
        return {ROWS: sum(self.rows), LENGTH: self.length}


@dataclass(frozen=True)
class Step:
    """An operation and what was drawn for it. ``uid`` names its modules, whatever is removed."""

    op: str
    uid: int
    choices: tuple = ()


@dataclass(frozen=True)
class Program:
    """One model, its batches and the mode that it runs in.

    Attributes:
        run: "train" or "eval" (with gradients), "no_grad", "inference".
        weights: How parameters are filled: see ``weight`` in parts.py.
        same_rows: All rows of an input are equal, so all ranks hold equal values.
        cells: The hooks to try, as `verdict.Cell` arguments; None draws some.
    """

    mode: str
    tp: int
    dp: int
    steps: tuple[Step, ...]
    batches: tuple[Batch, ...]
    width: int = 8
    run: str = "train"
    weights: str = "normal"
    same_rows: bool = False
    seed: int = 0
    cells: tuple | None = None

    @property
    def layers(self) -> str:
        return MODES[self.mode][0]

    @property
    def data(self) -> str:
        return MODES[self.mode][1]

    @property
    def has_gradients(self) -> bool:
        return self.run in ("train", "eval")

    @property
    def ranks(self) -> int:
        return self.tp * self.dp

    def to_json(self) -> dict:
        return asdict(self)

    @staticmethod
    def from_json(data: dict) -> Program:
        data = {name: tuples(value) for name, value in data.items()}
        data["steps"] = tuple(Step(**step) for step in data["steps"])
        data["batches"] = tuple(Batch(**batch) for batch in data["batches"])
        return Program(**data)


def tuples(value: Any) -> Any:
    """JSON has no tuples: lists become tuples again."""
    if isinstance(value, dict):
        return {name: tuples(item) for name, item in value.items()}
    return tuple(map(tuples, value)) if isinstance(value, list | tuple) else value


# ---- Writing the module --------------------------------------------------------------------------


@dataclass
class Argument:
    """A positional argument of the model: floats, ids below ``high``, or positions."""

    name: str
    dims: Dims
    kind: str = "float"
    high: int = 0


@dataclass
class Value:
    """What a site or parameter is on each rank. ``is_partial``: a sum over tp is due."""

    dims: Dims
    is_partial: bool = False
    is_dtensor: bool = False


@dataclass
class Code:
    """The module's text as it grows, and the choices of the step that is being written.

    ``is_ambiguous``: only a statement can tell which dim of a view is split: one head a rank from
    its features, or a rank's plain number from that of the unsharded program, beside a -1.
    """

    program: Program
    rng: random.Random | None = None
    arguments: list[Argument] = field(default_factory=list)
    init: list[str] = field(default_factory=list)
    forward: list[str] = field(default_factory=list)
    sites: dict[str, Value] = field(default_factory=dict)
    parameters: dict[str, Value] = field(default_factory=dict)
    plan: dict[str, str] = field(default_factory=dict)
    read_only: set[str] = field(default_factory=set)  # sites that share memory written later
    outer: list[str] = field(default_factory=list)  # functions beside the module
    kept: State | None = None  # of ``kept``, a residual
    needs_follow: bool = False
    is_ambiguous: bool = False
    cuts_gradients: bool = False
    uid: int = 0
    choices: list = field(default_factory=list)
    drawn: list = field(default_factory=list)

    # What operations ask for.

    @property
    def tp(self) -> str:
        return "tp" if self.program.tp > 1 else ""

    @property
    def is_by_hand(self) -> bool:
        return self.program.layers in ("states", "bare", "")

    def choose(self, options: Any) -> Any:
        """One of ``options``, drawn or as it was recorded."""
        options = list(options)
        need(options)
        if self.rng is None:
            need(self.choices)
            chosen = self.choices.pop(0)
            need(chosen in options)
        else:
            chosen = self.rng.choice(options)
        self.drawn.append(chosen)
        return chosen

    def init_of_weight(self) -> str:
        return self.choose(["", "", "", "", self.program.weights, self.program.weights])

    def divides(self, atom: Atom) -> bool:
        """Whether tp can split it evenly, in every batch."""
        tp = self.program.tp
        if atom.size == LENGTH:
            return all(batch.length % tp == 0 for batch in self.program.batches)
        return isinstance(atom.size, int) and atom.size % tp == 0

    def add(self, *lines: str) -> None:
        self.forward.extend(lines)

    def make(self, name: str, text: str) -> str:
        """Add a submodule (its name ends in the step's number); return how forward calls it."""
        self.init.append(f"self.{name}{self.uid} = {text}")
        return f"self.{name}{self.uid}"

    def parameter(self, name: str, dims: Any, is_partial: bool = False, **kw: Any) -> None:
        self.parameters[name] = Value(tuple(tidy(d) for d in dims), is_partial, **kw)

    def site(self, state: State, name: str = "s", var: str = "h", is_partial: bool = False) -> None:
        """An identity module, where a hook can be."""
        full_name = f"{name}{self.uid}"
        self.init.append(f"self.{full_name} = nn.Identity()")
        self.forward.append(f"{var} = self.{full_name}({var})")
        self.sites[full_name] = Value(state.dims, is_partial, state.is_dtensor)

    def atom_text(self, atom: Atom, is_dtensor: bool = False) -> str:
        """The local size of an atom."""
        if atom.axis == "dp":
            return "rows"
        if not atom.axis or is_dtensor:
            return {ROWS: "rows", LENGTH: "length"}.get(atom.size, str(atom.size))  # type: ignore
        if atom.size == LENGTH:
            return "length // tp"
        even = atom.size % self.program.tp == 0  # type: ignore[operator]
        return f"{atom.size} // tp" if even else f"share({atom.size})"

    def size_text(self, state: State, dim: int) -> str:
        """The local size of a dim."""
        return self.atoms_text(state.dims[dim], state.is_dtensor)

    def atoms_text(self, atoms: tuple[Atom, ...], is_dtensor: bool = False) -> str:
        texts = [self.atom_text(atom, is_dtensor) for atom in atoms]
        return " * ".join(f"({t})" if " " in t and len(texts) > 1 else t for t in texts)

    def sizes_text(self, state: State, dims: Any) -> list[str]:
        """How a view may state its sizes: each spelled out, or one as -1, or by ``h.shape``."""
        texts = []
        for atoms in dims:
            text = self.atoms_text(tidy(atoms), state.is_dtensor)
            if atoms in state.dims and self.choose([True, False]):
                text = f"h.shape[{state.dims.index(atoms)}]"
            texts.append(text)
        hidden = self.choose([None, *range(len(texts))])
        if hidden is not None:
            is_plain = [
                any(atom.axis == "tp" and self.divides(atom) for atom in atoms)
                and not text.startswith("h.shape")
                for atoms, text in zip(dims, texts)
            ]
            self.is_ambiguous |= any(is_plain) and not is_plain[hidden] and not state.is_dtensor
            texts[hidden] = "-1"
        return texts


Operation = Callable[[Code, State | None], State]
OPERATIONS: dict[str, Operation] = {}
WEIGHTS: dict[str, int] = {}  # how often each is drawn
DTENSOR: set[str] = set()  # operations that torch itself does on DTensors


def operation(weight: int = 1, dtensor: bool = False) -> Callable[[Operation], Operation]:
    """Register ``(code, state) -> state``, which writes the step or raises `IllegalStepError`."""

    def register(function: Operation) -> Operation:
        OPERATIONS[function.__name__] = function
        WEIGHTS[function.__name__] = weight
        if dtensor:
            DTENSOR.add(function.__name__)
        return function

    return register


def take_step(code: Code, state: State | None, step: Step) -> State:
    """Write one step; `IllegalStepError` leaves lines behind, so the caller drops the code."""
    need(step.op in DTENSOR or state is None or not state.is_dtensor)
    code.uid, code.choices, code.drawn = step.uid, list(step.choices), []
    return OPERATIONS[step.op](code, state)


@dataclass
class Written:
    """A program's text, and what is true of its tensors."""

    code: Code
    state: State

    @property
    def text(self) -> str:
        names = ", ".join(argument.name for argument in self.code.arguments)
        init = ["super().__init__()", *self.code.init]
        forward = [*self.code.forward, "return h"]
        lines = [*self.code.outer, "class Model(nn.Module):", "    def __init__(self):"]
        lines += [f"        {line}" for line in init]
        lines += ["", f"    def forward(self, {names}):"]
        lines += [f"        {line}" for line in forward]
        return "\n".join(lines) + "\n"


def write(program: Program) -> Written:
    """The program's module; `IllegalStepError` where a step would not be right."""
    code, state = Code(program), None
    for step in program.steps:
        state = take_step(code, state, step)
    need(state is not None and state.is_float)
    return Written(code, state)  # type: ignore[arg-type]


# ---- What a rank holds of a full tensor ----------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A rank's place on the mesh."""

    tp: int
    tp_rank: int
    dp: int
    dp_rank: int


def local_part(full: torch.Tensor, dims: Dims, batch: Batch | None, place: Place) -> torch.Tensor:
    """This rank's part of a full tensor."""
    sizes = batch.sizes if batch else {}
    atoms = [atom for dim in dims for atom in dim]
    part = full.reshape([sizes.get(a.size, a.size) for a in atoms])  # type: ignore[arg-type]
    for at, atom in enumerate(atoms):
        size = part.shape[at]
        if atom.axis == "tp":
            part = part.tensor_split(place.tp, at)[place.tp_rank]
        elif atom.axis == "dp":
            rows = batch.rows if batch else (size,)
            part = part.split(list(rows), at)[place.dp_rank]
    local, at = [], 0
    for dim in dims:
        local.append(math.prod(part.shape[at : at + len(dim)]))
        at += len(dim)
    return part.reshape(local)

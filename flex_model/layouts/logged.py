"""The entries of a `operation_log.Log`.

They hold plain values: numbers, strings, None, and tuples of them. A *value* is a number that
stands for a tensor, see `operation_log`; it is None for a tensor of which nothing is known, and a
tuple for one that may have any of several. Among arguments a tensor is ``("t", value, shape,
dtype)``. Placements are by axis (dp, tp), encoded; None where they are not known.
"""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

from flex_model.distributed.placement import Shape

Value = int


class Enter(NamedTuple):
    """A module's forward begins; ``path``: its name and the number of its call."""

    path: str


class Exit(NamedTuple):
    """A module's forward ends."""

    path: str


class Met(NamedTuple):
    """Tensor-parallel ranks call a collective, whatever each has run before; ``path``: its name,
    the axes of its group and the number of its call.
    """

    path: str


class Sync(NamedTuple):
    """Ranks have compared their logs."""

    number: int


class Made(NamedTuple):
    """A tensor that an entry made. ``shape``: its own, a DTensor's full one; ``placements``: those
    that a DTensor states; ``local_shape``: that of this rank's part.
    """

    value: Value
    shape: Shape
    dtype: str
    placements: Any
    local_shape: Shape


class Write(NamedTuple):
    """A write to the memory of an output.

    Attributes:
        before: The value there before.
        others: For each other value in that memory: the old one, the new one, and for each dim of
            the output its dim there.
        is_complete: Whether all of the storage is written now.
    """

    before: Any = None
    others: tuple[Any, ...] = ()
    is_complete: bool = False


class Op(NamedTuple):
    """An operation; ``carriers``: the values that it read and passes gradients to."""

    name: str
    args: Any
    kwargs: Any
    outputs: tuple[Made, ...]
    writes: tuple[Write, ...]
    carriers: tuple[Any, ...]


class Collective(NamedTuple):
    """A collective along ``axes``, None for a group that is not an axis of the mesh; ``reduction``:
    "sum" and the like, "" where there is none or it is not known.
    """

    name: str
    reduction: str
    axes: tuple[str, ...] | None
    args: Any
    kwargs: Any
    outputs: tuple[Made, ...]
    writes: tuple[Write, ...]


class Call(NamedTuple):
    """A call with a contract, see `contracts.logged_calls`: the values of its tensors, and what the
    first one states, a DTensor.
    """

    name: str
    inputs: tuple[Any, ...]
    outputs: tuple[Made, ...]
    stated: Any


class Experts(NamedTuple):
    """A call of experts, whose result has another value from then on; see `contracts.experts`."""

    value: Value
    before: Any
    inputs: tuple[Any, ...]
    shape: Shape
    refusal: str
    is_opaque: bool
    returns_own_rows: bool


class Placed(NamedTuple):
    """A hook replaced the value ``before``."""

    value: Value
    placements: Any
    shape: Shape
    before: Any


class Stated(NamedTuple):
    """The user states the placement, or full sizes, of a tensor, which has another value from then
    on; ``text``: the statement.
    """

    value: Value
    before: Any
    placements: Any
    shape: Shape
    text: str
    sizes: tuple[int | None, ...] | None


class Read(NamedTuple):
    """Python reads the elements of a tensor, or its size along a dim, as plain numbers.

    Attributes:
        dim: Of which the size is read; None where elements are.
        unit: What is counted with the numbers is a multiple of it; 0 where nothing is.
    """

    value: Any
    dim: int | None
    unit: int


class Invalidated(NamedTuple):
    """Nothing is known of these values from here on."""

    values: tuple[Value, ...]


class Joint(NamedTuple):
    """Every rank has a tensor here, such as that of a hook; ``value`` has a placement only where
    all have the same tensor of the program, or each its piece of one.
    """

    value: Value
    before: Any


class Output(NamedTuple):
    """The forward returned the value; ``part``: of this module, "" for the root."""

    value: Value
    part: str


class Hooked(NamedTuple):
    """A hook of the model's own may change the gradient of the value."""

    value: Any


class Named(NamedTuple):
    """A tensor that had one of ``values`` has one of its own from here on, since a hook gets its
    gradient, which is also that of ``source``; None where a node shows where the gradient goes.
    """

    value: Value
    values: Any
    source: Any


class Node(NamedTuple):
    """A node of autograd's graph that is not one of ATen's operations, its contract
    (`contracts.functions`), the values that it passes gradients to, and the value of its output
    ``place``.
    """

    number: Value
    name: str
    contract: str | None
    inputs: tuple[Any, ...]
    place: int
    value: Value


Entry = (
    Enter | Exit | Met | Sync | Op | Collective | Call | Experts | Placed | Stated | Read
    | Invalidated | Joint | Output | Hooked | Named | Node
)  # fmt: skip
MARKERS = (Enter, Exit, Met, Sync)
#: By name.
KINDS: dict[str, Any] = {kind.__name__: kind for kind in get_args(Entry)}

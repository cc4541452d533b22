"""One operation on several ranks in one process: the oracle of the propagation rules.

The full inputs are split as placements say, the operation runs on each rank's shards, and what the
rule claims of the outputs must give, put together, what the operation makes of the full inputs.
"""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map_only

from flex_model.distributed.placement import Partial, Replicate, Shard
from flex_model.layouts.propagation.operation import Operand, Operation
from flex_model.layouts.propagation.rules import propagate

R, P = Replicate(), Partial()


def floats(*shape, dtype=torch.float64):
    """Random numbers, other ones for each shape and call."""
    return torch.randn(shape, dtype=dtype, generator=_generator)


def ints(high, *shape):
    return torch.randint(0, high, shape, generator=_generator)


def bools(*shape):
    return torch.rand(shape, generator=_generator) < 0.5


_generator = torch.Generator().manual_seed(0)


@dataclass(frozen=True)
class Rank:
    """Who runs a sample's program; ``index`` is None for the unsharded program."""

    index: int | None
    count: int


@dataclass
class Sample:
    """One way to call one operation.

    Attributes:
        program: Called as ``program(op, *tensors)``, or with ``of_rank`` as ``program(op, rank,
            *tensors)``; it calls ``op`` once, with sizes that it takes from the tensors it gets.
        sizes: Arguments that are sizes: the rule is asked with and without the unsharded
            program's.
        unstated: What is checked where the unsharded program's sizes are not stated: "all"; "data",
            that the elements are in the right order, since the same sizes on the ranks come from
            programs with different ones; "whole", where only replicated tensors are given; or None.
        is_random: Whether only the shapes of results are compared.
        skips_outputs: Outputs that are internal state of a kernel.
        takes_empty: Whether torch survives dims of size 0 (some kernels divide by them).
        together: Ways to split the tensors that a choice at random rarely meets: the split dim of
            each, or None.
        atol: How far results may be apart, of operations for low precision only.
    """

    op: Any
    tensors: list[Tensor]
    program: Callable | None = None
    of_rank: bool = False
    sizes: tuple[str, ...] = ()
    is_random: bool = False
    skips_outputs: tuple[int, ...] = ()
    unstated: str | None = "all"
    takes_empty: bool = True
    atol: float = 1e-6
    together: tuple[tuple[int | None, ...], ...] = ()

    @cached_property
    def full_run(self) -> tuple[dict[str, Any], list[Tensor]]:
        """The unsharded program."""
        return self.run([t.clone() for t in self.tensors], Rank(None, 1))

    @property
    def name(self) -> str:
        name = self.op._schema.name.removeprefix("aten::")
        return name if name.startswith("__") else name.rstrip("_")

    def run(self, tensors: list[Tensor], rank: Rank) -> tuple[dict[str, Any], list[Tensor]]:
        """The arguments by name, and the tensors made."""
        calls = []

        def op(*args, **kwargs):
            result = self.op(*args, **kwargs)
            calls.append((by_name(self.op._schema, args, kwargs), result))
            return result

        if self.program is None:
            op(*tensors)
        elif self.of_rank:
            self.program(op, rank, *tensors)
        else:
            self.program(op, *tensors)
        ((arguments, result),) = calls
        return arguments, [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor)]


def by_name(schema, args, kwargs) -> dict[str, Any]:
    """Every argument by its name, defaults included."""
    found = {}
    for i, argument in enumerate(schema.arguments):
        if i < len(args):
            found[argument.name] = args[i]
        elif argument.name in kwargs:
            found[argument.name] = kwargs[argument.name]
        else:
            found[argument.name] = argument.default_value
    return found


def sample(name: str, *tensors: Tensor, program: Callable | None = None, **more) -> Sample:
    """``sample("mm", a, b)``; an overload is behind a dot: ``"sum.dim_IntList"``."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return Sample(op, list(tensors), program, **more)


# ---- Splitting and putting together --------------------------------------------------------------

# Numbers of ranks, and how dims are divided over them.
WAYS = (
    (2, "even"),
    (2, "uneven"),
    (2, "parts"),
    (3, "uneven"),
    (3, "parts"),
    (4, "even"),
    (4, "pieces"),
)


def sizes_of(size: int, count: int, mode: str) -> list[int]:
    """How a dim is divided into pieces."""
    if mode == "uneven":
        ones = min(size, count - 1)  # a rank gets nothing where there are not enough
        return [*[1] * ones, *[0] * (count - 1 - ones), size - ones]
    return [size // count + (i < size % count) for i in range(count)]


def candidates(tensor: Tensor, mode: str, count: int) -> list:
    """Placements of a tensor, split in one mode."""
    found: list = [R]
    if tensor.dtype not in (torch.bool, torch.float8_e4m3fn):
        found.append(P)
    for dim, size in enumerate(tensor.shape):
        if mode == "parts":
            found += [Shard(dim, parts=p) for p in (2, 3) if size % p == 0 and size >= p * count]
        elif mode == "pieces":
            if count == 4 and size >= 2:
                found += [Shard(dim, pieces=2, stride=s) for s in (1, 2)]
        elif size > 1:
            found.append(Shard(dim))
    return found


def shard_of(full: Tensor, placement, mode: str, count: int) -> list[Tensor]:
    """What each rank holds."""
    if isinstance(placement, Replicate):
        return [full.clone() for _ in range(count)]
    if isinstance(placement, Partial):
        if full.dtype.is_floating_point or full.dtype.is_complex:
            terms = [torch.randn(full.shape, dtype=full.dtype) for _ in range(count - 1)]
        else:
            terms = [torch.randint(-5, 5, full.shape).to(full.dtype) for _ in range(count - 1)]
        return [*terms, full - sum(terms)]
    pieces = placement.pieces or count
    parts = [
        part.split(sizes_of(part.shape[placement.dim], pieces, mode), placement.dim)
        for part in full.chunk(placement.parts, placement.dim)
    ]
    by_piece = [torch.cat([part[i] for part in parts], placement.dim) for i in range(pieces)]
    return [by_piece[placement.piece(rank)].clone() for rank in range(count)]


def put_together(shards: list[Tensor], placement, same=None) -> Tensor:
    """The full tensor that the ranks' tensors claim to be of. AssertionError if copies differ."""
    same = same or assert_same
    if isinstance(placement, Replicate):
        for other in shards[1:]:
            same(other, shards[0])
        return shards[0]
    if isinstance(placement, Partial):
        return sum(shards[1:], shards[0])
    by_piece: dict[int, Tensor] = {}
    for rank, shard in enumerate(shards):
        same(shard, by_piece.setdefault(placement.piece(rank), shard))
    held = [by_piece[i] for i in sorted(by_piece)]
    parts = [shard.chunk(placement.parts, placement.dim) for shard in held]
    if placement.parts > 1:
        assert all(len(of_rank) == placement.parts for of_rank in parts), placement
    return torch.cat([p[i] for i in range(placement.parts) for p in parts], placement.dim)


def assert_same(actual: Tensor, expected: Tensor, atol: float = 1e-6) -> None:
    alike = actual.shape == expected.shape and actual.dtype == expected.dtype
    if alike and torch.allclose(actual, expected, rtol=1e-6, atol=atol, equal_nan=True):
        return  # in a tenth of the time
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=atol, equal_nan=True)


def assert_same_shape(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape, (actual.shape, expected.shape)


# ---- The check -----------------------------------------------------------------------------------


def operation_of(sample: Sample, tensors, placements, runs, stated) -> Operation:
    """The operation as all ranks ran it: ``tensors`` and ``runs`` are by rank."""
    operands = [
        Operand(tuple(tuple(t.shape) for t in of_ranks), of_ranks[0].dtype, placement)
        for of_ranks, placement in zip(zip(*tensors), placements)
    ]
    by_id = {id(t): operand for held in tensors for t, operand in zip(held, operands)}
    # What programs make themselves, a kernel's own state, nothing is known of.
    unknown = zip(
        *(
            [t for t in tree_iter(given) if isinstance(t, Tensor) and id(t) not in by_id]
            for given, _ in runs
        )
    )
    for of_ranks in unknown:
        made = Operand(tuple(tuple(t.shape) for t in of_ranks), of_ranks[0].dtype)
        by_id |= {id(t): made for t in of_ranks}
    arguments = [tree_map_only(Tensor, lambda t: by_id[id(t)], given) for given, _ in runs]
    outputs = [
        Operand(tuple(tuple(t.shape) for t in of_ranks), of_ranks[0].dtype)
        for of_ranks in zip(*(made for _, made in runs))
    ]
    op = sample.op
    return Operation(
        sample.name, tuple(arguments), tuple(outputs), op._overloadname, stated, tuple(op.tags)
    )


def check(sample: Sample, placements, mode: str, count: int, ask=propagate) -> list:
    """Ask the rule and check its claims; none if the operation can't be run so."""
    claims: list = []
    full_arguments, full = sample.full_run
    tensors = list(zip(*(shard_of(t, p, mode, count) for t, p in zip(sample.tensors, placements))))
    if not sample.takes_empty and any(0 in t.shape for held in tensors for t in held):
        return []
    try:
        runs = [sample.run(list(held), Rank(i, count)) for i, held in enumerate(tensors)]
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
        return []
    if len({len(made) for _, made in runs}) > 1 or len(runs[0][1]) != len(full):
        return []
    stated = {
        name: size if isinstance(size, (list, tuple)) else [size]
        for name in sample.sizes
        if (size := full_arguments[name]) is not None
    }
    if sample.unstated == "whole" and any(p != R for p in placements):
        return []
    for sizes in [{}, stated] if sample.sizes else [{}]:
        if not sizes and sample.unstated is None:
            continue
        operation = operation_of(sample, tensors, placements, runs, sizes)
        found = ask(operation)
        assert len(found) == len(full)
        for i, (claim, expected) in enumerate(zip(found, full)):
            if i in sample.skips_outputs:
                continue
            made = [outputs[i] for _, outputs in runs]
            if claim is None:
                continue
            try:
                same = partial(assert_same, atol=sample.atol)
                if sample.is_random:
                    same = assert_same_shape
                joined = put_together(made, claim, same)
                if not sizes and sample.unstated == "data":
                    joined = joined.reshape(expected.shape)
                assert_same_shape(joined, expected)
                same(joined, expected)
            except (AssertionError, RuntimeError) as error:
                raise AssertionError(
                    f"{sample.name}.{sample.op._overloadname} on {count} ranks, {mode}, "
                    f"{[str(p) for p in placements]} of "
                    f"{[[tuple(t.shape) for t in held] for held in tensors]}, sizes stated "
                    f"{sizes}: output {i} is not {claim}: {error}"
                ) from None
            claims.append(claim)
    return claims


def _split_at(places: list, dim: int | None) -> list:
    return [R] if dim is None else [p for p in places if isinstance(p, Shard) and p.dim == dim]


def check_all(sample: Sample, ask=propagate, limit: int = 40, counts=(2, 3, 4)) -> list:
    """All ways to place the operands, or a fixed choice of them. The claims that are not about
    replicated operands.
    """
    choose = random.Random(0)
    claims: list = []
    for count, mode in WAYS:
        if count not in counts:
            continue
        places = [candidates(t, mode, count) for t in sample.tensors]
        if math.prod(map(len, places)) <= limit:
            combinations = list(itertools.product(*places))
        else:
            combinations = [(R,) * len(places)]
            for i, own in enumerate(places):
                combinations += [(*[R] * i, p, *[R] * (len(places) - i - 1)) for p in own[1:]]
            combinations = combinations[:limit]
            combinations += [tuple(map(choose.choice, places)) for _ in range(limit)]
        alike = [
            tuple(dim if t.ndim > dim else None for t in sample.tensors)
            for dim in range(max(t.ndim for t in sample.tensors))
        ]
        for dims in (*alike, *sample.together):
            combinations += itertools.product(*map(_split_at, places, dims))
        for placements in combinations:
            found = check(sample, placements, mode, count, ask)
            if any(p != R for p in placements):
                claims += found
    return claims

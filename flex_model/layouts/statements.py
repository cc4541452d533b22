"""Holds the user's statements of layouts, ``annotate_layout`` and ``HookFunction(placements=...)``,
and the sites of tensors that they are about.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn

from flex_model.distributed.placement import Partial, Placement, Replicate, Shape, Shard
from flex_model.distributed.values import Fingerprints
from flex_model.layouts.expected_shape import ExpectedShape
from flex_model.layouts.placement_encoding import UNKNOWN, Pair
from flex_model.names import clean

Kind = Literal["forward", "forward_pre", "parameter"]
KINDS = ("forward", "forward_pre", "parameter")
Pattern = str | re.Pattern[str] | type[nn.Module]

Sizes = tuple[int | None, ...] | None


@dataclass(frozen=True)
class Statement:
    """The placement of some tensors, as the user states it.

    Attributes:
        pattern: The modules or parameters: a part of the name, a compiled regular expression, or a
            module type (for all its parameters).
        index: The number of the tensor among the module's, counted as ``HookFunction.unpack_idx``.
        dp, tp: Placements; None leaves that axis to the proof.
        sizes: Of the full tensor, as ``expected_shape``, or of its first dims only; None for no
            check.
    """

    pattern: Pattern
    kind: Kind
    index: int = 0
    dp: Placement | None = None
    tp: Placement | None = None
    sizes: Sizes = None

    def matches(self, name: str, module: nn.Module) -> bool:
        """Whether the statement applies to the module, or its parameter, of this (clean) name."""
        if isinstance(self.pattern, str):
            return self.pattern in name
        if isinstance(self.pattern, re.Pattern):
            return self.pattern.search(name) is not None
        return isinstance(module, self.pattern)

    @property
    def placed(self) -> dict[str, Placement]:
        """The placements that are stated, by axis."""
        both = {"tp": self.tp, "dp": self.dp}
        return {axis: placement for axis, placement in both.items() if placement is not None}

    def describe(self) -> str:
        """Return the call that made the statement, for messages."""
        pattern = self.pattern.pattern if isinstance(self.pattern, re.Pattern) else self.pattern
        if isinstance(pattern, type):
            pattern = pattern.__name__
        placed = "".join(f", {axis}={text_of(one)}" for axis, one in self.placed.items())
        index = f", index={self.index}" if self.index else ""
        return f"annotate_layout({pattern!r}, kind={self.kind!r}{index}{placed})"


def statement_of(
    pattern: Any,
    kind: Any,
    index: Any,
    tp: Any,
    dp: Any,
    sizes: Sequence[int | None] | None,
    part_sizes: Sequence[int] | None,
) -> Statement:
    """Return the statement of a call of ``annotate_layout``. TypeError or ValueError for wrong
    arguments.
    """
    is_type = isinstance(pattern, type) and issubclass(pattern, nn.Module)
    if not is_type and not isinstance(pattern, (str, re.Pattern)):
        raise TypeError(
            "annotate_layout: pattern must be a str, a compiled regular expression or a module "
            f"type, got {pattern!r}"
        )
    if kind not in KINDS:
        raise ValueError(f"annotate_layout: kind must be one of {KINDS}, got {kind!r}")
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise ValueError(f"annotate_layout: index must be an int of at least 0, got {index!r}")
    placed = {axis: placement_of(value, axis) for axis, value in (("tp", tp), ("dp", dp))}
    if all(placement is None for placement in placed.values()):
        raise ValueError(
            "annotate_layout states nothing; give tp= or dp= a placement of "
            "torch.distributed.tensor: Shard(dim), Replicate() or Partial()"
        )
    full = None if sizes is None else tuple(sizes)
    if part_sizes is not None:
        axis = "tp" if isinstance(placed["tp"], Shard) else "dp"
        placed[axis] = shard = _with_parts(placed[axis], part_sizes)
        full = _with_sum(full, shard.dim, sum(part_sizes))
    return Statement(pattern, kind, index, placed["dp"], placed["tp"], full)


def _with_sum(sizes: Sizes, dim: int, total: int) -> Sizes:
    """Return the stated sizes with that of the dim that has the parts; only up to this dim if no
    others are stated.
    """
    if sizes is None:
        return (*[None] * dim, total)
    if dim >= len(sizes) or sizes[dim] not in (None, total):
        raise ValueError(
            f"annotate_layout: part_sizes are {total} together, sizes={sizes} has another size of "
            f"dim {dim}"
        )
    return (*sizes[:dim], total, *sizes[dim + 1 :])


def _with_parts(placement: Placement | None, part_sizes: Sequence[int]) -> Shard:
    sizes = tuple(part_sizes)
    if not isinstance(placement, Shard):
        raise ValueError(
            "annotate_layout: part_sizes are the full sizes of the fused parts of a split dim; "
            "give tp=Shard(dim) with them"
        )
    if not sizes or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes):
        raise ValueError(
            f"annotate_layout: part_sizes must be ints of at least 1, got {part_sizes!r}"
        )
    if len(set(sizes)) == 1:
        return replace(placement, parts=len(sizes))
    return replace(placement, parts=len(sizes), part_sizes=sizes)


def placement_of(value: Any, axis: str) -> Placement | None:
    """Return our placement for one of ``torch.distributed.tensor`` (or of our own). TypeError for
    others; ValueError for a negative dim.
    """
    if value is None or isinstance(value, Placement):
        return value
    kind = type(value).__name__
    if kind == "Shard":
        if value.dim < 0:
            raise ValueError(
                f"{axis}=Shard({value.dim}): count the dim from the front, a number of at least 0"
            )
        return Shard(value.dim)
    if kind == "_StridedShard":
        return Shard(value.dim, value.split_factor)
    if kind == "Replicate":
        return Replicate()
    if kind == "Partial" and getattr(value, "reduce_op", "sum") == "sum":
        return Partial()
    raise TypeError(
        f"{axis}= must be Shard(dim), Replicate() or Partial() of torch.distributed.tensor, got "
        f"{value!r}"
    )


def as_torch(placement: Placement | None) -> Any:
    """Return the placement of ``torch.distributed.tensor`` for ours; ours where torch has none."""
    tensor = importlib.import_module("torch.distributed.tensor")  # over a second, if not imported
    if isinstance(placement, Shard):
        return tensor.Shard(placement.dim) if placement == Shard(placement.dim) else placement
    return None if placement is None else getattr(tensor, type(placement).__name__)()


def placements_of(given: Any) -> dict[str, Placement]:
    """Return the checked ``HookFunction(placements=...)``: by axis, those that are stated."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or set(given) - {"dp", "tp"}:
        raise TypeError(
            'HookFunction: placements must be a dict of placements by axis, such as {"tp": '
            f"Shard(2)}}, with the axes dp and tp; got {given!r}"
        )
    found = {axis: placement_of(value, axis) for axis, value in given.items()}
    return {axis: placement for axis, placement in found.items() if placement is not None}


def text_of(placement: Placement) -> str:
    """Return the placement as users write it."""
    if isinstance(placement, Shard):
        parts = f", parts={placement.parts}" if placement.parts > 1 else ""
        return f"Shard({placement.dim}{parts})"
    return "Replicate()" if isinstance(placement, Replicate) else "Partial()"


def describe(placement: Placement) -> str:
    """Describe the placement for messages."""
    if isinstance(placement, Shard):
        parts = f" in {placement.parts} interleaved parts" if placement.parts > 1 else ""
        return f"split along dim {placement.dim}{parts}"
    return "replicated" if isinstance(placement, Replicate) else "a partial sum"


@dataclass(frozen=True)
class ParameterSources:
    """The layout that is stated for a parameter, and so for its gradient.

    Attributes:
        placements: Along dp and tp.
        share: The shard along tp that its layer's sizes imply, and these sizes; used if the ranks'
            shares make up the sizes.
        sizes: Of the full parameter, as the user states them.
    """

    placements: Pair = UNKNOWN
    share: tuple[Shard, Shape] | None = None
    sizes: ExpectedShape = None


@dataclass(frozen=True)
class Site:
    """The place of a tensor in the model, for messages.

    Attributes:
        name: Such as ``forward hook on 'layers.0'``.
        module: The clean name of the module or parameter, for the call that states its layout.
        kind: The ``kind`` for ``annotate_layout``; empty if that can't be used.
        index: The number of the tensor among the module's, or its name.
        parameter: For a parameter or its gradient: what is stated about it.
        is_gradient: Whether the tensor is the gradient of an activation.
    """

    name: str
    module: str = ""
    kind: str = ""
    index: int | str = 0
    parameter: ParameterSources = ParameterSources()
    is_gradient: bool = False


def _is_one_number(tensor: Tensor) -> bool:
    flat = tensor.detach().flatten()
    return bool((flat == flat[:1]).all())


class Statements(list[Statement]):
    """All statements that the user of one FlexModel made with ``annotate_layout``."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self._root = root
        self._warned: set[str] = set()  # the sites

    def targets(self, statement: Statement) -> Iterator[tuple[str, nn.Module, str]]:
        """Yield the clean name of each module or parameter to which the statement applies, the
        module, and the parameter's name in it.
        """
        for name, module in self._root.named_modules():
            tensors = {**module._parameters, **module._buffers}
            own = [leaf for leaf, tensor in tensors.items() if tensor is not None]
            for leaf in own if statement.kind == "parameter" else [""]:
                full = clean(self._root, f"{name}.{leaf}".strip("."))
                if statement.matches(full, module):
                    yield full, module, leaf

    def names(self, statement: Statement) -> list[str]:
        """Return the clean names of the modules or parameters to which the statement applies."""
        return [name for name, _, _ in self.targets(statement)]

    def text_of_name(self, kind: Any, name: str) -> str:
        """Return the pattern, as users write it, that matches this clean name and no other."""
        if self.names(Statement(name, kind)) == [name]:
            return repr(name)
        return f"re.compile({f'^{re.escape(name)}$'!r})"

    def check_parts(
        self, site: Site, stated: Mapping[str, Placement], prints: Fingerprints, shard: Tensor
    ) -> None:
        """Warn, once a site, where parts that the user states to be shards of one tensor are equal
        on all ranks: a replicated tensor that is taken for shards is too large. Parts that are one
        number all over (a bias of zeros) show nothing. Local.

        Args:
            stated: The placements of the tensor that are stated here; those of ``annotate_layout``
                are added.
        """
        placed = {**self.of_site(site), **stated}
        axes = [
            axis
            for axis, placement in placed.items()
            if isinstance(placement, Shard)
            and prints.mesh.size(axis) > 1
            and prints.equal_along(axis)
        ]
        if not axes or site.name in self._warned or _is_one_number(shard):
            return
        self._warned.add(site.name)
        warnings.warn(
            f"{site.name}: stated to be {describe(placed[axes[0]])} along {axes[0]}, but the parts "
            f"of all ranks are equal, bit for bit (shape {tuple(shard.shape)}): if each rank holds "
            "the whole tensor, it is Replicate()",
            stacklevel=2,
        )

    def of_site(self, site: Site) -> dict[str, Placement]:
        """Return the placements that ``annotate_layout`` states of a site's own tensor."""
        found: dict[str, Placement] = {}
        for statement in self:
            if site.is_gradient or (statement.kind, statement.index) != (site.kind, site.index):
                continue
            is_type = isinstance(statement.pattern, type)  # of which the name says nothing
            names = self.names(statement) if is_type else ()
            if site.module in names if is_type else statement.matches(site.module, self._root):
                found.update(statement.placed)
        return found

    def of_parameter(self, name: str, module: nn.Module) -> Statement | None:
        """Return the last statement that applies to the parameter of this clean name."""
        found = [s for s in self if s.kind == "parameter" and s.matches(name, module)]
        return found[-1] if found else None

    def of_modules(self) -> list[tuple[nn.Module, Statement]]:
        """Return every module with a statement about its tensors, with the statement."""
        of_tensors = (one for one in self if one.kind != "parameter")
        return [(module, one) for one in of_tensors for _, module, _ in self.targets(one)]

    def of_inputs(self, name: str, module: nn.Module) -> dict[int, Statement]:
        """Return the statements about inputs of a module, by index."""
        return {s.index: s for s in self if s.kind == "forward_pre" and s.matches(name, module)}

    @property
    def digest(self) -> str:
        """A text of all statements, which ranks must have in common."""
        return "; ".join(map(str, self))

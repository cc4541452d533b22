"""Proves layouts along both axes of the mesh, and says why a value is placed as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flex_model.distributed.mesh import Mesh
from flex_model.distributed.placement import Replicate, Shape, Shard
from flex_model.layouts.expected_shape import fits
from flex_model.layouts.logged import Value
from flex_model.layouts.operation_log import Chunk
from flex_model.layouts.placement_encoding import Pair
from flex_model.layouts.proofs import AxisProofs
from flex_model.layouts.sources import AXES
from flex_model.layouts.statements import describe


class MeshProofs:
    """Infers placements along both axes. Pure.

    Along tp all ranks hold parts of the same tensors, so a proof uses what all of them ran. Along
    dp each rank has rows of its own, and infers alone where they are, as if all ranks had as many:
    the ranks compare what they have proven of a hook's tensor.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        sizes = (mesh.dp_size, mesh.tp_size)
        self.along = {
            axis: AxisProofs(axis, size, other)
            for axis, size, other in zip(AXES, sizes, reversed(sizes))
            if size > 1
        }

    def follow(self, chunks: Sequence[Chunk]) -> None:
        """Infer from the next chunks of the logs of all ranks of the grid; along dp from this
        rank's.
        """
        own = chunks[self._mesh.group_rank]
        for axis, proofs in self.along.items():
            if axis == "dp":
                proofs.follow([own] * self._mesh.dp_size)
            else:
                proofs.follow([chunks[place] for place in self._mesh.ranks_along((axis,))])

    def placements(self, value: Any) -> Pair:
        """Return the placements of a value; along an axis of one rank it is always replicated."""
        found = {axis: proofs.placement_of_whole(value) for axis, proofs in self.along.items()}
        return found.get("dp", Replicate()), found.get("tp", Replicate())

    def gradient_placements(self, value: Any) -> Pair:
        """Return the placements of a value's gradient."""
        found = {axis: proofs.gradients.placement(value) for axis, proofs in self.along.items()}
        return found.get("dp", Replicate()), found.get("tp", Replicate())

    def gradient_obstacles(self, value: Any) -> dict[str, str]:
        """Return, by axis along which the placement of a value's gradient is not known, why."""
        found = {axis: proofs.gradients.obstacle(value) for axis, proofs in self.along.items()}
        return {axis: why for axis, why in found.items() if why}

    def refuted_statement(self) -> str:
        """Return why a statement of the user is wrong; empty if none is. The same on all ranks of
        the grid, except for sizes.
        """
        for axis, proofs in self.along.items():
            for value, text, stated, proven in proofs.conflicts:
                if proven is None:
                    return (
                        f"{text}: the tensor has {len(proofs.shapes[value][0])} dims, and is not "
                        f"{describe(stated)} along {axis}; count the dims from 0"
                    )
                steps = "; ".join(self.why(value, axis)[-4:])
                return (
                    f"{text}: by the operations that made it the tensor is {describe(proven)} "
                    f"along {axis}, not {describe(stated)} ({steps}); leave the statement out, or "
                    "state the layout of the weight that it was made with"
                )
            for value, text, sizes in proofs.stated_sizes:
                if self._has_parts_of_both(value):
                    return (
                        f"{text}: both axes split the dim of the parts, so their full sizes don't "
                        "identify them; state the tensor before its dims are joined"
                    )
                full = self._full_shape(value)
                if full is not None and not fits(full, sizes):
                    return f"{text}: the sizes {sizes} are stated, the full tensor has shape {full}"
        return ""

    def _has_parts_of_both(self, value: Value) -> bool:
        """Whether both axes split one dim, and at least one of them in interleaved parts."""
        found = [proofs.placements.get(value) for proofs in self.along.values()]
        shards = [placement for placement in found if isinstance(placement, Shard)]
        is_one_dim = len({shard.dim for shard in shards}) == 1 and len(shards) > 1
        return is_one_dim and any(shard.is_interleaved for shard in shards)

    def _full_shape(self, value: Value) -> Shape | None:
        """Return the full shape of a value; None unless it is placed along all axes."""
        full: list[int] = []
        for proofs in self.along.values():
            if value not in proofs.placements:
                return None
            local = proofs.shapes[value][0]
            full = full or list(local)
            for dim, size in enumerate(local):
                along = proofs.size(value, dim) or 0
                full[dim] = full[dim] * along // size if size else along
        return tuple(full)

    def why(self, value: Any, axis: str) -> list[str]:
        """Return the proof of a value's placement along an axis: one line for each operation, in
        order.
        """
        proofs = self.along.get(axis)
        if proofs is not None:
            value = proofs.resolve_joint(value)
        if proofs is None or not isinstance(value, int):
            return []
        lines: list[str] = []
        seen: set[Value] = set()
        pending: list[tuple[Value, bool]] = [(value, False)]
        while pending:
            one, is_done = pending.pop()
            step = proofs.steps.get(one)
            if step is None:
                continue
            if is_done:
                lines.append(f"{proofs.placements.get(one) or 'not known'}: {step.text}")
            elif one not in seen:
                seen.add(one)
                pending.append((one, True))
                pending += [(source, False) for source in reversed(step.inputs)]
        return lines

"""``python -m flex_model.layouts [operation ...]``: list the ATen operations that are not
followed: they have no propagation rule and no decomposition.

Of the operations named, or of all: those that read and return tensors, are not private, not the
in-place or ``out=`` form of another, and not composed of others (those are followed through their
components). Nothing is known of their results, unless all their operands are replicated.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterator, Sequence

import torch

from flex_model.integrations.torch_private import (
    OpOverload,
    all_operation_names,
    decomposition_table,
    is_composite,
)
from flex_model.layouts.propagation import has_rule

_GROUPS = (
    ("linear algebra", ("linalg_", "lu_", "cholesky", "ormqr", "geqrf", "triangular", "qr", "svd")),
    ("quantized", ("quantize", "q_", "int_repr", "dequantize", "fake_quantize", "fbgemm")),
    ("sparse", ("sparse", "to_sparse", "crow_", "ccol_", "col_indices", "row_indices", "coalesce")),
    ("of one device", ("cudnn_", "miopen_", "mkldnn_", "mps_")),
    ("copies of views", ()),
    ("backward", ()),
    ("others", ()),
)


def operations() -> Iterator[str]:
    """Yield the names of the ATen operations that should have a rule."""
    seen = set()
    for qualified in all_operation_names():
        namespace, _, rest = qualified.partition("::")
        name, _, overload = rest.partition(".")
        if namespace != "aten" or name.startswith("_") or name in seen:
            continue
        op = getattr(getattr(torch.ops.aten, name, None), overload or "default", None)
        if op is not None and _needs_rule(op):
            seen.add(name)
            yield name


def _needs_rule(op: OpOverload) -> bool:
    schema = op._schema
    if any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments):
        return False
    reads = any("Tensor" in str(a.type) for a in schema.arguments)
    makes = any("Tensor" in str(r.type) for r in schema.returns)
    return reads and makes and not is_composite(op)


def without_rule(names: Sequence[str] = ()) -> list[str]:
    """Return the names of the given operations, or of all, that have no rule and no
    decomposition.
    """
    known = set(all_operation_names())
    return sorted(name for name in names or operations() if not _is_followed(name, known))


def _is_followed(name: str, known: Container[str]) -> bool:
    if has_rule(name):
        return True
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"))
    found = [getattr(packet, overload) for overload in packet.overloads()]
    return any(op in decomposition_table or is_composite(op) for op in found if op.name() in known)


def _group(name: str) -> str:
    if name.endswith("_copy"):
        return "copies of views"
    if "backward" in name:
        return "backward"
    return next((group for group, starts in _GROUPS if name.startswith(starts)), "others")


def main(names: Sequence[str]) -> int:
    """Print them by group. The exit status is 1 if one was named."""
    missing = without_rule(names)
    print(f"{len(missing)} ATen operations without a propagation rule and a decomposition")
    for group, _ in _GROUPS:
        of_group = [name for name in missing if _group(name) == group]
        if of_group:
            print(f"\n{group} ({len(of_group)})")
            print("\n".join(f"  {name}" for name in of_group))
    return 1 if names and missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

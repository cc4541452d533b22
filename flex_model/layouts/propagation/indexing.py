"""Rules for reads and writes at indices that are tensors."""

from __future__ import annotations

from string import ascii_lowercase, ascii_uppercase

import torch

from flex_model.layouts.propagation.operation import Operand, Operation
from flex_model.layouts.propagation.text_forms import Placements, form, words


def _indexed(self: Operand, indices: list[Operand | None]) -> tuple[str, str, str]:
    """Return the labels of ``self``, of the indices, and of ``self[indices]``.

    The indexed dims are replaced by those of the indices, broadcast: at the first indexed dim if
    all are adjacent, else in front. A mask indexes as many dims as it has, and is replaced by one.
    """
    given = [one for one in indices if one is not None]
    has_mask = any(map(_is_mask, given))
    width = max(1 if _is_mask(one) else one.ndim for one in given)
    # The length of a mask's one dim is its count of ones, which only all of them determine.
    of_index = "*" * width if has_mask else ascii_uppercase[:width]
    dim, of_self = 0, ""
    for one in indices:
        count = one.ndim if one is not None and _is_mask(one) else 1
        of_self += ascii_lowercase[dim : dim + count] if one is None else "*" * count
        dim += count
    of_self += ascii_lowercase[dim : self.ndim]
    whole, rest = "*" * of_self.count("*"), of_self.replace("*", "")
    at = of_self.index(whole) if whole in of_self else 0
    return of_self, "_" if has_mask else f"~{of_index}", rest[:at] + of_index + rest[at:]


def _is_mask(index: Operand) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def index(operation: Operation) -> Placements:
    """Read ``self[i, j, :, ...]``."""
    of_self, of_index, after = _indexed(operation["self"], list(operation["indices"]))
    return form(f"self:{of_self} indices:{of_index} -> {after} = self*!indices")(operation)


def index_put(operation: Operation) -> Placements:
    """Write ``self[i, j, :, ...] = values``, or add to it."""
    found = _where_mask(operation)
    if found is not None and found[0] is not None:
        return found
    of_self, _, after = _indexed(operation["self"], list(operation["indices"]))
    # Two indices may write to the same place: all must be on every rank.
    of_values = "".join("*" if label.isupper() else label for label in after)
    return form(
        f"self:{of_self} indices:_ values:~{of_values} -> {of_self} = self + values*!indices"
    )(operation)


def _where_mask(operation: Operation) -> Placements | None:
    """Resolve ``self[mask] = value`` with the same value for all that the mask selects, and no
    other index: by element of the mask.
    """
    masks = [(i, m) for i, m in enumerate(operation["indices"]) if m is not None]
    if len(masks) != 1 or masks[0][1].dtype is not torch.bool:
        return None
    ((first, mask),), value = masks, operation["values"]
    labels = ascii_lowercase[: operation["self"].ndim]
    of_mask, rest = labels[first : first + mask.ndim], labels[first + mask.ndim :]
    selected = value.ndim - len(rest) - 1  # the dim of what the mask selects
    if selected >= 0 and any(shape[selected] != 1 for shape in value.shapes):
        return None
    return form(f"self:{labels} indices:{of_mask} values:~{labels[:first]}*{rest} -> {labels}")(
        operation
    )


RULES = {
    "index": index,
    "_unsafe_index": index,
    **dict.fromkeys(words("index_put _unsafe_index_put _index_put_impl"), index_put),
}

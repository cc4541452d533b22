"""Selection of rows, positions, heads or units of a full tensor, for hooks (`Select`) and edits."""

from flex_model.selection.selectors import Select

__all__ = ["Select"]

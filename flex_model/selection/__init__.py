"""Which rows, positions, heads or units of a full tensor are meant: `Select`, of hooks, and the
regions of ready edits.
"""

from flex_model.selection.select import Select

__all__ = ["Select"]

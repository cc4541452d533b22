"""The page of a comparison of two runs: its modules by depth, their differences as colours."""

from __future__ import annotations

import math
from typing import Any

from flex_model.fingerprints.comparison import Comparison
from flex_model.fingerprints.first_difference import Difference
from flex_model.visualize.html import filled

_DEEPEST = 5.0  # decades above the bound, from where on the colour is the same


def page(comparison: Comparison) -> str:
    """Return the page."""
    first = comparison.first
    return filled(
        "comparison.html",
        {
            "summary": comparison.summary(),
            "first": comparison.rows.index(first) if first is not None else -1,
            "rows": [_row(one) for one in comparison.rows],
            "unmatched": comparison.unmatched,
        },
    )


def _row(one: Difference) -> dict[str, Any]:
    """Return a site as texts; ``heat`` is negative within the bound of rounding, at most 1."""
    decades = math.log10(one.ulps / one.bound) if one.bound and one.ulps else -1.0
    decades = _DEEPEST if math.isinf(one.ulps) else decades
    labels = {
        "kind": one.kind,
        "call": one.call,
        "ulps": f"{one.ulps:.3g}",
        "inherited": f"{one.inherited:.3g}",
        "bound of rounding": f"{one.bound:.3g}",
        "computed by": one.module or "(the model)",
        "what": one.text,
        "layout in A": one.layouts[0],
        "layout in B": one.layouts[1],
    }
    shown = [[label, str(value)] for label, value in labels.items() if value != ""]
    heat = min(decades / _DEEPEST, 1.0) if one.differs else -1.0
    positions = [[str(cell) for cell in position] for position in one.positions]
    return {"name": one.name, "heat": heat, "shown": shown, "positions": positions}

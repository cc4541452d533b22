"""The page of a comparison of two runs: its modules by depth, their differences as colours."""

from __future__ import annotations

from dataclasses import asdict

from flex_model.fingerprints.comparison import Comparison
from flex_model.visualize.html import filled

_NUMBERS = ("ulps", "inherited", "bound")  # as text: JSON has no infinity


def page(comparison: Comparison) -> str:
    """Return the page."""
    rows = [
        asdict(row)
        | {name: f"{getattr(row, name):.3g}" for name in _NUMBERS}
        | {"differs": row.differs, "first": row is comparison.first}
        for row in comparison.rows
    ]
    data = {"summary": comparison.summary(), "rows": rows, "unmatched": comparison.unmatched}
    return filled("comparison.html", data)

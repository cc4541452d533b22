"""Formats tables, shapes and sizes as plain text."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flex_model.distributed.placement import Shape


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose columns are as wide as their widest cell, two spaces apart."""
    lines = [list(headers), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headers))]
    texts = ["  ".join(cell.ljust(n) for cell, n in zip(line, widths)).rstrip() for line in lines]
    texts.insert(1, "  ".join("-" * n for n in widths))
    return "\n".join(texts)


def _html_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the same table as HTML, with its text escaped."""
    lines = [_html_row("th", headers), *(_html_row("td", row) for row in rows)]
    return f"<table>{''.join(lines)}</table>"


def _html_row(tag: str, cells: Sequence[str]) -> str:
    style = ' style="text-align: left; vertical-align: top"'
    shown = [f"<{tag}{style}>{html.escape(cell)}</{tag}>" for cell in cells]
    return f"<tr>{''.join(shown)}</tr>"


@dataclass(frozen=True)
class Table:
    """A table of text.

    Attributes:
        rows: The cells of each row, as many as there are headers.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]


class Printed:
    """A base for results that print as tables with lines around them, and as HTML in notebooks."""

    def _blocks(self) -> Iterator[Table | str]:
        """Yield tables, and lines between them."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(
            block if isinstance(block, str) else table(block.headers, block.rows)
            for block in self._blocks()
        )

    def _repr_html_(self) -> str:
        return "".join(
            f"<pre>{html.escape(block)}</pre>"
            if isinstance(block, str)
            else _html_table(block.headers, block.rows)
            for block in self._blocks()
        )


def shape(value: Shape | None) -> str:
    """Return ``2 x 8 x 64``, or ``()`` for a scalar."""
    if value is None:
        return "?"
    return " x ".join(map(str, value)) or "()"


def shapes(values: Sequence[Shape]) -> str:
    """Return one shape if all ranks have the same, else one for each rank."""
    unique = list(dict.fromkeys(values))
    return shape(unique[0]) if len(unique) == 1 else " | ".join(map(shape, values))


def size(num_bytes: int) -> str:
    """Return a size as ``1.5 KiB``."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    power = min((num_bytes.bit_length() - 1) // 10, 4)
    return f"{num_bytes / 1024**power:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"


def site(name: str, unpack_idx: int | str) -> str:
    """Return the name of a module (the root in words), and the tensor's index if it is not 0."""
    return (name or "(the model)") + (f", tensor {unpack_idx!r}" if unpack_idx else "")


@dataclass(frozen=True)
class SiteRow:
    """A base for what is known of one tensor at a site; ``site`` is its name in tables."""

    name: str
    kind: str
    unpack_idx: int | str

    @property
    def site(self) -> str:
        return site(self.name, self.unpack_idx)

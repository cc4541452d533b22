"""Formats tables, shapes and sizes as plain text."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flex_model.distributed.placement import Shape


@dataclass(frozen=True)
class Table:
    """A table of text, whose columns are as wide as their widest cell, two spaces apart.

    Attributes:
        rows: The cells of each row, as many as there are headers.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __str__(self) -> str:
        lines = [self.headers, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines)]
        lines.insert(1, ["-" * n for n in widths])
        return "\n".join(
            "  ".join(cell.ljust(n) for cell, n in zip(line, widths)).rstrip() for line in lines
        )

    def _repr_html_(self) -> str:
        def row(tag: str, cells: Sequence[str]) -> str:
            begin = f'<{tag} style="text-align: left; vertical-align: top">'
            shown = [f"{begin}{html.escape(cell)}</{tag}>" for cell in cells]
            return f"<tr>{''.join(shown)}</tr>"

        lines = [row("th", self.headers), *(row("td", cells) for cells in self.rows)]
        return f"<table>{''.join(lines)}</table>"


class Printed:
    """A base for results that print as tables with lines around them, and as HTML in notebooks."""

    def _blocks(self) -> Iterator[Table | str]:
        """Yield tables, and lines between them."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(map(str, self._blocks()))

    def _repr_html_(self) -> str:
        return "".join(
            f"<pre>{html.escape(block)}</pre>" if isinstance(block, str) else block._repr_html_()
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

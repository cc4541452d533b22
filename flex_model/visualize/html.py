"""The picture of a wrap as one page that needs nothing else: no network, no other file."""

from __future__ import annotations

import json
import os
from importlib import resources
from pathlib import Path
from typing import Any

from flex_model.diagnostics.timeline import KINDS
from flex_model.inspection import text
from flex_model.visualize.model_map import HookMark, ModelMap

_DATA = "{{data}}"


def write(picture: ModelMap, file: str | os.PathLike[str]) -> None:
    """Write the page. Names and reprs, which are users' text, stay text: they travel as JSON in
    which no tag can end, and the page makes text nodes of them.
    """
    page = resources.files("flex_model.visualize").joinpath("map.html").read_text("utf-8")
    data = json.dumps(_data(picture), separators=(",", ":"))
    for character in "<>&":  # of JSON's strings only, as which they can be escaped
        data = data.replace(character, f"\\u{ord(character):04x}")
    Path(file).write_text(page.replace(_DATA, data), "utf-8")


def _data(picture: ModelMap) -> dict[str, Any]:
    tree = picture.tree
    hooks: dict[str, list[int]] = {}
    for i, mark in enumerate(picture.hooks):
        hooks.setdefault(mark.module, []).append(i)
    return {
        "title": tree.title,
        "rank": picture.rank,
        "transports": [[axes, *told] for axes, told in picture.transports.items()],
        "notes": [note for note in tree.nodes[0].notes if note.startswith("all hooks share")],
        "modules": [
            {
                "name": node.name,
                "class": node.kind,
                "hookable": node.has_forward,
                "input": str(node.input or ""),
                "output": str(node.output or ""),
                "hooks": hooks.get(node.name, []),
                "children": tree.children(node.name),
            }
            for node in tree.nodes
        ],
        "hooks": [_hook(mark) for mark in picture.hooks],
        "timeline": _timeline(picture) if picture.timeline else None,
    }


def _hook(mark: HookMark) -> list[list[str]]:
    """Labels and texts, in the order in which they are shown."""
    cost, seen = mark.cost, mark.layout
    rows = [
        ("kind", mark.kind + (f", parameter {mark.parameter}" if mark.parameter else "")),
        ("edits", mark.edit or "no, it looks"),
        ("select", mark.select),
        ("groups", ", ".join(["all", *mark.groups])),
        ("record", mark.record),
        ("tensor", mark.tensor + (f" (number {seen.unpack_idx})" if seen.unpack_idx else "")),
        ("on each rank", text.shapes(seen.local_shapes) if seen.local_shapes else ""),
        ("known from", seen.source),
        ("last run", mark.spent),
        ("why", cost.why),
        ("stage", mark.where),
    ]
    return [[label, told] for label, told in rows if told]


def _timeline(picture: ModelMap) -> dict[str, Any]:
    """Spans as ``[kind, what, module, start, end, waited, bytes]``, texts by their numbers."""
    timeline = picture.timeline
    assert timeline is not None
    module_of = {mark.layout.name: mark.module for mark in picture.hooks}
    texts: dict[str, int] = {}

    def number(told: str) -> int:
        return texts.setdefault(told, len(texts))

    spans = [
        [
            [
                KINDS.index(span.kind),
                number(span.what),
                number(module_of.get(span.site, "")),
                round(span.start_us, 1),
                round(span.end_us, 1),
                round(span.waited_us, 1),
                span.num_bytes,
            ]
            for span in of_rank
        ]
        for of_rank in timeline
    ]
    return {
        "ranks": timeline.ranks,
        "spans": spans,
        "texts": list(texts),
        "end": timeline.end_us,
        "clock": timeline.clock,
        "forgotten": max(timeline.num_forgotten, default=0),
        "summary": timeline.shown(),
    }

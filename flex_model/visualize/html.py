"""Writes a ModelMap as one self-contained HTML page: no network, no other file."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from flex_model.diagnostics.timeline import KINDS
from flex_model.inspection import text
from flex_model.visualize.model_map import HookMark, ModelMap


def page(picture: ModelMap) -> str:
    """Return the page."""
    return filled("map.html", _data(picture))


def filled(name: str, data: Any) -> str:
    """Return a template with data, and what all scripts begin with, in it. Names and reprs are
    users' text and can't inject HTML: they are embedded as JSON with ``<``, ``>`` and ``&``
    escaped, and the page only puts them into text nodes.
    """
    folder = resources.files("flex_model.visualize")
    template, start = (folder.joinpath(file).read_text("utf-8") for file in (name, "start.js"))
    shown = json.dumps(data, separators=(",", ":"))
    for character in "<>&":  # JSON has them in strings only, where they can be escaped
        shown = shown.replace(character, f"\\u{ord(character):04x}")
    return template.replace("{{start}}", start).replace("{{data}}", shown)


def _data(picture: ModelMap) -> dict[str, Any]:
    tree = picture.tree
    hooks: dict[str, list[int]] = {}
    for i, mark in enumerate(picture.hooks):
        hooks.setdefault(mark.module, []).append(i)
    return {
        "title": tree.title,
        "rank": picture.rank,
        "transports": [[axes, *name_and_why] for axes, name_and_why in picture.transports.items()],
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
    """Return labels and texts, in the order in which they are shown."""
    cost, site = mark.cost, mark.layout
    rows = [
        ("kind", mark.kind + (f", parameter {mark.parameter}" if mark.parameter else "")),
        ("edits", mark.edit or "no, read-only"),
        ("select", mark.select),
        ("groups", ", ".join(["all", *mark.groups])),
        ("record", mark.record),
        ("tensor", mark.tensor + (f" (number {site.unpack_idx})" if site.unpack_idx else "")),
        ("on each rank", text.shapes(site.local_shapes) if site.local_shapes else ""),
        ("known from", site.source),
        ("last run", mark.spent),
        ("why", cost.why),
        ("stage", mark.where),
    ]
    return [[label, shown] for label, shown in rows if shown]


def _timeline(picture: ModelMap) -> dict[str, Any]:
    """Return spans as ``[kind, what, module, start, end, waited, bytes]``, texts as indices."""
    timeline = picture.timeline
    assert timeline is not None
    module_of = {mark.layout.name: mark.module for mark in picture.hooks}
    texts: dict[str, int] = {}

    def number(shown: str) -> int:
        return texts.setdefault(shown, len(texts))

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
        "forgotten": max(timeline.num_forgotten, default=0),
        "summary": timeline.shown(),
    }

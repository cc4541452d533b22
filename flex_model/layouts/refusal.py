"""The message for a tensor whose placement is not known: what it may be, as lines to use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flex_model.distributed.mesh import Mesh
from flex_model.distributed.placement import (
    Partial,
    Placement,
    Replicate,
    Shape,
    Shard,
    ShardLayout,
)
from flex_model.distributed.values import Fingerprints
from flex_model.layouts.expected_shape import unique
from flex_model.layouts.obstacle import Obstacle, Reason
from flex_model.layouts.statements import KINDS, Site, Statements, text_of

PAD = (
    "pad the inputs of the data-parallel ranks to one length, or choose how hooks see different "
    'ones: FlexModel(dp_batch="global") pads them, "local" passes each rank its own'
)

ONE_ORDER = "start all ranks with PYTHONHASHSEED=0 in their environment, which gives them one order"

AXIS_NAMES = {"dp": "data-parallel", "tp": "tensor-parallel"}


def refusal(
    site: Site,
    shapes: Sequence[Shape],
    mesh: Mesh,
    unknown: Sequence[str],
    obstacles: Mapping[str, Obstacle],
    rows_dim: int | None,
    prints: Fingerprints | None,
    statements: Statements | None,
) -> str:
    """Return the message for a tensor with unknown axes. It lists what the ranks' shapes allow, the
    most likely first: which one is right, only the user knows.

    Args:
        prints: The ranks' values, where they were compared.
    """
    parts, lines, advice, placements = [], [], "", "torch.distributed.tensor"
    pattern = repr(site.module)
    if statements is not None and site.kind in KINDS:
        pattern = statements.text_of_name(site.kind, site.module)
    for axis in unknown:
        obstacle = obstacles.get(axis, Obstacle(""))
        lost = f" (lost at {obstacle})" if obstacle.text else ""
        parts.append(
            f"how the tensor is placed over the {AXIS_NAMES[axis]} ranks is not known{lost}"
        )
        advice += _advice_of_text(axis, obstacle.text)
        reason, subject = obstacle.cause or (None, "")
        if obstacle.difference or reason is Reason.OTHERS:
            advice += (
                "; where the model goes through a set (for kind in set(layer_types): ...), "
                f"{ONE_ORDER}"
            )
        advice += _advice_of_reason(axis, reason, subject)
        if axis == "dp" and site.kind != "parameter":
            lines.append('FlexModel(..., dp_batch="local")  # each data-parallel rank its own rows')
        is_equal = None if prints is None else prints.equal_along(axis)
        own = [shapes[place] for place in mesh.ranks_along((axis,), 0)]
        ndim = len(own[0])
        if axis == "tp":
            dims = [*reversed(range(ndim))]
        else:
            dims = sorted(range(ndim), key=lambda dim: dim != rows_dim)
            if any(len({shape[dim] for shape in own}) > 1 for dim in dims if dim != rows_dim):
                dims = []  # rows of other lengths, which don't lie end to end
                advice += f"; {PAD}"
        if axis == "dp" and obstacle.text.startswith("cat"):
            dims = [dim for dim in dims if dim != rows_dim]
            advice += (
                "; where a rank's rows are those of several tensors, one behind the other, state "
                f"how many rows each has in full: dp=Shard({rows_dim or 0}), part_sizes="
            )
        num_parts = obstacle.num_parts
        shards = [Shard(dim, num_parts if dim == rows_dim else 1) for dim in dims]
        for placement, full in _candidates(own, shards, site.kind != "parameter", is_equal):
            note = _NOTES[type(placement)]
            if isinstance(placement, Shard) and placement.parts > 1:
                note += f" of each of {num_parts} blocks of rows"
                placements = "flex_model.distributed.placement"  # torch's Shard has no parts
            if isinstance(placement, Replicate) and is_equal is False:
                note += ", whose values differ: right only if by the order of sums"
            lines.append(f"{_line(site, pattern, axis, placement)}  # in full {full}: {note}")
    listed = "".join(f"\n    {line}" for line in lines)
    both = ""
    if len(unknown) > 1:
        both = ", both axes in one dict" if _is_of_hook(site) else ", one line for each axis"
    return (
        f"{site.name}: {'; '.join(parts)} (local shapes {unique(shapes)}, {mesh.describe()})"
        f"{advice}; state it before the run with the line that is right{both}, and from "
        f"{placements} import Partial, Replicate, Shard:{listed}\n"
        "flex.layouts(why=True) says what could not be followed"
    )


def _advice_of_text(axis: str, text: str) -> str:
    """Return the advice for an input or operation of this name."""
    advice = ""
    if text.startswith("state in "):
        advice += "; fill a cache by forwards in which a hook is active, or state its tensors"
    if text.startswith(("input ", "state in ")):
        advice += (
            "; where ranks are given shards as inputs, state these: kind='forward_pre' of "
            "re.compile('^$'), with the input's index=; where generate() computed it before "
            "the model's forward, as transformers does with encoders, call the forward itself"
        )
    if axis == "tp" and text.startswith(("chunk", "split")):
        advice += (
            "; where a layer's shard has a part of each of several fused tensors (q, k and v), "
            "state the parts of its weight: kind='parameter', tp=Shard(0), part_sizes="
        )
    return advice


def _advice_of_reason(axis: str, reason: Reason | None, subject: str) -> str:
    match reason:
        case Reason.NOT_MADE:
            return (
                "; it is kept in a cache or a global variable, is numpy's memory, or sparse in "
                "another format than COO: clear the cache before the run, hold the tensor in an "
                "attribute of a module, or, where all ranks have the same, state what a module "
                f"returns of it: flex.annotate_layout(..., kind='forward', {axis}=Replicate())"
            )
        case Reason.INTO_WHOLE:
            return (
                "; where each rank's buffer is its part of a larger one, state that, with its dim: "
                f"flex.annotate_layout({subject}, kind='parameter', {axis}=Shard(...))"
            )
        case Reason.WITH_WHOLE:
            return (
                f"; where {subject} is a state that an earlier run left, drop it before this one: "
                "set it to None, or call a model of transformers once with use_cache=False"
            )
    return ""


_NOTES: dict[type, str] = {
    Replicate: "the same on all ranks",
    Shard: "a part on each rank",
    Partial: "a sum over the ranks",
}


def _candidates(
    own: Sequence[Shape], shards: Sequence[Shard], may_be_partial: bool, is_equal: bool | None
) -> list[tuple[Placement, Shape]]:
    """Return the placements along an axis that the shapes along it allow, and the full shape of
    each.
    """
    placements: list[Placement] = [*shards]
    if len(set(own)) == 1:
        placements += [Partial()] * may_be_partial
        placements.insert(0 if is_equal else len(placements), Replicate())
    found = []
    for placement in placements:
        try:
            full = ShardLayout(tp=placement).full_shape(own, 1, len(own))
        except ValueError:
            continue
        found.append((placement, full))
    return found


def _is_of_hook(site: Site) -> bool:
    """Whether only the hook itself can state its tensor: ``annotate_layout`` knows no gradients and
    no names of tensors.
    """
    return site.is_gradient or not site.kind or isinstance(site.index, str)


def _line(site: Site, pattern: str, axis: str, placement: Placement) -> str:
    text = text_of(placement)
    if _is_of_hook(site):
        which = f", unpack_idx={site.index!r}" if site.index else ""
        return f'HookFunction({site.module!r}{which}, placements={{"{axis}": {text}}})'
    which = f", index={site.index}" if site.index else ""
    return f"flex.annotate_layout({pattern}, kind={site.kind!r}{which}, {axis}={text})"

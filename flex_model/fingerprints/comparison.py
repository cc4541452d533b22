"""``flex_model.compare``: where two runs first differ."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flex_model.distributed.tensor_dicts import describe, from_rank
from flex_model.fingerprints.fingerprint_folder import (
    Folder,
    RecordedRun,
    as_json,
    of_json,
    read_run,
)
from flex_model.fingerprints.first_difference import Difference, judged
from flex_model.fingerprints.recorded_run import on_rank_0, record_run
from flex_model.fingerprints.summary import Summary, finished, summed
from flex_model.inspection import text
from flex_model.inspection.second_core import Loss

if TYPE_CHECKING:
    from flex_model.hooks.core import HookCore
    from flex_model.model import FlexModel

#: By a pattern of names of A, the pattern in B, or that and what makes A's tensor of B's.
Names = Mapping[str, str | tuple[str, Callable[[Tensor], Tensor]]]
_SHOWN = 40  # rows of a table


@dataclass(frozen=True)
class Comparison(text.Printed):
    """Two runs, site by site. ``print`` it. The same on every rank.

    Attributes:
        rows: All sites that both runs have, in A's order of execution.
        unmatched: Sites of one run without a partner, and those that were refused, in words.
        lost: Of those in A only: gradients of parameters that got none in B's backward, and calls
            of modules that B calls less often. One that it never calls may be part of a kernel.
    """

    rows: tuple[Difference, ...]
    unmatched: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()

    @property
    def differences(self) -> tuple[Difference, ...]:
        """The sites that differ by more than sums in another order, in the order of execution."""
        return tuple(row for row in self.rows if row.differs)

    @property
    def first(self) -> Difference | None:
        """The first site that differs by more than what it inherits; None: there is none."""
        return next((row for row in self.rows if row.is_own), None)

    @property
    def is_equal(self) -> bool:
        """Whether no site differs by more than what it inherits, and none is lost."""
        return self.first is None and not self.lost

    def show(self, html: Folder) -> None:
        """Write a page that needs no other file and no network: the modules in the order of
        execution, by depth, with differences as colours; a click shows positions and ranks.
        """
        from flex_model.visualize.html import filled

        numbers = ("ulps", "inherited", "bound")  # as text: JSON has no infinity
        rows = [
            asdict(row)
            | {name: f"{getattr(row, name):.3g}" for name in numbers}
            | {"differs": row.differs, "first": row is self.first}
            for row in self.rows
        ]
        data = {"summary": self.summary(), "rows": rows, "unmatched": self.unmatched}
        Path(html).write_text(filled("comparison.html", data), "utf-8")

    def _blocks(self) -> Iterator[text.Table | str]:
        differences, first = self.differences, self.first
        if differences:
            headers = ("site", "kind", "call", "ulps", "inherited", "")
            cells = [
                [text.site(d.name, 0), d.kind, str(d.call), f"{d.ulps:.3g}", f"{d.inherited:.3g}"]
                + ["<- first" if d is first else d.text]
                for d in differences[:_SHOWN]
            ]
            yield text.Table(headers, cells)
        if len(differences) > _SHOWN:
            yield f"and {len(differences) - _SHOWN} more"
        yield self.summary()
        if self.unmatched:
            yield f"without a partner: {len(self.unmatched)} (see unmatched)"

    def summary(self) -> str:
        """Return how many sites differ, and the first, in a line."""
        first, counts = self.first, f"{len(self.differences)} of {len(self.rows)} sites differ"
        if self.lost:
            counts += f"; {len(self.lost)} are lost in B, such as {self.lost[0]}"
        if first is None:
            return counts + ", none by more than it inherits" * bool(self.differences)
        what = first.text or f"{first.ulps:.3g} ulps, of which {first.inherited:.3g} inherited"
        by = text.site(first.module, 0)
        return f"{counts}; the first: {_shown(first)}, computed by {by}: {what}"


def compare(
    a: Folder, b: Folder | FlexModel, names: Names | None = None, own: bool = False
) -> Comparison:
    """Compare two recorded runs, or one with a live model, site by site; name the first that
    differs.

    Example::

        flex.fingerprint("before", tokens)             # unsharded, say
        ...
        print(flex_model.compare("before", "after"))   # folders
        print(flex_model.compare("before", flex))      # a live model, sharded in any way

    A difference is measured in units of the dtype's rounding, relative to the site's own scale
    (`Difference.ulps`). One within the bound of sums in another order is none. The **first** is the
    first site, in the order of execution, whose difference is larger than what it inherits from its
    inputs can grow to; those after it may be its followers.

    Args:
        a: The folder of ``FlexModel.fingerprint``.
        b: Another one; or a FlexModel, which is run with A's inputs (collective over its ranks).
        names: Where names differ, patterns of A's names and B's, such as
            ``{"model.layers.*.mlp": "decoder.layers.*.mlp"}``: ``*`` is one part of a name, and
            what is below a module follows it, ``""`` is the model. The longest one counts. Of a
            part of a fused output: ``{"layers.*.q": ("layers.*.qkv", lambda qkv: qkv[..., :512])}``
            has a function that makes A's tensor of B's, which B must have kept (``tensors=True``).
        own: Run B's modules on A's recorded inputs (``tensors=True``), instead of B's own: then
            ``ulps`` is a module's own error, also behind others. The first tensor alone is A's: a
            module that gets several still has B's others. For a live B.

    Raises:
        ValueError: a folder without a whole fingerprint, of inputs that were not kept; ``own`` for
            a folder, or of one without tensors; a pattern in ``names`` that is none of A's. On
            every rank.
    """
    if isinstance(b, (str, os.PathLike)):
        if own:
            raise ValueError(
                "compare: own=True feeds A's inputs to B's modules; give B as a FlexModel"
            )
        run = read_run(a)
        check_names(names, run)
        return compared(run, read_run(b), names)
    if not hasattr(b, "verify"):
        raise TypeError(f"compare: expected a folder or a FlexModel, got {type(b).__name__}")
    found: Any = b.verify(a, names=names, own=own)
    return found


def compare_live(
    core: HookCore,
    a: Folder,
    inputs: tuple[Any, Any],
    loss: Loss | None,
    names: Names | None,
    own: bool,
) -> Comparison:
    """Run ``FlexModel.verify`` of a folder: fingerprint the model, and compare. Collective."""
    runs: list[RecordedRun] = []

    def read() -> list[Any]:
        run = read_run(a)
        if own and not run.has_tensors:
            raise ValueError(f"compare: own=True needs full tensors; record {a} with tensors=True")
        check_names(names, run)
        runs.append(run)
        structure, tensors = as_json(run.inputs)
        return [run.has_tensors, structure, describe(tensors)]

    has_tensors, structure, described = on_rank_0(core, "compare", read)
    if not any(inputs):
        if structure is None or core.mesh.dp_size > 1:
            raise ValueError(
                f"compare: the inputs in {a} are not this rank's (data-parallel ranks have rows of "
                "their own), or of a type that a file can't hold; give them: flex.verify(folder, "
                "*inputs)"
            )
        tensors = as_json(runs[0].inputs)[1] if runs else []
        tensors = from_rank(core.communicator, 0, tensors, described)
        device = next((one.device for one in core.module.parameters()), torch.device("cpu"))
        inputs = of_json(structure, [one.to(device) for one in tensors])
    inputs_of_a = {
        (partner_of(one.name, names, one.kind)[0], one.call): one.read_full
        for one in (runs[0].sites if runs else ())
        if one.kind == "forward_pre" and one.read_full is not None
    }
    with tempfile.TemporaryDirectory(prefix="flex_model-") as folder:
        fed, loss = (inputs_of_a, None) if own else (None, loss)
        record_run(core, folder, inputs, loss, has_tensors, replacements=fed)
        found = on_rank_0(
            core, "compare", lambda: asdict(compared(runs[0], read_run(folder), names))
        )
    rows = tuple(map(Difference.of_json, found["rows"]))
    return Comparison(rows, tuple(found["unmatched"]), tuple(found["lost"]))


def compared(a: RecordedRun, b: RecordedRun, names: Names | None = None) -> Comparison:
    """Compare two runs; see ``compare``. Local."""
    by_key = {site.key: site for site in b.sites}
    pairs, unmatched, lost, used = [], [], [], set()
    has_gradients = any(site.kind == "tensor" for site in b.sites)
    for site in a.sites:
        name, make = partner_of(site.name, names, site.kind)
        key = (name, site.kind, site.call)
        other = by_key.get(key)
        if other is None:
            unmatched.append(f"in A only: {_shown(site)}")
            # Gradients of activations depend on what the inputs require.
            is_call = site.kind in ("forward_pre", "forward")
            is_lost = is_call and (name, site.kind, 0) in by_key
            if site.kind == "tensor":
                is_refused = f"gradient of {name}" in b.refused
                is_lost = has_gradients and name in b.parameters and not is_refused
            if is_lost:
                lost.append(_shown(site))
            continue
        used.add(key)
        if make is not None and site.kind in ("tensor", "full_backward"):
            # Of all parts together: the function makes a part of an output.
            unmatched.append(f"{_shown(site)}: {_shown(other)} is of other parts, too")
            continue
        if make is not None and site.kind in ("forward", "full_backward_pre"):
            if other.read_full is None:
                unmatched.append(f"{_shown(site)}: a part of {_shown(other)}, without tensors=True")
                continue
            part = make(other.read_full())
            (made,) = finished([summed(part, *other.key)])
            other = replace(made, read_full=part.clone, layout=other.layout)
        pairs.append((site, other))
    unmatched += [f"in B only: {_shown(site)}" for key, site in by_key.items() if key not in used]
    # The model's own input is the same whatever the models are.
    if all((one.name, one.kind) == ("", "forward_pre") for one, _ in pairs):
        raise ValueError(
            "compare: no site of A but the input is in B; give names=, patterns such as "
            f"{{'layers.*': 'blocks.*'}}. Of A: {unmatched[:2]}"
        )
    for run, letter in ((a, "A"), (b, "B")):
        unmatched += [f"refused in {letter}: {site}: {why}" for site, why in run.refused.items()]
    rows = judged(pairs, {(name, call) for name, call in b.replaced})
    return Comparison(tuple(rows), tuple(unmatched), tuple(lost))


def _shown(site: Summary | Difference) -> str:
    return f"{site.kind} of {text.site(site.name, 0)}, call {site.call}"


def check_names(names: Names | None, a: RecordedRun) -> None:
    """TypeError or ValueError for patterns of ``compare`` that are of no site of A."""
    expected = "compare: names must be a dict of texts to texts, or to (text, function)"
    if not isinstance(names, Mapping | None):
        raise TypeError(f"{expected}; got {type(names).__name__}")
    for ours, value in (names or {}).items():
        other, *make = value if isinstance(value, tuple) else (value,)
        is_text = isinstance(ours, str) and isinstance(other, str)
        if not is_text or len(make) > 1 or not all(map(callable, make)):
            raise TypeError(f"{expected}; got {ours!r}: {value!r}")
    of_a = {site.name for site in a.sites} | {site.rpartition(" of ")[2] for site in a.refused}
    unused = [ours for ours in names or () if not any(_match(ours, name) for name in of_a)]
    if unused:
        raise ValueError(
            f"compare: {unused} in names match no site of A, whose names are such as "
            f"{sorted(of_a)[:5]}; give patterns of A's names as keys"
        )


def _match(pattern: str, name: str) -> re.Match[str] | None:
    whole = name if pattern or not name else f".{name}"  # all is below the model
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"([^.]+)") + r"(\..*)?", whole)


def partner_of(
    name: str, names: Names | None, kind: str
) -> tuple[str, Callable[[Tensor], Tensor] | None]:
    """Return B's name for one of A's, and what makes A's tensor of B's, of a module that a pattern
    names with one, and of its parameters. The same name where no pattern matches.
    """
    names = names or {}
    for ours in sorted(names, key=lambda one: (-one.count("."), one.count("*"))):
        matched = _match(ours, name)
        if matched is None:
            continue
        value = names[ours]
        other, make = value if isinstance(value, tuple) else (value, None)
        *parts, below = matched.groups()
        if other.count("*") != len(parts):
            raise ValueError(f"compare: names {ours!r} and {other!r} differ in their number of *")
        for part in parts:
            other = other.replace("*", part, 1)
        return (other + (below or "")).lstrip("."), None if below and kind != "tensor" else make
    return name, None

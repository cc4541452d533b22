"""Experiments of several runs: activation patching, path patching, attribution patching.

They use the public API of FlexModel: they register hooks, run the model and read records. Only
their own hooks and those of ``groups=`` are active; afterwards their hooks and records are removed.
Every rank calls them in the same way, with the same inputs unless the model is data parallel, and
gets the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from flex_model.diagnostics import progress_bar
from flex_model.editing.edit import Edit, Scope, chain
from flex_model.editing.patch_batches import Copies, Table, described
from flex_model.editing.patching import Capture, patch
from flex_model.editing.region import Region
from flex_model.editing.runs import (
    NO_GRADIENT,
    Inputs,
    Metric,
    Runs,
    Site,
    as_site,
    as_sites,
    check_count,
    check_counts_in_call,
    check_left_out,
    check_metric,
    check_takes_gradients,
    whole_site,
)
from flex_model.errors import agreed
from flex_model.hooks.function import name_of
from flex_model.model import FlexModel
from flex_model.selection.selectors import Selector


@dataclass(frozen=True)
class PatchingMap:
    """The metric of each patched run, by site and position.

    Attributes:
        values: ``(sites, positions)``, float64, on the CPU, the same on every rank.
        clean, corrupted: The metric without patches; None for attribution patching.
        sites, positions: The labels of the dims of ``values``. Of sites that select other positions
            than each other, these are numbered from 0.
    """

    values: Tensor
    clean: float | None
    corrupted: float | None
    sites: tuple[Site, ...]
    positions: tuple[Selector, ...]

    @property
    def recovered(self) -> Tensor:
        """The metric scaled to 0 for the corrupted run and 1 for the clean run."""
        if self.clean is None or self.corrupted is None:
            raise ValueError(
                "recovered: attribution patching estimates changes of the metric; use values"
            )
        return (self.values - self.corrupted) / (self.clean - self.corrupted)


@torch.no_grad()
def activation_patching(
    flex: FlexModel,
    clean: Inputs,
    corrupted: Inputs,
    sites: Iterable[Site | str],
    metric: Metric,
    *,
    output: Site | str = "",
    positions: Sequence[Selector] | None = None,
    batch: int = 1,
    resume: str | Path | None = None,
    progress: bool = False,
    groups: Iterable[str] = (),
) -> PatchingMap:
    """Run the corrupted inputs with one activation patched in from the clean run, for each site
    and position (Meng et al. 2022, "causal tracing"; Zhang and Nanda 2024).

    Example::

        layers = [f"model.layers.{i}" for i in range(32)]
        found = activation_patching(flex, clean, corrupted, layers, logit_difference)
        found.recovered    # (layers, positions)

    Runs ``2 + ceil(sites * positions / batch)`` forwards, without gradients. Each rank that runs
    edits keeps the clean activations of all sites.

    Args:
        clean, corrupted: A tensor, a sequence of positional or a mapping of keyword arguments, with
            equal shapes. Under data parallelism each rank passes its own rows.
        sites: Sites, or names of modules (their outputs); each must be called once in a forward.
        metric: A function of the full output of the whole batch, on the CPU, that returns a number.
            Called on rank 0.
        output: The site of that output: by default the model's first tensor. In a pipeline name
            the last module ("lm_head").
        positions: The positions to patch, one after the other; each may be a slice or "every".
            Default: each position of the sites' activations, which must have as many.
        batch: The number of patches in one forward: the rows of all inputs that have as many as the
            first one are repeated so often, and each copy is patched elsewhere. The captured
            activations are as many times larger.
        resume: A file: rank 0 writes each forward's values to it, and a later call with the same
            inputs, sites, positions and edits continues. Other weights or metrics are noticed by
            the metric of the two runs without patches, if that differs by more than a thousandth of
            the difference between the two.
        progress: Show a bar on rank 0's terminal.
        groups: Groups of further hooks that are active in all runs; with ``batch`` above 1 without
            editing functions, which would get the copies of the rows as one batch.

    Collective over the ranks of the model.

    Raises:
        ValueError: sites or inputs that don't match the model or each other; a file of ``resume``
            that can't be written, or of another experiment.
        RuntimeError: called during a run.
        HookError: the metric failed, or an edit; on every rank.
    """
    places = as_sites(sites, "sites")
    check_metric(metric)
    check_left_out(places, "positions", "activation_patching patches those of positions=")
    chosen = None if positions is None else _as_positions(positions)
    check_count(batch, "batch must be a positive number of patches")
    current: list[Edit] = [patch(Capture())] * len(places)

    def apply_current(i: int, full: Tensor, scope: Scope) -> Tensor:
        if copies.number > 1:
            copies.dim_of_rows(full, places[i])
        return current[i].apply(full, scope)

    watched = whole_site(output)
    with Runs(flex, groups) as runs:
        runs.check_shapes(clean, corrupted)
        runs.watch(watched, "output")
        number = batch if chosen is None else min(batch, len(places) * len(chosen))
        if number > 1:
            runs.check_no_group_edits("batch")
        copies = Copies.of(runs, clean, places, number) if number > 1 else Copies(1)
        captures = [runs.capture(site, "clean") for site in places]
        for i, site in enumerate(places):
            runs.register(site, Edit("patch", partial(apply_current, i)), f"site {i}")
        key = {
            "inputs": runs.exchange([described(clean), described(corrupted)]),
            "sites": [[repr(site), described(site.where)] for site in (*places, watched)],
            "positions": None if chosen is None else [repr(chosen), described(chosen)],
            "hooks": [[h.module_name, name_of(h.editing_function)] for _, h in runs.group_edits()],
        }
        table = Table(runs, resume, key)

        def of_copy(copy: int) -> Metric:
            return lambda record: metric(copies.take(record, watched, copy))

        clean, corrupted = copies.inputs(clean), copies.inputs(corrupted)
        ends = [
            runs.measure(clean, of_copy(0), "output", "clean"),
            runs.measure(corrupted, of_copy(0), "output"),
        ]
        runs.on_rank_0(lambda: None)  # before all others, the error of a metric that failed
        table.begin(ends)
        if chosen is None:
            chosen = _captured_positions(runs, places, captures)
        patches = [(i, position) for i in range(len(places)) for position in chosen]
        starts = range(len(table.values), len(patches), copies.number)
        for start in progress_bar.progress(starts, "patched runs", progress and runs.is_rank_0):
            carried: dict[int, list[Edit]] = {}
            for copy, (i, position) in enumerate(patches[start : start + copies.number]):
                where = copies.where(places[i], position, copy)
                carried.setdefault(i, []).append(patch(captures[i], **where))
            for i, edits in carried.items():
                current[i] = chain(*edits)
            runs.run(corrupted, "output", *(f"site {i}" for i in carried))
            num_patches = min(copies.number, len(patches) - start)
            table.add([runs.metric_of(of_copy(copy), "output") for copy in range(num_patches)])
        first, second, *rest = runs.on_rank_0(lambda: [*ends, *table.values])
    values = torch.tensor(rest, dtype=torch.float64, device="cpu").reshape(len(places), len(chosen))
    return PatchingMap(values, first, second, places, chosen)


@torch.no_grad()
def path_patching(
    flex: FlexModel,
    inputs: Inputs,
    other: Inputs,
    sender: Site | str,
    receivers: Iterable[Site | str],
    frozen: Iterable[Site | str],
    metric: Metric,
    *,
    output: Site | str = "",
    groups: Iterable[str] = (),
) -> tuple[float, float]:
    """Measure the effect of patching ``sender`` from the run of ``other``, where the change reaches
    ``receivers`` only along paths that avoid ``frozen`` (Wang et al. 2023; Goldowsky-Dill et al.
    2023).

    Example::

        heads = [Site(f"model.layers.{i}.self_attn.o_proj", "input") for i in range(8)]
        head = Site(heads[2].module, "input", {"heads": 3, "num_heads": 8})
        before, after = path_patching(flex, x, y, head, ["model.norm"], heads, metric)

    1. A run of ``other`` captures the sender. 2. A run of ``inputs`` captures the frozen sites.
    3. A run of ``inputs`` with the sender patched and the frozen sites held captures the receivers.
    4. A run of ``inputs`` with the receivers patched gives the metric.

    Args:
        frozen: The sites held at their values in the run of ``inputs``; sender and receivers may be
            among them, and are then held except for their own patches.
        inputs, other, metric, output, groups: As in `activation_patching`.

    Returns:
        The metric of ``inputs`` without and with the patch; the same on every rank.

    Collective over the ranks of the model. Raises: as `activation_patching`.
    """
    check_metric(metric)
    sender = as_site(sender)
    receiver_sites, held = as_sites(receivers, "receivers"), as_sites(frozen, "frozen")
    with Runs(flex, groups) as runs:
        runs.check_shapes(inputs, other)
        runs.watch(whole_site(output), "output")
        sent = runs.capture(sender, "sender")
        received = [runs.capture(site, "held") for site in receiver_sites]  # before they are held
        for site in held:
            kept = runs.capture(site, "frozen")
            runs.register(site, patch(kept, **site.where), "held")
        runs.register(sender, patch(sent, **sender.where), "held")
        for site, kept in zip(receiver_sites, received):
            runs.register(site, patch(kept, **site.where), "receivers")
        runs.run(other, "sender")
        before = runs.measure(inputs, metric, "output", *(["frozen"] if held else []))
        runs.on_rank_0(lambda: None)  # the error of a metric that failed
        runs.run(inputs, "held")
        after = runs.measure(inputs, metric, "output", "receivers")
        first, second = runs.on_rank_0(lambda: [before, after])
    return first, second


def attribution_patching(
    flex: FlexModel,
    clean: Inputs,
    corrupted: Inputs,
    sites: Iterable[Site | str],
    metric: Metric | None = None,
    *,
    output: Site | str = "",
    target: Tensor | None = None,
    groups: Iterable[str] = (),
) -> PatchingMap:
    """Estimate activation patching to first order: ``(clean - corrupted) * gradient`` of the metric
    at the corrupted run, summed over rows and units (Nanda 2023, "attribution patching").

    Example::

        change = attribution_patching(flex, clean, corrupted, layers, logit_difference).values

    Runs two forwards and one backward for all sites and positions. The ``.grad`` of parameters is
    restored when it returns.

    Args:
        metric: A function of the full output of the whole batch, on the CPU, that returns a
            differentiable tensor of one element; called on every rank. In a pipeline it must be
            None: the backward is that of the schedule's ``loss_fn``, with ``target``, so make the
            metric the ``loss_fn``.
        clean, corrupted, sites, output, groups: As in `activation_patching`.

    Returns:
        ``values``: the estimated change of the metric ``(sites, positions)``, for every position
        (of ``where``, if that selects positions; outside of a mask ``(rows, positions)`` it is 0).

    Collective over the ranks of the model.

    Raises:
        ValueError: no gradient reaches a site, because nothing before it requires one; a metric in
            a pipeline, or no metric elsewhere; ``edit_on="rank0"``; between micro-batches whose
            gradients FSDP has not reduced; hooks of ``register_post_accumulate_grad_hook``.
        HookError: the metric failed; on every rank.
    """
    places = as_sites(sites, "sites")
    if metric is not None:
        check_metric(metric)
    check_counts_in_call(places, "attribution_patching")
    is_pipeline = "schedule" in vars(flex)
    if is_pipeline and (metric is not None or flex.schedule._loss_fn is None):
        raise ValueError(
            "attribution_patching: a pipeline's backward is that of its schedule; make the "
            "schedule with loss_fn=, leave out metric=, and give target="
        )
    if not is_pipeline and (metric is None or target is not None):
        raise ValueError("attribution_patching: give metric=; target= is for pipelines")
    if not is_pipeline:
        check_takes_gradients(flex, "attribution_patching")
    loss: list[Tensor] = []
    with (
        Runs(flex, groups) as runs,
        runs.restored_gradients("attribution_patching"),
        torch.enable_grad(),
    ):
        runs.check_shapes(clean, corrupted)
        for i, site in enumerate(places):
            runs.watch(site, f"{i}", "sites")
            runs.watch(site, f"{i}.grad", "gradients", is_gradient=True)
        if metric is not None:
            measure = Edit("metric", lambda full, scope: loss.append(metric(full.cpu())))
            runs.register(whole_site(output), measure, "metric")
        with torch.no_grad():
            runs.run(clean, "sites")
        before = [runs.record(f"{i}") for i in range(len(places))]
        if is_pipeline:
            runs.run(corrupted, "sites", "gradients", target=target)
        else:
            runs.run(corrupted, "sites", "gradients", "metric")
            runs.backward(loss[-1], "attribution_patching")

        def estimate() -> list[list[tuple[int, float]]]:
            maps = [
                _first_order(site, before[i], runs.record(f"{i}"), runs.record(f"{i}.grad"))
                for i, site in enumerate(places)
            ]
            found = {len(of_site): site for of_site, site in zip(maps, places, strict=True)}
            if len(found) > 1:
                raise ValueError(_differing(found, "select as many in each where="))
            return maps

        maps = runs.on_rank_0(estimate, ValueError)
    pairs = torch.tensor(maps, dtype=torch.float64, device="cpu").reshape(len(places), -1, 2)
    chosen, values = pairs.unbind(-1)
    labels = chosen[0].int().tolist() if chosen.eq(chosen[0]).all() else range(chosen.shape[1])
    return PatchingMap(values, None, None, places, tuple(labels))


def _first_order(
    site: Site, clean: Tensor | None, corrupted: Tensor | None, gradient: Tensor | None
) -> list[tuple[int, float]]:
    """Return the selected positions, each with the estimated change of the metric."""
    if clean is None or corrupted is None or gradient is None:
        raise ValueError(NO_GRADIENT.format("attribution_patching", f"{site.module!r}"))
    product = (clean - corrupted).double() * gradient.double()
    region = Region(**site.where)
    dim = region.dim("positions", product.shape)
    by_position = region.only(product).movedim(dim, 0).flatten(1).sum(1).tolist()
    chosen = region.numbers(product.shape).get(dim, range(len(by_position)))
    return [(position, by_position[position]) for position in chosen]


def _as_positions(positions: Sequence[Selector]) -> tuple[Selector, ...]:
    if isinstance(positions, str) or not isinstance(positions, Iterable):
        raise TypeError(
            f"positions must be a list of positions to patch one by one, got {positions!r}; "
            f"for one position give [{positions!r}]"
        )
    return tuple(positions)


def _captured_positions(
    runs: Runs, places: Sequence[Site], captures: Sequence[Capture]
) -> tuple[Selector, ...]:
    """Return each position of the captured activations. Collective: a rank may have none of them.

    Raises:
        ValueError: sites with different numbers of positions, or none was called; on every rank.
    """
    found: dict[int, Site] = {}
    for shapes in runs.exchange([capture.shape for capture in captures]):
        for site, shape in zip(places, shapes, strict=True):
            if shape is not None:
                found[shape[Region(**site.where).dim("positions", shape)]] = site
    if places and len(found) != 1:
        raise agreed(ValueError(_differing(found, "give positions=")))
    return tuple(range(max(found, default=0)))


def _differing(found: Mapping[int, Site], remedy: str) -> str:
    """Return the error text for sites with these numbers of positions."""
    numbers = ", ".join(f"{number} at the {s.side} of {s.module!r}" for number, s in found.items())
    return (
        "the sites must have the same number of positions, got "
        f"{numbers or 'no site that the model calls'}; call it once for each number, or {remedy}"
    )

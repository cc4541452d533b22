"""Experiments on gradients: scores of edges by integrated gradients, and the Jacobian lens.

They run as those of `experiments`, on any sharding: gradients arrive in full at every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from flex_model.editing.edit import Edit, Scope
from flex_model.editing.patch_batches import Copies
from flex_model.editing.region import Region
from flex_model.editing.runs import (
    Inputs,
    Metric,
    Runs,
    Site,
    as_sites,
    check_count,
    check_counts_in_call,
    check_metric,
    check_takes_gradients,
    whole_site,
)
from flex_model.model import FlexModel
from flex_model.names import find_module
from flex_model.runs.graphs import nodes_behind
from flex_model.selection.selectors import Selector


def integrated_gradients(
    flex: FlexModel,
    clean: Inputs,
    corrupted: Inputs,
    senders: Iterable[Site | str],
    receivers: Iterable[Site | str],
    metric: Metric,
    *,
    embedding: Site | str,
    steps: int = 5,
    output: Site | str = "",
    groups: Iterable[str] = (),
) -> Tensor:
    """Score edges of the residual stream: the change of the metric, to first order, when a receiver
    reads the clean output of a sender in the corrupted run. Gradients are averaged over inputs
    between both (EAP-IG: Hanna et al. 2024, "Have faith in faithfulness").

    Example::

        heads = [Site(f"model.layers.{i}.self_attn.o_proj", "input", {"heads": h, "num_heads": 8})
                 for i in range(12) for h in range(8)]
        readers = [f"model.layers.{i}.input_layernorm" for i in range(12)]
        found = integrated_gradients(flex, clean, corrupted, heads,
                                     [*readers, "model.norm"], logit_difference,
                                     embedding="model.embed_tokens")
        found[:, -1]  # the direct effect of each head on the logits

    Runs three forwards and one backward; the last forward has ``steps`` copies of the rows. The
    ``.grad`` of parameters is restored when it returns.

    Args:
        senders: What is added to the residual stream: outputs of modules; or inputs of linear
            modules whose output is added (heads before ``o_proj``, neurons before ``down_proj``).
        receivers: Where the stream is read: names of the layers' norms, whose inputs are meant; or
            Sites whose tensor is the stream.
        embedding: The module whose output is interpolated.
        steps: The points at which gradients are taken, at ``1 / steps, 2 / steps ... 1``.
        clean, corrupted, output, groups: As in `activation_patching`; edits of ``groups`` get the
            copies of the rows as one batch.
        metric: As in `attribution_patching`.

    Returns:
        The estimated change of the metric, ``(senders, receivers)``, float64, on the CPU, the same
        on every rank; 0 where the receiver does not depend on the sender: it reads before, or in a
        branch beside it (attention and MLP of GPT-NeoX).

    Collective over the ranks of the model.

    Raises:
        ValueError: sites of other shapes; as `attribution_patching`.
        RuntimeError: a pipeline; or called during a run.
        HookError: the metric failed; on every rank.
    """
    from_sites, to_sites = as_sites(senders, "senders"), as_sites(receivers, "receivers", "input")
    check_metric(metric)
    check_count(steps, "steps must be a positive number of points")
    check_counts_in_call([*from_sites, *to_sites], "integrated_gradients")
    check_takes_gradients(flex, "integrated_gradients")
    start, end = whole_site(embedding), whole_site(output)
    # Sites that differ in what they select share a tensor.
    added, read = ({_place(site): site for site in sites} for sites in (from_sites, to_sites))
    found: dict[_Place, Tensor] = {}
    without_graph: list[str] = []
    loss: list[Tensor] = []
    gradients: dict[_Place, Tensor] = {}
    with (
        Runs(flex, groups) as runs,
        runs.restored_gradients("integrated_gradients"),
        torch.enable_grad(),
    ):
        runs.check_shapes(clean, corrupted)
        copies = Copies.of(runs, corrupted, (), steps)
        rows = copies.all_rows
        clean_values, corrupted_values = (
            {_place(site): runs.capture(site, run) for site in (*added.values(), start)}
            for run in ("clean", "corrupted")
        )

        def change_of(place: _Place) -> Tensor:
            return clean_values[place].of(None) - corrupted_values[place].of(None)

        def interpolate(full: Tensor, scope: Scope) -> Tensor:
            low, change = corrupted_values[_place(start)].of(None), change_of(_place(start))
            full = full.detach().clone()
            dim = copies.dim_of_rows(full, start)
            for step, of_copy in enumerate(rows, 1):
                full.index_copy_(dim, of_copy.to(full.device), low + change * (step / steps))
            return full.requires_grad_()

        def measure(full: Tensor, scope: Scope) -> None:
            full = full.cpu()
            loss.append(sum(metric(copies.take(full, end, i)) for i in range(steps)) / steps)

        def keep(place: _Place, grad: Tensor, scope: Scope) -> None:
            dim = copies.dim_of_rows(grad, read[place])
            of_copies = grad.detach().movedim(dim, 0)[rows].sum(0)
            gradients[place] = of_copies.movedim(0, dim).double()

        def note(place: _Place, full: Tensor, scope: Scope) -> None:
            if not torch.is_grad_enabled():
                without_graph.append(place[0])
            found[place] = full  # so it is in the graph

        runs.register(start, Edit("interpolate", interpolate), "steps")
        for place, site in {**added, **read}.items():
            runs.register(site, Edit("graph", partial(note, place)), "steps")
        for place, site in read.items():
            runs.register(site, Edit("gradient", partial(keep, place)), "steps", is_gradient=True)
        runs.register(end, Edit("metric", measure), "steps")
        with torch.no_grad():
            runs.run(clean, "clean")
            runs.run(corrupted, "corrupted")
        runs.run(copies.inputs(corrupted), "steps")
        if without_graph:
            raise ValueError(
                f"integrated_gradients: {without_graph[0]!r} runs without gradients (torch.no_grad,"
                " a reentrant checkpoint); call checkpoint(..., use_reentrant=False), or leave the "
                "site out"
            )
        edges: set[tuple[_Place, _Place]] = set()  # before a backward that recomputes the tensors
        for to_place in read:
            node = found[to_place].grad_fn
            behind = set() if node is None else {node, *nodes_behind([node])}
            edges |= {(one, to_place) for one in added if found[one].grad_fn in behind}
        runs.backward(loss[-1], "integrated_gradients")
    values = torch.zeros(len(from_sites), len(to_sites), dtype=torch.float64, device="cpu")
    for place, site in added.items():
        change = change_of(place).double()
        weight = _weight(flex, site.module) if site.side == "input" else None
        for j, to in enumerate(to_sites):
            if _place(to) not in gradients or (place, _place(to)) not in edges:
                continue
            masked = Region(**to.where).only(gradients[_place(to)])
            if weight is not None:
                masked = masked @ weight.to(masked)
            if masked.shape != change.shape:
                raise ValueError(
                    f"integrated_gradients: {site.module!r} adds {tuple(change.shape)} to the "
                    f"residual stream, and {to.module!r} reads {tuple(masked.shape)}; choose sites "
                    "of one stream"
                )
            product = change * masked
            for i, one in enumerate(from_sites):
                if _place(one) == place:
                    values[i, j] = product[Region(**one.where).index(product)].sum()
    return values


_Place = tuple[str, str, int | str]


def _place(site: Site) -> _Place:
    return site.module, site.side, site.unpack_idx


def _weight(flex: FlexModel, name: str) -> Tensor:
    """Return the full weight ``(out, in)`` of a linear module. Collective."""
    weight = flex.get_module_parameter(f"{name}.weight")
    is_transposed = type(find_module(flex.module, name)).__name__ == "Conv1D"  # of GPT-2
    return weight.T if is_transposed else weight


@dataclass(frozen=True)
class JacobianLens:
    """By layer, the mean effect of its output on a later layer's.

    Attributes:
        J: ``(units of the target, units of the layer)`` by layer, float32, on the CPU, the same on
            every rank.
        num_prompts: The number of rows that were averaged.
    """

    J: dict[int, Tensor]
    num_prompts: int

    def save(self, path: str | Path) -> None:
        """Write the file that other readers of Jacobian lenses take: ``torch.save`` of ``J``,
        ``source_layers``, ``d_model`` and ``n_prompts``.
        """
        content = {
            "J": {layer: matrix.half() for layer, matrix in self.J.items()},
            "source_layers": sorted(self.J),
            "d_model": next(iter(self.J.values())).shape[-1],
            "n_prompts": self.num_prompts,
        }
        torch.save(content, path)


def jacobian_lens(
    flex: FlexModel,
    batches: Iterable[Inputs],
    layers: Mapping[int, Site | str],
    target: Site | str,
    *,
    positions: Selector = slice(16, -1),
    batch: int = 8,
    groups: Iterable[str] = (),
) -> JacobianLens:
    """Fit a Jacobian lens: the derivative of the last layer's output by each layer's, summed over
    the positions of the former and averaged over those of the latter, and over prompts (Gurnee et
    al. 2026, "Verbalizable representations form a global workspace in language models").

    Example::

        layers = {i: f"model.layers.{i}" for i in range(31)}
        lens = jacobian_lens(flex, batches, layers, "model.layers.31")
        lens.save("jacobian_lens.pt")
        hidden @ lens.J[5].T   # then the final norm and the unembedding

    Runs ``ceil(units / batch)`` forwards and backwards of each batch. The ``.grad`` of parameters
    is restored when it returns.

    Args:
        batches: Inputs as in `activation_patching`, without padding: all rows count alike. As many
            on each data-parallel rank.
        layers: The sites by their numbers; all are ``(rows, positions, units)``, or in the order of
            ``dims=`` of their ``where``.
        positions: Those that count, on both sides. The default is that of published lenses: not the
            first 16, which other positions use as sinks, nor the last.
        batch: The copies of the rows in one forward, each for one unit of the target.

    Collective over the ranks of the model. Raises: as `integrated_gradients`.
    """
    check_count(batch, "batch must be a positive number of units")
    check_takes_gradients(flex, "jacobian_lens")
    if not isinstance(layers, Mapping):
        raise TypeError(
            f"jacobian_lens: layers must be a mapping of sites by number, got {layers!r}"
        )
    sites, end = {layer: whole_site(site) for layer, site in layers.items()}, whole_site(target)
    if any(_place(end) == _place(site) for site in sites.values()):
        raise ValueError(
            f"jacobian_lens: the target {end.module!r} is one of the layers, and its Jacobian the "
            "identity; leave it out"
        )
    region, loss = Region(positions=positions), list[Tensor]()
    region.check_rectangular("jacobian_lens")
    found: dict[int, Tensor] = {}
    first = width = num_prompts = 0
    with Runs(flex, groups) as runs, runs.restored_gradients("jacobian_lens"), torch.enable_grad():

        def as_usual(full: Tensor, site: Site) -> Tensor:
            copies.dim_of_rows(full, site)
            dims = Region(**site.where).dim
            return full.permute([dims(one, full.shape) for one in ("rows", "positions", "units")])

        def measure(full: Tensor, scope: Scope) -> None:
            nonlocal width
            full = as_usual(full, end)
            width = full.shape[-1]
            units = torch.arange(first, min(first + batch, width), device=full.device)
            part = full[region.index(full)][rows[: len(units)]]  # (copies, rows, positions, units)
            if not part.numel():
                raise ValueError(
                    f"jacobian_lens: none of the {full.shape[1]} positions is among {positions}; "
                    "give positions="
                )
            loss.append(part.sum((1, 2)).gather(1, units[:, None]).sum())

        def keep(layer: int, grad: Tensor, scope: Scope) -> None:
            grad = as_usual(grad.detach(), sites[layer])
            part = grad[region.index(grad)].mean(1)[rows].sum(1).float().cpu()
            matrix = found.setdefault(layer, torch.zeros(width, grad.shape[-1], device="cpu"))
            matrix[first : first + batch] += part[: width - first]

        for layer, site in sites.items():
            edit = Edit("jacobian", partial(keep, layer))
            runs.register(site, edit, "jacobian", is_gradient=True)
        runs.register(end, Edit("target", measure), "jacobian")
        for inputs in runs.in_step(batches):
            copies = Copies.of(runs, inputs, (), batch)
            rows, first = copies.all_rows, 0
            num_prompts += rows.shape[1]
            while first == 0 or first < width:
                runs.run(copies.inputs(inputs), "jacobian")
                runs.backward(loss[-1], "jacobian_lens")
                first += batch
    missing = [site.module for layer, site in sites.items() if layer not in found]
    if missing:
        raise ValueError(
            f"jacobian_lens: {target!r} does not depend on {', '.join(map(repr, missing))}"
            if num_prompts
            else "jacobian_lens: batches is empty; give at least one batch of inputs"
        )
    return JacobianLens({i: found[i] / num_prompts for i in sites}, num_prompts)

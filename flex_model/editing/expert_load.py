"""How tokens are spread over the experts of a mixture, counted on all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from flex_model.distributed.tensor_dicts import describe, exchange_json, from_rank
from flex_model.editing.runs import Inputs, Runs, Site
from flex_model.model import FlexModel


@dataclass(frozen=True)
class ExpertLoad:
    """The tokens that the experts of one block were chosen for.

    Attributes:
        pairs: (experts, experts), int64: The number of tokens that go to both of two experts; in
            the diagonal, to each.
    """

    pairs: Tensor

    @property
    def counts(self) -> Tensor:
        """The number of tokens that go to each expert, (experts,)."""
        return self.pairs.diagonal()

    @property
    def entropy(self) -> float:
        """The entropy of the experts' shares of all choices, in nats: 0 where one expert is always
        chosen, ``log(experts)`` where all are chosen equally often.
        """
        counts = self.counts.double()
        return float(torch.special.entr(counts / counts.sum()).sum())


@torch.no_grad()
def expert_load(
    flex: FlexModel, batches: Iterable[Inputs], blocks: Iterable[str], *, groups: Iterable[str] = ()
) -> dict[str, ExpertLoad]:
    """Count, by block, the tokens that go to each expert and to each two of them.

    Example::

        found = expert_load(flex, [tokens, others], ["model.layers.3.mlp"])
        found["model.layers.3.mlp"].counts    # (experts,)

    Runs one forward for each batch. Ranks exchange their counts only. Tokens of padding count, too.

    Args:
        batches: Of each a tensor, a sequence of positional or a mapping of keyword arguments. Under
            data parallelism each rank passes its own rows.
        blocks: As of ``flex.routing``.
        groups: Groups of further hooks that are active in all runs.

    Returns:
        The same on every rank, on the CPU.

    Collective over the ranks of the model. Raises: as ``flex.routing``; ValueError without a batch;
    RuntimeError during a run.
    """
    names = [blocks] if isinstance(blocks, str) else list(blocks)
    totals: dict[str, Tensor] = {}
    with Runs(flex, groups) as runs:
        for name in names:
            runs.watch(Site(flex.routing(name).load), name, "load")
        for batch in batches:
            runs.run(batch, "load")
            for name in names:
                found = runs.record(name)
                if found is not None:
                    totals[name] = totals.get(name, 0) + found.long()
    communicator = flex._communicator
    counted = list(totals.values())
    described = exchange_json(communicator, describe(counted), "the load of experts")[0]
    received = from_rank(communicator, 0, counted, described)
    if len(received) < len(names):
        raise ValueError("expert_load: expected batches of inputs, got none")
    return {name: ExpertLoad(pairs) for name, pairs in zip(names, received)}

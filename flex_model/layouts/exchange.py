"""Exchanges logs between ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flex_model.distributed.communicator import Communicator
from flex_model.distributed.header import Header
from flex_model.layouts.follow import Follower
from flex_model.layouts.operation_log import Chunk


def exchange_chunks(communicator: Communicator, follower: Follower) -> None:
    """Run ``Follower.sync`` over the ranks of a communicator. Collective where there are
    tensor-parallel ranks.

    Tensor-parallel ranks with the same log, such as those with even shards, exchange a hash; others
    exchange the entries. Data-parallel ranks exchange nothing: each infers alone.
    """
    mesh = communicator.mesh

    def exchange(chunk: Chunk, digest: int) -> Sequence[Chunk]:
        num_ranks = len(mesh.stage_ranks)
        if mesh.tp_size == 1:
            return [chunk] * num_ranks
        communicator.check_consistency(
            Header("inputs", site=follower.log.num_syncs), "what a forward has run so far"
        )
        digests = communicator.exchange(torch.tensor([digest])).flatten().tolist()
        lines = (mesh.ranks_along(("tp",), place) for place in range(num_ranks))
        if all(digests[place] == digests[line[0]] for line in lines for place in line):
            return [chunk] * num_ranks
        packed = chunk.pack()
        lengths = communicator.exchange(torch.tensor([len(packed)])).flatten().tolist()
        texts = communicator.exchange_padded(packed, max(lengths))
        chunks = {text: Chunk.unpack(text) for text in set(texts)}  # some ranks' are equal
        return [chunks[text] for text in texts]

    with communicator.uncounted():
        follower.sync(exchange)

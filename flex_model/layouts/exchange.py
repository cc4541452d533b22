"""Exchanges logs between ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flex_model.distributed.communicator import Communicator
from flex_model.distributed.header import Header
from flex_model.layouts.follow import Follower
from flex_model.layouts.operation_log import Chunk


def exchange_chunks(communicator: Communicator, follower: Follower) -> None:
    """Run ``Follower.sync`` over the ranks of a communicator. Collective.

    Ranks with the same log, such as tensor-parallel ranks with even shards, exchange a hash; others
    exchange the entries.
    """

    def exchange(chunk: Chunk, digest: int) -> Sequence[Chunk]:
        communicator.check_consistency(
            Header("inputs", site=follower.log.num_syncs), "what a forward has run so far"
        )
        digests = communicator.exchange(torch.tensor([digest])).flatten().tolist()
        if all(other == digest for other in digests):
            return [chunk] * len(digests)
        packed = chunk.pack()
        lengths = communicator.exchange(torch.tensor([len(packed)])).flatten().tolist()
        texts = communicator.exchange_padded(packed, max(lengths))
        chunks = {text: Chunk.unpack(text) for text in set(texts)}  # some ranks' are equal
        return [chunks[text] for text in texts]

    with communicator.uncounted():
        follower.sync(exchange)

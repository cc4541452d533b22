"""What every transport of GPU tensors does with shards, for stand-ins of its group and memory."""

import torch

from tests.ops.test_ops import same_bits


def check_transfers(transport, full, plan, shards):
    """To be called on each rank; ``shards`` has those of all ranks."""
    rank, mine = transport.group.rank, shards[transport.group.rank]
    for num_copies in ((rank + 2) % 4, (rank + 3) % 4):  # each rank its own number
        copies = transport.all_gather(mine, plan, num_copies)
        assert len(copies) == num_copies
        assert (
            len({id(one) if full.numel() == 0 else one.data_ptr() for one in copies}) == num_copies
        )
        for one in copies:
            same_bits(one, full)
            assert one._base is None
    on_first = full if rank == 0 else None
    same_bits(transport.scatter_from_first(on_first, mine, plan), mine)
    same_bits(transport.broadcast(on_first, torch.empty_like(full)), full)
    generator = torch.Generator().manual_seed(1)
    terms = torch.randn(transport.group.size, 3, 5, generator=generator).to(torch.bfloat16)
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    same_bits(transport.all_reduce_sum(terms[rank]), total)

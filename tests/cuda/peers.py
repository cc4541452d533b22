"""Several processes, one GPU or one each: what test_peers_cuda.py starts.

    python -m tests.cuda.peers RANK NUM_RANKS STORE_FILE SHARE_GPU MEANS...

Prints which means have passed, and exits with 0 if every transfer gave the right bits.
"""

import time

import torch

from flex_model.distributed import process_groups
from flex_model.distributed.transports import choice
from flex_model.distributed.transports.by_device import ByDevice
from flex_model.distributed.transports.choice import choose
from flex_model.distributed.transports.nccl import Nccl
from flex_model.distributed.transports.peer_memory import CudaIpc, PeerMemory
from flex_model.distributed.transports.transport import Gathered
from tests.cuda.processes import run_rank
from tests.ops.test_ops import blocks, plan_of, random_tensor, same_bits

TIMEOUT_S = 40.0


def wait(works):
    """As the communicator does: poll with a deadline."""
    deadline = time.monotonic() + TIMEOUT_S
    while not all(work.is_completed() for work in works):
        if time.monotonic() > deadline:
            raise RuntimeError("a rank did not come")
        time.sleep(1e-4)
    for work in works:
        work.wait()


def transport_of(means, group, device):
    on_cpu, _ = choose(group, wait, torch.device("cpu"))
    if means == "best":
        return choice.connect(on_cpu, "", wait, device)[0]
    if means == "nccl":
        return ByDevice(on_cpu, Nccl(on_cpu, wait, device))
    return ByDevice(on_cpu, PeerMemory(group, CudaIpc(on_cpu, wait, device)))


def cuts_for(sizes, num_ranks):
    """Along each dim, uneven; and over a grid where the number of ranks allows it."""
    for dim, size in enumerate(sizes):
        cuts = [[] for _ in sizes]
        cuts[dim] = sorted(min(size, size * r // num_ranks + r % 2) for r in range(1, num_ranks))
        yield cuts
    if num_ranks % 2 == 0:
        rows = [sizes[0] // 2] if sizes[0] > 1 else [0]
        yield [
            rows,
            *([] for _ in sizes[2:]),
            [sizes[-1] * r // (num_ranks // 2) for r in range(1, num_ranks // 2)],
        ]


def check_all(transport, rank, num_ranks, device):
    generator = torch.Generator().manual_seed(7)
    dtypes = [torch.bool, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.complex128]
    for sizes in [(8, 33), (3, 16, 64), (5, 700, 129), (1, 2)]:
        for dtype in dtypes:
            full = random_tensor(sizes, dtype, generator)
            on_gpu = full.to(device)
            for cuts in cuts_for(sizes, num_ranks):
                slices = blocks(sizes, cuts)
                plan = plan_of(sizes, slices, dtype.itemsize)
                shard = on_gpu[slices[rank]]
                copies = transport.all_gather(shard, plan, rank % 3)
                assert len(copies) == rank % 3
                for got in copies:
                    same_bits(got, full)
                mine = transport.scatter_from_first(on_gpu if rank == 0 else None, shard, plan)
                same_bits(mine, shard)
                one = Gathered(plan, list(range(num_ranks)), shard)
                many = transport.gather_to_first([one, one])
                assert (many is None) == (rank != 0)
                for got in many or []:
                    assert got.device.type == "cpu"
                    same_bits(got, full)
    terms = torch.randn(num_ranks, 1000, generator=generator).to(torch.bfloat16)
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    same_bits(transport.all_reduce_sum(terms[rank].to(device)), total)
    got = transport.broadcast(terms.to(device) if rank == 0 else None, terms.to(device))
    same_bits(got, terms)
    # Ranks out of step, and buffers that grow.
    for i in range(50):
        if (i + rank) % 3 == 0:
            torch.cuda._sleep(2_000_000)
        sizes = (num_ranks, 1 << (10 + i % 12))
        plan = plan_of(sizes, blocks(sizes, (list(range(1, num_ranks)), [])), 4)
        mine = torch.full((1, sizes[1]), i * num_ranks + rank, dtype=torch.int32, device=device)
        (got,) = transport.all_gather(mine, plan)
        expected = i * num_ranks + torch.arange(num_ranks, dtype=torch.int32)
        same_bits(got, expected[:, None].expand(sizes).contiguous())


def check(means, rank, num_ranks, device):
    group, _ = process_groups.acquire(tuple(range(num_ranks)), TIMEOUT_S)
    transport = transport_of(means, group, device)
    check_all(transport, rank, num_ranks, device)
    transport.on_gpu.close()
    second = transport_of(means, group, device)  # a closed one leaves room for the next
    second.all_reduce_sum(torch.ones(3, device=device))
    second.on_gpu.close()
    group.release()
    if rank == 0:
        print(means, "passed", flush=True)


def check_each(rank, num_ranks, device, _, *all_means):
    for means in all_means:
        check(means, rank, num_ranks, device)


if __name__ == "__main__":
    run_rank(check_each, TIMEOUT_S)

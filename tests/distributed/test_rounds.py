"""The rounds of collectives, carried out by ranks in one process: what each has in the end, and how
many messages wait for one another.
"""

import random

import pytest

from flex_model.distributed import rounds

SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 127, 128]


def carry_out(buffers, rounds_of):
    """Send what the ranks' rounds say: a message that nobody expects, or in vain, is an error.
    Return the number of rounds with messages.
    """
    steps = 0
    assert len({len(of_rank) for of_rank in rounds_of}) == 1
    for at_once in zip(*rounds_of):
        sent = {}
        for rank, (sends, _) in enumerate(at_once):
            for to, start, stop in sends:
                data = buffers[rank][start:stop]
                assert data and None not in data, "sent before it was there"
                sent[rank, to] = data
        steps += bool(sent)
        for rank, (_, receives) in enumerate(at_once):
            for source, start, stop in receives:
                data = sent.pop((source, rank))
                assert len(data) == stop - start and set(buffers[rank][start:stop]) == {None}
                buffers[rank][start:stop] = data
        assert not sent
    return steps


def logarithm(size):
    return (size - 1).bit_length()


def data_of(rank, num_bytes):
    return [(rank, i) for i in range(num_bytes)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("is_even", [True, False])
def test_an_all_gather_gives_every_rank_all_bytes(size, is_even):
    choose = random.Random(size)
    sizes = [64] * size if is_even else [choose.choice([0, 1, 5]) for _ in range(size)]
    plans = [rounds.all_gather(rank, sizes) for rank in range(size)]
    buffers = [data_of(r, sizes[r]) + [None] * (sum(sizes) - sizes[r]) for r in range(size)]
    steps = carry_out(buffers, [of_rank for _, of_rank in plans])
    assert steps <= logarithm(size)
    for buffer, (starts, _) in zip(buffers, plans):
        for r in range(size):
            assert buffer[starts[r] : starts[r] + sizes[r]] == data_of(r, sizes[r])
    if is_even:
        assert steps == logarithm(size)
        for _, of_rank in plans:
            sent = sum(stop - start for sends, _ in of_rank for _, start, stop in sends)
            assert sent == 64 * (size - 1)  # no less is possible


@pytest.mark.parametrize("size", SIZES)
def test_a_broadcast_gives_every_rank_the_first_one_s_bytes(size):
    buffers = [data_of(0, 3)] + [[None] * 3 for _ in range(size - 1)]
    steps = carry_out(buffers, [rounds.broadcast(rank, size, 3) for rank in range(size)])
    assert steps == logarithm(size) and all(buffer == data_of(0, 3) for buffer in buffers)
    nothing = [rounds.broadcast(rank, size, 0) for rank in range(size)]
    assert carry_out([[] for _ in range(size)], nothing) == 0


@pytest.mark.parametrize("size", SIZES)
def test_a_gather_to_the_first_rank_and_back_takes_one_message_of_each(size):
    choose = random.Random(size)
    sizes = [choose.choice([0, 1, 5]) for _ in range(size)]
    there = [rounds.gather_to_first(rank, sizes) for rank in range(size)]
    own = [data_of(rank, num_bytes) for rank, num_bytes in enumerate(sizes)]
    buffers = [own[0] + [None] * sum(sizes[1:]), *own[1:]]
    assert carry_out(buffers, there) <= 1
    assert buffers[0] == [one for row in own for one in row]
    buffers[1:] = [[None] * num_bytes for num_bytes in sizes[1:]]
    assert carry_out(buffers, [rounds.scatter_from_first(r, sizes) for r in range(size)]) <= 1
    assert buffers[1:] == own[1:]


@pytest.mark.parametrize("size", SIZES)
def test_an_all_to_all_gives_every_rank_what_the_others_have_for_it(size):
    choose = random.Random(size)
    sizes = [[choose.choice([0, 1, 5]) for _ in range(size)] for _ in range(size)]
    own = [[[(r, to, i) for i in range(n)] for to, n in enumerate(sizes[r])] for r in range(size)]
    expected = [[own[source][r] for source in range(size)] for r in range(size)]
    for r in range(size):
        expected[r][r] = [None] * sizes[r][r]
    buffers, rounds_of = [], []
    for r in range(size):
        back = [of_rank[r] for of_rank in sizes]
        buffers.append([one for data in own[r] for one in data] + [None] * sum(back))
        rounds_of.append(rounds.all_to_all(r, sizes[r], back))
    assert carry_out(buffers, rounds_of) <= 1
    for r in range(size):
        assert buffers[r][sum(sizes[r]) :] == [one for data in expected[r] for one in data]


@pytest.mark.parametrize("num_ranks", SIZES)
def test_parts_are_even_and_cut_no_element(num_ranks):
    for num_bytes in (0, 8, 16, 24, 4096 * num_ranks, 65_536 * num_ranks + 8):
        parts = rounds.even_parts(num_bytes, num_ranks)
        assert sum(parts) == num_bytes and max(parts) - min(parts) <= 16
        assert not any(part % 16 for part in parts[:-1])

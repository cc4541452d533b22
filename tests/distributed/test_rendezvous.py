"""The rendezvous by the store, with threads for ranks."""

import re
import threading
import time

import pytest
import torch.distributed as dist

from flex_model.distributed import rendezvous
from flex_model.distributed.bounded_store import BoundedStore, LostStoreError
from flex_model.distributed.rendezvous import Rendezvous
from flex_model.errors import HookError


@pytest.fixture
def store(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(rendezvous, "default_store", lambda: store)
    yield store
    for thread in threading.enumerate():
        if thread.name == "flex_model connects":  # it may give back a connection to this store
            thread.join(1)
            assert not thread.is_alive()
    rendezvous.close_connection()


def outcomes(size, place, timeouts, delays=None, ranks=None, stale=()):
    """What each rank gets, or its error."""
    found = {}

    def meet(rank):
        time.sleep(delays[rank] if delays else 0)
        meeting = Rendezvous(("test",), tuple(range(size)), rank, timeouts[rank])
        try:
            found[rank] = meeting.all_gather(place, f"text of {rank}", stale)
        except HookError as error:
            found[rank] = error

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in ranks or range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return found


def texts(size):
    return [f"text of {rank}" for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 100])
def test_every_rank_gets_the_texts_of_all(store, size):
    found = outcomes(size, "place", [20] * size)
    assert found == dict.fromkeys(range(size), texts(size))


def test_what_all_have_left_is_deleted(store):
    for number in range(1, 20):
        stale = [str(number - 1)] if number > 1 else []
        found = outcomes(3, str(number), [20] * 3, stale=stale)
        assert found == dict.fromkeys(range(3), texts(3))
    assert store.num_keys() == 3


def test_ranks_that_do_not_come_are_named_and_may_come_later(store):
    found = outcomes(5, "place", [1] * 5, ranks=[0, 2, 3])
    assert len(found) == 3
    for error in found.values():
        assert "global ranks [1, 4] did not arrive within 1 s" in str(error)
    # Those that left are not taken for ranks that wait.
    found = outcomes(5, "place", [1] * 5, ranks=[1])
    assert "global ranks [4] did not arrive within 1 s (global ranks [0, 2, 3] have" in str(
        found[1]
    )
    assert outcomes(5, "place", [20] * 5) == dict.fromkeys(range(5), texts(5))


def test_ctrl_c_leaves_the_rendezvous(store, monkeypatch):
    """The rank counted as one that waits."""

    def interrupted(*_):
        time.sleep(0.2)
        raise KeyboardInterrupt

    meeting = Rendezvous(("test",), (0, 1), 0, 20)
    with monkeypatch.context() as patch:
        patch.setattr(rendezvous, "is_done", interrupted)
        patch.setattr(BoundedStore, "call", lambda self, function: function(self._store))
        with pytest.raises(KeyboardInterrupt):
            meeting.all_gather("place", "left")
    (error,) = outcomes(2, "place", [1] * 2, ranks=[1]).values()
    assert "global ranks [0] have waited, and left" in str(error)
    assert outcomes(2, "place", [20] * 2) == dict.fromkeys(range(2), texts(2))


class NoStore:
    """A store whose host has ended, or can't be reached."""

    def __init__(self, answers):
        self.answers = answers

    def __getattr__(self, name):
        def call(*args):
            if self.answers:
                raise RuntimeError("connection reset")
            time.sleep(6)

        return call


@pytest.mark.parametrize(
    "answers, why", [(True, "is lost: connection"), (False, "did not answer in 1 s")]
)
def test_a_store_that_is_lost_or_silent_is_an_error(answers, why, monkeypatch):
    meeting, start = Rendezvous((), (0, 1), 0, 1), time.monotonic()
    monkeypatch.setattr(rendezvous, "default_store", lambda: NoStore(answers))
    with pytest.raises(HookError, match=f"the store of torch.distributed {why}"):
        meeting.all_gather("place", "")
    assert time.monotonic() - start < 5


def test_a_store_that_ends_is_named_by_its_host():
    """Also behind prefixes, as torch.distributed has it."""
    server = dist.TCPStore("127.0.0.1", 0, 1, True)
    port = server.port
    client = dist.TCPStore("127.0.0.1", port, is_master=False)
    store = BoundedStore(dist.PrefixStore("inner", dist.PrefixStore("outer", client)), 5.0)
    store.set("key", "value")
    del server
    where = f"the store of torch.distributed at 127.0.0.1:{port} is lost: "
    with pytest.raises(LostStoreError, match=re.escape(where)):
        store.read("key")

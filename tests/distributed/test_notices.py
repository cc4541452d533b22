"""How often a rank that waits reads the notices of others."""

import json

import pytest

from flex_model.distributed.hosts import Hosts, Settings
from flex_model.distributed.notices import Board, Notices

TICK_S = 0.02  # between looks of a wait in shared memory
OWN_RUN = {
    "sequence": 7,
    "active": 1,
    "choice": "all groups",
    "mode": 3,
    "has_hooks": True,
    "skipped": False,
}


class Store:
    """A store that counts what is read."""

    def __init__(self):
        self.values, self.num_reads = {}, 0

    def set(self, key, value):
        self.values[key] = value

    def read(self, key):
        self.num_reads += 1
        return self.values.get(key)


def notices_of(rank, store, size=8):
    hosts = Hosts([f"host {r}" for r in range(size)], None, Settings("auto", "", ""), [])
    return Notices(Board(rank, size, hosts, store), 1)


def wait(notices, start_s, until_s, timeout_s, compares_hooks=False):
    """Wait, and return what differs; and for how long until it was seen, or ``until_s``."""
    waited_s = start_s
    while waited_s < until_s:
        if difference := notices.difference(waited_s, timeout_s, compares_hooks):
            return difference, waited_s
        waited_s += TICK_S
    return "", until_s


@pytest.mark.parametrize("compares_hooks", [False, True])
def test_a_long_wait_asks_the_store_about_once_a_second(compares_hooks):
    store = Store()
    notices = notices_of(0, store)
    notices.publish_run(**OWN_RUN)
    store.set("notices/1", json.dumps({"1": ""}))
    store.set("notices/7", json.dumps({"1": ""}))
    assert wait(notices, 0.0, 60.0, 600.0, compares_hooks)[0] == ""
    num_neighbours, num_kinds = 2, 1 + compares_hooks
    assert store.num_reads < 75 * num_neighbours * num_kinds


@pytest.mark.parametrize("at_s", [0.0, 0.9, 1.5, 4.0, 30.0])
def test_a_difference_is_seen_within_about_a_second(at_s):
    store = Store()
    notices = notices_of(0, store)
    notices.publish_run(**OWN_RUN)
    notices_of(1, store).publish_run(**OWN_RUN | {"active": 2, "choice": "no groups"})
    other = store.values.pop("notices/1")
    for _ in range(2):  # the second wait begins as the first one did
        assert wait(notices, 0.0, at_s, 600.0)[0] == ""
        store.set("notices/1", other)
        difference, waited_s = wait(notices, at_s, 60.0, 600.0)
        assert "rank 1 runs no groups" in difference
        assert waited_s < max(at_s, 1.0) + 1.05
        store.values.pop("notices/1")


def test_a_difference_is_seen_before_a_short_deadline():
    store = Store()
    notices, others = notices_of(0, store), notices_of(1, store)
    notices.publish_run(**OWN_RUN)
    assert wait(notices, 0.0, 1.7, 2.0)[0] == ""
    others.publish_run(**OWN_RUN | {"active": 2, "choice": "no groups"})
    assert "rank 1 runs no groups" in wait(notices, 1.7, 2.0, 2.0)[0]


@pytest.mark.parametrize("skipped", [False, True])
def test_a_rank_behind_in_a_run_without_hooks_has_chosen_none_unless_this_one_had_such_a_run(
    skipped,
):
    """One that came a second late between a run with ``groups=()`` and the next was aborted."""
    store = Store()
    notices, others = notices_of(0, store), notices_of(1, store)
    without = {"active": 2, "choice": "no groups", "has_hooks": False}
    if skipped:
        notices.publish_run(**OWN_RUN | without)
    others.publish_run(**OWN_RUN | without)
    notices.publish_run(**OWN_RUN | {"skipped": skipped})
    assert ("rank 1 runs no groups" in wait(notices, 0.0, 60.0, 600.0)[0]) is not skipped


def test_ranks_that_have_run_with_hooks_have_half_the_timeout_to_register_others():
    """A sweep over layers in which one rank plots each layer for six seconds was aborted."""
    store = Store()
    notices, others = notices_of(0, store), notices_of(1, store)
    for one in (notices, others):
        one.publish_hooks("1")
        one.agree_hooks()
        one.publish_hooks("")
    notices.publish_hooks("2")
    difference, waited_s = wait(notices, 0.0, 60.0, 60.0, compares_hooks=True)
    assert "rank 1 has registered no hooks" in difference
    assert 30 < waited_s < 32

"""Many ranks in one process: their requests to the store, and what fails at any step."""

import functools
from dataclasses import replace

import pytest

from flex_model.distributed.rendezvous import Rendezvous
from flex_model.errors import HookError
from simulation.cluster import Cluster, Fault, Speeds
from simulation.job import Job, Plan
from simulation.product import simulated
from simulation.store import Server

SIZES = [
    Plan(2, 1, tp=2),
    Plan(2, 2, tp=1),
    Plan(6, 3, tp=2, rows=3),
    Plan(12, 3, tp=2, columns=7),
    Plan(14, 7, tp=7),
    Plan(32, 8, tp=4, pp=2),
    Plan(64, 8, tp=8),
]
SMALL = Plan(6, 3, tp=2)  # ranks 0, 2 and 4 are the first ones of their hosts
HELD = replace(SMALL, stays=False)  # rank 0 has the store


def check(job):
    """The numbers that ranks gather are right, and so are those of their requests."""
    assert not job.errors
    requests = job.counted("wrap").requests
    assert [requests[rank] for rank in range(job.plan.num_ranks)] == job.predicted_requests()
    assert not job.counted("runs").requests


@pytest.mark.parametrize(
    "plan", SIZES, ids=lambda plan: f"{plan.num_ranks} ranks on {plan.num_hosts} hosts"
)
def test_requests_are_those_that_are_predicted(plan):
    check(Job(plan, 0, Speeds()).run())


@pytest.mark.parametrize("host", [0, 1])
def test_a_slow_host_is_no_error(host):
    slow = Job(SMALL, 0, Speeds(slow_host=host, times=1e3)).run()
    assert not slow.errors
    assert sum(slow.counted("wrap").requests.values()) == sum(slow.predicted_requests())
    fast = Job(SMALL, 0, Speeds()).run()
    assert max(slow.ended_s.values()) > 3 * max(fast.ended_s.values())


def test_a_seed_decides_all():
    plan = Plan(12, 3, tp=4)
    runs = [Job(plan, seed, Speeds(jitter=1.0)).run() for seed in (0, 0, 1)]
    steps = [[process.steps for process in job.cluster.processes] for job in runs]
    assert steps[0] == steps[1]
    assert runs[0].ended_s == runs[1].ended_s != runs[2].ended_s


def test_ranks_that_come_while_others_leave_all_meet_or_all_do_not():
    met = 0
    for seed in range(150):
        cluster, found = Cluster(3, 3, seed, Speeds(latency_s=1e-3, jitter=1.0, poll_s=1e-3)), {}

        def meet(rank, cluster=cluster, found=found):
            dice = cluster.scheduler.dice
            cluster.scheduler.sleep(dice.uniform(0, 0.3))
            meeting = Rendezvous(("test",), (0, 1, 2), rank, dice.uniform(0.05, 0.3))
            try:
                found[rank] = meeting.all_gather("place", f"text of {rank}")
            except HookError as error:
                found[rank] = error

        with simulated(cluster, Server(cluster, cluster.hosts[0], None)):
            for process in cluster.processes:
                cluster.scheduler.spawn(process, functools.partial(meet, process.rank))
            cluster.scheduler.run(60.0)
        errors = sum(isinstance(each, HookError) for each in found.values())
        assert errors in (0, 3), (seed, found)
        met += errors == 0
    assert 20 < met < 130  # both happen


# ---- Two wraps at once ---------------------------------------------------------------------------

PAIRS = ((0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 2, 3))  # groups that overlap


@pytest.mark.parametrize("num_hosts", [1, 2, 4])
def test_groups_that_overlap_may_wrap_at_once_in_one_order(num_hosts):
    plan = Plan(4, num_hosts, tp=1, threads=(PAIRS,), late_s=1e-3, num_wraps=2)
    for seed in range(5):
        assert not Job(plan, seed, Speeds(jitter=1.0)).run().errors


def test_groups_that_wrap_in_a_circle_are_an_error_at_the_deadline():
    """Rank 0 waits for 1, which waits for 2, which waits for 0."""
    plan = Plan(3, 3, tp=1, threads=(((0, 1), (1, 2), (2, 0)),), is_turned=True)
    job = Job(plan, 0, Speeds(jitter=1.0)).run()
    assert len(job.errors) == 3
    for rank, error in job.errors.items():
        assert f"global ranks [{(rank + 1) % 3}] did not arrive within 20 s" in str(error)
        assert job.ended_s[rank] < plan.late_s + plan.timeout_s + 2


@pytest.mark.parametrize("kind", ["rank", "silent host"])
def test_what_fails_while_groups_that_overlap_wrap_is_named(kind):
    """Ranks that wait for one that has raised an error name that one."""
    explore(2, kind, 0, every=9, plan=Plan(4, 2, tp=1, threads=(((0, 1), (2, 3), (0, 1, 2, 3)),)))


@pytest.mark.grid
def test_a_thousand_ranks():
    check(Job(Plan(1024, 128, tp=8), 0, Speeds()).run())


# ---- Faults --------------------------------------------------------------------------------------


def explore(rank, kind, seed, every=1, plan=SMALL):
    """Let a rank, or its host, fail at each step that it makes; all others must end as they
    should.
    """
    steps = Job(plan, seed, Speeds(jitter=1.0)).run().cluster.processes[rank].steps
    assert len(steps) > 20
    for number, step in enumerate(steps[::every]):
        job = Job(plan, seed, Speeds(jitter=1.0), Fault(rank, number * every, kind)).run()
        assert job.cluster.died
        assert not job.problems(), (seed, rank, kind, number * every, step)


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_that_dies_at_any_step_is_named(rank):
    explore(rank, "rank", 0, every=2)


@pytest.mark.parametrize("kind", ["host", "silent host"])
def test_a_host_that_fails_at_any_step_is_named(kind):
    explore(2, kind, 0, every=6)


@pytest.mark.parametrize("kind", ["rank", "host", "silent host"])
def test_the_host_of_the_store_is_named_at_whatever_step_it_fails(kind):
    explore(0, kind, 0, every=7, plan=HELD)


@pytest.mark.parametrize("host", [0, 1])
@pytest.mark.parametrize("times", [6e4, 1e5, 2e5, 4e5, 3e6])
def test_a_host_that_is_too_slow_is_named(host, times):
    job = Job(SMALL, 0, Speeds(slow_host=host, times=times)).run()
    assert len(job.errors) == SMALL.num_ranks
    assert not job.problems()


@pytest.mark.grid
@pytest.mark.parametrize("kind", ["rank", "host", "silent host"])
@pytest.mark.parametrize("rank", [0, 8, 13])
def test_what_fails_among_many_ranks_is_named(kind, rank):
    explore(rank, kind, 0, every=29, plan=Plan(64, 16, tp=4, stays=False))


@pytest.mark.grid
@pytest.mark.parametrize("seed", range(3))
def test_a_slow_host_is_no_error_or_named(seed):
    for host in range(3):
        for power in range(20, 66, 2):  # 100 to 3,000,000
            speeds = Speeds(slow_host=host, times=10 ** (power / 10), jitter=1.0)
            job = Job(SMALL, seed, speeds).run()
            assert len(job.errors) in (0, SMALL.num_ranks), (seed, host, power)
            assert not job.problems(), (seed, host, power)


@pytest.mark.grid
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["rank", "host", "silent host"])
def test_the_host_of_the_store_is_named_at_any_step(kind, seed):
    explore(0, kind, seed, plan=HELD)


@pytest.mark.grid
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "kind, ranks", [("rank", range(6)), ("host", range(6)), ("silent host", [2, 5])]
)
def test_whatever_fails_at_any_step_is_named(kind, ranks, seed):
    for rank in ranks:
        explore(rank, kind, seed)

"""Many ranks in one process: what is counted is what the cost model predicts."""

import pytest

from simulation.cluster import Speeds
from simulation.job import Job, Plan

SIZES = [
    Plan(2, 1, tp=2),
    Plan(2, 2, tp=1),
    Plan(6, 3, tp=2, rows=3),
    Plan(12, 3, tp=2, columns=7),
    Plan(14, 7, tp=7),
    Plan(32, 8, tp=4, pp=2),
    Plan(64, 8, tp=8),
]


def check(job):
    plan, wrap, runs = job.plan, job.counted("wrap"), job.counted("runs")
    assert not job.errors
    predicted = job.predicted_by_host()
    assert +runs.sent == +predicted.sent
    assert +runs.received == +predicted.received
    assert +runs.messages == +predicted.messages
    requests = job.predicted_requests()
    assert [wrap.requests[rank] for rank in range(plan.num_ranks)] == requests
    assert not runs.requests
    if plan.num_hosts > 1:
        assert job.seconds("runs", "end") == pytest.approx(job.predicted_s(), rel=0.02)


@pytest.mark.parametrize(
    "plan", SIZES, ids=lambda plan: f"{plan.num_ranks} ranks on {plan.num_hosts} hosts"
)
def test_what_is_counted_is_what_is_predicted(plan):
    check(Job(plan, 0, Speeds()).run())


def test_a_seed_decides_all():
    plan = Plan(12, 3, tp=4)
    runs = [Job(plan, seed, Speeds(jitter=1.0)).run() for seed in (0, 0, 1)]
    steps = [[process.steps for process in job.cluster.processes] for job in runs]
    assert steps[0] == steps[1]
    assert runs[0].ended_s == runs[1].ended_s != runs[2].ended_s

"""What a wrap costs torch's store and this machine, which must not grow with the ranks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flex_model.distributed.costs import Connected

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The rows of the benchmark, by wrap and number of ranks."""
    path = tmp_path_factory.mktemp("scale") / "rows.json"
    command = [sys.executable, "benchmarks/bench_scale.py", "--ranks", "2", "6", "--json", path]
    command += ["--hosts", "1", "3"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=150)
    return {(row["wrap"], row["hosts"], row["ranks"]): row for row in json.loads(path.read_text())}


@pytest.mark.parametrize("wrap, requests", [("first wrap", 8), ("second wrap", 8)])
@pytest.mark.parametrize("ranks", [2, 6])
def test_a_wrap_makes_a_few_requests_to_the_store_and_runs_none(rows, wrap, requests, ranks):
    row = rows[wrap, 1, ranks]
    assert 0 < row["requests"] <= requests
    assert row["requests_of_runs"] == 0


@pytest.mark.parametrize("wrap", ["first wrap", "second wrap"])
@pytest.mark.parametrize("num_hosts", [1, 3])
def test_what_a_wrap_takes_is_what_is_predicted(rows, num_hosts, wrap):
    row, predicted = rows[wrap, num_hosts, 6], Connected.of(num_hosts, is_first_of_host=True)
    assert row["sockets"] == predicted.sockets
    # Who comes last to a rendezvous makes one less, or one more to forget the one before.
    assert abs(row["requests"] - predicted.requests) <= (1 if num_hosts == 1 else 2)


@pytest.mark.parametrize("held", ["sockets", "files", "threads"])
def test_what_a_rank_holds_does_not_grow_with_the_ranks(rows, held):
    few, many = (rows["second wrap", 1, ranks][held] for ranks in (2, 6))
    assert many <= few


def test_restore_gives_back_what_the_wrap_took(rows):
    for ranks in (2, 6):
        first, second = (rows[wrap, 1, ranks]["left"] for wrap in ("first wrap", "second wrap"))
        assert second == first
        assert second["sockets"] == second["threads"] == 0

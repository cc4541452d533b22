"""What a wrap costs torch's store and this machine, which must not grow with the ranks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from counted_traffic import Connected

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def measured(folder, *arguments):
    """The rows of the benchmark, by wrap, number of hosts and of ranks."""
    command = [sys.executable, "benchmarks/bench_scale.py", *arguments]
    subprocess.run([*command, "--json", folder / "rows.json"], cwd=ROOT, check=True, timeout=150)
    rows = json.loads((folder / "rows.json").read_text())
    return {(row["wrap"], row["hosts"], row["ranks"]): row for row in rows}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return measured(tmp_path_factory.mktemp("scale"), "--ranks", "2", "6", "--hosts", "1", "3")


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


def test_what_a_wrap_of_a_pipeline_takes_is_what_is_predicted(tmp_path):
    """Two stages of two ranks, which are in three groups: of the stage, of the line, and of all."""
    for (wrap, num_hosts, _), row in measured(
        tmp_path, "--ranks", "4", "--hosts", "1", "2", "4", "--stages", "2"
    ).items():
        # Of rank 0's groups, the stage is on more than one host if all ranks are apart.
        of_groups = [Connected.of(n, True) for n in (-(-num_hosts // 2), min(num_hosts, 2))]
        of_groups.append(Connected.of(num_hosts, True))
        # It makes the second connection to the store once, for two requests.
        assert row["sockets"] == sum(one.sockets for one in of_groups) - 2
        most = sum(one.requests for one in of_groups) - 4
        # A rank forgets two of the three keys of a rendezvous of two ranks, one of four ranks.
        most += 0 if wrap == "first wrap" else 2 + 2 + 1
        # One more or less in each rendezvous: of three groups, and of the first ranks of hosts.
        assert abs(row["requests"] - most) <= {1: 3, 2: 5, 4: 6}[num_hosts]


@pytest.mark.parametrize("held", ["sockets", "files", "threads"])
def test_what_a_rank_holds_does_not_grow_with_the_ranks(rows, held):
    few, many = (rows["second wrap", 1, ranks][held] for ranks in (2, 6))
    assert many <= few


def test_restore_gives_back_what_the_wrap_took(rows):
    for ranks in (2, 6):
        first, second = (rows[wrap, 1, ranks]["left"] for wrap in ("first wrap", "second wrap"))
        assert second == first
        assert second["sockets"] == second["threads"] == 0

"""Several hosts on one machine: network namespaces with a link of 1 Gbit/s between them, each with
two ranks that torchrun starts, or that are started with the variables of srun.

They need root and the tools `ip` and `tc`; `make hosts` runs them.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.hosts
RANK = Path(__file__).with_name("rank.py")
LIMIT_S = 120
ROWS, WIDTH, TIMEOUT_S = 2048, 1024, 6  # of rank.py


def ip(*args):
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True)


class Hosts:
    """``count`` namespaces, each with a card `card` in a bridged network."""

    def __init__(self, count):
        self.names = [f"flex{os.getpid()}h{i}" for i in range(count)]
        self.network = f"flex{os.getpid()}n"

    def __enter__(self):
        try:
            ip("netns", "add", self.network)
            ip("-n", self.network, "link", "add", "bridge", "type", "bridge")
            ip("-n", self.network, "link", "set", "bridge", "up")
            for i, name in enumerate(self.names):
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
                port = ["peer", "name", f"port{i}", "netns", self.network]
                ip("link", "add", "card", "netns", name, "type", "veth", *port)
                ip("-n", name, "addr", "add", f"10.99.0.{i + 1}/24", "dev", "card")
                ip("-n", name, "link", "set", "card", "up")
                ip("-n", self.network, "link", "set", f"port{i}", "master", "bridge", "up")
                rate = ["tbf", "rate", "1gbit", "burst", "256kb", "latency", "50ms"]
                command = ["tc", "-n", name, "qdisc", "add", "dev", "card", "root", *rate]
                subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            self.__exit__()
            reason = getattr(error, "stderr", "") or str(error)
            pytest.skip(f"network namespaces can't be made here: {reason.strip()}")
        return self

    def __exit__(self, *exc_info):
        for name in [*self.names, self.network]:
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                ip("netns", "del", name)

    def unplug(self, i):
        """No other host reaches this one any more."""
        ip("-n", self.network, "link", "set", f"port{i}", "down")


def by_torchrun(num_hosts, host, per_host):
    """The command on a host, and its variables: one for all ranks there."""
    where = ["--nnodes", str(num_hosts), "--node-rank", str(host)]
    address = ["--master-addr", "10.99.0.1", "--master-port", "29500"]
    yield ["-m", "torch.distributed.run", *where, *address, "--nproc-per-node", str(per_host)], {}


def by_srun(num_hosts, host, per_host):
    """One for each rank, with no variables but those of srun."""
    for place in range(per_host):
        of_step = {
            "STEP_ID": 0,
            "STEP_NODELIST": f"10.99.0.[1-{num_hosts}]",  # their names are their addresses
            "STEP_NUM_TASKS": num_hosts * per_host,
            "STEP_TASKS_PER_NODE": f"{per_host}(x{num_hosts})",
            "NODEID": host,
            "LOCALID": place,
            "PROCID": host * per_host + place,
            "JOB_ID": os.getpid(),
        }
        yield [], {f"SLURM_{name}": str(value) for name, value in of_step.items()}


@contextlib.contextmanager
def ranks(mode, folder, hosts, per_host=2, launcher=by_torchrun):
    """What the launcher starts on each host."""
    processes = []
    for i, name in enumerate(hosts.names):
        for command, variables in launcher(len(hosts.names), i, per_host):
            environment = {
                **os.environ,
                **variables,
                "FLEX_MODEL_HOST": name,
                "GLOO_SOCKET_IFNAME": "card",
                "OMP_NUM_THREADS": "1",
            }
            command = [sys.executable, *command, str(RANK), mode, str(folder)]
            command = ["ip", "netns", "exec", name, *command]
            with open(folder / f"host{i}.log", "a") as log:
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def results(folder, num_ranks, processes=()):
    """What the ranks wrote, as soon as all have."""
    wait_for([folder / f"rank{rank}.json" for rank in range(num_ranks)], processes, folder)
    time.sleep(0.2)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]


def wait_for(paths, processes, folder):
    until = time.monotonic() + LIMIT_S
    while not all(path.exists() for path in paths):
        logs = "\n".join(log.read_text()[-3000:] for log in folder.glob("host*.log"))
        assert time.monotonic() < until, logs
        assert not any(process.poll() for process in processes), logs
        time.sleep(0.1)


@pytest.mark.parametrize("count", [2, 4])
def test_hosts_give_the_bits_of_one_and_send_no_more_than_others_need(count, tmp_path):
    on = {}
    for num_hosts in (1, count):
        folder = tmp_path / str(num_hosts)
        folder.mkdir()
        with Hosts(num_hosts) as hosts, ranks("run", folder, hosts, 4 // num_hosts) as processes:
            on[num_hosts] = results(folder, 4, processes)
    one, many = on[1], on[count]
    assert [rank["values"] for rank in many] == [rank["values"] for rank in one]
    own = ROWS * WIDTH * 4 / count  # bytes of a host, which each other one needs
    for rank in range(0, 4, 4 // count):
        assert own * (count - 1) < many[rank]["sent"] < 1.1 * own * (count - 1)


@pytest.mark.parametrize("mode", ["lose", "wrap"])
def test_a_host_that_cant_be_reached_is_an_error_on_every_rank_in_time(mode, tmp_path):
    with Hosts(2) as hosts, ranks(mode, tmp_path, hosts):
        wait_for([tmp_path / f"ready{rank}" for rank in range(4)], (), tmp_path)
        hosts.unplug(1)
        (tmp_path / "go").touch()
        for result in results(tmp_path, 4):
            assert "error" in result, result
            assert result["took_s"] < TIMEOUT_S + 5
            print(f"{result['took_s']:.1f} s: {result['error'][:300]}")
            where = r"missing: rank 2 \([^()]*\)\. |ranks \[2, 3\] did not arrive|the store of"
            assert re.search(where, result["error"])


def test_ranks_with_sruns_variables_give_what_torchruns_give(tmp_path):
    found = {}
    for launcher in (by_torchrun, by_srun):
        folder = tmp_path / launcher.__name__
        folder.mkdir()
        with Hosts(2) as hosts, ranks("run", folder, hosts, launcher=launcher) as processes:
            found[launcher] = [rank["values"] for rank in results(folder, 4, processes)]
    assert found[by_srun] == found[by_torchrun]


def test_a_notebook_drives_ranks_that_ssh_starts_on_two_hosts(tmp_path):
    """With commands in place of ssh and scp that enter a namespace: the hosts have one disk."""
    pytest.importorskip("ipyparallel")
    enter = f"exec ip netns exec flex{os.getpid()}h$((${{host##*.}} - 1))"
    commands = {
        "ssh": f'host=$1; shift; {enter} env FLEX_MODEL_HOST=$host bash -c "$*"',
        "scp": '[ "${1#*:}" -ef "${2#*:}" ] || cp "${1#*:}" "${2#*:}"',
    }
    for name, line in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    settings = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "FLEX_MODEL_HOST": "10.99.0.1",
        "GLOO_SOCKET_IFNAME": "card",
        "OMP_NUM_THREADS": "1",
    }
    driver = [sys.executable, str(RANK.with_name("notebook_driver.py"))]
    with Hosts(2) as hosts:
        command = ["ip", "netns", "exec", hosts.names[0], *driver]
        done = subprocess.run(
            [*command, json.dumps({"10.99.0.1": 2, "10.99.0.2": 2})],
            env=os.environ | settings,
            capture_output=True,
            text=True,
            timeout=2 * LIMIT_S,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
        for name in hosts.names:  # all have ended with the driver
            left = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
            assert left.stdout == "", left.stdout

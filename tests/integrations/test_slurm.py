"""The variables of ranks that srun starts, from environments as Slurm makes them."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

import scripts
from flex_model.integrations import slurm

NAMES = "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"

# What srun sets (`srun --nodes 1 --ntasks 4 env`), of the second task.
ONE_HOST = """
SLURMD_NODENAME=t-cn0117 SLURM_CPUS_ON_NODE=4 SLURM_DISTRIBUTION=block SLURM_GTIDS=0,1,2,3
SLURM_JOBID=901593 SLURM_JOB_CPUS_PER_NODE=4 SLURM_JOB_ID=901593 SLURM_JOB_NODELIST=t-cn0117
SLURM_JOB_NUM_NODES=1 SLURM_LAUNCH_NODE_IPADDR=130.239.244.116 SLURM_LOCALID=1 SLURM_NNODES=1
SLURM_NODEID=0 SLURM_NODELIST=t-cn0117 SLURM_NPROCS=4 SLURM_NTASKS=4 SLURM_PROCID=1
SLURM_SRUN_COMM_HOST=130.239.244.116 SLURM_SRUN_COMM_PORT=33360 SLURM_STEPID=0 SLURM_STEP_ID=0
SLURM_STEP_LAUNCHER_PORT=33360 SLURM_STEP_NODELIST=t-cn0117 SLURM_STEP_NUM_NODES=1
SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=4 SLURM_TASKS_PER_NODE=4
"""

# Of a job on five hosts, of whose second step some tasks are on three: two, two and one of them.
UNEVEN = """
SLURMD_NODENAME=node09 SLURM_GTIDS=2,3 SLURM_JOBID=7712 SLURM_JOB_ID=7712
SLURM_JOB_NODELIST=node[07-11] SLURM_JOB_NUM_NODES=5 SLURM_LOCALID=1 SLURM_NNODES=3 SLURM_NODEID=1
SLURM_NODELIST=node[07-11] SLURM_NPROCS=5 SLURM_NTASKS=5 SLURM_PROCID=3 SLURM_STEPID=1
SLURM_STEP_ID=1 SLURM_STEP_NODELIST=node[08-10] SLURM_STEP_NUM_NODES=3 SLURM_STEP_NUM_TASKS=5
SLURM_STEP_TASKS_PER_NODE=2(x2),1 SLURM_TASKS_PER_NODE=2(x5)
"""

# The batch script's own process: sbatch --nodes 2 --ntasks-per-node 8.
BATCH = """
SLURMD_NODENAME=gpu-a1 SLURM_GTIDS=0 SLURM_JOBID=55 SLURM_JOB_ID=55 SLURM_JOB_NODELIST=gpu-a[1-2]
SLURM_JOB_NUM_NODES=2 SLURM_LOCALID=0 SLURM_NNODES=2 SLURM_NODEID=0 SLURM_NODELIST=gpu-a[1-2]
SLURM_NPROCS=16 SLURM_NTASKS=16 SLURM_NTASKS_PER_NODE=8 SLURM_PROCID=0 SLURM_TASKS_PER_NODE=8(x2)
"""


def environment(text, **changed):
    variables = dict(one.split("=", 1) for one in text.split())
    variables |= {name: value for name, value in changed.items() if value is not None}
    return {name: value for name, value in variables.items() if changed.get(name, "") is not None}


def ranks(text, **changed):
    variables = environment(text, **changed)
    slurm.set_ranks(variables)
    return {name: variables[name] for name in NAMES if name in variables}


def test_a_step_on_one_host():
    first, second = ranks(ONE_HOST, SLURM_PROCID="0", SLURM_LOCALID="0"), ranks(ONE_HOST)
    assert first == {**second, "RANK": "0", "LOCAL_RANK": "0"}
    assert second["RANK"] == second["LOCAL_RANK"] == "1"
    assert (second["WORLD_SIZE"], second["MASTER_ADDR"]) == ("4", "t-cn0117")
    assert 20_000 <= int(second["MASTER_PORT"]) < 32_000


def test_an_uneven_step_on_some_hosts_of_a_job():
    found = ranks(UNEVEN)
    assert [found[name] for name in NAMES[:4]] == ["3", "5", "1", "node08"]
    last = ranks(UNEVEN, SLURM_PROCID="4", SLURM_LOCALID="0", SLURM_NODEID="2")
    assert last == {**found, "RANK": "4", "LOCAL_RANK": "0"}


def test_steps_and_jobs_at_the_same_time_have_ports_of_their_own():
    steps = [ranks(UNEVEN, SLURM_STEP_ID=str(step))["MASTER_PORT"] for step in range(20)]
    jobs = [ranks(UNEVEN, SLURM_JOB_ID=str(job))["MASTER_PORT"] for job in range(7700, 7800)]
    assert len(set(steps)) == 20 and len(set(jobs)) == 100


@pytest.mark.parametrize(
    "nodelist, host",
    [
        ("login", "login"),
        ("a,b7", "a"),
        ("node[01-04,07]", "node01"),
        ("node[9-11]", "node9"),
        ("a[1,3],b,c[2-3]-ib", "a1"),
        ("r[1-2]n[05-06],a", "r1n05"),
        ("gpu[3].example.org", "gpu3.example.org"),
    ],
)
def test_the_first_host(nodelist, host):
    assert ranks(ONE_HOST, SLURM_STEP_NODELIST=nodelist)["MASTER_ADDR"] == host


def test_torchruns_variables_are_left_alone():
    of_torchrun = {
        "TORCHELASTIC_RUN_ID": "none",
        "RANK": "9",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gpu-a1",
        "MASTER_PORT": "29500",
    }
    # One task of srun's for each host, which starts torchrun.
    for text in (ONE_HOST, BATCH, UNEVEN):
        before = environment(text, **of_torchrun)
        after = dict(before)
        slurm.set_ranks(after)
        assert after == before
    by_hand = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "1234", "WORLD_SIZE": "5", "RANK": "3"}
    assert ranks(UNEVEN, **by_hand) == {**by_hand, "LOCAL_RANK": "1"}


def test_without_slurm_and_in_the_script_of_one_task_nothing_is_set():
    assert ranks("HOME=/") == {}
    assert ranks("SLURM_CONF=/etc/slurm.conf") == {}
    assert ranks(BATCH, SLURM_NTASKS="1", SLURM_NPROCS="1") == {}


@pytest.mark.parametrize(
    "text, changed, message",
    [
        (BATCH, {}, "srun did not start this process, and its job has 16 tasks"),
        (UNEVEN, {"SLURM_PROCID": None}, "SLURM_PROCID is not set"),
        (UNEVEN, {"SLURM_LOCALID": ""}, "SLURM_LOCALID is not set"),
        (UNEVEN, {"SLURM_STEP_NODELIST": None}, "SLURM_STEP_NODELIST is not set"),
        (UNEVEN, {"SLURM_STEP_ID": None}, "SLURM_STEP_ID is not set"),
        (UNEVEN, {"SLURM_PROCID": "x"}, "SLURM_PROCID must be a number, got 'x'"),
        (UNEVEN, {"RANK": "0"}, "RANK is '0' in the environment, .* make it 3"),
        (UNEVEN, {"WORLD_SIZE": "10"}, "WORLD_SIZE is '10' in the environment"),
        (UNEVEN, {"LOCAL_RANK": "3"}, "LOCAL_RANK is '3' in the environment"),
        (UNEVEN, {"SLURM_DISTRIBUTION": "arbitrary"}, "set MASTER_ADDR"),
        (UNEVEN, {"SLURM_STEP_NODELIST": ",a"}, "set MASTER_ADDR"),
        (UNEVEN, {"SLURM_HET_SIZE": "2"}, "one component of this heterogeneous job"),
    ],
)
def test_what_is_missing_or_contradicts_is_an_error_and_sets_nothing(text, changed, message):
    variables = environment(text, **changed)
    before = dict(variables)
    with pytest.raises(ValueError, match=message):
        slurm.set_ranks(variables)
    assert variables == before


SCRIPT = """
import json
import os
import torch.distributed as dist

from flex_model.integrations import slurm

slurm.set_ranks()
dist.init_process_group("gloo")
ranks = [None] * dist.get_world_size()
dist.all_gather_object(ranks, dist.get_rank())
print(json.dumps([dist.get_rank(), ranks]), flush=True)
dist.barrier()
os._exit(0)  # gloo's threads abort an orderly exit now and then
"""


@pytest.mark.slow
def test_a_job_with_slurms_variables_only():
    """Two processes, as srun would start them."""
    step = f"SLURM_JOB_ID={os.getpid()} SLURM_STEP_ID=0 SLURM_NODEID=0 SLURM_STEP_NUM_TASKS=2"
    step += " SLURM_STEP_TASKS_PER_NODE=2 SLURM_STEP_NODELIST=localhost"

    def run(rank):
        of_task = environment(step, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank))
        return scripts.run_code(SCRIPT, **of_task).stdout

    with ThreadPoolExecutor() as threads:
        printed = list(threads.map(run, range(2)))
    assert [json.loads(one.splitlines()[-1]) for one in printed] == [[0, [0, 1]], [1, [0, 1]]]

"""The variables that torch.distributed takes, from those that Slurm's ``srun`` sets."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import MutableMapping

__all__ = ["set_ranks"]

_FIRST_PORT, _NUM_PORTS = 20_000, 12_000  # below those that Linux gives to connections


def set_ranks(environ: MutableMapping[str, str] | None = None) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for a process that ``srun``
    started, so that ``torch.distributed.init_process_group()`` needs no arguments. Local.

    Example::

        from flex_model.integrations import slurm

        slurm.set_ranks()
        torch.distributed.init_process_group("nccl")

    It changes nothing where torchrun or no ``srun`` started the process, so a script may always
    call it. MASTER_ADDR and MASTER_PORT that are set already are kept; by default they are the
    first host of the step, and a port from 20000 to 31999 that its job and step determine.

    Args:
        environ: The variables, by default those of this process.

    Raises:
        ValueError: Slurm's variables contradict each other, or those that are set already; one is
            missing; or this is the batch script's own process, which has no other ranks.
    """
    environ = os.environ if environ is None else environ
    if "TORCHELASTIC_RUN_ID" in environ or "SLURM_JOB_ID" not in environ:
        return
    if "SLURM_STEP_NUM_TASKS" not in environ:
        _check_is_alone(environ)
        return
    size, rank = _number(environ, "SLURM_STEP_NUM_TASKS"), _number(environ, "SLURM_PROCID")
    local_rank = _number(environ, "SLURM_LOCALID")
    hosts = hosts_of(_value(environ, "SLURM_STEP_NODELIST"))
    _check(environ, size, rank, local_rank, len(hosts))
    if "MASTER_ADDR" not in environ and environ.get("SLURM_DISTRIBUTION") == "arbitrary":
        raise ValueError(
            "srun --distribution=arbitrary: the host of task 0 is not known from Slurm's variables;"
            " set MASTER_ADDR to its name in the batch script"
        )
    job, step = _number(environ, "SLURM_JOB_ID"), _number(environ, "SLURM_STEP_ID")
    ranks = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank}
    for name, number in ranks.items():
        if environ.get(name, str(number)) != str(number):
            raise ValueError(
                f"{name} is {environ[name]!r} in the environment, and Slurm's variables make it "
                f"{number}; leave {name} to srun: unset it in the batch script"
            )
    environ.update({name: str(number) for name, number in ranks.items()})
    environ.setdefault("MASTER_ADDR", hosts[0])
    environ.setdefault("MASTER_PORT", str(_FIRST_PORT + (31 * job + step) % _NUM_PORTS))


def hosts_of(nodelist: str) -> list[str]:
    """Return the hosts that a list such as ``node[01-04,07],login1`` names, in its order.

    Raises:
        ValueError: ``nodelist`` is not such a list.
    """
    hosts = []
    for item in re.findall(r"(?:\[[^][]*\]|[^][,])+|.", nodelist):
        if item == ",":
            continue
        parts = re.split(r"\[([^][]*)\]", item)  # text, ranges, text, ranges, ..., text
        choices = [_numbers(nodelist, part) if i % 2 else [part] for i, part in enumerate(parts)]
        hosts += ["".join(chosen) for chosen in itertools.product(*choices)]
    if not hosts or not all(re.fullmatch(r"[\w.-]+", host) for host in hosts):
        raise ValueError(f"{nodelist!r} is not a list of Slurm's hosts, such as 'node[01-04,07]'")
    return hosts


def _numbers(nodelist: str, ranges: str) -> list[str]:
    """The numbers of ``01-04,07``, with their leading zeros."""
    found = []
    for one in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", one)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"{nodelist!r} is not a list of Slurm's hosts: {one!r} is not a range")
        first, last = match[1], match[2] or match[1]
        found += [f"{i:0{len(first)}}" for i in range(int(first), int(last) + 1)]
    return found


def _check_is_alone(environ: MutableMapping[str, str]) -> None:
    if environ.get("SLURM_NTASKS", "1") != "1":
        raise ValueError(
            f"srun did not start this process, and its job has {environ['SLURM_NTASKS']} tasks; "
            "start the script by srun or torchrun in the batch script"
        )


def _check(
    environ: MutableMapping[str, str], size: int, rank: int, local_rank: int, num_hosts: int
) -> None:
    """ValueError where the number of this task, of its host and of all contradict each other."""
    if "SLURM_HET_SIZE" in environ:
        raise ValueError(
            "Slurm's variables describe one component of this heterogeneous job, not its ranks; "
            "start the script by torchrun on each host"
        )
    node = _number(environ, "SLURM_NODEID")
    of_hosts = _tasks_of_hosts(_value(environ, "SLURM_STEP_TASKS_PER_NODE"))
    if (
        len(of_hosts) != num_hosts
        or sum(of_hosts) != size
        or rank >= size
        or node >= num_hosts
        or local_rank >= of_hosts[node]
    ):
        names = [
            "STEP_NUM_TASKS",
            "PROCID",
            "LOCALID",
            "NODEID",
            "STEP_NODELIST",
            "STEP_TASKS_PER_NODE",
        ]
        listed = ", ".join(f"SLURM_{name}={environ[f'SLURM_{name}']}" for name in names)
        raise ValueError(
            f"Slurm's variables contradict each other: {listed}; start the script by srun, without "
            "those of another job (--export=NONE of sbatch)"
        )


def _tasks_of_hosts(text: str) -> list[int]:
    """The numbers of ``4(x2),3``: of two hosts with four tasks, and one with three."""
    found: list[int] = []
    for one in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", one)
        if match is None:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={text!r} is not a list such as '4(x2),3'")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _number(environ: MutableMapping[str, str], name: str) -> int:
    value = _value(environ, name)
    if not value.isdecimal():
        raise ValueError(f"{name} must be a number, got {value!r}")
    return int(value)


def _value(environ: MutableMapping[str, str], name: str) -> str:
    value = environ.get(name)
    if not value:
        raise ValueError(
            f"srun started this process, and {name} is not set; start the script by srun itself, "
            "or pass on all of its variables (--export=ALL)"
        )
    return value

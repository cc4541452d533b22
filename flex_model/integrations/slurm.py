"""The variables that torch.distributed takes, from those that Slurm's ``srun`` sets."""

from __future__ import annotations

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
        ValueError: a variable is missing, or contradicts what is set already; or this is the batch
            script's own process, which has no other ranks.
    """
    environ = os.environ if environ is None else environ
    if "TORCHELASTIC_RUN_ID" in environ or "SLURM_JOB_ID" not in environ:
        return
    if "SLURM_STEP_NUM_TASKS" not in environ:
        if environ.get("SLURM_NTASKS", "1") != "1":
            raise ValueError(
                f"srun did not start this process, and its job has {environ['SLURM_NTASKS']} "
                "tasks; start the script by srun or torchrun in the batch script"
            )
        return
    if "SLURM_HET_SIZE" in environ:
        raise ValueError(
            "Slurm's variables describe one component of this heterogeneous job, not its ranks; "
            "start the script by torchrun on each host"
        )
    numbers = {"RANK": "PROCID", "WORLD_SIZE": "STEP_NUM_TASKS", "LOCAL_RANK": "LOCALID"}
    found = {name: str(_number(environ, f"SLURM_{own}")) for name, own in numbers.items()}
    for name, number in found.items():
        if environ.get(name, number) != number:
            raise ValueError(
                f"{name} is {environ[name]!r} in the environment, and Slurm's variables make it "
                f"{number}; leave {name} to srun: unset it in the batch script"
            )
    if "MASTER_ADDR" not in environ:
        found["MASTER_ADDR"] = _first_host(environ)
    job, step = _number(environ, "SLURM_JOB_ID"), _number(environ, "SLURM_STEP_ID")
    environ.update(found)
    environ.setdefault("MASTER_PORT", str(_FIRST_PORT + (31 * job + step) % _NUM_PORTS))


def _first_host(environ: MutableMapping[str, str]) -> str:
    """Return the first of hosts such as ``node[01-04,07],login1``, where task 0 is."""
    hosts = _value(environ, "SLURM_STEP_NODELIST")
    first = re.match(r"(?:\[[^]]*\]|[^,[])+", hosts)
    if first is None or environ.get("SLURM_DISTRIBUTION") == "arbitrary":
        raise ValueError(
            f"the host of task 0 is not known from SLURM_STEP_NODELIST={hosts!r}; set MASTER_ADDR "
            "to its name in the batch script"
        )
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", first[0])


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

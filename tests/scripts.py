"""Scripts, run as a user runs them."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAUNCHERS = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
}


def run(folder, program, *arguments):
    """``program`` (of `LAUNCHERS`) in ``folder``, which must end well; what it printed."""
    return finished(folder, *LAUNCHERS[program], *arguments).stdout


def run_code(code, *arguments, options=(), **environment):
    """``code`` in a Python of its own, which must end well."""
    command = [*LAUNCHERS["python"], *options, "-c", textwrap.dedent(code), *map(str, arguments)]
    return finished(ROOT, *command, **environment)


def finished(folder, *command, timeout_s=180, **variables):
    # Variables of torchrun or Slurm, where pytest itself runs under it, are not for the script.
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        and not name.startswith(("TORCHELASTIC", "SLURM"))
    }
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done

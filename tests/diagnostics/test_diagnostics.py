"""The log, the last steps that errors tell, and ``python -m flex_model doctor``."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import models
from flex_model import FlexModel, HookFunction
from flex_model.diagnostics import FlightRecorder, doctor, logger, rank_log
from flex_model.errors import HookError, HookMismatchError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def own_logger():
    before = logger.handlers[:], logger.level, logger.propagate
    yield logger
    logger.handlers[:], level, logger.propagate = before
    logger.setLevel(level)


def test_the_log_names_the_rank_and_goes_to_a_file(own_logger, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    rank_log.setup_logger(f"info:{tmp_path}/flex.{{rank}}.log")
    logger.debug("too much")
    logger.info("hello from %s", "here")
    (line,) = (tmp_path / "flex.3.log").read_text().splitlines()
    assert re.fullmatch(r"\[flex_model rank 3 [\d :,-]+\] hello from here", line)


def test_steps_are_counted_and_forgotten():
    steps = FlightRecorder()
    assert str(steps) == "nothing"
    for name in ("a", "b", "b", "b", "a"):
        steps.add(name)
    assert str(steps) == "a; b (x3); a"
    for i in range(100):
        steps.add(f"step {i}")
    assert str(steps).startswith("... step 88;") and str(steps).endswith("; step 99")


@pytest.mark.ranks(2)
def test_errors_of_several_ranks_tell_what_each_did_last():
    rank = dist.get_rank()
    flex = models.replicas(FlexModel(models.mlp(), tensor_parallel_size=2))
    flex.register_forward_hook(HookFunction("fc1", editing_function=lambda m, x, s, d: x * 2))
    batch = models.random(4, 6)
    flex(batch)
    wrong = HookFunction(["act", "fc2"][rank])
    handle = flex.register_forward_hook(wrong)
    with pytest.raises(HookMismatchError) as error:
        flex(batch)
    text = str(error.value)
    assert "see docs/errors.md#ranks-differ" in text
    steps = text.split("Last steps:")[1].splitlines()
    for other in range(2):
        (line,) = [step for step in steps if step.startswith(f"  rank {other}: ")]
        assert "forward hook on 'fc1'" in line and "end of the run" in line
    handle.remove()
    flex(batch)

    def edit(module, full, save_ctx, modules):
        raise ArithmeticError("no")

    flex.register_forward_hook(HookFunction("act", editing_function=edit))
    with pytest.raises(HookError, match=r"(?s)ArithmeticError: no.*Last steps:.*rank 1: "):
        flex(batch)
    flex.restore()


def sections():
    text = (ROOT / "docs" / "errors.md").read_text()
    titles = re.findall(r"^## (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def test_every_section_that_a_message_names_is_there():
    named = set()
    for path in (ROOT / "flex_model").rglob("*.py"):
        named |= set(re.findall(r"""see\(['"]([\w-]+)['"]\)""", path.read_text()))
        named |= set(re.findall(r'anchor = "([\w-]+)" if', path.read_text()))
        named |= set(re.findall(r'else "([\w-]+)"\n\s+return agreed', path.read_text()))
    assert {"ranks-differ", "a-rank-is-missing", "a-forked-process"} <= named <= sections()


@pytest.mark.slow
def test_the_doctor_tries_two_ranks():
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    run = subprocess.run(
        [sys.executable, "-m", "flex_model", "doctor", "--json"],
        capture_output=True,
        text=True,
        env={**environment, "PYTHONPATH": str(ROOT), "FLEX_MODEL_LOG": "info"},
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads(run.stdout)
    trials = {trial["transport"]: trial for trial in report["trials"]}
    assert report["is_well"] and report["build"]["torch"] == torch.__version__
    assert trials["shared_memory"]["works"] and trials["gloo"]["works"]
    assert trials["nccl"]["works"] == (torch.cuda.device_count() > 1)
    assert "communicate by shared_memory: the ranks are on one host" in run.stderr


def without_cuda_in_torch(patch):
    patch.setattr(torch.version, "cuda", None)


def with_an_old_driver(patch):
    def init():
        raise RuntimeError("The NVIDIA driver on your system is too old")

    patch.setattr(torch.version, "cuda", "13.0")
    patch.setattr(torch.cuda, "init", init)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch finds the GPU")
@pytest.mark.parametrize(
    ("lacking", "what", "mend"),
    [
        (without_cuda_in_torch, f"CUDA, which torch {torch.__version__} lacks", "pip install"),
        (with_an_old_driver, "CUDA 13.0 of torch: The NVIDIA driver on your sys", "if CUDA_VIS"),
    ],
)
def test_the_doctor_finds_a_gpu_that_torch_does_not(monkeypatch, lacking, what, mend):
    assert doctor._gpus() == ({}, [])
    monkeypatch.setattr(doctor.glob, "glob", lambda pattern: ["/dev/nvidia0"])
    lacking(monkeypatch)
    gpus, missing = doctor._gpus()
    report = doctor.Report({}, gpus, missing, {}, {}, {}, [doctor.Trial("gloo", True, "")])
    assert not report.is_well and json.loads(report.json())["missing"][0]["what"] == missing[0].what
    assert f"\nmissing: {what}" in str(report) and f"\n  to mend it: {mend}" in str(report)


def test_the_doctor_mends_what_an_old_driver_cannot_run():
    why = "CUDA driver version is insufficient for CUDA runtime version"
    assert "CUDA_HOME=FOLDER FLEX_MODEL_CUDA=1 pip install" in doctor._mend_kernels(why, "9.0")

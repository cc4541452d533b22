"""What is used in place of kernels and transports that don't work. Needs a GPU."""

import sys

import pytest
import torch

from flex_model import _load
from flex_model.diagnostics import doctor
from flex_model.distributed import kernels
from flex_model.integrations.torch_private import FakeTensorMode
from tests.cuda.processes import run_ranks

EMULATED = "tests.cuda.emulated.runtime" in sys.modules
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
needs_emulation = pytest.mark.skipif(not EMULATED, reason="the kernels work on this GPU")


@pytest.fixture(autouse=True)
def _untried():
    kernels.why_unusable.cache_clear()
    yield
    kernels.why_unusable.cache_clear()


def test_kernels_that_work_are_tried_once_in_any_mode(monkeypatch):
    device = torch.device("cuda", 0)
    with FakeTensorMode():
        assert kernels.why_unusable(device) == ""
    monkeypatch.setattr(torch.ops.flex_model, "split", None)
    assert kernels.why_unusable(device) == ""


def test_a_kernel_that_copies_nothing_is_found(monkeypatch):
    def split(full, plan, rank, sizes):
        return full.new_zeros(sizes)

    monkeypatch.setattr(torch.ops.flex_model, "split", split)
    reason = kernels.why_unusable(torch.device("cuda", 0))
    assert reason == "a CUDA kernel copied [0, 0, 0, 0], not [4, 5, 6, 7]"


@needs_emulation
def test_a_gpu_for_which_there_is_no_code(monkeypatch):
    monkeypatch.setenv("FLEX_MODEL_EMULATED_NO_IMAGE", "1")
    assert kernels.why_unusable(torch.device("cuda", 0)) == ""
    reason = kernels.why_unusable(torch.device("cuda", 1))
    assert reason.startswith("the CUDA kernels don't run on the GPU: split: CUDA device 1 failed")
    assert "no kernel image is available" in reason


@needs_emulation
def test_the_doctor_runs_a_kernel_on_each_gpu(monkeypatch):
    monkeypatch.setenv("FLEX_MODEL_EMULATED_NO_IMAGE", "1")
    gpus, (missing,) = doctor._gpus()
    assert gpus["cuda:0"] == "emulated GPU (9.0): a CUDA kernel ran"
    assert "emulated GPU (9.0): the CUDA kernels don't run on the GPU" in gpus["cuda:1"]
    assert missing.what.startswith("cuda:1: the CUDA kernels don't run on the GPU: split: ")
    assert missing.mend.startswith('TORCH_CUDA_ARCH_LIST="9.0" FLEX_MODEL_CUDA=1 pip install ')


@needs_emulation
def test_the_doctor_on_gpus_without_kernels(monkeypatch):
    monkeypatch.setitem(_load._loaded, "_cuda", "nvcc was not found")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    gpus, missing = doctor._gpus()
    assert len(gpus) == 3
    assert all("not loaded: nvcc was not found" in text for text in gpus.values())
    assert [one.what for one in missing] == [
        "the CUDA kernels: nvcc was not found",
        f"NCCL, which torch {torch.__version__} lacks",
    ]
    assert missing[0].mend.startswith("FLEX_MODEL_CUDA=1 pip install --force-reinstall")


@needs_emulation
def test_processes_that_lack_something_agree_on_the_next_transport(tmp_path):
    run_ranks(tmp_path, "tests.cuda.fallback", 2)

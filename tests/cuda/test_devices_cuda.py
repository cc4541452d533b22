"""One process, a model on several devices, as `device_map="auto"` leaves it: the same numbers as on
one device, with hooks on all sides.
"""

import threading

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from flex_model import FlexModel, HookError, HookFunction
from flex_model.distributed import kernels
from flex_model.hooks.handlers import BackwardLock
from flex_model.records.snapshots import Snapshots
from tests import device_maps, models

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
several = pytest.mark.skipif(NUM_GPUS < 2, reason="one GPU")
PLACES = {"two GPUs": (0, 1, 1), "CPU and GPU": ("cpu", 0, "cpu"), "disk and GPUs": (1, "disk", 0)}


@pytest.mark.parametrize(
    "places", [pytest.param(p, marks=[pytest.mark.slow] * (p == "two GPUs")) for p in PLACES]
)
@pytest.mark.parametrize("case", device_maps.CASES)
def test_a_dispatched_model(case, places, tmp_path_factory):
    accelerate = pytest.importorskip("accelerate")
    if NUM_GPUS < 2 and 1 in PLACES[places]:
        pytest.skip("one GPU")

    def dispatch(model):
        folder = tmp_path_factory.mktemp("offloaded")
        device_map = device_maps.device_map(*PLACES[places])
        return accelerate.dispatch_model(model, device_map, offload_dir=folder)

    device_maps.check(case, dispatch)


def test_a_dry_run_of_weights_that_are_loaded_to_a_gpu_is_refused():
    accelerate = pytest.importorskip("accelerate")
    model = models.llama(3)
    expected = model(device_maps.IDS).logits
    accelerate.dispatch_model(model, device_maps.device_map("cpu", 0, 0))
    flex = FlexModel(model, {})
    with pytest.raises(HookError, match=r"can't be run on shapes alone.*run it with values"):
        flex.dry_run(device_maps.IDS)
    assert_close(flex(device_maps.IDS).logits, expected)


@several
@pytest.mark.parametrize("device_map", ["auto", "balanced"])
def test_a_model_that_transformers_loads(device_map, tmp_path):
    pytest.importorskip("accelerate")
    whole = models.llama(3)
    whole.save_pretrained(tmp_path)
    num_bytes = sum(p.nbytes for p in whole.parameters())
    loaded = type(whole).from_pretrained(
        tmp_path,
        device_map=device_map,
        max_memory={0: num_bytes // 2, 1: num_bytes},
        dtype=torch.float64,
        attn_implementation="eager",
    )
    assert len(set(loaded.hf_device_map.values())) == 2
    case, records, expected = device_maps.CASES["edits"], {}, {}
    logits, wanted = case(FlexModel(loaded.eval(), records)), case(FlexModel(whole, expected))
    assert_close(device_maps.on_cpu([logits, records]), device_maps.on_cpu([wanted, expected]))


class Branches(nn.Module):
    """One input to several devices at the same time."""

    def __init__(self, devices, depth=8):
        super().__init__()
        self.branches = nn.ModuleList(
            models.seeded(lambda: nn.Sequential(*[nn.Linear(8, 8) for _ in range(depth)]))
            .double()
            .to(device)
            for device in devices
        )

    def forward(self, x):
        return sum(branch(x.to(branch[0].weight.device)).to(x.device) for branch in self.branches)


@several
def test_gradient_hooks_in_the_threads_of_several_devices():
    """They draw random numbers, those of two FlexModels too, and what the user draws afterwards is
    the same.
    """

    def run(devices):
        threads, results = set(), []

        def add_noise(module, full, save_ctx, modules):
            threads.add(threading.get_ident())
            noise = torch.randn(8, dtype=torch.float64)
            for _ in range(10):
                full = full * 1.0
            return full + noise.to(full.device)

        records, other_records, model = {}, {}, Branches(devices)
        flex, other = FlexModel(model, records), FlexModel(model, other_records)
        for name in flex.wrapped_module_names:
            if name.count(".") == 2:
                for one in (flex, other):
                    one.register_full_backward_hook(HookFunction(name, editing_function=add_noise))
        parameter = "branches.0.3.weight"
        flex.register_hook(HookFunction(parameter, editing_function=lambda m, g, s, ms: g * 2))
        for seed in range(5):
            torch.manual_seed(seed)
            x = models.random(4, 8).requires_grad_()
            flex(x).pow(2).sum().backward()
            results += [x.grad, flex.get_module_gradient(parameter), torch.rand(3)]
        return [results, records, other_records], len(threads)

    (expected, _), (found, num_threads) = run(["cpu"] * 3), run(["cpu", "cuda:0", "cuda:1"])
    assert num_threads == 3
    assert_close(found, expected)


def test_a_gradient_hook_waits_for_another_thread_until_the_deadline():
    turns, raised = BackwardLock(0.05, is_local=False), []

    def wait():
        try:
            with turns:
                pass
        except HookError as error:
            raised.append(str(error))

    with turns, turns:
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
    assert "waited 0.05 s for one in the thread of another device" in raised[0]
    wait()
    assert len(raised) == 1


@several
def test_records_of_several_devices_of_which_one_runs_no_kernels(monkeypatch):
    """Each device has its own way to the host, side stream and event."""
    bad, copied, real = torch.device("cuda", 0), [], kernels.why_unusable

    def why_unusable(device):
        copied.append(device)
        return "broken" if device == bad else real(device)

    monkeypatch.setattr(kernels, "why_unusable", why_unusable)
    for max_gpu_bytes in (1 << 30, 1 << 12):
        snapshots, expected, kept = Snapshots(max_gpu_bytes), [], []
        for i in range(12):
            values = torch.randn(50, 40) if i % 3 else torch.randn(700, 500)
            device = torch.device("cuda", i % 2)
            on_gpu = values.to(device)
            kept.append(snapshots.take(on_gpu))  # the current device is the first one
            on_gpu.zero_()
            expected.append(values)
        snapshots.to_cpu(kept)
        assert set(copied) == {bad, torch.device("cuda", 1)}
        for snapshot, values in zip(kept, expected):
            assert snapshot.tensor.device.type == "cpu"
            assert snapshot.ready is None
            assert torch.equal(snapshot.tensor, values)
        snapshots.drop(kept)


@several
def test_hooks_of_several_devices_do_not_wait_for_them():
    """Read-only hooks: the host waits for no device before the run ends."""
    devices = ["cuda:0", "cuda:1"]
    records, model = {}, Branches(devices, depth=4)
    flex = FlexModel(model, records)
    names = [name for name in flex.wrapped_module_names if name.count(".") == 2]
    for name in names:
        flex.register_forward_hook(HookFunction(name))
    inputs = [models.random(4, 8).to(device) for device in devices]
    flex.register_forward_pre_hook(HookFunction("branches.0", output_name="input"))

    with torch.no_grad(), flex.active():
        torch.cuda.set_sync_debug_mode("error")
        try:
            for branch, x in zip(model.branches, inputs):
                branch(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for branch, x, device in zip(model.branches, inputs, devices):
        hidden = x
        for i, layer in enumerate(branch):
            hidden = layer(hidden)
            name = f"branches.{devices.index(device)}.{i}"
            assert_close(records[name][0], hidden.detach().cpu())
    assert_close(records["input"][0], inputs[0].cpu())

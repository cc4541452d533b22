"""A notebook on two ranks: a real kernel, cells that share a sharded model, and how they end."""

import os
import re
import signal
import time

import pytest

pytest.importorskip("ipyparallel")
kernels = pytest.importorskip("kernels")  # with nbclient and ipykernel

LAUNCH = """\
import flex_model.notebook
ranks = flex_model.notebook.launch(2, grace_s=2)
"""
# Read by the cells of ranks, and by the driver for the unsharded model.
MODEL = """\
import torch
from torch import nn
from flex_model import FlexModel, HookFunction
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
x = torch.randn(4, 8)
def flip(module, full, save_ctx, modules):
    return full.flip(-1)
"""
SHARD = """\
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
parallelize_module(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan)
"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebook")
    with kernels.marked(folder) as mark, kernels.started(folder) as notebook:
        notebook.run(LAUNCH)
        notebook.run(f"%%px\n{MODEL}{SHARD}flex = FlexModel(model, activations := {{}})")
        notebook.run(MODEL + "unsharded = FlexModel(model, expected := {})")
        yield notebook
        notebook.kill()
        assert kernels.wait_until_none_left(mark) == []


def test_two_cells_work_on_one_model_and_records_are_on_the_driver(notebook):
    first = 'flex.register_forward_hook(HookFunction("1", editing_function=flip))\n'
    second = 'flex.register_forward_hook(HookFunction("2"))\n'
    run = "with torch.no_grad(): out = flex(x)"
    notebook.run(f"%%px\n{first}{run}")
    notebook.run(f"%%px\n{second}{run}")
    unsharded = (first + second + run).replace("flex", "unsharded")
    notebook.run(unsharded)
    assert notebook.run("list(ranks['activations'])") == "['1', '2']"
    notebook.run("""
for name in expected:
    (record,) = ranks["activations"][name]
    torch.testing.assert_close(record, expected[name][0])
torch.testing.assert_close(ranks["out"], out)
""")
    table = notebook.run("ranks['activations']")
    assert re.search(r"1 +4 x 16 +float32 +1\n2 +4 x 8 +float32 +1", table), table


def test_pictures_are_rich(notebook):
    for call in ("layouts()", "explain()", "dry_run(x)", "show()"):
        cell = notebook.cell(f"ranks['flex'].{call}")
        assert not kernels.error_of(cell), kernels.error_of(cell)
        assert "<table>" in kernels.html_of(cell) or "<iframe" in kernels.html_of(cell), call


def test_a_failing_edit_is_shown_once_and_the_next_cell_works(notebook):
    shown = notebook.fail(
        """%%px
def wrong(module, full, save_ctx, modules):
    raise ValueError("of the edit")
with flex_model.FlexModel(model) as other:
    other.register_forward_hook(HookFunction("1", editing_function=wrong))
    other(x)
""".replace("flex_model.", "")
    )
    assert "ranks 0, 1:" in shown and shown.count("of the edit") < 12, shown
    assert "HookError" in shown and "restart" not in shown
    assert notebook.run("%%px\nflex(x).shape").startswith("[0, 1] torch.Size([4, 8])")


def test_the_same_error_of_all_ranks_is_shown_once(notebook):
    shown = notebook.fail("%%px\nassert False, 'why' + str(1)")
    assert "ranks 0, 1:" in shown and shown.count("why1") <= 2, shown


def test_ctrl_c_stops_cells_that_python_runs(notebook):
    began = time.monotonic()
    shown = notebook.fail(
        "%%px\nimport time\ntime.sleep(100)", after_s=1, action=notebook.interrupt
    )
    assert "KeyboardInterrupt" in shown and time.monotonic() - began < 20
    assert "ended" not in notebook.run("ranks")
    assert notebook.run("%%px\nflex(x).shape").startswith("[0, 1] torch.Size([4, 8])")


@pytest.mark.slow  # three seconds each
@pytest.mark.parametrize(
    "runs",
    [
        "%%px\nwhile True:\n    hooked(x).sum().backward()",
        # one run of many forwards
        "%%px\nwith hooked.active():\n    while True:\n        model(x)",
        "while True:\n    ranks['hooked'](x)",
    ],
)
def test_ctrl_c_stops_runs_on_all_ranks_together(notebook, runs):
    """Most of the time a rank is in a collective, of the model's own or of hooks."""
    hook = "hooked.register_forward_hook(HookFunction('1', editing_function=flip))"
    notebook.run(f"%%px\nhooked = FlexModel(model)\n_ = {hook}")
    for after_s in (0.5, 0.8, 1.1):
        cell = notebook.cell(runs, after_s=after_s, action=notebook.interrupt)
        assert "KeyboardInterrupt" in kernels.error_of(cell)
        assert "ended" not in kernels.text_of(cell)
        assert "torch.Size([4, 8])" in notebook.run("%%px\nhooked(x).shape")
    notebook.run("%%px\nhooked.restore()")


@pytest.mark.slow
def test_a_rank_that_waits_for_one_that_failed_is_ended(notebook):
    began = time.monotonic()
    shown = notebook.fail("%%px\nif dist.get_rank():\n    raise ValueError('mine')\ndist.barrier()")
    assert time.monotonic() - began < 30
    assert "rank 1:" in shown and "mine" in shown, shown
    assert "rank 0: EndedError" in shown and "ranks.restart()" in shown, shown
    assert "1 ended" in notebook.run("ranks")
    assert "ranks.restart()" in notebook.fail("%%px\nflex(x)")
    assert "afresh" in notebook.run("ranks.restart()")
    assert "NameError" in notebook.fail("%%px\nflex")


@pytest.mark.slow
def test_ctrl_c_in_a_collective_ends_the_ranks_in_it(notebook):
    began = time.monotonic()
    code = "%%px\nif dist.get_rank():\n    dist.barrier()"
    cell = notebook.cell(code, after_s=1, action=notebook.interrupt)
    assert "KeyboardInterrupt" in kernels.error_of(cell)
    assert "rank 1" in kernels.text_of(cell) and "ranks.restart()" in kernels.text_of(cell)
    assert time.monotonic() - began < 30


@pytest.mark.slow  # it starts ranks afresh once more
def test_a_killed_rank_ends_the_cell(notebook):
    notebook.run("ranks.restart()")
    pids = notebook.run("%%px\nimport os\nprint(os.getpid())")
    pid = int(re.search(r"\[1\] (\d+)", pids)[1])
    began = time.monotonic()
    code = "%%px\ndist.barrier() if dist.get_rank() == 0 else time.sleep(100)"
    shown = notebook.fail(code, after_s=1, action=lambda: os.kill(pid, signal.SIGKILL))
    assert time.monotonic() - began < 30
    assert "rank 1" in shown and "ranks.restart()" in shown, shown

"""Children that a rank forks after it has wrapped a model: each ends as if there were no wrap, and
the rank goes on. Before, they hung, aborted or segfaulted at their end.
"""

from pathlib import Path

import pytest

import scripts
from tiers import grid_but

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parent.parent

SCRIPT = """
import faulthandler, gc, multiprocessing, os, signal, sys
import torch
import torch.distributed as dist

sys.path.insert(0, {tests!r})
import models
from flex_model import FlexModel, HookError, HookFunction

os.environ["FLEX_MODEL_TRANSPORT"] = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
BATCH = models.random(2000, 6)
records = {{}}
flex = models.replicas(FlexModel(models.mlp(), records, tensor_parallel_size=2))
flex.register_forward_hook(HookFunction("fc1", editing_function=lambda m, full, s, ms: full * 2))
flex.register_full_backward_hook(HookFunction("fc2", output_name="grad"))
flex(BATCH).sum().backward()
output = flex(BATCH)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return BATCH[index] if flex is not None else None


def child(way):
    faulthandler.dump_traceback_later(20, exit=True)
    if way == "drop":
        globals().update(flex=None, output=None)
        gc.collect()
    elif way == "restore":
        flex.restore()
    elif way == "run":
        try:
            flex(BATCH)
        except HookError as error:
            assert "forked" in str(error)
        else:
            os._exit(3)
    if way == "_exit":
        os._exit(0)
    if way == "raise":
        sys.excepthook = lambda *error: None
        raise ArithmeticError


def end_of(way):
    # The exit code of a child that ends this way.
    pid = os.fork()
    if pid == 0:
        child(way)
        sys.exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


fork = multiprocessing.get_context("fork")
for way in ("exit", "_exit", "raise", "drop"):
    code = end_of(way)
    assert code == (way == "raise"), (way, code)
for way in ("drop", "restore", "run"):
    process = fork.Process(target=child, args=(way,))
    process.start()
    process.join()
    assert process.exitcode == 0, (way, process.exitcode)
loader = torch.utils.data.DataLoader(
    Rows(), batch_size=2, num_workers=2, multiprocessing_context="fork"
)
assert torch.equal(torch.cat(list(loader)), BATCH[:4])
output.sum().backward()
flex(BATCH)
assert rank or len(records["fc1"]) == 1
flex.restore()
dist.destroy_process_group()
print("ends well", flush=True)
"""


@pytest.mark.parametrize("transport", grid_but(["shared_memory", "gloo"], "shared_memory"))
def test_forked_children_end_well(transport, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=str(TESTS)))
    output = scripts.run(tmp_path, "torchrun", "--nproc-per-node", "2", str(script), transport)
    assert output.count("ends well") == 2

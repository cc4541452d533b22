"""The driver of `test_hosts.py`'s notebook: ranks on several hosts, which ssh starts.

python notebook_driver.py HOSTS     # {"10.99.0.1": 2, ...}, as JSON
"""

import json
import os
import signal
import sys
import threading
import time

import torch

import flex_model.notebook
from flex_model import FlexModel, HookFunction

X = torch.ones(4, 8)


def make(num_ranks):
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    if num_ranks > 1:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, init_device_mesh("cpu", (num_ranks,)), plan)
    return model


def mix(module, full, save_ctx, modules):
    return full.flip(-1) * 0.5 + full.mean(-1, keepdim=True)


def check_numbers(flex):
    hook = HookFunction("1", editing_function=mix)
    with FlexModel(make(1), expected := {}) as whole, torch.no_grad():
        handles = [each.register_forward_hook(hook) for each in (flex, whole)]
        torch.testing.assert_close(flex(X), whole(X))
        torch.testing.assert_close(flex.output_ptr["1"][0], expected["1"][0])
        for handle in handles:
            handle.remove()


def interrupt(work, most_s):
    """Ctrl-C after two seconds, which must end it in time."""
    timer = threading.Timer(2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    began = time.monotonic()
    try:
        work()
        raise AssertionError("it ended before Ctrl-C")
    except KeyboardInterrupt:
        assert time.monotonic() - began < 2 + most_s


def main():
    hosts = json.loads(sys.argv[1])
    address = next(iter(hosts))
    with flex_model.notebook.launch(hosts=hosts, grace_s=3, master_addr=address) as ranks:
        ranks.run("import os; where = os.environ['FLEX_MODEL_HOST'], os.environ['LOCAL_RANK']")
        ranks.run("places = [None] * dist.get_world_size(); dist.all_gather_object(places, where)")
        assert ranks["places"] == [(host, str(i)) for host, n in hosts.items() for i in range(n)]
        flex = ranks.wrap(ranks.run(make, len(ranks)))
        check_numbers(flex)
        flex.register_forward_hook(HookFunction("0"))
        interrupt(lambda: [flex(X) for _ in range(1_000_000)], most_s=20)
        assert "ended" not in repr(ranks)
        check_numbers(flex)
        interrupt(lambda: ranks.run("while True:\n    dist.barrier()"), most_s=30)
        ranks.restart()
        check_numbers(ranks.wrap(ranks.run(make, len(ranks))))


if __name__ == "__main__":
    main()

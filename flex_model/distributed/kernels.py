"""Whether flex_model's CUDA kernels work on a GPU.

That `_cuda` is loaded does not show it: it may have no code for the GPU, or need a newer driver.
"""

from __future__ import annotations

import functools

import torch

from flex_model import _load
from flex_model._C import GatherPlan
from flex_model.integrations.torch_private import unset_fake_temporarily

_HALVES = [(0, [0], [0], [4]), (1, [4], [0], [4])]


@functools.cache
def why_unusable(device: torch.device) -> str:
    """Return why the CUDA kernels can't be used on a GPU; empty if they can. Local.

    The first call for a GPU splits 8 bytes there, and waits for the result.
    """
    if not _load.has_cuda_kernels():
        return f"the CUDA kernels are not loaded: {_load.build_info()['loaded'].get('_cuda')}"
    plan = GatherPlan([8], [[4], [4]], _HALVES, 1)
    try:
        with unset_fake_temporarily():  # a dry run has no values
            full = torch.arange(8, dtype=torch.uint8, device="cpu").to(device)
            half = torch.ops.flex_model.split(full, plan.code, 1, [4]).tolist()
    except RuntimeError as error:
        return f"the CUDA kernels don't run on the GPU: {' '.join(str(error).split())}"
    return "" if half == [4, 5, 6, 7] else f"a CUDA kernel copied {half}, not [4, 5, 6, 7]"

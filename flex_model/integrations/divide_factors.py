"""The number by which a model divides gradients of parameters that it has summed over dp."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flex_model.distributed.mesh import Mesh
from flex_model.integrations import fsdp2
from flex_model.integrations.dtensor import is_whole_along_dp
from flex_model.integrations.fsdp1 import is_fsdp1
from flex_model.integrations.torch_private import unknown_comm_hook


class DivideFactors:
    """Reads by which numbers a model divides gradients, summed over dp. Local.

    DDP and FSDP divide by that of the ranks, or by another that FSDP2 has. Autograd sums those of a
    DTensor that is replicated along dp, and divides by nothing: it differentiates one program over
    all ranks, whose loss is the sum of the ranks' own losses, or a global one.
    """

    def __init__(self, root: nn.Module, mesh: Mesh) -> None:
        self._dp_size = mesh.dp_size
        self._fsdp2: dict[str, nn.Module] = {}
        self._average: dict[str, nn.Module] = {}  # DDP and FSDP1
        self._fixed: dict[float, str] = {}
        if mesh.dp_size == 1:
            return
        managed = fsdp2.managed_parameters(root)
        for name, module in root.named_modules():
            if fsdp2.is_fsdp2(module):
                self._fsdp2[name] = module
            elif isinstance(module, DistributedDataParallel) or is_fsdp1(module):
                self._fixed[mesh.dp_size], self._average[name] = name, module
            for leaf, parameter in module.named_parameters(recurse=False):
                if id(parameter) in managed or not is_whole_along_dp(parameter, mesh):
                    continue
                # The module may compute with another tensor, made by a property of its class, which
                # averages in its own backward (torchtitan's SimpleFSDP).
                if not hasattr(type(module), leaf):
                    self._fixed[1] = f"{name}.{leaf}".lstrip(".")

    def read(self) -> tuple[float | None, str]:
        """Return the number, None where users sum, and why there is none for hooks, or empty."""
        for name, module in self._average.items():
            if hook := unknown_comm_hook(module):
                return None, (
                    f"{type(module).__name__} {name!r} reduces gradients by {hook}, a comm hook; "
                    "whether it averages can't be known; expected no comm hook, or one of torch's "
                    "that average, as default_hooks.fp16_compress_hook; register that, or choose "
                    "hooks that only record in forward"
                )
        found = fsdp2.divide_factors(self._fsdp2)
        factors = self._fixed | {factor or self._dp_size: name for factor, name in found.items()}
        if len(factors) > 1:
            each = ", ".join(f"of {name!r} by {factor:g}" for factor, name in factors.items())
            return None, (
                f"the gradients, summed over data-parallel ranks, are divided: {each} (DTensors "
                "that are replicated along dp: by 1); hooks need one number for all; call "
                "set_gradient_divide_factor with it on every module with fully_shard"
            )
        return next(iter(factors), None), ""

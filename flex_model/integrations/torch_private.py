"""Private functions of torch that flex_model uses, each named once. Tried with torch 2.11."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.pipelining._IR import _modify_graph_op_device as modify_graph_op_device
from torch.distributed.pipelining._utils import PipeInfo
from torch.distributed.pipelining.stage import _PipelineStage as GraphStage
from torch.distributed.pipelining.stage import _RecvInfo as RecvInfo

__all__ = ["GraphStage", "PipeInfo", "RecvInfo", "modify_graph_op_device", "storage_key"]

# ---- pipelining/splitting --------------------------------------------------------------------


def storage_key(tensor: Tensor) -> int:
    """What tensors over the same memory have in common, while it lives; on meta too."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a wrapper around other tensors
        return id(tensor)

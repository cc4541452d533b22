"""The private classes of torch.distributed.pipelining, each named once. Tried with torch 2.11.

A module apart from ``torch_private``: importing torch's package takes about a second, and only
pipelines need it.
"""

from __future__ import annotations

from torch.distributed.pipelining._IR import _modify_graph_op_device as modify_graph_op_device
from torch.distributed.pipelining._utils import PipeInfo
from torch.distributed.pipelining.stage import _PipelineStage as GraphStage
from torch.distributed.pipelining.stage import _RecvInfo as RecvInfo

__all__ = ["GraphStage", "PipeInfo", "RecvInfo", "modify_graph_op_device"]

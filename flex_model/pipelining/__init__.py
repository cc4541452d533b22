"""Pipelines of ``torch.distributed.pipelining``."""

from flex_model.hooks.step import current_microbatch

__all__ = ["current_microbatch"]

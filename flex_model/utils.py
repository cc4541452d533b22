"""Release 0.1.0's import path: ``from flex_model.utils import setup_logger``."""

from flex_model.diagnostics.rank_log import setup_logger

__all__ = ["setup_logger"]

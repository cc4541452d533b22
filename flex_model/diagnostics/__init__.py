"""What goes on, and whether all is well: a log that names ranks, the last steps before an error,
``python -m flex_model doctor``.
"""

from flex_model.diagnostics.log import logger
from flex_model.diagnostics.steps import Steps

__all__ = ["Steps", "logger"]

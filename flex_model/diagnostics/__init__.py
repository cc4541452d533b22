"""Diagnostics: a log with ranks, a flight recorder of the last exchanges, a timeline, and
``python -m flex_model doctor``.
"""

from flex_model.diagnostics.log import logger
from flex_model.diagnostics.steps import Steps

__all__ = ["Steps", "logger"]

"""Diagnostics: a log with ranks, a flight recorder of the last exchanges, a timeline, and
``python -m flex_model doctor``.
"""

from flex_model.diagnostics.flight_recorder import FlightRecorder
from flex_model.diagnostics.rank_log import logger

__all__ = ["FlightRecorder", "logger"]

"""What goes on, and whether all is well: a log that names ranks, the last steps before an error,
``python -m flex_model doctor``.
"""

from flex_model.diagnostics.flight_recorder import FlightRecorder
from flex_model.diagnostics.rank_log import logger

__all__ = ["FlightRecorder", "logger"]

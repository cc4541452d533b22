"""The log: silent by default, with the rank on every line.

``FLEX_MODEL_LOG`` is a level of ``logging`` (``debug``, ``info``, ``warning``), and after a colon,
if one likes, a file, in which ``{rank}`` stands for the rank: ``info:/tmp/flex.{rank}.log``.
Without a file it goes to stderr. It is the logger ``flex_model`` of Python's ``logging``, for those
who would rather set it up themselves.
"""

from __future__ import annotations

import logging
import os

import torch.distributed as dist

logger = logging.getLogger("flex_model")
_LEVELS = ("debug", "info", "warning", "error")


def _rank() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", 0))


class _RankFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"[flex_model rank {_rank()} {self.formatTime(record)}] {record.getMessage()}"


class _File(logging.Handler):
    """A file that is named when the first line is written: the rank is not known before."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        try:
            with open(self._path.replace("{rank}", str(_rank())), "a") as file:
                file.write(self.format(record) + "\n")
        except OSError:
            self.handleError(record)


def set_up(setting: str) -> None:
    """As ``FLEX_MODEL_LOG`` says. ValueError for a level that there is not."""
    level, _, path = setting.partition(":")
    if level.lower() not in _LEVELS:
        raise ValueError(
            f"FLEX_MODEL_LOG must begin with {', '.join(_LEVELS)}, and may go on with a colon and "
            f"a file; got {setting!r}"
        )
    handler = _File(path) if path else logging.StreamHandler()
    handler.setFormatter(_RankFormatter())
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


if os.environ.get("FLEX_MODEL_LOG"):
    set_up(os.environ["FLEX_MODEL_LOG"])

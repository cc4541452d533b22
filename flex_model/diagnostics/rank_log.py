"""The log of flex_model: silent by default, with the rank on every line.

``FLEX_MODEL_LOG`` is a level of ``logging`` (``debug``, ``info``, ``warning``), optionally followed
by a colon and a file, in which ``{rank}`` is replaced by the rank: ``info:/tmp/flex.{rank}.log``.
The default is stderr. The logger is ``flex_model`` of Python's ``logging``, which can also be
configured directly.
"""

from __future__ import annotations

import logging
import os

import torch.distributed as dist

logger = logging.getLogger("flex_model")
_LEVELS = ("debug", "info", "warning", "error", "critical")


def _rank() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", 0))


class _RankFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"[{record.name} rank {_rank()} {self.formatTime(record)}] {record.getMessage()}"


class _File(logging.Handler):
    """A log file whose name is formatted at each line: the rank is not known at the start."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        try:
            with open(self._path.replace("{rank}", str(_rank())), "a") as file:
                file.write(self.format(record) + "\n")
        except OSError:
            self.handleError(record)


def setup_logger(level: str) -> None:
    """Write the library's log messages to stderr, from ``level`` on, with the rank. Local.

    Example::

        setup_logger("debug")        # as FLEXMODEL_DEBUG=debug in the environment does at import

    Only the logger ``"flex_model"`` is touched, never the root logger: other libraries log as
    before, and these messages are not passed on to the root's handlers, which would write them a
    second time. A second call changes the level.

    Args:
        level: "debug", "info", "warning", "error" or "critical", in any case; with a file behind
            it as in ``FLEX_MODEL_LOG``.

    Raises:
        ValueError: no such level.
    """
    name, _, path = str(level).strip().partition(":")
    if name.lower() not in _LEVELS:
        raise ValueError(
            f"FLEX_MODEL_LOG (FLEXMODEL_DEBUG, setup_logger) must be one of {', '.join(_LEVELS)}, "
            f"optionally with a colon and a file; got {level!r}"
        )
    handler = _File(path) if path else logging.StreamHandler()
    handler.setFormatter(_RankFormatter())
    logger.handlers[:] = [handler]
    logger.setLevel(name.upper())
    logger.propagate = False


if os.environ.get("FLEX_MODEL_LOG"):
    setup_logger(os.environ["FLEX_MODEL_LOG"])

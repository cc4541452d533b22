"""Release 0.1.0's ``setup_logger``."""

from __future__ import annotations

import logging

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_FORMAT = "%(asctime)s | %(rank)s%(name)s | %(funcName)s | %(message)s"


class _Handler(logging.StreamHandler):
    """To stderr; tells the rank, as it is when the message is written."""

    def format(self, record: logging.LogRecord) -> str:
        import torch.distributed as dist  # not before it is needed: this module is imported first

        known = dist.is_available() and dist.is_initialized()
        record.rank = f"rank {dist.get_rank()} | " if known else ""
        return super().format(record)


def setup_logger(level: str | int) -> None:
    """Write the library's log messages to stderr, from ``level`` on, with the rank where there are
    several.

    Example::

        setup_logger("debug")        # as FLEXMODEL_DEBUG=debug in the environment does at import

    Only the logger ``"flex_model"`` is touched, never the root logger: other libraries log as
    before, and these messages are not passed on to the root's handlers, which would write them a
    second time. A second call changes the level. Local.

    Args:
        level: "debug", "info", "warning", "error" or "critical", in any case; or a number as in
            ``logging``.

    Raises:
        ValueError: no such level.
    """
    number = _level(level)
    logger = logging.getLogger("flex_model")
    for handler in list(logger.handlers):
        if isinstance(handler, _Handler):
            logger.removeHandler(handler)
    handler = _Handler()  # a new one each time, for stderr may have been replaced since
    handler.setFormatter(logging.Formatter(_FORMAT))
    logger.addHandler(handler)
    logger.setLevel(number)
    logger.propagate = False


def _level(level: object) -> int:
    if isinstance(level, int) and not isinstance(level, bool) and level >= 0:
        return level
    if isinstance(level, str):
        text = level.strip().upper()
        if text in _LEVELS:
            return getattr(logging, text)
        if text.isdecimal():
            return int(text)
    raise ValueError(
        f"setup_logger (or FLEXMODEL_DEBUG): expected one of {', '.join(_LEVELS)} or a number, "
        f"got {level!r}"
    )

"""Release 0.1.0's ``setup_logger``."""

import logging

import torch.distributed as dist

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_FORMAT = "%(asctime)s | %(rank)s%(name)s | %(funcName)s | %(message)s"


class _Rank:
    """Prints as the rank that the process has at that time."""

    def __str__(self) -> str:
        has_rank = dist.is_available() and dist.is_initialized()
        return f"rank {dist.get_rank()} | " if has_rank else ""


class _Handler(logging.StreamHandler):
    """The handler of ``setup_logger``, which a second call replaces."""


def setup_logger(level: str) -> None:
    """Write the library's log messages to stderr, from ``level`` on, with the rank where there are
    several.

    Example::

        setup_logger("debug")        # as FLEXMODEL_DEBUG=debug in the environment does at import

    Only the logger ``"flex_model"`` is touched, never the root logger: other libraries log as
    before, and these messages are not passed on to the root's handlers, which would write them a
    second time. A second call changes the level. Local.

    Args:
        level: "debug", "info", "warning", "error" or "critical", in any case.

    Raises:
        ValueError: no such level.
    """
    if not isinstance(level, str) or level.strip().upper() not in _LEVELS:
        raise ValueError(
            f"setup_logger (or FLEXMODEL_DEBUG): expected one of {', '.join(_LEVELS)}, "
            f"got {level!r}"
        )
    logger = logging.getLogger("flex_model")
    handler = _Handler()  # a new one each time, for stderr may have been replaced since
    handler.setFormatter(logging.Formatter(_FORMAT, defaults={"rank": _Rank()}))
    others = [other for other in logger.handlers if not isinstance(other, _Handler)]
    logger.handlers[:] = [*others, handler]
    logger.setLevel(level.strip().upper())
    logger.propagate = False

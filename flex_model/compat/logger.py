"""Release 0.1.0's ``setup_logger``."""

from flex_model.diagnostics import rank_log


def setup_logger(level: str) -> None:
    """Write the library's log messages to stderr, from ``level`` on, with the rank. Local.

    Example::

        setup_logger("debug")        # as FLEXMODEL_DEBUG=debug in the environment does at import

    Only the logger ``"flex_model"`` is touched, never the root logger: other libraries log as
    before, and these messages are not passed on to the root's handlers, which would write them a
    second time. A second call changes the level.

    Args:
        level: "debug", "info", "warning", "error" or "critical", in any case.

    Raises:
        ValueError: no such level.
    """
    rank_log.set_up(level)

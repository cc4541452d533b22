"""Which parameters of a test are in `make test`, and which in `make grid` alone."""

from collections.abc import Iterable
from typing import Any

import pytest


def grid_but(values: Iterable[Any], *here: Any) -> list[Any]:
    """Return the values, of which only those ``here`` run in ``make test``.

    Example::

        @pytest.mark.parametrize("kind", grid_but(KINDS, "Schedule1F1B"))
    """
    values = list(values)
    missing = [one for one in here if one not in values]
    assert here and not missing, f"no such parameters: {missing}"
    return [
        one if one in here else pytest.param(*_arguments(one), marks=pytest.mark.grid)
        for one in values
    ]


def _arguments(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)

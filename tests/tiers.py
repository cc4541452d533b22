"""Which parameters of a test are in `make test` or in `make grid` alone, and on how many ranks."""

from collections.abc import Iterable
from typing import Any

import pytest

import models

WAYS = {"one": models.ONE_RANK, **models.TWO_RANKS}
FOUR_RANKS = {f"{name} of 4" if name in WAYS else name: w for name, w in models.FOUR_RANKS.items()}
WAYS |= FOUR_RANKS


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


def ways(*names: str, grid: Iterable[str] = (), **options: Any) -> list[Any]:
    """Return the `models.Parallelism` of these names, each a parameter on as many ranks as it has.

    Example::

        @pytest.mark.parametrize("way", ways("one", "tp", grid=["tp of 4"], timeout=120))
        def test_x(way):
            check(way.shard(model), **way.sizes)
    """
    found = []
    for name in (*names, *grid):
        way = WAYS[name]
        number = way.tp * way.dp
        marks = [pytest.mark.ranks(number, **options)] if number > 1 else []
        marks += [pytest.mark.grid] if name not in names else []
        found.append(pytest.param(way, marks=marks, id=name))
    return found


def on_ranks(number: int, *values: Any, grid: Iterable[Any] = (), **options: Any) -> list[Any]:
    """Return the values as parameters on ``number`` ranks; those of ``grid`` in that tier.

    Example::

        @pytest.mark.parametrize("kind", on_ranks(2, *KINDS) + on_ranks(4, grid=KINDS))
    """
    found = []
    for value in (*values, *grid):
        marks = [pytest.mark.ranks(number, **options)]
        marks += [pytest.mark.grid] if value not in values else []
        name = value if isinstance(value, str) else value.__name__
        found.append(pytest.param(value, marks=marks, id=f"{name} of 4" if number == 4 else name))
    return found


def _arguments(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)

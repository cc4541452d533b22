"""How the ranks of a pipeline agree: each computes its part, all parts are compared, and an error
of one rank is raised on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flex_model.distributed.communicator import Communicator
from flex_model.distributed.tensor_dicts import exchange_json
from flex_model.errors import HookError, HookMismatchError, agreed, see

_ERRORS = {kind.__name__: kind for kind in (ValueError, TypeError, HookError, HookMismatchError)}


def gather_checked(
    communicator: Communicator,
    moment: str,
    compute: Callable[[], Any],
    equal: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Gather what ``compute`` returns on each rank, as JSON. Collective.

    Args:
        moment: The purpose of the exchange, for messages.
        equal: What must be equal on all ranks, by its name in messages.

    Raises:
        HookMismatchError: ranks differ in ``equal``.
        ValueError, TypeError, HookError: ``compute`` failed on some rank. All are raised on every
            rank.
    """
    value, error = None, None
    try:
        value = compute()
    except (ValueError, TypeError, IndexError, HookError) as failure:
        error = [type(failure).__name__, str(failure)]
    gathered = exchange_json(communicator, [equal, value, error], moment)
    for name in equal or ():
        check_equal([of_rank[name] for of_rank, _, _ in gathered], name)
    _raise_errors([of_rank for _, _, of_rank in gathered])
    return [of_rank for _, of_rank, _ in gathered]


def check_equal(values: list[Any], name: str) -> None:
    """HookMismatchError, on every rank, where the gathered values differ."""
    differ = [rank for rank, value in enumerate(values) if value != values[0]]
    if differ:
        listed = "; ".join(f"rank {rank}: {values[rank]}" for rank in [0, *differ[:3]])
        raise agreed(
            HookMismatchError(
                f"ranks differ in {name}: {listed}. Every rank makes the same calls with the "
                f"same settings ({see('ranks-differ')})"
            )
        )


def _raise_errors(errors: list[Any]) -> None:
    found = [(rank, *error) for rank, error in enumerate(errors) if error]
    if not found:
        return
    texts = list(dict.fromkeys(text for _, _, text in found))
    where = "" if len(found) == len(errors) else f" (on rank {found[0][0]})"
    raise agreed(_ERRORS.get(found[0][1], ValueError)(f"{'; '.join(texts)}{where}"))

"""How ranks agree: each computes its part, all parts are compared, and an error of one rank is
raised on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flex_model.distributed.communicator import Communicator
from flex_model.distributed.tensor_dicts import exchange_json
from flex_model.errors import HookError, HookMismatchError, agreed, see

_KINDS = (ValueError, TypeError, IndexError, RuntimeError, HookError, HookMismatchError)
_ERRORS = {kind.__name__: kind for kind in (*_KINDS, OSError, FileNotFoundError, PermissionError)}


def gather_checked(
    communicator: Communicator,
    moment: str,
    compute: Callable[[], Any],
    equal: Mapping[str, Any] | None = None,
    section: str = "",
) -> list[Any]:
    """Gather what ``compute`` returns on each rank, as JSON. Collective.

    Args:
        moment: The purpose of the exchange, for messages.
        equal: What must be equal on all ranks, by its name in messages.
        section: The section of docs/errors.md that explains the errors of ``compute``.

    Raises:
        HookMismatchError: ranks differ in ``equal``.
        Exception: ``compute`` failed on some rank; of the same kind if that is a common one, else
            RuntimeError. All are raised on every rank.
    """
    value, error, cause = None, None, None
    try:
        value = compute()
    except Exception as failure:  # of any kind: the other ranks wait for the report
        cause, kinds = failure, [kind.__name__ for kind in type(failure).__mro__]
        known = next((kind for kind in kinds if kind in _ERRORS), None)
        error = [known or "RuntimeError", str(failure) if known else f"{kinds[0]}: {failure}"]
    gathered = exchange_json(communicator, [equal, value, error], moment)
    for name in equal or ():
        check_equal([of_rank[name] for of_rank, _, _ in gathered], name)
    found = [(rank, *of_rank) for rank, (_, _, of_rank) in enumerate(gathered) if of_rank]
    if found:
        texts = list(dict.fromkeys(text for _, _, text in found))
        where = "" if len(found) == len(gathered) else f" (on rank {found[0][0]})"
        where += f"; {see(section)}" if section else ""
        raise agreed(_ERRORS[found[0][1]](f"{'; '.join(texts)}{where}")) from cause
    return [of_rank for _, of_rank, _ in gathered]


def check_equal(values: list[Any], name: str) -> None:
    """HookMismatchError, on every rank, where the gathered values differ."""
    first = repr(values[0])  # NaN is equal to NaN
    differ = [rank for rank, v in enumerate(values) if v != values[0] and repr(v) != first]
    if differ:
        listed = "; ".join(f"rank {rank}: {values[rank]}" for rank in [0, *differ[:3]])
        raise agreed(
            HookMismatchError(
                f"ranks differ in {name}: {listed}. Every rank makes the same calls with the "
                f"same settings ({see('ranks-differ')})"
            )
        )

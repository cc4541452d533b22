"""Refuses copies of models that transformers has sharded: it replaces ``forward`` of their modules
by functions, which ``copy.deepcopy`` does not copy, so a copy computes with the weights of the
model that it was copied from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from flex_model.names import clean

_OF = "transformers."  # the package whose functions replace a forward


def check_modules(root: nn.Module) -> None:
    """Raise ValueError if a module calls the forward of one that it was copied from. Local."""
    for name, module in root.named_modules():
        for called in _called_by(vars(module).get("forward")):
            if called is not module and type(called) is type(module):
                raise ValueError(
                    f"FlexModel: expected a model with weights of its own, got one in which "
                    f"{clean(root, name)!r} computes with those of another: a copy.deepcopy of a "
                    "model that transformers has sharded does not copy its forwards; load the "
                    "model twice with from_pretrained(...)"
                )


def _called_by(forward: Any) -> Iterator[nn.Module]:
    """Yield the modules whose forward is called by a function of transformers that replaces one."""
    functions, seen = [forward], set()
    while functions:
        function = functions.pop()
        if id(function) in seen or not str(getattr(function, "__module__", "")).startswith(_OF):
            continue
        seen.add(id(function))
        for cell in getattr(function, "__closure__", None) or ():
            try:
                value = cell.cell_contents
            except ValueError:  # empty: not assigned yet
                continue
            owner = getattr(value, "__self__", None)
            if isinstance(owner, nn.Module) and value.__name__ == "forward":
                yield owner
            else:
                functions.append(value)

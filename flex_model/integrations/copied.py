"""Refuses copies of models that transformers has sharded: it replaces ``forward`` of their modules
by functions, which ``copy.deepcopy`` does not copy, so a copy computes with the weights of the
model that it was copied from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from flex_model.names import clean


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
    if not str(getattr(forward, "__module__", "")).startswith("transformers."):
        return
    for cell in getattr(forward, "__closure__", None) or ():
        owner = getattr(cell.cell_contents, "__self__", None)
        if isinstance(owner, nn.Module) and cell.cell_contents.__name__ == "forward":
            yield owner
        else:
            yield from _called_by(cell.cell_contents)

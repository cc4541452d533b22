"""Rows of what experts compute inside: their units, the slots' outputs and weights."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from experts_by_hand import ByHand
from frameworks import Pair

SITES = {
    "units": "units",
    "units of two experts": "units.of_1_3",
    "outputs": "outputs",
    "weights": "weights",
}


@contextlib.contextmanager
def inside(tmp_path: Path, build: Callable) -> Iterator[Pair]:
    """A row of a mixture, whose experts the oracle computes by hand, with edits inside of one
    block.
    """
    with build(tmp_path) as pair:
        oracle, edited = copy.deepcopy(pair.oracle), pair.sites["experts"]
        blocks = [name for name, _ in oracle.named_modules() if name.endswith(".mlp.experts")]
        for name in blocks:
            ByHand.put_in(oracle.get_submodule(name), chosen=(1, 3))
        yield replace(
            pair,
            oracle=oracle,
            state=lambda flex: [flex.experts(name) for name in blocks],
            sites={what: f"{edited}.slots.{site}" for what, site in SITES.items()},
            parameters=(f"{edited}.down_proj",),
        )

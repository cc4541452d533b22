"""Batches of patched runs: the inputs' rows are repeated, and each copy of them carries a patch of
its own; and the file by which an interrupted map of patches is resumed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flex_model import pytree
from flex_model.distributed.values import fingerprint
from flex_model.editing.region import Region
from flex_model.editing.runs import Inputs, Runs, Site, as_arguments, check_left_out
from flex_model.errors import agreed
from flex_model.records.store.files import write_whole
from flex_model.selection.selectors import SelectionArguments, Selector


@dataclass(frozen=True)
class Copies:
    """Copies of the rows of a batch, in one batch.

    Attributes:
        number: How many there are.
        num_rows: The rows of a copy on each data-parallel rank.
        num_ranks: The number of these ranks.
        dim: The dim of the inputs that holds rows.
    """

    number: int
    num_rows: int = 0
    num_ranks: int = 1
    dim: int = 0

    @staticmethod
    def of(runs: Runs, inputs: Inputs, sites: Sequence[Site], number: int) -> Copies:
        """Plan the copies of these inputs. Collective.

        Raises:
            ValueError: rows can't be repeated here; on every rank.
        """
        dim = runs.rows_dim
        check_left_out(sites, "rows", "batch: rows are repeated")
        tensors = pytree.flatten(as_arguments(inputs))[0]
        found = runs.exchange(tensors[0].shape[dim] if tensors and tensors[0].dim() > dim else 0)
        if len(set(found)) > 1 or not found[0]:
            raise agreed(
                ValueError(
                    f"batch: the ranks' first input has {found} rows at dim {dim}; rows are "
                    "repeated where all ranks have the same number: pad the batch, or leave out "
                    "batch="
                )
            )
        return Copies(number, found[0], runs.dp_size, dim)

    def inputs(self, inputs: Inputs) -> Inputs:
        """Return the inputs with their rows repeated: of the tensors that have as many."""
        if self.number == 1:
            return inputs
        leaves, spec = pytree.flatten((inputs,))
        return pytree.unflatten([self._repeated(leaf) for leaf in leaves], spec)[0]

    def _repeated(self, leaf: Tensor) -> Tensor:
        if leaf.dim() <= self.dim or leaf.shape[self.dim] != self.num_rows:
            return leaf
        return torch.cat([leaf] * self.number, self.dim)

    def rows(self, copy: int) -> list[int]:
        """Return the rows of a copy in the whole batch, in which ranks follow each other."""
        starts = ((rank * self.number + copy) * self.num_rows for rank in range(self.num_ranks))
        return [start + row for start in starts for row in range(self.num_rows)]

    @property
    def all_rows(self) -> Tensor:
        """The rows of each copy: ``(copies, rows)``."""
        return torch.tensor([self.rows(copy) for copy in range(self.number)], device="cpu")

    def where(self, site: Site, position: Selector, copy: int) -> SelectionArguments:
        """Return what a patch selects: a position of the site, in a copy."""
        where: SelectionArguments = {**site.where, "positions": position}
        return where if self.number == 1 else {**where, "rows": self.rows(copy)}

    def take(self, output: Tensor, site: Site, copy: int) -> Tensor:
        """Return the rows of a copy of the full output."""
        if self.number == 1:
            return output
        dim = self.dim_of_rows(output, site)
        return output.index_select(dim, torch.tensor(self.rows(copy), device="cpu"))

    def dim_of_rows(self, full: Tensor, site: Site) -> int:
        """Return the dim of a full tensor that holds the rows of all copies.

        Raises:
            ValueError: it has another size, as where a module gets all positions of all rows in one
                dim.
        """
        dim = Region(**site.where).dim("rows", full.shape)
        expected = self.number * self.num_rows * self.num_ranks
        if full.shape[dim] != expected:
            raise ValueError(
                f"batch: the tensor {tuple(full.shape)} of {site.module!r} should have {expected} "
                f"rows at dim {dim}; choose a module whose tensor has a dim of rows, and name it: "
                "Site(..., where={'dims': {'rows': ...}})"
            )
        return dim


class Table:
    """The values of patched runs so far, kept in a file by rank 0.

    Args:
        path: The file; None: they are not kept.
        key: Describes the experiment.
    """

    def __init__(self, runs: Runs, path: str | Path | None, key: dict[str, Any]) -> None:
        self._runs, self._key = runs, key
        self._path = None if path is None else Path(path)
        self.values: list[float] = []
        self._ends: list[float] | None = None
        if path is not None:
            self.values = runs.on_rank_0(self._open, ValueError)

    def _open(self) -> list[float]:
        """Return the values that the file has, and write them again: an error comes before all
        runs.
        """
        try:
            self.values = self._read()
            self._write()
        except OSError as error:
            raise ValueError(
                f"resume: rank 0 can't read and write {self._path} ({error}); give a file in a "
                "folder that exists, and that it may write to"
            ) from None
        return self.values

    def _read(self) -> list[float]:
        assert self._path is not None
        if not self._path.exists():
            return []
        try:
            kept = json.loads(self._path.read_text())
            of, values, self._ends = dict(kept["of"]), list(kept["values"]), kept["metric"]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"resume: {self._path} is no file of patched runs, or is damaged ({error!r}); give "
                "another file, or remove it"
            ) from None
        self._check({name for name, value in self._key.items() if of.get(name) != value})
        return values

    def _check(self, differing: set[str]) -> None:
        if differing:
            raise ValueError(
                f"resume: {self._path} has the values of another experiment, with other "
                f"{' and '.join(sorted(differing))}; give another file, or remove it"
            )

    def begin(self, ends: list[float]) -> None:
        """Note the metric of the two runs without patches. Collective.

        Raises:
            ValueError: the values of the file were made with another; on every rank.
        """

        def compare() -> None:
            # Another sharding adds up in another order.
            kept, new = torch.tensor([self._ends or ends, ends], device="cpu")
            effect = float(new.diff().abs().nan_to_num(0, 0))
            if not torch.allclose(kept, new, 0, 1e-3 * effect, equal_nan=True):
                self._check({"metric, weights or hooks"})
            self._ends = ends

        self._runs.on_rank_0(compare, ValueError)

    def add(self, values: list[float]) -> None:
        """Add values; on rank 0, which has them, write the file. A failure is raised later."""
        self.values += values
        if self._path is not None:
            self._runs.attempt(self._write)

    def _write(self) -> None:
        assert self._path is not None
        text = json.dumps({"of": self._key, "metric": self._ends, "values": self.values})
        write_whole(self._path, [text.encode()])


def described(inputs: Inputs) -> list[str]:
    """Return the dtype, the shape and a hash of each tensor in inputs, and the plain settings."""
    args, kwargs = as_arguments(inputs)
    leaves = pytree.flatten((args, kwargs))[0]
    found = [f"{leaf.dtype} {tuple(leaf.shape)} {fingerprint(leaf)}" for leaf in leaves]
    given = [*enumerate(args), *kwargs.items()]
    return found + [f"{k}={v!r}" for k, v in given if isinstance(v, (bool, int, float, str))]

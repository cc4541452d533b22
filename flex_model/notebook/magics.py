"""``%%px`` cells that end on all ranks when one of them fails."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from IPython import get_ipython
from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

if TYPE_CHECKING:
    from flex_model.notebook.driver import Ranks


@magics_class
class RanksMagics(Magics):
    """The magics of `Ranks`, in place of ipyparallel's of the same name."""

    def __init__(self, shell: Any, ranks: Ranks) -> None:
        super().__init__(shell)
        self._ranks = ranks

    @no_var_expand
    @line_cell_magic
    @magic_arguments()
    @argument("-t", "--targets", help="the ranks that run it, as 0 or 0,2 (default: all)")
    def px(self, line: str, cell: str | None = None) -> None:
        """Run the cell, or the rest of the line, on all ranks."""
        if cell is None:
            self._ranks.run_cell(line)
            return
        chosen = parse_argstring(self.px, line).targets
        self._ranks.run_cell(cell, None if chosen is None else [*map(int, chosen.split(","))])


def register(ranks: Ranks) -> None:
    """Have ``%px`` and ``%%px`` of this IPython session, if there is one, run on these ranks."""
    shell = get_ipython()
    if shell is not None:
        shell.register_magics(RanksMagics(shell, ranks))

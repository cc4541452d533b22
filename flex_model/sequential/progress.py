"""The progress bar of a sequential run."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Any

from flex_model.sequential.loading import WeightLoader
from flex_model.sequential.targets import Target

_MIB = 2**20


class Progress:
    """A bar on stderr that counts steps in all windows, with the batches that are done, the loads
    and the bytes read; nothing unless ``is_shown``. A context.

    How far there is to go, and how long it takes, is known where ``batches`` has a length, and for
    models that call each target once.

    Raises:
        ImportError: a bar is asked for, and tqdm isn't there.
    """

    def __init__(
        self,
        is_shown: bool,
        batches: Iterable[Any],
        window: int | None,
        targets: list[Target],
        loader: WeightLoader | None,
    ) -> None:
        self._bar: Any = None
        self._loader = loader
        self._num_delivered = 0
        self._num_batches = len(batches) if isinstance(batches, Sized) else None
        if not is_shown:
            return
        try:
            from tqdm import tqdm
        except ImportError as error:
            raise ImportError(
                "sequential.run: progress=True shows a bar of tqdm, which is not installed; "
                "pip install tqdm, or use on_target_end"
            ) from error
        num_steps, total = targets[-1].step + 1, None
        if self._num_batches is not None:
            total = num_steps * -(-self._num_batches // (window or max(1, self._num_batches)))
        self._bar = tqdm(total=total, desc="sequential run", unit=" steps", dynamic_ncols=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def step(self) -> None:
        """One more step was taken."""
        if self._bar is not None:
            self._bar.update()
            self._tell()

    def delivered(self, num_batches: int = 1) -> None:
        """More batches are done."""
        self._num_delivered += num_batches
        if self._bar is not None:
            self._tell()

    def _tell(self) -> None:
        known = "" if self._num_batches is None else f"/{self._num_batches}"
        facts = {"batches": f"{self._num_delivered}{known}"}
        if self._loader is not None:
            facts["loads"] = str(sum(self._loader.loads.values()))
            facts["read"] = f"{self._loader.bytes_read / _MIB:.0f} MiB"
        self._bar.set_postfix(facts, refresh=False)

"""The progress bar of a sequential run."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from contextlib import AbstractContextManager
from typing import Any

from flex_model.sequential.targets import Target
from flex_model.sequential.weights.loader import WeightLoader


class Progress(AbstractContextManager["Progress"]):
    """A bar on stderr that counts steps in all windows, with the batches that are done, the loads
    and the bytes read; nothing unless ``is_shown``.

    The total, and so the remaining time, is known if ``batches`` has a length, for models that call
    each target once.

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
        self._total = ""
        if not is_shown:
            return
        try:
            from tqdm import tqdm
        except ImportError as error:
            raise ImportError(
                "sequential.run: progress=True shows a bar of tqdm, which is not installed; "
                "pip install tqdm, or use on_target_end"
            ) from error
        num_steps = None
        if isinstance(batches, Sized):
            self._total = f"/{len(batches)}"
            num_windows = -(-len(batches) // (window or max(1, len(batches))))
            num_steps = (targets[-1].step + 1) * num_windows
        self._bar = tqdm(total=num_steps, desc="sequential run", unit=" steps", dynamic_ncols=True)

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def step(self) -> None:
        """Count one more step."""
        if self._bar is not None:
            self._bar.update()
        self.deliver(0)

    def deliver(self, num_batches: int = 1) -> None:
        """Count more batches that are done."""
        self._num_delivered += num_batches
        if self._bar is None:
            return
        facts = {"batches": f"{self._num_delivered}{self._total}"}
        if self._loader is not None:
            facts["loads"] = str(sum(self._loader.loads.values()))
            facts["read"] = f"{self._loader.bytes_read / 2**20:.0f} MiB"
        self._bar.set_postfix(facts, refresh=False)
